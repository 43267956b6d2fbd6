"""How long operators and takeovers wait, and whether an error names the silent process. The clock is fake."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from td3_robot.errors import CommandError
from td3_robot.messages import Command, Message, Reply
from td3_robot.operators import Operator, Takeover, make_command


class FakeBus:
    """A connection to a policy server. The server sends only Heartbeats. Waiting advances the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.alive = True
        self.clients = {"policy": SimpleNamespace(received_at=self.now)}

    def send(self, link: str, message: Message) -> None: ...

    def welcome(self, link: str) -> bool:
        return link in self.clients

    def receive(self, timeout: float) -> list[Any]:
        self.now += timeout
        if self.alive:
            self.clients["policy"].received_at = self.now
        return []


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> FakeBus:
    made = FakeBus()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def takeover(bus: FakeBus, period_ms: float) -> Takeover:
    detail = {"actions": [{"name": "torque"}], "period_ms": period_ms, "deadline_ms": 200.0}

    def ask(_: Any, command: Command) -> Reply:
        return Reply(command.id, "policy", "", "active", detail)

    fake: Any = bus
    return Takeover(ExitStack(), fake, make_command("takeover", "leg"), ask)


def wait_for_a_minute(leg: Takeover, bus: FakeBus) -> None:
    end = bus.now + 60.0
    while bus.now < end:
        leg.wait()


@pytest.mark.parametrize(
    ("period_ms", "waits"),
    [
        (20.0, 0.02),
        (1000.0, 0.1),  # half of the deadline of 200 ms
    ],
)
def test_a_wait_takes_one_period_but_at_most_half_of_the_deadline(bus: FakeBus, period_ms: float, waits: float) -> None:
    leg, begin = takeover(bus, period_ms), bus.now
    for number in range(1, 4):
        leg.wait()
        assert bus.now == pytest.approx(begin + number * waits)


def test_a_pause_of_the_program_does_not_end_the_takeover(bus: FakeBus) -> None:
    leg = takeover(bus, 20.0)
    bus.now += 10.0
    bus.alive = False  # the server's next Heartbeat has not arrived yet
    leg.command([0.0])
    leg.wait()
    bus.alive = True
    leg.wait()


def test_a_silent_server_is_reported_after_three_seconds(bus: FakeBus) -> None:
    leg, begin = takeover(bus, 20.0), bus.now
    bus.alive = False
    with pytest.raises(CommandError, match="has been silent for 3 s; leg has the safe action"):
        wait_for_a_minute(leg, bus)
    assert bus.now == pytest.approx(begin + 3.0, abs=0.05)


def test_an_error_shows_the_whole_path_of_a_relative_socket(
    bus: FakeBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration can name a socket in the working folder. From another folder, no server is found there."""
    monkeypatch.chdir(tmp_path)
    bus.alive = False
    fake: Any = bus
    with pytest.raises(CommandError, match=f"no answer from policy server at ipc://{tmp_path}/policy.sock within"):
        Operator("ipc://policy.sock", None, 5.0)._ask_over(fake, make_command("state"))


@pytest.mark.parametrize(
    ("alive", "text"),
    [
        (True, "no answer from leg within 5 s, but the policy server at ipc:///p answers; the stop is NOT confirmed"),
        (False, "no answer from policy server at ipc:///p within 5 s; the stop is NOT confirmed"),
    ],
)
def test_an_error_names_the_process_that_is_silent(bus: FakeBus, alive: bool, text: str) -> None:
    bus.alive = alive
    fake: Any = bus
    with pytest.raises(CommandError) as caught:
        Operator("ipc:///p", None, 5.0)._ask_over(fake, make_command("estop", "leg"))
    assert str(caught.value) == text
