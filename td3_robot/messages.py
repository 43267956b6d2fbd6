"""All messages of the protocol, with the type, shape and unit of each field.

On the wire a message is one msgpack map from field name to value, in any order. Arrays are msgpack ``bin``:
little-endian numbers in C order. Four letters name the sizes of arrays: N robots of a source, O observation channels,
A action channels, E episodes. ``docs/reference/protocol.md`` is produced from this file.

The annotation of a field has the type, the shape of an array, the meaning, and the unit if there is one. A field with a
default is optional: if a message lacks the field, the reader takes the default. A reader ignores and counts fields that
it does not know. So a new field needs only one line, at the end of its message::

    latency: Annotated[U64, "time from observation to action", "ns"] = 0
    torque: Annotated[Float32, Shape("NA"), "measured torque", "N·m"] = ZEROS
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta

PROTOCOL_VERSION = 1


class Phase(IntEnum):
    """Where a robot is in its episode.

    A decoder refuses unknown values, because they do not show whether the episode continues.
    """

    FIRST = 0  # the first observation after a reset; its reward and action belong to no transition
    MID = 1
    TERMINATED = 2  # the task ended: the value of the last observation is 0
    TRUNCATED = 3  # a time limit, fault or operator ended the episode: training bootstraps from the last observation


_PHASES = bytes(Phase)


NO_NOISE = 0
"""``noise_kind`` of an action without noise. Other numbers: ``NUMBER`` in td3_robot/policy/noise.py and noise_v2.py."""


class ActionOrigin(IntEnum):
    """The origin of the action that a source applied.

    An unknown value means that the source applied the action for a reason that this version does not know. A learner
    uses this action like any other applied action. No code may treat it as an action of the policy.
    """

    NONE = 0  # no action: every robot is at FIRST
    POLICY = 1  # the Action that answered the previous Step
    HELD = 2  # no Action came in time: each robot repeats its last action; after a reset, a simulator applies zero
    ZERO = 3  # no Action came in time: the robots apply zero, or the limit nearest to zero
    SAFE = 4  # the safe action: the policy server sent it, or the source is inactive, in fault, or waits for an Action
    OPERATOR = 5  # an Action whose ``operated`` is not empty: operators have taken over robots, see Step.operated

    @classmethod
    def name_of(cls, number: int) -> str:
        """The name in lower case, such as ``held``; text such as ``origin 9`` for an unknown number."""
        return cls(number).name.lower() if number in cls._value2member_map_ else f"origin {number}"


# -- types of fields -------------------------------------------------------------------------------------------------

ZEROS: Any = b""
"""Default of an optional array: zeros. Its shape follows from the sizes of the other arrays."""


@dataclass(frozen=True)
class FieldType:
    """The wire format of one field.

    Attributes:
        kind: an integer type, ``f64``, ``text``, ``bytes``, ``map`` (keys are text; values are numbers, text, booleans,
            nil, lists or maps), ``list`` (with the same types of values) or ``array``.
        meaning, unit: text for people.
        limit: the maximum length: in characters for the kind ``text``, in bytes for the kind ``bytes``. For maps and
            lists, the limit is MAX_BYTES of the message.
        dtype: type of an array's numbers, as a little-endian numpy type code.
        shape: sizes of an array; each is N, O, A or E.
        tolerance: see :class:`Shape`.
        optional: whether the field has a default.
    """

    kind: Literal["u32", "u64", "i64", "f64", "text", "bytes", "map", "list", "array"]
    meaning: str = ""
    unit: str = ""
    limit: int = 0
    dtype: str = ""
    shape: tuple[str, ...] = ()
    tolerance: float = 0.0
    optional: bool = False

    @property
    def type_name(self) -> str:
        """The kind; for an array, the type of its numbers and its shape, such as ``float32[N, O]``."""
        return f"{np.dtype(self.dtype).name}[{', '.join(self.shape)}]" if self.kind == "array" else self.kind


@dataclass(frozen=True)
class Shape:
    """The shape of an array.

    Attributes:
        letters: one of N, O, A, E for each dimension.
        tolerance: a number, called t here. On another kind of machine, a replayed number may differ from the recorded
            ``value`` by at most ``t + t·|value|``. On the same kind of machine, a replay must compute the same bits.
    """

    letters: str
    tolerance: float = 0.0


def wire(kind: Any, dtype: str = "", **bounds: Any) -> Meta:
    """The annotation of a field type: its kind, and the bounds that msgspec checks."""
    return Meta(**bounds, extra={"wire": FieldType(kind, limit=bounds.get("max_length", 0), dtype=dtype)})


# msgpack itself limits integers to 64 bits.
U32 = Annotated[int, wire("u32", ge=0, le=2**32 - 1)]
U64 = Annotated[int, wire("u64", ge=0)]
I64 = Annotated[int, wire("i64", le=2**63 - 1)]
F64 = Annotated[float, wire("f64")]
Text = Annotated[str, wire("text", max_length=256)]
LongText = Annotated[str, wire("text", max_length=2048)]
Map = Annotated[dict[str, Any], wire("map")]

if TYPE_CHECKING:
    from td3_robot.specs import Float32 as Float32  # other modules declare messages with it
    from td3_robot.specs import Float64, UInt8, UInt32, UInt64

    Numbers = dict[str, Any]  # so that a caller may give integers or floating-point numbers
else:  # msgspec decodes bytes; the codec makes arrays from them
    Numbers = Annotated[dict[str, int | float], wire("map")]
    Float32 = Annotated[bytes, wire("array", "<f4")]
    Float64 = Annotated[bytes, wire("array", "<f8")]
    UInt8 = Annotated[bytes, wire("array", "<u1")]
    UInt32 = Annotated[bytes, wire("array", "<u4")]
    UInt64 = Annotated[bytes, wire("array", "<u8")]

MAX_COMMAND = 1 << 22
"""The maximum size of a Command in bytes. A Step has the same limit, because both use the link of a control loop."""
LONGEST_PAYLOAD = MAX_COMMAND - (1 << 14)
"""The maximum size of the policy in a Command, in bytes."""
MAX_PAYLOAD = (1 << 26) - 4096
"""The maximum size of ``payload`` in Weights or SimulatorState, in bytes. 4096 bytes are left for the other fields."""


class Message(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """Base of all messages. ``NAME`` is the first frame on the wire. ``MAX_BYTES`` limits the second frame."""

    NAME: ClassVar[str]
    MAX_BYTES: ClassVar[int] = 1 << 14

    def problem(self) -> str | None:
        """The first mistake in the values, or None. The decoder checks types and shapes before it calls this method."""
        return None


@functools.cache
def wire_fields(message: type[Message]) -> dict[str, FieldType]:
    """The wire format of each field of a message, by field name, in the order of the fields."""
    result = {}
    for item in msgspec.structs.fields(message):
        parts = get_args(item.type)
        kind = next(part.extra["wire"] for part in parts if isinstance(part, Meta) and part.extra)
        shape = next((part for part in parts if isinstance(part, Shape)), Shape(""))
        meaning, unit = [*(part for part in parts if isinstance(part, str)), "", ""][:2]
        result[item.name] = dataclasses.replace(
            kind,
            meaning=meaning,
            unit=unit,
            shape=tuple(shape.letters),
            tolerance=shape.tolerance,
            optional=not item.required,
        )
    return result


LARGEST = float(np.finfo(np.float32).max)
"""The largest number in an operator's action. Actions are float32."""
_SOURCE = "id of the simulator process or robot"
_INCARNATION = "number that grows with each start of the source; the two Steps of a transition have the same number"


