"""The supervisor counts the deaths of processes, starts them again on hosts that join, and reports how they ended."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from td3_robot.config.schema import Config
from td3_robot.core_types import Input, Peer
from td3_robot.messages import Status
from td3_robot.runtime.child import Child, ChildState
from td3_robot.runtime.hosts import Hosts, NoRoomError, Start
from td3_robot.runtime.launch import Process, ProcessRow, RestartRule
from td3_robot.runtime.prepare import Prepared
from td3_robot.runtime.progress import Progress
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.supervisor import Supervisor
from td3_robot.runtime.training import train
from td3_robot.transport import link as handshake


class OneLostHost(Hosts):
    """The simulator has lost its host. If ``room`` is true, another host has joined and can start the simulator."""

    def __init__(self, run: Path, simulator: Process) -> None:
        super().__init__(run)
        self.room = False
        self.started: list[int] = []
        self._simulator = simulator

    def start(self, start: Start) -> Any:
        if not self.room:
            raise NoRoomError
        self.started.append(start.incarnation)

    def joined(self) -> Sequence[Process]:
        return [self._simulator] if self.room else []


def test_the_loss_of_a_host_counts_as_one_death(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    simulator = Process("sim-0", ProcessRow(module="sims", restart=RestartRule(times=3)))
    hosts, said = OneLostHost(run.path, simulator), list[str]()
    supervisor = Supervisor(run, Config(), [simulator], said.append, hosts)
    child = Child(simulator, run, hosts)
    supervisor.children = [child]
    supervisor._restart(child, -9)
    assert child.state is ChildState.OVER
    assert said[-1] == "no host has room for sim-0; the run continues without it"
    supervisor._add_joined()
    hosts.room = True
    supervisor._add_joined()
    assert hosts.started == [1]
    assert supervisor.restarts == {"sim-0": 1}


class LateProcess:
    """A bus of the supervisor with one client. The client's last Status comes after ``late`` turns, then its Bye.

    If ``bye`` is false, the client sends no Bye.
    """

    def __init__(self, late: int, *, bye: bool) -> None:
        hello = handshake.hello("simulator", "sim-0", client=1, incarnation=3, robots=1)
        self.peer = Peer("supervisor", b"sim-0", hello, {})
        self.turns = 0
        self._late, self._bye = late, bye

    def receive(self, timeout: float) -> list[Input]:
        del timeout
        self.turns += 1
        return [(self.peer, status("last"))] if self.turns == self._late else []

    def peers(self, link: str) -> list[Peer]:
        assert link == "supervisor"
        return [] if self._bye and self.turns > self._late else [self.peer]


def status(text: str) -> Status:
    return Status("sim-0", "ready", text, {}, {})


def stopped(tmp_path: Path, bus: LateProcess) -> tuple[Supervisor, Child]:
    """A supervisor whose only process has sent one report and has ended."""
    run = RunFolder.create(tmp_path / "run", Config())
    simulator = Process("sim-0", ProcessRow(module="sims"))
    hosts = Hosts(run.path)
    supervisor = Supervisor(run, Config(), [simulator], list[str]().append, hosts)
    child = Child(simulator, run, hosts)
    child.incarnation, child.status = 3, status("earlier")
    supervisor.children, supervisor.bus = [child], bus  # type: ignore[assignment]
    return supervisor, child


def test_after_a_stop_the_supervisor_listens_until_the_bye_of_each_process(tmp_path: Path) -> None:
    bus = LateProcess(20, bye=True)
    supervisor, child = stopped(tmp_path, bus)
    supervisor._await_last_reports()
    assert child.status
    assert (child.status.detail, bus.turns) == ("last", 21)


def test_the_supervisor_does_not_wait_for_the_bye_of_an_earlier_incarnation_or_of_a_starting_process(
    tmp_path: Path,
) -> None:
    supervisor, child = stopped(tmp_path, bus := LateProcess(1000, bye=False))
    child.incarnation = 4
    supervisor._await_last_reports()
    assert bus.turns == 1
    child.incarnation, child.status = 3, None
    supervisor._await_last_reports()
    assert bus.turns == 2


def test_the_wait_for_a_bye_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process sends no Bye. Each turn takes 0.05 s of the limit of 2 s."""
    supervisor, _ = stopped(tmp_path, bus := LateProcess(1000, bye=False))
    monkeypatch.setattr(time, "monotonic", lambda: bus.turns * 0.05)
    supervisor._await_last_reports()
    assert bus.turns == pytest.approx(40, abs=1)


