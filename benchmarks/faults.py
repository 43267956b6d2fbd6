"""Inject faults into the processes of a training and of a robot, and measure what is lost and when it goes on.

    python benchmarks/faults.py [--only FAULT/PROCESS/USE ...] [--out FILE] [--quick] [--json]
    python benchmarks/faults.py --report

Each cell of the matrix starts real processes, injects one fault, and measures until the processes work again. Cells of
``train`` are a recorded training of Walker2D. Cells of ``deploy`` are a recorded robot at 50 Hz. Cells of ``record``
put the fault into the recorder of such a robot. The network faults need root, because they use network namespaces or
small file systems. Without root, these cells fail and the table says so.

The results go to FILE (default: benchmarks/results/reliability/faults.json). A run with ``--only`` keeps the other
cells of the file. ``--report`` writes the table into docs/explanation/reliability.md.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the helpers of the tests

from reliability import DATA, write_faults  # noqa: E402
from soak import teach  # noqa: E402

from td3_robot.bench import harness  # noqa: E402
from td3_robot.bundle import Bundle  # noqa: E402
from td3_robot.errors import SessionError  # noqa: E402
from td3_robot.messages import Action, Step, Weights  # noqa: E402
from td3_robot.recording import info  # noqa: E402
from td3_robot.recording.entries import Entry  # noqa: E402
from td3_robot.recording.reader import SessionFile  # noqa: E402
from td3_robot.transport.keys import KeyFolder  # noqa: E402
from tests.conftest import SMALL, Command  # noqa: E402
from tests.process.test_deployed_recording import Recorded  # noqa: E402
from tests.process.test_faults import Cable, bundle  # noqa: E402
from tests.process.test_network import Cable as Network  # noqa: E402
from tests.process.test_network import RemoteRobot  # noqa: E402

FAULTS = ("kill", "stop", "cut", "lossy", "disk", "clock", "memory")
PROCESSES = ("simulator", "policy", "learner", "driver", "recorder", "supervisor")
USES = ("train", "deploy", "record")
Cell = tuple[str, str, str]
Result = dict[str, Any]

POLICY, SAFE = 0.5, -0.125  # N·m
DEADLINE_MS = 500
STOPPED = 3.0  # seconds of SIGSTOP
CUT = 3.0  # seconds
HOUR = 3600
ADOPTED = "first action of new weights"
PERIOD_MS = {"lossy": 200}  # 50 ms each way and the repetition of a lost segment must fit into a period
_WALL_CLOCK = ROOT / "tests" / "process" / "wall_clock"


def left_out(cell: Cell) -> str:
    """Return why a cell makes no sense or is not made; empty if it is made."""
    fault, process, use = cell
    if use == "record" and process != "recorder":
        return "the cells of 'train' and 'deploy' are recorded, and show what the recording lacks"
    if use != "record" and process == "recorder":
        return "no node waits for a recorder; the cells of 'record' also measure the robot"
    if use == "train" and process == "driver":
        return "a training has simulators"
    if use == "deploy" and process in ("simulator", "supervisor"):
        return "a deployment has no such process"
    if fault in ("cut", "lossy"):
        if use == "train":
            return "the processes of a training on one machine have Unix sockets and no network"
        if process == "policy":
            return "the link is the same as the driver's"
        if fault == "lossy" and process in ("learner", "recorder"):
            return "not made yet: the lossy cable connects only the driver and the policy server"
    if fault == "disk" and (process in ("driver", "simulator") or (use, process) == ("deploy", "learner")):
        return "the process writes no file"
    if fault == "disk" and use == "train" and process != "learner":
        return "all processes of a run write to one disk: see the learner"
    if fault == "clock" and use == "train" and process != "supervisor":
        return "all processes of a training on one machine have one clock: see the supervisor"
    if fault == "clock" and process == "learner":
        return "the clock of the policy server's machine is the same case"
    return ""


# --- recordings ---------------------------------------------------------------------------------------------------


def read(recordings: list[Path]) -> tuple[dict[str, list[int]], int]:
    """Return the receive times of each topic in wall-clock ns, and the number of Steps that the recordings lack.

    The topic ADOPTED has the Actions whose weights are newer than those of the Action before.

    A Step is missing if a source sent Steps before and after it, and no recording has it.
    """
    times: dict[str, list[int]] = defaultdict(list)
    sequences: dict[tuple[str, int], set[int]] = defaultdict(set)
    version = 0
    for path in recordings:
        with contextlib.suppress(SessionError):  # a full disk leaves empty files
            decode = info.decoder_of(path)
            for entry in SessionFile(path).items():  # reads past the damage that a killed recorder leaves
                if not isinstance(entry, Entry):
                    continue
                times[entry.topic].append(entry.received)
                if entry.topic not in (Step.NAME, Action.NAME):
                    continue
                message = decode(entry)
                if isinstance(message, Step):
                    sequences[message.source, message.incarnation].add(message.sequence)
                elif isinstance(message, Action) and message.weights_version != version:
                    version = message.weights_version
                    times[ADOPTED].append(entry.received)
    lost = sum(max(found) - min(found) + 1 - len(found) for found in sequences.values())
    return {topic: sorted(found) for topic, found in times.items()}, lost


def longest_gap(times: list[int], since: int) -> float | None:
    """Return the longest time in s between two messages, from the last one before ``since``; None without messages."""
    found = times[max(0, bisect.bisect(times, since) - 1) :]
    return float(max(np.diff(found), default=0)) * 1e-9 if found else None


# --- faults -------------------------------------------------------------------------------------------------------


def hit(fault: str, pid: int) -> None:
    """Inject a fault into a process. ``stop`` lasts until this function returns."""
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(pid, signal.SIGCONT)
    elif fault == "memory":  # no byte of address space more than now
        now = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (now, now))


def fill(disk: Path) -> Path:
    """Fill a disk. Return the file that fills it."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[None]:
    """Mount a small file system at a folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def set_clock(folder: Path, seconds: int) -> dict[str, str]:
    """Set the clock of the processes that have the returned environment."""
    (folder / "offset.new").write_text(str(seconds))
    (folder / "offset.new").rename(folder / "offset")
    path = os.pathsep.join([str(_WALL_CLOCK), os.environ.get("PYTHONPATH", "")])
    return {"WALL_CLOCK": str(folder / "offset"), "PYTHONPATH": path}


# --- training -----------------------------------------------------------------------------------------------------

_TRAINING = (*SMALL, "learner.replay_storage=file", "learner.buffer_size=20000", "checkpoint.every=500")
_OUTPUT = {"simulator": Step, "policy": Action, "learner": Weights, "supervisor": Step}
_NAME = {"simulator": "sim-0", "policy": "policy", "learner": "learner"}


def train(fault: str, process: str, folder: Path, steps: int) -> Result:
    """Inject a fault into a recorded training. Resume the training if it ends."""
    sets = [word for item in (*_TRAINING, "record.enabled=true") for word in ("--set", item)]
    words = ("train", "walker2d_fast", "--steps", "10000000", "--out", "disk/run", "--log-every", "0.2", *sets)
    environment = set_clock(folder, 0) if fault == "clock" else {}
    (disk := folder / "disk").mkdir(exist_ok=True)
    run = Command(*words, cwd=folder, environment=environment)
    again = None
    try:
        run.wait_for_steps(steps)
        pid = run.process.pid if process == "supervisor" else run.children()[_NAME[process]].pid
        begun, at = time.time_ns(), time.monotonic()
        if fault == "clock":
            set_clock(folder, HOUR)
        elif fault == "disk":
            filler = fill(disk)
        else:
            hit(fault, pid)
        try:
            run.wait_for_more_steps(steps)
        except AssertionError:  # the training has closed its output, and ends
            run.process.wait(60)
        if ended := run.process.poll() is not None:
            if fault == "disk":
                filler.unlink()
            at = time.monotonic()
            again = Command("train", "--resume", "disk/run", "--log-every", "0.2", cwd=folder)
            again.wait_for(r"^[\d,]+/[\d,]+ steps")
            resumed = time.monotonic() - at
            again.wait_for_more_steps(steps)
        last = again or run
        last.interrupt()
        last.finish(60)
    finally:
        for command in (run, again):
            if command:
                command.kill_all()
    output = run.output() + (again.output() if again else "")
    final = disk / "run" / "final.json"
    times, missing = read(sorted((disk / "run").glob("*.mcap")))
    result: Result = {
        "lost_steps": json.loads(final.read_text())["learner"]["counters"]["missed"] if final.exists() else None,
        "missing_in_recording": missing,
        "goes_on_s": longest_gap(times[_OUTPUT[process].NAME], begun),
        "robots_wait_s": longest_gap(times[Step.NAME], begun),
    }
    if not final.exists():
        result["note"] = "the run has no final.json"
    if restarts := sorted(set(re.findall(r"^(.*); starting it again$", output, re.MULTILINE))):
        result["note"] = "; ".join(restarts)
    if back := re.search(r"learner is back from its checkpoint: (.*) lost", output):
        result["note"] = f"lost since the checkpoint: {back[1]}"
    if ended:
        result |= {"note": "the run ends and is resumed by hand", "goes_on_s": resumed}
    return result


# --- robot --------------------------------------------------------------------------------------------------------


class Deployed(Recorded):
    """A recorded robot whose driver notes each command of the motor, with its time."""

    period_ms = 20

    def drive(self, **how: Any) -> subprocess.Popen[str]:  # type: ignore[override]
        return self._start("driver.log", str(ROOT / "benchmarks" / "soak_driver.py"), "--config", "driver.yaml", **how)

    def applied(self) -> list[tuple[float, float]]:
        """Return monotonic time in s and torque in N·m of each command."""
        path = self.folder / "applied"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(row[0]) * 1e-9, float(row[1])) for row in rows if len(row) == 2]

    def acting_since(self, moment: float) -> bool:
        """Return whether the policy has moved the robot after a moment."""
        return any(when > moment and torque == POLICY for when, torque in self.applied()[-500:])

    def newer_weights(self, version: int) -> int:
        """Wait until the server has newer weights than ``version``. Return their version."""

        def find() -> int:
            found = int(json.loads(self.operator("state", "--json").stdout)["version"])
            return found if found > version else 0

        return int(self.wait("newer weights", find, 60))


class Far(Deployed, RemoteRobot):
    """The same on two hosts. Its recorder would need a third link, so there is none."""

    def configure(self, **safety: Any) -> None:
        RemoteRobot.configure(self, **safety)
        for path in (self.folder / "robot.yaml", self.folder / "driver.yaml"):
            config = yaml.safe_load(path.read_text())
            config.pop("record", None)
            config["endpoints"].pop("recorder", None)
            path.write_text(yaml.safe_dump(config))


def _robot(fault: str, folder: Path, stack: contextlib.ExitStack) -> tuple[Deployed, Network | None]:
    network = None
    if fault == "lossy":
        server, robot = KeyFolder(folder / "server"), KeyFolder(folder / "robot")
        server.allow("robot", robot.create("robot").public)
        robot.allow("server", server.create("server").public, "server:policy")
        network = Network(np.random.default_rng(0))
        stack.callback(network.remove)
        network.lay()
        made: Deployed = Far(folder, network)
    else:
        made = Deployed(folder)
    stack.callback(made.end)
    period = PERIOD_MS.get(fault, 20) / 1e3
    policy = bundle(POLICY)
    Bundle(replace(policy.spec, control_period=period), policy.hidden, policy.tensors, provenance={"version": 3}).save(
        folder / "policy.safetensors"
    )
    return made, network


def deploy(fault: str, process: str, folder: Path, steps: int) -> Result:
    """Inject a fault into a recorded robot. Restart a process that ends, as systemd does."""
    with contextlib.ExitStack() as stack:
        return _deploy(fault, process, folder, steps, stack)


def _deploy(fault: str, process: str, folder: Path, steps: int, stack: contextlib.ExitStack) -> Result:
    disk = folder / "disk"
    if fault == "disk":
        stack.enter_context(small_disk(disk))
    clock = set_clock(folder, 0) if fault == "clock" else {}
    robot, network = _robot(fault, folder, stack)
    environment = {"APPLIED": str(folder / "applied"), "PERIOD_MS": str(PERIOD_MS.get(fault, 20))}
    safety = {"observation_deadline_ms": DEADLINE_MS, "action_deadline_ms": DEADLINE_MS}
    if network:
        safety = dict.fromkeys(safety, 2000)
    robot.configure(recovery="automatic", recovery_ms=200, **safety)
    if process == "learner":
        _add_learner_endpoint(folder)
    cable = None
    if fault == "cut":
        name, key = {"driver": ("policy", "policy"), "learner": ("learner", "learner"), "recorder": ("recorder",) * 2}[
            process
        ]
        cable = Cable(folder / name)
        stack.callback(cable.close)
        path = folder / ("robot.yaml" if process == "learner" else "driver.yaml")
        config = yaml.safe_load(path.read_text())
        config["endpoints"][key] = cable.endpoint
        path.write_text(yaml.safe_dump(config))
    policy = Bundle.load(folder / "policy.safetensors")
    if fault == "disk":
        policy.save(disk / "policy.safetensors")
    before = time.monotonic()

    def learner() -> int:
        version = 4 + int(time.monotonic() - before) * 1000  # a restarted learner's versions must be higher
        words = (f"ipc://{folder}/learner", replace(policy, provenance={"version": version}), 0.2)
        child = multiprocessing.get_context("spawn").Process(target=teach, args=words, daemon=True)
        child.start()
        stack.callback(child.kill)
        assert child.pid
        return child.pid

    def start(name: str, number: int = 0) -> int:
        saved, on_disk = dict(os.environ), fault == "disk" and name == process
        os.environ.update(environment if name == "driver" else {})
        os.environ.update(clock if name == process else {})
        try:
            if name == "learner":
                return learner()
            if name == "policy":
                return robot.serve(*(("--bundle", "disk/policy.safetensors") if on_disk else ())).pid
            if name == "driver":
                return robot.drive().pid
            (folder / "recorder.log").unlink(missing_ok=True)  # recorder() waits for a line in it
            return int(robot.recorder(f"{'disk/' if on_disk else ''}leg{number}.mcap").pid)
        finally:
            os.environ.clear()
            os.environ.update(saved)

    pids = {} if network else {"recorder": start("recorder")}
    pids |= {"policy": start("policy"), "driver": start("driver")}
    if process == "learner":
        pids["learner"] = start("learner")
    robot.wait("the policy", lambda: robot.acting_since(before), 60)
    version = 3
    if process == "learner":
        version = robot.newer_weights(version)
    time.sleep(steps / 500)
    begun, at = time.time_ns(), time.monotonic()
    _inject(fault, pids[process], cable, network, robot)
    ended = fault == "kill" or not psutil.pid_exists(pids[process])
    ended = ended or psutil.Process(pids[process]).status() == psutil.STATUS_ZOMBIE
    if ended:
        pids[process] = start(process, 1)
    moment = time.monotonic()
    with contextlib.suppress(AssertionError):
        robot.wait("the policy", lambda: robot.acting_since(moment + 2), 40)
        if process == "learner":
            robot.newer_weights(robot.newer_weights(version))
    applied = robot.applied()
    result: Result = {}
    if not network:
        for started in reversed(robot.started):
            started.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(20)
        times, result["missing_in_recording"] = read(sorted(folder.rglob("leg*.mcap")))
        topic = {"policy": Action.NAME, "learner": ADOPTED, "driver": Step.NAME, "recorder": Step.NAME}[process]
        result["goes_on_s"] = longest_gap(times[topic], begun)
    else:
        result["note"] = f"{network.lost} packets lost; control period {PERIOD_MS['lossy']} ms, deadline 2 s"
    notes = ["emergency stop while the disk is full"] * (fault == "disk") + ["restarted at once"] * ended
    return {"note": "; ".join(notes)} | result | _robot_figures(applied, at)


def _inject(fault: str, pid: int, cable: Cable | None, network: Network | None, robot: Deployed) -> None:
    if cable:
        cable.whole.clear()
        time.sleep(CUT)
        cable.whole.set()
    elif network:
        network.delay, network.loss = 0.05, 0.05
        time.sleep(10)
    elif fault == "disk":
        filler = fill(robot.folder / "disk")
        robot.operator("estop")  # the server cannot write its state file
        time.sleep(3)
        filler.unlink()
        robot.operator("reset")
        robot.operator("activate")
    elif fault == "clock":
        set_clock(robot.folder, HOUR)
    else:
        hit(fault, pid)
        time.sleep(5 if fault == "memory" else 0.2)  # a process needs time to reach its limit


def _add_learner_endpoint(folder: Path) -> None:
    path = folder / "robot.yaml"
    config = yaml.safe_load(path.read_text())
    config["endpoints"]["learner"] = f"ipc://{folder}/learner"
    path.write_text(yaml.safe_dump(config))


def _robot_figures(applied: list[tuple[float, float]], at: float) -> Result:
    """Return seconds from the fault to the safe action, and to the policy's next action after it."""
    after = [(when - at, torque) for when, torque in applied if when > at]
    safe = next((when for when, torque in after if torque == SAFE), None)
    moved = [when for when, torque in after if torque == POLICY]
    back = next((when for when in moved if safe is not None and when > safe), None)
    gap = float(max(np.diff([0.0, *moved]))) if moved else None
    return {"safe_s": safe, "robot_goes_on_s": back if safe is not None else gap}


