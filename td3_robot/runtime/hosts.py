"""The hosts on which the supervisor starts the processes of a run: this machine, or other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from td3_robot.runtime.launch import Process
from td3_robot.runtime.process import LIFELINE


class Start(NamedTuple):
    """One start of a process.

    Attributes:
        name: name of the process in the run.
        module: the Python module to run.
        environment: environment variables to set.
        incarnation: number of this start.
        log: file to which the output of the process is appended.
    """

    name: str
    module: str
    environment: Mapping[str, str]
    incarnation: int
    log: Path

    def arguments(self, run: Path | str) -> list[str]:
        """Return the command-line arguments with which Python starts the process. ``run`` is its run folder."""
        return ["-m", self.module, "--run", str(run), "--name", self.name, "--incarnation", str(self.incarnation)]


class Running(Protocol):
    """A started process, for example a ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that killed the process; None while it runs."""

    def wait(self) -> int:
        """Wait for the end of the process and return its code."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""


class NoRoomError(Exception):
    """The host of a process was lost, and no other host has room. The run continues without this process."""


class Lifeline:
    """A pipe from this process to other processes, which follow this lifeline.

    When this process ends, even by SIGKILL, the pipe closes. Then the other processes end, too.
    """

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()
        os.set_inheritable(self.read_end, True)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process that follows this lifeline. The process must inherit ``read_end``."""
        return {**environment, LIFELINE: str(self.read_end), "PYTHONUNBUFFERED": "1"}

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self._write_end)


class Hosts:
    """The hosts of a run, as a context manager. When the supervisor leaves the context, all processes of the run end.

    This class starts all processes on this machine. Its subclass ``RayHosts`` uses the machines of a cluster.

    Args:
        run: path of the run folder.

    Attributes:
        stopped: returns the number of the signal that asked the run to stop, or 0. The supervisor sets this function
            before it enters the context.
    """

    def __init__(self, run: Path) -> None:
        self.stopped: Callable[[], int] = lambda: 0
        self._path = run

    def __enter__(self) -> Hosts:
        self._lifeline = Lifeline()
        return self

    def __exit__(self, *_: object) -> None:
        self._lifeline.close()

    def place(self, processes: Sequence[Process]) -> list[Process]:
        """Return the processes to start on these hosts."""
        return list(processes)

    def endpoints(self) -> Mapping[str, str]:
        """Return a map from link to endpoint. Processes on other hosts must reach these endpoints.

        A link that is not in the map gets its configured endpoint, or else a socket on this machine.
        """
        return {}

    def joined(self) -> Sequence[Process]:
        """Return the processes to start on hosts that have joined since the last call."""
        return ()

    def start(self, start: Start) -> Running:
        """Start a process.

        Raises:
            NoRoomError: no host has room for the process, and the run continues without it.
            NodeError: no host can run the process, and the run cannot continue without it.
        """
        with start.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *start.arguments(self._path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._lifeline.environment({**os.environ, **start.environment}),
                pass_fds=(self._lifeline.read_end,),
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which forwards it once
            )
