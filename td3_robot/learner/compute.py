"""How the learner uses the machine: the device, the number format of matrix products, and threads."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import ConfigError

Precision = Literal["fp32", "bf16"]
ThreadsIn = Literal["critics", "operators"]
Result = TypeVar("Result")


CPU = torch.device("cpu")
_LARGE = 1 << 20  # elements, of an operator that torch shares out among its threads


def device(wanted: str) -> torch.device:
    """The device to learn on: as wanted, or for ``auto`` a CUDA GPU where torch sees one and else the processor.

    Raises:
        ConfigError: cuda is wanted and torch sees no GPU.
    """
    seen = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not seen:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ConfigError(
            f"learner.device is 'cuda': torch {torch.__version__} (built {built}) sees no GPU; allowed here: cpu, auto"
        )
    return torch.device("cuda") if seen else CPU


def bf16_problem(device: torch.device = CPU) -> str | None:
    """Why learning in bf16 would be slower here than in fp32; None where it is faster.

    There are processors with AVX-512 BF16 that multiply slower with it, so that is measured.
    """
    if (lack := _bf16_lack(device)) or device.type != "cpu":
        return lack
    speed = bf16_speed()
    return None if speed > 1 else f"processor multiplies {speed:.2f} times as fast with it as in fp32 (measured)"


def _bf16_lack(device: torch.device) -> str | None:
    """What a device lacks for bf16; None for nothing, which is the same each time it is asked.

    A processor needs AVX-512 BF16 or AMX, an NVIDIA GPU compute capability 8.0 (Ampere): others emulate it.
    """
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
        return None if fast else "GPU is older than Ampere and would only emulate it"
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    has = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has or not any(check is not None and check() for check in checks):
        return "processor has neither AVX-512 BF16 nor AMX and would only emulate it"
    return None


@functools.cache
def bf16_speed() -> float:
    """How many times as fast as in fp32 this processor makes a matrix product of an update in bf16; takes some 30 ms.

    By processor time, and the shortest of several: what else runs on the machine should not decide.
    """
    shortest: dict[torch.dtype, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one's time, and the wait for it, would count or not
    for dtype in (torch.float32, torch.bfloat16) * 8:
        x, weight = torch.ones(256, 400, dtype=dtype), torch.ones(300, 400, dtype=dtype)
        F.linear(x, weight)
        begin = time.thread_time()
        for _ in range(3):
            F.linear(x, weight)
        shortest[dtype] = min(shortest.get(dtype, math.inf), time.thread_time() - begin)
    torch.set_num_threads(threads)
    return shortest[torch.float32] / shortest[torch.bfloat16]


def precision(wanted: str, device: torch.device = CPU, *, begins: bool = False) -> Precision:
    """The precision to use: as wanted, or for ``auto`` the fastest that this processor has, and fp32 on a GPU.

    Args:
        begins: bf16 is a choice of now, and refused where it would be slower. What was chosen before is not measured
            again: a learner that is started anew beside other work would else be refused what it has learned in.

    Raises:
        ConfigError: bf16 is wanted on a device that lacks it, or, where it ``begins``, would be slower with it.
    """
    # On a GPU networks of this size wait for the launch of kernels, and bf16 launches more of them.
    if wanted == "fp32" or (wanted == "auto" and device.type != "cpu"):
        return "fp32"
    problem = bf16_problem(device) if begins or wanted == "auto" else _bf16_lack(device)
    if wanted == "bf16" and problem:
        raise ConfigError(f"learner.precision is 'bf16': this {problem}; allowed here: fp32, auto")
    return "fp32" if problem else "bf16"


def free_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that are free; None for the processor."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device, without waiting for the device; on the CPU a view of the array.

    The copy in page-locked memory stays as long as the device needs it: torch's allocator sees to that.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def use_threads(threads: int, where: ThreadsIn = "critics") -> None:
    """Share out ``threads`` in this process: all of them inside operators, or two in TD3, each with half of them.

    Side by side are then the two critics, and the two halves of a batch where there is one network. Threads inside a
    matrix product meet at every operation, and on a machine whose cores are all busy each meeting waits for the
    scheduler; these two meet seven times in two updates. But they also wait for each other at Python's lock.

    Call it before torch has worked in this process: its threads inside operators are made for the first one that is
    large enough, and treat vanishing numbers for good as the thread that makes them does then.
    """
    torch.set_num_threads(threads if where == "operators" else max(1, threads // 2))
    with vanishing_is_zero():
        torch.zeros(_LARGE).add_(1.0)


@contextmanager
def vanishing_is_zero() -> Iterator[None]:
    """Within, numbers below 1.2e-38 count as zero in the calling thread, and in threads that are made within.

    Those that torch has inside operators (with four ``learner.threads`` or more) are, see :func:`use_threads`, and stay
    like this outside, too. Where a gradient has vanished, its moments in Adam decay into such numbers, with which a
    processor is slow. Only within: where a simulator shares the thread, its numbers are its own.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class SecondThread:
    """The second of the two, the caller being the first; what it does is outside of autograd."""

    def __init__(self) -> None:
        inner = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, "td3", initializer=torch.set_num_threads, initargs=(inner,))

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Begin ``work(*arguments)``."""
        return self._pool.submit(_in_second_thread, work, *arguments)


def second_thread(threads: int, where: ThreadsIn = "critics") -> SecondThread | None:
    """The second thread; None if there is to be one only, outside operators."""
    return SecondThread() if threads >= 2 and where == "critics" else None


def _in_second_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    with torch.inference_mode(), vanishing_is_zero():  # modes of the thread
        return work(*arguments)
