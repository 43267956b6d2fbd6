"""Inject the faults of faults.py, and read their effects from recordings."""

from __future__ import annotations

import bisect
import contextlib
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.errors import SessionError
from td3_robot.messages import Action, Step
from td3_robot.recording.decoder import Decoder
from td3_robot.recording.session_file import SessionFile

Result = dict[str, Any]
ROOT = Path(__file__).parents[1]
STOPPED = 3.0  # seconds between SIGSTOP and SIGCONT
HOUR = 3600
ADOPTED = "first action of new weights"
_SHIMS = {"clock": ROOT / "tests" / "process" / "wall_clock", "memory": ROOT / "benchmarks" / "leak"}


def prepare(fault: str, folder: Path) -> Mapping[str, str]:
    """Return the environment variables of a process that will have this fault."""
    if fault not in _SHIMS:
        return {}
    (folder / "offset").write_text("0")
    path = os.pathsep.join([str(_SHIMS[fault]), os.environ.get("PYTHONPATH", "")])
    return {"WALL_CLOCK": str(folder / "offset"), "LEAK": str(folder / "leaking"), "PYTHONPATH": path}


def hit(fault: str, pid: int, folder: Path) -> None:
    """Inject a fault into a process whose environment comes from :func:`prepare`.

    Args:
        fault: ``kill`` ends the process. ``stop`` suspends the process for STOPPED seconds, and this function waits for
            the end of this time. ``memory`` makes the process leak memory. ``clock`` adds HOUR seconds to the wall
            clock of all processes with this environment.
    """
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(pid, signal.SIGCONT)
    elif fault == "memory":
        _replace(folder / "leaking", str(pid))
    elif fault == "clock":
        _replace(folder / "offset", str(HOUR))


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def fill(disk: Path) -> Path:
    """Fill a disk. Return the file that fills it."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of 64 MB at a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def read(recordings: list[Path]) -> tuple[dict[str, list[int]], int]:
    """Return the receive times of each topic in wall-clock ns, and the number of Steps that the recordings lack.

    The topic ADOPTED has the times at which the weights version of the Actions changes. A Step is missing if the
    recordings have earlier and later Steps of its source and incarnation, but not this Step.
    """
    times: dict[str, list[int]] = defaultdict(list)
    sequences: dict[tuple[str, int], set[int]] = defaultdict(set)
    version = 0
    for path in recordings:
        with contextlib.suppress(SessionError):  # a full disk leaves empty files
            decode = Decoder(repr(str(path)))
            for entry in SessionFile(path).entries():  # a killed recorder leaves damage: entries() skips it
                times[entry.topic].append(entry.received)
                if entry.topic not in (Step.NAME, Action.NAME):
                    continue
                decode.learn(entry)
                message = decode(entry)
                if isinstance(message, Step):
                    sequences[message.source, message.incarnation].add(message.sequence)
                elif isinstance(message, Action) and message.weights_version != version:
                    version = message.weights_version
                    times[ADOPTED].append(entry.received)
    lost = sum(max(found) - min(found) + 1 - len(found) for found in sequences.values())
    return {topic: sorted(found) for topic, found in times.items()}, lost


def longest_gap(times: list[int], since: int, until: int) -> float | None:
    """Return the longest interval in s between two successive messages. Skip intervals that end before ``since`` (ns).

    The first interval begins at the last message before ``since``. If no message comes after ``until`` (ns), the last
    interval ends at ``until``. The result is None if there is no interval.
    """
    found = times[max(0, bisect.bisect(times, since) - 1) :]
    if found and found[-1] < until:
        found.append(until)
    return float(max(np.diff(found))) * 1e-9 if len(found) > 1 else None
