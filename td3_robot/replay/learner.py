"""The learner's core, driven by what its node was told: the same weights, Throttles, losses and transitions?

All that a learner says follows from its Start and its Turns, in lock-step and running free: which Steps had come before
which update is what the Turns say. Of one whose beginning is not recorded, or that began with more than the recording
holds, the transitions are still made again, and compared with those that ``--update`` has put into the recording.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import safetensors.numpy
from msgspec.structs import replace
from safetensors import SafetensorError

from td3_robot.bundle import Bundle
from td3_robot.config.schema import Config, NetworkConfig
from td3_robot.core_types import ROBOT_ROLES, Input, Output, Peer
from td3_robot.errors import BundleError, SessionError
from td3_robot.learner import compute
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.factory import make_core
from td3_robot.messages import FieldType, Hello, Message, SimulatorState, Status, Step, Throttle, Weights
from td3_robot.recording.boundary import RecordedCore
from td3_robot.recording.entries import METRICS, Attachment, Entry
from td3_robot.recording.reader import Session
from td3_robot.replay import lives, machines
from td3_robot.replay.lives import Life, Memory
from td3_robot.replay.outcome import Outcome, Replayed
from td3_robot.specs import Float32

REFERENCE = "reference/transitions.safetensors"
"""The attachment that holds the transitions as they were when it was made."""
_COUNTED = ("begun", "transitions", "gaps", "missed", "cut")
_NEVER = 2**40  # environment steps: beyond any recording
_PACKAGES = ("numpy", "torch")
_TIMED = ("wall_s", "steps_per_s", "updates_per_s")


Key = tuple[str, int]
"""Name and incarnation of a node, or source."""

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
    learners = sorted(recording.learners | found.keys())
    alone = len(learners) == 1
    told = _relive(session, found, recording, alone, outcome)
    for key in learners:
        _compare_counters(recording, key, found.get(key), told.get(key), alone, outcome)
    expected = _reference(session)
    if alone and told:
        got = next(iter(told.values())).stored()
    elif missing := sorted(recording.names() - recording.hellos.keys()):
        outcome.notes.append(f"transitions: which robot {', '.join(missing)} is was not recorded: there is no Hello")
        return outcome
    else:
        got = recording.stored.rows()
    if expected is None:
        whose = "transitions, row by row: " if learners else "there is no learner in it, and of its Steps' transitions "
        outcome.notes.append(f"{whose}the recording holds none to compare with; --update adds them")
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
        self.statuses: dict[Key, tuple[Entry, Status]] = {}  # the last one with Steps of each learner
        self.learners: set[Key] = set()
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
            key = entry.publisher, entry.incarnation
            if key in self.learners and status.counters.get("steps"):
                self.statuses[key] = entry, status

    def names(self) -> set[str]:
        return {step.source for _, step in self.steps}

    def not_counted(self) -> str | None:
        """Why the counters of a learner cannot be counted from the Steps alone; None if they can."""
        if missing := sorted(self.names() - self.hellos.keys()):
            return f"which robot {', '.join(missing)} is was not recorded: there is no Hello"
        if len(self.names()) != 1:
            return "in which order it saw the Steps of several sources is not recorded"
        if self._undelivered:
            return "there were Steps that did not reach it"
        expected: dict[Key, int] = {}
        for entry, step in self.steps:
            source = step.source, step.incarnation
            if entry.sequence != expected.get(source, 0):
                return f"Steps of {step.source} are missing before {step.sequence}"
            expected[source] = entry.sequence + 1
        return None

    @functools.cached_property
    def stored(self) -> _Storing:
        """A learner that was told all recorded Steps in their order; there must be a Hello of each source."""
        core = _Storing(self.config, sum(len(step.phase) for _, step in self.steps))
        peers = {name: Peer("learner", name.encode(), hello, {}) for name, hello in self.hellos.items()}
        joined: dict[str, int] = {}
        for _, step in self.steps:
            peer = peers[step.source]
            if joined.get(step.source) != step.incarnation:
                joined[step.source] = step.incarnation
                core.step([(peer, peer.hello)], 0.0)
            core.step([(peer, step)], 0.0)
        return core


class _Told:
    """The learner of a life, and one that only stores, both told the same.

    Args:
        learning: None where what was learned cannot be computed again.
    """

    def __init__(self, life: Life, rows: int, learning: LearnerCore | None) -> None:
        self.learning = learning
        self._life = life
        self._storing = _Storing(life.config, rows)
        if learning and learning.lockstep:
            learning.rounds.keep()

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        self._storing.step(inputs, now)
        if self.learning is None:
            return []
        rounds = self.learning.rounds
        # When to take a cut is its saver's business, who also takes one when told to stop: what was said shows it.
        rounds.wanted = any(throttle.save for throttle in self._life.says(Throttle))
        outputs = self.learning.step(inputs, now)
        if rounds.setback:
            raise SessionError("a simulator was lost, and the checkpoint it went back to is not in the recording")
        if rounds.cut_complete:
            rounds.taken()
        return outputs

    def stored(self) -> list[Transition]:
        return self._storing.rows()

    @property
    def counted(self) -> dict[int, dict[str, int]]:
        """The counters by the number of Steps."""
        return self._storing.counted


def _relive(
    session: Session, found: dict[Key, Life], recording: _Recording, alone: bool, outcome: Outcome
) -> dict[Key, _Told]:
    """Drive the learners of these lives, and note in the outcome what they say; those that could be driven.

    Args:
        alone: there is no other learner in the recording.
    """
    learning: dict[Key, Life] = {}

    def note(life: Life, why: str) -> None:
        outcome.notes.append(f"weights, Throttles and losses{'' if alone else f' of {life}'}: {why}")

    for key, life in found.items():
        if why := _not_learned(session, life):
            note(life, why)
        else:
            learning[key] = life
    told: dict[Key, _Told] = {}

    def make(life: Life, memory: Memory) -> RecordedCore:
        del memory
        config, key = life.config, (life.name, life.incarnation)
        compute.use_threads(config.learner.threads, config.learner.threads_in)
        core = make_core(config, provenance=life.setting("provenance", dict)) if key in learning else None
        told[key] = _Told(life, sum(len(step.phase) for _, step in recording.steps), core)
        return RecordedCore(told[key], life)

    said = (Weights.NAME, Throttle.NAME, SimulatorState.NAME)
    for _ in lives.relive(session, found, said, make):
        pass
    for key, life in list(learning.items()):
        if key in told and (why := _compiled_otherwise(life, told[key].learning)):
            note(life, why)
            del learning[key]
    result = lives.outcome(learning.values(), said, _PACKAGES)
    outcome.turns = sum(life.told for life in found.values())
    outcome.notes += [note for life in found.values() for note in life.notes()]
    outcome.parts += result.parts
    if len(recording.learners) > 1:
        outcome.notes.append(f"loss statistics: {len(recording.learners)} learners made them, or one in as many lives")
    for key, life in learning.items():
        core = told[key].learning if key in told else None
        if core and alone and not life.stopped:
            outcome.parts += _compare_losses(session, core, outcome)
    return told


def _compare_counters(
    recording: _Recording, key: Key, life: Life | None, told: _Told | None, alone: bool, outcome: Outcome
) -> None:
    """The counters of a learner's last Status with those counted again, or a note why there are none."""
    whose = f"counters of {key[0]} ({key[1]})" if not alone else "the learner's counters"
    status = recording.statuses.get(key)
    counted: dict[int, dict[str, int]] = {}
    if status is None:
        why: str | None = "no Status of it with Steps is recorded"
    elif life and not life.setting("new", bool):
        why = "it went on from a checkpoint, or a replay file, that is not in the recording"
    elif life and told:
        why, counted = "its last Status came later" if life.stopped else None, told.counted
    elif not alone:
        why = "its beginning is not recorded"
    elif not (why := recording.not_counted()):
        counted = recording.stored.counted
    if why or status is None:
        outcome.notes.append(f"{whose}: {why}")
        return
    entry, said = status
    others = {name: value for name, value in said.counters.items() if name not in _COUNTED and name != "steps"}
    ours = dataclasses.replace(said, counters=others | counted.get(int(said.counters["steps"]), {"steps": 0}))
    outcome.parts.append(Replayed(Status.NAME, _PACKAGES, [(entry, said)], [ours]))


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


