"""A source without I/O, simulator or robot: Actions, Throttles and Commands in, Steps out.

When it goes on is its pacing's to say (:mod:`td3_robot.driver.pacing`): with ``Fast``, once the Action and the
learner's leave are there; with ``RealTime``, at every deadline, with or without them. What may move it is its guard's
to say (:mod:`td3_robot.driver.guard`). Simulators begin with the learner's first Throttle, so that nothing is lost
while processes start; a robot waits for no learner.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

from td3_robot.config.schema import Config
from td3_robot.core_types import Input, Output
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import Fast, RealTime
from td3_robot.messages import (
    NO_NOISE,
    Action,
    ActionOrigin,
    Command,
    Heartbeat,
    Message,
    Phase,
    Step,
    Throttle,
    UInt8,
    UInt32,
    UInt64,
    Welcome,
)
from td3_robot.safety.commands import carry_out
from td3_robot.specs import Float32, RobotSpec
from td3_robot.topics import QUEUE_LENGTH

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {"policy": (Action, Command), "learner": (Throttle,)}
"""What a source takes from the server of each link."""
HOLD_OFF = 0.5
"""Seconds of silence of a policy server that has not welcomed us after which we tell the robots the safe action."""
_ASK_AGAIN = 1.0  # seconds without an Action after which a Step is sent to the policy server once more


class Body(Protocol):
    """The robots of a source: simulated ones, or a real one.

    Attributes:
        spec: what each of them is.
        phase: uint8[N]; episode: uint64[N]; episode_step: uint32[N]; observation: float32[N, O].
        reward: float32[N], 0 where FIRST; action: float32[N, A], as applied; where FIRST what they are told as the
            episode begins, 0 for simulated ones.
        world: of the robots at FIRST whose world was drawn: their index, as text, to what was drawn.
        commanded: float32[N, A], what they were told last.
        problem: why they cannot go on, empty if they can; stop: why everything has to stop, empty if it has not.
    """

    spec: RobotSpec
    phase: UInt8
    episode: UInt64
    episode_step: UInt32
    observation: Float32
    reward: Float32
    action: Float32
    world: dict[str, dict[str, float]]
    stop: str

    @property
    def problem(self) -> str: ...

    @property
    def commanded(self) -> Float32: ...

    def command(self, action: Float32) -> None:
        """Apply ``action``, float32[N, A], from now on; a simulator waits until it is stepped."""

    def step(self, action: Float32) -> int | None:
        """End a control period in which ``action``, float32[N, A], was applied; reset whose episode is over.

        Returns:
            How many robots were in an episode: the transitions this makes. None: there is nothing to publish.
        """


def make(body: Body, config: Config, name: str, incarnation: int, *, learner: bool) -> SourceCore:
    """The core of a robot's driver of this name with this configuration; ``learner``: whether it has one to tell."""
    return SourceCore(
        body,
        name,
        incarnation,
        lockstep=False,
        pacing=RealTime(body.spec, "hold"),  # what a robot was told holds until it is told something else
        guard=Guard(body.spec, name, config.safety, autostart=config.policy.autostart),
        learner=learner,
        waits=False,
        holds_off=True,
    )


