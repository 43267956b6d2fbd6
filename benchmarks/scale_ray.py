"""Programs on Ray that transport the transitions of benchmarks/scale.py.

One program uses only Ray actors, which are processes that Ray starts: one for each source, and one that stores the
transitions. The other program is TorchRL's RayCollector.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from td3_robot.util import machine

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "100"}
_IN_FLIGHT = 100  # a source waits when it has this many unanswered Steps, as with td3-robot
_STORED = 20_000  # capacity of the buffer in transitions, as with td3-robot


def contestants(
    steps: Path, sources: int, robots: int, seconds: float
) -> tuple[dict[str, Callable[[], dict[str, float]]], dict[str, str]]:
    """Return two maps whose keys are names of programs.

    The first map has a function for each program that can run here; the function measures the program. For each program
    that cannot run here, the second map has the reason.
    """
    if not machine.version("ray"):
        return {}, {"plain Ray actor": "ray is not installed", "TorchRL RayCollector": "ray is not installed"}
    plain = partial(_plain, steps, sources, robots, seconds)
    if not machine.version("torchrl"):
        return {"plain Ray actor": plain}, {"TorchRL RayCollector": "torchrl is not installed"}
    import scale_torchrl

    collector = partial(scale_torchrl.measure, steps, sources, robots, seconds)
    return {"plain Ray actor": plain, "TorchRL RayCollector": collector}, {}


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Run a Ray cluster of one host on this machine, if Ray is installed."""
    if not machine.version("ray"):
        yield
        return
    import ray

    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=300_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        yield
    finally:
        ray.shutdown()


class Sink:
    """A learner that only makes transitions from consecutive Steps of a source, and stores them. It checks nothing."""

    def __init__(self) -> None:
        # two observations, the action, the reward, and whether the episode terminated
        self._rows = np.empty((_STORED, 22 * 2 + 6 + 2), np.float32)
        self._last: dict[str, Any] = {}
        self._at = 0
        self.steps = 0

    def insert(self, source: str, arrays: dict[str, Any]) -> None:
        last, self._last[source] = self._last.get(source), arrays
        self.steps += 1
        if last is None:
            return
        joined = np.flatnonzero(arrays["phase"] != 0)
        terminated = arrays["phase"][joined] == 2
        parts = [last["observation"][joined], arrays["action"][joined], arrays["reward"][joined, None]]
        rows = np.concatenate([*parts, arrays["observation"][joined], terminated[:, None]], axis=1)
        self._rows[np.arange(self._at, self._at + len(rows)) % _STORED] = rows
        self._at += len(rows)

    def counts(self) -> tuple[int, int]:
        return os.getpid(), self.steps


class Source:
    """A simulator that replays recorded Steps to a :class:`Sink`."""

    def __init__(self, steps: str, name: str, robots: int, sink: Any) -> None:
        import scale_steps

        self._replay = scale_steps.Replay.load(Path(steps), name, robots)
        self._name, self._sink = name, sink

    def run(self, seconds: float) -> None:
        import ray

        waiting: list[Any] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            step = self._replay.step
            names = ("phase", "observation", "reward", "action")
            waiting.append(self._sink.insert.remote(self._name, {name: getattr(step, name) for name in names}))
            self._replay.advance()
            if len(waiting) >= _IN_FLIGHT:
                _, waiting = ray.wait(waiting, num_returns=_IN_FLIGHT // 2)


def _plain(steps: Path, sources: int, robots: int, seconds: float) -> dict[str, float]:
    """Run sources and a sink as Ray actors. Return the measured speed and processor times."""
    import ray

    sink: Any = ray.remote(Sink).remote()
    actor: Any = ray.remote(Source)
    senders = [actor.remote(str(steps), f"source-{number}", robots, sink) for number in range(sources)]
    ray.get([sender.run.remote(0.5) for sender in senders])  # the processes start during the first calls
    process, begun = ray.get(sink.counts.remote())
    time_before, before = time.monotonic(), family()
    ray.get([sender.run.remote(seconds) for sender in senders])
    _, steps_made = ray.get(sink.counts.remote())
    passed, after = time.monotonic() - time_before, family()
    count = steps_made - begun
    result = {
        "steps_per_s": count / passed,
        "all_us": (after[process] - before[process]) / count * 1e6,
        "family_us": spent(before, after) / count * 1e6,
    }
    for actor in (*senders, sink):
        ray.kill(actor)
    return result


def family() -> dict[int, float]:
    """Return the processor time (s) of this process and of all its descendants, by process number."""
    found = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found[process.pid] = sum(process.cpu_times()[:2])
    return found


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """Return the processor time (s) between two results of :func:`family`."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items())
