"""Recorded runs for the replay tests, in one process with a simulated clock and simulated links."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from td3_robot.bundle import Bundle, layer_shapes
from td3_robot.config.schema import Config
from td3_robot.core_types import Core, Input, Origin
from td3_robot.driver import core as driver_core
from td3_robot.driver.robot import EmergencyStop, Robot, RobotBody
from td3_robot.messages import Bye, Hello, LifecycleChange, Message, Phase, Record, Reply, Start, Status, Weights
from td3_robot.policy import core as policy_core
from td3_robot.policy import store
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.node import weights
from td3_robot.recording.boundary import PolicyObserver, RecordedBody, RecordedCore
from td3_robot.recording.entries import Entry
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.writer import SessionWriter
from td3_robot.safety.state import SafetyState
from td3_robot.specs import Channel, Float32, RobotSpec
from td3_robot.topics import RECORDER
from td3_robot.transport import codec
from td3_robot.transport.codec import Frames
from td3_robot.transport.link import ClientLink, ServerLink, hello
from td3_robot.transport.memory import Connection, MemoryBus, Network
from td3_robot.transport.tap import RECORDED, Copies
from tests.in_process import InProcess

OFFERS = {"offers": sorted(kind.NAME for kind in RECORDED)}  # every node announces these topics


class _AtOnce(Copies):
    """Sends each message to the recorder immediately, not in groups, so that no message stays unsent at the end."""

    def offer(self, link: str, message: Message, payload: bytes | None = None) -> None:
        super().offer(link, message, payload)
        self.taps[0].flush(0.0, at_once=True)

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        super().record_turn(now, inputs)
        self.taps[0].flush(0.0, at_once=True)


class RecordedBus(MemoryBus):
    """A bus. ``copies`` receives every message that the bus sends."""

    copies: Copies | None = None

    def _post(self, link: str, message: Message, key: bytes | None = None) -> bool:
        sent = super()._post(link, message, key)
        if sent and self.copies:
            self.copies.offer(link, message)
        return sent

    def _offer(self, message: Message) -> None:
        if self.copies:
            self.copies.offer(RECORDER, message)


class Tape:
    """Records the buses of one process with a simulated clock (``now``, in ns)."""

    def __init__(self, target: Path, config: Config) -> None:
        self.now = 1_000_000_000
        self.writer = SessionWriter(target, facts_of_this_machine(config), 0.0)
        self._begin = time.time_ns()

    def of(self, publisher: str, incarnation: int = 0) -> Copies:
        """Return the ``Copies`` that record the messages of the node with this name and incarnation."""
        session = ClientLink("recorder", hello("node", publisher, client=0), (), state="welcome")
        session.sent_at = 0.0
        result = _AtOnce(self._wall)
        result.tap(session, lambda name, payload: self._write(publisher, incarnation, name, payload))
        return result

    def _wall(self) -> int:
        return self._begin + self.now

    def _write(self, publisher: str, incarnation: int, name: str, payload: bytes) -> bool:
        assert name == Record.NAME
        for record in codec.decode_records(payload):
            assert isinstance(record, Record)
            wire = record.topic, record.link, record.sequence, record.stamp, self._wall(), record.payload
            self.writer.add(Entry(publisher, incarnation, *wire))
        self.writer.turn(self.now * 1e-9)
        return True


class CopiesSink:
    """Passes the records of a RecordedCore to the Copies of its node."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.record_turn = copies.record_turn

    def send(self, to: Origin, message: Message) -> bool:
        assert to == RECORDER
        self._copies.offer(RECORDER, message)
        return True


