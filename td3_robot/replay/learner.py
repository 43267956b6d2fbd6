"""Replays the learner's core. The core must produce the recorded weights, Throttles, losses and transitions.

If the learner did not resume, its Start and Turn messages determine these outputs. This also holds without lock-step,
because a Turn shows which Steps came before an update. Some computations, for example on a GPU, cannot be repeated on
this machine. Then replay uses a learner that only stores transitions. In this case, replay compares only transitions
and counters. If the recording lacks the learner's first turn, or has several learners, replay rebuilds turns from
Steps.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from msgspec.structs import replace

from td3_robot.bundle import Bundle
from td3_robot.config.learner import LearnerConfig
from td3_robot.config.schema import Config, NetworkConfig
from td3_robot.core_types import ROBOT_ROLES, Input, Output, Peer
from td3_robot.errors import BundleError, SessionError
from td3_robot.learner import compute
from td3_robot.learner.checkpointing.state import compiled_how
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.engine import selection
from td3_robot.learner.factory import make_core
from td3_robot.learner.scheduling.free import FreeRunning
from td3_robot.messages import Hello, Map, Message, SimulatorState, Start, Status, Step, Throttle, Weights
from td3_robot.recording.boundary import RecordedCore
from td3_robot.recording.entries import METRICS, Attachment, Entry
from td3_robot.recording.reader import Session
from td3_robot.replay import lives, machines
from td3_robot.replay.lives import Key, Life, Memory
from td3_robot.replay.outcome import Outcome, Replayed
from td3_robot.replay.transitions import Transition, add_transitions

TOPICS = (Weights.NAME, Throttle.NAME, SimulatorState.NAME)
"""The topics that replay compares if it can repeat the learner's computations."""
_COUNTED = ("begun", "transitions", "gaps", "missed", "cut")
_NEVER = 2**40  # environment steps; no recording has so many
_PACKAGES = ("numpy", "torch")
_TIMED = ("wall_s", "steps_per_s", "updates_per_s")
_CONTINUED = "the learner continued from a checkpoint or a replay file, which the recording does not contain"


class Losses(Message, frozen=True):
    """A line of metrics.jsonl about training, without times and rates. Replay compares it like a message."""

    NAME: ClassVar[str] = "loss statistics"

    figures: Map


def replay(session: Session) -> Outcome:
    """Replay every learner of a session."""
    recording = _Recording(session)
    if not recording.steps:
        return Outcome(notes=["the recording has no Steps"] if recording.learners else [])
    learners: dict[Key, _Learner] = {}

    def make(life: Life, memory: Memory) -> RecordedCore:
        del memory
        life.packages = _PACKAGES
        selection.use_threads(life.config.learner)
        learner = _Learner(life, recording.rows, _not_learned(session, life))
        learners[life.name, life.incarnation] = learner
        return RecordedCore(learner, life)

    found, notes = lives.replay(session, "learner", TOPICS, make)
    if session.left_out:
        computed = (message for life in found.values() for message, _ in life.replayed[Weights.NAME])
        session.policies |= {weights.sha256: weights.payload for weights in computed if isinstance(weights, Weights)}
    every = sorted(recording.learners | found.keys())
    alone = len(every) == 1
    for learner in learners.values():
        learner.find_other_compilation()
        if learner.problem:
            of = "" if alone else f" of {learner.life}"
            notes.append(f"weights, Throttles and losses{of}: {learner.problem}")
    problems = {learner.life for learner in learners.values() if learner.problem}
    outcome = lives.outcome([life for life in found.values() if life not in problems], TOPICS)
    outcome.parts = [_as_recorded(part) for part in outcome.parts]
    outcome.turns = sum(life.turns for life in found.values())
    outcome.notes = [*notes, *(note for life in found.values() for note in life.notes())]
    if len(recording.learners) > 1:
        count = len(recording.learners)
        what = f"loss statistics: {count} learner processes made them"
        outcome.notes.append(f"{what}; replay compares them only if one process made all of them")
    for learner in learners.values():
        if alone and not learner.problem and not learner.life.stopped:
            _compare_losses(session, learner, outcome)
    for key in every:
        _compare_counters(recording, key, found.get(key), learners.get(key), alone, outcome)
    if alone and learners:
        [learner] = learners.values()
    elif missing := recording.unknown():
        outcome.notes.append(f"transitions: {missing}")
        return outcome
    else:
        learner = recording.rebuilt
    add_transitions(outcome, session, learner.rows(), _PACKAGES)
    return outcome


