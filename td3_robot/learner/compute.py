"""Chooses the learner's device and the precision of its matrix products."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import ConfigError

Precision = Literal["fp32", "bf16"]

CPU = torch.device("cpu")


def device(wanted: str) -> torch.device:
    """The device to learn on. ``auto`` means a CUDA GPU if torch sees one, else the processor.

    Raises:
        ConfigError: ``wanted`` is cuda, and torch sees no GPU.
    """
    seen = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not seen:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ConfigError(
            f"learner.device is 'cuda': torch {torch.__version__} (built {built}) sees no GPU; allowed here: cpu, auto"
        )
    return torch.device("cuda") if seen else CPU


def bf16_problem(device: torch.device = CPU) -> str | None:
    """The reason not to use bf16 on this device; None if there is no such reason.

    On a CPU, the function measures the speed, because on some CPUs with AVX-512 BF16, bf16 is not faster than fp32.
    """
    if (lack := bf16_lack(device)) or device.type != "cpu":
        return lack
    speed = bf16_speed()
    return None if speed > 1 else f"processor multiplies bf16 at {speed:.2f} times the speed of fp32 (measured)"


def bf16_lack(device: torch.device) -> str | None:
    """What a device lacks for bf16; None if it supports bf16. A device without support emulates bf16 slowly.

    A processor needs AVX-512 BF16 or AMX. An NVIDIA GPU needs compute capability 8.0 (Ampere).
    """
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
        return None if fast else "GPU is older than Ampere and would only emulate bf16"
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    has = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has or not any(check is not None and check() for check in checks):
        return "processor has neither AVX-512 BF16 nor AMX and would only emulate bf16"
    return None


@functools.cache
def bf16_speed() -> float:
    """The speed of a bf16 matrix product divided by the speed in fp32, on this processor. Takes about 30 ms.

    The function measures several times and uses the shortest times, to exclude the effect of other processes.
    """
    shortest: dict[torch.dtype, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thread_time does not count the work of other threads
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
    """The precision to use. ``auto`` means the faster precision on a CPU, and fp32 on a GPU.

    Args:
        begins: whether this precision is new for the run. If true, bf16 on a CPU must be faster than fp32. If false,
            a configured bf16 is accepted without a measurement. A measurement that other processes disturb could make
            the resume of a run fail.

    Raises:
        ConfigError: ``wanted`` is bf16, and the device does not support bf16. With ``begins``, also if bf16 is not
            faster than fp32 on a CPU.
    """
    # In CUDA graphs, bf16 is faster. Without graphs, for example with LAP, nobody has measured it: kernel launches
    # limit the speed there, and bf16 needs more launches.
    if wanted == "fp32" or (wanted == "auto" and device.type != "cpu"):
        return "fp32"
    problem = bf16_problem(device) if begins or wanted == "auto" else bf16_lack(device)
    if wanted == "bf16" and problem:
        raise ConfigError(f"learner.precision is 'bf16': this {problem}; allowed here: fp32, auto")
    return "fp32" if problem else "bf16"


def free_memory(device: torch.device) -> int | None:
    """Free memory of a GPU in bytes; None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device. On the CPU, the tensor is a view of the array.

    The function does not wait for a GPU.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Treat denormal numbers (absolute values below 1.2e-38) as zero in this thread and in threads that it starts.

    If a gradient vanishes, its moments in Adam decay to denormal numbers, which are slow on CPUs. In this thread, the
    setting ends with the context. So the setting does not change the results of a simulator that runs in the same
    thread.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