class Hello(Message, frozen=True):
    """The first message of a client on a link. The client repeats it until the server answers Welcome or Refused.

    Every protocol version keeps the fields that Hello, Welcome and Refused have now, so that both sides can report a
    mismatch.
    """

    NAME: ClassVar[str] = "hello"
    MAX_BYTES: ClassVar[int] = 1 << 17  # enough for a specification; not more, because any process may send a Hello

    protocol: Annotated[U32, "PROTOCOL_VERSION of the sender"]
    role: Annotated[Text, "simulator, driver, policy, evaluator, operator or node (to send Status or Records)"]
    name: Annotated[Text, "unique name of the sender; the source id for a simulator or driver"]
    incarnation: Annotated[U64, _INCARNATION]
    client: Annotated[U64, "random number of the process; it distinguishes two processes with the same name"]
    robots: Annotated[U32, "N, robots of a simulator or driver; 0 for other roles"]
    weights_version: Annotated[U64, "version of the sender's newest weights; 0 for none"]
    spec: Annotated[Map, "robot specification, see below; empty for roles without robots"]
    agreement: Annotated[Map, "text values by configuration key; if both sides have a key, the values must be equal"]

    def problem(self) -> str | None:
        return None if self.name and self.name.isprintable() else f"name {self.name!r} is empty or not printable"


