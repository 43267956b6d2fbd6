"""Trainings with real processes, sockets and physics: invariants of the design, faults and user mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy
import yaml

from td3_robot.bundle import Bundle
from td3_robot.cli.main import main
from td3_robot.config import loading as configuration
from td3_robot.learner.checkpointing import checkpoint, state
from td3_robot.messages import Step
from td3_robot.recording.reader import Session
from td3_robot.transport.link import LONG_SILENCE
from tests.conftest import SMALL
from tests.in_process import InProcess
from tests.process.conftest import ROOT


def sockets_of(run: Path) -> Path:
    return Path(json.loads((run / "run.json").read_text())["sockets"])


def test_local_training_loses_nothing(train: Any, tmp_path: Path) -> None:
    """The learner gets every Step. Each robot of a Step gives a transition, unless the robot's phase is FIRST."""
    train_run = train(20_000, "robots=8", "simulators=2", "learner.replay_ratio=0.05", "checkpoint.every=0")
    train_run.wait_for("^ready: learner, policy, sim-0, sim-1$")
    assert train_run.finish() == 0, train_run.output()
    assert "0 Steps lost" in train_run.output()
    last = json.loads((tmp_path / "run" / "final.json").read_text())
    learner, sims = last["learner"]["counters"], [last["sim-0"]["counters"], last["sim-1"]["counters"]]
    assert learner["missed"] == learner["gaps"] == learner.get("cut", 0) == 0
    assert last["learner"]["figures"]["env_steps"] >= 20_000
    # The learner stops as soon as it has enough Steps. Each simulator may then have one Step in transit.
    assert 0 <= sum(sim["steps"] for sim in sims) - learner["steps"] <= 2
    # An episode with n Steps gives n - 1 transitions. The learner counts Steps, FIRST phases and transitions
    # separately.
    assert learner["steps"] * 8 - learner["begun"] == learner["transitions"]


def in_process_differences(run: Path, alone: InProcess) -> list[str]:
    """List the differences between a lock-step run and an in-process run. Rows of the replay buffer come first."""
    found = checkpoint.load_newest(run / "checkpoint")
    assert found is not None
    ours, _ = state.save(alone.learner, 0.0)
    lines: list[str] = []
    for name, array in sorted(ours.items(), key=lambda item: item[0] != "replay.rows"):
        theirs = found[1][name]
        # The arrays ``sent.…`` differ: only a learner process writes the configuration into its policies.
        # The arrays ``simulator.…`` differ: they contain times, and the in-process run has only the arrays of its first
        # snapshot.
        if array.tobytes() != theirs.tobytes() and not name.startswith(("sent.", "simulator.")):
            lines.append(f"{run}: {name}: {theirs.shape}, here {array.shape}")
            if array.shape == theirs.shape and array.ndim:
                first = tuple(np.argwhere(array != theirs)[0])
                lines[-1] += f", first at {first}: {theirs[first]!r}, here {array[first]!r}"
    return lines


def test_lockstep_over_processes_equals_one_process_bit_for_bit(train: Any, tmp_path: Path) -> None:
    """Both runs make 1,500 steps, 500 of them as warm-up. Their checkpoints and final policies are equal.

    Two simulators have two robots each.
    """
    overrides = ("simulators=2", "robots=2", "learner.replay_ratio=0.5", "learner.publish_every=3")
    run = train(1500, *overrides, options=("--lockstep", "--seed", "7"))
    assert run.finish() == 0, run.output()
    assert "died" not in run.output()
    config = configuration.load(tmp_path / "run" / "config.yaml")
    alone = InProcess(config)
    alone.run()
    alone.close()
    assert in_process_differences(tmp_path / "run", alone) == []
    distributed = Bundle.load(tmp_path / "run" / "policy.safetensors")
    assert distributed.provenance["updates"] == alone.learner.updates >= 500  # 0.5 · (1500 - 500)
    expected = alone.learner.publisher.final_bundle()  # the averaged policy, as in the shipped configuration
    assert {name: tensor.tobytes() for name, tensor in distributed.tensors.items()} == {
        name: tensor.tobytes() for name, tensor in expected.tensors.items()
    }
    other = InProcess(configuration.load(tmp_path / "run" / "config.yaml", ["seed=8", "total_steps=600"]))
    other.run()
    other.close()
    assert not np.array_equal(
        other.learner.publisher.final_bundle().tensors["actor.0.weight"], expected.tensors["actor.0.weight"]
    )


