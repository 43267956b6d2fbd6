"""Where the time of an update goes, by kind of operation."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from td3_robot.bench import harness

_BLOCKS = 10

KINDS = {
    "gemm": ("mm", "addmm", "linear", "bmm", "baddbmm", "matmul"),
    "adam": ("fused_adam",),
    "relu": ("relu", "threshold", "clamp_min"),
    "layer_norm": ("layer_norm",),
    "copies": ("copy", "to_copy", "cat", "clone", "lerp", "fill", "zero"),
}
"""Kind, and how the names of its torch operators begin, without namespace and leading underscores."""
OTHER, PYTHON = "other", "python"


class _Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the processor time of every operator that this thread calls.

    torch's own profiler measures wall-clock time, which includes the time that other processes have the core.

    Attributes:
        calls: microseconds of each call, by operator name and the shapes of its inputs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[tuple[str, tuple[Any, ...]], list[float]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        begin = time.thread_time_ns()
        result = func(*args, **(kwargs or {}))
        taken = time.thread_time_ns() - begin
        self.calls[func.name(), tuple(_shapes(args))].append(taken / 1e3)
        return result


def _shapes(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield tuple(value.shape)
        elif isinstance(value, (list, tuple)):
            yield tuple(_shapes(value))


def profile(run: Callable[[int], None], updates: int) -> dict[str, Any]:
    """Measure the processor time of an update, and of each kind of operator in it, in microseconds.

    An operator's time is the median over all calls with inputs of the same shapes, so one disturbed call changes
    nothing. ``python`` is the rest of an update without profiling: sampling in numpy, and Python between the operators.
    It can be negative on a busy machine, where operators take longer while they are profiled.

    Args:
        run: makes that many updates in the calling thread alone.
        updates: how many to time, and how many to profile, at least 10.
    """
    block = updates // _BLOCKS
    watch = _Stopwatch()

    def timed() -> float:
        begin = time.thread_time()
        run(block)
        return (time.thread_time() - begin) / block

    def profiled() -> float:
        with watch:
            run(block)
        return 0.0

    run(block)
    update = 1e6 * statistics.median(harness.take_turns({"timed": timed, "profiled": profiled}, _BLOCKS)["timed"])
    by_kind = dict.fromkeys((*KINDS, OTHER), 0.0)
    for (name, _), times in watch.calls.items():
        by_kind[kind_of(name)] += statistics.median(times) * len(times) / (block * _BLOCKS)
    return {"update_us": update, "by_kind_us": by_kind | {PYTHON: update - sum(by_kind.values())}}


def kind_of(operator: str) -> str:
    """Return the kind of an operator, given its full name, such as ``aten::addmm.out``."""
    name = operator.rpartition("::")[2].lstrip("_").removeprefix("native_").removeprefix("foreach_")
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), OTHER)
