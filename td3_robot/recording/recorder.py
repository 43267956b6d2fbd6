"""Writes Records to one file or a series of files, or keeps the last seconds in a ring buffer."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from td3_robot.config.schema import RecordConfig
from td3_robot.core_types import Input, Output, Peer
from td3_robot.messages import Bye, Record
from td3_robot.recording import faults
from td3_robot.recording.entries import ON_THE_WAY_NS, REASON, REPEATED, Attachment, Entry, Facts
from td3_robot.recording.policies import head_of, with_policy
from td3_robot.recording.writer import SessionWriter
from td3_robot.topics import RECORDER
from td3_robot.util.text import printable

log = logging.getLogger(__name__)


class Recorder:
    """A core that writes the Records that it receives.

    Args:
        path: the first file; the next files are ``NAME_1.mcap``, ``NAME_2.mcap``, ….
        facts: metadata and attachments of every file.
        config: when to begin a new file, or how many seconds the ring keeps.
        epoch: the time when the clock of :meth:`step` was 0, in ns since 1970.

    Raises:
        OSError: a file cannot be written. Every method can raise it.
    """

    def __init__(self, path: Path, facts: Facts, config: RecordConfig, epoch: int) -> None:
        self.path = path
        self.files: list[Path] = []
        self.counters: Counter[str] = Counter()
        self._facts = facts
        self._config = config
        self._epoch = epoch
        self._sequence: dict[tuple[str, int, str], int] = {}
        self._repeated: dict[tuple[str, str, str], deque[Entry]] = {}
        self._ring: deque[Entry] = deque()
        self._ring_bytes = 0
        self._pending: str | None = None
        self._now = self._begun = self._not_before = float("-inf")
        self._writer: SessionWriter | None = None
        if not config.ring_s:
            self._begin(float("-inf"))

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Record the received messages; ``now`` is the time on a monotonic clock, in seconds."""
        self._now, received = now, self._epoch + int(now * 1e9)
        for origin, message in inputs:
            if isinstance(origin, Peer) and isinstance(message, Record):
                self._take(Entry.offered(origin, message, received))
            elif isinstance(origin, Peer) and isinstance(message, Bye) and not self._writer:
                self.trigger(faults.lost(origin.name, message))
        if self._writer:
            self._begun = now if self._begun == float("-inf") else self._begun
            self._writer.turn(now)
            self._split(self._writer, now)
        else:
            self._forget_old(received)
            if self._pending and now >= self._not_before:
                self._dump(now)
        return []

    def trigger(self, reason: str | None) -> None:
        """Write the ring soon. If ``reason`` is None, do nothing.

        The recorder first waits for the messages that nodes have already sent. It writes at most one file in ``ring_s``
        seconds.
        """
        if reason is None:
            return
        if not self._config.ring_s:
            text = "ignored the trigger (%s): without --ring-s, the recorder writes each message immediately"
            log.info(text, printable(reason))
        elif not self._pending:
            self._pending = reason
            self._not_before = max(self._not_before, self._now + ON_THE_WAY_NS * 1e-9)
            self.counters["triggers"] += 1

    def close(self, now: float, attachments: Sequence[Attachment] = ()) -> None:
        """Add these attachments and close the file. If there is a ring and a trigger is pending, write the ring."""
        if self._writer:
            for attachment in attachments:
                self._writer.attach(attachment, self._epoch + int(now * 1e9))
            self._writer.close()
        elif self._pending:
            self._dump(now)
        elif not self.files:
            log.info("nothing was written to %s: there was no failure, fault, lost node or SIGUSR1", self.path)

    def _take(self, entry: Entry) -> None:
        last = self._sequence.get(entry.stream, -1)
        if entry.sequence <= last:
            self.counters["repeated"] += 1
            return
        self.counters["missed"] += entry.sequence - last - 1 if last >= 0 else 0
        self._sequence[entry.stream] = entry.sequence
        self.counters["messages"] += 1
        if self._leaves_out(entry, first=last < 0):
            entry = with_policy(entry, b"")
            self.counters["policies_left_out"] += 1
        self.counters["bytes"] += len(entry.payload)
        if self._writer:
            self._writer.add(entry)
            self._remember(entry)
            return
        self._ring.append(entry)
        self._ring_bytes += len(entry.payload)
        self.trigger(faults.failure_in(entry))

    def _leaves_out(self, entry: Entry, *, first: bool) -> bool:
        """Whether to record this message without its policy. A policy that a person chose is always recorded."""
        every = self._config.weights_every
        if every == 1 or entry.link == RECORDER or (head := head_of(entry)) is None:
            return False
        return every == 0 or (head.version % every != 0 and not first)

    def _remember(self, entry: Entry) -> None:
        if entry.topic in REPEATED:
            key = entry.publisher, entry.topic, entry.link
            self._repeated.setdefault(key, deque(maxlen=REPEATED[entry.topic])).append(entry)

    def _forget_old(self, received: int) -> None:
        oldest = received - int(self._config.ring_s * 1e9) - ON_THE_WAY_NS
        while self._ring and (self._ring[0].received < oldest or self._ring_bytes > self._config.ring_mb * 1e6):
            entry = self._ring.popleft()
            self._ring_bytes -= len(entry.payload)
            self.counters["ring_too_small"] += entry.received >= oldest
            self._remember(entry)

    def _begin(self, now: float, since: int = 0, why: str = "") -> SessionWriter:
        """Begin a file for the messages that the recorder received at ``since`` (ns since 1970) or later.

        The file repeats older messages. They get ``since`` as received time, so that the file begins at ``since``.
        """
        path = free_name(self.path)
        facts = replace(self._facts, metadata={**self._facts.metadata, REASON: why}) if why else self._facts
        self._writer, self._begun = SessionWriter(path, facts, now), now
        self.files.append(path)
        for kept in self._repeated.values():
            for entry in kept:
                self._writer.add(replace(entry, received=since))
        return self._writer

    def _split(self, writer: SessionWriter, now: float) -> None:
        config = self._config
        too_long = config.split_s > 0 and now - self._begun >= config.split_s
        if too_long or (config.split_mb > 0 and writer.size() >= config.split_mb * 1e6):
            writer.close()
            self._begin(now, self._epoch + int(now * 1e9))

    def _dump(self, now: float) -> None:
        since = self._ring[0].received if self._ring else self._epoch + int(now * 1e9)
        why = self._pending or ""
        writer = self._begin(now, since, why)
        for entry in self._ring:
            writer.add(entry)
        writer.close()
        self._writer = None
        log.info("wrote the last %g s to %s: %s", self._config.ring_s, writer.path, printable(why))
        self._pending, self._not_before = None, now + self._config.ring_s


def free_name(path: Path) -> Path:
    """The path if it is free; else the first free path of ``NAME_1.mcap``, ``NAME_2.mcap``, …."""
    name, number = path, 0
    while name.exists():
        number += 1
        name = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return name
