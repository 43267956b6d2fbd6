"""Entries of a recording from messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from td3_robot.messages import Message
from td3_robot.session.entries import Entry
from td3_robot.transport import codec

SECOND = 1_000_000_000
BEGIN = 1_700_000_000 * SECOND


def entries_of(messages: Iterable[tuple[str, Message]], period: int = SECOND // 60) -> list[Entry]:
    """Entries with sequence numbers of their own, one period (ns) apart."""
    sequence: Counter[tuple[str, str]] = Counter()
    result = []
    for number, (publisher, message) in enumerate(messages):
        time = BEGIN + number * period
        stream = publisher, message.NAME
        payload = codec.encode(message)
        result.append(Entry(publisher, 0, message.NAME, "policy", sequence[stream], time, time + 1000, payload))
        sequence[stream] += 1
    return result
