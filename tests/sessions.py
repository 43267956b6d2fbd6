"""Helpers and fixtures that make small recordings, and messages for them, without processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bundle import Bundle, sha256
from td3_robot.config.schema import Config, RecordConfig
from td3_robot.core_types import Peer
from td3_robot.messages import Message, Record, Step, Weights
from td3_robot.policy.core import PolicyCore
from td3_robot.recording.entries import Entry, Facts
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import Recorder
from td3_robot.recording.writer import SessionWriter
from td3_robot.transport import codec
from td3_robot.transport import link as handshake

SECOND = 1_000_000_000
BEGIN = 1_700_000_000 * SECOND


def entries_of(messages: Iterable[tuple[str, Message]], period: int = SECOND // 60) -> list[Entry]:
    """Return entries that are one ``period`` (ns) apart. Each stream (publisher, topic) has its own ``sequence``."""
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
    """A recorded node that sends ten messages per second."""

    def __init__(self, path: Path, begin: int = BEGIN, **config: float) -> None:
        self.recorder = Recorder(path, facts_of_this_machine(Config()), RecordConfig(enabled=True, **config), begin)
        self.begin = begin  # ns since 1970
        self.peer = Peer("recorder", b"k", handshake.hello("node", "sim-0", client=0), {})
        self.now = 0.0
        self.sequence: dict[str, int] = {}

    def publish(self, *messages: Any, link: str = "learner") -> None:
        for message in messages:
            number = self.sequence.get(message.NAME, -1) + 1
            self.sequence[message.NAME] = number
            stamp = self.begin + int(self.now * SECOND)
            record = Record(message.NAME, link, number, stamp, codec.encode(message))
            self.recorder.step([(self.peer, record)], self.now)
            self.now += 0.1

    def sequences(self, topic: str = "step") -> list[list[int]]:
        """Return the sequence numbers of a topic in each file."""
        return [[e.sequence for e in Session([path]).entries((topic,))] for path in self.recorder.files]


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """``save(name, entries, facts=…)`` writes a session file. With ``close=False``, the file is incomplete."""

    def run(name: str, entries: Iterable[Entry], facts: Facts | None = None, close: bool = True) -> Path:
        writer = SessionWriter(tmp_path / name, facts or facts_of_this_machine(Config()), 0.0)
        for number, entry in enumerate(entries):
            writer.add(entry)
            writer.turn(number / 60)
        if not close:
            writer._file.close()  # loses the buffered data, like SIGKILL
        writer.close()
        return tmp_path / name

    return run


@pytest.fixture
def acted(
    make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> Callable[..., list[tuple[str, Message]]]:
    """``acted(steps)`` returns messages of a policy server, a learner, and a simulator with two robots.

    The learner sends Weights before Step 0. If ``steps`` is 2 or more, the learner sends Weights again before Step
    ``steps // 2``.
    """

    def run(steps: int = 30) -> list[tuple[str, Message]]:
        core, messages = PolicyCore(Config().seed), list[tuple[str, Message]]()
        peer = Peer("policy", b"k", handshake.hello("simulator", "sim-0", client=0), {})
        for sequence in range(steps):
            if sequence in (0, steps // 2):
                payload = make_bundle(sequence, kind="gaussian", scale=0.1).encode()
                weights = Weights(1 + (sequence > 0), sequence, sequence, sha256(payload), payload)
                messages.append(("learner", weights))
                core.step([("learner", weights)], 0.0)
            step = make_step(sequence, 2)
            messages.append(("sim-0", step))
            outputs: list[Any] = core.step([(peer, step)], 0.0)
            messages += [("policy", action) for _, action in outputs]
        return messages

    return run
