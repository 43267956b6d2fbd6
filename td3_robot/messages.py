"""Every message of the protocol, once: fields, types, shapes, units.

On the wire a message is one msgpack map from field name to value, every field present, in any order. Arrays are
msgpack ``bin``: little-endian numbers in C order. Their shapes are products of four sizes: N robots of a source,
O observation channels, A action channels, E episodes. ``docs/protocol.md`` is produced from this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from td3_robot.specs import Float32

if TYPE_CHECKING:
    from typing_extensions import Self  # of the type checker's own: typing has it from Python 3.11 on

PROTOCOL_VERSION = 1

Float64 = NDArray[np.float64]
UInt8 = NDArray[np.uint8]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]


class Phase(IntEnum):
    """Where in its episode a robot is, as in dm_env; the end of an episode is two values because they differ."""

    FIRST = 0  # the first observation after a reset; reward and action mean nothing
    MID = 1
    TERMINATED = 2  # the task ended here: no bootstrapping beyond
    TRUNCATED = 3  # cut off (time limit, operator): the value goes on beyond


_PHASES = bytes(Phase)


NO_NOISE = 0
"""``noise_kind`` of an action without exploration noise. Other numbers: ``NUMBER`` in td3_robot/policy/noise.py."""


class ActionOrigin(IntEnum):
    """Where the action came from that a source applied."""

    NONE = 0  # none was applied: every robot is at FIRST
    POLICY = 1  # an Action that answered the Step before
    HELD = 2  # none came in time: each robot's action before it, zero after a reset
    ZERO = 3  # none came in time: zero, or the limit nearest to it
    SAFE = 4  # the safe action: the policy server said so, or the source is not active


_LAST_ORIGIN = int(max(ActionOrigin))


@dataclass(frozen=True)
class FieldType:
    """How one field travels.

    Attributes:
        kind: an integer type, ``f64``, ``text``, ``bytes``, ``map`` (text keys; numbers, text, lists, maps), ``list``
            (of the same) or ``array``.
        dtype, shape: of an array: a little-endian numpy type code, and sizes out of N, O, A, E.
        limit: the most characters of text or bytes of bytes; maps and lists are capped by their message's MAX_BYTES.
        unit, meaning: for the reader.
        tolerance: by how much a number computed again on another kind of machine may differ: ``t + t·|value|``. On
            the same kind of machine nothing may differ.
    """

    kind: Literal["u32", "u64", "i64", "f64", "text", "bytes", "map", "list", "array"]
    meaning: str
    unit: str = ""
    limit: int = 256
    dtype: str = ""
    shape: tuple[str, ...] = ()
    tolerance: float = 0.0

    @property
    def type_name(self) -> str:
        """The kind in a word; of an array the type of its numbers and its shape, as ``float32[N, O]``."""
        return f"{np.dtype(self.dtype).name}[{', '.join(self.shape)}]" if self.kind == "array" else self.kind


def _wire(kind: Any, meaning: str, unit: str = "", limit: int = 256) -> Any:
    return field(metadata={"wire": FieldType(kind, meaning, unit, limit)})


def _array(dtype: str, shape: str, meaning: str, unit: str = "", tolerance: float = 0.0) -> Any:
    return field(metadata={"wire": FieldType("array", meaning, unit, 0, dtype, tuple(shape), tolerance)})


MAX_COMMAND = 1 << 22
"""Bytes of a Command: as a Step's, because whoever sends one keeps a control loop's link busy for as long."""
LONGEST_PAYLOAD = MAX_COMMAND - (1 << 14)
"""Bytes of the policy in one."""
MAX_PAYLOAD = (1 << 26) - 4096
"""Bytes of a policy in a Weights message, which has the rest of 64 MiB for its other fields."""


class Message:
    """Base of all messages; ``NAME`` is the first frame on the wire, ``MAX_BYTES`` the cap of the second."""

    NAME: ClassVar[str]
    MAX_BYTES: ClassVar[int] = 1 << 14

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """The message with every field as in ``content``: what the constructor makes, in a tenth of its time."""
        message = object.__new__(cls)
        message.__dict__.update(content)  # a frozen dataclass's own constructor sets fields one by one
        return message

    def problem(self) -> str | None:
        """What is wrong with well-formed values, None if nothing: checked by the decoder, after types and shapes."""
        return None


_SOURCE = "id of the simulator process or robot"
_INCARNATION = "counts the starts of that source; steps of two incarnations are never joined"


@dataclass(frozen=True, eq=False)
class Hello(Message):
    """A client's first words on a link. The server answers Welcome or Refused. Sent again whenever it is lost.

    Hello, Welcome and Refused are the same in every protocol version, so that a mismatch can be told.
    """

    NAME: ClassVar[str] = "hello"
    MAX_BYTES: ClassVar[int] = 1 << 17  # anybody may send one

    protocol: int = _wire("u32", "PROTOCOL_VERSION of the sender")
    role: str = _wire("text", "simulator, driver, policy, evaluator, operator or node (a supervised process's status)")
    name: str = _wire("text", "unique name of the sender; the source id for a simulator or driver")
    incarnation: int = _wire("u64", _INCARNATION)
    client: int = _wire("u64", "drawn at the start of the process, so that two with one name are told apart")
    robots: int = _wire("u32", "N, robots of a simulator or driver; 0 for other roles")
    weights_version: int = _wire("u64", "newest weights the sender holds; 0 for none")
    spec: dict[str, Any] = _wire("map", "robot specification, see below; an empty map where none")
    agreement: dict[str, Any] = _wire("map", "configuration keys both sides must hold alike, as text")

    def problem(self) -> str | None:
        return None if self.name and self.name.isprintable() else f"name {self.name!r} is empty or not printable"


@dataclass(frozen=True, eq=False)
class Welcome(Message):
    """The server takes part."""

    NAME: ClassVar[str] = "welcome"

    protocol: int = _wire("u32", "PROTOCOL_VERSION of the server")
    name: str = _wire("text", "name of the server")
    session: int = _wire("u64", "drawn anew at every start of the server; a change means it knows nothing of before")


@dataclass(frozen=True, eq=False)
class Refused(Message):
    """The server does not take part; with ``code`` hello it has not met this client and asks for a Hello."""

    NAME: ClassVar[str] = "refused"

    code: str = _wire("text", "hello, protocol, spec, agreement, taken or name")
    reason: str = _wire("text", "one sentence that says what differs", limit=2048)


@dataclass(frozen=True, eq=False)
class Heartbeat(Message):
    """Sent by a client that has been silent for a while; the server sends one back."""

    NAME: ClassVar[str] = "heartbeat"

    stamp: int = _wire("i64", "sender's monotonic clock; echoed, never compared between hosts", "ns")
    session: int = _wire("u64", "the server's session as the sender knows it")


@dataclass(frozen=True, eq=False)
class Bye(Message):
    """The client leaves and will not come back under this incarnation."""

    NAME: ClassVar[str] = "bye"

    reason: str = _wire("text", "why, for the log", limit=2048)


@dataclass(frozen=True, eq=False)
class Step(Message):
    """What a source's robots did and saw: the one stream that carries experience.

    A transition of robot i is two consecutive Steps of the same source, incarnation and episode[i].
    """

    NAME: ClassVar[str] = "step"
    MAX_BYTES: ClassVar[int] = 1 << 22

    source: str = _wire("text", _SOURCE)
    incarnation: int = _wire("u64", _INCARNATION)
    sequence: int = _wire("u64", "0, 1, 2, … within an incarnation; a jump is a gap")
    transitions: int = _wire("u64", "robot steps (phase not FIRST) of this incarnation so far, with this Step's")
    stamp: int = _wire("i64", "source's monotonic clock when the observation was complete", "ns")
    phase: UInt8 = _array("<u1", "N", "0 FIRST, 1 MID, 2 TERMINATED, 3 TRUNCATED")
    episode: UInt64 = _array("<u8", "N", "episode number of the robot within the incarnation, from 0")
    episode_step: UInt32 = _array("<u4", "N", "control periods since FIRST, which is 0")
    observation: Float32 = _array(
        "<f4", "NO", "observation channels in the order of the specification", "of channel", tolerance=1e-5
    )
    reward: Float32 = _array("<f4", "N", "reward for the action applied; 0 at FIRST", "1", tolerance=1e-4)
    action: Float32 = _array(
        "<f4",
        "NA",
        "the action that was really applied; at FIRST what the motors are told as the episode begins, 0 in a simulator",
        "of channel",
    )
    origin: int = _wire(
        "u32", "of the applied action: 0 none (all at FIRST), 1 an Action, 2 the last held, 3 zero, 4 safe"
    )
    answered: int = _wire("u64", "sequence of the Step whose Action was applied; own sequence where none was")
    weights_version: int = _wire("u64", "weights that computed the applied action; 0 where none did")
    noise_kind: int = _wire("u32", "exploration noise in the applied action, as in Action")
    noise_seed: int = _wire("u64", "seed of that noise; with source, incarnation, robot, episode, step it is all")
    needs_version: int = _wire("u64", "lock-step: the weights that must answer this Step; 0 is any")
    world: dict[str, Any] = _wire("map", "robots at FIRST whose world was drawn: index to map of name to number")

    def problem(self) -> str | None:
        if self.phase.tobytes().translate(None, _PHASES):
            return f"phase {self.phase.max()} is not one of 0 to 3"
        if self.origin > _LAST_ORIGIN:
            return f"origin {self.origin} is not one of 0 to {_LAST_ORIGIN}"
        return self._world_problem() if self.world else None

    def _world_problem(self) -> str | None:
        for robot, drawn in self.world.items():
            if not (robot.isascii() and robot.isdigit() and len(robot) <= 5 and int(robot) < len(self.phase)):
                return f"world: {robot[:40]!r} is not the index of a robot, 0 to {len(self.phase) - 1}"
            if not isinstance(drawn, dict) or any(
                type(value) not in (int, float) or not np.isfinite(value) for value in drawn.values()
            ):
                return f"world: that of robot {robot} is not a map from names to finite numbers"
        return None


@dataclass(frozen=True, eq=False)
class Action(Message):
    """The policy server's answer to one Step. Robots whose phase is terminal are about to be reset: ignore theirs.

    With ``weights_version`` 0 no policy computed it: it is the safe action, because the server or its watch over this
    source is not active. It replaces an Action for the same Step that came before it.
    """

    NAME: ClassVar[str] = "action"
    MAX_BYTES: ClassVar[int] = 1 << 20

    source: str = _wire("text", _SOURCE)
    incarnation: int = _wire("u64", "of the Step answered")
    answers: int = _wire("u64", "sequence of the Step answered")
    stamp: int = _wire("i64", "stamp of the Step answered, echoed", "ns")
    action: Float32 = _array(
        "<f4", "NA", "what to apply, within the limits of the specification", "of channel", tolerance=1e-5
    )
    weights_version: int = _wire("u64", "weights that computed it; 0: none did, it is the safe action")
    noise_kind: int = _wire(
        "u32",
        "0 none, 1 Gaussian, 2 uniform, 3 Ornstein-Uhlenbeck, 1000 and above: noises of installed packages; accept "
        "unknown numbers, the action counts",
    )
    noise_seed: int = _wire("u64", "seed of the noise; 0 where none")


@dataclass(frozen=True, eq=False)
class Throttle(Message):
    """How far a source may go: the learner's side of the replay ratio. Cumulative, so a lost one costs nothing."""

    NAME: ClassVar[str] = "throttle"

    source: str = _wire("text", _SOURCE)
    incarnation: int = _wire("u64", "of the source; ignore a Throttle for another one")
    answers: int = _wire("u64", "sequence of the newest Step the learner has dealt with, plus one; 0 is none yet")
    transitions_allowed: int = _wire("u64", "publish a further Step only while own transitions are fewer")
    weights_version: int = _wire("u64", "lock-step: what the next Step must name in needs_version; 0 otherwise")
    save: int = _wire("u32", "lock-step: 1 asks for a SimulatorState before the next step; 0 otherwise")


