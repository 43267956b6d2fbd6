"""The learner's core, driven by what its node was told: the same weights, Throttles, losses and transitions?

All that a learner says follows from its Start and its Turns, in lock-step and running free: which Steps had come before
which update is what the Turns say. Of one whose beginning is not recorded, or that began with more than the recording
holds, the transitions are still made again, and compared with those that ``--update`` has put into the recording.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import safetensors.numpy
from msgspec.structs import replace
from safetensors import SafetensorError

from td3_robot.config import Config, NetworkConfig
from td3_robot.errors import SessionError
from td3_robot.learner import compute
from td3_robot.learner.core import LearnerCore
from td3_robot.messages import FieldType, Hello, Message, SimulatorState, Status, Step, Throttle, Weights
from td3_robot.session import lives, machines
from td3_robot.session.entries import METRICS, Attachment, Entry
from td3_robot.session.lives import Life, Memory
from td3_robot.session.outcome import Outcome, Replayed
from td3_robot.session.reader import Session
from td3_robot.specs import Float32
from td3_robot.transport.session import ROBOT_ROLES, Input, Output, Peer

REFERENCE = "reference/transitions.safetensors"
"""The attachment that holds the transitions as they were when it was made."""
_COUNTED = ("begun", "transitions", "gaps", "missed", "cut")
_NEVER = 2**40  # environment steps: beyond any recording
_PACKAGES = ("numpy", "torch")
_TIMED = ("wall_s", "steps_per_s", "updates_per_s")


_O, _A, _1 = ({"wire": FieldType("array", "", dtype="<f4", shape=(size,))} for size in "OA1")


@dataclass(frozen=True, eq=False)
class Transition(Message):
    """A row of the replay buffer; never sent anywhere."""

    NAME: ClassVar[str] = "transition"

    observation: Float32 = field(metadata=_O)
    action: Float32 = field(metadata=_A)
    reward: Float32 = field(metadata=_1)
    discount: Float32 = field(metadata=_1)
    next_observation: Float32 = field(metadata=_O)


@dataclass(frozen=True, eq=False)
class Losses(Message):
    """A line of metrics.jsonl about training, without the time; never sent anywhere."""

    NAME: ClassVar[str] = "loss statistics"

    figures: dict[str, Any] = field(metadata={"wire": FieldType("map", "")})


def replay(session: Session) -> Outcome:
    """Replay the learner.

    Raises:
        SessionError: the recording is damaged, holds no configuration, or a reference that is none.
    """
    recording = _Recording(session)
    if not recording.steps:
        return Outcome(notes=["there are no Steps in it"] if recording.learners else [])
    found, notes = lives.whole(session, "learner")
    outcome = Outcome(notes=notes)
    if len(recording.learners) > 1:
        outcome.notes.append(f"it was started {len(recording.learners)} times while this was recorded")
        found = {}
    if found:
        (life,) = found.values()
        told = _relive(session, life, recording, outcome)
        if told is None:
            return outcome
        got, counted = told.stored()
    elif missing := sorted(recording.names() - recording.hellos.keys()):
        outcome.notes.append(f"which robot {', '.join(missing)} is was not recorded: there is no Hello")
        return outcome
    else:
        got, counted = _stored(recording)
    if why := recording.not_counted(next(iter(found.values()), None)):
        outcome.notes.append(f"the learner's counters: {why}")
    elif recording.status:
        entry, status = recording.status
        counters = {**status.counters, **counted.get(int(status.counters["steps"]), {"steps": 0})}
        ours = dataclasses.replace(status, counters=counters)
        outcome.parts.append(Replayed(Status.NAME, _PACKAGES, [(entry, status)], [ours]))
    expected = _reference(session)
    if expected is None:
        outcome.notes.append("transitions, row by row: the recording holds none to compare with; --update adds them")
    rows = [(None, item) for item in (expected if expected is not None else [])]
    outcome.parts.append(Replayed(Transition.NAME, _PACKAGES, rows, got if rows else [], _attachment(got)))
    return outcome


class _Recording:
    """What of a session concerns the learner."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.config: Config = session.config()
        self.hellos: dict[str, Hello] = {}
        self.steps: list[tuple[Entry, Step]] = []
        self.status: tuple[Entry, Status] | None = None
        self.learners: set[tuple[str, int]] = set()
        statuses: list[tuple[Entry, Status]] = []
        topics = [kind.NAME for kind in (Hello, Step, Throttle, Status)]
        for entry, message in session.messages(topics):
            if isinstance(message, Hello):
                if message.role in ROBOT_ROLES:
                    self.hellos.setdefault(message.name, message)
            elif isinstance(message, Step):
                self.steps.append((entry, message))
            elif isinstance(message, Status):
                statuses.append((entry, message))
            else:
                self.learners.add((entry.publisher, entry.incarnation))
        self._undelivered = any(s.counters.get("undelivered") for e, s in statuses if e.publisher in self.names())
        for entry, status in statuses:
            if (entry.publisher, entry.incarnation) in self.learners and status.counters.get("steps"):
                self.status = entry, status

    def names(self) -> set[str]:
        return {step.source for _, step in self.steps}

    def not_counted(self, life: Life | None) -> str | None:
        """Why the learner's counters cannot be counted again, by its life if that is recorded; None if they can."""
        if self.status is None:
            return "no Status of it with Steps is recorded"
        if life:
            return "its last Status came later" if life.stopped else None
        if len(self.names()) != 1:
            return "in which order it saw the Steps of several sources is not recorded"
        if self._undelivered:
            return "there were Steps that did not reach it"
        expected: dict[tuple[str, int], int] = {}
        for entry, step in self.steps:
            source = step.source, step.incarnation
            if entry.sequence != expected.get(source, 0):
                return f"Steps of {step.source} are missing before {step.sequence}"
            expected[source] = entry.sequence + 1
        return None

    def peers(self) -> dict[str, Peer]:
        return {name: Peer("learner", name.encode(), hello, {}) for name, hello in self.hellos.items()}