class Welcome(Message, frozen=True):
    """The server accepts the client."""

    NAME: ClassVar[str] = "welcome"

    protocol: Annotated[U32, "PROTOCOL_VERSION of the server"]
    name: Annotated[Text, "name of the server"]
    session: Annotated[U64, "random number, new at each start of the server"]


class Refused(Message, frozen=True):
    """The server rejects the client. With the code ``hello``, it asks an unknown client for a Hello."""

    NAME: ClassVar[str] = "refused"

    code: Annotated[Text, "hello, protocol, spec, agreement, taken, name or malformed"]
    reason: Annotated[LongText, "one sentence: what differs"]


class Heartbeat(Message, frozen=True):
    """If a client sent nothing or received nothing for 1 s, it sends a Heartbeat. The server returns the Heartbeat."""

    NAME: ClassVar[str] = "heartbeat"

    stamp: Annotated[I64, "sender's monotonic clock; echoed, never compared between hosts", "ns"]
    session: Annotated[U64, "session of the Welcome; 0 if the client does not know it"]


class Bye(Message, frozen=True):
    """The client leaves. It sends no more messages with this incarnation."""

    NAME: ClassVar[str] = "bye"

    reason: Annotated[LongText, "why, for the log"]


_OPERATED = (
    "the operator's name by robot index, for each robot that an operator has taken over; an empty name means that the "
    "robot does not apply the operator's action (usually the operator is silent, so the robot gets the safe action); "
    "the field is left out if no robot is taken over"
)


class Step(Message, frozen=True, omit_defaults=True):
    """The observations, rewards and applied actions of a source's robots. All training data comes from Steps.

    A transition of robot i consists of two consecutive Steps of the same source, incarnation and episode[i].
    """

    NAME: ClassVar[str] = "step"
    MAX_BYTES: ClassVar[int] = 1 << 22

    source: Annotated[Text, _SOURCE]
    incarnation: Annotated[U64, _INCARNATION]
    sequence: Annotated[U64, "number of the Step within the incarnation: 0, 1, 2, …; a jump means lost Steps"]
    transitions: Annotated[U64, "number of transitions of this incarnation, up to and including this Step"]
    stamp: Annotated[I64, "source's monotonic clock when the observation was complete", "ns"]
    phase: Annotated[UInt8, Shape("N"), "0 FIRST, 1 MID, 2 TERMINATED, 3 TRUNCATED"]
    episode: Annotated[UInt64, Shape("N"), "episode number of the robot within the incarnation, from 0"]
    episode_step: Annotated[UInt32, Shape("N"), "control periods since FIRST; 0 at FIRST"]
    observation: Annotated[
        Float32, Shape("NO", tolerance=1e-5), "observation channels in the order of the specification", "of channel"
    ]
    reward: Annotated[Float32, Shape("N", tolerance=1e-4), "reward for the applied action; 0 at FIRST", "1"]
    action: Annotated[
        Float32,
        Shape("NA"),
        "the applied action; for a robot at FIRST: the motor command at the start of the episode, or 0 in a simulator",
        "of channel",
    ]
    origin: Annotated[
        U32,
        "origin of the action: 0 none (all at FIRST), 1 an Action, 2 the last action again, 3 zero, 4 safe, 5 an "
        "operator",
    ]
    answered: Annotated[U64, "sequence of the Step whose Action was applied; without an Action, this Step's sequence"]
    weights_version: Annotated[U64, "weights that computed the applied action; 0 for none"]
    noise_kind: Annotated[U32, "exploration noise in the applied action, as in Action"]
    noise_seed: Annotated[U64, "seed; with source, incarnation, robot, episode and step it determines the noise"]
    needs_version: Annotated[U64, "lock-step: version of the weights that must answer this Step; 0: any version"]
    world: Annotated[
        dict[str, dict[str, int | float]],
        wire("map"),
        "random properties of robots at FIRST: for each robot index, a map from name to number",
    ]
    operated: Annotated[dict[str, str], wire("map"), _OPERATED] = {}

    def problem(self) -> str | None:
        if self.phase.tobytes().translate(None, _PHASES):
            return f"phase {self.phase.max()} is not one of 0 to 3"
        for robot, drawn in self.world.items():
            if not all(map(math.isfinite, drawn.values())):
                return f"world: a value of robot {robot[:40]!r} is not finite"
        robots = len(self.phase)
        return _index_problem("operated", self.operated, robots) or _index_problem("world", self.world, robots)

    def origin_of(self, robot: int) -> int:
        """The origin of the applied action of one robot. With operators, it can differ from ``origin``."""
        if self.origin != ActionOrigin.OPERATOR:
            return self.origin
        operator = self.operated.get(str(robot))
        if operator is None:
            return ActionOrigin.POLICY
        return ActionOrigin.OPERATOR if operator else ActionOrigin.SAFE


