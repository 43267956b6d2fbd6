"""Replays recorded cores turn by turn, and collects the messages that they send.

A *life* is the time from the start of a node's process to its end. The Start says how to make the core. The Turns hold
the inputs of the core. The core must send the recorded messages again, in the same order. Replay of a life stops at
the first missing turn or input, because the later state of the core is unknown. For policy servers and learners, other
modules of this package can rebuild missing turns.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.core_types import Input, Origin, Peer
from td3_robot.errors import ConfigError, ProtocolError, SessionError, Td3RobotError
from td3_robot.messages import Bye, Hello, Message, Start, Step, Turn, Weights
from td3_robot.recording.boundary import RecordedCore
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.replay.outcome import Outcome, Replayed
from td3_robot.topics import RECORDER
from td3_robot.transport import codec, turns
from td3_robot.transport.tap import Deduplicator

_MEMORY = 256_000_000  # maximum size in bytes of the kept messages; later Turns may name these messages
_OVERHEAD = 2000  # bytes that a message needs in memory in addition to its payload

Sent = TypeVar("Sent", bound=Message)
Key = tuple[str, int]  # name and incarnation of a node


class Memory:
    """Recorded messages, by the name that Turns use for them. A full memory drops the oldest messages."""

    def __init__(self) -> None:
        self._held: OrderedDict[turns.Name, tuple[Message, int]] = OrderedDict()
        self._size = 0

    def keep(self, message: Message, size: int) -> None:
        """Keep a message if Turns refer to it by a name.

        Ignore Weights with an empty payload: the recording leaves out their policy.

        ``size`` is the size of the message's payload in bytes.
        """
        name = turns.name_of(message)
        if name is None or name in self._held or (isinstance(message, Weights) and not message.payload):
            return
        self._held[name] = message, size + _OVERHEAD
        self._size += size + _OVERHEAD
        while self._size > _MEMORY:
            self._size -= self._held.popitem(last=False)[1][1]

    def get(self, name: turns.Name) -> Message | None:
        held = self._held.get(name)
        return held[0] if held else None


class Life:
    """One life of a node: from its start to its end. It is the ``Sink`` of its ``RecordedCore``.

    Attributes:
        name, incarnation: name and incarnation of the node.
        start: the recorded Start.
        packages: replay requires equal bits only if the recording machine and this machine have the same versions of
            these packages.
        recorded: recorded messages by topic, each with the number of turns that had begun before it.
        replayed: replayed messages by topic, each with the number of its turn.
        where: maps Python's ``id`` of a message to a text that names a Step: the newest Step that the core had received
            or sent when it sent the message.
        turns: number of replayed turns.
        stopped: the reason why replay stopped before the end of the last turn; empty after a replay of all turns.
        left: whether the recording has a Bye of the node.
    """

    def __init__(self, name: str, incarnation: int, start: Start) -> None:
        self.name, self.incarnation, self.start = name, incarnation, start
        self.packages: tuple[str, ...] = ("numpy",)
        self.recorded: defaultdict[str, list[tuple[Entry, Message, int]]] = defaultdict(list)
        self.replayed: defaultdict[str, list[tuple[Message, int]]] = defaultdict(list)
        self.where: dict[int, str] = {}
        self.turns = 0
        self.stopped = ""
        self.left = False
        self._begun = self._next_turn = 0
        self._lost: int | None = None  # number of turns before the first missing turn
        self._waiting: deque[Turn] = deque()
        self._peers: dict[str, Peer] = {}
        self._core: RecordedCore | None = None
        self._deduplicator = Deduplicator()
        self._read = self._now = "the beginning"

    def __str__(self) -> str:
        return f"{self.name} ({self.incarnation})" if self.incarnation else self.name

    @property
    def config(self) -> Config:
        """The node's own configuration. Raises a SessionError if this version does not understand it."""
        try:
            return configuration.parse(yaml.safe_load(self.start.config), source=f"configuration of {self}")
        except (yaml.YAMLError, ValueError, RecursionError, ConfigError) as error:
            raise SessionError(f"configuration of {self}: {' '.join(str(error).split())}") from None

    def setting(self, name: str, kind: type) -> Any:
        """A value of the Start's settings. Raises a SessionError if it is missing, or not of type ``kind``."""
        value = self.start.settings.get(name)
        if type(value) is not kind:
            raise SessionError(f"start of {self}: the setting {name!r} is {value!r}; needed is {kind.__name__}")
        return value

    def add(self, entry: Entry, message: Message) -> None:
        """Add the next recorded message of this node."""
        if not isinstance(message, Turn):
            if isinstance(message, Step):
                self._read = f"Step {message.sequence}"
            self.where[id(message)] = self._read
            self.recorded[entry.topic].append((entry, message, self._begun))
            return
        if entry.sequence != self._next_turn and self._lost is None:
            self._lost = self._begun
            self.stopped = self.stopped or f"turn {self._next_turn} is not recorded"
        self._next_turn = entry.sequence + 1
        self._begun += 1
        self._read = _place(message) or self._read
        if not self.stopped:
            self._waiting.append(message)

    def recorded_in_turn(self, kind: type[Sent]) -> Iterator[Sent]:
        """The recorded messages of this kind in the current turn."""
        for _, message, begun in reversed(self.recorded[kind.NAME]):
            if begun < self.turns:
                return
            if begun == self.turns and isinstance(message, kind):
                yield message

    def replay(self, memory: Memory, make: Make, *, end: bool = False) -> None:
        """Replay the complete recorded turns. Stop before a turn with an input that is not in memory.

        A turn is complete when the next turn begins, or at the ``end`` of the recording.
        """
        while self._waiting and (end or len(self._waiting) > 1):
            missing = self._missing(memory)
            if not missing and self._core is None:
                self._core = self._made(memory, make)
                missing = "" if self._core else "its first policy"
            if missing:
                self.stopped = self.stopped or (f"{missing} is not recorded" if end else "")
                return
            assert self._core
            turn = self._waiting.popleft()
            self.turns += 1
            try:
                self._now = _place(turn) or self._now
                inputs = [self._input(origin, topic, fields, memory) for origin, topic, fields in turn.inputs]
                for to, message in self._core.step(inputs, turn.now):
                    self.send(to, message)
            except Exception as error:
                last = end and not self._waiting  # in its last turn, a core may end its node with an error
                if not (isinstance(error, SessionError) or (last and isinstance(error, Td3RobotError))):
                    raise _failed(f"turn {self.turns} of {self}", error) from error
                self.stopped = str(error)
                self._waiting.clear()

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        """Collect the operators' messages. A node records these inputs itself, because an operator has no recorder."""
        del now
        for message in turns.only_here(inputs):
            self.send(RECORDER, message)

    def send(self, to: Origin, message: Message) -> bool:
        """Collect a message of the core or of its ``RecordedCore``."""
        del to
        if self._deduplicator.is_new(message):
            if isinstance(message, Step):
                self._now = f"Step {message.sequence}"
            self.where[id(message)] = self._now
            self.replayed[message.NAME].append((message, self.turns))
        return True

    def _made(self, memory: Memory, make: Make) -> RecordedCore | None:
        try:
            return make(self, memory)
        except Td3RobotError:
            raise
        except Exception as error:
            raise _failed(f"start of {self}", error) from error

    def _missing(self, memory: Memory) -> str:
        """The next turn's first input that is not in memory, as text; empty if all inputs are in memory."""
        for _, topic, fields in self._waiting[0].inputs:
            name = turns.named_in(topic, fields)
            if name and "wire" not in fields and memory.get(name) is None:
                return f"{topic} {' '.join(str(part)[:40] for part in name[1:])}"
        return ""

    def _input(self, origin: str, topic: str, fields: dict[str, Any], memory: Memory) -> Input:
        try:
            name = turns.named_in(topic, fields)
            if name is None:
                message: Message | None = codec.decode(topic, msgspec.msgpack.encode(fields))
            else:
                message = memory.get(name) or turns.repeated_in(topic, fields)
            assert message, "replay stops before a turn with a missing input"
            if turns.is_peer(origin) and isinstance(message, Hello):
                self._peers[origin] = Peer("", bytes.fromhex(origin[1:]), message, {})
            return self._peers[origin] if turns.is_peer(origin) else origin, message
        except (ProtocolError, KeyError, ValueError) as error:
            raise SessionError(f"turn {self.turns} of {self}: {topic} from {origin}: {error}") from None

    def compared(self, topic: str) -> Replayed:
        """The recorded and the replayed messages of one topic, without replayed messages that the recorder missed."""
        sequences = {entry.sequence for entry, _, _ in self.recorded[topic]}
        last = max(sequences, default=-1)
        complete = self.left and self._lost is None
        # If the recording ends within a turn, it lacks the last messages of this turn.
        got = [
            message
            for number, (message, turn) in enumerate(self.replayed[topic])
            if number in sequences or (number > last and (turn < self.turns or complete))
        ]
        stream = f"{self.name}/{self.incarnation}"
        return Replayed(topic, self.packages, self._comparable(topic), got, stream=stream, where=self.where)

    def last(self, topic: str) -> int:
        """The sequence of the last compared message of a topic; -1 if no message is compared."""
        return max((entry.sequence for entry, _ in self._comparable(topic)), default=-1)

    def notes(self) -> list[str]:
        """A text about the turns that replay does not compare; no text if replay compares all turns."""
        after = self._begun - self.turns
        left = f"{after} turns" if after else "messages"
        return [f"{left} of {self} after turn {self.turns}: {self.stopped}"] if self.stopped else []

    def _comparable(self, topic: str) -> list[tuple[Entry, Message]]:
        """The recorded messages of the replayed turns."""
        # The outputs of a lost turn look like outputs of the turn before it. ``known`` is the number of messages that
        # replay produced before the lost turn. All later recorded messages come from the lost turn.
        known = len(self.replayed[topic])
        return [
            (entry, message)
            for entry, message, begun in self.recorded[topic]
            if begun <= self.turns and (begun != self._lost or entry.sequence < known)
        ]