@pytest.mark.parametrize(
    ("code", "words", "saved"),
    [
        (0, None, "everything learned is saved"),
        (130, None, "everything learned is saved"),
        (1, "learner ended with exit code 1; see ", "the newest checkpoint is saved"),
        (-signal.SIGKILL, "learner was killed by SIGKILL; see ", "the newest checkpoint is saved"),
        (-40, "learner was killed by signal 40; see ", "the newest checkpoint is saved"),  # a real-time signal
    ],
)
def test_a_stop_says_that_everything_learned_is_saved_unless_the_learner_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str | None, saved: str
) -> None:
    """``stop`` replaces ``Supervisor.supervise``. It acts as if the learner had ended with ``code`` after a Ctrl-C."""
    run = RunFolder.create(tmp_path / "run", Config())
    (run.checkpoints / "checkpoint-000000000100.safetensors").touch()

    def stop(supervisor: Supervisor, watch: Any) -> int:
        del watch
        child = next(child for child in supervisor.children if child.name == "learner")
        process: Any = SimpleNamespace(poll=lambda: code, wait=lambda: code)
        child.process = process
        supervisor._interrupts = 1
        supervisor._reap()
        supervisor._collect(child)
        return 130

    monkeypatch.setattr(Supervisor, "supervise", stop)
    stream = io.StringIO()
    train(Prepared(run, Config(), []), Progress(stream, 1000), "RESUME")
    lines = stream.getvalue().splitlines()
    assert lines[-1] == f"stopped; {saved}; continue: RESUME"
    assert [line for line in lines if line.startswith("learner")] == (
        [f"{words}{run.logs / 'learner.log'}"] if words else []
    )


def test_a_ready_process_that_reports_its_failure_still_counts_as_ready(tmp_path: Path) -> None:
    """If READY_TIMEOUT has passed since the start of a process that is not ready, the supervisor ends the run.

    So a failure must not make a ready process unready. Otherwise, the run could end before the process restarts.
    """
    run = RunFolder.create(tmp_path / "run", Config())
    child = Child(Process("sim-0", ProcessRow(module="sims")), run, Hosts(run.path))
    for state, ready in (("starting", False), ("failed", False), ("ready", True), ("failed", True)):
        child.report(Status("sim-0", state, "", {}, {}), 0.0)
        assert child.ready is ready


def test_the_supervisor_names_a_process_that_sends_no_reports(tmp_path: Path) -> None:
    run, said = RunFolder.create(tmp_path / "run", Config()), list[str]()
    supervisor = Supervisor(run, Config(), [], said.append)
    row = ProcessRow(module="sims")
    child, starting = (Child(Process(name, row), run, Hosts(run.path)) for name in ("sim-0", "sim-1"))
    supervisor.children = [child, starting]

    def look(now: float) -> list[str]:
        supervisor._clock = now
        said.clear()
        supervisor._look_for_silence()
        return list(said)

    child.report(status("ready"), 5.0)
    assert look(34.0) == []
    words = "sim-0 has sent no report for 30 s: it hangs, or is in a long call; see "
    assert look(36.0) == [f"{words}{run.logs / 'sim-0.log'}"]
    assert look(66.0) == []
    child.report(status("ready"), 66.5)
    assert look(67.0) == ["sim-0 reports again"]
    assert look(68.0) == []
    assert look(97.0) == [f"{words}{run.logs / 'sim-0.log'}"]
    child.state = ChildState.OVER
    assert look(98.0) == []