class Stage:
    """A recorded run in one process with a simulated clock (5 ms a turn) and simulated links."""

    def __init__(self, target: Path, config: Config) -> None:
        self.tape = Tape(target, config)
        self._run = InProcess(config, lambda: self.now, RecordedBus)
        self.learner, self.policy, (self.robot,) = self._run.learner, self._run.policy, self._run.simulators
        self._copies = {name: self.tape.of(name) for name in ("learner", "policy", "sim-0")}
        for (_, bus), copies in zip(self._run.nodes, self._copies.values(), strict=True):
            bus.copies = copies
        for name, role, settings in (
            ("learner", "learner", {"provenance": {}, "new": True}),
            ("policy", "policy", {"exploring": True, "frozen": False}),
            ("sim-0", "simulator", {}),
        ):
            start = Start(role, config.to_yaml(), {**settings, **OFFERS})
            self._copies[name].offer(RECORDER, start)
        observers = {"policy": PolicyObserver(self.policy)}
        self._cores = [
            RecordedCore(core, CopiesSink(copies), observers.get(name))
            for (core, _), (name, copies) in zip(self._run.nodes, self._copies.items(), strict=True)
        ]

    @property
    def now(self) -> float:
        return self.tape.now * 1e-9

    def bus(self, core: object) -> MemoryBus:
        """Return the bus of a core."""
        return next(bus for other, bus in self._run.nodes if other is core)

    def another_bus(self) -> MemoryBus:
        """Return a new bus that can connect to the cores' buses."""
        return MemoryBus(self._run.network, self._run.clock)

    def turns(self) -> Iterator[int]:
        """Advance the clock turn by turn until the learner ends. Yields the number of published Steps."""
        while not self.learner.done:
            self.tape.now += 5_000_000
            yield self.robot.counters["steps"]

    def play(self, paused: Collection[object]) -> None:
        """Run one turn of all cores except the ``paused`` cores."""
        for (core, bus), recorded in zip(self._run.nodes, self._cores, strict=True):
            if core not in paused:
                for to, message in recorded.step(bus.receive(0.0), self.now):
                    bus.send(to, message)

    def close(self) -> None:
        """Record the learner's last Status and close the recording."""
        last = Status("learner", "finished", "", self.learner.reports.figures(0.0), self.learner.counts())
        self._copies["learner"].offer("supervisor", last, codec.encode(last))
        self._run.close()
        self.tape.writer.close()


LEG = RobotSpec(
    "Leg",
    (Channel("angle", "rad", -2.0, 2.0), Channel("velocity", "rad/s", -20.0, 20.0)),
    (Channel("torque", "N·m", -1.0, 1.0),),
    0.02,
)


def leg_policy(seed: int, version: int, scale: float = 1.5) -> Bundle:
    """A policy with random weights. Its actions are often near the limits.

    With a scale of 1e30, the policy gives NaN for some observations.
    """
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in layer_shapes(LEG, (6,)).items()}
    return Bundle(LEG, (6,), tensors, provenance={"version": version})


