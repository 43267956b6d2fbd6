"""Decides which Steps a policy server answers, and whether a policy or the safe action is the answer."""

from __future__ import annotations

import logging
from collections import Counter

from td3_robot.bundle import Exploration
from td3_robot.core_types import Output, Peer
from td3_robot.messages import NO_NOISE, Action, Command, Step
from td3_robot.policy.noise import Explorer
from td3_robot.policy.safety import Safety
from td3_robot.policy.store import Policy, PolicyStore
from td3_robot.policy.takeover import Takeovers
from td3_robot.safety.lifecycle import State
from td3_robot.specs import Float32
from td3_robot.util.arrays import finite
from td3_robot.util.text import occurrence, one_line

log = logging.getLogger(__name__)

_NO_EXPLORATION = Exploration()
_NOBODY: dict[str, str] = {}


class Answers:
    """Answers the newest Step of each source.

    A Step waits until the server is configured and has a policy. In lock-step, the Step also waits until the weights
    that it needs arrive. A newer Step of the same source replaces a waiting Step. A Step that is too old, or that comes
    from another kind of robot, gets no answer.

    Args:
        exploring: add the exploration noise that the policy asks for.
        tells_drivers: if an action stops a robot, also send its driver an ``estop``, so that the driver does not call
            the robot's ``reset``. False only to replay a recording of version 0.1.0.
        counters: counts Steps and Actions, and the reasons why no policy answered a Step.

    Attributes:
        noise_problem: the newest mistake of an exploration noise, in one line; empty if none was found.
    """

    def __init__(
        self,
        seed: int,
        *,
        exploring: bool,
        tells_drivers: bool,
        store: PolicyStore,
        safety: Safety,
        takeovers: Takeovers,
        counters: Counter[str],
    ) -> None:
        self._seed = seed
        self.exploring = exploring
        self.noise_problem = ""
        self._tells_drivers = tells_drivers
        self._store = store
        self._safety = safety
        self._takeovers = takeovers
        self._counters = counters
        self._stops: list[Output] = []
        self._waiting: dict[Peer, tuple[Step, float]] = {}
        self._explorers: dict[Peer, Explorer] = {}

    def take(self, peer: Peer, step: Step, now: float) -> None:
        """Take a Step that has arrived from a source at ``now`` (s)."""
        self._counters["steps"] += 1
        if peer in self._waiting:
            self._counters["skipped"] += 1
            if self._waiting[peer][1] != now:
                del self._waiting[peer]  # move the source to the end, because the server answers earlier Steps first
        self._waiting[peer] = step, now

    def leave(self, peer: Peer) -> None:
        """Forget a source that has left."""
        self._waiting.pop(peer, None)
        self._explorers.pop(peer, None)

    def missing(self, robots: dict[str, Peer], now: float) -> list[Output]:
        """The safe action for each of the connected ``robots`` whose observation has become overdue at ``now`` (s)."""
        policy = self._store.serving
        overdue = [(robots.get(name), newest) for name, newest in self._safety.missing(now)]
        return [(peer, self.safe(newest, policy)) for peer, newest in overdue if peer and policy]

    def answer_all(self, now: float) -> list[Output]:
        """The Actions for all Steps that can be answered at ``now`` (s), and the stops of robots."""
        outputs: list[Output] = []
        for peer, (step, since) in list(self._waiting.items()):
            action = self.answer(peer, step, since, now)
            if action is not None:
                del self._waiting[peer]
                self._counters["actions"] += 1
                outputs.append((peer, action))
        # The stops come first: after an Action, the driver may call the robot's reset.
        outputs, self._stops = [*self._stops, *outputs], []
        return outputs

    def answer(self, peer: Peer, step: Step, since: float, now: float) -> Action | None:
        """The Action for a Step that arrived at ``since`` (s); None if no Action is possible at ``now`` (s)."""
        store = self._store
        policy = store.held.get(step.needs_version) if step.needs_version else store.serving
        if policy is None or self._safety.lifecycle.state is State.UNCONFIGURED:
            watch = self._safety.watches.get(peer.name)
            if watch and since == now:  # the observation arrived, so it is not overdue
                watch.watchdog.put_off(now)
            return None
        if self._is_useless(step, policy, now - since):
            del self._waiting[peer]
            return None
        if self._is_withheld(peer.name, step, policy, since, now):
            return self.safe(step, policy)
        return self._act(peer, step, policy, now)

    def safe(self, step: Step, policy: Policy) -> Action:
        """The safe action as an answer to a Step."""
        self._counters["safe_actions"] += 1
        return _action(step, policy.safety.envelope.safe_action(step.action), 0, NO_NOISE, 0)

    def _is_useless(self, step: Step, policy: Policy, age: float) -> bool:
        """Whether a Step is too old for this policy (``age`` in seconds), or comes from another kind of robot."""
        spec = policy.bundle.spec
        if (step.observation.shape[1], step.action.shape[1]) != (spec.observation_size, spec.action_size):
            # The source joined before the first weights. The server will refuse this source.
            self._counters["other_robot"] += 1
            return True
        deadline = policy.safety.envelope.observation_deadline_s
        if deadline is not None and age > deadline:
            self._counters["stale"] += 1
            return True
        return False

    def _is_withheld(self, name: str, step: Step, policy: Policy, since: float, now: float) -> bool:
        """Whether a stop, a fault, an inactive state or a bad observation forbids the policy to move this robot."""
        problem = None
        watch = self._safety.watches.get(name)
        if watch is None and policy.safety.envelope.guarded:
            watch = self._safety.watch(name, now)
        # Use the watch also if a new policy has no safety settings: this policy must not end a fault or a stop.
        if watch is not None:
            if since == now:
                problem = watch.take(step, policy.safety, now)
            elif not watch.lifecycle.active:
                problem = watch.lifecycle.reason
        return problem is not None or not self._safety.acts(name)

    def _act(self, peer: Peer, step: Step, policy: Policy, now: float) -> Action | None:
        """Return the filtered Action of the policy and the operators.

        If an action is not finite, return the safe action, or None if there are no safety settings.
        If an action exceeds a limit with ``out_of_limit: stop``, stop this robot and return the safe action.
        """
        explorer = self._explorers.get(peer)
        if explorer is None or explorer.incarnation != step.incarnation:
            explorer = self._explorers[peer] = Explorer(self._seed, step)
        exploration = policy.bundle.exploration if self.exploring else _NO_EXPLORATION
        action = explorer.act(policy.actor, exploration, step)
        safe, operated = action, _NOBODY
        if self._takeovers.held:
            safe = policy.safety.envelope.safe_action(step.action)
            operated = self._takeovers.replace(step.source, action, safe, now)
        guarded = policy.safety.envelope.guarded
        if not finite(action):  # the noise has a mistake, or the finite weights overflow
            self._counters["not_finite"] += 1
            explorer.blame(step.observation)
            self.noise_problem = explorer.problem or self.noise_problem
            if not explorer.problem and (again := occurrence(self._counters["not_finite"])) is not None:
                sent = "the server sends the safe action" if guarded else "the server sends no action"
                text = "an action of weights version %d for %s is not finite: %s%s"
                log.warning(text, policy.version, one_line(step.source), sent, again)
            if guarded:
                return self.safe(step, policy)
            del self._waiting[peer]  # the source sends a newer Step, or this Step again
            return None
        if guarded or operated:  # an operator's action can exceed the limits of the specification
            if reason := policy.safety.envelope.violation(action, policy.bundle.spec.actions):
                self._safety.watches[peer.name].lifecycle.stop(reason, now)
                if self._tells_drivers and peer.role == "driver":
                    self._stops.append((peer, Command(0, "", "estop", reason, 0, "", b"")))
                return self.safe(step, policy)
            action = policy.safety(action, step.action)
        version, noise = policy.version, explorer.number
        if operated:
            # When an operator becomes silent, the rate limit must not delay the safe action.
            # Between a takeover and the operator's first action, the rate limit applies.
            begins = self._takeovers.begins
            silent = [int(robot) for robot, operator in operated.items() if not operator and not begins(step, robot)]
            action[silent] = safe[silent]
            if len(operated) == len(action):
                version, noise = 0, NO_NOISE
        seed = 0 if noise == NO_NOISE else self._seed
        return _action(step, action, version, noise, seed, operated)


def _action(
    step: Step, action: Float32, version: int, noise: int, seed: int, operated: dict[str, str] = _NOBODY
) -> Action:
    return Action(step.source, step.incarnation, step.sequence, step.stamp, action, version, noise, seed, operated)
