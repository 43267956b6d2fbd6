"""Runs in one process whose clock and links are in our hands, recorded as real ones are; and real ones."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from sims.in_process import InProcess
from td3_robot.bundle import Bundle, layer_shapes
from td3_robot.config import Config
from td3_robot.driver import core as driver_core
from td3_robot.driver.robot import EmergencyStop, Robot, RobotBody
from td3_robot.messages import Message, Phase, Record, Reply, Start, StateChange, Status
from td3_robot.policy import core as policy_core
from td3_robot.policy.node import weights
from td3_robot.session.entries import Entry, facts_of_this_machine
from td3_robot.session.writer import SessionWriter
from td3_robot.specs import Channel, Float32, RobotSpec
from td3_robot.topics import RECORDER
from td3_robot.transport import codec
from td3_robot.transport.memory import MemoryBus
from td3_robot.transport.session import ClientSession, Frames, ServerSession, hello
from td3_robot.transport.tap import Tap

_TIMEOUT = 120.0


class Training:
    """`td3-robot train` as a process."""

    def __init__(self, folder: Path, steps: int, *overrides: str) -> None:
        self.run = Path(tempfile.mkdtemp(dir=folder)) / "run"
        sets = [word for item in overrides for word in ("--set", item)]
        command = [sys.executable, "-m", "td3_robot.cli.main", "train", "walker2d", "--out", str(self.run)]
        self.process = subprocess.Popen(
            [*command, "--steps", str(steps), "--log-every", "0.1", *sets],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.session = self.run / "session.mcap"

    def wait_for_steps(self, steps: int) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            made = line.split("/")[0].replace(",", "")
            if made.isdigit() and int(made) >= steps:
                return
        raise RuntimeError(f"the training ended before {steps} steps")

    def pid_of(self, name: str) -> int:
        supervisor = json.loads((self.run / "run.json").read_text())["supervisor_pid"]
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for child in children:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"--name" in words and words[words.index(b"--name") + 1] == name.encode():
                return int(child)
        raise RuntimeError(f"no process is named {name}")

    def finish(self) -> None:
        output, _ = self.process.communicate(timeout=_TIMEOUT)
        if self.process.returncode:
            raise RuntimeError(output)


class Tape:
    """Records the buses of one process, with a clock of our own (``now``, in ns)."""

    def __init__(self, target: Path, config: Config) -> None:
        self.now = 1_000_000_000
        self.writer = SessionWriter(target, facts_of_this_machine(config), 0.0)
        self._begin = time.time_ns()

    def of(self, publisher: str) -> Tap:
        """What a node of this name is recorded by."""
        session = ClientSession("recorder", hello("node", publisher, client=0), (), state="welcome")
        return Tap(session, lambda name, payload: self._write(publisher, name, payload), wall=self._wall)

    def _wall(self) -> int:
        return self._begin + self.now

    def _write(self, publisher: str, name: str, payload: bytes) -> bool:
        record = codec.decode(name, payload)
        assert isinstance(record, Record)
        entry = Entry(
            publisher, 0, record.topic, record.link, record.sequence, record.stamp, self._wall(), record.payload
        )
        self.writer.add(entry)
        self.writer.turn(self.now * 1e-9)
        return True


class Stage:
    """A recorded run in one process, whose clock (5 ms a turn) and links are in our hands."""

    def __init__(self, target: Path, config: Config) -> None:
        self.tape = Tape(target, config)
        self._run = InProcess(config)
        self.learner, self.policy, (self.robot,) = self._run.learner, self._run.policy, self._run.simulators
        self._taps = {name: self.tape.of(name) for name in ("learner", "policy", "sim-0")}
        for (_, bus), tap in zip(self._run.nodes, self._taps.values(), strict=True):
            bus.tap = tap.offer
        for name, role, settings in (
            ("learner", "learner", {"provenance": {}, "new": True}),
            ("policy", "policy", {"exploring": True, "frozen": False}),
            ("sim-0", "simulator", {}),
        ):
            start = Start(role, config.to_yaml(), settings)
            self._taps[name].offer(RECORDER, start, codec.encode(start))

    @property
    def now(self) -> float:
        return self.tape.now * 1e-9

    def bus(self, core: object) -> MemoryBus:
        """That of one of the cores."""
        return next(bus for other, bus in self._run.nodes if other is core)

    def turns(self) -> Iterator[int]:
        """A turn of the clock after the other until the learner is done: the Steps that the robot has published."""
        while not self.learner.done:
            self.tape.now += 5_000_000
            yield self.robot.counters["steps"]

    def play(self, paused: Collection[object]) -> None:
        """Let all cores but these have their turn."""
        for (core, bus), tap in zip(self._run.nodes, self._taps.values(), strict=True):
            if core not in paused:
                inputs = bus.receive(self.now)
                tap.took(self.now, inputs)
                for to, message in core.step(inputs, self.now):
                    bus.send(to, message, self.now)

    def close(self) -> None:
        """The learner's last words, and the end of the recording."""
        last = Status("learner", "finished", "", self.learner.figures(0.0), self.learner.counts())
        self._taps["learner"].offer("supervisor", last, codec.encode(last))
        self._run.close()
        self.tape.writer.close()


LEG = RobotSpec(
    "Leg",
    (Channel("angle", "rad", -2.0, 2.0), Channel("velocity", "rad/s", -20.0, 20.0)),
    (Channel("torque", "N·m", -1.0, 1.0),),
    0.02,
)


