"""Stores each policy once per file.

A file holds a *reference* instead of a policy in two cases: the file holds the same policy already, or the recorder
leaves the policy out. A reference is a Weights message with an empty policy, in a channel of the topic REFERENCE.
If the file holds the policy, the reader puts it back into the message. The reader of version 0.1.0 does not know the
topic, and reports the policy as not recorded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from td3_robot.messages import Weights
from td3_robot.recording.entries import Entry

REFERENCE = "weights_reference"  # topic of a channel with references; a reader shows its messages as Weights


class Head(msgspec.Struct):
    """The fields of Weights that a recording needs. ``payload`` is the policy, as a view of the encoded bytes."""

    version: int
    sha256: str
    payload: memoryview


_decode = msgspec.msgpack.Decoder(Head).decode


def head_of(entry: Entry) -> Head | None:
    """The head of a Weights message; None if the message has another type or damaged bytes."""
    if entry.topic != Weights.NAME:
        return None
    try:
        return _decode(entry.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def with_policy(entry: Entry, policy: bytes | memoryview) -> Entry:
    """The entry of a Weights message with this policy. All other fields stay, including unknown fields."""
    fields: dict[str, Any] = msgspec.msgpack.decode(entry.payload)
    return replace(entry, payload=msgspec.msgpack.encode({**fields, "payload": policy}))


class StoredPolicies:
    """The policies that a file holds."""

    def __init__(self) -> None:
        self._stored: dict[str, int] = {}

    def stored(self, entry: Entry) -> Entry:
        """The entry as the file stores it: a reference if the entry has no policy, or if the file holds the policy."""
        head = head_of(entry)
        if head is None:
            return entry
        if head.payload:
            policy = hash(head.payload)  # a message may name a wrong SHA-256, so compare hashes of the policies
            if head.sha256 not in self._stored:
                self._stored[head.sha256] = policy
                return entry
            if self._stored[head.sha256] != policy:
                return entry
            entry = with_policy(entry, b"")
        return replace(entry, topic=REFERENCE)
