"""Cores made again from what a recording says of their nodes, and told all that those were told, turn by turn.

A node's *life* is one start of its process. With the Start that says what its core was made of, and every Turn from the
first on, its core must say again all that it said: the same messages in the same order, whatever they are about.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.core_types import Core, Input, Origin, Peer
from td3_robot.errors import ConfigError, ProtocolError, SessionError, Td3RobotError
from td3_robot.messages import Hello, Message, Start, Step, Turn
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.replay.outcome import Outcome, Replayed
from td3_robot.topics import RECORDER
from td3_robot.transport import codec, turns
from td3_robot.transport.tap import Once

_MEMORY = 256_000_000  # bytes of messages that a Turn may still name
_OVERHEAD = 2000  # bytes that a message takes beside its payload

_LATER = ("told", "latches")
"""Topics that the first recordings of this protocol version lack: since then a Start says what its node offers."""


Said = TypeVar("Said", bound=Message)


class Memory:
    """Recorded messages by the name that Turns give them; the oldest are forgotten."""

    def __init__(self) -> None:
        self._held: OrderedDict[turns.Name, tuple[Message, int]] = OrderedDict()
        self._size = 0

    def keep(self, message: Message, size: int) -> None:
        """Take note of a message of so many bytes."""
        name = turns.name_of(message)
        if name is None or name in self._held:
            return
        self._held[name] = message, size + _OVERHEAD
        self._size += size + _OVERHEAD
        while self._size > _MEMORY:
            self._size -= self._held.popitem(last=False)[1][1]

    def __getitem__(self, name: turns.Name) -> Message:
        return self._held[name][0]

    def __contains__(self, name: turns.Name) -> bool:
        return name in self._held


class Life:
    """One start of one node.

    Attributes:
        name, incarnation: of the node.
        start: what its core was made of.
        said: what it was recorded to say, by topic, each with the number of turns it had begun by then.
        got: what its core says now, by topic, each with the number of its turn.
        where: of each of both (by ``id``) the newest Step that the core knew then.
        told: how many turns its core has been told.
        stopped: why it was not told further ones; empty if it was told all.
    """

    def __init__(self, name: str, incarnation: int, start: Start) -> None:
        self.name, self.incarnation, self.start = name, incarnation, start
        self.said: dict[str, list[tuple[Entry, Message, int]]] = {}
        self.got: dict[str, list[tuple[Message, int]]] = {}
        self.where: dict[int, str] = {}
        self.told = 0
        self.stopped = ""
        self.gone = False  # in order: it said Bye
        self._begun = self._recorded = 0
        self._lost: int | None = None  # how many turns were recorded before the first that is not
        self._turns: deque[Turn] = deque()
        self._peers: dict[str, Peer] = {}
        self._core: Core | None = None
        self._once = Once()
        self._read = self._now = "the beginning"

    def __str__(self) -> str:
        return f"{self.name} ({self.incarnation})" if self.incarnation else self.name

    @property
    def config(self) -> Config:
        """The node's own configuration.

        Raises:
            SessionError: it is none that this version understands.
        """
        try:
            return configuration.parse(yaml.safe_load(self.start.config), source=f"configuration of {self}")
        except (yaml.YAMLError, ValueError, RecursionError, ConfigError) as error:
            raise SessionError(f"configuration of {self}: {' '.join(str(error).split())}") from None

    def setting(self, name: str, kind: type) -> Any:
        """A value of the Start's settings.

        Raises:
            SessionError: it is not there, or no ``kind``.
        """
        value = self.start.settings.get(name)
        if type(value) is not kind:
            raise SessionError(f"start of {self}: {name} is {value!r}; needed is {kind.__name__}")
        return value

    def hear(self, entry: Entry, message: Message) -> None:
        """The next message that was recorded of this node."""
        if isinstance(message, Turn):
            if entry.sequence != self._recorded and self._lost is None:
                self._lost = self._begun
                self.stopped = self.stopped or f"turn {self._recorded} is not recorded"
            self._recorded = entry.sequence + 1
            self._begun += 1
            self._read = _place(message) or self._read
            if not self.stopped:
                self._turns.append(message)
            return
        if isinstance(message, Step):
            self._read = f"Step {message.sequence}"
        self.where[id(message)] = self._read
        self.said.setdefault(entry.topic, []).append((entry, message, self._begun))

    def says(self, kind: type[Said]) -> Iterator[Said]:
        """What it was recorded to say, of this kind, in the turn that its core is being told."""
        for _, message, begun in reversed(self.said.get(kind.NAME, [])):
            if begun < self.told:
                return
            if begun == self.told and isinstance(message, kind):
                yield message

    def go_on(self, memory: Memory, make: Callable[[Life, Memory], Core | None], *, end: bool = False) -> None:
        """Tell the core its turns, as far as all that they name is known.

        What a node said in a turn is known when the next one begins, or at the ``end``.
        """
        while self._turns and (end or len(self._turns) > 1):
            if missing := self._missing(memory):
                self.stopped = self.stopped or (f"{missing} is not recorded" if end else "")
                return
            if self._core is None:
                try:
                    self._core = make(self, memory)
                except Td3RobotError:
                    raise
                except Exception as error:
                    raise _failed(f"start of {self}", error) from error
                if self._core is None:
                    self.stopped = self.stopped or ("the policy it began with is not recorded" if end else "")
                    return
            turn = self._turns.popleft()
            self.told += 1
            try:
                self._tell(self._core, turn, memory)
            except Exception as error:
                last = end and not self._turns  # a core may end its node with an error, and then says no more
                if not (isinstance(error, SessionError) or (last and isinstance(error, Td3RobotError))):
                    raise _failed(f"turn {self.told} of {self}", error) from error
                self.stopped = str(error)
                self._turns.clear()

    def compared(self, topic: str, packages: tuple[str, ...]) -> Replayed:
        """What it said and says, without what the recording cannot know."""
        recorded = {entry.sequence for entry, _, _ in self.said.get(topic, [])}
        last = max(recorded, default=-1)
        whole = self.gone and self._lost is None
        got = []
        for number, (message, turn) in enumerate(self.got.get(topic, [])):
            # The recording, or a part of it, may end within a turn, whose last words are not in it then.
            if number in recorded or (number > last and (turn < self.told or whole)):
                got.append(message)
        said, stream = self._said(topic), f"{self.name}/{self.incarnation}"
        offers = self.start.settings.get("offers")
        offered = topic not in _LATER or topic in self.said or (isinstance(offers, list) and topic in offers)
        return Replayed(topic, packages, said, got, stream=stream, where=self.where, older=not offered)

    def last(self, topic: str) -> int:
        """The sequence of the last message of a topic that is compared; -1 where none is."""
        return max((entry.sequence for entry, _ in self._said(topic)), default=-1)

    def notes(self) -> list[str]:
        """What was not compared."""
        if not self.stopped:
            return []
        after = self._begun - self.told
        left = f"{after} turns" if after else "what came then"
        return [f"{self} after turn {self.told}, {left}: {self.stopped}"]

    def _said(self, topic: str) -> list[tuple[Entry, Message]]:
        """What was recorded of the turns that its core was told."""
        # Messages of turns that are lost seem to be of the last one before; how many its core says tells them apart.
        known = len(self.got.get(topic, []))
        return [
            (entry, message)
            for entry, message, begun in self.said.get(topic, [])
            if begun <= self.told and (begun != self._lost or entry.sequence < known)
        ]

    def _missing(self, memory: Memory) -> str:
        for _, topic, fields in self._turns[0].inputs:
            name = turns.named_in(topic, fields)
            if name and name not in memory and "wire" not in fields:
                return f"{topic} {' '.join(str(part)[:40] for part in name[1:])}"
        return ""

    def _tell(self, core: Core, turn: Turn, memory: Memory) -> None:
        inputs = [self._input(origin, topic, fields, memory) for origin, topic, fields in turn.inputs]
        self._now = _place(turn) or self._now
        for to, message in core.step(inputs, turn.now):
            self.send(to, message)

    def took(self, now: float, inputs: Sequence[Input]) -> None:
        """Collect the inputs that the core's recorder records, as a :class:`~td3_robot.recording.boundary.Sink`."""
        del now
        for message in turns.only_here(inputs):
            self.send(RECORDER, message)

    def send(self, to: Origin, message: Message) -> bool:
        """Collect what crosses the core's boundary now."""
        del to
        if self._once.first(message):
            if isinstance(message, Step):
                self._now = f"Step {message.sequence}"
            self.where[id(message)] = self._now
            self.got.setdefault(message.NAME, []).append((message, self.told))
        return True

    def _input(self, origin: str, topic: str, fields: dict[str, Any], memory: Memory) -> Input:
        try:
            message = _meant(topic, fields, memory)
            if turns.is_peer(origin) and isinstance(message, Hello):
                self._peers[origin] = Peer("", bytes.fromhex(origin[1:]), message, {})
            return self._peers[origin] if turns.is_peer(origin) else origin, message
        except (ProtocolError, KeyError, ValueError) as error:
            raise SessionError(f"turn {self.told} of {self}: {topic} from {origin}: {error}") from None