class _Recording:
    """The part of a session that concerns learners.

    Attributes:
        hellos: the first Hello of each source, by name.
        statuses: for each learner, its last Status whose counter ``steps`` is above 0.
    """

    def __init__(self, session: Session) -> None:
        self.config: Config = session.config()
        self.hellos: dict[str, Hello] = {}
        self.steps: list[tuple[Entry, Step]] = []
        self.statuses: dict[Key, tuple[Entry, Status]] = {}
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
                self.learners.add(entry.node)
        self._sources = {step.source for _, step in self.steps}
        self._undelivered = any(s.counters.get("undelivered") for e, s in statuses if e.publisher in self._sources)
        for entry, status in statuses:
            if entry.node in self.learners and status.counters.get("steps"):
                self.statuses[entry.node] = entry, status

    @property
    def rows(self) -> int:
        """An upper bound of the number of transitions in the Steps."""
        return sum(len(step.phase) for _, step in self.steps)

    def unknown(self) -> str:
        """A text that names the sources without a recorded Hello; empty if each source has a recorded Hello."""
        missing = ", ".join(sorted(self._sources - self.hellos.keys()))
        return f"the recording has no Hello of {missing}, so the robot is unknown" if missing else ""

    def not_counted(self) -> str | None:
        """The reason why rebuilt turns cannot reproduce the counters of a learner; None if they can."""
        if missing := self.unknown():
            return missing
        if len(self._sources) != 1:
            return "the recording does not show in which order the learner received the Steps of several sources"
        if self._undelivered:
            return "some Steps did not reach the learner"
        expected: dict[Key, int] = {}
        for entry, step in self.steps:
            source = step.source, step.incarnation
            if entry.sequence != expected.get(source, 0):
                return f"Steps of {step.source} are missing before Step {step.sequence}"
            expected[source] = entry.sequence + 1
        return None

    @functools.cached_property
    def rebuilt(self) -> _Learner:
        """A learner that took the Steps in recorded order, one Step in each turn.

        The recording must have a Hello of each source.
        """
        life = Life("learner", 0, Start("learner", self.config.to_yaml(), {}))
        learner = _Learner(life, self.rows, "its turns are rebuilt")
        peers = {name: Peer("learner", name.encode(), hello, {}) for name, hello in self.hellos.items()}
        joined: dict[str, int] = {}
        for _, step in self.steps:
            peer = peers[step.source]
            if joined.get(step.source) != step.incarnation:
                joined[step.source] = step.incarnation
                learner.step([(peer, peer.hello)], 0.0)
            learner.step([(peer, step)], 0.0)
        return learner


class _Learner:
    """Feeds the same turns to two cores. One core repeats the recorded learning. The other only stores transitions.

    The storing core never reaches the end of the training, and never does an update. Its buffer holds all transitions.

    Args:
        rows: upper bound of the number of transitions.
        problem: the reason why replay cannot repeat the learner's computations; empty if it can.

    Attributes:
        core: the core that learns; None if there is a problem.
        counted: maps a number of Steps to the counters that the storing core had after this number of Steps.
    """

    def __init__(self, life: Life, rows: int, problem: str) -> None:
        self.life, self.problem = life, problem
        self.core: LearnerCore | None = None
        self.counted: dict[int, dict[str, int]] = {}
        if not problem:
            self.core = make_core(life.config, provenance=life.setting("provenance", dict))
            if isinstance(self.core.scheduler, FreeRunning):
                self.core.scheduler.equal_shares = "equal_shares" in life.start.settings
        self._storing = _storing(life.config, rows)

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        self._storing.step(inputs, now)
        counts = self._storing.counts()
        self.counted[counts.get("steps", 0)] = {name: counts[name] for name in ("steps", *_COUNTED) if name in counts}
        if self.core is None:
            return []
        scheduler = self.core.scheduler
        # The learner's saver, not its core, decides when to take a snapshot. The recorded Throttles show the decision.
        if any(throttle.save for throttle in self.life.recorded_in_turn(Throttle)):
            scheduler.request_snapshot()
        outputs = self.core.step(inputs, now)
        if scheduler.must_roll_back:
            raise SessionError(
                "a simulator was lost, and the recording does not contain the checkpoint to which the run returned"
            )
        if scheduler.snapshot_ready:
            scheduler.snapshot_saved()
        return outputs

    def rows(self) -> list[Transition]:
        """All transitions, in the order in which the core stored them."""
        spec = self._storing.spec
        if spec is None:
            return []
        edges = np.cumsum([spec.observation_size, spec.action_size, 1, 1])
        rows = self._storing.training.parts()["replay"].state()[0]["rows"]
        return [Transition(*np.split(row, edges)) for row in rows]

    def find_other_compilation(self) -> None:
        """Set ``problem`` if the recorded updates and the replayed updates were compiled in different ways.

        Then the results of the updates differ in some bits.
        """
        recorded = (message for _, message, _ in self.life.recorded[Weights.NAME])
        weights = [message for message in recorded if isinstance(message, Weights) and message.payload]
        if self.core is None or self.core.spec is None or not weights:
            return
        now = self.core.training.algorithm.compiled
        try:
            then = Bundle.decode(weights[0].payload).provenance.get("compiled", False)
        except BundleError:
            return  # the comparison of Weights reports the damage
        if then != now:
            self.problem = f"the learner's updates were {compiled_how(then)}; replay's updates are {compiled_how(now)}"


