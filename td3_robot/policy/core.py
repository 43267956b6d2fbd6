"""The policy server without I/O: Steps, Weights and Commands in, Actions and states out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES, Input, Output, Peer
from td3_robot.errors import BundleError
from td3_robot.messages import (
    NO_NOISE,
    Action,
    Bye,
    Command,
    Hello,
    LifecycleChange,
    Message,
    Reply,
    Step,
    Weights,
)
from td3_robot.policy.desk import Desk
from td3_robot.policy.noise import Explorer
from td3_robot.policy.safety import Safety
from td3_robot.policy.store import Examine, Policy, PolicyStore, examine
from td3_robot.safety.lifecycle import Cause, Held, State
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util.arrays import finite

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    **dict.fromkeys(ROBOT_ROLES, (Step, Command, Reply, LifecycleChange)),
    "operator": (Command,),
}
"""What a policy server takes from clients of each role."""
_WITHDRAWN = 16  # policies rolled back from that are remembered
_SOURCES = 256  # whose watch a Reply tells of: it has to be shorter than a message may be, however many there are
_CONNECTED = 512  # the same of names alone; who asks each of them must not fill a queue
_REASON = 200  # characters of the reason of each watch
_NO_EXPLORATION = Exploration()


def make(config: Config, name: str, *, exploring: bool, frozen: bool = False, examine: Examine = examine) -> PolicyCore:
    """The core of the policy server of this name with this configuration; the rest is said on its command line."""
    return PolicyCore(
        config.seed,
        exploring=exploring,
        lockstep=config.timing == "lockstep",
        safety=config.safety,
        autostart=config.policy.autostart,
        frozen=config.policy.frozen or frozen,
        name=name,
        examine=examine,
    )


class PolicyCore:
    """Answers every Step with the policy that serves, or in lock-step with exactly the version the Step names.

    Only an active server lets a policy act. Otherwise, and while its watch over a source is in FAULT, it answers with
    the safe action; before it is configured or has a policy, not at all.

    Args:
        seed: of the exploration noise.
        exploring: False serves the bare actor, whatever the weights ask for.
        lockstep: versions may go back, with a learner that goes back.
        safety: the robot's settings; each policy's own are joined to them.
        autostart: go to the state ``active`` at once.
        frozen: refuse learners' weights.
        name: of this server.
        examine: how the bytes of policies are looked at, see :class:`PolicyStore`.

    Attributes:
        safety_state: what a restart has to keep; a new object when it may have changed.
        changes: the changes of state in the newest turn, of robots too.
    """

    def __init__(
        self,
        seed: int,
        *,
        exploring: bool = True,
        lockstep: bool = False,
        safety: SafetyConfig | None = None,
        autostart: bool = True,
        frozen: bool = False,
        name: str = "policy",
        examine: Examine = examine,
    ) -> None:
        self.seed = seed
        self.exploring = exploring
        self.frozen = frozen
        self.store = PolicyStore(safety or SafetyConfig(), may_go_back=lockstep, examine=examine)
        self.safety = Safety(name)
        self.lifecycle = self.safety.lifecycle
        self.counters: Counter[str] = Counter()
        self.safety_state = SafetyState()
        self.changes: list[LifecycleChange] = []
        self._withdrawn: tuple[str, ...] = ()
        self._autostart = autostart
        self._lockstep = lockstep
        self._parked: dict[Peer, tuple[Step, float]] = {}
        self._explorers: dict[Peer, Explorer] = {}
        moves = ("configure", "activate", "deactivate", "reset", "estop", "shutdown")
        verbs = {
            "state": lambda *_: None,
            **dict.fromkeys(moves, self._move),
            "load": self._load,
            "rollback": self._roll_back,
            "freeze": self._freeze,
            "unfreeze": self._freeze,
        }
        self.desk = Desk(self.safety, verbs, self.detail)

    @property
    def version(self) -> int:
        """Newest weights there have been; 0 for none."""
        return self.store.newest

    @property
    def spec(self) -> RobotSpec | None:
        return self.store.serving.bundle.spec if self.store.serving else None

    @property
    def due(self) -> float | None:
        """When a turn is needed even if nothing arrives, in seconds."""
        return self.safety.due

    def load(self, version: int, bundle: Bundle) -> None:
        """Serve this policy, which a person chose, from the next action on.

        Raises:
            BundleError: see :meth:`PolicyStore.add`.
        """
        self.store.add(version, bundle, loaded=True)

    def wanted(self, weights: Weights) -> bool:
        """Whether a learner's weights would be looked at now."""
        return not self.frozen and self.store.unseen(weights.version, weights.payload) is None

    def resume(self, state: SafetyState, now: float) -> list[str]:
        """Hold what was held before a restart.

        Args:
            state: from before the restart.
            now: the time, in seconds.

        Returns:
            A line for the log about each thing that is in force.
        """
        lines: list[str] = []
        self._withdrawn = state.withdrawn
        if state.frozen and not self.frozen:
            self.frozen = True
            lines.append("frozen before the restart: learners' weights are refused until unfreeze")
        lines += self.safety.restore(state, now)
        lines += self._resume_server(state.server, now)
        self.safety_state = self._in_force()
        return lines

    def _resume_server(self, held: Held | None, now: float) -> list[str]:
        stopped = held is not None and held.cause is Cause.STOP
        inactive = held is not None and not stopped and self._autostart
        taken_back = self.store.serving is not None and sha256(self.store.serving.bundle.encode()) in self._withdrawn
        if not (stopped or inactive or taken_back):
            return []
        if self._autostart:
            self._autostart = False
            self.lifecycle.command("configure", now, "autostart")
        if held and stopped:
            self.lifecycle.stop(held.reason, now)
            return [f"the emergency stop is still in force ({held.reason}): reset, then activate"]
        if taken_back:
            return ["this policy was rolled back from: it is not activated until activate, or another load"]
        return ["it was not active before the restart: activate"]

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived and answer what can be answered; ``now`` is in seconds."""
        if self._autostart and self.lifecycle.state is State.UNCONFIGURED:
            self._autostart = False
            self.lifecycle.command("configure", now, "autostart")
            self.lifecycle.command("activate", now, "autostart")
        # First of all: Steps that queued while this process stood still are not known to be fresh.
        outputs = self._missing(now)
        fresh: dict[Peer, Step] = {}
        commanded = False
        changes: list[LifecycleChange] = []
        weights: list[Weights] = []
        for origin, message in inputs:
            if isinstance(message, Weights):
                weights.append(message)
            elif not isinstance(origin, Peer):
                continue
            elif isinstance(message, Step):
                self.counters["steps"] += 1
                if origin in fresh or origin in self._parked:
                    self.counters["skipped"] += 1
                    self._parked.pop(origin, None)
                fresh[origin] = message
            elif isinstance(message, Command):
                commanded = True
                self._receive(weights)  # before it is asked to load, freeze or go back
                outputs += self.desk.command(origin, message, now)
            elif isinstance(message, Reply):
                outputs += self.desk.reply(origin, message)
            elif isinstance(message, LifecycleChange):
                changes.append(message)
            elif isinstance(message, Hello):
                outputs += self.desk.join(origin)
            elif isinstance(message, Bye):
                self._forget(origin, fresh)
        self._receive(weights)
        waiting = [(peer, *parked) for peer, parked in self._parked.items()]
        for peer, step, since in [*waiting, *((peer, step, now) for peer, step in fresh.items())]:
            action = self._answer(peer, step, since, now)
            if action is None:
                self._parked[peer] = step, since
            else:
                self._parked.pop(peer, None)
                self.counters["actions"] += 1
                outputs.append((peer, action))
        changes += self.safety.changes()
        if changes or commanded:
            self.safety.forget_the_longest_away(self.desk.robots)
            self.safety_state = self._in_force()
        self.changes = changes
        return outputs + self.desk.announce(changes) if changes else outputs

    def detail(self) -> dict[str, Any]:
        """What a Reply says of this server: as plain JSON values; of many sources those that are not active first."""
        serving = self.store.serving
        watches = sorted(self.safety.watches.items(), key=lambda item: item[1].lifecycle.active)
        return {
            "version": serving.version if serving else 0,
            "newest": self.store.newest,
            "held": sorted(self.store.held),
            "frozen": self.frozen,
            "robot": serving.bundle.spec.name if serving else "",
            "reason": self.lifecycle.reason,
            "sources": {
                name: {"watch": watch.lifecycle.state.value, "reason": watch.lifecycle.reason[:_REASON]}
                for name, watch in watches[:_SOURCES]
            },
            "sources_in_all": len(watches),
            "connected": sorted(self.desk.robots)[:_CONNECTED],
            "connected_in_all": len(self.desk.robots),
            "counters": dict(self.counters),
            "stopped": sorted(self.safety.stopped),
        }

    # -- operators -----------------------------------------------------------------------------------------------

    def _move(self, command: Command, now: float) -> None:
        self.lifecycle.command(command.verb, now, command.reason)
        if command.verb == "activate" and self._withdrawn and self.store.serving:
            self._choose(self.store.serving.bundle)

    def _load(self, command: Command, now: float) -> None:
        del now
        try:
            self.store.receive(command.version or self.store.newest + 1, command.sha256, command.payload, loaded=True)
        except BundleError:
            self.counters["weights_refused"] += 1
            raise
        if self._withdrawn and self.store.serving:
            self._choose(self.store.serving.bundle)

    def _choose(self, bundle: Bundle) -> None:
        """A person wants this policy, whatever was said of it before."""
        chosen = sha256(bundle.encode())
        self._withdrawn = tuple(digest for digest in self._withdrawn if digest != chosen)

    def _roll_back(self, command: Command, now: float) -> None:
        del now
        before = self.store.serving
        policy = self.store.roll_back(command.version)
        if before and before is not policy:
            self._choose(policy.bundle)
            self._withdrawn = (*self._withdrawn[1 - _WITHDRAWN :], sha256(before.bundle.encode()))
        self.frozen = True  # or a learner's next weights would undo it
        log.info("%s: back to weights version %d, frozen", self.lifecycle.node, policy.version)

    def _freeze(self, command: Command, now: float) -> None:
        del now
        self.frozen = command.verb == "freeze"

    def _in_force(self) -> SafetyState:
        return self.safety.state(frozen=self.frozen, withdrawn=self._withdrawn)

    # -- sources -------------------------------------------------------------------------------------------------

    def _forget(self, peer: Peer, fresh: dict[Peer, Step]) -> None:
        self.desk.leave(peer)
        for known in (fresh, self._parked, self._explorers):
            known.pop(peer, None)
        if peer.name not in self.desk.robots:
            self.safety.leave(peer.name)

    def _missing(self, now: float) -> list[Output]:
        """A safe action for every source whose observations have just been missing for too long."""
        outputs: list[Output] = []
        for name, newest in self.safety.missing(now):
            peer, policy = self.desk.robots.get(name), self.store.serving
            if peer and policy:
                outputs.append((peer, self._safe(newest, policy)))
        return outputs

    def _receive(self, queued: list[Weights]) -> None:
        """Empty the queue: the newest good ones serve, older ones are not looked at; in lock-step each is needed."""
        while queued:
            weights = queued.pop(0 if self._lockstep else -1)
            if self.frozen:
                self.counters["weights_frozen"] += 1
                continue
            try:
                self.store.receive(weights.version, weights.sha256, weights.payload)
            except BundleError as error:
                self.counters["weights_refused"] += 1
                log.warning("refused: %s", error)
                continue
            if not self._lockstep:
                self.counters["weights_skipped"] += len(queued)
                queued.clear()

    def _answer(self, peer: Peer, step: Step, since: float, now: float) -> Action | None:
        """The Action for a Step that came at ``since``; None while there cannot be one."""
        policy = self.store.held.get(step.needs_version) if step.needs_version else self.store.serving
        if policy is None or self.lifecycle.state is State.UNCONFIGURED:
            unseen = self.safety.watches.get(peer.name)
            if unseen and since == now:  # it is there
                unseen.put_off(now)
            return None
        spec = policy.bundle.spec
        if (step.observation.shape[1], step.action.shape[1]) != (spec.observation_size, spec.action_size):
            self.counters["other_robot"] += 1  # it joined before any weights said which robot this is; it is leaving
            return None
        envelope = policy.safety.envelope
        if envelope.observation_deadline_s is not None and now - since > envelope.observation_deadline_s:
            self.counters["stale"] += 1
            return None
        problem = None
        watch = self.safety.watches.get(peer.name)
        if watch is None and envelope.guarded:
            watch = self.safety.watch(peer.name, now)
        if watch is not None:  # even if nothing is set any more: FAULT and a stop last until a person ends them
            if since == now:
                problem = watch.take(step, policy.safety, now)
            elif not watch.lifecycle.active:
                problem = watch.lifecycle.reason
        # A robot that nothing watches over is stopped by name at the desk alone.
        if problem or not self.safety.acts(peer.name):
            return self._safe(step, policy)
        explorer = self._explorers.get(peer)
        if explorer is None or explorer.incarnation != step.incarnation:
            explorer = self._explorers[peer] = Explorer(self.seed, step)
        exploration = policy.bundle.exploration if self.exploring else _NO_EXPLORATION
        action = explorer.act(policy.actor, exploration, step)
        if not finite(action):  # finite weights can still overflow
            self.counters["not_finite"] += 1
            return self._safe(step, policy) if envelope.guarded else None
        if envelope.guarded:
            action = policy.safety(action, step.action)
        seed = 0 if explorer.number == NO_NOISE else self.seed
        return _action(step, action, policy.version, explorer.number, seed)

    def _safe(self, step: Step, policy: Policy) -> Action:
        self.counters["safe_actions"] += 1
        return _action(step, policy.safety.envelope.safe_action(step.action), 0, NO_NOISE, 0)


def _action(step: Step, action: Float32, version: int, noise: int, seed: int) -> Action:
    return Action.of(
        {
            "source": step.source,
            "incarnation": step.incarnation,
            "answers": step.sequence,
            "stamp": step.stamp,
            "action": action,
            "weights_version": version,
            "noise_kind": noise,
            "noise_seed": seed,
        }
    )
