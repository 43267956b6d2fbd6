"""Write the golden files: one example of every message, in readable form (``.json``) and as bytes (``.hex``).

    python tests/golden/regenerate.py

Released peers do not understand changed bytes. So if golden files of the current PROTOCOL_VERSION exist, the script
refuses to change the bytes of a message or to remove a message. First raise PROTOCOL_VERSION in
td3_robot/messages.py. If no release has the current version, pass ``--unreleased`` instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from td3_robot.bundle import Bundle, Exploration, layer_shapes, sha256
from td3_robot.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    Action,
    Bye,
    Command,
    Evaluation,
    Heartbeat,
    Hello,
    Latches,
    LifecycleChange,
    Message,
    MotorCommand,
    Record,
    Refused,
    Reply,
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
)
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import codec

FOLDER = Path(__file__).parent
COLUMNS = 32  # bytes per line of hex

SPEC = RobotSpec(
    "Leg",
    (
        Channel("knee.position", "rad", -1.5, 1.5, "angle from straight"),
        Channel("knee.velocity", "rad/s", -20.0, 20.0),
        Channel("foot.contact", "1", 0.0, 1.0),
    ),
    (Channel("knee.torque", "N·m", -3.0, 5.0),),
    0.02,
)


def samples() -> list[Message]:
    """Return one example of each message. A Step and an Action have two robots. Array elements are exact in binary."""
    f4, u1, u4, u8 = np.float32, np.uint8, np.uint32, np.uint64
    tensors = {
        name: ((np.arange(np.prod(shape)).reshape(shape) - 2) / 4).astype(f4)
        for name, shape in layer_shapes(SPEC, (2,)).items()
    }
    payload = Bundle(SPEC, (2,), tensors, Exploration("gaussian", 0.125), {"version": 3}).encode()
    return [
        Hello(PROTOCOL_VERSION, "driver", "leg-7", 5, 2**63 - 1, 2, 3, SPEC.describe(), {"task": "Leg", "seed": "0"}),
        Welcome(PROTOCOL_VERSION, "learner", 2**64 - 1),
        Refused("spec", "robot specification differs: robot is 'Leg' here, 'Arm' there"),
        Heartbeat(-1_500_000_000, 65536),
        Bye("stopped"),
        Step(
            source="leg-7",
            incarnation=5,
            sequence=300,
            transitions=598,
            stamp=1_234_567_890_123,
            phase=np.array([1, 3], u1),
            episode=np.array([2, 2**40], u8),
            episode_step=np.array([99, 1000], u4),
            observation=np.array([[0.5, -1.25, 1.0], [-0.0, 20.0, 0.0]], f4),
            reward=np.array([0.75, -2.5], f4),
            action=np.array([[-3.0], [5.0]], f4),
            origin=2,
            answered=299,
            weights_version=3,
            noise_kind=1,
            noise_seed=2**32,
            needs_version=4,
            world={"1": {"mass": 1.25, "action_latency": 2}},
        ),
        Action("leg-7", 5, 300, 1_234_567_890_123, np.array([[0.25], [-0.625]], f4), 4, 2, 17),
        Throttle("leg-7", 5, 301, 664, 0, 1),
        SimulatorState("leg-7", 5, 301, b"\x00\xffstate"),
        Weights(3, 590, 596, sha256(payload), payload),
        Evaluation(3, 596, 590, np.array([1523.25, -0.5]), np.array([1000, 17], u4)),
        Status("learner", "ready", "", {"updates_per_s": 131.5, "wall_s": 60.0}, {"gaps": 0, "lost": 2}),
        Command(2**62 + 1, "leg-7", "load", "slips on ice", 5, sha256(payload), payload),
        Teleop("leg-7", 1, 12, 1_234_567_890_126, [0.375]),
        Reply(2**62 + 1, "leg-7", "an emergency stop is in force", "fault", {"weights_version": 3, "frozen": True}),
        LifecycleChange("policy/leg-7", "active", "fault", "no observation for 100 ms", 1_234_567_890_124),
        Start("policy", "task: Leg\n", {"exploring": False, "version": 3}),
        Turn(
            1234.0078125,
            [
                ["#00a1b2c3d4", "step", {"named": ["leg-7", 5, 300, 1_234_567_890_123]}],
                ["learner", "bye", {"reason": "stopped"}],
            ],
        ),
        RobotReport(301, 1, "observe: OSError: no answer", ""),
        MotorCommand(301, 1_234_567_890_125, np.array([0.375], f4)),
        Latches({"stop": "", "stopped": ["leg-7"], "held": {"leg-8": "no observation for 100 ms"}, "frozen": True}),
        Record("bye", "learner", 12, 1_700_000_000_123_456_789, codec.encode(Bye("stopped"))),
    ]


def readable(message: Message) -> dict[str, Any]:
    """Return the encoded fields as values for JSON: arrays as nested lists, bytes as hexadecimal text."""
    content = {}
    for name in msgspec.msgpack.decode(codec.encode(message)):
        value = getattr(message, name)
        content[name] = (
            value.tolist() if isinstance(value, np.ndarray) else value.hex() if isinstance(value, bytes) else value
        )
    return content


def files_of(message: Message) -> tuple[str, str]:
    """Return the text of the ``.json`` file and of the ``.hex`` file."""
    text = {"protocol": PROTOCOL_VERSION, "topic": message.NAME, "fields": readable(message)}
    payload = codec.encode(message)
    lines = [payload[begin : begin + COLUMNS].hex(" ") for begin in range(0, len(payload), COLUMNS)]
    return json.dumps(text, indent=2, ensure_ascii=False) + "\n", "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    changes: dict[Path, str] = {}
    for message in samples():
        text, octets = files_of(message)
        for path, content in ((FOLDER / f"{message.NAME}.json", text), (FOLDER / f"{message.NAME}.hex", octets)):
            if not path.exists() or path.read_text() != content:
                changes[path] = content
    pinned = {json.loads(path.read_text())["protocol"] for path in FOLDER.glob("*.json")}
    altered = [path.stem for path in changes if path.suffix == ".hex" and path.exists()]
    gone = [path for path in FOLDER.iterdir() if path.suffix in (".json", ".hex") and path.stem not in MESSAGES]
    if (altered or gone) and PROTOCOL_VERSION in pinned and arguments != ["--unreleased"]:
        names = ", ".join(sorted({*altered, *(path.stem for path in gone)}))
        print(
            f"{names}: changed or removed, and PROTOCOL_VERSION is still {PROTOCOL_VERSION}: raise it in "
            "td3_robot/messages.py, or pass --unreleased if this version is not released yet",
            file=sys.stderr,
        )
        return 1
    for path in gone:
        path.unlink()
    for path, content in changes.items():
        path.write_text(content)
    print(f"wrote {len(changes)} files, removed {len(gone)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
