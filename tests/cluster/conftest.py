"""A Ray cluster of three hosts on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from td3_robot.transport.endpoints import SOCKETS_PREFIX

MACHINES = Path(__file__).with_name("ray_machines.py")
CORES = ("2", "4", "4")  # the head has fewer cores, so that the learner runs on another host


class Cluster:
    """The cluster as a process.

    Attributes:
        folder: folder for all temporary files of the cluster and of the trainings on it.
        environment: variables that a training needs.
        address: address of the head.
    """

    def __init__(self, folder: Path, cores: Sequence[str]) -> None:
        self.folder = folder
        self.environment = {"TMPDIR": str(folder), "RAY_TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
        self._process = subprocess.Popen(
            [sys.executable, str(MACHINES), *cores],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environment},
            text=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._orders, self._answers = self._process.stdin, self._process.stdout
        facts: dict[str, Any] = json.loads(self._answers.readline())
        self.address, self._nodes = str(facts["address"]), list(facts["nodes"])

    def kill(self, number: int) -> None:
        """Kill all processes of a host at once."""
        print("kill", number, file=self._orders, flush=True)
        assert self._answers.readline() == "killed\n"

    def add(self, cores: int) -> int:
        """Add a host, and return its number."""
        print("add", cores, file=self._orders, flush=True)
        self._nodes.append(self._answers.readline().strip())
        return len(self._nodes) - 1

    def host_of(self, name: str) -> int:
        """Return the number of the host on which a process of a training runs."""
        words = {process: process.info["cmdline"] for process in self._running()}
        [process] = [process for process, line in words.items() if line[line.index("--name") + 1] == name]
        while process := process.parent():
            line = process.cmdline()
            for number, node in enumerate(self._nodes):
                if any(node in word for word in line):
                    return number
        raise AssertionError(f"{name} runs on no host")

    def left_behind(self) -> list[str]:
        """Return the folders for sockets and keys that still exist, and the processes of trainings that still run."""
        folders = [str(path) for path in self.folder.glob(f"{SOCKETS_PREFIX}*")]
        return folders + [" ".join(process.info["cmdline"]) for process in self._running()]

    def _running(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
            if "--incarnation" in words and "-c" not in words and variables.get("TMPDIR") == str(self.folder):
                found.append(process)
        return found

    def close(self) -> None:
        self._orders.close()
        self._process.wait(60)
        self._answers.close()


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster with the hosts of ``CORES``; a test may pass other hosts as an indirect parameter."""
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's socket paths do not fit below tmp_path
    made = Cluster(folder, getattr(request, "param", CORES))
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)
