"""The loop of a node: how long it waits, what it does while a queue is full, and when it follows a server that moves.

The process of a node logs refused real-time settings.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.core_types import Input, Output
from td3_robot.messages import Bye, Hello, Message
from td3_robot.runtime import realtime
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.outbox import Outbox
from td3_robot.runtime.process import log_realtime
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.transport.link import ServerLink
from td3_robot.transport.memory import MemoryBus, Network


class Clock:
    """Time that passes only while code sleeps or waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[tuple[str, float]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(("sleep", round(seconds, 6)))
        self.now += seconds


class FakeBus:
    """A bus without links. It receives nothing, and sends at most ``room`` messages."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.room = 0
        self.sent: list[Message] = []

    def receive(self, timeout: float) -> list[Input]:
        self.clock.waits.append(("poll", round(timeout, 6)))
        self.clock.now += timeout
        return []

    def send(self, to: str, message: Message) -> bool:
        del to
        if self.room:
            self.room -= 1
            self.sent.append(message)
            return True
        return False


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Node, Clock, FakeBus]:
    clock = Clock()
    monkeypatch.setattr("td3_robot.runtime.node.time", clock)
    bus: Any = FakeBus(clock)
    return Node("simulator", "sim-0", 0, RunFolder(tmp_path), Config(), bus), clock, bus


@pytest.fixture
def outbox() -> tuple[Outbox, FakeBus]:
    bus: Any = FakeBus(Clock())
    return Outbox(bus, Counter()), bus


def test_without_a_deadline_the_node_polls_for_the_whole_timeout(node: tuple[Node, Clock, FakeBus]) -> None:
    it, clock, _ = node
    it._receive(0.05, None)
    assert clock.waits == [("poll", 0.05)]


def test_node_polls_until_shortly_before_a_deadline_and_then_sleeps(node: tuple[Node, Clock, FakeBus]) -> None:
    """The deadline is in 70 ms. The node polls for 50 ms and then 18 ms, sleeps for 2 ms, and polls without waiting."""
    it, clock, _ = node
    deadline = 100.07
    while clock.now < deadline:
        it._receive(0.05, deadline)
    assert clock.waits == [("poll", 0.05), ("poll", 0.018), ("sleep", 0.002), ("poll", 0.0)]
    it._receive(0.05, deadline)
    assert clock.waits[-1] == ("poll", 0.0)  # the deadline has passed, so the node does not wait


def test_patient_node_keeps_messages_while_the_queue_is_full(outbox: tuple[Outbox, FakeBus]) -> None:
    it, bus = outbox
    it.add([("learner", Bye("a")), ("policy", Bye("b"))])
    it.flush()
    assert not bus.sent
    bus.room = 2
    it.flush()
    assert [message.reason for message in bus.sent if isinstance(message, Bye)] == ["a", "b"]
    assert not it.counters


def test_real_time_robot_drops_messages_while_the_queue_is_full(outbox: tuple[Outbox, FakeBus]) -> None:
    it, bus = outbox
    it.patient = False
    it.add([("learner", Bye("a")), ("policy", Bye("b"))])
    it.flush()
    bus.room = 2
    it.flush()
    assert not bus.sent
    assert it.counters == {"undelivered": 2}


def test_refused_real_time_settings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for values, lines in ({}, 0), ({"processors": [4000]}, 1):
        requested = configuration.parse({"realtime": values}).realtime
        log_realtime(requested, realtime.apply(requested))
        assert len(caplog.records) == lines
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refused real-time setting: on processors 4000: " in caplog.text


class IdleCore:
    """A core without work."""

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        del inputs, now
        return []


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("silent", [True, False])
def test_node_follows_a_silent_server_that_moves(tmp_path: Path, *, supervised: bool, silent: bool) -> None:
    """The run folder names a new endpoint of the learner. The node moves to it only if the old endpoint is silent."""
    old, new = "tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"
    config = configuration.parse({"task": "Pendulum-v1"}, source="test")
    run = RunFolder.create(tmp_path / "run", config)
    run.write_run(endpoints={"learner": old, "supervisor": "ipc:///supervisor"})
    network = Network()
    bus, learner = MemoryBus(network, time.monotonic), MemoryBus(network, time.monotonic)
    node = Node("evaluator", "evaluator", 0, run, config, bus, supervised=supervised)
    for link in ("learner", "supervisor"):
        node.connect(link, ())
    if not silent:
        bus.clients["learner"].received_at = float("inf")
    run.write_run(endpoints={"learner": new, "supervisor": "ipc:///supervisor"})
    learner.serve(new, ServerLink("learner", "learner", {"evaluator": ()}, config.agreement(), 1))

    def stop() -> bool:
        node.stop_signal = signal.SIGTERM
        return False

    node.spin(IdleCore(), busy=lambda: False, report=Figures, after=stop)
    bus.receive(0.0)
    assert [type(message) for _, message in learner.receive(0.0)] == [Hello] * silent
    assert bus.clients["learner"].endpoint == (new if silent else old)