@pytest.mark.slow
def test_real_time_robots_do_not_wait_for_the_learner(train: Any, tmp_path: Path) -> None:
    """8 robots at 60.6 Hz make 1,000 steps in total in 2 s. The 2,500 updates take longer. The robots do not wait."""
    overrides = ("pacing.mode=realtime", "robots=8", "learner.replay_ratio=5", "learner.replay_ratio_band=128")
    run = train(1000, *overrides, "record=true")
    assert run.finish() == 0, run.output()
    last = json.loads((tmp_path / "run" / "final.json").read_text())
    learner, sim = last["learner"], last["sim-0"]
    assert 1000 <= learner["figures"]["env_steps"] < 1008
    assert learner["figures"]["updates"] >= 2500  # (1000 - 500) · 5
    assert learner["counters"]["beyond_total"] > 0
    assert learner["counters"]["missed"] == learner["counters"]["gaps"] == 0
    # The lead is the number of updates that are due. In real time, the robots do not stop at the band (128). So the
    # lead exceeds the band by more than the updates of two Steps: 2 · 8 robots · 5 updates = 80.
    assert learner["figures"]["lead_max"] > 128 + 80
    # The simulator makes one Step in each control period of 16.5 ms. The simulator is never faster. It is slower only
    # if it misses deadlines.
    messages = Session([tmp_path / "run" / "session.mcap"]).messages((Step.NAME,))
    steps = [message for _, message in messages if isinstance(message, Step)]
    assert sim["counters"]["steps"] == steps[-1].sequence + 1
    elapsed = (steps[-1].stamp - steps[0].stamp) * 1e-9 / 0.0165
    periods = steps[-1].sequence + sim["counters"].get("overruns", 0)
    assert -0.01 < elapsed - periods < 1.01  # a step is late by less than one period