class ScriptedLeg(Robot):
    """A leg that swings by itself. Actions change only its reward. A script lists events, such as a fall or an error.

    Args:
        script: begin and end of each event, in ms.
        clock: returns the time in ms.
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
    """A deployed policy server, its learner, drivers and an operator in one recorded process. A turn is 5 ms.

    Args:
        config: configuration of the policy server and the recorder.
        of_driver: configuration of the drivers.
        script: the events of the leg, see :class:`ScriptedLeg`.
    """

    def __init__(self, target: Path, config: Config, of_driver: Config, script: Mapping[str, tuple[int, int]]) -> None:
        self.tape = Tape(target, config)
        self._began = self.tape.now
        self._config, self._of_driver, self._script = config, of_driver, script
        self._starts: Counter[str] = Counter()
        self._nodes: dict[str, tuple[Core | None, RecordedBus]] = {}
        self._policy: PolicyCore | None = None
        self._learning_peer: Origin | None = None
        self._network = Network()
        self.server, self._learner, self._operator = self._bus(), self._bus(), self._bus()
        self._learner.serve("learner", ServerLink("learner", "learner", {"policy": ()}, {}, 1))
        self._learner.copies = self.tape.of("learner")

    def _bus(self) -> RecordedBus:
        return RecordedBus(self._network, lambda: self.tape.now * 1e-9)

    @property
    def ms(self) -> int:
        return (self.tape.now - self._began) // 1_000_000

    @property
    def policy(self) -> PolicyCore:
        assert self._policy
        return self._policy

    def serve(self, bundle: Bundle | None, *, safety_state: SafetyState | None = None, learner: bool = False) -> None:
        """Start the policy server. Its first turn receives the messages that came while no server ran.

        With ``learner``, the server connects to the learner and adds exploration noise.
        """
        start, now = self._starts["policy"], self.tape.now * 1e-9
        # With ``read``, the server accepts a policy with actions that are not finite. A session needs this case.
        core = self._policy = policy_core.make(self._config, "policy", exploring=learner, examine=store.read)
        settings: dict[str, Any] = {"exploring": learner, "frozen": False}
        self.server.serve("policy", ServerLink("policy", "policy", policy_core.ACCEPTS, {}, 2 + start, LEG))
        introduction = hello("operator", "operator", client=9)
        self._operator.connect("policy", ClientLink("policy", introduction, (Reply, LifecycleChange)))
        if learner:
            introduction = hello("policy", "policy", client=100 + start, incarnation=start)
            self.server.connect("learner", ClientLink("learner", introduction, (Weights,)))
        copies = self._tap("policy", self.server)
        if bundle:
            loaded = weights(bundle.version, bundle)
            core.load(loaded.version, bundle)
            settings |= {"version": loaded.version, "sha256": loaded.sha256}
            self.server.send(RECORDER, loaded)
        if safety_state:
            core.resume(safety_state, now)
            settings |= {"resumed": now, "latches": safety_state.stored()}
        recorded = RecordedCore(core, CopiesSink(copies), PolicyObserver(core))
        self._begin("policy", "policy", self._config, settings, (recorded, self.server))

    def drive(self) -> None:
        body: Any = RecordedBody(RobotBody(ScriptedLeg(self._script, lambda: self.ms)))
        core = driver_core.make(body, self._of_driver, "leg", self._starts["leg"], learner=False)
        bus, copies = self._client("leg", 3 + 100 * self._starts["leg"])
        recorded = RecordedCore(core, CopiesSink(copies), body.observe)
        self._begin("leg", "driver", self._of_driver, {"learner": False, "spec": LEG.describe()}, (recorded, bus))

    def join(self, name: str) -> None:
        """Connect a second driver, which has no core. The caller sends the driver's messages with :meth:`send`."""
        self._nodes[name] = None, self._client(name, 7)[0]

    def _client(self, name: str, client: int) -> tuple[RecordedBus, Copies]:
        bus = self._bus()
        introduction = hello("driver", name, client=client, incarnation=self._starts[name], robots=1, spec=LEG)
        bus.connect("policy", ClientLink("policy", introduction, driver_core.ACCEPTS["policy"]))
        return bus, self._tap(name, bus)

    def end(self, name: str, *, bye: bool = True) -> None:
        """End a node.

        If ``bye`` is True and the node is a driver, the driver first sends a Bye. If ``bye`` is False, the node ends as
        if somebody killed it.
        """
        _, bus = self._nodes.pop(name)
        if bye:
            bus.send("policy", Bye("stopped"))

    def learn(self, learnt: Weights) -> None:
        """Send weights from the learner to the policy server."""
        assert self._learning_peer
        self._learner.send(self._learning_peer, learnt)

    def _tap(self, name: str, bus: RecordedBus) -> Copies:
        copies = self.tape.of(name, self._starts[name])
        bus.copies = copies
        return copies

    def _begin(self, name: str, role: str, config: Config, settings: dict[str, Any], node: Any) -> None:
        _, bus = self._nodes[name] = node
        self._starts[name] += 1
        bus.send(RECORDER, Start(role, config.to_yaml(), {**settings, **OFFERS}))

    def turn(self, paused: Collection[str] = ()) -> None:
        """Advance the clock by 5 ms and run one turn of all nodes except the ``paused`` nodes."""
        self.tape.now += 5_000_000
        now = self.tape.now * 1e-9
        self._operator.receive(0.0)
        for peer, message in self._learner.receive(0.0):
            self._learning_peer = peer if isinstance(message, Hello) else self._learning_peer
        for name, (core, bus) in list(self._nodes.items()):
            if name not in paused:
                inputs = bus.receive(0.0)
                for to, message in core.step(inputs, now) if core else []:
                    bus.send(to, message)

    def send(self, message: Message, name: str = "") -> None:
        """Send a message to the policy server from the operator or from the named driver."""
        bus = self._nodes[name][1] if name else self._operator
        bus.send("policy", message)

    def close(self) -> None:
        self.tape.writer.close()


def repeat(server: MemoryBus, until: Callable[[], bool]) -> None:
    """Deliver the next Step. Then deliver this Step again in place of each later Step, while ``until()`` is False."""
    deliver = server.deliver
    held: list[Frames] = []

    def changed(connection: Connection, frames: Frames) -> None:
        if bytes(frames[0]) == b"step" and not until():
            held.append(frames)
            frames = held[0]
        deliver(connection, frames)

    server.deliver = changed  # type: ignore[method-assign]


def tamper(*servers: MemoryBus, lost: int, late: int) -> None:
    """Change the links to these servers: drop Step number ``lost``, and swap the Steps ``late`` and ``late + 1``."""
    for server in servers:
        _tamper(server, server.deliver, lost, late)


def _tamper(server: MemoryBus, deliver: Callable[[Connection, Frames], None], lost: int, late: int) -> None:
    held: list[tuple[Connection, Frames]] = []

    def changed(connection: Connection, frames: Frames) -> None:
        sequence = msgpack.unpackb(frames[1])["sequence"] if bytes(frames[0]) == b"step" else None
        if sequence == late:
            held.append((connection, frames))
        elif sequence != lost:
            deliver(connection, frames)
        if sequence == late + 1:
            deliver(*held.pop())

    server.deliver = changed  # type: ignore[method-assign]