@dataclass(frozen=True, eq=False)
class SimulatorState(Message):
    """Lock-step: all that decides what a simulator does next, after the Step before ``answers``.

    A simulator sends it when a Throttle asks for it; the learner keeps it with its checkpoint. Sent back by the
    learner, it says: go on from here. The simulator answers that with an empty ``payload`` once it is there, and with
    the Step it is at. Only a simulator can read its own; a source without such states never sends any.
    """

    NAME: ClassVar[str] = "state"
    MAX_BYTES: ClassVar[int] = 1 << 26

    source: str = _wire("text", _SOURCE)
    incarnation: int = _wire("u64", "under which its Steps go on")
    answers: int = _wire("u64", "sequence of its newest Step, plus one; 0 before the first")
    payload: bytes = _wire("bytes", "the state, in a form of the simulator's own", limit=MAX_PAYLOAD)


@dataclass(frozen=True, eq=False)
class Weights(Message):
    """A policy, complete and checkable: newest wins."""

    NAME: ClassVar[str] = "weights"
    MAX_BYTES: ClassVar[int] = 1 << 26

    version: int = _wire("u64", "1, 2, 3, …; over a restart of the learner goes back in lock-step only")
    updates: int = _wire("u64", "critic updates the learner had made", "updates")
    env_steps: int = _wire("u64", "transitions the learner had seen", "transitions")
    sha256: str = _wire("text", "hexadecimal SHA-256 of payload")
    payload: bytes = _wire("bytes", "policy bundle: safetensors with a JSON header, see below", limit=MAX_PAYLOAD)


