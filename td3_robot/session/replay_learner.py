"""The learner's core, driven by recorded Steps: the same transitions, and in lock-step the same weights?

In lock-step everything the learner says follows from its Steps: all its Weights and Throttles are compared, and its
loss statistics where the recording holds those (of a run that has ended). Running free, its updates fall where the
clock puts them; then what it counted is compared with its last Status, and the transitions it stores with those that
``--update`` has put into the recording.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import safetensors.numpy
from msgspec.structs import replace
from safetensors import SafetensorError

from td3_robot.bundle import Bundle
from td3_robot.config import Config, NetworkConfig
from td3_robot.errors import SessionError
from td3_robot.learner import compute
from td3_robot.learner.core import LearnerCore
from td3_robot.messages import Evaluation, FieldType, Hello, Message, Status, Step, Throttle, Weights
from td3_robot.session import machines
from td3_robot.session.entries import METRICS, Attachment, Entry
from td3_robot.session.outcome import Outcome, Replayed
from td3_robot.session.reader import Session
from td3_robot.specs import Float32
from td3_robot.transport import session as handshake
from td3_robot.transport.session import ROBOT_ROLES, Peer

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
    outcome = Outcome()
    if not recording.steps:
        outcome.notes.append("there are no Steps in it")
        return outcome
    if missing := sorted(recording.names() - recording.hellos.keys()):
        outcome.notes.append(f"which robot {', '.join(missing)} is was not recorded: there is no Hello")
        return outcome
    if why := recording.not_lockstep():
        outcome.notes.append(f"Weights and Throttles: {why}")
    else:
        outcome.parts += _lockstep(recording)
    got, counted = _stored(recording)
    if why := recording.not_counted():
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
        self.policy = handshake.hello("policy", "policy", client=0)
        self.steps: list[tuple[Entry, Step]] = []
        self.inputs: list[tuple[str, Message]] = []  # by name of the sender, in the order of the recording
        self.said: dict[str, list[tuple[Entry, Message]]] = {Weights.NAME: [], Throttle.NAME: []}
        self.status: tuple[Entry, Status] | None = None
        self._learners: set[tuple[str, int]] = set()
        statuses: list[tuple[Entry, Status]] = []
        topics = [kind.NAME for kind in (Hello, Step, Evaluation, Weights, Throttle, Status)]
        for entry, message in session.messages(topics):
            if isinstance(message, Hello):
                self._meet(message)
            elif isinstance(message, Step):
                self.steps.append((entry, message))
                self.inputs.append((message.source, message))
            elif isinstance(message, Evaluation):
                self.inputs.append((entry.publisher, message))
            elif isinstance(message, Status):
                statuses.append((entry, message))
            else:
                self.said[entry.topic].append((entry, message))
                self._learners.add((entry.publisher, entry.incarnation))
        self._undelivered = any(s.counters.get("undelivered") for e, s in statuses if e.publisher in self.names())
        for entry, status in statuses:
            if (entry.publisher, entry.incarnation) in self._learners and status.counters.get("steps"):
                self.status = entry, status

    def _meet(self, hello: Hello) -> None:
        if hello.role in (*ROBOT_ROLES, "evaluator"):
            self.hellos.setdefault(hello.name, hello)
        elif hello.role == "policy":
            self.policy = hello

    def names(self) -> set[str]:
        return {step.source for _, step in self.steps}

    def _complete(self) -> str | None:
        """Why the Steps are not all that the learner saw; None if they are."""
        expected: dict[tuple[str, int], int] = {}
        for entry, step in self.steps:
            source = step.source, step.incarnation
            if entry.sequence != expected.get(source, 0):
                return f"Steps of {step.source} are missing before {step.sequence}"
            expected[source] = entry.sequence + 1
        if len(self._learners) != 1:
            return f"it was started {len(self._learners)} times while this was recorded"
        first = self.said[Weights.NAME][0][1] if self.said[Weights.NAME] else None
        if not isinstance(first, Weights) or first.version != 1:
            return "its first weights are not recorded"
        return None

    def not_lockstep(self) -> str | None:
        """Why what the learner said cannot be computed again; None if it can."""
        if self.config.timing != "lockstep":
            return "they follow from the Steps in lock-step only"
        if self.config.learner.recordings:
            return "it began with what other recordings hold"
        if self.config.learner.start_from:
            return "it began with the actor of another policy"
        if len({(step.source, step.incarnation) for _, step in self.steps}) != len(self.names()):
            return "a simulator was started again while this was recorded"
        if other := machines.difference(self.session.metadata, _PACKAGES):
            return f"they are the same only on the same kind of machine: {other}"
        return self._complete()

    def not_counted(self) -> str | None:
        """Why the learner's counters cannot be counted again; None if they can."""
        if len(self.names()) != 1:
            return "in which order it saw the Steps of several sources is not recorded"
        if self.status is None:
            return "no Status of it with Steps is recorded"
        if self._undelivered:
            return "there were Steps that did not reach it"
        return self._complete()

    def peers(self) -> dict[str, Peer]:
        return {name: Peer("learner", name.encode(), hello, {}) for name, hello in self.hellos.items()}


