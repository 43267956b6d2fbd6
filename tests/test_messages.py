"""The wire format of the messages: golden bytes, and rules for every message."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from td3_robot.bundle import Bundle
from td3_robot.errors import ProtocolError
from td3_robot.messages import MESSAGES, PROTOCOL_VERSION, ActionOrigin, Message, Phase, Status, wire_fields
from td3_robot.noises import NOISES
from td3_robot.transport import codec

GOLDEN = Path(__file__).parent / "golden"
ADVICE = (
    "; if the wire format was meant to change, raise PROTOCOL_VERSION in td3_robot/messages.py, then run "
    "`python tests/golden/regenerate.py` and read the diff of tests/golden"
)

FROZEN = {
    "hello": {
        "protocol": "u32",
        "role": "text",
        "name": "text",
        "incarnation": "u64",
        "client": "u64",
        "robots": "u32",
        "weights_version": "u64",
        "spec": "map",
        "agreement": "map",
    },
    "welcome": {"protocol": "u32", "name": "text", "session": "u64"},
    "refused": {"code": "text", "reason": "text"},
}
"""Fields that are the same in every protocol version, so that two peers can notice that their versions differ."""


def golden(name: str) -> tuple[dict[str, Any], bytes]:
    """Load the golden example of a message: its readable form and its bytes."""
    return json.loads((GOLDEN / f"{name}.json").read_text()), bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def from_readable(content: dict[str, Any]) -> Message:
    """Build a message from its readable form, without the codec."""
    kind = MESSAGES[content["topic"]]
    values: dict[str, Any] = {}
    for name, value in content["fields"].items():
        wire = wire_fields(kind)[name]
        if wire.kind == "array":
            value = np.array(value, wire.dtype)
        elif wire.kind == "bytes":
            value = bytes.fromhex(value)
        values[name] = value
    return kind(**values)


def test_every_message_has_golden_files_and_no_file_is_left_over() -> None:
    for suffix in ("json", "hex"):
        assert {path.stem for path in GOLDEN.glob(f"*.{suffix}")} == set(MESSAGES), ADVICE


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_the_golden_bytes(name: str) -> None:
    content, payload = golden(name)
    assert content["protocol"] == PROTOCOL_VERSION, f"the golden files are of another version{ADVICE}"
    assert content["topic"] == name
    fields = wire_fields(MESSAGES[name])
    required = {key for key, wire in fields.items() if not wire.optional}
    assert required <= content["fields"].keys() <= fields.keys(), f"{name} has other fields{ADVICE}"
    message = from_readable(content)
    assert codec.encode(message).hex(" ") == payload.hex(" "), f"{name} is encoded differently{ADVICE}"
    robots = {"N": 2, "O": 3, "A": 1} if name in ("step", "action") else {}
    decoded = codec.decode(name, payload, robots)
    for key in wire_fields(type(message)):
        expected, found = getattr(message, key), getattr(decoded, key)
        if isinstance(expected, np.ndarray):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), f"{name}.{key}{ADVICE}"
            assert found.tobytes() == expected.tobytes(), f"{name}.{key}{ADVICE}"
        else:
            assert found == expected, f"{name}.{key}{ADVICE}"


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_are_plain_msgpack(name: str) -> None:
    """The test decodes the bytes with msgpack alone, like a peer in another language."""
    content, payload = golden(name)
    plain = msgpack.unpackb(payload)
    assert list(plain) == list(content["fields"])
    for key, value in content["fields"].items():
        wire = wire_fields(MESSAGES[name])[key]
        if wire.kind == "array":
            assert plain[key] == np.array(value, wire.dtype).tobytes(order="C")
        elif wire.kind == "bytes":
            assert plain[key].hex() == value
        else:
            assert plain[key] == value


def test_golden_weights_hold_a_policy() -> None:
    content, _ = golden("weights")
    payload = bytes.fromhex(content["fields"]["payload"])
    assert hashlib.sha256(payload).hexdigest() == content["fields"]["sha256"]
    policy = Bundle.decode(payload)
    assert policy.spec.describe() == {
        **golden("hello")[0]["fields"]["spec"],
        "observations": tuple(golden("hello")[0]["fields"]["spec"]["observations"]),
        "actions": tuple(golden("hello")[0]["fields"]["spec"]["actions"]),
    }


def regenerate(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False, timeout=170
    )


def test_regenerating_refuses_to_change_bytes_of_the_same_protocol_version(tmp_path: Path) -> None:
    for path in GOLDEN.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    script = tmp_path / "regenerate.py"
    result = regenerate(script)
    assert (result.returncode, result.stdout) == (0, "wrote 0 files, removed 0\n"), result.stderr + ADVICE
    old = (tmp_path / "bye.hex").read_text()
    (tmp_path / "bye.hex").write_text("81" + old[2:-3] + "00\n")
    result = regenerate(script)
    assert result.returncode == 1
    assert re.fullmatch(r"bye: changed or removed, and PROTOCOL_VERSION is still \d+: raise it in .*\n", result.stderr)
    assert regenerate(script, "--unreleased").returncode == 0
    assert (tmp_path / "bye.hex").read_text() == old


# -- rules -----------------------------------------------------------------------------------------------------------


def test_the_handshake_is_the_same_in_every_version() -> None:
    found = {name: {key: wire.kind for key, wire in wire_fields(MESSAGES[name]).items()} for name in FROZEN}
    assert found == FROZEN


@pytest.mark.parametrize("message", MESSAGES.values(), ids=list(MESSAGES))
def test_every_field_has_a_wire_type_and_a_meaning(message: type[Message]) -> None:
    assert message.__doc__
    assert re.fullmatch(r"[a-z]+", message.NAME)
    assert len(message.NAME) <= 64
    for name, wire in wire_fields(message).items():
        assert wire.meaning, name
        if wire.kind == "array":
            assert np.dtype(wire.dtype).str.replace("|", "<") == wire.dtype
            assert wire.shape
            assert set(wire.shape) <= set("NOAE")  # N robots, O observations, A actions, E episodes
        elif wire.kind in ("text", "bytes"):
            assert wire.limit > 0


@pytest.mark.parametrize("message", MESSAGES.values(), ids=list(MESSAGES))
def test_longest_fields_fit_into_the_message(message: type[Message]) -> None:
    """Text and bytes of the greatest length fit into MAX_BYTES. A character of a text has up to four bytes.

    msgpack's headers need at most 16 bytes for the message, and at most 10 bytes for a field.
    """
    total = 16
    for name, wire in wire_fields(message).items():
        total += len(name) + 10
        total += {"text": 4 * wire.limit, "bytes": wire.limit}.get(wire.kind, 0)
    assert total <= message.MAX_BYTES


def test_a_step_of_1024_large_robots_fits_into_a_message() -> None:
    robots, observations, actions = 1024, 256, 64
    # bytes of one robot: phase, episode, episode_step, observation, reward, action
    assert robots * (1 + 8 + 4 + 4 * observations + 4 + 4 * actions) < MESSAGES["step"].MAX_BYTES


def test_codes_are_fixed() -> None:
    assert [(item.name, item.value) for item in Phase] == [
        ("FIRST", 0),
        ("MID", 1),
        ("TERMINATED", 2),
        ("TRUNCATED", 3),
    ]
    assert [(name, NOISES.load(name).NUMBER) for name in NOISES.names()] == [
        ("none", 0),
        ("gaussian", 1),
        ("uniform", 2),
        ("ornstein_uhlenbeck", 3),
        ("categorical", 4),
        ("gaussian_v2", 5),
        ("uniform_v2", 6),
        ("ornstein_uhlenbeck_v2", 7),
        ("categorical_v2", 8),
    ]
    assert [(item.name, item.value) for item in ActionOrigin] == [
        ("NONE", 0),
        ("POLICY", 1),
        ("HELD", 2),
        ("ZERO", 3),
        ("SAFE", 4),
        ("OPERATOR", 5),
    ]


@pytest.mark.parametrize("value", ["fast", None, True, [1], {"a": 1}])
@pytest.mark.parametrize("where", ["figures", "counters"])
def test_status_figures_are_numbers(where: str, value: Any) -> None:
    maps: dict[str, dict[str, Any]] = {"figures": {"ok": 1.5}, "counters": {"ok": 1}, where: {"speed": value}}
    with pytest.raises(ProtocolError, match=rf"Expected `int \| float`, got `.*` - at `\$\.{where}\[...\]`"):
        codec.decode("status", codec.encode(Status("n", "ready", "", maps["figures"], maps["counters"])))
