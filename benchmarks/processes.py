"""Real processes for soak.py and faults.py. Each process has a log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from td3_robot.errors import NodeError

HERE = Path(__file__).parent
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Processes:
    """Processes by name. They run in ``folder``, and each has a log there.

    Attributes:
        found: the newest process of each name. :meth:`adopt_children` adds the children of commands.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, psutil.Process] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def script(self, name: str, file: str, *words: str, **how: Any) -> None:
        """Start a script that lies in the folder benchmarks."""
        self.start(name, str(HERE / file), *words, **how)

    def verb(self, name: str, *words: str, **how: Any) -> None:
        """Start a td3-robot command."""
        self.start(name, "-m", "td3_robot.cli.main", *words, **how)

    def start(
        self, name: str, *words: str, before: Sequence[str] = (), environment: Mapping[str, str] = _NOTHING
    ) -> None:
        """Start Python with the arguments ``words``. A new log replaces the log of an earlier process with this name.

        Args:
            name: name of the process.
            words: the arguments of Python.
            before: words that precede the interpreter on the command line, for example a command that starts the
                interpreter.
            environment: variables in addition to those of this process.
        """
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*before, sys.executable, *words],
                cwd=self.folder,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        self.found[name] = psutil.Process(process.pid)

    def adopt_children(self, name: str) -> None:
        """Add each child of a command to ``found``. The key is the child's ``--name``; skip children without a name."""
        for child in self.found[name].children():
            words = child.cmdline()
            if "--name" in words:
                self.found[words[words.index("--name") + 1]] = child

    def wait(self, name: str, text: str) -> None:
        """Wait until the log of a process contains a text.

        Raises:
            NodeError: the text does not come within a minute.
        """
        log, end = self.folder / f"{name}.log", time.monotonic() + 60
        while text not in log.read_text():
            if time.monotonic() > end:
                raise NodeError(f"{log.name} does not contain {text!r} after 60 s:\n{log.read_text()}")
            time.sleep(0.1)

    def ended(self, name: str) -> bool:
        process = self.found[name]
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    def end(self) -> None:
        """Stop the processes, the newest first. Each has a minute to end, for example to complete a recording."""
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