def _index_problem(field: str, by_robot: Mapping[str, Any], robots: int) -> str | None:
    """An error text if a key of a map is not the index of a robot, 0 to ``robots`` - 1; otherwise None."""
    for robot in by_robot:
        if not (robot.isascii() and robot.isdigit() and len(robot) <= 5 and int(robot) < robots):
            return f"{field}: {robot[:40]!r} is not the index of a robot, 0 to {robots - 1}"
    return None


class Action(Message, frozen=True, omit_defaults=True):
    """The policy server's answer to one Step. A source ignores the actions of robots whose episode has ended.

    ``weights_version`` 0 means that the policy chose no action. Then the Action is the safe action, unless ``operated``
    has an operator's name. The server sends the safe action if it is inactive or in fault. With safety settings, the
    server also has a *watch* over each source. Each watch has a state, too. If the watch over a source is not active,
    the server sends the safe action to this source. A safe action replaces an earlier Action for the same Step. If a
    source sends a Step again, the server can answer this Step a second time. The source may ignore the second Action,
    if it is not the safe action.
    """

    NAME: ClassVar[str] = "action"
    MAX_BYTES: ClassVar[int] = 1 << 20

    source: Annotated[Text, _SOURCE]
    incarnation: Annotated[U64, "incarnation of the answered Step"]
    answers: Annotated[U64, "sequence of the answered Step"]
    stamp: Annotated[I64, "stamp of the answered Step", "ns"]
    action: Annotated[
        Float32,
        Shape("NA", tolerance=1e-5),
        "the action to apply, within the limits of the specification",
        "of channel",
    ]
    weights_version: Annotated[
        U64, "weights that computed the action; 0: the safe action, or operators have taken over all robots"
    ]
    noise_kind: Annotated[
        U32,
        "0 none, 1 and 5 Gaussian, 2 and 6 uniform, 3 and 7 Ornstein-Uhlenbeck, 4 and 8 categorical, 1000 and above: "
        "noises of installed packages; a receiver also applies an action whose noise_kind it does not know",
    ]
    noise_seed: Annotated[U64, "seed of the noise; 0 without noise"]
    operated: Annotated[dict[str, str], wire("map"), _OPERATED] = {}

    @property
    def safe(self) -> bool:
        """Whether this is the safe action: neither a policy nor an operator chose it."""
        return not (self.weights_version or any(self.operated.values()))

    def problem(self) -> str | None:
        return _index_problem("operated", self.operated, len(self.action))


