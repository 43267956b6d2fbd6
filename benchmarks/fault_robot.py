"""Inject a fault into a robot that has a recorder.

faults.py measures cells: combinations of a fault, a process and a use of td3-robot. It calls :func:`deploy` for each
cell whose use is ``deploy`` or ``record``.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from faults_injected import ADOPTED, Result, fill, hit, longest_gap, prepare, read, small_disk
from processes import Processes

from td3_robot.errors import NodeError
from td3_robot.messages import Action, Step
from td3_robot.transport.keys import KeyFolder
from tests.process.deployed_robot import bundle
from tests.process.test_network import _SERVER, Cable

POLICY, SAFE = 0.5, -0.125  # torque in N·m: the policy's action, the safe action
CUT = 3.0  # seconds without a link
PERIOD_MS, DEADLINE_MS = 20, 500
SLOW_PERIOD_MS, SLOW_DEADLINE_MS = 200, 2000
"""On a lossy link, one period must be long enough for 50 ms of delay each way and a retransmission."""
_SERVER_OF = {"driver": "policy", "learner": "learner", "recorder": "recorder"}
"""For each process that can get a fault of the network: the server at one end of the cable.

All other processes are at the other end.
"""
_OUTPUT = {"policy": Action.NAME, "learner": ADOPTED, "driver": Step.NAME, "recorder": Step.NAME}
"""Maps a process to the messages that show that it works."""


class Robot(Processes):
    """A policy server, a driver and a recorder, and a learner if the fault concerns the learner.

    The file NAME.yaml configures the process NAME. The learner needs no file.

    Args:
        folder: folder of all files.
        fault: the fault to inject.
        process: the process that gets the fault.
        cable: the network between the server in _SERVER_OF and all other processes. It is None if there is no network.
    """

    def __init__(self, folder: Path, fault: str, process: str, cable: Cable | None) -> None:
        super().__init__(folder)
        self.fault, self.process, self.cable = fault, process, cable
        self.disk = folder / "disk"
        self.started = 0
        slow = fault == "lossy"
        self._period_ms = SLOW_PERIOD_MS if slow else PERIOD_MS
        deadline = SLOW_DEADLINE_MS if slow else DEADLINE_MS
        links = ("policy", "recorder", *(["learner"] if process == "learner" else []))
        endpoints = {link: f"ipc://{folder}/{link}" for link in links}
        if cable:
            endpoints[_SERVER_OF[process]] = f"tcp://{_SERVER}:7000"
            _exchange_keys(folder, _SERVER_OF[process])
        safety = {
            "safe_action": {"torque": SAFE},
            "observation_deadline_ms": deadline,
            "action_deadline_ms": deadline,
            "recovery": "automatic",
            "recovery_ms": 200,
        }
        for name in ("policy", "driver", "recorder"):
            used = {link: where for link, where in endpoints.items() if (name, link) != ("driver", "learner")}
            keys = {"keys": self._keys(name)} if cable else {}
            config = {"safety": safety, "endpoints": {**used, **keys}, "record": {"enabled": True}}
            (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
        self.endpoints = endpoints
        made = bundle(POLICY)
        policy = replace(made, spec=replace(made.spec, control_period=self._period_ms / 1e3))
        for place in (folder, self.disk):
            policy.save(place / "policy.safetensors")

    def run(self, name: str) -> None:
        """Start a process, or start it again."""
        self.started += 1
        hurt = name == self.process
        place = "disk/" if self.fault == "disk" and hurt else ""
        how: dict[str, Any] = {"environment": prepare(self.fault, self.folder) if hurt else {}, "before": ()}
        if self.cable:
            space = self.cable.server if self._behind_cable(name) else self.cable.robot
            how["before"] = ("ip", "netns", "exec", space)
        if name == "policy":
            self.verb(name, "policy", "--bundle", f"{place}policy.safetensors", "--config", "policy.yaml", **how)
        elif name == "recorder":
            self.verb(name, "record", f"{place}leg{self.started}.mcap", "--config", "recorder.yaml", **how)
            self.wait(name, "recording into")
        elif name == "driver":
            applied = {"APPLIED": str(self.folder / "applied"), "PERIOD_MS": str(self._period_ms)}
            how["environment"] = {**how["environment"], **applied}
            self.script(name, "soak_driver.py", "--config", "driver.yaml", **how)
        else:
            keys = [self._keys(name)] if self.cable else []
            words = (self.endpoints["learner"], "policy.safetensors", "0.2", *keys)
            self.script(name, "soak_learner.py", *words, **how)

    def _behind_cable(self, name: str) -> bool:
        return self.cable is not None and name == _SERVER_OF[self.process]

    def _keys(self, name: str) -> str:
        return str(self.folder / ("server" if self._behind_cable(name) else "robot"))

    def operator(self, *words: str) -> str:
        """Run a command of an operator, and return its output."""
        command = [sys.executable, "-m", "td3_robot.cli.main", "node", *words, "--config", "policy.yaml"]
        command += ["--timeout", "60"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False).stdout

    def applied(self) -> list[tuple[float, float]]:
        """Return the monotonic time in s and the torque in N·m of each command to the motor."""
        path = self.folder / "applied"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(row[0]) * 1e-9, float(row[1])) for row in rows if len(row) == 2]

    def wait_for_policy(self, moment: float, timeout: float) -> None:
        """Wait for an action of the policy that the motor gets after ``moment`` (monotonic time in s)."""
        _wait(
            "no action of the policy",
            lambda: any(when > moment and torque == POLICY for when, torque in self.applied()[-500:]),
            timeout,
        )

    def newer_weights(self, version: int) -> int:
        """Wait until the server has newer weights than ``version``. Return their version."""
        found = version

        def newer() -> bool:
            nonlocal found
            found = int(json.loads(self.operator("state", "--json"))["version"])
            return found > version

        _wait("no newer weights", newer, 60)
        return found


def _exchange_keys(folder: Path, link: str) -> None:
    server, robot = KeyFolder(folder / "server"), KeyFolder(folder / "robot")
    server.allow("robot", robot.create("robot").public)
    robot.allow("server", server.create("server").public, f"server:{link}")


def _wait(what: str, done: Callable[[], bool], timeout: float) -> None:
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            raise NodeError(f"{what} within {timeout:g} s")
        time.sleep(0.1)


def deploy(fault: str, process: str, folder: Path, steps: int) -> Result:
    """Inject a fault into one process of a robot that has a recorder. Measure the effect.

    If the process ends, restart the process.
    """
    (folder / "disk").mkdir()
    with contextlib.ExitStack() as stack:
        if fault == "disk":
            stack.enter_context(small_disk(folder / "disk"))
        cable = None
        if fault in ("cut", "lossy"):
            cable = Cable(np.random.default_rng(0))
            stack.callback(cable.remove)
            cable.lay()
        robot = Robot(folder, fault, process, cable)
        stack.callback(robot.end)
        before = time.monotonic()
        for name in ("recorder", "policy", "driver", *(["learner"] if process == "learner" else [])):
            robot.run(name)
        robot.wait_for_policy(before, 60)
        version = robot.newer_weights(3) if process == "learner" else 3
        time.sleep(steps / 500)
        begun, at = time.time_ns(), time.monotonic()
        _inject(robot)
        ended = robot.ended(process)
        if ended:
            robot.run(process)
        moment = time.monotonic()
        notes: list[str] = []
        try:
            robot.wait_for_policy(moment + 2, 40)
            if process == "learner":
                robot.newer_weights(robot.newer_weights(version))
        except NodeError as error:
            notes.append(str(error))
        applied, over = robot.applied(), time.time_ns()
        robot.end()
        times, missing = read(sorted(folder.rglob("leg*.mcap")))
    if cable:
        notes.append(f"{cable.lost} packets lost")
    if fault == "lossy":
        notes.append(f"control period {SLOW_PERIOD_MS} ms, deadline {SLOW_DEADLINE_MS / 1e3:g} s")
    if fault == "disk":
        notes.append("emergency stop while the disk is full")
    if ended:
        notes.append("restarted at once")
    return {
        "note": "; ".join(notes),
        "missing_in_recording": missing,
        "goes_on_s": longest_gap(times[_OUTPUT[process]], begun, over),
        **_robot_figures(applied, at),
    }


def _inject(robot: Robot) -> None:
    """Inject the fault of the robot, and wait for its immediate effect."""
    fault, cable = robot.fault, robot.cable
    if cable and fault == "cut":
        cable.loss = 1.0
        time.sleep(CUT)
        cable.loss = 0.0
    elif cable:
        cable.delay, cable.loss = 0.05, 0.05
        time.sleep(10)
    elif fault == "disk":
        filler = fill(robot.disk)
        robot.operator("estop")  # the policy server writes its state file, which fails if the file is on the full disk
        time.sleep(3)
        filler.unlink()
        robot.operator("reset")
        robot.operator("activate")
    else:
        hit(fault, robot.found[robot.process].pid, robot.folder)
        end = time.monotonic() + (20 if fault == "memory" else 0.5)
        while time.monotonic() < end and not robot.ended(robot.process):
            time.sleep(0.02)


def _robot_figures(applied: Sequence[tuple[float, float]], at: float) -> Result:
    """Return two times in s: ``safe_s`` and ``robot_goes_on_s``.

    ``safe_s`` lasts from the fault to the first safe action. ``robot_goes_on_s`` lasts from the fault to the policy's
    first action after the safe action. If there is no safe action, ``safe_s`` is None. Then ``robot_goes_on_s`` is
    the longest time between two actions of the policy; the fault counts as the first action.
    """
    after = [(when - at, torque) for when, torque in applied if when > at]
    safe = next((when for when, torque in after if torque == SAFE), None)
    moved = [when for when, torque in after if torque == POLICY]
    back = next((when for when in moved if safe is not None and when > safe), None)
    gap = float(max(np.diff([0.0, *moved]))) if moved else None
    return {"safe_s": safe, "robot_goes_on_s": back if safe is not None else gap}
