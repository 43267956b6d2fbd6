"""Entries of a recording from messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from td3_robot.config.schema import Config, RecordConfig
from td3_robot.core_types import Peer
from td3_robot.messages import Message, Record
from td3_robot.recording.entries import Entry, facts_of_this_machine
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import Recorder
from td3_robot.transport import codec
from td3_robot.transport import link as handshake

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


class Publisher:
    """One node that is recorded, at ten messages a second."""

    def __init__(self, path: Path, begin: int = BEGIN, **config: float) -> None:
        self.recorder = Recorder(path, facts_of_this_machine(Config()), RecordConfig(enabled=True, **config), begin)
        self.begin = begin  # ns since 1970
        self.peer = Peer("recorder", b"k", handshake.hello("node", "sim-0", client=0), {})
        self.now = 0.0
        self.sequence: dict[str, int] = {}

    def say(self, *messages: Any) -> None:
        for message in messages:
            number = self.sequence.get(message.NAME, -1) + 1
            self.sequence[message.NAME] = number
            record = Record(message.NAME, "learner", number, self.begin + int(self.now * SECOND), codec.encode(message))
            self.recorder.step([(self.peer, record)], self.now)
            self.now += 0.1

    def sequences(self, topic: str = "step") -> list[list[int]]:
        """The sequence numbers of a topic in each file."""
        return [[e.sequence for e in Session([path]).entries((topic,))] for path in self.recorder.files]
