"""The produced parts of reference/protocol.md: constants, topics, messages, one exchange in bytes."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable

import numpy as np

from td3_robot.bundle import FORMAT
from td3_robot.core_types import MAX_ROBOTS
from td3_robot.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    Action,
    Evaluation,
    FieldType,
    Latches,
    Message,
    MotorCommand,
    Phase,
    Record,
    RobotReport,
    SimulatorState,
    Start,
    Status,
    Step,
    Teleop,
    Throttle,
    Turn,
    Weights,
    Welcome,
    wire_fields,
)
from td3_robot.specs import Channel, RobotSpec
from td3_robot.topics import QUEUE_LENGTH, TOPICS
from td3_robot.transport import codec
from td3_robot.transport.bus import MAX_FRAME
from td3_robot.transport.endpoints import LONGEST_SOCKET_PATH
from td3_robot.transport.link import DRIVER_SILENCE, HEARTBEAT_PERIOD, HELLO_PERIOD, LONG_SILENCE, PEER_TIMEOUT, hello

_KINDS = {
    "u32": "integer, 0 to 2³²−1",
    "u64": "integer, 0 to 2⁶⁴−1",
    "i64": "integer, −2⁶³ to 2⁶³−1",
    "f64": "float, finite",
    "map": "map",
    "list": "array",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def constants() -> str:
    rows = [
        ["PROTOCOL_VERSION", str(PROTOCOL_VERSION), "`protocol` in Hello and Welcome"],
        ["HELLO_PERIOD", f"{HELLO_PERIOD} s", "until a client repeats a Hello or a Heartbeat that got no answer"],
        ["HEARTBEAT_PERIOD", f"{HEARTBEAT_PERIOD} s", "of silence after which a client sends a Heartbeat"],
        ["PEER_TIMEOUT", f"{PEER_TIMEOUT} s", "of silence after which a server forgets a client"],
        [
            "LONG_SILENCE",
            f"{LONG_SILENCE} s",
            "without a message from a client; the client must then send a Hello before any other message",
        ],
        ["DRIVER_SILENCE", f"{DRIVER_SILENCE} s", "of silence after which another process may use a driver's name"],
        ["QUEUE_LENGTH", str(QUEUE_LENGTH), "messages: ZeroMQ's high-water mark at each end and in each direction"],
        ["MAX_FRAME", f"{MAX_FRAME} bytes", "of one frame; libzmq closes a connection that sends a longer one"],
        [
            "MAX_SIZE",
            str(codec.MAX_SIZE),
            "limit of the sizes N, O, A and E (section 2), and of the number of elements in a msgpack map or array",
        ],
        ["MAX_PARTS", str(codec.MAX_PARTS), "maps and lists inside a field of kind map, including this map"],
        ["MAX_DEPTH", str(codec.MAX_DEPTH), "levels of maps and lists inside a field of kind map"],
        ["MAX_ROBOTS", str(MAX_ROBOTS), "robots (N) of one source"],
        ["LONGEST_SOCKET_PATH", f"{LONGEST_SOCKET_PATH} bytes", "of the path in `ipc://PATH`"],
        ["FORMAT", str(FORMAT), "`format` in a policy bundle's header"],
    ]
    return table(["Constant", "Value", "Meaning"], rows)


def topics() -> str:
    rows = [
        [
            f"`{topic.message.NAME}`",
            topic.publisher,
            topic.subscriber,
            topic.link,
            topic.rate,
            topic.queue,
            topic.recorded,
        ]
        for topic in TOPICS
    ]
    return table(["Topic", "From", "To", "Link", "Rate", "Queue", "Recorded"], rows)


OTHERS = (Throttle, Weights, Evaluation, Status, Teleop)
"""Messages that the policy server and a driver do not exchange. :func:`messages` lists them last."""
LOCKSTEP, RECORDING = (SimulatorState,), (Record,)
INTERNAL = (Start, Turn, RobotReport, MotorCommand, Latches)


def messages() -> str:
    later = (*OTHERS, *LOCKSTEP, *RECORDING, *INTERNAL)
    return _messages([*(message for message in MESSAGES.values() if message not in later), *OTHERS])


def _messages(kinds: Iterable[type[Message]]) -> str:
    return "\n\n".join(_message(message) for message in kinds)


def _message(message: type[Message]) -> str:
    rows = [
        [f"`{name}`", _kind(wire) + ", optional" * wire.optional, wire.unit, wire.meaning]
        for name, wire in wire_fields(message).items()
    ]
    text = re.sub(r"\n +", "\n", (message.__doc__ or "").strip())
    head = f"### {message.__name__}: topic `{message.NAME}`\n\n{text}\n\nAt most {message.MAX_BYTES} bytes."
    return f"{head}\n\n{table(['Field', 'Kind', 'Unit', 'Meaning'], rows)}"


def _kind(wire: FieldType) -> str:
    if wire.kind == "array":
        return f"bin: {wire.type_name}"
    if wire.kind == "text":
        return f"str, at most {wire.limit} characters"
    if wire.kind == "bytes":
        return f"bin, at most {wire.limit} bytes"
    return _KINDS[wire.kind]


def exchange() -> str:
    """A driver joins and gets one Action: the fields and the bytes of each message."""
    robot = RobotSpec("Leg", (Channel("angle", "rad", -1.5, 1.5),), (Channel("torque", "N·m", -2.0, 2.0),), 0.02)
    f4, u1, u4, u8 = np.float32, np.uint8, np.uint32, np.uint64
    step = Step(
        source="leg",
        incarnation=5,
        sequence=0,
        transitions=0,
        stamp=1_500_000_000,
        phase=np.array([Phase.FIRST], u1),
        episode=np.array([0], u8),
        episode_step=np.array([0], u4),
        observation=np.array([[0.5]], f4),
        reward=np.array([0.0], f4),
        action=np.array([[0.0]], f4),
        origin=0,
        answered=0,
        weights_version=0,
        noise_kind=0,
        noise_seed=0,
        needs_version=0,
        world={},
    )
    rows = (
        ("driver", hello("driver", "leg", client=77, incarnation=5, robots=1, spec=robot)),
        ("server", Welcome(PROTOCOL_VERSION, "policy", 7)),
        ("driver", step),
        ("server", Action("leg", 5, 0, 1_500_000_000, np.array([[-0.25]], f4), 3, 0, 0)),
    )
    return "\n\n".join(_in_bytes(sender, message) for sender, message in rows)


def _in_bytes(sender: str, message: Message) -> str:
    fields = {name: getattr(message, name) for name in wire_fields(type(message))}
    plain = {name: item.tolist() if isinstance(item, np.ndarray) else item for name, item in fields.items()}
    payload = codec.encode(message)
    octets = [payload[begin : begin + 24].hex(" ") for begin in range(0, len(payload), 24)]
    shown = textwrap.wrap(json.dumps(plain, ensure_ascii=False), 100, break_long_words=False)
    head = f"The {sender} sends **{type(message).__name__}**, {len(payload)} bytes after the topic `{message.NAME}`:"
    return "\n".join([head, "", "```", *shown, "", *octets, "```"])


PARTS: dict[str, Callable[[], str]] = {
    "constants": constants,
    "topics": topics,
    "messages": messages,
    "exchange": exchange,
    "lockstep messages": lambda: _messages(LOCKSTEP),
    "recording messages": lambda: _messages(RECORDING),
    "internal messages": lambda: _messages(INTERNAL),
}
