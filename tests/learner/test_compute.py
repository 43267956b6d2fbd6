"""How the learner chooses device and precision, and which settings it refuses."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config.loading import parse
from td3_robot.errors import ConfigError
from td3_robot.learner import compute
from td3_robot.learner.factory import make_core
from td3_robot.learner.machine_choices import main as look
from td3_robot.learner.machine_choices import resolve

CUDA = torch.device("cuda")


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Pretend to have a GPU of this capability. None means no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def processor(monkeypatch: pytest.MonkeyPatch, speed: float | None) -> None:
    """Pretend that bf16 multiplies ``speed`` times as fast as fp32. None means a processor without bf16."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: speed is not None, raising=False)
    monkeypatch.setattr(compute, "bf16_speed", lambda: speed)


def test_auto_chooses_the_gpu_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    assert [compute.device(wanted).type for wanted in ("cpu", "cuda", "auto")] == ["cpu", "cuda", "cuda"]
    gpu(monkeypatch, None)
    assert [compute.device(wanted).type for wanted in ("cpu", "auto")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"learner\.device is 'cuda': torch .* sees no GPU; allowed here: cpu, auto"):
        compute.device("cuda")


def test_a_learner_without_its_device_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"learner\.device is 'cuda'"):
        make_core(parse({"learner": {"device": "cuda"}}))


@pytest.mark.parametrize(
    ("speed", "capability", "expected"),
    [
        (2.3, (8, 0), {"cpu": ["fp32", "bf16", "bf16"], "cuda": ["fp32", "bf16", "fp32"]}),
        (None, (7, 5), {"cpu": ["fp32", None, "fp32"], "cuda": ["fp32", None, "fp32"]}),
        (0.57, (7, 5), {"cpu": ["fp32", None, "fp32"]}),
    ],
)
def test_the_precision_follows_setting_and_hardware(
    speed: float | None,
    capability: tuple[int, int],
    expected: dict[str, list[str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``expected`` holds the results of the settings fp32, bf16 and auto. None means that the setting is refused."""
    processor(monkeypatch, speed)
    gpu(monkeypatch, capability)
    for name, outcomes in expected.items():
        for wanted, outcome in zip(("fp32", "bf16", "auto"), outcomes, strict=True):
            if outcome is None:
                slower = r"processor multiplies at 0\.57 times the speed of fp32 \(measured\); allowed here: fp32"
                lacks = "processor has neither AVX-512 BF16 nor AMX" if speed is None else slower
                with pytest.raises(ConfigError, match=lacks if name == "cpu" else "GPU is older than Ampere"):
                    compute.precision(wanted, torch.device(name), begins=True)
            else:
                assert compute.precision(wanted, torch.device(name), begins=True) == outcome


def test_a_chosen_precision_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that restarts on a busy machine continues in bf16. Without bf16 in the processor, it does not start."""
    chosen = parse({"learner": {"precision": "bf16"}})
    processor(monkeypatch, 0.98)
    make_core(chosen)
    assert compute.precision("bf16") == "bf16"
    processor(monkeypatch, None)
    with pytest.raises(ConfigError, match="processor has neither AVX-512 BF16 nor AMX"):
        make_core(chosen)


@pytest.mark.parametrize(("before", "choice"), [(None, "new"), ("fp32", "new"), ("bf16", "kept")])
def test_a_resumed_run_keeps_its_precision(before: str | None, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    found = subprocess.CompletedProcess([], 0, '{"device": "cpu", "precision": "bf16", "device_memory": null}', "")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command) or found)
    config = parse({"learner": {"precision": "bf16"}})
    assert resolve(config, parse({"learner": {"precision": before}}) if before else None).config == config
    assert asked[0][-3:] == ["cpu", "bf16", choice]


@pytest.mark.parametrize(("choice", "code"), [("new", 2), ("kept", 0)])
def test_a_new_precision_is_measured(
    choice: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processor(monkeypatch, 0.98)
    assert look("cpu", "bf16", choice) == code
    assert ("0.98 times the speed" in capsys.readouterr().err) == (choice == "new")


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_an_upload_reaches_the_device(dtype: Any, device: torch.device) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    there = compute.upload(array, device)
    assert there.device.type == device.type
    assert np.array_equal(there.cpu().numpy(), array)


def test_the_speed_of_bf16_is_measured_once() -> None:
    speed = compute.bf16_speed()
    assert 0 < speed < 100
    assert compute.bf16_speed() == speed


def test_resolve_gives_the_settings_that_this_process_would_use() -> None:
    """A child process examines this machine. A run with explicit settings starts no child process."""
    fixed = parse({})
    assert resolve(fixed) == (fixed, None, [])
    config, memory, notices = resolve(parse({"learner": {"device": "auto", "precision": "auto"}}))
    device = compute.device("auto")
    found = config.learner.precision
    measured = device.type == "cpu" and compute._bf16_lack(device) is None  # each process measures for itself
    assert found in (("fp32", "bf16") if measured else (compute.precision("auto", device),))
    assert config.learner.device == device.type
    assert (memory is None) == (device.type == "cpu")
    assert notices == [f"learner.device: auto means {device.type} here", f"learner.precision: auto means {found} here"]
    assert resolve(parse({"learner": {"precision": "auto"}})).notices[-1].startswith("learner.precision: auto means ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so that it is not refused")
def test_a_missing_device_gives_a_one_line_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^learner\.device is 'cuda': torch .* sees no GPU; allowed here: cpu, auto$"
    ):
        resolve(parse({"learner": {"device": "cuda"}}))
