"""The policy server's core, driven by what its node was told: the same Actions, states, Replies and Commands?"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Mapping

import msgspec

from td3_robot.bundle import Bundle
from td3_robot.config.schema import Config
from td3_robot.core_types import Peer
from td3_robot.errors import SessionError
from td3_robot.messages import NO_NOISE, Action, Command, InForce, LifecycleChange, Reply, Start, Step, Weights
from td3_robot.policy import core as policy_core
from td3_robot.policy.core import PolicyCore
from td3_robot.recording.boundary import PolicyObserver, RecordedCore
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.replay import lives
from td3_robot.replay.lives import Life, Memory
from td3_robot.replay.outcome import Outcome, Replayed
from td3_robot.safety import state as safety_state
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.transport import link as handshake

StepKey = tuple[str, int, int]

SAID = (Action.NAME, LifecycleChange.NAME, Reply.NAME, Command.NAME, InForce.NAME)
"""What a policy server's core says, the Commands that it took, and what it would keep over a restart."""
_PACKAGES = ("numpy",)
_HELD = 8  # versions whose networks are kept at hand


def _without_deadlines(settings: SafetyConfig) -> SafetyConfig:
    """What a deadline made of a Step depends on when it came, which the recorder does not know to the microsecond."""
    return msgspec.structs.replace(settings, observation_deadline_ms=None, frozen_ms=None)


class SingleActions:
    """For servers of which the recording lacks a turn: gives each Action's Step to a core with its weights.

    What the recording says is taken for input: the Step, the weights, whether there was noise. What a server did not
    answer (it keeps only the latest Step) it is not asked again. States and deadlines are left out.

    Args:
        server: its name and incarnation.
        config: its configuration.
    """

    def __init__(self, server: tuple[str, int], config: Config) -> None:
        self.got: list[Action] = []
        self.expected: list[tuple[Entry, Action]] = []
        self.safe = 0  # Actions that no policy computed
        self.unanswerable: Counter[str] = Counter()
        self._server, self._seed = server, config.seed
        self._safety = _without_deadlines(config.safety)
        self._cores: OrderedDict[int, PolicyCore] = OrderedDict()  # by version
        self._peers: dict[tuple[str, int], Peer] = {}
        self._steps: dict[StepKey, Step] = {}
        self._weights: dict[int, Weights] = {}
        self._chosen: set[int] = set()  # versions of policies that a person gave it
        self._waiting: list[tuple[Entry, Action]] = []

    def take(self, entry: Entry, message: object) -> None:
        """The next message of the recording."""
        if isinstance(message, Weights):
            self._weights[message.version] = message
            if (entry.publisher, entry.incarnation) == self._server:  # it offers those, and no others
                self._chosen.add(message.version)
        elif isinstance(message, Step):
            self._steps[message.source, message.incarnation, message.sequence] = message
        elif isinstance(message, Action) and not message.weights_version:
            self.safe += 1
        elif isinstance(message, Action):
            self._waiting.append((entry, message))
        # Links are recorded side by side: a Step may come a little after its Action.
        while self._waiting and self._known(self._waiting[0][1]):
            self._act(*self._waiting.pop(0))

    def finish(self) -> Outcome:
        """Deal with Actions that have waited in vain for their Step or weights, and with those behind them."""
        for entry, action in self._waiting:
            if self._known(action):
                self._act(entry, action)
            else:
                self.unanswerable["Step" if self._key(action) not in self._steps else "weights"] += 1
        outcome = Outcome([Replayed(Action.NAME, _PACKAGES, self.expected, self.got)] if self.expected else [])
        outcome.notes += [f"{n} Actions whose {what} is not recorded" for what, n in self.unanswerable.items()]
        if self.safe:
            outcome.notes.append(f"{self.safe} safe actions: when they are due depends on states and deadlines")
        return outcome

    def _known(self, action: Action) -> bool:
        return self._key(action) in self._steps and action.weights_version in self._weights

    def _core(self, version: int) -> PolicyCore:
        """One that serves this version, under the limits of the policy that a person chose before it, and nothing else:
        which one a server served may have gone up or back."""
        core = self._cores.get(version)
        if core is None:
            core = self._cores[version] = PolicyCore(self._seed, safety=self._safety)
            chosen = max((other for other in self._chosen if other <= version), default=version)
            for each in sorted({chosen, version}):
                core.store.add(each, self._bundle(each), loaded=each == chosen)
            if len(self._cores) > _HELD:
                self._cores.popitem(last=False)
        self._cores.move_to_end(version)
        return core

    def _bundle(self, version: int) -> Bundle:
        weights = self._weights[version]
        bundle = Bundle.verified(weights.payload, weights.sha256, f"recorded weights version {version}")
        return dataclasses.replace(bundle, safety=_without_deadlines(bundle.safety))

    @staticmethod
    def _key(action: Action) -> StepKey:
        return action.source, action.incarnation, action.answers

    def _act(self, entry: Entry, action: Action) -> None:
        core = self._core(action.weights_version)
        now = entry.published * 1e-9
        core.exploring = action.noise_kind != NO_NOISE
        step = self._steps[self._key(action)]
        source = step.source, step.incarnation
        if source not in self._peers:
            robot = handshake.hello("simulator", step.source, client=0, incarnation=step.incarnation)
            self._peers[source] = Peer("policy", step.source.encode(), robot, {})
        outputs = core.step([(self._peers[source], step)], now)
        self.got += [message for _, message in outputs if isinstance(message, Action)]
        self.expected.append((entry, action))


