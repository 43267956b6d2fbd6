"""Where the time of an update goes, by kind of operation."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

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


def profile(run: Callable[[int], None], updates: int) -> dict[str, Any]:
    """The microseconds of processor time of an update, and those of each kind of operator in it.

    An operator's time is its own, without that of operators it calls: the median over all calls with inputs of the same
    shapes, so that a pause in one of them counts for nothing. ``python`` is what remains of an update that is not
    profiled: sampling in numpy, and Python between the operators.

    Args:
        run: makes that many updates in the calling thread alone.
        updates: how many to time, and how many to profile, at least 10.
    """
    block = updates // _BLOCKS
    run(block)
    blocks = []
    for _ in range(_BLOCKS):
        begin = time.thread_time()
        run(block)
        blocks.append((time.thread_time() - begin) / block)
    update = 1e6 * statistics.median(blocks)
    with torch_profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        run(updates)
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in record.events():
        calls[event.name, str(event.input_shapes)].append(event.self_cpu_time_total)
    by_kind = dict.fromkeys((*KINDS, OTHER), 0.0)
    for (name, _), times in calls.items():
        by_kind[kind_of(name)] += statistics.median(times) * len(times) / updates
    return {"update_us": update, "by_kind_us": by_kind | {PYTHON: max(0.0, update - sum(by_kind.values()))}}


def kind_of(operator: str) -> str:
    """The kind of an operator, named as by the profiler: ``aten::addmm``, ``mkldnn::_linear_pointwise``."""
    name = operator.rpartition("::")[2].lstrip("_").removeprefix("native_").removeprefix("foreach_")
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), OTHER)
