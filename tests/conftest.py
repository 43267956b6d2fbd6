"""Fixtures of all tests: printed seeds, a toy robot with its messages and policies, and real processes."""

from __future__ import annotations

import os

# One thread, as in launch/train.yaml. With more threads, OpenBLAS adds the numbers of a sum in another order.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import contextlib
import io
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import settings

from td3_robot.bundle import Bundle, Exploration, layer_shapes
from td3_robot.messages import Phase, Step
from td3_robot.specs import Channel, RobotSpec
from td3_robot.util.ports import keep_port, port_of

# Hypothesis examples have no deadline, because a test machine may be busy. A failure prints how to repeat the example.
settings.register_profile("td3-robot", deadline=None, print_blob=True)
settings.load_profile("td3-robot")


@pytest.fixture
def seed() -> int:
    """A random seed, printed when the test fails. Set TEST_SEED to repeat the failure."""
    value = int(os.environ.get("TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"TEST_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def spec() -> RobotSpec:
    """A robot with 3 observations and 2 actions.

    The actions have different limits. The limits of ``left`` are asymmetric.
    """
    return RobotSpec(
        "Toy",
        tuple(Channel(f"o{index}", "m", -5.0, 5.0) for index in range(3)),
        (Channel("left", "N", -1.0, 3.0), Channel("right", "N", -0.5, 0.5)),
        0.02,
    )


@pytest.fixture
def make_bundle(spec: RobotSpec) -> Callable[..., Bundle]:
    """Builds random bundles for the toy robot.

    Weights and biases come from N(0, 1). ``tame`` scales the weights to the size of a trained actor's weights. Without
    ``tame``, the sums in wide layers are so large that their rounding errors clearly change the action.
    """

    def make(
        seed: int = 0, kind: Any = "none", scale: float = 0.0, hidden: tuple[int, ...] = (8, 4), tame: bool = False
    ) -> Bundle:
        rng = np.random.default_rng(seed)
        tensors = {name: rng.normal(size=shape).astype("f4") for name, shape in layer_shapes(spec, hidden).items()}
        for tensor in tensors.values():
            if tame and tensor.ndim == 2:
                tensor /= np.float32(np.sqrt(tensor.shape[1]))
        return Bundle(spec, hidden, tensors, Exploration(kind, scale), {"version": 1})

    return make


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """Builds Steps of ``robots`` toy robots. Each keyword in ``fields`` replaces a field."""

    def make(sequence: int = 0, robots: int = 1, **fields: Any) -> Step:
        values: dict[str, Any] = {
            "source": "sim-0",
            "incarnation": 0,
            "sequence": sequence,
            "transitions": sequence * robots,
            "stamp": 0,
            "phase": np.full(robots, Phase.MID if sequence else Phase.FIRST, np.uint8),
            "episode": np.zeros(robots, np.uint64),
            "episode_step": np.full(robots, sequence, np.uint32),
            "observation": np.full((robots, 3), sequence, np.float32),
            "reward": np.zeros(robots, np.float32),
            "action": np.zeros((robots, 2), np.float32),
            "origin": 1 if sequence else 0,
            "answered": max(0, sequence - 1),
            "weights_version": 0,
            "noise_kind": 0,
            "noise_seed": 0,
            "needs_version": 0,
            "world": {},
        }
        return Step(**{**values, **fields})

    return make


def install_metadata(folder: Path, module: str, group: str, row: str) -> None:
    """Write package metadata that makes a module look like an installed package with one entry point.

    Args:
        folder: the folder that holds the module; it is on the import path.
        module: the module's name.
        group: the entry point group, for example ``td3_robot.noises``.
        row: the entry point, for example ``sign = sign_noise:Sign``.
    """
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    name = module.replace("_", "-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{row}\n")


@pytest.fixture
def nobody_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the timeouts of silent peers.

    A bus sends messages only when the test calls its methods. A busy machine can delay these calls.
    """
    monkeypatch.setattr("td3_robot.transport.link.PEER_TIMEOUT", 1e9)  # s
    monkeypatch.setattr("td3_robot.transport.link.LONG_SILENCE", 1e9)


def free_port() -> int:
    """Return a TCP port that is free. This process keeps the port until it ends."""
    kept = keep_port()
    port = port_of(kept)
    kept.detach()  # now only the end of this process frees the port
    return port


def poll_until(check: Callable[[], Any], complaint: Callable[[], str], timeout: float = 300) -> Any:
    """Wait until ``check`` returns a true value.

    Args:
        check: called every 10 ms.
        complaint: gives the failure message.
        timeout: seconds after which the test fails.

    Returns:
        The value that ``check`` returned.
    """
    end = time.monotonic() + timeout
    while not (found := check()):
        assert time.monotonic() < end, complaint()
        time.sleep(0.01)
    return found


@pytest.fixture
def hangup() -> Iterator[None]:
    """Gives SIGHUP its default action, which processes of the test inherit. If nohup started pytest, it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Terminal(io.StringIO):
    """A stream in memory that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Command:
    """A program that runs as a process: td3-robot, or ``program``.

    Args:
        cwd: folder in which it runs.
        before: another command that starts the program, for example ``nohup``.
        program: the first words of the program's command line. ``arguments`` follow them.
        environment: environment variables in addition to those of the test process.

    Attributes:
        cwd: folder in which it runs.
        lines: lines of output that the test has read, from stdout and stderr.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        before: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "td3_robot.cli.main"),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.cwd = cwd
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [*before, *program, *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(
        self, pattern: str, check: Callable[[re.Match[str]], bool] = lambda _: True, timeout: float = 300
    ) -> str:
        """Wait for the next line that matches ``pattern`` and ``check``, and return it.

        Raises:
            AssertionError: no line matched within ``timeout`` seconds, or before the end of the output. The message
                contains the output.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                break
            self.lines.append(line)
            match = re.search(pattern, line)
            if match and check(match):
                return line
        raise AssertionError(f"no line like {pattern!r} in:\n{self.output()}")

    def wait_for_steps(self, steps: int, timeout: float = 300) -> int:
        """Wait for a progress line with at least ``steps`` environment steps.

        A line that the process printed earlier also counts, if the test has not read it.

        Returns:
            The number of environment steps in the line that matched.
        """
        line = self.wait_for(r"^([\d,]+)/[\d,]+ steps", lambda match: int(match[1].replace(",", "")) >= steps, timeout)
        return int(line.split("/")[0].replace(",", ""))

    def wait_for_more_steps(self, steps: int) -> None:
        """Wait for the next progress line, and then until the training has made ``steps`` more environment steps."""
        self.take_lines()
        self.wait_for_steps(self.wait_for_steps(0) + steps)

    def take_lines(self) -> None:
        """Read all lines that the process has printed. Leave the end marker in the queue."""
        with contextlib.suppress(queue.Empty):
            while (line := self._queue.get_nowait()) is not None:
                self.lines.append(line)
            self._queue.put(None)

    def until(self, what: str, check: Callable[[], Any], timeout: float = 300) -> None:
        """Wait until ``check`` is true. Fail if the command ends first, or after ``timeout`` seconds."""

        def complaint() -> str:
            self.take_lines()
            return f"failed to wait for {what}:\n{self.output()}"

        def checked() -> Any:
            over = self.process.poll() is not None
            found = check()
            assert found or not over, complaint()
            return found

        poll_until(checked, complaint, timeout)

    def finish(self, timeout: float = 600) -> int:
        """Wait for the end of the command and return its exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.take_lines()
            raise AssertionError(f"still running after {timeout} s:\n{self.output()}") from error
        while (line := self._queue.get(timeout=60)) is not None:
            self.lines.append(line)
        return code

    def output(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> dict[str, psutil.Process]:
        """Return the running child processes of the command by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # the child just ended
                words = child.cmdline()
                if "--name" in words:
                    found[words[words.index("--name") + 1]] = child
        return found

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill_all(self) -> None:
        """If the command still runs, kill it and all its descendants."""
        if self.process.poll() is None:
            children: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):  # the process may have just ended
                children = psutil.Process(self.process.pid).children(recursive=True)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
        self.process.wait()
        self._reader.join(60)
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts td3-robot commands in a temporary folder, and kills them after the test."""
    started: list[Command] = []

    def start(*arguments: str, **options: Any) -> Command:
        started.append(Command(*arguments, cwd=tmp_path, **options))
        return started[-1]

    yield start
    for item in started:
        item.kill_all()


SMALL = (
    "network.hidden=[32, 32]",
    "learner.batch_size=32",
    "learner.replay_ratio=0.9",
    "learner.learning_starts=500",
    "learner.precision=fp32",
    "learner.threads=2",
    "learner.compile=false",
    "evaluation.every=0",
)
"""Overrides of a training that is quick and learns little, for tests of processes.

Precision and threads are set, because ``auto`` needs some seconds to measure which values are fastest.
"""


@pytest.fixture
def train(command: Callable[..., Command]) -> Callable[..., Command]:
    """Starts a small training of Walker2D.

    ``train(steps, *overrides, options=…, out="run")`` adds overrides in the form ``key=value`` and other options.
    """

    def start(steps: int, *overrides: str, options: tuple[str, ...] = (), out: str = "run") -> Command:
        sets = [word for item in (*SMALL, *overrides) for word in ("--set", item)]
        return command(
            "train", "walker2d_fast", "--steps", str(steps), "--out", out, "--log-every", "0.2", *sets, *options
        )

    return start
