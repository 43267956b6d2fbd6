"""Stopped and resumed, killed and restarted: in lock-step as if never, else with nothing lost but time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.learner import checkpoint

STEPS = 2400
LOCKSTEP = ("learner.replay_ratio=0.5", "learner.publish_every=3", "learner.buffer_size=700", "checkpoint.every=400")
"""The buffer is full long before the end, so that its oldest rows must be the same ones, too."""


def newest(run: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The last checkpoint of a run, without what it says of time."""
    found = checkpoint.load_newest(run / "checkpoint")
    assert found is not None
    _, arrays, scalars = found
    del scalars["meter"]["wall_s"]
    return arrays, scalars


def differences(run: Path, other: Path) -> list[str]:
    """What is not the same in two finished runs, down to the last bit; stamps of Steps aside."""
    (arrays, scalars), (others, other_scalars) = newest(run), newest(other)
    found = [f"arrays {sorted(arrays.keys() ^ others.keys())}"] if arrays.keys() != others.keys() else []
    for name, array in arrays.items():
        if name.startswith("simulator."):  # holds a Step with the time of day; what counts in it is compared below
            continue
        if name in others and array.tobytes() != others[name].tobytes():
            found.append(name)
    for name in scalars:
        if name != "sources" and scalars[name] != other_scalars[name]:
            found.append(f"{name}: {scalars[name]} is not {other_scalars[name]}")
    for name, source in scalars["sources"].items():
        ours, theirs = source["assembler"], other_scalars["sources"][name]["assembler"]
        for item in (ours, theirs):
            item["counters"].pop("repeated", None)
        if ours != theirs:
            found.append(f"{name}: {ours} is not {theirs}")
    if (run / "policy.safetensors").read_bytes() != (other / "policy.safetensors").read_bytes():
        found.append("policy.safetensors")
    return found + simulators_differ(arrays, others)


def simulators_differ(arrays: dict[str, Any], others: dict[str, Any]) -> list[str]:
    import safetensors.numpy

    from td3_robot.transport import codec

    found: list[str] = []
    for name in arrays:
        if name.startswith("simulator."):
            ours, theirs = (safetensors.numpy.load(item[name].tobytes()) for item in (arrays, others))
            steps = [codec.decode("step", item.pop("step").tobytes()) for item in (ours, theirs)]
            values = [{**vars(step), "stamp": 0} for step in steps]
            found += [f"{name} step.{key}" for key in values[0] if not np.array_equal(values[0][key], values[1][key])]
            found += [f"{name} {key}" for key in ours if ours[key].tobytes() != theirs[key].tobytes()]
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Runs that were never stopped, made once each."""
    from tests.conftest import SMALL, Command

    made: dict[tuple[str, ...], Path] = {}

    def make(overrides: tuple[str, ...]) -> Path:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("straight")
            sets = [word for item in (*SMALL, *overrides) for word in ("--set", item)]
            run = Command("train", "walker2d", "--steps", str(STEPS), "--out", "run", "--lockstep", *sets, cwd=folder)
            try:
                assert run.finish() == 0, run.output()
            finally:
                run.kill_all()
            made[overrides] = folder / "run"
        return made[overrides]

    return make


@pytest.mark.parametrize("fleet", [(), ("simulators=2", "robots=2")], ids=["one robot", "2 × 2 robots"])
def test_interrupted_and_resumed_is_never_stopped(
    fleet: tuple[str, ...], straight: Any, train: Any, command: Any, tmp_path: Path
) -> None:
    """Invariant 4: twice interrupted anywhere, and once resumed just to be interrupted again at once."""
    overrides = (*LOCKSTEP, *fleet)
    run = train(STEPS, *overrides, options=("--lockstep",))
    for steps in (700, 1500):
        run.wait_for_steps(steps)
        run.interrupt()
        assert run.finish() == 130, run.output()
        reached = newest(tmp_path / "run")[1]["env_steps"]
        assert steps <= reached < STEPS
        run = command("train", "--resume", "run", "--log-every", "0.2")
        run.wait_for("^ready")
    run.interrupt()
    assert run.finish() == 130, run.output()
    assert newest(tmp_path / "run")[1]["env_steps"] >= reached
    run = command("train", "--resume", "run")
    assert run.finish() == 0, run.output()
    assert "not restored" not in run.output()
    assert differences(straight(overrides), tmp_path / "run") == []


@pytest.mark.parametrize("name", ["learner", "sim-0", "policy"])
def test_killed_in_lock_step_is_never_killed(name: str, straight: Any, train: Any, tmp_path: Path) -> None:
    """Two simulators of two robots; the third kill comes when the second has hardly been got over."""
    overrides = (*LOCKSTEP, "simulators=2", "robots=2")
    run = train(STEPS, *overrides, options=("--lockstep",))
    for steps in (600, 1300, 1400):
        run.wait_for_steps(steps)
        run.children()[name].kill()
        run.wait_for(f"^{name} was killed by SIGKILL; starting it again$")
    assert run.finish() == 0, run.output()
    assert differences(straight(overrides), tmp_path / "run") == []
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["learner"]["counters"]["missed"] == 0