@dataclass(frozen=True, eq=False)
class Evaluation(Message):
    """Noise-free episodes of one weights version, on an environment of the evaluator's own."""

    NAME: ClassVar[str] = "evaluation"
    MAX_BYTES: ClassVar[int] = 1 << 16

    version: int = _wire("u64", "weights evaluated")
    env_steps: int = _wire("u64", "as in the Weights evaluated", "transitions")
    updates: int = _wire("u64", "as in the Weights evaluated", "updates")
    returns: Float64 = _array("<f8", "E", "undiscounted return of each episode", "1")
    lengths: UInt32 = _array("<u4", "E", "length of each episode", "steps")


@dataclass(frozen=True, eq=False)
class Status(Message):
    """A node's state and figures, for the supervisor and for people."""

    NAME: ClassVar[str] = "status"
    MAX_BYTES: ClassVar[int] = 1 << 16

    node: str = _wire("text", "name of the node")
    state: str = _wire("text", "starting, ready, running, finished or failed")
    detail: str = _wire("text", "one line for a person; empty when all is well", limit=2048)
    figures: dict[str, Any] = _wire("map", "gauges by name, as numbers")
    counters: dict[str, Any] = _wire("map", "counts since start by name: lost, dropped, refused, …")

    def problem(self) -> str | None:
        for name, value in (*self.figures.items(), *self.counters.items()):
            if type(value) not in (int, float):
                return f"{name[:40]!r} is {type(value).__name__}, not a number"
        return None