def replay(session: Session) -> Outcome:
    """Replay every policy server of a session; what its turns do not reach, Action by Action.

    Raises:
        SessionError: the recording is damaged, or holds no configuration.
    """
    found, notes = lives.whole(session, "policy")
    for _ in lives.relive(session, found, SAID, _make):
        pass
    outcome = lives.outcome(found.values(), SAID, _PACKAGES)
    outcome.notes += notes
    servers = {(name, incarnation) for name, incarnation, topic in session.counts if topic == Action.NAME}
    compared = {key: life.last(Action.NAME) for key, life in found.items() if life.stopped}
    if after := dict.fromkeys(servers - found.keys(), -1) | compared:
        others = _one_by_one(session, after)
        outcome.parts += others.parts
        outcome.notes += others.notes
    elif not outcome.turns:
        outcome.notes.append("there are no Actions in it")
    return outcome


def _one_by_one(session: Session, after: Mapping[tuple[str, int], int]) -> Outcome:
    """The Actions of these servers, each after the one of this sequence."""
    ones = {}
    for key in after:
        start = session.decode(session.starts[key]) if key in session.starts else None
        config = Life(*key, start).config if isinstance(start, Start) else session.config()
        ones[key] = SingleActions(key, config)
    for entry, message in session.messages((Step.NAME, Weights.NAME, Action.NAME)):
        key = entry.publisher, entry.incarnation
        if not isinstance(message, Action):
            for single in ones.values():
                single.take(entry, message)
        elif key in ones and entry.sequence > after[key]:
            ones[key].take(entry, message)
    outcome = Outcome()
    for single in ones.values():
        found = single.finish()
        outcome.parts += found.parts
        outcome.notes += found.notes
    return outcome


def _make(life: Life, memory: Memory) -> RecordedCore | None:
    exploring, frozen = (life.setting(name, bool) for name in ("exploring", "frozen"))
    weights = None
    if "version" in life.start.settings:
        name = Weights.NAME, life.setting("version", int), life.setting("sha256", str)
        if name not in memory:  # asked for each message until it is there: so this comes first
            return None
        weights = memory[name]
    core = policy_core.make(life.config, life.name, exploring=exploring, frozen=frozen)
    if weights:
        assert isinstance(weights, Weights)
        label = f"recorded weights version {weights.version}"
        core.load(weights.version, Bundle.verified(weights.payload, weights.sha256, label))
    if "latches" in life.start.settings:
        core.resume(_safety_state(life), life.setting("resumed", float))
    return RecordedCore(core, life, PolicyObserver(core))


def _safety_state(life: Life) -> SafetyState:
    try:
        return safety_state.read(life.setting("latches", dict))
    except msgspec.ValidationError as error:
        raise SessionError(f"start of {life}: latches: {error}") from None