class _Told:
    """The learner, and one that only stores, both told the same.

    Args:
        learning: None where what was learned cannot be computed again.
    """

    def __init__(self, config: Config, rows: int, learning: LearnerCore | None) -> None:
        self.learning = learning
        self._storing = _Storing(config, rows)
        self._every = config.checkpoint.every
        self._next = self._every or _NEVER
        if learning and learning.lockstep:
            learning.rounds.keep()

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        self._storing.step(inputs, now)
        if self.learning is None:
            return []
        outputs = self.learning.step(inputs, now)
        self._cut(self.learning)
        return outputs

    def stored(self) -> tuple[list[Transition], dict[int, dict[str, int]]]:
        return self._storing.rows(), self._storing.counted

    def _cut(self, core: LearnerCore) -> None:
        """What a saver does between turns, but for the writing."""
        if core.rounds.setback:
            raise SessionError("a simulator was lost, and the checkpoint it went back to is not in the recording")
        if core.lockstep and core.env_steps >= self._next and not core.done:
            self._next, core.rounds.wanted = core.env_steps + self._every, True
        if core.rounds.cut_complete:
            core.rounds.taken()


def _relive(session: Session, life: Life, recording: _Recording, outcome: Outcome) -> _Told | None:
    """Drive the learner of this life, and note in the outcome what it says; None if it cannot be driven at all."""
    config, why = life.config, _not_learned(session, life)
    if why:
        outcome.notes.append(f"weights, Throttles and losses: {why}")
    told: list[_Told] = []

    def make(life: Life, memory: Memory) -> _Told:
        del memory
        compute.use_threads(config.learner.threads, config.learner.threads_in)
        core = None if why else LearnerCore(config, provenance=life.setting("provenance", dict))
        told.append(_Told(config, sum(len(step.phase) for _, step in recording.steps), core))
        return told[-1]

    said = () if why else (Weights.NAME, Throttle.NAME, SimulatorState.NAME)
    for _ in lives.relive(session, {(life.name, life.incarnation): life}, said, make):
        pass
    result = lives.outcome([life], said, _PACKAGES)
    outcome.turns = result.turns
    outcome.notes += result.notes
    for part in result.parts:
        said_then = [(entry, _unasked(message)) for entry, message in part.expected]
        outcome.parts.append(dataclasses.replace(part, expected=said_then, got=[_unasked(item) for item in part.got]))
    if not told:
        return None
    if core := told[0].learning:
        outcome.parts += _compare_losses(session, core, outcome) if not life.stopped else []
    return told[0]


def _not_learned(session: Session, life: Life) -> str | None:
    """Why what the learner computed cannot be computed again; None if it can."""
    learner = life.config.learner
    if not life.setting("new", bool):
        return "it went on from a checkpoint, or a replay file, that is not in the recording"
    if learner.recordings:
        return "it began with what other recordings hold"
    if learner.start_from:
        return "it began with the actor of another policy"
    if compute.device(learner.device).type != "cpu":
        return "they were computed on a GPU"
    if other := machines.difference(session.metadata, _PACKAGES):
        return f"they are the same only on the same kind of machine: {other}"
    return None


