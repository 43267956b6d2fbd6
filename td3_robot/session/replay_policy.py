"""The policy server's core, driven by recorded Steps and Weights: the same Actions?"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict

import msgspec

from td3_robot.bundle import Bundle
from td3_robot.config import Config
from td3_robot.messages import Action, NoiseKind, Step, Weights
from td3_robot.policy.core import PolicyCore
from td3_robot.safety import SafetyConfig
from td3_robot.session.entries import Entry
from td3_robot.session.outcome import Outcome, Replayed
from td3_robot.session.reader import Session
from td3_robot.transport import session as handshake
from td3_robot.transport.session import Peer

StepKey = tuple[str, int, int]


_HELD = 8  # versions whose networks are kept at hand


def _without_deadlines(settings: SafetyConfig) -> SafetyConfig:
    """What a deadline made of a Step depends on when it came, which the recorder does not know to the microsecond."""
    return msgspec.structs.replace(settings, observation_deadline_ms=None, frozen_ms=None)


class PolicyReplay:
    """Gives each recorded Action's Step to the core of its server, which holds the weights it held then.

    What the recording says is taken for input: the Step, the weights, whether there was noise. What a server did not
    answer (it keeps only the latest Step) it is not asked again.
    """

    def __init__(self, config: Config) -> None:
        self.got: list[Action] = []
        self.expected: list[tuple[Entry, Action]] = []
        self.safe = 0  # Actions that no policy computed
        self.unanswerable: Counter[str] = Counter()
        self._seed = config.seed
        self._safety = _without_deadlines(config.safety)
        self._cores: OrderedDict[int, PolicyCore] = OrderedDict()  # by version
        self._peers: dict[tuple[str, int], Peer] = {}
        self._steps: dict[StepKey, Step] = {}
        self._weights: dict[int, Weights] = {}
        self._waiting: list[tuple[Entry, Action]] = []

    def take(self, entry: Entry, message: object) -> None:
        """The next message of the recording."""
        if isinstance(message, Weights):
            self._weights[message.version] = message
        elif isinstance(message, Step):
            self._steps[message.source, message.incarnation, message.sequence] = message
        elif isinstance(message, Action) and not message.weights_version:
            self.safe += 1
        elif isinstance(message, Action):
            self._waiting.append((entry, message))
        # Links are recorded side by side: a Step may come a little after its Action.
        while self._waiting and self._known(self._waiting[0][1]):
            self._act(*self._waiting.pop(0))

    def finish(self) -> None:
        """Deal with Actions that have waited in vain for their Step or weights, and with those behind them."""
        for entry, action in self._waiting:
            if self._known(action):
                self._act(entry, action)
            else:
                self.unanswerable["Step" if self._key(action) not in self._steps else "weights"] += 1

    def _known(self, action: Action) -> bool:
        return self._key(action) in self._steps and action.weights_version in self._weights

    def _core(self, version: int) -> PolicyCore:
        """One that serves this version and nothing else: which one a server served may have gone up or back."""
        core = self._cores.get(version)
        if core is None:
            weights = self._weights[version]
            bundle = Bundle.verified(weights.payload, weights.sha256, f"recorded weights version {version}")
            core = self._cores[version] = PolicyCore(self._seed, safety=self._safety)
            core.load(version, dataclasses.replace(bundle, safety=_without_deadlines(bundle.safety)))
            if len(self._cores) > _HELD:
                self._cores.popitem(last=False)
        self._cores.move_to_end(version)
        return core

    @staticmethod
    def _key(action: Action) -> StepKey:
        return action.source, action.incarnation, action.answers

    def _act(self, entry: Entry, action: Action) -> None:
        core = self._core(action.weights_version)
        now = entry.published * 1e-9
        core.exploring = action.noise_kind != NoiseKind.NONE
        step = self._steps[self._key(action)]
        source = step.source, step.incarnation
        if source not in self._peers:
            robot = handshake.hello("simulator", step.source, client=0, incarnation=step.incarnation)
            self._peers[source] = Peer("policy", step.source.encode(), robot, {})
        outputs = core.step([(self._peers[source], step)], now)
        self.got += [message for _, message in outputs if isinstance(message, Action)]
        self.expected.append((entry, action))


def replay(session: Session) -> Outcome:
    """Replay every Action of a session.

    Raises:
        SessionError: the recording is damaged or holds no configuration.
    """
    driver = PolicyReplay(session.config())
    for entry, message in session.messages((Step.NAME, Weights.NAME, Action.NAME)):
        driver.take(entry, message)
    driver.finish()
    outcome = Outcome([Replayed(Action.NAME, ("numpy",), driver.expected, driver.got)] if driver.expected else [])
    outcome.notes += [f"{n} Actions whose {what} is not recorded" for what, n in driver.unanswerable.items()]
    if driver.safe:
        outcome.notes.append(f"{driver.safe} safe actions: when they are due depends on states and deadlines")
    if not driver.expected and not driver.unanswerable:
        outcome.notes.append("there are no Actions in it")
    return outcome