def _lockstep(recording: _Recording) -> list[Replayed]:
    """All that the core says to the recorded Steps."""
    compute.use_threads(recording.config.learner.threads)
    weights = recording.said[Weights.NAME][0][1]
    assert isinstance(weights, Weights)
    provenance = dict(Bundle.decode(weights.payload, "the first recorded weights").provenance)
    own = {name: value for name, value in provenance.items() if name not in ("version", "updates", "env_steps")}
    core, peers, said = LearnerCore(recording.config, provenance=own), recording.peers(), list[Message]()
    core.rounds.kept = True  # as in a run that saves: the last round ends with a Throttle too
    joins = [(Peer("learner", b"policy", recording.policy, {}), recording.policy)]
    joins += [(peer, peer.hello) for _, peer in sorted(peers.items())]
    for origin, message in [*joins, *((peers[name], message) for name, message in recording.inputs if name in peers)]:
        for _, output in core.step([(origin, message)], 0.0):
            if not (said and said[-1] is output):
                said.append(output)
    parts = []
    for kind in (Weights, Throttle):
        expected = [(entry, _unasked(message)) for entry, message in recording.said[kind.NAME] if _follows(message)]
        got = [_unasked(message) for message in said if isinstance(message, kind) and _follows(message)]
        parts.append(Replayed(kind.NAME, _PACKAGES, expected, got))
    losses = _losses(recording.session)
    if losses is not None:
        records = [record for record in core.take_records() if record["kind"] == "train"]
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        old, now = [_timeless(record) for record in losses], [_timeless(record) for record in records]
        same = [item.figures for item in old] == [item.figures for item in now]
        reference = None if same else Attachment(METRICS, "application/jsonl", lines)
        parts.append(Replayed(Losses.NAME, _PACKAGES, [(None, item) for item in old], now, reference))
    return parts


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


def _follows(message: Message) -> bool:
    """Whether it follows from a Step: how often a source was greeted before the first is the handshake's business."""
    return not isinstance(message, Throttle) or message.answers > 0


def _unasked(message: Message) -> Message:
    """Without the wish for a simulator's state: when to save is not the core's business."""
    return dataclasses.replace(message, save=0) if isinstance(message, Throttle) else message


def _stored(recording: _Recording) -> tuple[list[Transition], dict[int, dict[str, int]]]:
    """The transitions that the core stores, and what it had counted after so many Steps."""
    rows = sum(len(step.phase) for _, step in recording.steps)
    # A learner that only stores: it is never done, never updates, and the buffer holds everything.
    learner = replace(recording.config.learner, learning_starts=_NEVER - 1, buffer_size=max(2, rows), batch_size=1)
    config = replace(
        recording.config, timing="free", total_steps=_NEVER, learner=learner, network=NetworkConfig(hidden=(1,))
    )
    core, peers = LearnerCore(config), recording.peers()
    counted: dict[int, dict[str, int]] = {}
    joined: dict[str, int] = {}
    for _, step in recording.steps:
        peer = peers[step.source]
        if joined.get(step.source) != step.incarnation:
            joined[step.source] = step.incarnation
            core.step([(peer, peer.hello)], 0.0)
        core.step([(peer, step)], 0.0)
        counts = core.counts()
        counted[counts["steps"]] = {name: counts.get(name, 0) for name in _COUNTED}
    stored = core.training.replay.state()[0]["rows"]
    assert core.spec
    return list(_rows(stored, core.spec.observation_size, core.spec.action_size)), counted


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
