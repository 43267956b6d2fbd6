"""The monitor's core and its reports: counts, gaps and newest values, with an injected clock and no sockets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from td3_robot.core_types import Peer
from td3_robot.messages import Action, Evaluation, LifecycleChange, Message, Phase, Record, Status
from td3_robot.monitor import node as monitor_node
from td3_robot.monitor.core import Monitor
from td3_robot.monitor.node import table
from td3_robot.monitor.summary import facts
from td3_robot.recording.values import rows
from td3_robot.specs import RobotSpec
from td3_robot.transport import codec
from td3_robot.transport import link as handshake
from tests.conftest import Terminal
from tests.sessions import BEGIN

Make = Callable[..., Any]


class Nodes:
    """Nodes that offer messages to a monitor. Messages are 0.1 s apart."""

    def __init__(self) -> None:
        self.monitor = Monitor(BEGIN, lambda *arguments: self.received.append(arguments))
        self.received: list[Any] = []
        self.now = 100.0
        self.peers: dict[tuple[str, int], Peer] = {}
        self.sequence: dict[tuple[str, int, str], int] = {}

    def send(self, name: str, *messages: Message, skip: int = 0, incarnation: int = 0) -> None:
        for message in messages:
            self.offer(name, message.NAME, codec.encode(message), skip, incarnation)

    def offer(self, name: str, topic: str, payload: bytes, skip: int = 0, incarnation: int = 0) -> None:
        hello = handshake.hello("node", name, client=0, incarnation=incarnation)
        peer = self.peers.setdefault((name, incarnation), Peer("monitor", name.encode(), hello, {}))
        number = self.sequence.get((name, incarnation, topic), -1) + 1 + skip
        self.sequence[name, incarnation, topic] = number
        self.monitor.step([(peer, Record(topic, "policy", number, 0, payload))], self.now)
        self.now += 0.1


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_report_shows_counts_rates_and_gaps(nodes: Nodes, make_step: Make, spec: RobotSpec) -> None:
    """A Hello comes at 100.0 s. Ten Steps follow, the first at 100.1 s. Three Steps are lost after the fifth Step."""
    nodes.send("sim-0", handshake.hello("simulator", "sim-0", client=0, robots=2, spec=spec))
    for number in range(10):
        nodes.send("sim-0", make_step(number, 2, reward=np.array([1, 2], "f4")), skip=3 * (number == 5))
    report = nodes.monitor.report(102.0)
    steps = report["topics"]["sim-0/step"]
    assert (steps["count"], steps["gaps"], steps["missing"]) == (10, 1, 3)
    assert steps["rate_hz"] == 5.0  # 10 Steps in the 2 s since the first message
    assert steps["age_s"] == pytest.approx(1.0, abs=1e-6)  # the last Step came at 101.0 s
    assert steps["last"] == {"phase": "2 mid", "reward": 1.5, "episode_step": 9, "action": "policy", "weights": 0}
    assert report["messages"] == 11
    assert nodes.monitor.report(104.0)["topics"]["sim-0/step"]["rate_hz"] == 0.0
    text = "\n".join(table(report))
    assert "sim-0/step" in text
    assert "phase 2 mid, reward 1.5" in text


def test_loop_time_uses_the_sources_own_clock(nodes: Nodes, make_step: Make) -> None:
    """The Step at 40 ms applied the answer to the Step at 7 ms. So this loop time is 33 ms.

    The Step at 90 ms gives no loop time: it applied the answer to Step 6, and Step 6 is missing.
    """
    for sequence, milliseconds, answered in ((0, 0, 0), (1, 7, 0), (2, 14, 1), (3, 40, 1), (7, 90, 6)):
        nodes.send("sim-0", make_step(sequence, stamp=milliseconds * 1_000_000, answered=answered))
    assert nodes.monitor.report(nodes.now)["loop_ms"] == {"sim-0": {"median": 7.0, "longest": 33.0}}
    assert nodes.monitor.report(nodes.now)["loop_ms"] == {}


def test_report_shows_states_and_faults(nodes: Nodes) -> None:
    nodes.send("sim-0", LifecycleChange("sim-0", "inactive", "active", "autostart", 1))
    nodes.send("sim-0", LifecycleChange("sim-0", "active", "fault", "no action for 100 ms", 2))
    nodes.send("policy", LifecycleChange("sim-0", "active", "fault", "no action for 100 ms", 2))
    nodes.send(
        "learner", Status("learner", "ready", "", {"env_steps": 7.0}, {}), Status("learner", "failed", "x", {}, {})
    )
    report = nodes.monitor.report(nodes.now)
    assert (report["states"], report["processes"]) == ({"sim-0": "fault"}, {"learner": "failed"})
    assert report["faults"] == [
        {"what": "sim-0 is in fault: no action for 100 ms", "first_s": 0.1, "count": 1},
        {"what": "learner failed: x", "first_s": 0.4, "count": 1},
    ]
    assert "fault at 0.400 s, once: learner failed: x" in table(report)


def test_report_shows_nodes_that_have_become_silent(nodes: Nodes, make_step: Make) -> None:
    """The policy server sends its last message at 100.0 s. The simulator sends its last message at 103.0 s."""
    nodes.send("policy", LifecycleChange("policy", "inactive", "active", "autostart", 1))
    nodes.now = 103.0
    nodes.send("sim-0", make_step(0))
    assert nodes.monitor.report(105.0)["silent_s"] == {}
    report = nodes.monitor.report(107.5)
    assert report["silent_s"] == {"policy": 7.5}
    assert "silent: policy for 7.5 s" in table(report)
    nodes.now = 107.6
    nodes.send("policy", LifecycleChange("policy", "inactive", "active", "autostart", 1))
    assert nodes.monitor.report(107.7)["silent_s"] == {}


def test_unreadable_messages_are_counted_and_text_cannot_control_the_terminal(nodes: Nodes, make_step: Make) -> None:
    nodes.offer("sim-0", "step", b"\x81\xa1x\x01")
    nodes.offer("policy", "action", b"\xc1")
    nodes.offer("policy", "action", codec.encode(Action("?", 0, 0, 0, np.zeros((1, 2), "f4"), 1, 0, 0)))
    nodes.send("\x1b[2Jevil", Status("e", "ready", "\x1b[2J", {}, {}), make_step(0))
    report = nodes.monitor.report(nodes.now)
    assert report["unreadable"] == 2
    assert report["topics"]["policy/action"]["last"] == {}  # the monitor does not know the source of this Action
    assert len(nodes.received) == 2
    text = "\n".join(table(report))
    assert "2 NOT READABLE" in text
    assert "\x1b" not in text


def test_a_restarted_node_starts_with_new_counts(nodes: Nodes, make_step: Make, spec: RobotSpec) -> None:
    """The restarted node has more robots than before."""
    for incarnation, robots in ((1, 2), (2, 3)):
        hello = handshake.hello("simulator", "sim-0", client=0, robots=robots, spec=spec)
        step = make_step(0, robots, incarnation=incarnation)
        nodes.send("sim-0", hello, step, incarnation=incarnation)
        action = Action("sim-0", incarnation, 0, 0, np.zeros((robots, 2), "f4"), 1, 0, 0)
        nodes.send("policy", action)
    report = nodes.monitor.report(nodes.now)
    assert report["topics"]["sim-0/step"]["count"] == 1
    assert (report["topics"]["policy/action"]["count"], report["unreadable"]) == (2, 0)
    _, message, names = nodes.received[-1]
    assert [row["action"] for row in rows(message, names)] == [{"left": 0.0, "right": 0.0}] * 3


def test_a_summary_counts_robots_by_phase_and_shows_the_mean_return(make_step: Make) -> None:
    assert facts(make_step(0))["phase"] == "first"
    ended = make_step(3, 3, phase=np.array([Phase.MID, Phase.TRUNCATED, Phase.MID], np.uint8))
    assert facts(ended)["phase"] == "2 mid, 1 truncated"
    evaluation = Evaluation(4, 0, 0, np.array([1.0, 4.0]), np.array([5, 6], np.uint32))
    assert facts(evaluation) == {"version": 4, "episodes": 2, "return": 2.5}
    assert facts(Evaluation(4, 0, 0, np.zeros(0), np.zeros(0, np.uint32)))["return"] is None


def test_each_report_replaces_the_previous_one_on_a_terminal(
    nodes: Nodes, make_step: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.send("sim-0", make_step(0), Status("sim-0", "ready", "x" * 100, {}, {}))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "5")
    assert monitor_node._show(nodes.monitor.report(nodes.now), False, ["PlotJuggler: ipc://here"])
    text = terminal.getvalue()
    assert text.startswith("\x1b[H\x1b[2JPlotJuggler: ipc://here\n")
    lines = text.removeprefix("\x1b[H\x1b[2J").splitlines()
    assert len(lines) == 4  # the cursor needs a free line
    assert max(map(len, lines)) == 59