class Throttle(Message, frozen=True):
    """Limits the Steps of a source to keep the replay ratio. The counts are totals, so a lost Throttle does no harm."""

    NAME: ClassVar[str] = "throttle"

    source: Annotated[Text, _SOURCE]
    incarnation: Annotated[U64, "incarnation of the source; the source ignores a Throttle for another incarnation"]
    answers: Annotated[U64, "sequence of the newest Step that the learner has processed, plus one; 0 before the first"]
    transitions_allowed: Annotated[
        U64, "the source publishes a Step only while it has published fewer transitions than this number"
    ]
    weights_version: Annotated[U64, "lock-step: needs_version of the next Step; 0 otherwise"]
    save: Annotated[U32, "lock-step: 1 asks for a SimulatorState before the next step; 0 otherwise"]


class SimulatorState(Message, frozen=True):
    """Lock-step: the complete state of a simulator after a Step. The sequence of this Step is ``answers`` - 1.

    A simulator sends its state when a Throttle asks for it. The learner keeps the state with its checkpoint. To repeat
    the run from the checkpoint, the learner sends the state back. Then the simulator restores the state, answers with
    an empty ``payload`` and sends its newest Step again. Only the kind of simulator that made a state can read it.
    """

    NAME: ClassVar[str] = "state"
    MAX_BYTES: ClassVar[int] = 1 << 26

    source: Annotated[Text, _SOURCE]
    incarnation: Annotated[U64, "incarnation of the Steps that follow this state"]
    answers: Annotated[U64, "sequence of the simulator's newest Step, plus one; 0 before the first"]
    payload: Annotated[bytes, wire("bytes", max_length=MAX_PAYLOAD), "the state, in a private format of the simulator"]


class Weights(Message, frozen=True):
    """A complete policy with its hash.

    A policy server uses the newest version. In lock-step, it uses the version that the Step needs. An evaluator tries
    each version.
    """

    NAME: ClassVar[str] = "weights"
    MAX_BYTES: ClassVar[int] = 1 << 26

    version: Annotated[U64, "1, 2, 3, …; numbers repeat only in lock-step, if the learner returns to a checkpoint"]
    updates: Annotated[U64, "number of critic updates of the learner so far", "updates"]
    env_steps: Annotated[U64, "number of transitions that the learner has received so far", "transitions"]
    sha256: Annotated[Text, "hexadecimal SHA-256 of payload"]
    payload: Annotated[
        bytes, wire("bytes", max_length=MAX_PAYLOAD), "policy bundle: safetensors with a JSON header, see below"
    ]


class Evaluation(Message, frozen=True):
    """Results of evaluation episodes without noise. The evaluator runs them with one version of the weights."""

    NAME: ClassVar[str] = "evaluation"
    MAX_BYTES: ClassVar[int] = 1 << 16

    version: Annotated[U64, "version of the evaluated weights"]
    env_steps: Annotated[U64, "env_steps of the evaluated Weights", "transitions"]
    updates: Annotated[U64, "updates of the evaluated Weights", "updates"]
    returns: Annotated[Float64, Shape("E"), "undiscounted return of each episode", "1"]
    lengths: Annotated[UInt32, Shape("E"), "length of each episode", "steps"]


class Status(Message, frozen=True):
    """The state, measurements and counters of a node, for the supervisor and for people."""

    NAME: ClassVar[str] = "status"
    MAX_BYTES: ClassVar[int] = 1 << 16

    node: Annotated[Text, "name of the node"]
    state: Annotated[Text, "starting, ready, running, finished or failed"]
    detail: Annotated[LongText, "one line for a person; empty when all is well"]
    figures: Annotated[Numbers, "measurements by name"]
    counters: Annotated[Numbers, "counts by name, since the start of the node: missed, undelivered, refused, …"]


