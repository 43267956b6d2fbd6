"""How the learner uses the machine: the device, the number format of matrix products, and threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import ConfigError

Precision = Literal["fp32", "bf16"]
Result = TypeVar("Result")


CPU = torch.device("cpu")


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


def bf16_is_fast(device: torch.device = CPU) -> bool:
    """Whether the device multiplies bfloat16 in hardware; emulated, it is slower than fp32.

    A processor needs AVX-512 BF16 or AMX, an NVIDIA GPU compute capability 8.0 (Ampere).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def precision(wanted: str, device: torch.device = CPU) -> Precision:
    """The precision to use: as wanted, or for ``auto`` the fastest that this processor has, and fp32 on a GPU.

    Raises:
        ConfigError: bf16 is wanted on a device that would only be slower with it.
    """
    if wanted == "fp32":
        return "fp32"
    fast = bf16_is_fast(device)
    if wanted == "bf16" and not fast:
        lacks = "GPU is older than Ampere" if device.type == "cuda" else "processor has neither AVX-512 BF16 nor AMX"
        raise ConfigError(
            f"learner.precision is 'bf16': this {lacks} and would only emulate it; allowed here: fp32, auto"
        )
    # On a GPU networks of this size wait for the launch of kernels, and bf16 launches more of them.
    return "bf16" if fast and (wanted == "bf16" or device.type == "cpu") else "fp32"


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device, without waiting for the device; on the CPU a view of the array.

    The copy in page-locked memory stays as long as the device needs it: torch's allocator sees to that.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def use_threads(threads: int) -> None:
    """Share out ``threads`` in this process: two of them work for TD3 side by side, each with half of the threads.

    Side by side are the two critics, and the two halves of a batch where there is one network. Threads inside a matrix
    product meet at every operation, and on a machine whose cores are all busy each meeting waits for the scheduler;
    these two meet seven times in two updates.
    """
    _use_thread(max(1, threads // 2))


def _use_thread(inner: int) -> None:
    """Set up the calling thread: ``inner`` threads inside a matrix product, and numbers below 1.2e-38 count as zero.

    Where a gradient has vanished, its moments in Adam decay into such numbers, with which a processor is slow.
    """
    torch.set_num_threads(inner)
    torch.set_flush_denormal(True)


class SecondThread:
    """The second of the two, the caller being the first; what it does is outside of autograd."""

    def __init__(self) -> None:
        inner = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, "td3", initializer=_use_thread, initargs=(inner,))

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Begin ``work(*arguments)``."""
        return self._pool.submit(_without_autograd, work, *arguments)


def second_thread(threads: int) -> SecondThread | None:
    """The second thread; None if there is to be one thread only."""
    return SecondThread() if threads >= 2 else None


def _without_autograd(work: Callable[..., Result], *arguments: Any) -> Result:
    with torch.inference_mode():  # a mode of the thread
        return work(*arguments)
