"""Stop and resume runs, and kill and restart processes.

In lock-step, the result equals the result of an uninterrupted run bit for bit. Free-running runs lose no transition.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import yaml
from msgspec.structs import asdict

from td3_robot.bundle import Bundle
from td3_robot.config import loading as configuration
from td3_robot.learner.checkpointing import checkpoint
from td3_robot.transport import codec
from tests.conftest import SMALL, Command
from tests.process.conftest import MadeOnce

STEPS = 2400
LOCKSTEP = (
    "simulators=2",
    "robots=2",
    "learner.replay_ratio=0.5",
    "learner.publish_every=3",
    "learner.buffer_size=700",
    "learner.replay_storage=file",
    "checkpoint.every=400",
    f"evaluation.every={STEPS // 5}",
    "evaluation.episodes=1",
    "learner.compile=true",
    "learner.threads=2",
)
"""Options of the compared runs. The replay buffer is full after 700 of the 2,400 steps, so the runs overwrite rows.

While four evaluations wait, the learner skips each further evaluation. These runs make five evaluations, so the learner
can skip at most the last. The comparison leaves out what depends on this.
"""


def newest(run: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Load the last checkpoint of a run, without the values that depend on time.

    Returns:
        Its arrays and its scalars.
    """
    found = checkpoint.load_newest(run / "checkpoint")
    assert found is not None
    _, arrays, scalars = found
    del scalars["meter"]["wall_s"], scalars["evaluations"]  # evaluation results arrive at any time
    for version, *_ in scalars.pop("pending"):
        del arrays[f"pending.{version}"]
    return arrays, scalars


def differences(run: Path, other: Path) -> list[str]:
    """List the bitwise differences between two finished runs. Ignores stamps and the counts of repeated Steps."""
    (arrays, scalars), (others, other_scalars) = newest(run), newest(other)
    found = [f"arrays {sorted(arrays.keys() ^ others.keys())}"] if arrays.keys() != others.keys() else []
    for name, array in arrays.items():
        if name.startswith("simulator."):  # contains a time stamp; simulators_differ() compares the rest
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
    """List the differences between the simulator states of two checkpoints."""
    found: list[str] = []
    for name in arrays:
        if name.startswith("simulator."):
            ours, theirs = (safetensors.numpy.load(item[name].tobytes()) for item in (arrays, others))
            steps = [codec.decode("step", item.pop("step").tobytes()) for item in (ours, theirs)]
            values = [{**asdict(step), "stamp": 0} for step in steps]
            found += [f"{name} step.{key}" for key in values[0] if not np.array_equal(values[0][key], values[1][key])]
            found += [f"{name} {key}" for key in ours if ours[key].tobytes() != theirs[key].tobytes()]
    return found


@pytest.fixture(scope="session")
def straight(made_once: MadeOnce) -> Path:
    """The folder of an uninterrupted run."""

    def train(folder: Path) -> None:
        sets = [word for item in (*SMALL, *LOCKSTEP) for word in ("--set", item)]
        run = Command("train", "walker2d_fast", "--steps", str(STEPS), "--out", "run", "--lockstep", *sets, cwd=folder)
        try:
            assert run.finish() == 0, run.output()
        finally:
            run.kill_all()

    return made_once("straight", train) / "run"


