"""How the learner chooses device, precision and threads, and which settings it refuses."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from td3_robot.config.loading import parse
from td3_robot.errors import ConfigError
from td3_robot.learner import compute, machine_choices
from td3_robot.learner.engine import measure
from td3_robot.learner.factory import make_core
from td3_robot.learner.machine_choices import Request, resolve
from td3_robot.learner.machine_choices import main as look
from td3_robot.specs import Channel, RobotSpec

CUDA = torch.device("cuda")
ONE = Channel("one", "1", -1.0, 1.0)


def sizes() -> tuple[int, int]:
    return 3, 1


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Pretend to have a GPU of this capability. None means no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def processor(monkeypatch: pytest.MonkeyPatch, speed: float | None) -> None:
    """Pretend that products in bf16 are ``speed`` times as fast as in fp32. None means a processor without bf16."""
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


def test_a_learner_does_not_start_if_the_configured_device_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
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
                slower = r"processor multiplies bf16 at 0\.57 times the speed of fp32 \(measured\); allowed here: fp32"
                lacks = "processor has neither AVX-512 BF16 nor AMX" if speed is None else slower
                with pytest.raises(ConfigError, match=lacks if name == "cpu" else "GPU is older than Ampere"):
                    compute.precision(wanted, torch.device(name), begins=True)
            else:
                assert compute.precision(wanted, torch.device(name), begins=True) == outcome


def test_a_chosen_precision_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that restarts on a busy machine continues in bf16.

    If the processor does not support bf16, the learner does not start.
    """
    chosen = parse({"learner": {"precision": "bf16"}})
    processor(monkeypatch, 0.98)
    make_core(chosen)
    assert compute.precision("bf16") == "bf16"
    processor(monkeypatch, None)
    with pytest.raises(ConfigError, match="processor has neither AVX-512 BF16 nor AMX"):
        make_core(chosen)


@pytest.mark.parametrize(("before", "begins"), [(None, True), ("fp32", True), ("bf16", False)])
def test_a_resumed_run_checks_its_precision_only_if_the_precision_changes(
    before: str | None, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration sets bf16. ``before`` is the precision of the resumed run; None means a new run."""
    asked: list[list[str]] = []
    answer = '{"device": "cpu", "precision": "bf16", "threads": 1, "device_memory": null, "measured": ""}'
    found = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command) or found)
    config = parse({"learner": {"precision": "bf16"}})
    assert resolve(config, sizes, parse({"learner": {"precision": before}}) if before else None).config == config
    assert msgspec.json.decode(asked[0][-1], type=Request).begins == begins


def test_auto_keeps_the_earlier_choices_when_a_run_resumes() -> None:
    before = parse({"learner": {"threads": 2, "precision": "fp32"}})
    again = resolve(parse({"learner": {"threads": "auto", "precision": "auto"}}), sizes, before)
    assert again == (before, None, [])


def request(*, lockstep: bool = False, begins: bool = True, task: str = "Walker2D", **learner: Any) -> str:
    config = parse({"task": task, "learner": learner}).learner
    return msgspec.json.encode(Request(config, (16, 16), (3, 1), begins, lockstep, 1)).decode()


@pytest.mark.parametrize(("begins", "code"), [(True, 2), (False, 0)])
def test_only_a_newly_chosen_precision_is_measured(
    begins: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processor(monkeypatch, 0.98)
    assert look(request(precision="bf16", begins=begins)) == code
    assert ("0.98 times the speed" in capsys.readouterr().err) == begins


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [  # updates/s of fp32 with 1 and 2 threads, then of bf16 with 1 and 2 threads
        ((100, 120, 150, 200), ("bf16", 2)),
        ((100, 120, 196, 200), ("bf16", 1)),  # 196 is above 97 % of the highest speed, so 1 thread is enough
        ((196, 120, 200, 150), ("fp32", 1)),  # 196 is enough again, and fp32 comes before bf16
    ],
)
def test_auto_chooses_the_fastest_updates(
    speeds: tuple[int, ...],
    expected: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    processor(monkeypatch, 2.0)
    monkeypatch.setattr(machine_choices, "available_cores", lambda: 2)
    monkeypatch.setattr(measure, "speeds", lambda *arguments: dict(zip(arguments[3], speeds, strict=True)))
    assert look(request(precision="auto", threads="auto")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["precision"], found["threads"]) == expected
    assert f"bf16 with 2 threads {speeds[3]}" in found["measured"]


@pytest.mark.parametrize(
    ("learner", "lockstep", "expected"),
    [
        ({"threads": "auto"}, True, ("fp32", 1)),  # with a measurement, two runs with the same seed could differ
        ({"threads": 3, "precision": "auto"}, True, ("bf16", 3)),
        ({"threads": "auto", "algorithm": "a2c", "task": "discrete:CartPole-v1"}, False, ("fp32", 1)),
        ({"threads": 2, "precision": "fp32"}, False, ("fp32", 2)),
    ],
)
def test_updates_are_not_measured_for_lockstep_or_a2c_or_explicit_settings(
    learner: dict[str, Any],
    lockstep: bool,
    expected: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    processor(monkeypatch, 2.0)
    assert look(request(lockstep=lockstep, **learner)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["precision"], found["threads"], found["measured"]) == (*expected, "")


def test_a_learner_outside_a_run_measures_no_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(measure, "speeds")
    core = make_core(parse({"learner": {"threads": "auto", "batch_size": 4}, "network": {"hidden": [4]}}))
    core.start(RobotSpec("r", (ONE,), (ONE,), 0.02))
    assert core.config.learner.thread_count == 1


def test_threads_are_powers_of_two_up_to_the_number_of_processor_cores() -> None:
    config = parse({"learner": {"threads": "auto"}}).learner
    assert measure.choices(config, ["fp32"], 6) == [("fp32", 1), ("fp32", 2), ("fp32", 4)]
    assert measure.choices(config, ["fp32", "bf16"], 2) == [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]


def test_each_choice_gets_a_plausible_speed() -> None:
    config = parse({"learner": {"batch_size": 8, "threads": "auto"}}).learner
    compared = measure.choices(config, ["fp32"], 2)
    found = measure.speeds(config, (3, 1), (8, 8), compared, others=1)
    assert list(found) == compared
    assert all(1 < speed < 1e6 for speed in found.values())


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


def test_resolve_replaces_auto_with_settings_that_fit_this_machine() -> None:
    """A child process examines this machine. The default settings need no child process."""
    fixed = parse({})
    assert resolve(fixed, sizes) == (fixed, None, [])
    small = {"network": {"hidden": [8, 8]}, "learner": {"device": "auto", "precision": "auto", "threads": "auto"}}
    config, memory, notices = resolve(parse(small), sizes)
    device = compute.device("auto")
    found = config.learner.precision
    measured = device.type == "cpu" and compute.bf16_lack(device) is None
    # The child process measures bf16 itself, so its choice can differ from the choice of this process.
    assert found in (("fp32", "bf16") if measured else (compute.precision("auto", device),))
    assert config.learner.device == device.type
    assert (memory is None) == (device.type == "cpu")
    assert notices[:3] == [
        f"learner.device: auto means {device.type} here",
        f"learner.precision: auto means {found} here",
        f"learner.threads: auto means {config.learner.threads} here",
    ]
    assert notices[3:] == [] or notices[3].startswith("measured updates per second: fp32 with 1 thread ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so the learner accepts cuda")
def test_a_missing_device_gives_a_one_line_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^learner\.device is 'cuda': torch .* sees no GPU; allowed here: cpu, auto$"
    ):
        resolve(parse({"learner": {"device": "cuda"}}), sizes)
