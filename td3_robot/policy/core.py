"""The policy server without I/O: Steps, Weights and Commands in, Actions and states out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES, Input, Output, Peer
from td3_robot.errors import BundleError, LifecycleError
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
from td3_robot.policy.latches import Latches
from td3_robot.policy.noise import Explorer
from td3_robot.policy.store import Examine, Policy, PolicyStore, examine
from td3_robot.policy.watch import Watch
from td3_robot.safety.commands import watch_follows
from td3_robot.safety.lifecycle import FAULT, INACTIVE, STOP, UNCONFIGURED, Lifecycle
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util.arrays import finite

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    **dict.fromkeys(ROBOT_ROLES, (Step, Command, Reply, LifecycleChange)),
    "operator": (Command,),
}
"""What a policy server takes from clients of each role."""
_WITHDRAWN = 16  # policies rolled back from that are remembered
_AWAY = 1024  # robots that are away, and in FAULT or idle until activate, that are remembered
_SOURCES = 256  # whose watch a Reply tells of: it has to be shorter than a message may be, however many there are
_CONNECTED = 512  # the same of names alone; who asks each of them must not fill a queue
_REASON = 200  # characters of the reason of each watch
_LATCHED = 500  # the same in what is kept over a restart
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
        latches: what is in force; another object when it may have changed.
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
        self.lifecycle = Lifecycle(name)
        self.counters: Counter[str] = Counter()
        self.latches = Latches()
        self.changes: list[LifecycleChange] = []
        self._withdrawn: tuple[str, ...] = ()
        self._left: tuple[str, bool] | None = None  # the server's own latches as a shutdown found them; it ends none
        self._autostart = autostart
        self._lockstep = lockstep
        self._parked: dict[Peer, tuple[Step, float]] = {}
        self._explorers: dict[Peer, Explorer] = {}
        self._watches: dict[str, Watch] = {}
        moves = ("configure", "activate", "deactivate", "reset", "estop", "shutdown")
        verbs = {
            "state": lambda *_: None,
            **dict.fromkeys(moves, self._move),
            "load": self._load,
            "rollback": self._roll_back,
            "freeze": self._freeze,
            "unfreeze": self._freeze,
        }
        self.desk = Desk(self.lifecycle, verbs, self._command_watch, self.detail)

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
        return min((watch.due for watch in self._watches.values() if watch.due is not None), default=None)

    def load(self, version: int, bundle: Bundle) -> None:
        """Serve this policy, which a person chose, from the next action on.

        Raises:
            BundleError: see :meth:`PolicyStore.add`.
        """
        self.store.add(version, bundle, loaded=True)

    def wanted(self, weights: Weights) -> bool:
        """Whether a learner's weights would be looked at now."""
        return not self.frozen and self.store.unseen(weights.version, weights.payload) is None

    def resume(self, latches: Latches, now: float) -> list[str]:
        """Go on under what was in force before a restart, ``now`` in seconds; for each of it a line for the log."""
        lines: list[str] = []
        self._withdrawn = latches.withdrawn
        if latches.frozen and not self.frozen:
            self.frozen = True
            lines.append("frozen before the restart: learners' weights are refused until unfreeze")
        for name, reason in latches.held.items():
            self._watches[name] = watch = Watch(f"{self.lifecycle.node}/{name}", now)
            if reason.startswith(STOP):
                watch.lifecycle.stop(reason.removeprefix(STOP), now)  # which no automatic recovery leaves
            else:
                watch.lifecycle.fault(reason, now)
            lines.append(f"no policy moves {name!r} until activate: {reason}")
        for name in latches.idle:
            self._watches[name] = watch = Watch(f"{self.lifecycle.node}/{name}", now)
            watch.lifecycle.command("deactivate", now, "it was not active before the restart")
            lines.append(f"no policy moves {name!r} until activate: it was not active before the restart")
        if latches.stopped:
            self.desk.stop(latches.stopped)
            lines.append(f"stopped one by one, until reset names them: {', '.join(latches.stopped)}")
        taken_back = self.store.serving is not None and sha256(self.store.serving.bundle.encode()) in self._withdrawn
        inactive = latches.inactive and self._autostart
        if latches.stop or inactive or taken_back:
            if self._autostart:
                self._autostart = False
                self.lifecycle.command("configure", now, "autostart")
            if latches.stop:
                self.lifecycle.stop(latches.stop, now)
                lines.append(f"the emergency stop is still in force ({latches.stop}): reset, then activate")
            elif taken_back:
                lines.append("this policy was rolled back from: it is not activated until activate, or another load")
            else:
                lines.append("it was not active before the restart: activate")
        self.latches = self._in_force()
        return lines

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived and answer what can be answered; ``now`` is in seconds."""
        if self._autostart and self.lifecycle.state == UNCONFIGURED:
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
                watch = self._watches.get(origin.name)
                outputs += self.desk.join(origin, stopped=bool(watch and watch.lifecycle.stopped))
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
        changes += self._changes()
        if changes or commanded:
            self._forget_the_longest_away()
            self.latches = self._in_force()
        self.changes = changes
        return outputs + self.desk.announce(changes) if changes else outputs

    def detail(self) -> dict[str, Any]:
        """What a Reply says of this server: as plain JSON values; of many sources those that are not active first."""
        serving = self.store.serving
        watches = sorted(self._watches.items(), key=lambda item: item[1].lifecycle.active)
        return {
            "version": serving.version if serving else 0,
            "newest": self.store.newest,
            "held": sorted(self.store.held),
            "frozen": self.frozen,
            "robot": serving.bundle.spec.name if serving else "",
            "reason": self.lifecycle.reason,
            "sources": {
                name: {"watch": watch.lifecycle.state, "reason": watch.lifecycle.reason[:_REASON]}
                for name, watch in watches[:_SOURCES]
            },
            "sources_in_all": len(watches),
            "connected": sorted(self.desk.robots)[:_CONNECTED],
            "connected_in_all": len(self.desk.robots),
            "counters": dict(self.counters),
        }

    # -- operators -----------------------------------------------------------------------------------------------

    def _move(self, command: Command, now: float) -> None:
        if command.verb == "shutdown" and self._left is None:
            self._left = self._own_latches()
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

    def _command_watch(self, name: str, command: Command, now: float) -> str:
        watch = self._watches.get(name)
        try:
            if watch and watch_follows(command):
                watch.command(command.verb, now, command.reason)
        except LifecycleError as error:
            return str(error)
        return ""

    def _own_latches(self) -> tuple[str, bool]:
        """Of the server itself: the reason of its emergency stop, and whether it is inactive."""
        lifecycle = self.lifecycle
        return lifecycle.reason.removeprefix(STOP) if lifecycle.stopped else "", lifecycle.state == INACTIVE

    def _in_force(self) -> Latches:
        stop, inactive = self._left or self._own_latches()
        watches = {name: watch.lifecycle for name, watch in self._watches.items()}
        return Latches(
            stop=stop,
            inactive=inactive,
            stopped=self.desk.all_stopped,
            held={name: it.reason[:_LATCHED] for name, it in watches.items() if it.state == FAULT},
            idle=tuple(name for name, it in watches.items() if it.state == INACTIVE),
            frozen=self.frozen,
            withdrawn=self._withdrawn,
        )

    def _changes(self) -> list[LifecycleChange]:
        changes = self.lifecycle.changes()
        for watch in self._watches.values():
            changes += watch.lifecycle.changes()
        return changes

    # -- sources -------------------------------------------------------------------------------------------------

    def _forget(self, peer: Peer, fresh: dict[Peer, Step]) -> None:
        self.desk.leave(peer)
        for known in (fresh, self._parked, self._explorers):
            known.pop(peer, None)
        watch = self._watches.get(peer.name)
        if watch and peer.name not in self.desk.robots:
            del self._watches[peer.name]
            if not watch.lifecycle.active:  # it stays, now as the last to leave: coming back is no way out of FAULT
                self._watches[peer.name] = watch

    def _forget_the_longest_away(self) -> None:
        """Memory must not grow with the names there have been; an emergency stop is kept whatever it costs."""
        here, watches = self.desk.robots, self._watches
        away = [name for name, it in watches.items() if name not in here and not it.lifecycle.stopped]
        for name in away[:-_AWAY]:
            log.warning("%s: forgets %r: %d others are away that no policy may move", self.lifecycle.node, name, _AWAY)
            del watches[name]

    def _missing(self, now: float) -> list[Output]:
        """A safe action for every source whose observations have just been missing for too long."""
        outputs: list[Output] = []
        for name, watch in self._watches.items():
            if watch.missing(now):
                peer, policy = self.desk.robots.get(name), self.store.serving
                if peer and policy and watch.newest:
                    outputs.append((peer, self._safe(watch.newest, policy)))
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
        if policy is None or self.lifecycle.state == UNCONFIGURED:
            unseen = self._watches.get(peer.name)
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
        watch = self._watches.get(peer.name)
        if watch is None and envelope.guarded:
            watch = self._watches[peer.name] = Watch(f"{self.lifecycle.node}/{peer.name}", now)
        if watch is not None:  # even if nothing is set any more: FAULT and a stop last until a person ends them
            if since == now:
                problem = watch.take(step, policy.safety, now)
            elif not watch.lifecycle.active:
                problem = watch.lifecycle.reason
        # A robot that nothing watches over is stopped by name at the desk alone.
        if problem or not self.lifecycle.active or self.desk.stopped(peer.name):
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