@pytest.fixture
def asked(command: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs ``td3-robot node`` with the given words and returns the answer."""

    def ask(*words: str) -> Any:
        node = command("node", *words, "--run", "run", "--json", "--timeout", "60")
        assert node.finish() == 0, node.output()
        return json.loads(node.output())

    return ask


def test_real_time_robot_uses_its_fallback_without_a_policy_server(train: Any, asked: Any, tmp_path: Path) -> None:
    """While the policy server is down, robots do not wait, but apply the fallback. No Step is lost."""
    run = train(100_000, "pacing.mode=realtime", "pacing.fallback=zero", "robots=8", "learner.replay_ratio=0.1")
    run.wait_for_steps(500)
    run.children()["policy"].kill()
    run.wait_for("^policy was killed by SIGKILL; starting it again$")
    run.until("actions of the new server", lambda: asked("state")["counters"].get("actions", 0) > 0)
    run.interrupt()
    assert run.finish() == 130, run.output()
    last = json.loads((tmp_path / "run" / "final.json").read_text())
    # The server takes some tenths of a second to start. One control period is 16.5 ms.
    assert last["sim-0"]["counters"]["actions_zero"] >= 5
    assert last["policy"]["counters"]["actions"] > 0
    assert last["learner"]["counters"]["missed"] == 0


def test_emergency_stop_halts_a_training_until_activate(train: Any, asked: Any, tmp_path: Path) -> None:
    run = train(100_000, "learner.replay_ratio=0.1")
    run.wait_for_steps(600)
    asked("estop")
    asked("reset")
    halted = asked("state", "--target", "sim-0")["transitions"]
    asked("activate")
    run.wait_for_steps(halted + 500)
    run.interrupt()
    assert run.finish() == 130, run.output()
    log = (tmp_path / "run" / "logs" / "sim-0.log").read_text()
    states = ["sim-0: active -> fault: emergency", "sim-0: fault -> inactive", "sim-0: inactive -> active: activate"]
    assert sorted(states, key=log.index) == states
    assert json.loads((tmp_path / "run" / "final.json").read_text())["learner"]["counters"]["missed"] == 0


def test_sigterm_stops_a_training_like_ctrl_c_but_with_exit_code_143(train: Any, tmp_path: Path) -> None:
    """The code is 128 plus the number of the signal: 143 for SIGTERM (15), 130 for Ctrl-C (2)."""
    run = train(100_000)
    run.wait_for_steps(200)  # so that there is something to continue
    run.process.terminate()
    assert run.finish() == 143, run.output()
    assert "continue: td3-robot train --resume run" in run.output()
    assert not json.loads((tmp_path / "run" / "run.json").read_text())["endpoints"]


def test_training_survives_sigkill_of_each_process(train: Any, tmp_path: Path) -> None:
    # The learner is killed after 4,000 steps and continues from its checkpoint at 3,000 steps. So it loses steps and
    # updates.
    run = train(100_000, "checkpoint.every=3000", "learner.replay_ratio=0.2")
    ready = run.wait_for("^ready")
    assert ready == "ready: learner, policy, sim-0"
    for steps, name in ((1000, "sim-0"), (2000, "policy"), (4000, "learner")):
        run.wait_for_steps(steps)
        run.children()[name].send_signal(signal.SIGKILL)
        run.wait_for(f"^{name} was killed by SIGKILL; starting it again$")
    run.wait_for("^learner is back from its checkpoint: .* updates and .* steps lost$")
    run.wait_for_steps(5000)
    run.interrupt()
    assert run.finish() == 130, run.output()
    for name in ("sim-0", "policy", "learner"):
        assert f"{name} died and was restarted 1 times" in run.output()
    figures = json.loads((tmp_path / "run" / "final.json").read_text())["learner"]["figures"]
    # The restarts do not change the replay ratio. Of the 0.2 · (steps - 500) updates, fewer than 64
    # (``replay_ratio_band``) are missing.
    assert 0 <= 0.2 * (figures["env_steps"] - 500) - figures["updates"] < 64


@pytest.mark.slow
def test_lockstep_with_many_options_equals_one_process(train: Any, tmp_path: Path) -> None:
    """Normaliser and noise settings reach the policy server, and the learner's options work across processes."""
    overrides = (
        "robots=3",
        "simulators=2",
        "learner.n_step=3",
        "learner.replay=lap",
        "learner.gradient_clip=1",
        "learner.normalise_observations=true",
        "learner.replay_ratio=0.5",
        "exploration.kind=ornstein_uhlenbeck",
        "exploration.noise=[0.05, 0.3]",
    )
    run = train(1000, *overrides, options=("--lockstep", "--seed", "3"))
    assert run.finish() == 0, run.output()
    alone = InProcess(configuration.load(tmp_path / "run" / "config.yaml"))
    alone.run()
    alone.close()
    distributed = Bundle.load(tmp_path / "run" / "policy.safetensors")
    expected = alone.learner.publisher.final_bundle()
    assert distributed.provenance["updates"] == alone.learner.updates >= 240  # almost 0.5 · (1000 - 500)
    assert "observation.std" in expected.tensors
    for name, tensor in expected.tensors.items():
        assert distributed.tensors[name].tobytes() == tensor.tobytes(), name


def test_diverging_training_stops_and_keeps_the_last_good_policy(train: Any, tmp_path: Path) -> None:
    """With a learning rate of 1e9 the networks diverge in a few updates. Updates begin after 1,500 steps.

    The learner checks for divergence every 1,000 steps.
    """
    run = train(4000, "learner.learning_rate=1e9", "learner.learning_starts=1500", "checkpoint.every=700")
    assert run.finish() == 2, run.output()
    assert re.search(r"learner cannot run: training diverged: .*kept: the policy after 1000 steps", run.output())
    policy = Bundle.load(tmp_path / "run" / "policy.safetensors")
    assert policy.provenance["env_steps"] == 1000
    saved = checkpoint.load_newest(tmp_path / "run" / "checkpoint")
    assert saved is not None
    _, arrays, scalars = saved
    assert scalars["env_steps"] < 2100  # checkpoints at 700 and 1400, none after the check at 2000
    assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.slow
def test_training_runs_uncompiled_without_a_compiler(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # an empty cache of compiled code
    monkeypatch.setenv("CXX", "/nowhere/g++")
    run = train(700, "learner.compile=true")
    assert run.finish() == 0, run.output()
    lack = "there is no C++ compiler '/nowhere/g++' (to use another one, set CXX)"
    assert f"{lack}: updates run uncompiled" in run.output()
    log = (tmp_path / "run" / "logs" / "learner.log").read_text()
    assert re.search(r"WARNING updates are not compiled and therefore slower: .*/nowhere/g\+\+", log), log
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize(
    ("slow", "steps", "overrides"),
    [
        ("learner", 500, ("network.hidden=[400, 300]", "learner.batch_size=256", "learner.replay_ratio=1")),
        ("simulator", 1200, ("learner.replay_ratio=0.01", "task=Ant")),
    ],
)
def test_replay_ratio_stays_in_its_band(
    slow: str, steps: int, overrides: tuple[str, ...], train: Any, tmp_path: Path
) -> None:
    """The lead (the number of updates that are due) stays in [0, band], even with a slow learner or simulator."""
    band = 16.0
    run = train(steps, f"learner.replay_ratio_band={band}", "learner.learning_starts=300", "robots=4", *overrides)
    assert run.finish() == 0, run.output()
    figures = json.loads((tmp_path / "run" / "final.json").read_text())["learner"]["figures"]
    assert figures["lead_min"] >= 0
    assert figures["lead_max"] <= band
    if slow == "learner":  # the simulator waited: one more Step (4 updates) would raise the lead above the band
        assert figures["lead_max"] > band - 4


@pytest.mark.slow
def test_simulators_join_and_leave_while_training_runs(train: Any, command: Any, tmp_path: Path) -> None:
    run = train(100_000, "learner.replay_ratio=0.1")
    run.wait_for_steps(600)
    log = tmp_path / "run" / "logs" / "learner.log"
    guest = command("sim", "--run", "run", "--name", "guest")
    run.until("the guest", lambda: "simulator guest joined" in log.read_text())
    own = "a process of the run has this name; the run's processes: learner, policy, sim-0"
    for name, why in (("guest", "a simulator of that name takes part in the run in"), ("sim-0", own), ("policy", own)):
        twin = command("sim", "--run", "run", "--name", name)  # must not disconnect the process of that name
        assert twin.finish() == 2, twin.output()
        assert re.search(f"--name is {name!r}[:;,] {why}", twin.lines[-1]), twin.output()
    second = command("learner", "--run", "run")
    assert second.finish() == 2, second.output()
    assert "another learner is using the run folder 'run' (process" in second.lines[-1]
    run.wait_for_more_steps(1000)
    joined, left = (log.read_text().count(f"simulator guest {word}") for word in ("joined", "left"))
    guest.interrupt()
    assert guest.finish() == 130, guest.output()
    run.until("the end of the guest", lambda: log.read_text().count("simulator guest left") > left)
    again = command("sim", "--run", "run", "--name", "guest")  # the guest joins again and stays until the end
    run.until("the guest again", lambda: log.read_text().count("simulator guest joined") > joined)
    run.wait_for_more_steps(1000)
    run.interrupt()
    assert run.finish() == 130, run.output()
    assert again.finish() == 0, again.output()
    counters = json.loads((tmp_path / "run" / "final.json").read_text())["learner"]["counters"]
    assert counters["missed"] == 0
    assert counters.get("late", 0) == 0


@pytest.mark.slow
def test_training_survives_paused_processes_and_sighup_under_nohup(command: Any) -> None:
    """Under nohup, the training ignores SIGHUP but not SIGTERM.

    Processes reconnect after a pause that is a little shorter than PEER_TIMEOUT. The test pauses the simulator, then
    the learner, then all three child processes.
    """
    sets = [word for item in (*SMALL, "learner.replay_ratio=0.1") for word in ("--set", item)]
    run = command("train", "walker2d_fast", "--out", "run", *sets, "--log-every", "0.2", before=["nohup"])
    run.wait_for("^ready")
    for process in (run.process, *run.children().values()):
        process.send_signal(signal.SIGHUP)
    run.wait_for_steps(600)
    for frozen in (["sim-0"], ["learner"], [*run.children()]):
        processes = [run.children()[name] for name in frozen]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(LONG_SILENCE + 0.4)  # the tested pause; less than PEER_TIMEOUT
        for process in processes:
            process.send_signal(signal.SIGCONT)
        run.wait_for_more_steps(300)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143, run.output()


def test_malformed_bytes_on_every_socket_are_only_counted(train: Any, tmp_path: Path, seed: int) -> None:
    import zmq

    run = train(100_000, "learner.replay_ratio=0.2")
    run.wait_for_steps(600)
    sockets = sockets_of(tmp_path / "run")
    rng = np.random.default_rng(seed)
    context = zmq.Context()
    for link in ("policy", "learner", "supervisor"):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 30_000
        dealer.connect(f"ipc://{sockets / link}")
        for size in (0, 1, 7, 1000):
            dealer.send_multipart([rng.bytes(size)])
            dealer.send_multipart([b"step", rng.bytes(size)])
            dealer.send_multipart([rng.bytes(size), rng.bytes(size), rng.bytes(size)])
        dealer.send_multipart([b"action", b"\x80"])
        dealer.close()
        with socket.socket(socket.AF_UNIX) as raw:  # these bytes are not even ZeroMQ's protocol
            raw.connect(str(sockets / link))
            raw.sendall(rng.bytes(4096))
    context.term()
    run.wait_for_more_steps(2000)
    run.interrupt()
    assert run.finish() == 130, run.output()
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    for node in ("policy", "learner"):
        counters = final[node]["counters"]
        # An unknown client sends 13 messages. 8 have a wrong frame count: 4 have one frame and 4 have three. The node
        # drops the other 5 (4 Steps and an Action), because it does not know the client. libzmq may also take the raw
        # bytes for messages. Then the counts are higher.
        assert counters["frames"] >= 8
        assert counters["stranger"] >= 5
    assert final["learner"]["counters"]["missed"] == 0
    assert not any(name in run.output() for name in ("died", "killed"))


def test_training_runs_without_the_runtime_folder(train: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After su, or in a container, XDG_RUNTIME_DIR can name a folder that does not exist."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    run = train(700)
    assert run.finish() == 0, run.output()
    again = command("train", "--resume", "run", "--steps", "600")
    assert again.finish() == 2
    assert "--steps is 600; the run in run has already made 7" in again.lines[-1]


@pytest.mark.slow
def test_two_trainings_at_once_do_not_affect_each_other(train: Any, tmp_path: Path) -> None:
    first = train(700, options=("--lockstep",), out="a")
    second = train(700, options=("--lockstep",), out="b")
    assert first.finish() == 0, first.output()
    assert second.finish() == 0, second.output()
    weights = [safetensors.numpy.load_file(tmp_path / name / "policy.safetensors") for name in "ab"]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_resume_continues_after_an_interrupt(train: Any, command: Any, tmp_path: Path) -> None:
    run = train(100_000, "learner.replay_ratio=0.2")
    run.wait_for_steps(1000)
    children, sockets = run.children(), sockets_of(tmp_path / "run")
    assert set(children) == {"learner", "policy", "sim-0"}
    run.interrupt()
    assert run.finish() == 130, run.output()
    assert not any(child.is_running() for child in children.values())
    assert not sockets.exists()
    assert f"--resume {Path('run')}" in run.output()
    reached = Bundle.load(tmp_path / "run" / "policy.safetensors").provenance["env_steps"]
    again = command("train", "--resume", "run", "--steps", str(reached + 1000), "--log-every", "0.2")
    assert again.wait_for_steps(0) >= reached >= 1000
    assert again.finish() == 0, again.output()
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_each_further_ctrl_c_sends_a_stronger_signal_to_a_stuck_process(train: Any, tmp_path: Path) -> None:
    """A suspended process handles neither SIGINT nor SIGTERM. Each further Ctrl-C sends the next signal immediately."""
    run = train(100_000)
    run.wait_for_steps(100)
    children, sockets = run.children(), sockets_of(tmp_path / "run")
    children["policy"].suspend()
    run.interrupt()
    listening = [children["learner"], children["sim-0"]]
    gone, _ = psutil.wait_procs(listening, timeout=120)  # the other processes end at the first Ctrl-C
    assert len(gone) == 2
    run.interrupt()
    run.wait_for("^policy: sent SIGTERM$")
    run.interrupt()
    run.wait_for("^policy: sent SIGKILL$")
    assert run.finish() == 130, run.output()
    assert not any(child.is_running() for child in children.values())
    assert not sockets.exists()


def test_all_processes_end_when_the_supervisor_is_killed(train: Any) -> None:
    run = train(100_000)
    run.wait_for("^ready")
    children = list(run.children().values())
    run.process.kill()
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert len(gone) == 3
    assert not alive


def test_learner_is_restarted_after_sigterm(train: Any) -> None:
    """The supervisor treats SIGTERM from outside as a crash, not as the end of the training."""
    run = train(100_000, "learner.replay_ratio=0.2")
    run.wait_for_steps(600)
    run.children()["learner"].terminate()
    run.wait_for("^learner ended with exit code 143; starting it again$")
    run.wait_for_more_steps(1000)
    run.interrupt()
    assert run.finish() == 130, run.output()


def test_lockstep_continues_after_the_learner_is_killed(train: Any) -> None:
    run = train(100_000, "learner.replay_ratio=0.1", "checkpoint.every=500", options=("--lockstep",))
    for steps in (600, 1200, 1800):
        run.wait_for_steps(steps)
        run.children()["learner"].kill()
        run.wait_for("^learner was killed by SIGKILL; starting it again$")
    run.wait_for_more_steps(500)
    run.interrupt()
    assert run.finish() == 130, run.output()


@pytest.mark.slow
def test_resume_does_not_delete_folders_named_in_run_json(train: Any, command: Any, tmp_path: Path) -> None:
    """The run.json of a copied run names the socket folder of the original run. It could also name any other folder."""
    run = train(100_000, "checkpoint.every=0")  # without checkpoints, no file disappears during the copy
    run.wait_for_steps(600)
    copy, precious = tmp_path / "copy", tmp_path / "td3-robot-precious"
    shutil.copytree(tmp_path / "run", copy)
    precious.mkdir()
    (precious / "policy").write_text("years of work")
    for sockets in (None, str(precious)):
        facts = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps({**facts, **({"sockets": sockets} if sockets else {})}))
        again = command("train", "--resume", "copy", "--log-every", "0.2")
        again.wait_for("^ready")
        again.interrupt()
        assert again.finish() == 130
    assert (precious / "policy").exists()
    assert sockets_of(tmp_path / "run").is_dir()
    run.wait_for_steps(1000)
    run.interrupt()
    assert run.finish() == 130, run.output()


@pytest.mark.slow
def test_run_ends_with_the_error_of_a_process_that_keeps_failing(train: Any, command: Any, tmp_path: Path) -> None:
    """The metrics file is on a full disk. The supervisor restarts the learner once, then ends the run."""
    launch = yaml.safe_load((ROOT / "launch" / "train.yaml").read_text())
    launch["processes"]["learner"]["restart"] = {"times": 1, "window_s": 300}
    (tmp_path / "once.yaml").write_text(yaml.safe_dump(launch, sort_keys=False))
    run = train(100_000, "learner.replay_ratio=0.1", "launch=once.yaml")
    run.wait_for_steps(600)
    run.interrupt()
    assert run.finish() == 130
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    again = command("train", "--resume", "run")
    assert again.finish() == 1, again.output()
    assert "learner ended with exit code 1, more than 1 times in 300 s" in again.lines[-1]
    assert "run/metrics.jsonl: No space left on device; make room on that disk, then " in again.lines[-1]
    assert "Traceback" not in again.output()


FP32 = ("--set", "learner.precision=fp32", "--set", "learner.threads=2")  # ``auto`` first measures for some seconds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "walker3d"), "walker2d"),
        (("train", "walker2d", *FP32, "--set", "task=Walker3D"), "Walker2D"),
        (("train", "walker2d", "--set", "learner.bach_size=3"), "did you mean 'batch_size'"),
        (("train", "walker2d", "--set", "robots=100"), "replay_ratio_band"),
        (("train", "walker2d", "--steps", "100"), "learner.learning_starts"),
        (("train", "walker2d", *FP32, "--set", "endpoints.policy=tcp://10.0.0.1:5555"), "beyond loopback"),
        (
            ("train", "cartpole_a2c", "--set", "learner.replay_ratio=2"),
            "learner.replay_ratio is 2.0; 'a2c' does not use it, so it must be 1.0",
        ),
        (("train", "cartpole_a2c", "--set", "learner.learning_starts=9"), "with 'a2c', learning_starts must be 0"),
        (("train", "cartpole_a2c", "--set", "exploration.noise=0.5"), "which draws its actions itself"),
        (
            ("train", "cartpole_a2c", "--set", "evaluation.target_return=1"),
            "evaluation.target_return is 1.0 and timing is 'lockstep'",
        ),
        (
            ("train", "cartpole_a2c", "--set", "task=gymnasium:Pendulum-v1"),
            "'a2c', which learns only tasks that begin with 'discrete:'",
        ),
        (
            ("train", "walker2d", "--steps", "9", "--set", "total_steps=8"),
            "--steps and --set total_steps set the same key",
        ),
        (("train", "walker2d", "--offline", "5"), "learner.recordings is empty"),
        (("train", "--resume", "nowhere"), "holds no run"),
        (("train",), "no CONFIG"),
        (("eval", "nothing.safetensors"), "there is no policy 'nothing.safetensors'"),
        (
            ("train", "walker2d", "--set", "timing=lock"),
            "timing is 'lock': invalid enum value 'lock'; allowed: free, lockstep",
        ),
        (("train", "walker2d", "--set", "task=2020-13-45"), "the value is not YAML"),
        (
            ("train", "walker2d", "--set", "network.hidden=[70000]"),
            "network.hidden[0] is 70000; it must be a whole number <= 4096",
        ),
        (("train", "walker2d", *FP32, "--set", "task=gymnasium:os:X-v0"), "task 'gymnasium:os:X-v0' does not exist"),
        (
            ("train", "pendulum", *FP32, "--set", "randomization.mass=[1, 2]"),
            "randomization.mass is [1.0, 2.0]; the backend 'gymnasium' of the task supports only the keys: action",
        ),
        (("train", "walker2d", *FP32, "--set", "task=gymnasum:X"), "'gymnasum'; did you mean 'gymnasium'?"),
        (("train", "x" * 300), "no file"),
        (("train", "--resume", "nowhere", "--seed", "0"), "--seed cannot be combined"),
        (("sim", "--run", "nowhere"), "holds no run"),
        (("sim", "--run", "nowhere", "--name", "a b"), "--name is 'a b'"),
    ],
)
def test_bad_input_gives_one_line_of_error(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian",), "td3-robot: unknown command 'trian'; did you mean 'train'"),
        (("train", "walker2d", "--steps", "5.5"), "--steps is 5.5; allowed: whole numbers from 1"),
        (("train", "walker2d", "--set", "learner.batch_size=0"), "learner.batch_size is 0"),
    ],
)
def test_bad_command_gives_one_line_of_error_and_exit_code_2(
    arguments: tuple[str, ...], words: str, command: Callable[..., Any]
) -> None:
    run = command(*arguments)
    assert run.finish() == 2
    assert words in run.lines[-1]
    assert len(run.lines) == 1, run.output()