@dataclass(frozen=True, eq=False)
class Command(Message):
    """What an operator wants a policy server or a robot to do; answered by one Reply with the same ``id``.

    The server carries it out, or relays it to the robot that ``target`` names. A robot may send ``estop`` for all, and
    gets no Reply.
    """

    NAME: ClassVar[str] = "command"
    MAX_BYTES: ClassVar[int] = MAX_COMMAND

    id: int = _wire("u64", "drawn by the sender; the Reply repeats it")
    target: str = _wire(
        "text", "name of a robot; empty: the policy server, and for the first six verbs but state all robots too"
    )
    verb: str = _wire(
        "text", "state, configure, activate, deactivate, reset, estop, load, rollback, freeze, unfreeze or shutdown"
    )
    reason: str = _wire("text", "why, for the log; may be empty", limit=2048)
    version: int = _wire("u64", "load: what to number it; rollback: what to go back to; 0: the next, the one before")
    sha256: str = _wire("text", "load: hexadecimal SHA-256 of payload; else empty")
    payload: bytes = _wire("bytes", "load: a policy bundle; else empty", limit=LONGEST_PAYLOAD)


@dataclass(frozen=True, eq=False)
class Reply(Message):
    """What became of a Command."""

    NAME: ClassVar[str] = "reply"
    MAX_BYTES: ClassVar[int] = 1 << 20

    id: int = _wire("u64", "of the Command")
    node: str = _wire("text", "who carried it out: the policy server or a robot")
    error: str = _wire("text", "why it was refused; empty: done", limit=2048)
    state: str = _wire("text", "unconfigured, inactive, active, fault or finalized: the node's state now")
    detail: dict[str, Any] = _wire("map", "more about the node, for people")


@dataclass(frozen=True, eq=False)
class LifecycleChange(Message):
    """A node, or a policy server's watch over one robot, has changed its state."""

    NAME: ClassVar[str] = "lifecycle"

    node: str = _wire("text", "whose state: policy server, robot, or both as server/robot for the watch over it")
    previous: str = _wire("text", "state before")
    state: str = _wire("text", "unconfigured, inactive, active, fault or finalized")
    reason: str = _wire("text", "why, for a person", limit=2048)
    stamp: int = _wire("i64", "the node's monotonic clock", "ns")


@dataclass(frozen=True, eq=False)
class Start(Message):
    """What decides, beside what comes in, what a node's core does: recorded once, so that it can be made again."""

    NAME: ClassVar[str] = "start"
    MAX_BYTES: ClassVar[int] = 1 << 20

    role: str = _wire("text", "policy, simulator, driver or learner")
    config: str = _wire("text", "the node's own resolved configuration, as YAML", limit=1 << 17)
    settings: dict[str, Any] = _wire("map", "what its command line said beyond that; offers: topics that it may offer")


