"""Which number format the matrix products of the learner use on this processor."""

from __future__ import annotations

from typing import Literal

import torch

from td3_robot.errors import ConfigError

Precision = Literal["fp32", "bf16"]


def bf16_is_fast() -> bool:
    """Whether the processor multiplies bfloat16 in hardware (AVX-512 BF16 or AMX); emulated, it is slower than fp32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def resolve(wanted: str) -> Precision:
    """The precision to use: as wanted, or for ``auto`` the fastest that this processor has.

    Raises:
        ConfigError: bf16 is wanted on a processor that would only be slower with it.
    """
    if wanted == "fp32":
        return "fp32"
    fast = bf16_is_fast()
    if wanted == "bf16" and not fast:
        raise ConfigError(
            "learner.precision is 'bf16': this processor has neither AVX-512 BF16 nor AMX and would only emulate it; "
            "allowed here: fp32, auto"
        )
    return "bf16" if fast else "fp32"
