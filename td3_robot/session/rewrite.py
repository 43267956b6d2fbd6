"""Makes what the cores say today what a recording expects of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from td3_robot.messages import MESSAGES, Message
from td3_robot.session.compare import keyed
from td3_robot.session.entries import Attachment, Entry, Facts, facts_of_this_machine
from td3_robot.session.outcome import Replayed
from td3_robot.session.reader import Session
from td3_robot.session.writer import SessionWriter
from td3_robot.transport import codec


def rewrite(session: Session, parts: Sequence[Replayed]) -> str:
    """Rewrite the one file of a session with what was replayed; says in words what changed, nothing if nothing did.

    Messages that are no longer sent go, new ones come at the end of their topic; the machine named is this one.

    Raises:
        OSError: it cannot be written; the old file is untouched then.
    """
    (path,) = session.paths
    payloads: dict[tuple[str, int, str, int], bytes | None] = {}
    added: list[Entry] = []
    references: dict[str, Attachment] = {}
    for part in parts:
        if part.reference:
            old = session.attachments.get(part.reference.name)
            if old is None or old.data != part.reference.data:
                references[part.reference.name] = part.reference
        elif part.topic in MESSAGES:
            _changes(part, payloads, added)
    if not payloads and not added and not references:
        return ""
    today = facts_of_this_machine(session.config())
    attachments = {**session.attachments, **references}
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        target = Path(folder) / path.name
        writer = SessionWriter(target, Facts(today.metadata, list(attachments.values())), 0.0)
        for entry in session.entries():
            payload = payloads.get(entry.identity, entry.payload)
            if payload is not None:
                writer.add(replace(entry, payload=payload))
        for entry in added:
            writer.add(entry)
        writer.close()
        target.replace(path)
    gone = sum(payload is None for payload in payloads.values())
    return f"{len(payloads) - gone} messages changed, {gone} removed, {len(added)} added, {len(references)} references"


def _changes(part: Replayed, payloads: dict[tuple[str, int, str, int], bytes | None], added: list[Entry]) -> None:
    entries = [entry for entry, _ in part.expected]
    got = keyed(part.topic, part.got)
    for entry, key in zip(entries, keyed(part.topic, [message for _, message in part.expected]), strict=True):
        if entry is None:
            continue
        payload = codec.encode(got.pop(key)) if key in got else None
        if payload != entry.payload:
            payloads[entry.identity] = payload
    last = max((entry for entry in entries if entry), key=lambda entry: entry.sequence, default=None)
    news: list[Message] = list(got.values()) if last else []
    added += [
        replace(last, sequence=last.sequence + number, payload=codec.encode(message))
        for number, message in enumerate(news, 1)
        if last
    ]
