"""A method of the robot that does not return: real threads, that wait for each other and not for a clock."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from td3_robot.driver.hang import EXIT_HUNG, HangWatch
from td3_robot.driver.robot import Robot, RobotBody
from td3_robot.specs import Float32, RobotSpec

LIMIT = 0.2  # s
PATIENCE = 60.0  # s


class End:
    """In place of the end of the process: lets go of what hangs, and tells the exit code."""

    def __init__(self) -> None:
        self.codes: queue.Queue[int] = queue.Queue()
        self.released = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.put(code)
        self.released.set()

    def hang(self) -> None:
        assert self.released.wait(PATIENCE)


@pytest.fixture
def end() -> End:
    return End()


def patient(monkeypatch: pytest.MonkeyPatch, begun: threading.Event | None = None) -> None:
    """Let a stop() take its time on a busy machine: all it needs, or only until it has ``begun`` if it never ends."""
    join = threading.Thread.join

    def wait(thread: threading.Thread, timeout: float | None = None) -> None:
        if begun:
            assert begun.wait(PATIENCE)
        join(thread, timeout if begun or timeout is None else PATIENCE)

    monkeypatch.setattr(threading.Thread, "join", wait)


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (None, "the robot has no stop() of its own, so what it was told last holds"),
        ("works", "stop() was called"),
        ("fails", "stop() failed: OSError: no bus"),
        ("hangs", "stop() did not return either"),
    ],
)
def test_it_is_stopped_and_the_process_ends(
    end: End,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stop: str | None,
    told: str,
) -> None:
    stopped: list[bool] = []
    begun = threading.Event()
    patient(monkeypatch, begun if stop == "hangs" else None)

    def bring_to_rest() -> None:
        stopped.append(end.released.is_set())
        begun.set()
        if stop == "fails":
            raise OSError("no bus")
        if stop == "hangs":
            end.hang()

    watch = HangWatch(LIMIT, bring_to_rest if stop else None, end)
    watch.over("observe", end.hang)
    assert end.codes.get(timeout=PATIENCE) == EXIT_HUNG == 70
    assert capfd.readouterr().err == f"HUNG: observe() has not returned for 200 ms; {told}; the driver ends\n"
    assert stopped == ([False] if stop else [])  # while it still hung, and once


def test_calls_that_return_are_let_be() -> None:
    """However many: 2 s of calls, each far shorter than the limit of 1 s; again where one was kept from the processor.

    A call that stands still for as long as the limit, with its thread, cannot be told from one that hangs.
    """
    for _ in range(10):
        end, longest = End(), 0.0
        watch = HangWatch(1.0, None, end)
        begin = now = time.monotonic()
        while now - begin < 2.0:
            assert watch.over("observe", lambda: "seen") == "seen"
            before, now = now, time.monotonic()
            longest = max(longest, now - before)
        with pytest.raises(ZeroDivisionError):
            watch.over("apply", lambda: 1 // 0)
        if max(longest, time.monotonic() - now) < 0.5:
            break
    else:
        pytest.fail("in none of ten times was every call shorter than half the limit")
    assert end.codes.empty()


def test_a_call_that_returns_too_late_is_the_last(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the robot is brought to rest nobody may tell it to move, nor after it: the process is about to end."""
    patient(monkeypatch)
    stopping, told, other = threading.Event(), [], queue.Queue[str]()

    def bring_to_rest() -> None:
        stopping.set()
        with pytest.raises(queue.Empty):
            other.get(timeout=LIMIT / 2)  # time for the other thread to say something, if it could
        told.append("stop")

    watch = HangWatch(LIMIT, bring_to_rest, end)
    assert watch.over("observe", lambda: stopping.wait(PATIENCE))
    watch.over("apply", lambda: other.put("apply"))
    assert told == ["stop"]
    assert end.codes.get_nowait() == EXIT_HUNG


class Stuck(Robot):
    """Hangs where it is told to."""

    def __init__(self, spec: RobotSpec, end: End) -> None:
        self.spec, self.end = spec, end
        self.where = ""
        self.at_rest = False

    def _maybe(self, where: str) -> None:
        if self.where == where:
            self.end.hang()

    def observe(self) -> Float32:
        self._maybe("observe")
        return np.zeros(3, np.float32)

    def apply(self, action: Float32) -> None:
        del action
        self._maybe("apply")

    def reward(self, observation: Float32, action: Float32) -> float:
        del observation, action
        self._maybe("judge")
        return 0.0

    def stop(self) -> None:
        self.at_rest = True


@pytest.mark.parametrize("where", ["observe", "apply", "judge"])
def test_every_method_of_the_loop_is_watched(
    where: str, end: End, spec: RobotSpec, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    patient(monkeypatch)
    monkeypatch.setattr("td3_robot.driver.robot.HangWatch", lambda limit, stop: HangWatch(limit, stop, end))
    robot = Stuck(spec, end)
    body = RobotBody(robot, 5 * LIMIT)  # of which the calls before the one that hangs must not take all
    body.step(body.action)
    body.command(body.action)
    robot.where = where
    body.step(body.action)
    body.command(body.action)
    assert end.codes.get(timeout=PATIENCE) == EXIT_HUNG
    assert robot.at_rest
    assert f"HUNG: {where}() has not returned" in capfd.readouterr().err