def test_interrupted_and_resumed_run_equals_an_uninterrupted_run(
    straight: Path, train: Any, command: Any, tmp_path: Path
) -> None:
    """Interrupt a run four times: before its first step, after 300 and 800 steps, and immediately after a resume."""
    run = train(STEPS, *LOCKSTEP, options=("--lockstep",))
    run.wait_for("^training")
    run.interrupt()
    assert run.finish() == 130, run.output()
    run = command("train", "--resume", "run", "--log-every", "0.2")
    for steps in (300, 800):  # far from the end of the run
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
    assert differences(straight, tmp_path / "run") == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # An evaluation is due every 480 steps (STEPS // 5). If Ctrl-C interrupts an evaluation, the resumed run repeats
    # this evaluation. The run may end before the fourth evaluation.
    evaluated = {line["env_steps"] // (STEPS // 5) for line in lines if line["kind"] == "evaluation"}
    assert evaluated >= {1, 2, 3}


def test_lockstep_run_with_killed_processes_equals_an_undisturbed_run(
    straight: Path, train: Any, tmp_path: Path
) -> None:
    """Kill the learner, sim-0, the policy server and sim-1, one after another. Then kill the learner again.

    The second kill of the learner comes before sim-1 has recovered.
    """
    run = train(STEPS, *LOCKSTEP, options=("--lockstep",))
    for steps, name in ((550, "learner"), (700, "sim-0"), (800, "policy"), (1000, "sim-1"), (0, "learner")):
        run.wait_for_steps(steps)
        run.children()[name].kill()
        run.wait_for(f"^{name} was killed by SIGKILL; starting it again$")
    assert run.finish() == 0, run.output()
    assert differences(straight, tmp_path / "run") == []
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["learner"]["counters"]["missed"] == 0


def test_killed_learner_loses_no_transition(train: Any, tmp_path: Path) -> None:
    """Free-running with the buffer in a file: kill the learner three times, the first time before any checkpoint."""
    overrides = ("learner.replay_storage=file", "learner.buffer_size=16000", "checkpoint.every=3000", "robots=2")
    run = train(12_000, *overrides, "simulators=2", "learner.replay_ratio=0.1", "learner.normalise_observations=true")
    for steps in (600, 3100, 3200):
        run.wait_for_steps(steps)
        run.children()["learner"].kill()
        run.wait_for("^learner was killed by SIGKILL; starting it again$")
    assert run.finish() == 0, run.output()
    assert "0 Steps lost" in run.output()
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    learner, sims = final["learner"], [final[name] for name in ("sim-0", "sim-1")]
    assert learner["counters"]["missed"] == learner["counters"]["gaps"] == learner["counters"].get("cut", 0) == 0
    # A Step has two robots. The first Step of an episode makes no transition.
    assert learner["counters"]["steps"] * 2 - learner["counters"]["begun"] == learner["counters"]["transitions"]
    arrays, scalars = newest(tmp_path / "run")
    assert (
        scalars["parts"]["replay"]["total_added"]
        == learner["figures"]["env_steps"]
        == learner["counters"]["transitions"]
    )
    # Some Steps had not reached the learner when it stopped: at most 2 from each simulator. A Step has two robots.
    under_way = sum(sim["figures"]["transitions"] for sim in sims) - learner["figures"]["env_steps"]
    assert 0 <= under_way <= 2 * 2 * 2
    # The rows are in the file, not in the checkpoint. The checkpoint holds the priorities of the rows, because the
    # recipe uses prioritised replay.
    assert [name for name in arrays if name.startswith("replay.")] == ["replay.priorities"]
    rows = np.fromfile(tmp_path / "run" / "replay" / "rows.float32", np.float32).reshape(16_000, -1)
    whole = rows[: scalars["parts"]["replay"]["total_added"]]
    assert np.isfinite(whole).all()
    assert len(np.unique(whole, axis=0)) == len(whole)  # no transition is stored twice
    assert not rows[len(whole) :].any()
    # The normaliser counts every transition once. The first 22 columns of a row are the observation.
    assert scalars["parts"]["normaliser"]["count"] == len(whole)
    seen = whole[:, :22].astype(np.float64)
    np.testing.assert_allclose(arrays["normaliser.mean"], seen.mean(0), rtol=1e-9, atol=1e-12)
    squares = np.square(seen - seen.mean(0)).sum(0)
    np.testing.assert_allclose(arrays["normaliser.squares"], squares, rtol=1e-6, atol=1e-9)
    greatest = max(1.0, float(np.abs(whole[:, 28]).max()))  # column 22 + 6 is the reward
    assert scalars["parts"]["divergence"]["greatest_reward"] == greatest


@pytest.mark.slow
def test_killed_learner_loses_no_transition_when_hundreds_of_steps_wait(train: Any, tmp_path: Path) -> None:
    """Without a replay ratio, the simulator continues while no learner runs, until 1,000 Steps wait for the learner."""
    run = train(100_000, "learner.replay_storage=file", "learner.buffer_size=8000", "learner.replay_ratio=null")
    run.wait_for_steps(1000)
    run.children()["learner"].kill()
    run.wait_for("^learner was killed by SIGKILL; starting it again$")
    run.wait_for_more_steps(1500)  # only 1,000 Steps can wait, so the learner also got new Steps
    run.interrupt()
    assert run.finish() == 130, run.output()
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["learner"]["counters"]["missed"] == 0
    assert final["sim-0"]["counters"]["told_again"] > 200  # with a replay ratio, only about 100 Steps wait


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_full_disk_loses_no_transition(train: Any, command: Any, disk: Path) -> None:
    """On a full disk, writes to the replay file's journal fail, and the run stops. With free space, the run resumes."""
    overrides = ("learner.replay_storage=file", "learner.buffer_size=8000", "learner.replay_ratio=0.1")
    run = train(6000, *overrides, "checkpoint.every=1000", out="disk/run")
    run.wait_for_steps(1200)
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    assert run.finish() == 1, run.output()
    found, refused = [line for line in run.lines if "learner " in line and "steps/s" not in line][-2:]
    assert re.search(r"\(.*disk/run/replay/journal: No space left on device; make room on that disk, then ", found)
    assert "then run td3-robot train --resume" in found
    assert re.search(r"learner cannot run: .* of the disk of '.*', and 0 are free; .*: free some space$", refused)
    assert newest(disk / "run")[1]["env_steps"] >= 1000  # the checkpoint is complete, but older than the journal
    kept = np.fromfile(disk / "run" / "replay" / "rows.float32", np.float32)
    (disk / "filler").unlink()
    again = command("train", "--resume", "disk/run", "--log-every", "0.2")
    assert int(again.wait_for(r"^[\d,]+/6,000 steps").split("/")[0].replace(",", "")) >= 1200
    assert again.finish() == 0, again.output()
    _, scalars = newest(disk / "run")
    rows = np.fromfile(disk / "run" / "replay" / "rows.float32", np.float32).reshape(8000, -1)
    assert scalars["parts"]["replay"]["total_added"] == scalars["env_steps"] >= 6000
    whole = rows[: scalars["env_steps"]]
    assert len(np.unique(whole, axis=0)) == len(whole)
    assert rows.ravel()[: 52 * 1200].tobytes() == kept[: 52 * 1200].tobytes()  # a row has 2 · 22 + 6 + 2 numbers


@pytest.mark.slow
def test_resume_keeps_the_configuration_and_reports_changes_and_losses(
    train: Any, command: Any, tmp_path: Path
) -> None:
    """Damage the newest checkpoint. Later rename all checkpoints to ``….damaged``, and at last delete all of them."""
    run = train(100_000, "learner.replay_ratio=0.1", "learner.precision=auto", "checkpoint.every=300")
    run.wait_for_steps(600)
    run.interrupt()
    assert run.finish() == 130, run.output()
    end = newest(tmp_path / "run")[1]["env_steps"] + 300
    config_file = tmp_path / "run" / "config.yaml"
    before = config_file.read_text()
    precision = configuration.parse(yaml.safe_load(before)).learner.precision
    assert precision in ("fp32", "bf16")  # auto is resolved once; a resume keeps the result
    assert f"learner.precision: auto means {precision} here" in run.output()
    kept = ("walker2d_fast", "--set", "learner.replay_ratio=0.1", "--set", "learner.learning_starts=500")
    for arguments, words in (
        (("walker2d_fast",), "network.hidden is [32,32] in the run and cannot become [256,256]"),
        ((*kept, "--set", "network.hidden=[32,32]"), "learner.batch_size is 32 in the run, 128 now"),
        (("--set", "seed=1"), "seed is 0 in the run and cannot become 1"),
        (("--set", "learner.bach_size=1"), "did you mean 'batch_size'"),
        (("--steps", "100"), "--steps is 100; the run in run has already made"),
        (("--set", "total_steps=510"), "total_steps is 510; the run in run has already made"),
    ):
        refused = command("train", "--resume", "run", *arguments)
        assert refused.finish() == 2
        assert words in refused.lines[-1]
        assert len(refused.lines) == 1, refused.output()
    assert config_file.read_text() == before
    config_file.write_text(before.replace("batch_size: 32", "batch_size: 48"))  # the user made this edit and forgot it
    refused = command("train", "--resume", "run")
    assert refused.finish() == 2
    assert (
        "learner.batch_size is 32 in the run, 48 now; to accept the change, add --set learner.batch_size=48"
        in refused.lines[-1]
    )
    checkpoints = tmp_path / "run" / "checkpoint"
    *_, before_it, last = sorted(checkpoints.glob("checkpoint-*.safetensors"))
    lost = checkpoint.load(last)[1]["env_steps"] - checkpoint.load(before_it)[1]["env_steps"]
    last.write_bytes(last.read_bytes()[:-1])
    again = command("train", "--resume", "run", "--steps", str(end), "--set", "learner.batch_size=48")
    assert again.finish() == 0, again.output()
    assert f"learner is back from its checkpoint: {lost:,} steps lost" in again.output()
    assert "changed: learner.batch_size: 32 → 48" in again.output()
    assert f"changed: total_steps: 100000 → {end}" in again.output()
    assert end <= Bundle.load(tmp_path / "run" / "policy.safetensors").provenance["env_steps"] < 100_000
    policy = (tmp_path / "run" / "policy.safetensors").read_bytes()
    for damaged in (True, False):
        for path in checkpoints.iterdir():
            path.rename(f"{path}.damaged") if damaged else path.unlink()
        refused = command("train", "--resume", "run")
        assert refused.finish() == 2
        assert "has no complete checkpoint" in refused.lines[-1]
    assert (tmp_path / "run" / "policy.safetensors").read_bytes() == policy


@pytest.mark.slow
def test_reaching_the_target_return_ends_the_run_successfully(train: Any, command: Any, tmp_path: Path) -> None:
    """Every evaluation reaches -1000. Even a Walker2D that falls immediately has a return of about 15."""
    run = train(100_000, "evaluation.every=600", "evaluation.episodes=2", "evaluation.target_return=-1000")
    assert run.finish() == 0, run.output()
    assert "an evaluation reached evaluation.target_return -1000" in run.output()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["final"] for line in evaluations[-2:]] == [False, True]
    assert evaluations[-1]["env_steps"] < 100_000
    for name in ("policy", "best"):
        assert Bundle.load(tmp_path / "run" / f"{name}.safetensors").spec.name == "Walker2D"
    again = command("train", "--resume", "run")
    assert again.finish() == 0, again.output()
    made = Bundle.load(tmp_path / "run" / "policy.safetensors").provenance["env_steps"]
    assert made == evaluations[-1]["env_steps"]


def test_too_large_buffer_is_refused_before_the_run_starts(command: Any, tmp_path: Path) -> None:
    """10^13 rows of 52 float32 numbers are 2.08 PB. The learner needs some MB more.

    A row has observation (22), action (6), reward (1), discount (1) and next observation (22).
    """
    for kind, place in (("memory", "memory"), ("file", "the disk of '.*run'")):
        items = (
            "learner.buffer_size=10000000000000",
            f"learner.replay_storage={kind}",
            "learner.replay=uniform",
            "learner.precision=fp32",
            "learner.threads=1",
        )
        run = command("train", "walker2d_fast", "--out", "run", *(word for item in items for word in ("--set", item)))
        assert run.finish() == 2
        assert len(run.lines) == 1, run.output()
        needs = r"learner\.buffer_size is 10000000000000: the learner needs 2,080,000,0\d\d,\d{3},\d{3} bytes of "
        words = f"{needs}{place}, and [0-9,]+ are free; allowed: a buffer of at most "
        assert re.search(words, run.lines[0]), run.lines[0]
        assert not (tmp_path / "run").exists()
