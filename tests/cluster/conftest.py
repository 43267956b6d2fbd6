"""Ray clusters on this machine, and trainings on them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from td3_robot.transport.endpoints import SOCKETS_PREFIX
from tests.conftest import Command, free_port, poll_until

MACHINES = Path(__file__).with_name("ray_machines.py")
SMALL = (
    "cluster.simulators=4",
    "network.hidden=[64, 64]",
    "learner.batch_size=64",
    "learner.learning_starts=500",
    "learner.precision=fp32",
    "learner.compile=false",
    "checkpoint.every=1000",
)
# Processor cores of each host. The first host is the head. The learner gets a host with 4 cores, so it never runs on
# the head.
CORES = ("2", "4", "4")
# On a busy machine, Ray's own time limits end healthy hosts. Ray notices a killed host without them, because its
# connections close.
PATIENCE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_health_check_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}


class Cluster:
    """A Ray cluster that another process starts.

    Attributes:
        folder: folder for all temporary files of the cluster and of the trainings on it.
        environment: environment variables that a training needs.
        address: address of the head.
    """

    def __init__(self, folder: Path, cores: Sequence[str], options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.environment = {"TMPDIR": str(folder), "RAY_TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
        self._process = self._start(str(MACHINES), *options, *cores)
        assert self._process.stdin
        assert self._process.stdout
        self._orders, self._answers = self._process.stdin, self._process.stdout
        begun = self._answers.readline()
        if not begun:
            self.close()
            raise AssertionError(f"the cluster did not start:\n{self._log.read_text()}")
        facts: dict[str, Any] = json.loads(begun)
        self.address, self._nodes = str(facts["address"]), list(facts["nodes"])

    def _start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        with self._log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **PATIENCE, **self.environment, **variables},
                text=True,
            )

    @property
    def _log(self) -> Path:
        return self.folder / "cluster.log"

    def kill(self, number: int) -> None:
        """Kill Ray's processes on a host. The training's processes there notice this, and end soon after."""
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
        """Return the process that has this name in a running training."""

        def found() -> list[psutil.Process]:
            words = {process: process.info["cmdline"] for process in self._running()}
            return [process for process, line in words.items() if line[line.index("--name") + 1] == name]

        # After the loss of a host, two processes can have the same name for a short time.
        [process] = poll_until(
            lambda: one if len(one := found()) == 1 else None, lambda: f"{len(found())} processes with the name {name}"
        )
        return process

    def left_behind(self) -> list[str]:
        """Return the temporary folders and the processes that trainings have left on this machine."""
        folders = [str(path) for path in self.folder.glob(f"{SOCKETS_PREFIX}*")]
        return folders + [" ".join(process.info["cmdline"]) for process in self._running()]

    def wait_for_end(self) -> None:
        """Wait until no process of a training runs."""
        poll_until(lambda: not self._running(), lambda: f"left behind: {self.left_behind()}")

    def wait_for_removal(self) -> None:
        """Wait until trainings have left nothing behind."""
        poll_until(lambda: not self.left_behind(), lambda: f"left behind: {self.left_behind()}")

    def _running(self) -> list[psutil.Process]:
        """Return the processes of trainings, without the ``python -c`` programs that start them."""
        words = {process: process.info["cmdline"] or [] for process in self._all()}
        return [process for process, line in words.items() if "--incarnation" in line and "-c" not in line]

    def _all(self) -> list[psutil.Process]:
        """Return the processes of trainings and of Ray."""
        found = psutil.process_iter(["name", "cmdline", "environ"])
        return [process for process in found if (process.info["environ"] or {}).get("TMPDIR") == str(self.folder)]

    def close(self) -> None:
        self._orders.close()
        self._process.wait(60)
        self._answers.close()


class Head(Cluster):
    """The head of a cluster that accepts only clients with a token.

    ``ray start`` starts the head with ``options`` and the environment variables ``variables``.

    Attributes:
        dashboard: address of Ray's dashboard; empty if the dashboard does not run.
    """

    dashboard = ""

    def __init__(self, folder: Path, address: str, *options: str, **variables: str) -> None:
        self.folder = folder
        self.environment = {"TMPDIR": str(folder), "RAY_TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self.address = address
        words = ("--head", "--block", "--port", address.rpartition(":")[2])
        self._process = self._start("-m", "ray.scripts.scripts", "start", *words, *options, **variables)
        assert self._process.stdout
        self._answers = self._process.stdout
        line = next((line for line in self._answers if "Ray runtime started" in line), "")
        if not line:
            self.close()
            raise AssertionError(f"ray start --head failed:\n{self._log.read_text()}")

    def close(self) -> None:
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(60)
        self._answers.close()
        assert self._process.stdin
        self._process.stdin.close()


def free_address() -> str:
    """Return an address for the head of a cluster on this machine."""
    from ray.util import get_node_ip_address

    return f"{get_node_ip_address()}:{free_port()}"


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder for the files of a cluster. Below tmp_path, the paths of Ray's sockets would be too long.

    Slow tests have a training in the cluster. They wait for each other, also in different workers of pytest: several
    trainings at once need too many cores.
    """
    pytest.importorskip("ray")
    with Path(__file__).open() as lock:
        if request.node.get_closest_marker("slow"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        made = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        yield made
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, folder: Path) -> Iterator[Cluster]:
    """A cluster with the hosts of ``CORES``; a test may pass other hosts as an indirect parameter."""
    made = Cluster(folder, getattr(request, "param", CORES))
    yield made
    made.close()


@pytest.fixture
def blind_cluster(folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with the hosts of ``CORES``. Only the head sees the files in ``tmp_path``."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user has no permission to make mount namespaces")
    made = Cluster(folder, CORES, ("--hide", str(tmp_path)))
    yield made
    made.close()


Train = Callable[..., Command]


@pytest.fixture
def train(command: Callable[..., Command], cluster: Cluster) -> Train:
    """Starts a small training on the cluster: ``train(*overrides, options=…)``."""
    return functools.partial(start_training, command, cluster)


def start_training(
    command: Callable[..., Command],
    cluster: Cluster,
    *overrides: str,
    options: tuple[str, ...] = ("pendulum", "--out", "run"),
) -> Command:
    sets = [word for item in (*SMALL, *overrides) for word in ("--set", item)]
    words = ("train", *options, "--log-every", "0.5", "--cluster", cluster.address)
    return command(*words, *sets, environment=cluster.environment)


def nothing_is_left(cluster: Cluster, run: Path) -> None:
    cluster.wait_for_removal()
    assert not (run / "keys").exists()
    facts = json.loads((run / "run.json").read_text())
    assert (facts["keys"], facts["endpoints"], facts["sockets"]) == (None, {}, None)