def _storing(config: Config, rows: int) -> LearnerCore:
    learner = replace(
        config.learner,
        algorithm=LearnerConfig().algorithm,  # the default algorithm has a replay buffer
        learning_starts=_NEVER - 1,
        buffer_size=max(2, rows),
        replay_storage="memory",
        learn_from_operator=True,  # all transitions are in one buffer
        operator_share=0.0,
        batch_size=1,
        device="cpu",
        precision="fp32",
        compile=False,
        recordings=(),
        offline_updates=0,
    )
    network = NetworkConfig(hidden=(1,))
    return make_core(replace(config, timing="free", total_steps=_NEVER, learner=learner, network=network))


def _not_learned(session: Session, life: Life) -> str:
    """The reason why replay cannot repeat the learner's computations; empty if it can."""
    learner = life.config.learner
    if not life.setting("new", bool):
        return _CONTINUED
    if learner.recordings:
        return "the learner began with transitions of other recordings"
    if learner.start_from:
        return "the learner began with the actor of another policy"
    if learner.device == "cuda" or compute.device(learner.device).type != "cpu":
        return "they were computed on a GPU, or replay would compute them on a GPU"
    if other := machines.difference(session.metadata, _PACKAGES):
        return f"they are equal only on the same kind of machine: {other}"
    return ""


def _as_recorded(part: Replayed) -> Replayed:
    """Remove the payload of each replayed policy whose payload the recording leaves out. Return the new part.

    Then replay compares only the SHA-256 of the policy.
    """
    left_out = {message.version for _, message in part.expected if isinstance(message, Weights) and not message.payload}
    got, where = [], dict(part.where)
    for message in part.got:
        if isinstance(message, Weights) and message.version in left_out:
            place = where.get(id(message), "")
            message = replace(message, payload=b"")
            where[id(message)] = place
        got.append(message)
    return dataclasses.replace(part, got=got, where=where)


def _compare_counters(
    recording: _Recording, key: Key, life: Life | None, learner: _Learner | None, alone: bool, outcome: Outcome
) -> None:
    """Compare the counters of a learner's last Status. If this is impossible, note the reason."""
    what = "the learner's counters" if alone else f"counters of {key[0]} ({key[1]})"
    status = recording.statuses.get(key)
    counted: dict[int, dict[str, int]] = {}
    if status is None:
        why: str | None = "the recording has no Status in which this learner has counted Steps"
    elif life and not life.setting("new", bool):
        why = _CONTINUED
    elif life and learner:
        why = "the learner's last Status may count turns that replay did not reach" if life.stopped else None
        counted = learner.counted
    elif not alone:
        why = "the beginning of this learner is not recorded"
    elif not (why := recording.not_counted()):
        counted = recording.rebuilt.counted
    if why or status is None:
        outcome.notes.append(f"{what}: {why}")
        return
    entry, recorded = status
    others = {name: value for name, value in recorded.counters.items() if name not in _COUNTED and name != "steps"}
    replayed = replace(recorded, counters=others | counted.get(int(recorded.counters["steps"]), {"steps": 0}))
    outcome.parts.append(Replayed(Status.NAME, _PACKAGES, [(entry, recorded)], [replayed]))


def _compare_losses(session: Session, learner: _Learner, outcome: Outcome) -> None:
    assert learner.core
    attached = session.attachments.get(METRICS)
    if attached is None:
        outcome.notes.append(
            f"loss statistics: the recording has no {METRICS}; the recorder adds this file when the run ends"
        )
        return
    try:
        old = _losses([json.loads(line) for line in attached.data.decode().splitlines()])
    except (ValueError, KeyError, TypeError) as error:
        raise SessionError(f"{session.paths[0]}: {METRICS} is damaged ({type(error).__name__}: {error})") from None
    records = learner.core.reports.take()
    new = _losses(records)
    lines = "".join(json.dumps(record) + "\n" for record in records if record["kind"] == "train").encode()
    same = [item.figures for item in old] == [item.figures for item in new]
    reference = attached if same else Attachment(METRICS, "application/jsonl", lines)
    outcome.parts.append(Replayed(Losses.NAME, _PACKAGES, [(None, item) for item in old], new, reference))


def _losses(records: Sequence[Mapping[str, Any]]) -> list[Losses]:
    """The records of training, without times and rates."""
    return [
        Losses({name: value for name, value in record.items() if name not in _TIMED})
        for record in records
        if record["kind"] == "train"
    ]