class SourceCore:
    """Publishes a Step, waits for its Action as its pacing says, applies it or a substitute, publishes the next.

    Args:
        body: the robots.
        source, incarnation: identity of this process in its Steps.
        lockstep: wait for the Throttle that answers each Step, and name the weights it gives.
        pacing: when to go on, and what to apply where no Action came; lock-step needs ``Fast``.
        guard: what may move the robots; by default anything may.
        learner: whether there is a learner to publish to.
        waits: do not begin before the learner's first word.
        holds_off: leave the robots alone until the policy server has welcomed us, which it does not while another one
            of our name moves them. While it says nothing at all, somebody has to make them safe: then they are told
            the safe action, once every HOLD_OFF, and nothing else.

    Attributes:
        in_charge: whether the robots are ours to make safe.
    """

    def __init__(
        self,
        body: Body,
        source: str,
        incarnation: int,
        *,
        lockstep: bool,
        pacing: Fast | RealTime | None = None,
        guard: Guard | None = None,
        learner: bool = True,
        waits: bool = True,
        holds_off: bool = False,
    ) -> None:
        self.body = body
        self.source = source
        self.incarnation = incarnation
        self.lockstep = lockstep
        self.pacing = pacing or Fast()
        self.guard = guard or Guard(body.spec, source)
        self.transitions = 0
        self.counters: Counter[str] = Counter()
        self._links = ("policy", "learner") if learner else ("policy",)
        self._step: Step | None = None
        self._action: Action | None = None
        self._use: Float32 | None = None  # what of that Action the guard lets through
        self._answered = 0  # Steps the learner has dealt with
        self._allowed = 0
        self._version = 0
        self._throttled = not (learner and waits)
        self._asked = 0.0
        self._greeted = False
        self._holds_off = holds_off
        self.in_charge = not holds_off
        self._silent_since: float | None = None  # the policy server; the safe action begins another silence
        self._is_safe = False
        self._told_safe = False  # in this turn
        self._silent = False  # the newest observation was refused: there is nothing to answer
        self._own_stop: Command | None = None  # the robot's newest; one of an operator is the server's to repeat
        self._stops: list[Command] = []  # of the robot in this turn, for the policy server
        self._kept: deque[Step] = deque()  # what the learner has not said it dealt with, and the one before that

    @property
    def due(self) -> float | None:
        """When a turn is needed even if nothing arrives, in seconds."""
        if self._holds_off and not self._greeted:
            return None if self._silent_since is None else self._silent_since + HOLD_OFF
        return min((due for due in (self.pacing.deadline, self.guard.due) if due is not None), default=None)

    @property
    def next_sequence(self) -> int:
        """Of the Step that comes next."""
        return self._step.sequence + 1 if self._step else 0

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived and go one step further if that is possible; ``now`` in seconds."""
        outputs: list[Output] = []
        self._told_safe = False
        self.guard.look(now)
        for origin, message in inputs:
            if isinstance(message, Action):
                self._answer(message, now)
            elif isinstance(message, Throttle) and message.incarnation == self.incarnation:
                outputs += self._throttle(message)
            elif isinstance(message, Command):
                guard = self.guard
                reply = carry_out(message, "the policy server", guard.verbs, guard.lifecycle, self._detail, now)
                outputs.append(("policy", reply))
                if not guard.lifecycle.stopped:
                    self._own_stop = None  # the next stop may be an operator's, of this robot alone
            elif isinstance(message, Welcome):
                if origin == "policy":
                    self._greeted = self.in_charge = True
                    outputs += [("policy", self._own_stop)] if self._own_stop else []  # it may never have heard of it
                if self._step and origin in self._links:
                    outputs += self._greet(str(origin))
            elif isinstance(message, Heartbeat) and self._holds_off and origin == "policy":
                # Another one has our name, and the server looks whether it is there. Even if the robot was ours before:
                # while the server did not hear us it welcomed that one.
                self._silent_since, self.in_charge, self._greeted, self._is_safe = now, False, False, False
            else:
                outputs += self._take(message)
        if self._holds_off and not self._greeted:
            self._hold_off(now)
        else:
            outputs += self._go_on(now)
        outputs += [("policy", stop) for stop in self._stops]
        self._stops.clear()
        if self._greeted:
            outputs += [("policy", change) for change in self.guard.lifecycle.changes()]
        return outputs

    def _hold_off(self, now: float) -> None:
        """Nobody has said yet whose the robots are; one who may not answer ever must not leave them moving."""
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now < self._silent_since + HOLD_OFF:
            return
        if not self.in_charge:
            log.warning(
                "%s: not a word from the policy server for %g s: the safe action, and nothing else until it is there",
                self.source,
                HOLD_OFF,
            )
        self._silent_since, self.in_charge = now, True
        self.make_safe()
        self._listen_to_body(now)

    def _go_on(self, now: float) -> list[Output]:
        self._make_safe()
        if self._throttled and self.pacing.may_go_on(now, ready=self._ready()):
            return self._advance(now)
        if self.pacing.deadline is None and self._step and not self._action and now - self._asked > _ASK_AGAIN:
            self._asked = now
            self.counters["asked_again"] += 1
            return [("policy", self._step)]
        return []

    def _throttle(self, throttle: Throttle) -> list[Output]:
        self._throttled = True
        self._allowed = max(self._allowed, throttle.transitions_allowed)
        if throttle.answers >= self._answered:
            self._answered, self._version = throttle.answers, throttle.weights_version
        while self._kept and self._kept[0].sequence < throttle.answers - 1:
            self._kept.popleft()
        return []

    def _take(self, message: Message) -> list[Output]:
        """What else arrived: for sources that understand more than every source does."""
        del message
        return []

    def make_safe(self) -> None:
        """Apply the safe action now."""
        self._told_safe = True
        self._tell(self.guard.safe_action(self.body.commanded))

    def _tell(self, action: Float32) -> None:
        """Have ``action``, float32[N, A], applied from now on."""
        self.body.command(action)

    def _make_safe(self) -> None:
        """Apply the safe action at once when it has become due; from then on it is said once every period."""
        if self.guard.safe and not self._is_safe:
            self.make_safe()
        self._is_safe = self.guard.safe

    def _detail(self) -> dict[str, Any]:
        return {**self.guard.detail(), "transitions": self.transitions, "counters": dict(self.counters)}

    def _answer(self, action: Action, now: float) -> None:
        step = self._step
        if not step or (action.answers, action.incarnation) != (step.sequence, self.incarnation):
            self.counters["late_actions"] += 1
        elif self._action is None or action.weights_version == 0:  # the server's safe action comes second, and wins
            use = self.guard.accept(action, now)
            if use is not None:
                self._action, self._use = action, use
                if (step.phase < Phase.TERMINATED).any():
                    self._tell(use)
                    self._listen_to_body(now)

    def _greet(self, link: str) -> list[Output]:
        """A server that knows nothing of before is told the Step that is waiting; the learner, all it may not have."""
        assert self._step
        if link == "learner":
            self._allowed = 0
            again = list(self._kept)
        else:
            again = [self._step] if self._action is None and not self._silent else []
        if again:
            self.counters["told_again"] += len(again)
        return [(link, step) for step in again]

    def _ready(self) -> bool:
        """Whether the Action and the learner's leave for the next step are there, and the source is active."""
        if self.transitions >= self._allowed or not self.guard.lifecycle.active or len(self._kept) > QUEUE_LENGTH:
            return False
        if self._step is None:
            return True
        if self.lockstep and self._answered <= self._step.sequence:
            return False
        return self._action is not None

    def _advance(self, now: float) -> list[Output]:
        body, sequence = self.body, self.next_sequence
        applied, origin = self._applied()
        action = self._action if origin is ActionOrigin.POLICY else None
        if not self._told_safe and (body.phase >= Phase.TERMINATED).all():
            self.make_safe()  # a robot is not reset under the policy's last action
        stepped = body.step(applied)
        if missed := self.pacing.stepped(now):
            self.counters["overruns"] += missed
        self._listen_to_body(now)
        if self.guard.safe and not self._told_safe:
            self.make_safe()
        self._silent = stepped is None
        if stepped is None:
            self.counters["observations_refused"] += 1
            self._action = self._use = None
            return []
        self.transitions += stepped
        if stepped and action is None:
            self.counters[f"actions_{origin.name.lower()}"] += 1
        if (body.phase == Phase.FIRST).all():
            self.guard.begin()
        step = Step(
            source=self.source,
            incarnation=self.incarnation,
            sequence=sequence,
            transitions=self.transitions,
            stamp=int(now * 1e9),
            phase=body.phase.copy(),
            episode=body.episode.copy(),
            episode_step=body.episode_step.copy(),
            observation=body.observation.copy(),
            reward=body.reward.copy(),
            action=body.action.copy(),
            origin=int(origin if stepped else ActionOrigin.NONE),
            answered=action.answers if action else sequence,
            weights_version=action.weights_version if action else 0,
            noise_kind=action.noise_kind if action else NO_NOISE,
            noise_seed=action.noise_seed if action else 0,
            needs_version=self._version if self.lockstep else 0,
            world=dict(body.world),
        )
        self._step, self._action, self._use, self._asked = step, None, None, now
        self.counters["steps"] += 1
        if "learner" in self._links:
            self._keep(step)
        return [(link, step) for link in self._links]

    def _keep(self, step: Step) -> None:
        self._kept.append(step)
        if len(self._kept) > QUEUE_LENGTH + 1:  # a robot in real time, which goes on for as long as the learner is away
            self._kept.popleft()
            self.counters["forgotten"] += 1

    def _listen_to_body(self, now: float) -> None:
        """What the robots have to say for themselves: an emergency stop holds for everybody."""
        if self.body.stop:
            reason, self.body.stop = self.body.stop, ""
            self.guard.lifecycle.stop(reason, now)
            self._own_stop = Command(0, "", "estop", f"{self.source}: {reason}"[:2048], 0, "", b"")
            self._stops.append(self._own_stop)
        if self.body.problem:
            self.guard.trouble(self.body.problem, now)

    def _applied(self) -> tuple[Float32, ActionOrigin]:
        """The action for this control period, float32[N, A], and where it comes from."""
        if self.guard.safe:
            return self.guard.safe_action(self.body.commanded), ActionOrigin.SAFE
        if self._action and self._use is not None:
            return self._use, ActionOrigin.POLICY if self._action.weights_version else ActionOrigin.SAFE
        return self.pacing.substitute(self.body.commanded)