def _compiled_otherwise(life: Life, core: LearnerCore | None) -> str | None:
    """Why what the learner computed, and now computes, is the same up to rounding only; None if it is so to the bit."""
    weights = [message for _, message, _ in life.said.get(Weights.NAME, []) if isinstance(message, Weights)]
    if core is None or core.spec is None or not weights:
        return None
    now = core.training.td3.compiled
    try:  # at the end as at the beginning: it may have failed meanwhile, and gone on without
        told = [Bundle.decode(weights[at].payload).provenance.get("compiled", now) for at in (0, -1)]
    except BundleError:
        return None  # it will differ
    if told == [now, now]:
        return None
    return (
        f"its updates were {'not ' * now}compiled{' at times' * (now in told)}, and here they are{' not' * (not now)}"
    )


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


class _Storing:
    """A learner that only stores: it is never done, never updates, and its buffer holds everything."""

    def __init__(self, config: Config, rows: int) -> None:
        learner = replace(
            config.learner,
            learning_starts=_NEVER - 1,
            buffer_size=max(2, rows),
            batch_size=1,
            compile=False,
            recordings=(),
            offline_updates=0,
        )
        network = NetworkConfig(hidden=(1,))
        self._core = make_core(replace(config, timing="free", total_steps=_NEVER, learner=learner, network=network))
        self.counted: dict[int, dict[str, int]] = {}

    def step(self, inputs: Sequence[Input], now: float) -> None:
        self._core.step(inputs, now)
        counts = self._core.counts()
        self.counted[counts.get("steps", 0)] = {name: counts[name] for name in ("steps", *_COUNTED) if name in counts}

    def rows(self) -> list[Transition]:
        if self._core.spec is None:
            return []
        stored = self._core.training.replay.state()[0]["rows"]
        return list(_rows(stored, self._core.spec.observation_size, self._core.spec.action_size))


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
