"""Inject a fault into a training with a recorder.

faults.py explains cells and uses. It calls :func:`train` for each cell with the use ``train``.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path

from faults_injected import Result, fill, hit, longest_gap, prepare, read, small_disk

from td3_robot.messages import Action, Step, Weights
from tests.conftest import SMALL, Command

_SETTINGS = (
    *SMALL,
    "learner.replay_storage=file",
    "learner.buffer_size=20000",
    "checkpoint.every=500",
    "record.enabled=true",
)
_OUTPUT = {"simulator": Step, "policy": Action, "learner": Weights, "supervisor": Step}
"""Maps a process to the messages that show that it works."""
_NAME = {"simulator": "sim-0", "policy": "policy", "learner": "learner"}
_FREQUENT = ("--log-every", "0.2")


def train(fault: str, process: str, folder: Path, steps: int) -> Result:
    """Inject a fault into a training with a recorder, and measure its effect. If the training ends, resume it."""
    disk = folder / "disk"
    disk.mkdir()
    with small_disk(disk) if fault == "disk" else contextlib.nullcontext():
        return _train(fault, process, folder, disk, steps)


def _train(fault: str, process: str, folder: Path, disk: Path, steps: int) -> Result:
    sets = [word for item in _SETTINGS for word in ("--set", item)]
    words = ("train", "walker2d_fast", "--steps", "10000000", "--out", "disk/run", *_FREQUENT, *sets)
    run = Command(*words, cwd=folder, environment=prepare(fault, folder))
    commands, filler, resumed = [run], None, None
    try:
        run.wait_for_steps(steps)
        pid = run.process.pid if process == "supervisor" else run.children()[_NAME[process]].pid
        begun = time.time_ns()
        if fault == "disk":
            filler = fill(disk)
        else:
            hit(fault, pid, folder)
        try:
            run.wait_for_more_steps(steps)
        except AssertionError:  # the training ends, or makes no more steps
            run.process.wait(60)
        if run.process.poll() is not None:
            if filler:
                filler.unlink()
            at = time.monotonic()
            commands.append(Command("train", "--resume", "disk/run", *_FREQUENT, cwd=folder))
            commands[-1].wait_for(r"^[\d,]+/[\d,]+ steps")
            resumed = time.monotonic() - at
            commands[-1].wait_for_more_steps(steps)
        ended = time.time_ns()
        commands[-1].interrupt()
        commands[-1].finish(60)
    finally:
        for command in commands:
            command.kill_all()
    final = disk / "run" / "final.json"
    times, missing = read(sorted((disk / "run").glob("*.mcap")))
    result: Result = {
        "lost_steps": json.loads(final.read_text())["learner"]["counters"]["missed"] if final.exists() else None,
        "missing_in_recording": missing,
        "goes_on_s": resumed or longest_gap(times[_OUTPUT[process].NAME], begun, ended),
        "robots_wait_s": longest_gap(times[Step.NAME], begun, ended),
    }
    output = "".join(command.output() for command in commands)
    notes = ["the run ends and is resumed by hand"] if resumed else _notes(output)
    if not final.exists():
        notes.append("the run has no final.json")
    return result | ({"note": "; ".join(notes)} if notes else {})


def _notes(output: str) -> list[str]:
    """Return what the supervisor says about the end of a process."""
    if back := re.search(r"learner is back from its checkpoint: (.*) lost", output):
        return [f"lost since the checkpoint: {back[1]}"]
    return sorted(set(re.findall(r"^(.*?)(?: \(.*\))?; starting it again$", output, re.MULTILINE)))
