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

    def __init__(self, folder: Path, cores: Sequence[str], options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.environment = {"TMPDIR": str(folder), "RAY_TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
        self._process = subprocess.Popen(
            [sys.executable, str(MACHINES), *options, *cores],
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
        process: psutil.Process | None = self.process(name)
        while process := process and process.parent():
            line = process.cmdline()
            for number, node in enumerate(self._nodes):
                if any(node in word for word in line):
                    return number
        raise AssertionError(f"{name} runs on no host")

    def process(self, name: str) -> psutil.Process:
        """Return the running process of a training that has this name."""
        words = {process: process.info["cmdline"] for process in self._running()}
        [process] = [process for process, line in words.items() if line[line.index("--name") + 1] == name]
        return process

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
    yield from _made(getattr(request, "param", CORES))


@pytest.fixture
def blind_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with the hosts of ``CORES``. Only the head sees the files in ``tmp_path``."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make mount namespaces")
    yield from _made(CORES, ("--hide", str(tmp_path)))


def _made(cores: Sequence[str], options: Sequence[str] = ()) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's socket paths do not fit below tmp_path
    made = Cluster(folder, cores, options)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)