@dataclass(frozen=True, eq=False)
class Turn(Message):
    """A core was told the time and what had arrived: with Start, all that its outputs follow from.

    An input is a list of origin, topic and fields: all fields, or, where a message holds arrays or a policy, ``named``,
    which says which recorded message it is. A Step or Action, whose sender may not have lived to have it recorded, is
    repeated as well: ``wire``, its payload as base64, and ``robots``, its N. The origin is the link of a server, or
    ``#`` and the key of a client's connection, which its Hello has begun.
    """

    NAME: ClassVar[str] = "turn"
    MAX_BYTES: ClassVar[int] = 1 << 24

    now: float = _wire("f64", "the time as the core was told it, of the node's monotonic clock", "s")
    inputs: list[Any] = _wire("list", "what had arrived, in order")

    def problem(self) -> str | None:
        for item in self.inputs:
            if not (isinstance(item, list) and [type(part) for part in item] == [str, str, dict]):
                return f"an input is {repr(item)[:80]}; needed are origin, topic and fields"
            if item[1] not in MESSAGES:
                return f"topic {item[1][:40]!r} is not one of {', '.join(MESSAGES)}"
            named = item[2].get("named", [])
            if not (isinstance(named, list) and all(type(part) in (str, int) for part in named)):
                return f"{item[1]} is named {repr(named)[:80]}; needed is a list of text and integers"
            if "wire" in item[2] and (type(item[2]["wire"]) is not str or type(item[2].get("robots")) is not int):
                return f"{item[1]} is repeated as {repr(item[2])[:80]}; needed are wire, a text, and robots, a number"
        return None


@dataclass(frozen=True, eq=False)
class Heard(Message):
    """What a driver heard from its robot beyond observations; recorded when it is not the same as before."""

    NAME: ClassVar[str] = "heard"
    MAX_BYTES: ClassVar[int] = 1 << 16

    call: int = _wire("u64", "how often the robot had been told or asked something")
    refused: int = _wire("u32", "1: there was no sound observation to begin an episode with; else 0")
    trouble: str = _wire("text", "what is wrong with the robot; empty: nothing", limit=4096)
    stop: str = _wire("text", "why everything has to stop; empty: it has not", limit=4096)


@dataclass(frozen=True, eq=False)
class Told(Message):
    """What a driver told its robot's motors; recorded each time it did."""

    NAME: ClassVar[str] = "told"
    MAX_BYTES: ClassVar[int] = 1 << 20

    step: int = _wire("u64", "sequence of the Step that comes next")
    stamp: int = _wire("i64", "source's monotonic clock", "ns")
    action: Float32 = _array("<f4", "A", "what holds until they are told again", "of channel", tolerance=1e-5)


@dataclass(frozen=True, eq=False)
class InForce(Message):
    """What is in force at a policy server until a person ends it; recorded when it is not the same as before."""

    NAME: ClassVar[str] = "latches"
    MAX_BYTES: ClassVar[int] = 1 << 22

    latches: dict[str, Any] = _wire("map", "what its state file keeps over a restart")


@dataclass(frozen=True, eq=False)
class Record(Message):
    """A message that was published, as its publisher offers it to the recorder, once; nobody waits for it."""

    NAME: ClassVar[str] = "record"
    MAX_BYTES: ClassVar[int] = Weights.MAX_BYTES + 1024

    topic: str = _wire("text", "topic of the message", limit=64)
    link: str = _wire("text", "link it was sent on", limit=64)
    sequence: int = _wire("u64", "0, 1, 2, … for each topic of this publisher; a jump is what was not recorded")
    stamp: int = _wire("i64", "wall clock of the publisher, since 1970; never compared between hosts", "ns")
    payload: bytes = _wire("bytes", "the message as it went over the wire", limit=Weights.MAX_BYTES)

    def problem(self) -> str | None:
        kind = MESSAGES.get(self.topic)
        if kind is None or kind is Record:
            return f"topic {self.topic!r} is none that is recorded"
        return f"payload has {len(self.payload)} bytes" if len(self.payload) > kind.MAX_BYTES else None


MESSAGES: dict[str, type[Message]] = {
    message.NAME: message
    for message in (
        Hello,
        Welcome,
        Refused,
        Heartbeat,
        Bye,
        Step,
        Action,
        Throttle,
        SimulatorState,
        Weights,
        Evaluation,
        Status,
        Command,
        Reply,
        LifecycleChange,
        Start,
        Turn,
        Heard,
        Told,
        InForce,
        Record,
    )
}


_WIRES: dict[type[Message], dict[str, FieldType]] = {}


def wire_fields(message: type[Message]) -> dict[str, FieldType]:
    """The fields of a message in their order, with how each travels; worked out once."""
    known = _WIRES.get(message)
    if known is None:
        known = _WIRES[message] = {item.name: item.metadata["wire"] for item in fields(message)}  # type: ignore[arg-type]
    return known