def _compare_losses(session: Session, core: LearnerCore, outcome: Outcome) -> list[Replayed]:
    losses = _losses(session)
    if losses is None:
        outcome.notes.append(f"loss statistics: there is no {METRICS} in it, which is put in when a run ends")
        return []
    records = [record for record in core.take_records() if record["kind"] == "train"]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    old, now = [_timeless(record) for record in losses], [_timeless(record) for record in records]
    same = [item.figures for item in old] == [item.figures for item in now]
    reference = session.attachments[METRICS] if same else Attachment(METRICS, "application/jsonl", lines)
    return [Replayed(Losses.NAME, _PACKAGES, [(None, item) for item in old], now, reference)]


def _timeless(record: Mapping[str, Any]) -> Losses:
    return Losses({name: value for name, value in record.items() if name not in _TIMED})


def _losses(session: Session) -> list[dict[str, Any]] | None:
    """What the recorded run said of its training; None where that is not in the recording."""
    attached = session.attachments.get(METRICS)
    if attached is None:
        return None
    try:
        lines = [json.loads(line) for line in attached.data.decode().splitlines()]
        return [line for line in lines if line["kind"] == "train"]
    except (ValueError, KeyError, TypeError) as error:
        raise SessionError(f"{session.paths[0]}: {METRICS} is damaged ({type(error).__name__}: {error})") from None


def _unasked(message: Message) -> Message:
    """Without the wish for a simulator's state: when to save is not the core's business."""
    return dataclasses.replace(message, save=0) if isinstance(message, Throttle) else message


class _Storing:
    """A learner that only stores: it is never done, never updates, and its buffer holds everything."""

    def __init__(self, config: Config, rows: int) -> None:
        learner = replace(
            config.learner,
            learning_starts=_NEVER - 1,
            buffer_size=max(2, rows),
            batch_size=1,
            recordings=(),
            offline_updates=0,
        )
        network = NetworkConfig(hidden=(1,))
        self._core = LearnerCore(replace(config, timing="free", total_steps=_NEVER, learner=learner, network=network))
        self.counted: dict[int, dict[str, int]] = {}

    def step(self, inputs: Sequence[Input], now: float) -> None:
        self._core.step(inputs, now)
        counts = self._core.counts()
        self.counted[counts.get("steps", 0)] = {name: counts.get(name, 0) for name in _COUNTED}

    def rows(self) -> list[Transition]:
        if self._core.spec is None:
            return []
        stored = self._core.training.replay.state()[0]["rows"]
        return list(_rows(stored, self._core.spec.observation_size, self._core.spec.action_size))


def _stored(recording: _Recording) -> tuple[list[Transition], dict[int, dict[str, int]]]:
    """The transitions of all recorded Steps in their order, and what was counted after so many of them."""
    core, peers = _Storing(recording.config, sum(len(step.phase) for _, step in recording.steps)), recording.peers()
    joined: dict[str, int] = {}
    for _, step in recording.steps:
        peer = peers[step.source]
        if joined.get(step.source) != step.incarnation:
            joined[step.source] = step.incarnation
            core.step([(peer, peer.hello)], 0.0)
        core.step([(peer, step)], 0.0)
    return core.rows(), core.counted


def _rows(stored: Float32, o: int, a: int) -> Iterator[Transition]:
    edges = np.cumsum([o, a, 1, 1])
    for row in stored:
        yield Transition(*np.split(row, edges))


def _attachment(transitions: list[Transition]) -> Attachment:
    names = [item.name for item in fields(Transition)]
    columns = {name: np.stack([getattr(item, name) for item in transitions]) for name in names if transitions}
    return Attachment(REFERENCE, "application/x-safetensors", safetensors.numpy.save(columns))


def _reference(session: Session) -> list[Transition] | None:
    attached = session.attachments.get(REFERENCE)
    if attached is None:
        return None
    try:
        columns = safetensors.numpy.load(attached.data)
        arrays = [columns[item.name] for item in fields(Transition)] if columns else []
        return [Transition(*row) for row in zip(*arrays, strict=True)]
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise SessionError(f"{session.paths[0]}: {REFERENCE} is damaged ({type(error).__name__}: {error})") from None