class Command(Message, frozen=True, omit_defaults=True):
    """An operator's command to a policy server or a robot. One Reply with the same ``id`` answers it.

    The server executes the command, or relays it to the robot in ``target``. A robot may send ``estop`` for all robots.
    The server does not reply to such a robot.
    """

    NAME: ClassVar[str] = "command"
    MAX_BYTES: ClassVar[int] = MAX_COMMAND

    id: Annotated[U64, "random number of the sender; the Reply repeats it"]
    target: Annotated[
        Text,
        "name of a robot; empty: the server. With an empty target, the verbs configure, activate, deactivate, reset "
        "and estop also reach all robots",
    ]
    verb: Annotated[
        Text,
        "state, configure, activate, deactivate, reset, estop, load, rollback, freeze, unfreeze, takeover, "
        "give_back or shutdown",
    ]
    reason: Annotated[LongText, "why, for the log; may be empty"]
    version: Annotated[
        U64,
        "load: version of the policy, or 0 for the next number; rollback: version to use; 0 means: of the versions "
        "before the current version, the newest that a person loaded; if a person loaded none of these versions, the "
        "newest of them",
    ]
    sha256: Annotated[Text, "load: hexadecimal SHA-256 of payload; else empty"]
    payload: Annotated[bytes, wire("bytes", max_length=LONGEST_PAYLOAD), "load: a policy bundle; else empty"]
    robot: Annotated[U32, "takeover, give_back: index of the robot in the source ``target``; left out if 0"] = 0


class Teleop(Message, frozen=True):
    """An operator's action for a robot that the operator has taken over.

    The policy server applies its safety filter, and sends the action in place of the policy's action. It sends a Reply
    only if it refuses the Teleop. This Reply has an ``error`` and the ``id`` 0.
    """

    NAME: ClassVar[str] = "teleop"
    MAX_BYTES: ClassVar[int] = 1 << 20

    source: Annotated[Text, _SOURCE]
    robot: Annotated[U32, "index of the robot in the source"]
    sequence: Annotated[U64, "number of the Teleop for this robot: 1, 2, 3, …"]
    stamp: Annotated[I64, "operator's monotonic clock", "ns"]
    action: Annotated[
        list[int | float],
        wire("list"),
        "the action: one number for each action channel, in their order",
        "of channel",
    ]

    def problem(self) -> str | None:
        if all(abs(value) <= LARGEST for value in self.action):
            return None
        return f"action: {repr(self.action)[:80]} is not a list of finite numbers of at most {LARGEST:g}"


class Reply(Message, frozen=True):
    """The result of a Command."""

    NAME: ClassVar[str] = "reply"
    MAX_BYTES: ClassVar[int] = 1 << 20

    id: Annotated[U64, "id of the Command"]
    node: Annotated[Text, "name of the policy server or robot that answers"]
    error: Annotated[LongText, "why the node refused the Command; empty if the node executed it"]
    state: Annotated[Text, "the node's new state: unconfigured, inactive, active, fault or finalized"]
    detail: Annotated[Map, "more about the node, for people"]


class LifecycleChange(Message, frozen=True):
    """A change of state of a node, or of a policy server's watch over one robot."""

    NAME: ClassVar[str] = "lifecycle"

    node: Annotated[Text, "name of the policy server or robot; SERVER/ROBOT for the watch over a robot"]
    previous: Annotated[Text, "the old state"]
    state: Annotated[Text, "unconfigured, inactive, active, fault or finalized"]
    reason: Annotated[LongText, "why, for a person"]
    stamp: Annotated[I64, "the node's monotonic clock", "ns"]


class Start(Message, frozen=True):
    """The settings of a node's core, recorded once. A replay makes the core from them, then replays the Turns."""

    NAME: ClassVar[str] = "start"
    MAX_BYTES: ClassVar[int] = 1 << 20

    role: Annotated[Text, "policy, simulator, driver or learner"]
    config: Annotated[str, wire("text", max_length=1 << 17), "the node's own resolved configuration, as YAML"]
    settings: Annotated[
        Map, "what the core needs besides ``config``; the key ``offers`` holds the topics that the node may record"
    ]


