"""The simulator without I/O: Actions and Throttles in, Steps out.

When it goes on is its pacing's to say (:mod:`sims.pacing`): with ``Fast``, once the Action and the learner's leave are
there; with ``RealTime``, at every deadline, with or without them. Both begin with the learner's first Throttle, so that
nothing is lost while processes start.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence

from sims import saved
from sims.fleet import Fleet
from sims.pacing import Fast, RealTime
from td3_robot.messages import Action, ActionOrigin, NoiseKind, SimulatorState, Step, Throttle, Welcome
from td3_robot.specs import Float32
from td3_robot.topics import QUEUE_LENGTH
from td3_robot.transport.session import Input, Output

log = logging.getLogger(__name__)

_ASK_AGAIN = 1.0  # seconds without an Action after which a Step is sent to the policy server once more


class SimulatorCore:
    """Publishes a Step, waits for its Action as its pacing says, applies it or a substitute, publishes the next.

    Args:
        fleet: the robots.
        source, incarnation: identity of this process in its Steps.
        lockstep: wait for the Throttle that answers each Step, and name the weights it gives.
        pacing: when to go on, and what to apply where no Action came; lock-step needs ``Fast``.
    """

    def __init__(
        self,
        fleet: Fleet,
        source: str,
        incarnation: int,
        *,
        lockstep: bool,
        pacing: Fast | RealTime | None = None,
    ) -> None:
        self.fleet = fleet
        self.source = source
        self.incarnation = incarnation
        self.lockstep = lockstep
        self.pacing = pacing or Fast()
        self.transitions = 0
        self.counters: Counter[str] = Counter()
        self._step: Step | None = None
        self._action: Action | None = None
        self._answered = 0  # Steps the learner has dealt with
        self._allowed = 0
        self._version = 0
        self._throttled = False
        self._asked = 0.0
        self._kept: deque[Step] = deque()  # what the learner has not said it dealt with, and the one before that

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived and go one step further if that is possible; ``now`` in seconds."""
        outputs: list[Output] = []
        for origin, message in inputs:
            if isinstance(message, Action):
                self._answer(message)
            elif isinstance(message, Throttle) and message.incarnation == self.incarnation:
                outputs += self._throttle(message)
            elif isinstance(message, SimulatorState):
                outputs += self._go_back(message)
            elif isinstance(message, Welcome) and self._step:
                outputs += self._greet(str(origin))
        if self._throttled and self.pacing.may_go_on(now, ready=self._ready()):
            outputs += self._advance(now)
        elif self._step and self._action is None and now - self._asked > _ASK_AGAIN:
            self._asked = now
            self.counters["asked_again"] += 1
            outputs.append(("policy", self._step))
        return outputs

    @property
    def next_sequence(self) -> int:
        """Of the Step that comes next."""
        return self._step.sequence + 1 if self._step else 0

    def _throttle(self, throttle: Throttle) -> list[Output]:
        self._throttled = True
        self._allowed = max(self._allowed, throttle.transitions_allowed)
        if throttle.answers >= self._answered:
            self._answered, self._version = throttle.answers, throttle.weights_version
        while self._kept and self._kept[0].sequence < throttle.answers - 1:
            self._kept.popleft()
        if throttle.save and throttle.answers == self.next_sequence:
            return [("learner", self._state(saved.encode(self.fleet, self.transitions, self._step)))]
        return []

    def _go_back(self, state: SimulatorState) -> list[Output]:
        """Lock-step: be where a state was saved, and say so; then what was said of the Step there is said again."""
        if (state.incarnation, state.answers) != (self.incarnation, self.next_sequence):
            self.transitions, self._step, reasons = saved.restore(state.payload, self.fleet)
            self.incarnation, self._action = state.incarnation, None
            self._kept = deque([self._step] if self._step else [])
            self._answered = self._allowed = 0
            self._throttled = False
            self.counters["episodes_not_restored"] += len(reasons)
            if reasons:
                log.warning("not as before: %d robots begin a new episode; %s", len(reasons), reasons[0])
        outputs: list[Output] = [("learner", self._state(b""))]
        return outputs + [(link, self._step) for link in ("learner", "policy") if self._step]

    def _state(self, payload: bytes) -> SimulatorState:
        return SimulatorState(self.source, self.incarnation, self.next_sequence, payload)

    def _answer(self, action: Action) -> None:
        step = self._step
        if not step or (action.answers, action.incarnation) != (step.sequence, self.incarnation):
            self.counters["late_actions"] += 1
        elif self._action is None:
            self._action = action

    def _greet(self, link: str) -> list[Output]:
        """A server that knows nothing of before is told the Step that is waiting; the learner, all it may not have."""
        assert self._step
        if link == "learner":
            self._allowed = 0
            return [(link, step) for step in self._kept]
        return [(link, self._step)] if self._action is None else []

    def _ready(self) -> bool:
        """Whether the Action and the learner's leave for the next step are there."""
        if self.transitions >= self._allowed or len(self._kept) > QUEUE_LENGTH:
            return False
        if self._step is None:
            return True
        if self.lockstep and self._answered <= self._step.sequence:
            return False
        return self._action is not None

    def _advance(self, now: float) -> list[Output]:
        action, fleet = self._action, self.fleet
        sequence = self.next_sequence
        applied, origin = self._applied()
        stepped = fleet.step(applied)
        self.transitions += stepped
        if stepped and action is None:
            self.counters[f"actions_{origin.name.lower()}"] += 1
        if missed := self.pacing.stepped(now):
            self.counters["overruns"] += missed
        step = Step(
            source=self.source,
            incarnation=self.incarnation,
            sequence=sequence,
            transitions=self.transitions,
            stamp=int(now * 1e9),
            phase=fleet.phase.copy(),
            episode=fleet.episode.copy(),
            episode_step=fleet.episode_step.copy(),
            observation=fleet.observation.copy(),
            reward=fleet.reward.copy(),
            action=fleet.action.copy(),
            origin=int(origin if stepped else ActionOrigin.NONE),
            answered=action.answers if action else sequence,
            weights_version=action.weights_version if action else 0,
            noise_kind=action.noise_kind if action else int(NoiseKind.NONE),
            noise_seed=action.noise_seed if action else 0,
            needs_version=self._version if self.lockstep else 0,
            world=dict(fleet.world),
        )
        self._step, self._action, self._asked = step, None, now
        self._kept.append(step)
        if len(self._kept) > QUEUE_LENGTH + 1:  # a robot in real time, which goes on for as long as the learner is away
            self._kept.popleft()
            self.counters["forgotten"] += 1
        self.counters["steps"] += 1
        return [("policy", step), ("learner", step)]

    def _applied(self) -> tuple[Float32, ActionOrigin]:
        """The action for the next control period, float32[N, A], and where it comes from."""
        if self._action:
            return self._action.action, ActionOrigin.POLICY
        return self.pacing.substitute(self.fleet.action)