def _meant(topic: str, fields: dict[str, Any], memory: Memory) -> Message:
    """The message that a Turn names or repeats."""
    name = turns.named_in(topic, fields)
    if name is None:
        return codec.decode(topic, msgspec.msgpack.encode(fields))
    if name in memory:
        return memory[name]
    repeated = turns.repeated_in(topic, fields)
    if repeated is None:
        raise ValueError(f"{name} is named, and recorded nowhere")
    return repeated


def _failed(what: str, error: Exception) -> SessionError:
    """A core cannot bear what it is told: it has a mistake, or the file holds what no node was ever told."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:500]
    return SessionError(f"{what}: {type(error).__name__} in {Path(at.filename).name}, line {at.lineno}: {text}")


def _place(turn: Turn) -> str:
    """The newest Step among the inputs, in words."""
    steps = [fields.get("named", []) for _, topic, fields in turn.inputs if topic == Step.NAME]
    return f"Step {steps[-1][2]} of {steps[-1][0]}" if steps and len(steps[-1]) == 4 else ""


def whole(session: Session, role: str) -> tuple[dict[tuple[str, int], Life], list[str]]:
    """The lives of nodes of this role that are recorded from their beginning on, and notes about the others.

    Raises:
        SessionError: the recording is damaged.
    """
    lives: dict[tuple[str, int], Life] = {}
    notes: list[str] = []
    for key, entry in session.starts.items():
        start = session.decode(entry)
        if not isinstance(start, Start) or start.role != role:
            continue
        life, first = Life(*key, start), session.turns.get(key)
        if first is None:
            notes.append(f"states of {life}: it had no turn")
        elif first:
            notes.append(f"states of {life}: its turns before {first} are missing")
        else:
            lives[key] = life
    return lives, notes


def relive(
    session: Session,
    lives: dict[tuple[str, int], Life],
    said: Collection[str],
    make: Callable[[Life, Memory], Core | None],
) -> Iterator[tuple[Entry, Message]]:
    """Drive the cores of these lives while the recording is read; yields all that is read.

    Args:
        said: topics of which what they say is compared.
        make: the core of a life; None while the policy that it began with has not been read.

    Raises:
        SessionError: the recording is damaged, or holds what no core can be driven by.
    """
    if not lives:
        return
    memory = Memory()
    for entry, message in session.messages({Turn.NAME, "bye", *turns.NAMED, *said}):
        memory.keep(message, len(entry.payload))
        life = lives.get((entry.publisher, entry.incarnation))
        if life and entry.topic == "bye":
            life.gone = True
        elif life and (entry.topic in said or entry.topic == Turn.NAME):
            life.hear(entry, message)
        for each in lives.values():
            each.go_on(memory, make)
        yield entry, message
    for life in lives.values():
        life.go_on(memory, make, end=True)


def outcome(lives: Collection[Life], said: Sequence[str], packages: tuple[str, ...]) -> Outcome:
    """All comparisons of these lives, topic by topic."""
    result = Outcome([life.compared(topic, packages) for topic in said for life in lives])
    result.turns = sum(life.told for life in lives)
    result.notes = [note for life in lives for note in life.notes()]
    return result
