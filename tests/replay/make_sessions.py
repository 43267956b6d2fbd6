"""Makes the recorded sessions that `test_sessions.py` replays:

    python tests/replay/make_sessions.py [NAME …]

Two are trainings with real processes, one of which loses its policy server on the way; two are runs in one process,
whose clock and links are in our hands, so that a message can be lost, another be late, and a deadline be missed. Make
them anew when the protocol changes; when only behaviour changes on purpose, `td3-robot replay FILE --update` shows and
keeps that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from sims.in_process import InProcess
from td3_robot import config as configuration
from td3_robot.cli.main import main as td3_robot
from td3_robot.config import Config
from td3_robot.messages import Command, Message, Record, Reply, Start, StateChange, Status, Step
from td3_robot.session.entries import Entry, facts_of_this_machine
from td3_robot.session.writer import SessionWriter
from td3_robot.topics import RECORDER
from td3_robot.transport import codec
from td3_robot.transport.memory import MemoryBus
from td3_robot.transport.session import ClientSession, Origin, hello
from td3_robot.transport.tap import Tap

FOLDER = Path(__file__).parent / "sessions"
SMALL = (
    "record=true",
    "network.hidden=[8]",
    "learner.batch_size=16",
    "learner.publish_every=40",
    "learner.policy_average=0",
    "checkpoint.every=0",
)
PENDULUM = ("task=gymnasium:Pendulum-v1", "evaluation.every=0", *SMALL)
_TIMEOUT = 120.0


def walkers(target: Path) -> None:
    """Lock-step, two simulators of two robots each, evaluations; every episode ends with a fall."""
    overrides = ("simulators=2", "robots=2", "learner.learning_starts=100", "evaluation.every=200")
    run = Training(target.parent, 400, *SMALL, *overrides, "evaluation.episodes=1", "timing=lockstep")
    run.finish()
    run.session.rename(target)


def pendulum(target: Path) -> None:
    """One robot whose episodes are truncated after 200 steps; the policy server is killed and comes back."""
    run = Training(target.parent, 700, *PENDULUM, "learner.learning_starts=150", "learner.replay_ratio=0.5")
    run.wait_for_steps(300)
    os.kill(run.pid_of("policy"), signal.SIGKILL)
    run.finish()
    run.session.rename(target)


def tampered(target: Path) -> None:
    """Three robots in real time: Step 20 comes after Step 21, the policy server pauses, Step 60 is lost."""
    overrides = ("pacing.mode=realtime", "robots=3", "learner.learning_starts=60", "learner.replay_ratio=0.2")
    stage = Stage(target, configuration.load("walker2d", [*PENDULUM, *overrides, "total_steps=210"]))
    tamper(stage.bus(stage.robot), lost=60, late=20)
    for step in stage.turns():
        stage.play([stage.policy] if 40 <= step < 43 else [])
    stage.close()


def faulted(target: Path) -> None:
    """A robot in real time: its policy server, then itself, pauses until watchdogs bite; an operator does the rest.

    One period is 1/30 s: with deadlines of 100 ms, a pause of 8 periods is a fault, which 100 ms without one end.
    """
    overrides = ("pacing.mode=realtime", "learner.learning_starts=40", "learner.replay_ratio=0.2", "total_steps=180")
    safety = (
        "safety.action_deadline_ms=100",
        "safety.observation_deadline_ms=100",
        "safety.recovery=automatic",
        "safety.recovery_ms=100",
        "safety.rate=20",
    )
    settings = [*PENDULUM, *overrides, *safety, "safety.limits=[-1.5, 1.5]"]
    stage = Stage(target, configuration.load("walker2d", settings))
    operator = MemoryBus()
    introduction = hello("operator", "operator", client=9)
    operator.connect(ClientSession("policy", introduction, (Reply, StateChange)), stage.bus(stage.policy))
    said = {20: "state", 90: "estop", 100: "reset", 104: "activate", 130: "rollback", 150: "unfreeze"}
    silent_until = 0  # ns
    for step in stage.turns():
        operator.receive(stage.now)
        if step == 70 and not silent_until:
            silent_until = stage.tape.now + 270_000_000
        if verb := said.pop(step, None):
            operator.send("policy", Command(step, "", verb, "as make_sessions.py says", 0, "", b""), stage.now)
        paused = [stage.policy] if 50 <= step < 58 else [stage.robot] if stage.tape.now < silent_until else []
        stage.play(paused)
    stage.close()


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
    """A recorded run in one process, whose clock (1 ms a turn) and links are in our hands."""

    def __init__(self, target: Path, config: Config) -> None:
        self.tape = Tape(target, config)
        self._run = InProcess(config)
        self.policy, (self.robot,) = self._run.policy, self._run.simulators
        self._taps = {name: self.tape.of(name) for name in ("learner", "policy", "sim-0")}
        for (_, bus), tap in zip(self._run.nodes, self._taps.values(), strict=True):
            bus.tap = tap.offer
        for name, role, settings in (
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
        while not self._run.learner.done:
            self.tape.now += 1_000_000
            yield self.robot.counters["steps"]

    def play(self, paused: Collection[object]) -> None:
        """Let all cores but these have their turn."""
        for (core, bus), tap in zip(self._run.nodes, self._taps.values(), strict=True):
            if core not in paused:
                inputs = bus.receive(self.now)
                if core is not self._run.learner:
                    tap.took(self.now, inputs)
                for to, message in core.step(inputs, self.now):
                    bus.send(to, message, self.now)

    def close(self) -> None:
        """The learner's last words, and the end of the recording."""
        learner = self._run.learner
        last = Status("learner", "finished", "", learner.figures(0.0), learner.counts())
        self._taps["learner"].offer("supervisor", last, codec.encode(last))
        self._run.close()
        self.tape.writer.close()


def tamper(bus: MemoryBus, *, lost: int, late: int) -> None:
    """Let one Step vanish, and hold another back until the one after it has gone out."""
    send = bus.send
    held: list[tuple[Origin, Message]] = []

    def changed(to: Origin, message: Message, now: float) -> bool:
        if isinstance(message, Step) and message.sequence == lost:
            return False
        if isinstance(message, Step) and message.sequence == late:
            held.append((to, message))
            return True
        result = send(to, message, now)
        if isinstance(message, Step) and message.sequence == late + 1:
            for number, (link, waiting) in enumerate(held):
                if link == to:
                    send(*held.pop(number), now)
                    assert waiting is not message
                    break
        return result

    bus.send = changed  # type: ignore[method-assign]


SESSIONS = {"walkers": walkers, "pendulum": pendulum, "tampered": tampered, "faulted": faulted}


def main(names: list[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in names or SESSIONS:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / f"{name}.mcap"
            SESSIONS[name](made)
            # As it was recorded first, so that nothing is put right by the update, which only adds transitions.
            for words in ((), ("--update",)):
                if code := td3_robot(["replay", str(made), *words]):
                    return code
            (FOLDER / made.name).write_bytes(made.read_bytes())
    return td3_robot(["replay", *(str(FOLDER / f"{name}.mcap") for name in names or SESSIONS)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
