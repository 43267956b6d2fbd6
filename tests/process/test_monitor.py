"""Watch real runs and played recordings with ``td3-robot monitor``.

The tests read its JSON lines, and receive its ZeroMQ messages with a plain subscriber.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq
from td3_robot_sims.tasks import spec

from td3_robot.cli.main import main
from td3_robot.messages import Step
from td3_robot.recording.reader import Session

SESSION = Path(__file__).parent.parent / "replay" / "sessions" / "pendulum.mcap"


@pytest.fixture
def plotted(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Collect published messages as PlotJuggler does.

    ``plotted(enough)`` receives until ``enough(messages)`` is true. It returns (seconds, payload) pairs by topic.
    """
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVHWM, 0)
    subscriber.subscribe("")
    subscriber.connect(f"ipc://{tmp_path}/pj")

    def collect(enough: Callable[[dict[str, list[Any]]], Any], timeout: float = 300) -> dict[str, list[Any]]:
        got: dict[str, list[Any]] = {}
        deadline = time.monotonic() + timeout
        while not enough(got):
            left = deadline - time.monotonic()
            assert left > 0, sorted(got)
            assert subscriber.poll(1000 * left), sorted(got)
            topic, payload, seconds = subscriber.recv_multipart()
            got.setdefault(topic.decode(), []).append((float(seconds), msgpack.unpackb(payload)))
        return got

    yield collect
    subscriber.close(linger=0)
    context.term()


def next_report(monitor: Any, fits: Callable[[Any], bool] = lambda _: True) -> Any:
    return json.loads(monitor.wait_for(r"^\{.*", lambda match: fits(json.loads(match[0]))))


def test_monitor_follows_a_training_and_blocks_no_node(
    train: Any, command: Callable[..., Any], plotted: Any, tmp_path: Path
) -> None:
    run = train(200_000, "learner.replay_ratio=0.05", "record=true")
    run.wait_for_steps(300)
    monitor = command("monitor", "--run", "run", "--json", "--every", "0.3", "--plotjuggler", f"ipc://{tmp_path}/pj")
    monitor.wait_for(f"^PlotJuggler: ipc://{tmp_path}/pj$")
    wanted = {"sim-0/step", "policy/action/sim-0", "learner/status", "learner/weights"}
    got = plotted(lambda got: wanted <= got.keys() and len(got["sim-0/step"]) > 200)
    walker = spec("Walker2D")
    for seconds, step in got["sim-0/step"]:
        assert abs(seconds - time.time()) < 600
        assert list(step["observation"]) == [channel.name for channel in walker.observations]
        assert list(step["action"]) == [channel.name for channel in walker.actions]
    assert "env_steps" in got["learner/status"][0][1]["figures"]
    report = next_report(
        monitor,
        lambda it: (
            it["processes"].get("learner") == "ready"
            and (it["topics"].get("sim-0/step", {}).get("rate_hz") or 0) > 0
            and it["loop_ms"].get("sim-0", {}).get("median", 0) > 0
            and it["states"].items()
            >= {"policy": "active", "sim-0": "active"}.items()  # a monitor that starts late also gets the states
        ),
    )
    assert (report["unreadable"], report["faults"]) == (0, [])
    psutil.Process(monitor.process.pid).send_signal(signal.SIGSTOP)  # a stopped monitor blocks no node
    run.wait_for_more_steps(1000)
    psutil.Process(monitor.process.pid).send_signal(signal.SIGCONT)
    next_report(monitor)
    monitor.interrupt()
    assert monitor.finish() == 130, monitor.output()
    assert not (tmp_path / "pj").exists()
    table = command("monitor", "--run", "run", "--every", "0.5")
    table.wait_for("^sim-0/step")
    table.interrupt()
    assert table.finish() == 130, table.output()
    # Heartbeats for the first monitor can still arrive. They must cause no warning.
    assert "WARNING" not in table.output()
    assert command("monitor", "--run", "run", "--seconds", "0.2").finish() == 0
    to_the_end = command("monitor", "--run", "run", "--json")
    next_report(to_the_end)
    run.interrupt()
    assert run.finish() == 130
    assert to_the_end.finish() == 0, to_the_end.output()  # the monitor ends when the run ends
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["learner"]["counters"]["missed"] == 0
    assert not any("not_recorded" in process["counters"] for process in final.values())


