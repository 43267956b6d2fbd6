"""Trainings on Ray clusters of two or three hosts. The hosts share this machine; their links use TCP with keys."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.runtime import metrics
from td3_robot.runtime.run_folder import RunFolder
from tests.cluster.conftest import SMALL, Cluster, nothing_is_left, start_training
from tests.conftest import Command, poll_until

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.slow
def test_four_simulators_on_two_hosts_learn_the_pendulum(
    train: Callable[..., Command], cluster: Cluster, tmp_path: Path
) -> None:
    """A pendulum that hangs down has a return of about -1200. One that stands has about -150."""
    run = train("evaluation.every=1000", "evaluation.target_return=-400", "total_steps=40_000", "learner.device=auto")
    run.wait_for("^ready: .*policy-0.*policy-1")
    endpoints = json.loads((tmp_path / "run" / "run.json").read_text())["endpoints"]
    assert [endpoints[link].partition("://")[0] for link in ("learner", "supervisor", "monitor")] == ["tcp"] * 3
    assert {cluster.host_of(name) for name in ("policy-0", "policy-1")}.isdisjoint({cluster.host_of("learner")})
    assert cluster.host_of("policy-0") == cluster.host_of("sim-0") != cluster.host_of("policy-1")
    assert run.finish() == 0, run.output()
    assert "an evaluation reached evaluation.target_return -400" in run.output()
    assert "; 0 Steps lost;" in run.output()
    records = metrics.read(tmp_path / "run" / "metrics.jsonl", "evaluation")
    assert max(record["eval_return_mean"] for record in records) >= -400
    nothing_is_left(cluster, tmp_path / "run")


@pytest.mark.slow
def test_training_survives_the_loss_of_each_host_except_the_head(
    train: Callable[..., Command], cluster: Cluster, tmp_path: Path
) -> None:
    """First a host with simulators is lost, then the learner's host is lost. After Ctrl-C, a command resumes the run.

    Simulators and policy servers do not start again when the learner moves. So each simulator continues its sequence
    numbers, and the learner sees each lost Step as a gap in the sequence numbers.
    """
    others = [*(f"sim-{number}" for number in range(4)), "policy-0", "policy-1"]
    run = train("evaluation.every=0", "total_steps=100_000")
    run.wait_for_steps(1200)
    [robots] = {cluster.host_of("policy-0"), cluster.host_of("policy-1")} - {0}
    cluster.kill(robots)
    run.wait_for(r"host .* was lost; policy-\d continues on host")
    run.wait_for_more_steps(1000)
    before = [cluster.process(name).pid for name in others]
    cluster.kill(cluster.host_of("learner"))
    run.wait_for("host .* was lost; learner continues on host")
    run.wait_for_more_steps(500)
    assert [cluster.process(name).pid for name in others] == before
    run.interrupt()
    assert run.finish() == 130, run.output()
    final: dict[str, Any] = json.loads((tmp_path / "run" / "final.json").read_text())
    made = final["learner"]["figures"]["env_steps"]
    assert made > 2000
    lost = final["learner"]["counters"].get("missed", 0)
    assert bool(lost) == bool(re.search(r"published Steps never reached the learner", run.output()))
    nothing_is_left(cluster, tmp_path / "run")
    more = f"total_steps={made + 200}"
    again = train(more, "evaluation.every=0", "cluster.simulator_cpus=0.5", options=("--resume", "run"))
    assert again.finish() == 0, again.output()


@pytest.mark.slow
def test_a_killed_process_starts_again_on_its_host(
    train: Callable[..., Command], cluster: Cluster, tmp_path: Path
) -> None:
    """Its endpoint stays the same."""

    def endpoints() -> dict[str, str]:
        written: dict[str, str] = json.loads((tmp_path / "run" / "run.json").read_text())["endpoints"]
        return written

    run = train("evaluation.every=0", "total_steps=100_000")
    run.wait_for_steps(1200)
    before = endpoints()
    for name in ("sim-0", "policy-1", "learner"):
        host = cluster.host_of(name)
        cluster.process(name).kill()
        run.wait_for(f"^{name} was killed by SIGKILL; starting it again")
        run.wait_for_more_steps(400)
        assert cluster.host_of(name) == host
        assert endpoints() == before
    run.interrupt()
    assert run.finish() == 130, run.output()
    nothing_is_left(cluster, tmp_path / "run")


@pytest.mark.slow
def test_nothing_is_left_after_the_death_of_the_supervisor(
    train: Callable[..., Command], cluster: Cluster, tmp_path: Path
) -> None:
    run = train("evaluation.every=0", "total_steps=100_000")
    run.wait_for_steps(1200)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    cluster.wait_for_end()
    keys = tmp_path / "run" / "keys"
    poll_until(lambda: not keys.exists(), lambda: "the keys are still there")
    more = f"total_steps={RunFolder(tmp_path / 'run').steps_made() + 200}"
    again = train(more, "evaluation.every=0", options=("--resume", "run"))
    assert again.finish() == 0, again.output()
    nothing_is_left(cluster, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [("2", "4")], indirect=True)
def test_simulators_join_and_leave_together_with_their_host(
    train: Callable[..., Command], command: Callable[..., Command], cluster: Cluster, tmp_path: Path
) -> None:
    """The head has 2 processor cores, the second host has 4, and each simulator needs one core.

    The learner takes the second host for itself, so the head runs 2 simulators. A third host with 2 cores runs 2 more.
    Before the third host joins, ``td3-robot topic echo`` shows Steps of ``sim-0``.
    """
    run = train("cluster.simulators=[1, 4]", "evaluation.every=0", "total_steps=1_000_000")
    run.wait_for("^ready: .*policy-0.*sim-1$")
    run.wait_for_steps(600)
    watched = command("topic", "echo", "step", "--run", "run", "--node", "sim-0", "--count", "3")
    assert watched.finish() == 0, watched.output()
    assert sum('"sim-0"' in line for line in watched.output().splitlines()) == 3, watched.output()
    added = cluster.add(2)
    run.wait_for("^host .*: policy-1, 2 simulators")
    poll_until(lambda: joined(tmp_path / "run") == 4, run.output)
    assert cluster.host_of("sim-3") == added
    cluster.kill(added)
    run.wait_for("^no host has room for sim-3; the run continues without it")
    run.wait_for_more_steps(500)
    run.interrupt()
    assert run.finish() == 130, run.output()
    nothing_is_left(cluster, tmp_path / "run")


def joined(run: Path) -> int:
    """Return how many simulators have joined the learner."""
    log = (run / "logs" / "learner.log").read_text()
    return len(set(re.findall(r"simulator (sim-\d+) joined", log)))


@pytest.mark.slow
def test_the_death_of_the_head_leaves_a_checkpoint(
    train: Callable[..., Command], cluster: Cluster, tmp_path: Path
) -> None:
    run = train("evaluation.every=0", "total_steps=1_000_000")
    run.wait_for_steps(1200)
    assert f"td3-robot train --resume run --cluster {cluster.address}" in run.output()
    cluster.kill(0)
    assert run.finish() != 0
    cluster.wait_for_end()
    assert list((tmp_path / "run" / "checkpoint").glob("checkpoint-*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [("2", "2")], indirect=True)
def test_a_sweep_uses_the_hosts_of_a_cluster(command: Callable[..., Command], cluster: Cluster, tmp_path: Path) -> None:
    """Each of the two hosts has room for one training.

    The second sweep has one more seed, and trains only with this seed.
    """
    sets = ("network.hidden=[8]", "learner.batch_size=16", "learner.learning_starts=100", "evaluation.every=200")
    words = [word for item in (*sets, "evaluation.episodes=1", "learner.compile=false") for word in ("--set", item)]
    arguments = ("sweep", "pendulum", "--steps", "400", "--out", "s", "--cluster", cluster.address, *words)
    first = command(*arguments, "--seeds", "0..1", environment=cluster.environment)
    assert first.finish() == 0, first.output()
    second = command(*arguments, "--seeds", "0..2", environment=cluster.environment)
    assert second.finish() == 0, second.output()
    assert "2 of 3 runs are finished already" in second.output()
    with (tmp_path / "s" / "sweep.csv").open() as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["seed0", "seed1", "seed2"]
    assert (tmp_path / "s" / "sweep.png").exists()
    assert "final policy: mean return" in (tmp_path / "s" / "seed2.log").read_text()
    cluster.wait_for_removal()


@pytest.mark.slow
def test_ctrl_c_stops_the_trainings_of_a_sweep(
    command: Callable[..., Command], cluster: Cluster, tmp_path: Path
) -> None:
    sets = [word for item in (*SMALL[1:], "evaluation.every=1_000_000") for word in ("--set", item)]
    arguments = ("sweep", "pendulum", "--steps", "1e6", "--out", "s", "--cluster", cluster.address, "--seeds", "0..1")
    sweep = command(*arguments, *sets, environment=cluster.environment)
    logs = [tmp_path / "s" / f"seed{seed}.log" for seed in (0, 1)]
    poll_until(lambda: all(log.exists() and "ready: learner" in log.read_text() for log in logs), sweep.output)
    sweep.interrupt()
    assert sweep.finish() == 130, sweep.output()
    assert all("\nstopped; " in log.read_text() for log in logs)
    cluster.wait_for_removal()


@pytest.fixture
def stored(command: Callable[..., Command], blind_cluster: Cluster) -> Callable[..., Command]:
    """Starts a training with a storage. Its learner runs on a host that does not see the run folder."""

    def start() -> Command:
        storage = f"cluster.storage=file://{place(blind_cluster)}"
        run = start_training(command, blind_cluster, "total_steps=1_000_000", "evaluation.every=0", storage)
        run.wait_for_steps(1200)
        assert blind_cluster.host_of("learner") != 0
        poll_until(lambda: newest(place(blind_cluster)), run.output)
        return run

    return start


def place(cluster: Cluster) -> Path:
    """Return the folder that serves as the storage. All hosts see this folder."""
    return cluster.folder / "storage"


def newest(folder: Path) -> int:
    """Return the number of steps of the newest checkpoint in a folder; 0 if there is no checkpoint."""
    found = (folder / "checkpoint").glob("checkpoint-*.safetensors")
    return max((int(path.stem.removeprefix("checkpoint-")) for path in found), default=0)


@pytest.mark.slow
def test_a_learner_on_a_host_without_the_run_folder_continues_from_the_storage(
    stored: Callable[..., Command], command: Callable[..., Command], blind_cluster: Cluster, tmp_path: Path
) -> None:
    """The learner dies with its host and saves no last checkpoint. Later, a resume continues the run on one machine.

    The run counts every lost Step. Each Step that the killed learner received after its newest checkpoint is lost, too.
    """
    run = stored()
    assert not newest(tmp_path / "run")
    process, host = blind_cluster.process("learner"), blind_cluster.host_of("learner")
    process.suspend()
    saved = newest(place(blind_cluster))
    blind_cluster.kill(host)
    process.kill()
    run.wait_for("host .* was lost; learner continues on host")
    run.wait_for_more_steps(500)
    assert blind_cluster.host_of("learner") not in (0, host)
    log = (tmp_path / "run" / "logs" / "learner.log").read_text()
    assert f"continues from checkpoint-{saved:012d}.safetensors" in log
    run.interrupt()
    assert run.finish() == 130, run.output()
    final: dict[str, Any] = json.loads((tmp_path / "run" / "final.json").read_text())
    made = int(final["learner"]["figures"]["env_steps"])
    learner = final["learner"]["counters"]
    published = sum(final[f"sim-{number}"]["counters"]["steps"] for number in range(4))
    assert learner["missed"] > 0
    # Ctrl-C ended the learner before the last Steps came.
    assert 0 <= published - learner["steps"] - learner["missed"] < 100
    assert newest(tmp_path / "run") == newest(place(blind_cluster)) == made
    for name in ("metrics.jsonl", "policy.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (place(blind_cluster) / name).read_bytes()
    part = f".part-{(place(blind_cluster) / 'owner').read_text()}"
    stored_names = {path.name for path in place(blind_cluster).iterdir()}
    assert stored_names.isdisjoint({"keys", "config.yaml", "run.json", part})
    nothing_is_left(blind_cluster, tmp_path / "run")
    again = command("train", "--resume", "run", "--set", f"total_steps={made + 200}")
    assert again.finish() == 0, again.output()
    assert metrics.read(tmp_path / "run" / "metrics.jsonl", "evaluation")[-1]["env_steps"] >= made + 200


@pytest.mark.slow
def test_the_storage_has_the_newest_checkpoint_after_the_death_of_the_head(
    stored: Callable[..., Command], command: Callable[..., Command], blind_cluster: Cluster, tmp_path: Path
) -> None:
    """The learner saves a last checkpoint and copies it to the storage. A resume without a cluster fetches the copy."""
    run = stored()
    saved = newest(place(blind_cluster))
    blind_cluster.kill(0)
    assert run.finish() != 0
    blind_cluster.wait_for_end()
    last = newest(place(blind_cluster))
    assert last > saved
    again = command("train", "--resume", "run", "--set", f"total_steps={last + 200}")
    assert again.finish() == 0, again.output()
    assert (
        f"continues from checkpoint-{last:012d}.safetensors" in (tmp_path / "run" / "logs" / "learner.log").read_text()
    )
