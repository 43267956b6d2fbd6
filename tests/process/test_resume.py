"""Stopped and resumed, killed and restarted: in lock-step as if never, else with nothing lost but time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from td3_robot.learner import checkpoint
from td3_robot.transport import codec

STEPS = 1600
LOCKSTEP = ("learner.replay_ratio=0.5", "learner.publish_every=3", "learner.buffer_size=700", "checkpoint.every=400")
"""The buffer is full long before the end, so that its oldest rows must be the same ones, too."""
FLEET = ("simulators=2", "robots=2", "learner.replay_storage=file")
EVALUATED = ("evaluation.every=200", "evaluation.episodes=1")


def newest(run: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The last checkpoint of a run, without what it says of time."""
    found = checkpoint.load_newest(run / "checkpoint")
    assert found is not None
    _, arrays, scalars = found
    del scalars["meter"]["wall_s"], scalars["evaluations"]  # evaluations come in when they do
    for version, *_ in scalars.pop("pending"):
        del arrays[f"pending.{version}"]
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
    """What is not the same in the simulators' states of two checkpoints."""
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


@pytest.mark.parametrize("fleet", [EVALUATED, FLEET], ids=["evaluated", "2 × 2 robots"])
def test_interrupted_and_resumed_is_never_stopped(
    fleet: tuple[str, ...], straight: Any, train: Any, command: Any, tmp_path: Path
) -> None:
    """Invariant 4: twice interrupted anywhere, and once resumed just to be interrupted again at once."""
    overrides = (*LOCKSTEP, *fleet)
    run = train(STEPS, *overrides, options=("--lockstep",))
    for steps in (600, 1100):
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
    assert differences(straight(overrides), tmp_path / "run") == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    if fleet is EVALUATED:  # every one of them, the ones under way at a stop included
        evaluated = {line["env_steps"] for line in lines if line["kind"] == "evaluation"}
        assert evaluated >= set(range(200, STEPS, 200))


def test_killed_in_lock_step_is_never_killed(straight: Any, train: Any, tmp_path: Path) -> None:
    """Two simulators of two robots, and every kind of process; the last kill comes before the one before is mended."""
    overrides = (*LOCKSTEP, *FLEET)
    run = train(STEPS, *overrides, options=("--lockstep",))
    for steps, name in ((550, "learner"), (900, "sim-0"), (1000, "policy"), (1300, "sim-1"), (0, "learner")):
        run.wait_for_steps(steps)
        run.children()[name].kill()
        run.wait_for(f"^{name} was killed by SIGKILL; starting it again$")
    assert run.finish() == 0, run.output()
    assert differences(straight(overrides), tmp_path / "run") == []
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["learner"]["counters"]["missed"] == 0


def test_a_killed_learner_loses_no_transition(train: Any, tmp_path: Path) -> None:
    """Free-running, with the buffer in a file: killed three times, once before there is any checkpoint."""
    overrides = ("learner.replay_storage=file", "learner.buffer_size=8000", "checkpoint.every=3000", "robots=2")
    run = train(6000, *overrides, "simulators=2", "learner.replay_ratio=0.1")
    for steps in (800, 3500, 3600):
        run.wait_for_steps(steps)
        run.children()["learner"].kill()
        run.wait_for("^learner was killed by SIGKILL; starting it again$")
    assert run.finish() == 0, run.output()
    assert "0 Steps lost" in run.output()
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    learner, sims = final["learner"], [final[name] for name in ("sim-0", "sim-1")]
    assert learner["counters"]["missed"] == learner["counters"]["gaps"] == learner["counters"].get("cut", 0) == 0
    assert learner["counters"]["steps"] * 2 - learner["counters"]["begun"] == learner["counters"]["transitions"]
    arrays, scalars = newest(tmp_path / "run")
    assert scalars["replay"]["total_added"] == learner["figures"]["env_steps"] == learner["counters"]["transitions"]
    # What the simulators made and the learner does not have is under way when it stops: a Step of each.
    under_way = sum(sim["figures"]["transitions"] for sim in sims) - learner["figures"]["env_steps"]
    assert 0 <= under_way <= 2 * 2 * 2
    assert not any(name.startswith("replay.") for name in arrays)
    rows = np.fromfile(tmp_path / "run" / "replay" / "rows.float32", np.float32).reshape(8000, -1)
    whole = rows[: scalars["replay"]["total_added"]]
    assert np.isfinite(whole).all()
    assert len(np.unique(whole, axis=0)) == len(whole)  # none twice
    assert not rows[len(whole) :].any()
