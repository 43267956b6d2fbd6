"""Starts processes on one host of a Ray cluster. An :class:`Agent` is an actor of Ray: an object in its own process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from td3_robot.runtime.hosts import Lifeline
from td3_robot.runtime.storage import Keeper, retried
from td3_robot.transport import endpoints
from td3_robot.util import files
from td3_robot.util.ports import keep_port, port_of

_LONGEST_OUTPUT = 1 << 20  # bytes of output that one report holds
_REMOVER = """
import os, shutil, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
os.read(int(sys.argv[1]), 1)
for folder in sys.argv[2:]:
    shutil.rmtree(folder, ignore_errors=True)
"""
_STARTER = """
import subprocess, sys
inherited = [int(word) for word in sys.argv[1].split(",")]
process = subprocess.Popen(sys.argv[2:], pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=sys.stderr)
print(process.pid, flush=True)
print(process.wait(), flush=True)
"""
"""A program that starts a second program. It prints the process ID of the second program, and later its exit code.

When an actor ends, Ray kills the actor's child processes, but not its grandchildren. This program is a child of the
actor, and the learner is a child of this program. So Ray does not kill the learner, which can then save its checkpoint.
"""
KILLED = -int(signal.SIGKILL)
"""Exit code of a process that SIGKILL ended."""


def remover(read_end: int, *folders: Path) -> list[str]:
    """Return the command line of a program that removes folders when a pipe closes.

    The program must inherit the pipe's ``read_end``. The program removes the folders even if SIGKILL ends the processes
    that hold the other end.
    """
    return [sys.executable, "-c", _REMOVER, str(read_end), *map(str, folders)]


class Report(NamedTuple):
    """State of a process: its exit code, and at most 1 MiB of new output.

    The code is None until the process has ended and the reports have returned all of its output.
    """

    code: int | None
    output: bytes


class Agent:
    """The processes on one host. When the agent ends, they end too.

    When the process that created the agent ends, Ray ends the agent.
    """

    def __init__(self) -> None:
        # The user's runtime folder is unsuitable: systemd removes it at logout, but Ray continues after the logout.
        self._folder = Path(tempfile.mkdtemp(prefix=endpoints.SOCKETS_PREFIX))
        self._lifeline = Lifeline()
        ended, alive = os.pipe()  # the pipe closes when the agent and its processes have ended
        self._inherited = (self._lifeline.read_end, alive)
        self._nodes: dict[str, _Node] = {}
        self._ports: list[socket.socket] = []
        # Ray sets OMP_NUM_THREADS, which limits the threads of its actors. The nodes choose their threads themselves.
        self._environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        output = self._folder / "remover.output"
        self._remover = _Node(remover(ended, self._folder), self._environment, output, (ended,))

    def folder(self) -> str:
        """Return the folder of this agent.

        The folder contains a run folder for each policy server and its simulators. If the run has a
        ``cluster.storage``, the folder also contains a run folder for the learner.
        """
        return str(self._folder)

    def keep_port(self) -> int:
        """Return a free TCP port of this host. The agent keeps the port until it ends."""
        self._ports.append(keep_port())
        return port_of(self._ports[-1])

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write files. ``contents`` maps their paths to their bytes. Only this user may read the files."""
        for name, content in contents.items():
            path = Path(name)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_atomically(path, content, 0o600)

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start Python with these arguments. ``environment`` holds additional environment variables."""
        output = self._folder / f"{name}.output"
        variables = self._lifeline.environment({**self._environment, **environment})
        self._nodes[name] = _Node([sys.executable, *arguments], variables, output, self._inherited)

    def send_signal(self, name: str, number: int) -> None:
        self._nodes[name].send_signal(number)

    def reports(self) -> dict[str, Report]:
        """Return the state of each process, with its new output."""
        return {name: node.report() for name, node in self._nodes.items()}

    @staticmethod
    def keep(run: str) -> str:
        """Move the run folder of an ended learner to a place that outlives this agent, and return its new path.

        This method first deletes the keys in the run folder.
        """
        shutil.rmtree(Path(run) / "keys", ignore_errors=True)
        kept = Path(tempfile.mkdtemp(prefix="td3-robot-learner-"))
        return str(Path(run).rename(kept))

    @staticmethod
    def copy(kept: str) -> None:
        """Copy the new and changed files of a kept run folder to the storage. Then remove the folder.

        Raises:
            NodeError: the storage fails. The folder stays.
        """
        retried(Keeper(Path(kept)).copy)
        shutil.rmtree(kept)

    def close(self) -> None:
        """Kill the processes that still run, free the ports, and remove the folder."""
        for node in self._nodes.values():
            node.send_signal(signal.SIGKILL)
            node.wait()
        for port in self._ports:
            port.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Node:
    """A process and its starter. Both inherit file descriptors."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, inherited: Sequence[int]
    ) -> None:
        self._output = output
        with output.open("wb") as file:
            self._starter = subprocess.Popen(
                [sys.executable, "-c", _STARTER, ",".join(map(str, inherited)), *command],
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
        assert self._starter.stdout
        self._answers = self._starter.stdout
        self._pid = int(self._answers.readline())
        self._code: int | None = None
        self._reported = 0  # bytes of output

    def wait(self) -> None:
        self._starter.wait()

    def send_signal(self, number: int) -> None:
        if self._starter.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def report(self) -> Report:
        """Return the state of the process, with the output since the last report."""
        if self._code is None and self._starter.poll() is not None:
            self._code = int(self._answers.readline() or KILLED)  # no answer if the starter itself was killed
        with self._output.open("rb") as file:
            file.seek(self._reported)
            output = file.read(_LONGEST_OUTPUT)
        self._reported += len(output)
        return Report(None if len(output) == _LONGEST_OUTPUT else self._code, output)
