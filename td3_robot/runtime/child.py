"""One process of a run, and its restarts."""

from __future__ import annotations

import contextlib
import enum
import signal
import time
from pathlib import Path

from td3_robot.errors import exit_code_of
from td3_robot.messages import Status
from td3_robot.runtime.hosts import Hosts, Running, Start
from td3_robot.runtime.launch import Process
from td3_robot.runtime.process import STOP_SIGNALS
from td3_robot.runtime.run_folder import RunFolder

STOPPED_CODES = {0, *(code for number in STOP_SIGNALS for code in (exit_code_of(number), -number))}
"""Exit codes of a process that ends without an error or at a stop signal.

If a signal ends the process before the process has signal handlers, the code is minus the number of the signal.
"""


class ChildState(enum.Enum):
    """State of a process: STARTING → READY → FINISHED → OVER. A restart sets STARTING again."""

    STARTING = "starting"  # or not started yet
    READY = "ready"
    FINISHED = "finished"  # the process has reported that its work is done
    OVER = "over"  # the process has ended; the supervisor starts it again only on a host that joins the cluster


_REPORTED = {state.value: state for state in (ChildState.READY, ChildState.FINISHED)}


class Child:
    """A process that the supervisor starts and restarts.

    Attributes:
        process: the running process; None if no process runs.
        incarnation: number of the newest start.
        status: newest Status since the newest start; None before the first Status.
        deaths: times (s, ``time.monotonic``) of the deaths after which the supervisor restarted the process.
        started_at: time of the newest start (s, the supervisor's clock).
        reported_at: time of the newest report or start (s, the supervisor's clock).
        silent: whether the supervisor has told the user that no report comes.
    """

    def __init__(self, process: Process, run: RunFolder, hosts: Hosts) -> None:
        self.name = process.name
        self.row = process.row
        self.state = ChildState.STARTING
        self.process: Running | None = None
        self.incarnation = 0
        self.status: Status | None = None
        self.started_at = self.reported_at = 0.0
        self.silent = False
        self.deaths: list[float] = []
        self.log: Path = run.logs / f"{process.name}.log"
        self._hosts = hosts

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def ready(self) -> bool:
        return self.state is not ChildState.STARTING

    def start(self, now: float) -> None:
        """Start the process. ``now`` is the time on the supervisor's clock, in s."""
        start = Start(self.name, self.row.module, self.row.environment, self.incarnation, self.log)
        self.process = self._hosts.start(start)
        self.state, self.status = ChildState.STARTING, None
        self.started_at = self.reported_at = now
        self.silent = False

    def report(self, status: Status, now: float) -> None:
        """Store a report of the process and update the state. ``now`` is the time on the supervisor's clock, in s."""
        self.status, self.reported_at = status, now
        if self.state is not ChildState.OVER:
            self.state = _REPORTED.get(status.state, self.state)  # other states, such as "failed", change nothing

    def died_too_often(self) -> bool:
        """Return whether the restart rule forbids another start."""
        now = time.monotonic()
        return sum(now - died < self.row.restart.window_s for died in self.deaths) >= self.row.restart.times

    def prepare_restart(self) -> None:
        """Count a death of the process. Give the next start a new incarnation."""
        self.deaths.append(time.monotonic())
        self.incarnation += 1

    def send_signal(self, number: signal.Signals) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def last_log_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix(f"{self.name}: ")
        return "none"
