"""One process of a run, and its restarts."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from td3_robot.errors import exit_code_of
from td3_robot.messages import Status
from td3_robot.runtime.launch import Process
from td3_robot.runtime.process import LIFELINE, STOP_SIGNALS
from td3_robot.runtime.run_folder import RunFolder

STOPPED_CODES = {0, *(code for number in STOP_SIGNALS for code in (exit_code_of(number), -number))}
"""Exit codes of a process that a signal stops. If the process has no signal handlers yet, the code is -number."""


class ChildState(enum.Enum):
    """State of a process: STARTING → READY → FINISHED → OVER. A restart sets STARTING again."""

    STARTING = "starting"  # or not started yet
    READY = "ready"
    FINISHED = "finished"  # the process has reported that its work is done
    OVER = "over"  # the process has ended, and will not be restarted


_REPORTED = {state.value: state for state in (ChildState.READY, ChildState.FINISHED)}


class Child:
    """A process that the supervisor starts and restarts.

    Attributes:
        popen: the running process; None if no process runs.
        incarnation: number of the newest start.
        status: newest Status since the newest start; None before the first Status.
        deaths: times (s, ``time.monotonic``) of the deaths after which the supervisor restarted the process.
        started_at: time of the newest start (s, the supervisor's clock).
    """

    def __init__(self, process: Process, run: RunFolder) -> None:
        self.name = process.name
        self.row = process.row
        self.state = ChildState.STARTING
        self.popen: subprocess.Popen[bytes] | None = None
        self.incarnation = 0
        self.status: Status | None = None
        self.started_at = 0.0
        self.deaths: list[float] = []
        self.log: Path = run.logs / f"{process.name}.log"
        self._run = run.path

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    @property
    def ready(self) -> bool:
        return self.state is not ChildState.STARTING

    def start(self, lifeline: int, now: float) -> None:
        """Start the process.

        Args:
            lifeline: file descriptor that the process gets in the environment variable LIFELINE.
            now: the time (s, the supervisor's clock).
        """
        arguments = ["--run", str(self._run), "--name", self.name, "--incarnation", str(self.incarnation)]
        with self.log.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", self.row.module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.row.environment, LIFELINE: str(lifeline), "PYTHONUNBUFFERED": "1"},
                pass_fds=(lifeline,),
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which forwards it once
            )
        self.state, self.status, self.started_at = ChildState.STARTING, None, now

    def report(self, status: Status) -> None:
        """Store a report of the process and update the state."""
        self.status = status
        if self.state is not ChildState.OVER:
            self.state = _REPORTED.get(status.state, ChildState.STARTING)

    def died_too_often(self) -> bool:
        """Return whether the restart rule forbids another start."""
        now = time.monotonic()
        return sum(now - died < self.row.restart.window_s for died in self.deaths) >= self.row.restart.times

    def prepare_restart(self) -> None:
        """Count a death, and give the next start a new incarnation."""
        self.deaths.append(time.monotonic())
        self.incarnation += 1

    def send_signal(self, number: signal.Signals) -> None:
        if self.popen:
            with contextlib.suppress(ProcessLookupError):
                self.popen.send_signal(number)

    def last_log_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix(f"{self.name}: ")
        return "none"