Make = Callable[[Life, Memory], RecordedCore | None]
"""Makes the core of a life. Returns None if replay has not yet read the core's first policy from the recording."""


def _failed(what: str, error: Exception) -> SessionError:
    """The error for a core that fails on its inputs: the core has a bug, or the recording is not from a real node."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:500]
    return SessionError(f"{what}: {type(error).__name__} in {Path(at.filename).name}, line {at.lineno}: {text}")


def _place(turn: Turn) -> str:
    """The newest Step among the inputs, as text; empty if the inputs have no Step."""
    steps = [fields.get("named", []) for _, topic, fields in turn.inputs if topic == Step.NAME]
    return f"Step {steps[-1][2]} of {steps[-1][0]}" if steps and len(steps[-1]) == 4 else ""


def replay(session: Session, role: str, topics: Collection[str], make: Make) -> tuple[dict[Key, Life], list[str]]:
    """Replay each life of this role if its first turn is recorded. Replay these lives side by side.

    Returns:
        The replayed lives, and notes about the other lives of this role.

    Raises:
        SessionError: the recording is damaged, or a core fails on its inputs.
    """
    lives: dict[Key, Life] = {}
    notes: list[str] = []
    for key, entry in session.starts.items():
        start = session.decode(entry)
        if isinstance(start, Start) and start.role == role:
            life, first = Life(*key, start), session.turns.get(key)
            if first == 0:
                lives[key] = life
            else:
                why = "none of its turns is recorded" if first is None else f"its turns before turn {first} are missing"
                notes.append(f"states of {life}: {why}")
    memory = Memory()
    for entry, message in session.messages({Turn.NAME, Bye.NAME, *turns.NAMED, *topics}) if lives else ():
        memory.keep(message, len(entry.payload))
        sender = lives.get(entry.node)
        if sender and isinstance(message, Bye):
            sender.left = True
        elif sender and (entry.topic in topics or entry.topic == Turn.NAME):
            sender.add(entry, message)
        for life in lives.values():
            life.replay(memory, make)
    for life in lives.values():
        life.replay(memory, make, end=True)
    return lives, notes


def outcome(lives: Collection[Life], topics: Sequence[str], notes: Iterable[str] = ()) -> Outcome:
    """The outcome of these lives. It has the notes of the lives, and after them the texts in ``notes``."""
    parts = [life.compared(topic) for topic in topics for life in lives]
    own_notes = [note for life in lives for note in life.notes()]
    return Outcome(parts, sum(life.turns for life in lives), [*own_notes, *notes])