def test_monitor_shows_every_message_of_a_played_recording(
    command: Callable[..., Any], plotted: Any, tmp_path: Path
) -> None:
    """The player repeats the recording in a loop.

    The first passes can be over before the monitor knows that ``plotted`` has subscribed.
    """
    monitor = command(
        "monitor", "--endpoint", "ipc://m", "--json", "--every", "0.5", "--plotjuggler", f"ipc://{tmp_path}/pj"
    )
    monitor.wait_for(r"^PlotJuggler: ")  # a player that gets no answer for 10 s ends
    player = command("play", str(SESSION), "--monitor", "ipc://m", "--loop", "--json")
    recorded = [m for _, m in Session([SESSION]).messages((Step.NAME,)) if isinstance(m, Step)]

    loops: dict[int, list[Any]] = {}

    def whole(got: dict[str, list[Any]]) -> list[Any]:
        """Return all Steps of one loop (one pass through the recording). The list is empty if no loop is complete."""
        for _, step in got.get("sim-0/step", [])[sum(map(len, loops.values())) :]:
            # The player adds 1000 to the incarnation in each loop.
            loops.setdefault(step["incarnation"] // 1000, []).append(step)
        return next((loop for loop in loops.values() if len(loop) == len(recorded)), [])

    got = plotted(whole)
    for step, original in zip(whole(got), recorded, strict=True):
        assert list(step["observation"].values()) == original.observation[0].tolist()
        assert list(step["action"].values()) == original.action[0].tolist()
        assert step["sequence"] == original.sequence
    assert {"learner/weights", "policy/action/sim-0", "sim-0/status"} <= got.keys()
    report = next_report(monitor, lambda it: "policy/bye" in it["topics"])
    player.interrupt()
    assert player.finish() == 130
    assert "lost" not in json.loads(player.lines[-1])
    monitor.interrupt()
    assert monitor.finish() == 130
    assert report["unreadable"] == 0
    # No message is missing, even where one loop ends and the next begins.
    assert {name for name, topic in report["topics"].items() if topic["missing"]} == set()


def test_wrong_arguments_give_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--endpoint", f"ipc://{tmp_path}/m"]
    for arguments, words in (
        ([], "give either --run DIR"),
        (["--run", str(tmp_path)], "holds no run"),
        ([*here, "--run", str(tmp_path)], "--endpoint cannot be combined with"),
        (["--endpoint", "tcp://0.0.0.0:5555"], "beyond loopback"),
        (["--run", str(tmp_path), "--keys", "k"], "--keys needs --endpoint"),
        ([*here, "--every", "0"], "--every is 0; allowed: above 0 s"),
        ([*here, "--seconds", "-1"], "--seconds is -1"),
        ([*here, "--seconds", "nan"], "--seconds is nan"),
        ([*here, "--anywhere"], "--anywhere needs --plotjuggler"),
        ([*here, "--plotjuggler", "tcp://0.0.0.0:9872"], "allowed: ipc://PATH and tcp:// on loopback"),
        ([*here, "--plotjuggler", "9872"], "'9872' is not understood"),
    ):
        assert main(["monitor", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert main(["play", str(SESSION), "--monitor", "ipc://m", "--topics", "nope"]) == 2
    assert "--topics: 'nope' cannot be played; allowed: hello, welcome" in capsys.readouterr().err
    assert main(["play", str(SESSION), "--monitor", "nowhere"]) == 2
    assert "'nowhere' is not understood" in capsys.readouterr().err
    assert main(["monitor", "--every", "soon"]) == 2