class Turn(Message, frozen=True):
    """The time and the inputs of one turn of a core. The Start and all Turns determine the outputs of the core.

    An input is a list of origin, topic and fields. If the message comes from a server, the origin is the name of the
    link. If the message comes from a client, the origin is ``#`` and the key of the client's connection. If a message
    has arrays or a long payload, the input does not hold the message's fields. It holds a field ``named``, which
    identifies the recorded message. A Step or Action also has ``wire`` (its payload in base64) and ``robots`` (the N of
    the message). With these fields a replay can decode the message even if the sender died before the recorder received
    the message.
    """

    NAME: ClassVar[str] = "turn"
    MAX_BYTES: ClassVar[int] = 1 << 24

    now: Annotated[F64, "time of the turn, on the node's monotonic clock", "s"]
    inputs: Annotated[list[Any], wire("list"), "the inputs, in order of arrival"]

    def problem(self) -> str | None:
        for item in self.inputs:
            if not (isinstance(item, list) and [type(part) for part in item] == [str, str, dict]):
                return f"an input is {repr(item)[:80]}; needed are origin, topic and fields"
            if item[1] not in MESSAGES:
                return f"topic {item[1][:40]!r} is not one of {', '.join(MESSAGES)}"
            named = item[2].get("named", [])
            if not (isinstance(named, list) and all(type(part) in (str, int) for part in named)):
                return f"'named' of {item[1]} is {repr(named)[:80]}; needed is a list of text and integers"
            if "wire" in item[2] and (type(item[2]["wire"]) is not str or type(item[2].get("robots")) is not int):
                return f"{item[1]} has the fields {repr(item[2])[:80]}; needed are wire (text) and robots (integer)"
        return None


class RobotReport(Message, frozen=True, omit_defaults=True):
    """The problems and stops that a robot reports to its driver. The driver records each change."""

    NAME: ClassVar[str] = "heard"
    MAX_BYTES: ClassVar[int] = 1 << 16

    call: Annotated[U64, "number of calls to the robot before this report"]
    refused: Annotated[U32, "1: the robot gave no valid first observation; 2: its reset continues; else 0"]
    trouble: Annotated[str, wire("text", max_length=4096), "problem of the robot; empty if there is none"]
    stop: Annotated[str, wire("text", max_length=4096), "reason of an emergency stop; empty without one"]
    unprepared: Annotated[U32, "1: the running episode began without a reset that the robot needs; else 0"] = 0


class MotorCommand(Message, frozen=True):
    """A driver's command to the motors of its robot."""

    NAME: ClassVar[str] = "told"
    MAX_BYTES: ClassVar[int] = 1 << 20

    step: Annotated[U64, "sequence of the next Step"]
    stamp: Annotated[I64, "source's monotonic clock", "ns"]
    action: Annotated[Float32, Shape("A", tolerance=1e-5), "the command, valid until the next one", "of channel"]


class Latches(Message, frozen=True):
    """A policy server's latches: emergency stops and other states that only a person ends. Recorded at each change."""

    NAME: ClassVar[str] = "latches"
    MAX_BYTES: ClassVar[int] = 1 << 22

    latches: Annotated[Map, "content of the server's state file"]


class Record(Message, frozen=True):
    """A copy of a published message for recorders and monitors.

    The publisher makes one Record of each message, and never waits for a recorder or a monitor. After a new Welcome,
    the publisher may send a Record again.
    """

    NAME: ClassVar[str] = "record"
    MAX_BYTES: ClassVar[int] = Weights.MAX_BYTES + 1024

    topic: Annotated[str, wire("text", max_length=64), "topic of the message"]
    link: Annotated[str, wire("text", max_length=64), "link of the message"]
    sequence: Annotated[U64, "number of the message: 0, 1, 2, … for each topic of the publisher; a jump means a loss"]
    stamp: Annotated[I64, "publisher's wall clock, since 1970; never compared between hosts", "ns"]
    payload: Annotated[bytes, wire("bytes", max_length=Weights.MAX_BYTES), "payload of the message"]

    def problem(self) -> str | None:
        kind = MESSAGES.get(self.topic)
        if kind is None or kind is Record:
            return f"topic {self.topic!r} is not recorded"
        size, limit = len(self.payload), kind.MAX_BYTES
        return f"payload has {size} bytes; allowed: at most {limit}" if size > limit else None


MESSAGES: dict[str, type[Message]] = {message.NAME: message for message in Message.__subclasses__()}
"""All message types by topic, in the order of this file."""