def test_folder_with_a_run_is_refused(command: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("task: Walker2D\n")
    run = command("train", "walker2d", "--out", "run")
    assert run.finish() == 2
    assert "--out: run folder 'run' already holds a run; name another folder, or" in run.lines[-1]
    assert "--resume run" in run.lines[-1]


def test_busy_endpoint_is_refused(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "busy"
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(path))
        holder.listen()
        run = command("train", "walker2d", "--out", "run", *FP32, "--set", f"endpoints.policy=ipc://{path}")
        assert run.finish() == 2
        assert f"'ipc://{path}' is busy" in run.output()
        assert os.path.exists(path)


@pytest.mark.parametrize("out", ["file/run", "/proc/run"])  # nobody can make a folder in /proc, which has 0 bytes free
def test_failure_to_create_the_run_folder_gives_one_line_of_error(out: str, command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = command("train", "walker2d", "--out", out, *FP32)
    assert run.finish() == 2
    assert len(run.lines) == 1, run.output()
    assert f"run folder '{out}' cannot be made" in run.lines[0]


@pytest.mark.slow
def test_resume_of_a_finished_run_reports_that_it_is_finished_and_changes_nothing(
    train: Any, command: Any, tmp_path: Path
) -> None:
    run = train(700)
    assert run.finish() == 0, run.output()
    assert "see it:  td3-robot eval run --video walk.mp4" in run.output()
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = command("train", "--resume", "run")
    assert again.finish() == 0
    assert re.fullmatch(
        r"the run in run is finished: 700 steps, final policy: mean return \S+ ± \S+; to continue it: "
        r"td3-robot train --resume run --steps 1400",
        again.output(),
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    longer = command("train", "--resume", "run", "--steps", "800")
    assert longer.finish() == 0, longer.output()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["env_steps"] for record in records if record.get("final")] == [700, 800]
