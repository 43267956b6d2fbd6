"""Fuzz targets: functions that read bytes from outside.

Each target takes any bytes. It returns after a valid result or after the documented error. Any other exception is a
defect. Some targets also assert properties of valid results.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from td3_robot.bundle import Bundle
from td3_robot.config import loading as configuration
from td3_robot.convert import sb3
from td3_robot.errors import BundleError, ConfigError, KeysError, ProtocolError, SessionError
from td3_robot.messages import MESSAGES
from td3_robot.policy import core as policy_core
from td3_robot.policy.state_file import StateFile
from td3_robot.recording.reader import Session
from td3_robot.recording.recover import recover
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import codec
from td3_robot.transport.keys import KeyFolder
from td3_robot.transport.link import ClientLink, ServerLink, hello

_SPEC = RobotSpec("Toy", (Channel("o", "1", -5.0, 5.0),), (Channel("a", "1", -1.0, 1.0),), 0.02)
_TOPICS = sorted(MESSAGES)
_KINDS = tuple(MESSAGES.values())
FOLDER = Path(tempfile.mkdtemp(prefix="td3-robot-fuzz-"))
"""A folder for the files that targets need."""
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def decode(data: bytes) -> None:
    """Decode the bytes after the first byte as Records. Then decode the same bytes as a message.

    The first byte chooses the topic of the message. A valid message survives a round trip.
    """
    topic = _TOPICS[data[0] % len(_TOPICS)] if data else ""
    try:
        codec.decode_records(data[1:])
    except ProtocolError as error:
        _one_line(error)
    try:
        message = codec.decode(topic, data[1:])
    except ProtocolError as error:
        _one_line(error)
        return
    again = codec.encode(message)
    assert codec.encode(codec.decode(topic, again)) == again


def server(data: bytes) -> None:
    """Pass messages of up to four clients to the server's end of a link."""
    link = ServerLink("policy", "policy", policy_core.ACCEPTS, {}, session=1)
    for now, (client, topic, payload) in enumerate(_messages(data)):
        link.receive(bytes([client % 4]), [topic, payload], float(now))
        link.expire(float(now))


def client(data: bytes) -> None:
    """Pass messages of a faulty server to the client's end of a link."""
    link = ClientLink("policy", hello("driver", "leg", client=1, incarnation=1), _KINDS, essential=False)
    for now, (_, topic, payload) in enumerate(_messages(data)):
        link.receive([topic, payload], float(now))
        link.due(float(now))


def bundle(data: bytes) -> None:
    """Read a policy file. A valid policy can be written and read again."""
    try:
        read = Bundle.decode(data, "fuzz")
    except BundleError as error:
        _one_line(error)
        return
    assert Bundle.decode(read.encode(), "fuzz").encode() == read.encode()


def recording(data: bytes) -> None:
    """Read a recording. Then recover it, as the command ``recover`` does, and read the result."""
    file, copy = FOLDER / "fuzz.mcap", FOLDER / "copy.mcap"
    file.write_bytes(data)
    with contextlib.suppress(SessionError):
        for _ in Session([file]).messages():
            pass
    with contextlib.suppress(SessionError):
        if recover(file, copy)["whole"] is False:
            for _ in Session([copy]).messages():
                pass
    copy.unlink(missing_ok=True)


def config(data: bytes) -> None:
    """Read a configuration file. A valid configuration can be written and read again."""
    file = FOLDER / "fuzz.yaml"
    file.write_bytes(data)
    try:
        read = configuration.load(file)
    except ConfigError as error:
        _one_line(error)
        return
    file.write_text(read.to_yaml())
    assert configuration.load(file) == read


def keys(data: bytes) -> None:
    """Read one file of a key folder. The first byte chooses the file."""
    folder = KeyFolder(FOLDER / "keys")
    folder.path.mkdir(mode=0o700, exist_ok=True)
    secret = bool(data[:1]) and data[0] % 2 == 0
    file = folder.secret_file if secret else folder.allowed_file
    file.write_bytes(data[1:])
    os.chmod(file, 0o600)
    try:
        folder.identity() if secret else folder.entries()
    except KeysError as error:
        _one_line(error)


def state(data: bytes) -> None:
    """Open the state file of a policy server."""
    file = FOLDER / "fuzz.state"
    file.write_bytes(data)
    try:
        StateFile(file).close()
    except ConfigError as error:
        _one_line(error)


def sb3_model(data: bytes) -> None:
    """Read a model of Stable-Baselines3."""
    file = FOLDER / "fuzz.zip"
    file.write_bytes(data)
    try:
        sb3.read(file, _SPEC)
    except BundleError as error:
        _one_line(error)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (decode, server, client, bundle, recording, config, keys, state, sb3_model)
}
"""The targets by name. ``corpus/NAME`` holds inputs for the target NAME."""


def _messages(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Split bytes into messages: a byte for the client, one for the topic, two for the length, and the payload."""
    while len(data) >= 4:
        size = int.from_bytes(data[2:4], "little")
        yield data[0], _TOPICS[data[1] % len(_TOPICS)].encode(), data[4 : 4 + size]
        data = data[4 + size :]


def _one_line(error: Exception) -> None:
    assert "\n" not in str(error), f"the error has several lines: {error}"