# --- the matrix ---------------------------------------------------------------------------------------------------

RUN: dict[str, Callable[[str, str, Path, int], Result]] = {"train": train, "deploy": deploy, "record": deploy}


def measure(cell: Cell, steps: int) -> Result:
    """Run a cell. If it fails, the result has the key ``failed`` with the first line of the error."""
    fault, process, use = cell
    with tempfile.TemporaryDirectory(prefix="td3-robot-fault-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        try:
            if fault == "disk" and use == "train":
                with small_disk(place / "disk"):
                    return train(fault, process, place, steps)
            return RUN[use](fault, process, place, steps)
        except (AssertionError, OSError, KeyError, subprocess.SubprocessError) as error:
            print(f"{'/'.join(cell)}: {error}", file=sys.stderr)
            return {"failed": (str(error).splitlines() or [type(error).__name__])[0][:200]}


def main() -> int:
    parser = harness.Options(
        "python benchmarks/faults.py", "Measure what each fault costs.", ("--only stop/policy/deploy",)
    )
    parser.add_argument("--only", nargs="+", metavar="CELL", help="cells FAULT/PROCESS/USE; * stands for every value")
    parser.add_argument("--out", type=Path, default=DATA / "faults.json", metavar="FILE", help="file of the results")
    parser.add_argument("--quick", action="store_true", help="wait for less work before and after the fault")
    parser.add_argument("--report", action="store_true", help="only write the table into the page")
    options = parser.parse_args()
    if options.report:
        write_faults(options.out)
        return 0
    cells = [(fault, process, use) for fault in FAULTS for use in USES for process in PROCESSES]
    wanted = [tuple(text.split("/")) for text in options.only or ["*/*/*"]]
    chosen = [
        cell
        for cell in cells
        if not left_out(cell)
        and any(all(want in ("*", is_) for want, is_ in zip(one, cell, strict=True)) for one in wanted)
    ]
    if not chosen:
        parser.error(f"--only is {options.only}; no cell has this name")
    report: harness.Report = {"machine": harness.describe("td3-robot", "numpy", "pyzmq"), "cells": {}}
    if options.out.exists():
        report["cells"] = json.loads(options.out.read_text())["cells"]
    report["left_out"] = {"/".join(cell): why for cell in cells if (why := left_out(cell))}
    for cell in chosen:
        result = measure(cell, 200 if options.quick else 1000)
        report["cells"]["/".join(cell)] = result
        made = {*report["cells"], *report["left_out"]}
        report["not_run"] = [name for name in map("/".join, cells) if name not in made]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return harness.show(report, options.json, _lines)


def _lines(report: harness.Report) -> Iterator[str]:
    for cell, result in report["cells"].items():
        yield f"{cell:<28} " + ", ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
        )


if __name__ == "__main__":
    harness.run_script(main)
