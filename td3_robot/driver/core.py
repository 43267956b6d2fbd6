"""The core of a source, without I/O. It takes Actions, Throttles and Commands, and returns Steps.

The core joins six parts, each with its own state:

=================================== ============================================================
:mod:`td3_robot.driver.contact`     whether the server's messages allow the source to move robots
:mod:`td3_robot.driver.guard`       limits, deadline, stops and faults that protect the robots
:mod:`td3_robot.driver.actuator`    applies actions and the safe action, and takes the robots' reports
:mod:`td3_robot.driver.pacing`      in real time: when to step, and what to apply without an Action
:mod:`td3_robot.driver.allowance`   how many Steps the learner allows
:mod:`td3_robot.driver.exchange`    the newest Step and its Action
=================================== ============================================================
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from td3_robot.config.schema import Config
from td3_robot.core_types import Input, Origin, Output
from td3_robot.driver.actuator import Actuator
from td3_robot.driver.allowance import Allowance
from td3_robot.driver.body import Body
from td3_robot.driver.contact import HOLD_OFF, Contact, ServerContact
from td3_robot.driver.exchange import Exchange, Progress
from td3_robot.driver.guard import Guard
from td3_robot.driver.pacing import RealTime
from td3_robot.messages import (
    NO_NOISE,
    Action,
    ActionOrigin,
    Command,
    Heartbeat,
    Message,
    Phase,
    Status,
    Step,
    Throttle,
    Welcome,
)
from td3_robot.safety.commands import carry_out
from td3_robot.specs import Float32

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {"policy": (Action, Command), "learner": (Throttle,)}
"""The messages that a source accepts from the server of each link."""


def make(body: Body, config: Config, name: str, incarnation: int, *, learner: bool) -> SourceCore:
    """Make the core of a robot's driver. ``learner``: whether there is a learner to publish to."""
    return SourceCore(
        body,
        name,
        incarnation,
        lockstep=False,
        pacing=RealTime(body.spec, "hold"),  # motors hold the last action anyway
        guard=Guard(body.spec, name, config.safety, autostart=config.policy.autostart),
        learner=learner,
        driver=True,
    )