def leg_policy(seed: int, version: int, scale: float = 1.5) -> Bundle:
    """Random weights, large enough that what they want meets every limit; of 1e30, so large that it is no number."""
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in layer_shapes(LEG, (6,)).items()}
    return Bundle(LEG, (6,), tensors, provenance={"version": version})


class ScriptedLeg(Robot):
    """A leg that swings by itself; what goes wrong with it, and when, is told by its script.

    Args:
        script: what goes wrong, with the times (ms) from when to when.
        clock: the time in ms.
    """

    spec = LEG

    def __init__(self, script: Mapping[str, tuple[int, int]], clock: Any) -> None:
        self._script, self._clock = script, clock
        self._last = np.zeros(2, np.float32)

    def observe(self) -> Float32:
        if self._is("stop"):
            raise EmergencyStop("the red button")
        if self._is("frozen"):
            return self._last
        time_s = self._clock() * 1e-3
        self._last = np.array([np.sin(7 * time_s) + 0.5 * np.cos(3 * time_s), 7 * np.cos(7 * time_s)], np.float32)
        if self._is("nan"):
            return self._last * np.float32("nan")
        return self._last + np.float32(9 if self._is("out of range") else 0)

    def apply(self, action: Float32) -> None:
        del action
        if self._is("no motor"):
            raise OSError("the motor does not answer")

    def phase(self, observation: Float32) -> Phase:
        del observation
        return Phase.TERMINATED if self._is("fall") else Phase.MID

    def reward(self, observation: Float32, action: Float32) -> float:
        return float(observation[0] - 0.1 * action[0])

    def _is(self, what: str) -> bool:
        begin, end = self._script.get(what, (0, 0))
        return bool(begin <= self._clock() < end)


class Deployed:
    """A deployed policy server, a driver and an operator in one process, recorded; a turn is 5 ms.

    Args:
        config, of_driver: of the policy server and the recorder; of the driver.
    """

    def __init__(self, target: Path, config: Config, of_driver: Config, script: Mapping[str, tuple[int, int]]) -> None:
        self.tape = Tape(target, config)
        self._begin = self.tape.now
        bundle, body = leg_policy(0, 1), RobotBody(ScriptedLeg(script, lambda: self.ms))
        self.policy = policy_core.make(config, "policy", exploring=False)
        self.policy.load(1, bundle)
        self.driver = driver_core.make(body, of_driver, "leg", 0, learner=False)
        policy_bus, driver_bus, self.operator = MemoryBus(), MemoryBus(), MemoryBus()
        policy_bus.serve(ServerSession("policy", "policy", policy_core.ACCEPTS, {}, 2, LEG))
        introduction = hello("driver", "leg", client=3, robots=1, spec=LEG)
        sizes = {"N": 1, "O": 2, "A": 1}
        driver_bus.connect(ClientSession("policy", introduction, driver_core.ACCEPTS["policy"], sizes), policy_bus)
        introduction = hello("operator", "operator", client=9)
        self.operator.connect(ClientSession("policy", introduction, (Reply, StateChange)), policy_bus)
        self._nodes = []
        loaded = weights(1, bundle)
        named = {"version": loaded.version, "sha256": loaded.sha256}
        for name, core, bus, said in (
            ("policy", self.policy, policy_bus, {"exploring": False, "frozen": False, **named}),
            ("leg", self.driver, driver_bus, {"learner": False, "spec": LEG.describe()}),
        ):
            tap = self.tape.of(name)
            bus.tap = tap.offer
            if name == "policy":
                bus.send(RECORDER, loaded, 0.0)
            own = Start("driver", of_driver.to_yaml(), said) if name == "leg" else Start(name, config.to_yaml(), said)
            bus.send(RECORDER, own, 0.0)
            self._nodes.append((core, bus, tap))

    @property
    def ms(self) -> int:
        return (self.tape.now - self._begin) // 1_000_000

    def turn(self, paused: Collection[object]) -> None:
        """Let 5 ms pass, and all but these have their turn."""
        self.tape.now += 5_000_000
        now = self.tape.now * 1e-9
        self.operator.receive(now)
        for core, bus, tap in self._nodes:
            if core not in paused:
                inputs = bus.receive(now)
                tap.took(now, inputs)
                for to, message in core.step(inputs, now):
                    bus.send(to, message, now)

    def close(self) -> None:
        """The end of the recording."""
        self.tape.writer.close()

    def say(self, message: Message) -> None:
        """The operator says something to the policy server."""
        self.operator.send("policy", message, self.tape.now * 1e-9)


def tamper(*servers: MemoryBus, lost: int, late: int) -> None:
    """On the way to these servers let one Step vanish, and hold another back until the one after it has come."""
    for server in servers:
        _tamper(server, server.deliver, lost, late)


def _tamper(server: MemoryBus, deliver: Callable[[bytes | str, Frames], None], lost: int, late: int) -> None:
    held: list[tuple[bytes | str, Frames]] = []

    def changed(origin: bytes | str, frames: Frames) -> None:
        sequence = msgpack.unpackb(frames[1])["sequence"] if bytes(frames[0]) == b"step" else None
        if sequence == late:
            held.append((origin, frames))
        elif sequence != lost:
            deliver(origin, frames)
        if sequence == late + 1:
            deliver(*held.pop())

    server.deliver = changed  # type: ignore[method-assign]
