"""Where the time of an update goes, by kind of operation."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_BLOCKS = 10

KINDS = {
    "gemm": ("mm", "addmm", "linear", "bmm", "baddbmm", "matmul"),
    "adam": ("fused_adam",),
    "relu": ("relu", "threshold", "clamp_min"),
    "layer_norm": ("layer_norm",),
    "copies": ("copy", "to_copy", "cat", "clone", "lerp", "fill", "zero"),
}
"""Kind: the beginnings of the names of torch's operators, without namespace and leading underscores."""
OTHER, PYTHON = "other", "python"


class _Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the processor time of every operator that this thread calls, by name and the sizes of its inputs.

    Not torch's own profiler, whose time goes on while other processes have the core.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[tuple[str, tuple[Any, ...]], list[float]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        begin = time.thread_time_ns()
        result = func(*args, **(kwargs or {}))
        taken = time.thread_time_ns() - begin
        self.calls[func.name(), tuple(_sizes(args))].append(taken / 1e3)
        return result


def _sizes(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield tuple(value.shape)
        elif isinstance(value, (list, tuple)):
            yield tuple(_sizes(value))


def profile(run: Callable[[int], None], updates: int) -> dict[str, Any]:
    """The microseconds of processor time of an update, and those of each kind of operator in it.

    An operator's time is the median over all calls with inputs of the same shapes, so that a disturbance of one of them
    counts for nothing. ``python`` is what remains of an update that is not profiled: sampling in numpy, and Python
    between the operators; on a machine so busy that operators took longer while they were profiled, less than nothing.

    Args:
        run: makes that many updates in the calling thread alone.
        updates: how many to time, and how many to profile, at least 10.
    """
    block = updates // _BLOCKS
    run(block)
    blocks = []
    watch = _Stopwatch()
    for _ in range(_BLOCKS):  # in turns, so that both meet the same load
        begin = time.thread_time()
        run(block)
        blocks.append((time.thread_time() - begin) / block)
        with watch:
            run(block)
    update = 1e6 * statistics.median(blocks)
    by_kind = dict.fromkeys((*KINDS, OTHER), 0.0)
    for (name, _), times in watch.calls.items():
        by_kind[kind_of(name)] += statistics.median(times) * len(times) / (block * _BLOCKS)
    return {"update_us": update, "by_kind_us": by_kind | {PYTHON: update - sum(by_kind.values())}}


def kind_of(operator: str) -> str:
    """The kind of an operator, by its full name: ``aten::addmm.out``, ``mkldnn::_linear_pointwise``."""
    name = operator.rpartition("::")[2].lstrip("_").removeprefix("native_").removeprefix("foreach_")
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), OTHER)
