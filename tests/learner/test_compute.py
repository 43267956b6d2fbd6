"""The device and the number format that are used, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config import parse
from td3_robot.errors import ConfigError
from td3_robot.learner import compute
from td3_robot.learner.core import LearnerCore

CUDA = torch.device("cuda")


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A machine with such a GPU, or without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def processor(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: fast, raising=False)


def test_the_device_is_what_is_wanted_or_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    assert [compute.device(wanted).type for wanted in ("cpu", "cuda", "auto")] == ["cpu", "cuda", "cuda"]
    gpu(monkeypatch, None)
    assert [compute.device(wanted).type for wanted in ("cpu", "auto")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"learner\.device is 'cuda': torch .* sees no GPU; allowed here: cpu, auto"):
        compute.device("cuda")


def test_a_learner_without_the_device_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"learner\.device is 'cuda'"):
        LearnerCore(parse({"learner": {"device": "cuda"}}))


@pytest.mark.parametrize(
    ("fast_processor", "capability", "expected"),
    [
        (True, (8, 0), {"cpu": ["fp32", "bf16", "bf16"], "cuda": ["fp32", "bf16", "fp32"]}),
        (False, (7, 5), {"cpu": ["fp32", None, "fp32"], "cuda": ["fp32", None, "fp32"]}),
    ],
)
def test_precision(
    fast_processor: bool,
    capability: tuple[int, int],
    expected: dict[str, list[str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fp32, bf16 and auto become; None: refused."""
    processor(monkeypatch, fast_processor)
    gpu(monkeypatch, capability)
    for name, outcomes in expected.items():
        for wanted, outcome in zip(("fp32", "bf16", "auto"), outcomes, strict=True):
            if outcome is None:
                lacks = {"cpu": "processor has neither AVX-512 BF16 nor AMX", "cuda": "GPU is older than Ampere"}[name]
                with pytest.raises(ConfigError, match=lacks):
                    compute.precision(wanted, torch.device(name))
            else:
                assert compute.precision(wanted, torch.device(name)) == outcome


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_an_upload_arrives(dtype: Any, device: torch.device) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    there = compute.upload(array, device)
    assert there.device.type == device.type
    assert np.array_equal(there.cpu().numpy(), array)


def test_numbers_that_vanish_are_zero_in_both_threads() -> None:
    """The smallest normal number of float32 is 1.2e-38: a tenth of 2e-37 is above it, a tenth of 2e-38 below."""
    normal, vanishing = torch.tensor(2e-37), torch.tensor(2e-38)
    assert (vanishing / 10).item() != 0
    compute.use_threads(2)
    second = compute.second_thread(2)
    assert second

    def tenths() -> tuple[float, float]:
        return (normal / 10).item(), (vanishing / 10).item()

    for normal_tenth, vanishing_tenth in (tenths(), second.submit(tenths).result()):
        assert normal_tenth == pytest.approx(2e-38)
        assert vanishing_tenth == 0
