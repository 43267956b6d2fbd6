"""Replays the policy server's core. Replay must produce the recorded messages of the topics in TOPICS."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping

import msgspec

from td3_robot.bundle import Bundle
from td3_robot.core_types import Peer
from td3_robot.errors import SessionError
from td3_robot.messages import (
    NO_NOISE,
    Action,
    Command,
    Latches,
    LifecycleChange,
    Message,
    Reply,
    Start,
    Step,
    Teleop,
    Weights,
)
from td3_robot.policy import core as policy_core
from td3_robot.policy import store
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.recording.boundary import PolicyObserver, RecordedCore
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.replay import lives
from td3_robot.replay.lives import Key, Life, Memory
from td3_robot.replay.outcome import Outcome, Replayed
from td3_robot.safety import state as safety_state
from td3_robot.safety.limits import SafetyConfig
from td3_robot.transport import link as handshake

TOPICS = (Action.NAME, LifecycleChange.NAME, Reply.NAME, Command.NAME, Teleop.NAME, Latches.NAME)
"""The topics that replay compares.

They hold the messages that the core sends, the safety states of the core, and the operators' messages that the server
records.
"""
_CORES = 8  # maximum number of cores in memory, one for each weights version
_NO_STEPS = "Actions: their Steps are not recorded"
_NO_WEIGHTS = "Actions: their weights are not recorded"
_SAFE = "safe actions: they depend on deadlines and on states that are not recorded"
_OPERATED = "Actions of operators: they depend on deadlines and on states that are not recorded"


def replay(session: Session) -> Outcome:
    """Replay every policy server of a session.

    If turns are lost, rebuild a turn for each Action after the last compared Action.
    """
    found, notes = lives.replay(session, "policy", TOPICS, _make)
    outcome = lives.outcome(found.values(), TOPICS, notes)
    servers = {(name, incarnation) for name, incarnation, topic in session.counts if topic == Action.NAME}
    compared = {key: life.last(Action.NAME) for key, life in found.items() if life.stopped}
    if after := dict.fromkeys(sorted(servers - found.keys()), -1) | compared:
        _rebuild(session, after, outcome)
    elif not outcome.turns:
        outcome.notes.append("the recording has no Actions")
    return outcome


def _make(life: Life, memory: Memory) -> RecordedCore | None:
    exploring, frozen = (life.setting(name, bool) for name in ("exploring", "frozen"))
    tells_drivers = "tells_drivers" in life.start.settings and life.setting("tells_drivers", bool)
    weights = None
    if "version" in life.start.settings:
        weights = memory.get((Weights.NAME, life.setting("version", int), life.setting("sha256", str)))
        if weights is None:  # the caller reads more messages, and calls this function again
            return None
    tries = "tries_policies" in life.start.settings and life.setting("tries_policies", bool)
    core = policy_core.make(
        life.config,
        life.name,
        exploring=exploring,
        frozen=frozen,
        tells_drivers=tells_drivers,
        examine=store.examine if tries else store.read,
    )
    if weights:
        assert isinstance(weights, Weights)
        core.load(weights.version, _bundle(weights))
    if "latches" in life.start.settings:
        try:
            state = safety_state.read(life.setting("latches", dict))
        except msgspec.ValidationError as error:
            raise SessionError(f"start of {life}: latches: {error}") from None
        core.resume(state, life.setting("resumed", float))
    return RecordedCore(core, life, PolicyObserver(core))


def _bundle(weights: Weights) -> Bundle:
    return Bundle.verified(weights.payload, weights.sha256, f"recorded weights version {weights.version}")


def _rebuild(session: Session, after: Mapping[Key, int], outcome: Outcome) -> None:
    """Rebuild the turns after the last compared Action of each policy server. Add the new Actions to the outcome.

    Args:
        after: maps each server to the sequence number of the last Action that replay compared for this server. The
            number is -1 if replay compared no Action.
    """
    rebuilt: dict[Key, _LostTurns] = {}
    for key in after:
        start = session.decode(session.starts[key]) if key in session.starts else None
        if not isinstance(start, Start):
            start = Start("policy", session.config().to_yaml(), {})
        rebuilt[key] = _LostTurns(Life(*key, start))
    for entry, message in session.messages((Step.NAME, Weights.NAME, Action.NAME)):
        if not isinstance(message, Action):
            for each in rebuilt.values():
                each.add(entry, message)
        elif entry.node in rebuilt and entry.sequence > after[entry.node]:
            rebuilt[entry.node].add(entry, message)
    for each in rebuilt.values():
        each.finish(outcome)


class _LostTurns:
    """Rebuilds a turn for each Action of a life, see :mod:`td3_robot.replay.lives`.

    The input of the turn is the Step that the Action answers. The core has the weights that the Action names.

    Safe actions and the Actions of operators are not replayed, because they depend on states that are not recorded.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._config = life.config
        self._core = functools.lru_cache(_CORES)(self._make_core)
        self._left: Counter[str] = Counter()  # Actions that replay cannot rebuild
        self._peers: dict[Key, Peer] = {}
        self._steps: dict[tuple[str, int, int], Step] = {}
        self._weights: dict[int, Weights] = {}
        self._loaded: dict[int, Weights] = {}  # weights that a person loaded
        self._waiting: list[tuple[Entry, Action]] = []

    def add(self, entry: Entry, message: Message) -> None:
        """Add the next recorded Step or Weights, or the next Action of this server."""
        if isinstance(message, Weights):
            if not message.payload:  # the recording leaves this policy out
                return
            self._weights[message.version] = message
            # A server records only the weights that a person loaded.
            if entry.node == (self._life.name, self._life.incarnation):
                self._loaded[message.version] = message
        elif isinstance(message, Step):
            self._steps[message.source, message.incarnation, message.sequence] = message
        elif isinstance(message, Action) and message.operated:
            self._left[_OPERATED] += 1
        elif isinstance(message, Action) and message.weights_version:
            self._waiting.append((entry, message))
        else:
            self._left[_SAFE] += 1
        # Each node sends its messages in groups to the recorder, so a Step may be recorded after its Action.
        while self._waiting and not self._missing(self._waiting[0][1]):
            self._rebuild(*self._waiting.pop(0))

    def finish(self, outcome: Outcome) -> None:
        """Rebuild the remaining turns, and add the Actions to the outcome."""
        for entry, action in self._waiting:
            if missing := self._missing(action):
                self._left[missing] += 1
            else:
                self._rebuild(entry, action)
        if expected := [(entry, message) for entry, message, _ in self._life.recorded[Action.NAME]]:
            got = [message for message, _ in self._life.replayed[Action.NAME]]
            outcome.parts.append(Replayed(Action.NAME, self._life.packages, expected, got))
        outcome.notes += [f"{count} {what}" for what, count in self._left.items()]

    def _missing(self, action: Action) -> str:
        if (action.source, action.incarnation, action.answers) not in self._steps:
            return _NO_STEPS
        return "" if action.weights_version in self._weights else _NO_WEIGHTS

    def _rebuild(self, entry: Entry, action: Action) -> None:
        step = self._steps[action.source, action.incarnation, action.answers]
        source = step.source, step.incarnation
        if source not in self._peers:
            hello = handshake.hello("simulator", step.source, client=0, incarnation=step.incarnation)
            self._peers[source] = Peer("policy", step.source.encode(), hello, {})
        core = self._core(action.weights_version)
        core.answers.exploring = action.noise_kind != NO_NOISE
        self._life.add(entry, action)
        for to, message in core.step([(self._peers[source], step)], entry.published * 1e-9):
            if isinstance(message, Action):
                self._life.send(to, message)

    def _make_core(self, version: int) -> PolicyCore:
        """Make a core without deadlines for one version of the weights.

        A server can go back to an older version of the weights. If turns are not recorded, replay cannot know when the
        server went back. So each version has its own core. The safety limits of weights that a person loaded also apply
        to later versions.
        """
        core = PolicyCore(self._config.seed, safety=_without_deadlines(self._config.safety))
        floor = max((loaded for loaded in self._loaded if loaded <= version), default=version)
        for each in sorted({floor, version}):
            bundle = _bundle(self._loaded.get(each, self._weights[version]))
            bundle = dataclasses.replace(bundle, safety=_without_deadlines(bundle.safety))
            core.store.add(each, Actor(bundle), loaded=each == floor)
        return core


def _without_deadlines(settings: SafetyConfig) -> SafetyConfig:
    """Return the settings without deadlines, because it is unknown when the Step of a lost turn reached the server."""
    return msgspec.structs.replace(settings, observation_deadline_ms=None, frozen_ms=None)
