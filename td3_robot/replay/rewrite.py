"""Updates the expected outputs of a recording to the outputs of a replay.

The recorded messages do not change, because they are also the inputs of other cores. If the expected and the replayed
messages of a topic and stream differ, an attachment (the *reference*) holds the new expected messages. A second
attachment describes the machine that made the reference. This description tells replay whether to compare the stream
bit for bit or within a tolerance.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from td3_robot.errors import SessionError
from td3_robot.messages import MESSAGES
from td3_robot.recording.entries import Attachment, Entry, Facts
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.reader import Session
from td3_robot.recording.session_file import SessionFile
from td3_robot.recording.writer import write
from td3_robot.replay.outcome import Replayed
from td3_robot.transport import codec
from td3_robot.util import files

Content = TypeVar("Content")
_machine = msgspec.json.Decoder(dict[str, str]).decode
_payloads = msgspec.msgpack.Decoder(list[bytes]).decode
_MADE = "made/"  # the attachment made/NAME describes the machine that made the reference NAME


def expected(session: Session, part: Replayed) -> Replayed:
    """Return a copy of ``part`` with the reference that the session holds for ``part``.

    ``expected`` of the copy holds the messages of the reference. For results that are not sent as messages,
    ``expected`` does not change. ``made`` of the copy describes the machine that made the reference.

    If the session has no reference for ``part``, return ``part`` itself.
    """
    attached = session.attachments.get(_name(part))
    if attached is None:
        return part
    made = session.attachments.get(f"{_MADE}{attached.name}")
    part = replace(part, made=_decoded(session, made, _machine) if made else None)
    if part.topic not in MESSAGES:
        return part
    payloads = _decoded(session, attached, _payloads)
    entries = [Entry(part.stream, 0, part.topic, "", 0, 0, 0, payload) for payload in payloads]
    return replace(part, expected=[(None, session.decode(entry)) for entry in entries])


def rewrite(session: Session, parts: Sequence[Replayed]) -> str:
    """Write new references into the file of a one-file session.

    Return a text that names the new references. The text is empty if there are no new references.

    Messages, metadata and all other attachments do not change.

    Raises:
        SessionError: the recording holds no configuration.
        ConfigError: this version does not understand the configuration.
        OSError: the file cannot be written. The old file does not change.
    """
    path = session.paths[0].resolve()  # the target of a symbolic link
    references = {}
    for part in parts:
        reference = part.reference or _reference(part)
        old = session.attachments.get(reference.name) if reference else None
        if reference and (old is None or old.data != reference.data):
            references[reference.name] = reference
    if not references:
        return ""
    here = json.dumps(dict(facts_of_this_machine(session.config()).metadata)).encode()
    made = {f"{_MADE}{name}": Attachment(f"{_MADE}{name}", "application/json", here) for name in references}
    new = {**references, **made}
    kept = [item for item in SessionFile(path).items() if isinstance(item, Attachment)]
    # If several attachments have the same name, readers use the first of these attachments.
    attachments = [new.pop(item.name, item) for item in kept]
    attachments += new.values()
    beginning = f".{path.name}-"
    with (
        files.naming(session.paths[0], instead_of=beginning),
        tempfile.TemporaryDirectory(prefix=beginning, dir=path.parent) as folder,
    ):
        target = Path(folder) / path.name
        write(target, Facts(session.metadata, attachments), session.entries())
        shutil.copymode(path, target)
        target.replace(path)
    return f"new references: {', '.join(sorted(references))}"


def _reference(part: Replayed) -> Attachment | None:
    """The attachment with the replayed messages; None if they equal the expected messages."""
    payloads = [codec.encode(message) for message in part.got]
    if payloads == [codec.encode(message) for _, message in part.expected]:
        return None
    return Attachment(_name(part), "application/msgpack", msgspec.msgpack.encode(payloads))


def _decoded(session: Session, attached: Attachment, decode: Callable[[bytes], Content]) -> Content:
    try:
        return decode(attached.data)
    except Exception as error:  # if the data are damaged, msgspec raises errors of many types
        raise SessionError(f"{session.paths[0]}: {attached.name} is damaged ({type(error).__name__})") from None


def _name(part: Replayed) -> str:
    return part.reference.name if part.reference else f"reference/{part.stream}/{part.topic}"
