"""Tests with a robot method that does not return.

Where possible, the threads of a test wait for each other, not for a fixed time.
"""

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
    """A stand-in for the function that ends the process. It records the exit code and releases the hanging call."""

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
    """Without ``begun``, let HangWatch wait up to 60 s for stop() to return.

    With ``begun``, let it wait for this event, and then at most LIMIT for stop() to return.
    """
    join = threading.Thread.join

    def wait(thread: threading.Thread, timeout: float | None = None) -> None:
        if begun and thread.name == "stop":
            assert begun.wait(PATIENCE)
        elif timeout is not None:
            timeout = PATIENCE
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", wait)


@pytest.mark.parametrize(
    ("stop", "outcome"),
    [
        (None, "the robot has no stop(), so the last action holds"),
        ("works", "stop() was called"),
        ("fails", "stop() failed: OSError: no bus"),
        ("hangs", "stop() did not return either"),
    ],
)
def test_a_hang_stops_the_robot_and_ends_the_process(
    end: End,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stop: str | None,
    outcome: str,
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
    watch.run("observe", end.hang)
    assert end.codes.get(timeout=PATIENCE) == EXIT_HUNG == 70
    assert capfd.readouterr().err == f"HUNG: observe() has not returned for 200 ms; {outcome}; the driver ends\n"
    assert stopped == ([False] if stop else [])  # stopped once, during the hang


def test_calls_that_return_in_time_do_not_end_the_process() -> None:
    """For 2 s, make calls that are far shorter than the limit of 1 s. If a busy machine delays a call, try again.

    If the machine suspends a thread for the whole limit, HangWatch takes this for a hanging call.
    """
    for _ in range(10):
        end, longest = End(), 0.0
        watch = HangWatch(1.0, None, end)
        begin = now = time.monotonic()
        while now - begin < 2.0:
            assert watch.run("observe", lambda: "seen") == "seen"
            before, now = now, time.monotonic()
            longest = max(longest, now - before)
        with pytest.raises(ZeroDivisionError):
            watch.run("apply", lambda: 1 // 0)
        if max(longest, time.monotonic() - now) < 0.5:
            break
    else:
        pytest.fail("in each of ten attempts, a call took at least half of the time limit")
    assert end.codes.empty()


def test_no_call_reaches_the_robot_after_a_hang(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call may begin during or after stop(), because the process then ends and nothing could stop a new movement."""
    patient(monkeypatch)
    stopping, calls, other = threading.Event(), [], queue.Queue[str]()

    def bring_to_rest() -> None:
        stopping.set()
        with pytest.raises(queue.Empty):
            other.get(timeout=LIMIT / 2)  # the other thread has time for a call, but must not make it
        calls.append("stop")

    watch = HangWatch(LIMIT, bring_to_rest, end)
    assert watch.run("observe", lambda: stopping.wait(PATIENCE))
    watch.run("apply", lambda: other.put("apply"))
    assert calls == ["stop"]
    assert end.codes.get_nowait() == EXIT_HUNG


class Stuck(Robot):
    """A robot that hangs in the call named ``where``."""

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
        self._maybe("phase() or reward")
        return 0.0

    def stop(self) -> None:
        self.at_rest = True


@pytest.mark.parametrize("where", ["observe", "apply", "phase() or reward"])
def test_every_method_of_the_loop_is_watched(
    where: str, end: End, spec: RobotSpec, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    patient(monkeypatch)
    monkeypatch.setattr("td3_robot.driver.robot.HangWatch", lambda limit, stop: HangWatch(limit, stop, end))
    robot = Stuck(spec, end)
    body = RobotBody(robot, 5 * LIMIT)  # a long limit, so that no call before the hang exceeds it
    body.step(body.action)
    body.command(body.action)
    robot.where = where
    body.step(body.action)
    body.command(body.action)
    assert end.codes.get(timeout=PATIENCE) == EXIT_HUNG
    assert robot.at_rest
    assert f"HUNG: {where}() has not returned" in capfd.readouterr().err