class SourceCore:
    """Repeats a loop: publish a Step, wait for its Action as long as the pacing allows, apply it or a substitute.

    Args:
        lockstep: after each Step, wait for the Throttle that answers this Step. The Throttle names the version of the
            weights that must compute the Action for the next Step. Not allowed with a pacing.
        pacing: the deadlines of real time. None means full speed: the source steps as soon as it is ready.
        guard: the default guard has no settings and accepts every action within the specification.
        learner: whether there is a learner to publish to.
        driver: whether the source is a robot's driver. Until the policy server has welcomed a driver, the driver
            applies no action except the safe action. A simulator waits for the learner's first Throttle instead.
    """

    def __init__(
        self,
        body: Body,
        source: str,
        incarnation: int,
        *,
        lockstep: bool,
        pacing: RealTime | None = None,
        guard: Guard | None = None,
        learner: bool = True,
        driver: bool = False,
    ) -> None:
        self.body = body
        self.source = source
        self.incarnation = incarnation
        self.pacing = pacing
        self.guard = guard or Guard(body.spec, source)
        self.contact = ServerContact(rivals=driver)
        self.transitions = 0
        self.counters: Counter[str] = Counter()
        # Whether the policy server has answered a Step or sent an ``activate`` since its Welcome. If an emergency stop
        # is in force, the server sends the stop before its first answer. An ``activate`` is the decision of a person.
        self._cleared = False
        self._reset_began = 0.0  # if a reset is running: the time (s) of its first part
        self._links = ("policy", "learner") if learner else ("policy",)
        self._allowance = Allowance(waits=learner and not driver, lockstep=lockstep)
        self._exchange = Exchange()
        self._actuator = Actuator(body, self.guard, source)
        self._loop: dict[str, Any] = {}  # figures of the loop, from the node's Status

    @property
    def due(self) -> float | None:
        """The time (s) at which the core needs a turn even without new messages; None if no deadline is running."""
        if not self.contact.may_move:
            return self.contact.due
        # During a reset, no Action has a deadline.
        dues = (self.pacing.deadline if self.pacing else None, None if self.body.resetting else self.guard.due)
        return min((due for due in dues if due is not None), default=None)

    @property
    def newest(self) -> Step | None:
        """The newest Step; None before the first."""
        return self._exchange.step

    @property
    def next_sequence(self) -> int:
        """``sequence`` of the next Step."""
        step = self._exchange.step
        return step.sequence + 1 if step else 0

    def figures(self) -> dict[str, float]:
        """Return the number of transitions, and the figures of the pacing."""
        return {"transitions": self.transitions, **(self.pacing.figures() if self.pacing else {})}

    def rewind(self, incarnation: int, transitions: int, newest: Step | None) -> None:
        """Continue after an earlier Step: ``newest`` waits for its Action, the next Step waits for a Throttle."""
        self.incarnation, self.transitions = incarnation, transitions
        self._exchange.rewind(newest)
        self._allowance.rewind(newest)

    def make_safe(self) -> None:
        """Apply the safe action now."""
        self._actuator.make_safe()

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Process the inputs at time ``now`` (s), and make one Step if that is possible."""
        self._actuator.made_safe = False
        if not self.body.resetting:
            self.guard.look(now)
        outputs: list[Output] = []
        for origin, message in inputs:
            outputs += self.receive(origin, message, now)
            if self.body.resetting and not self._may_reset:
                self._interrupt_reset(now)
        if self.contact.may_move:
            outputs += self._resume(now)
        else:
            self._hold_off(now)
        outputs += [("policy", stop) for stop in self._actuator.take_stops()]
        if self.contact.welcomed:
            outputs += [("policy", change) for change in self.guard.lifecycle.changes()]
        return outputs

    # -- messages ------------------------------------------------------------------------------------------------

    def receive(self, origin: Origin, message: Message, now: float) -> list[Output]:
        """Process one message, and return the answers to it. A subclass extends this for more kinds of messages."""
        if isinstance(message, Action):
            self._answer(message, now)
        elif isinstance(message, Throttle) and message.incarnation == self.incarnation:
            self._allowance.throttle(message)
        elif isinstance(message, Status):
            self._loop = message.figures
        elif isinstance(message, Command):
            return self._command(message, now)
        elif isinstance(message, Welcome):
            return self._welcome(str(origin))
        elif isinstance(message, Heartbeat) and origin == "policy" and self.contact.rivals:
            self.contact.wait(now)
            self._actuator.lose_robots()
        return []

    def _answer(self, action: Action, now: float) -> None:
        step = self._exchange.step
        if not step or (action.answers, action.incarnation) != (step.sequence, self.incarnation):
            self.counters["late_actions"] += 1
        elif self._exchange.replaces(action):
            self._cleared = True
            use = self.guard.accept(action, now)
            if use is not None:
                self._exchange.accept(action, use)
                # If all episodes have ended, the resets come next.
                if self.body.prepared and (step.phase < Phase.TERMINATED).any():
                    self._actuator.apply(use)
                    self._actuator.listen(now)

    def _command(self, command: Command, now: float) -> list[Output]:
        guard = self.guard
        reply = carry_out(command, "the policy server", guard.verbs, guard.lifecycle, self._detail, now)
        if not guard.lifecycle.stopped:
            self._actuator.own_stop = None  # this stop has ended: do not send it after the next Welcome
        if command.verb == "activate" and guard.lifecycle.active:
            self._cleared = True
        return [("policy", reply)]

    def _welcome(self, link: str) -> list[Output]:
        """After the Welcome from the server of a link, repeat the messages that this server has possibly missed."""
        outputs: list[Output] = []
        if link == "policy":
            self.contact.state = Contact.WELCOMED
            self._cleared = False
            if self._actuator.own_stop:
                outputs.append((link, self._actuator.own_stop))
        return outputs + [(link, step) for step in self._steps_for(link)]

    def _steps_for(self, link: str) -> list[Step]:
        """The Steps to send again. For the policy server: the unanswered Step. For the learner: all kept Steps."""
        exchange = self._exchange
        if exchange.step is None or link not in self._links:
            return []
        if link == "learner":
            self._allowance.void()
            again = list(self._allowance.kept)
        else:
            again = [exchange.step] if exchange.state is Progress.WAITING else []
        if again:
            self.counters["told_again"] += len(again)
        return again

    def _detail(self) -> dict[str, Any]:
        detail = {**self.guard.detail(), "transitions": self.transitions, "counters": dict(self.counters)}
        return {**detail, "loop": self._loop} if self._loop else detail

    # -- turns ---------------------------------------------------------------------------------------------------

    def _hold_off(self, now: float) -> None:
        """While no server has welcomed this source, make the robots safe after every HOLD_OFF seconds of silence."""
        in_charge = self.contact.in_charge
        if not self.contact.falls_silent(now):
            return
        if not in_charge:
            log.warning(
                "%s: the policy server has been silent for %g s; until it answers, the robot gets only the safe action",
                self.source,
                HOLD_OFF,
            )
        self._actuator.make_safe()
        self._actuator.listen(now)

    def _resume(self, now: float) -> list[Output]:
        self._actuator.follow_guard()
        may_step = self.pacing.may_step(now) if self.pacing else self._ready()
        if self._allowance.begun and may_step:
            return self._advance(now)
        step = self._exchange.step
        if step and not self.pacing and self._exchange.ask_again(now):
            self.counters["asked_again"] += 1
            return [("policy", step)]
        return []

    def _ready(self) -> bool:
        """Whether a source at full speed may step now: it is active, waits for no Action, and has the allowance."""
        active = self.guard.lifecycle.active and self._exchange.may_step
        return active and self._allowance.permits(self.transitions, self._exchange.step)

    def _advance(self, now: float) -> list[Output]:
        """End the control period, and publish the resulting Step."""
        body, actuator = self.body, self._actuator
        applied, origin = self._applied()
        if not body.resetting:
            self._reset_began = now
            if not actuator.made_safe and (body.phase >= Phase.TERMINATED).all():
                actuator.make_safe()  # the policy's last action must not apply during the reset that may begin now
        stepped = body.step(applied, may_reset=self._may_reset)
        if self.pacing and (missed := self.pacing.stepped(now)):
            self.counters["overruns"] += missed
        actuator.listen(now)
        if body.resetting:
            self._await_reset(now)
            return []
        if self._safe and not actuator.made_safe:
            actuator.make_safe()
        if stepped is None:
            self.counters["observations_refused"] += 1
            self._exchange.lose_sight()
            return []
        return self._publish(stepped, origin, now)

    @property
    def _may_reset(self) -> bool:
        return self.guard.lifecycle.active and self._cleared

    def _await_reset(self, now: float) -> None:
        """Wait for the next part of a reset, but not longer than the guard allows."""
        if self.pacing:
            self.pacing.loop.pause()  # the loop rate must not count the time of a reset
        if self.guard.refuses_reset(now - self._reset_began, now):
            self._interrupt_reset(now)

    def _interrupt_reset(self, now: float) -> None:
        self._actuator.make_safe()  # this also ends the reset
        self._actuator.listen(now)
        self.guard.begin()  # the deadline from before the reset may have passed

    @property
    def _safe(self) -> bool:
        """Whether the robots must get the safe action: because of the guard, or in an episode without a reset."""
        return self.guard.safe or not self.body.prepared

    def _applied(self) -> tuple[Float32, ActionOrigin]:
        """The action for this control period, float32[N, A], and where it comes from."""
        if self._safe:
            return self.guard.envelope.safe_action(self.body.commanded), ActionOrigin.SAFE
        action, use = self._exchange.action, self._exchange.use
        if action and use is not None:
            return use, _origin(action)
        if self.pacing:
            return self.pacing.substitute(self.body.commanded)
        return self.body.commanded, ActionOrigin.NONE  # at full speed, only before the first Step

    def _publish(self, stepped: int, origin: ActionOrigin, now: float) -> list[Output]:
        """Publish a Step, which ends ``stepped`` transitions. ``origin`` tells where the applied action comes from."""
        body, sequence = self.body, self.next_sequence
        received = self._exchange.action
        action = received if origin in (ActionOrigin.POLICY, ActionOrigin.OPERATOR) else None
        self.transitions += stepped
        if stepped and action is None:
            self.counters[f"actions_{origin.name.lower()}"] += 1
        if (body.phase == Phase.FIRST).all():
            self.guard.begin()
            if self.pacing:
                self.pacing.loop.pause()  # the loop rate must not count the reset of this turn
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
            needs_version=self._allowance.needs_version,
            world=dict(body.world),
            operated=self._operated(origin) if stepped else {},
        )
        self._exchange.publish(step, now)
        self.counters["steps"] += 1
        if "learner" in self._links and self._allowance.keep(step):
            self.counters["forgotten"] += 1
        return [(link, step) for link in self._links]

    def _operated(self, origin: ActionOrigin) -> dict[str, str]:
        """Return ``operated`` of the next Step: a map with the operator's name for each robot that is taken over.

        The map comes from the Action, or from the last Step if the robots hold the action of that Step. Otherwise
        the map is empty. A name is empty if the robot did not apply the operator's action.
        """
        received, before = self._exchange.action, self._exchange.step
        if received:
            chosen = origin in (ActionOrigin.POLICY, ActionOrigin.OPERATOR)
            return received.operated if chosen else dict.fromkeys(received.operated, "")
        if origin is not ActionOrigin.HELD or before is None or not before.operated:
            return {}
        began = before.phase == Phase.FIRST  # before FIRST, a robot gets the safe action, not its operator's
        return {robot: "" if began[int(robot)] else operator for robot, operator in before.operated.items()}


def _origin(action: Action) -> ActionOrigin:
    """The origin of an applied Action."""
    if action.safe:
        return ActionOrigin.SAFE
    return ActionOrigin.OPERATOR if action.operated else ActionOrigin.POLICY
