"""The policy server without I/O. It takes Steps, Weights and Commands, and returns Actions and Replies.

The core joins five parts:

================================== ===============================================================
:mod:`td3_robot.policy.store`      the policies, and which policy serves
:mod:`td3_robot.policy.safety`     which robots a policy may move: states, watches, stops
:mod:`td3_robot.policy.answers`    the Action for each Step
:mod:`td3_robot.policy.desk`       Commands from operators to the server and to robots
:mod:`td3_robot.policy.takeover`   the robots that operators drive in place of the policy
================================== ===============================================================
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from td3_robot.bundle import Bundle
from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES, Farewell, Input, Output, Peer
from td3_robot.messages import Bye, Command, Hello, LifecycleChange, Message, Reply, Status, Step, Teleop, Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.answers import Answers
from td3_robot.policy.desk import Desk
from td3_robot.policy.safety import Safety
from td3_robot.policy.store import Examine, PolicyStore, examine
from td3_robot.policy.takeover import Takeovers
from td3_robot.safety.commands import Verbs
from td3_robot.safety.lifecycle import Cause, Held, State
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.specs import RobotSpec

log = logging.getLogger(__name__)

ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    **dict.fromkeys(ROBOT_ROLES, (Step, Command, Reply, LifecycleChange)),
    "operator": (Command, Teleop),
}
"""Maps each role of a client to the messages that a policy server accepts from this client."""
_SOURCES = 256  # maximum number of watches in a Reply, because the size of a message is limited
_CONNECTED = 512  # maximum number of robot names in a Reply
_REASON = 200  # maximum number of characters of a watch's reason in a Reply


def make(
    config: Config,
    name: str,
    *,
    exploring: bool,
    frozen: bool = False,
    tells_drivers: bool = True,
    examine: Examine = examine,
) -> PolicyCore:
    """The core of the policy server ``name``. ``frozen`` freezes the server even if the configuration does not."""
    return PolicyCore(
        config.seed,
        exploring=exploring,
        lockstep=config.timing == "lockstep",
        safety=config.safety,
        autostart=config.policy.autostart,
        frozen=config.policy.frozen or frozen,
        tells_drivers=tells_drivers,
        operator_deadline_s=config.policy.operator_deadline_ms / 1e3,
        name=name,
        examine=examine,
    )


class PolicyCore:
    """Answers each Step with the policy that serves. In lock-step, the version that the Step needs gives the answer.

    A policy acts only while the server is active and the source is not stopped. If the server has a
    :class:`~td3_robot.policy.watch.Watch` over the source, the Watch must be active, too. While a policy must not act,
    the server answers with the safe action. A server that is unconfigured or has no policy does not answer.

    Args:
        exploring: add the exploration noise that the policy asks for.
        lockstep: each Step names the weights version that must answer it. A learner that returns to a snapshot
            sends earlier versions again, and the server takes them.
        safety: the robot's settings; the server joins them with the settings of each policy.
        autostart: go to the state ``active`` at once.
        frozen: refuse the weights of learners.
        tells_drivers: see :class:`td3_robot.policy.answers.Answers`.
        operator_deadline_s: the age in seconds beyond which the safe action replaces an operator's action.

    Attributes:
        safety_state: the state that a restart must keep. The core makes a new object when the state may have changed.
        changes: the changes of state in the newest turn: of the server, of its watches, and of robots.
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
        tells_drivers: bool = True,
        operator_deadline_s: float = 0.2,
        name: str = "policy",
        examine: Examine = examine,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.store = PolicyStore(
            safety or SafetyConfig(), lockstep=lockstep, frozen=frozen, examine=examine, counters=self.counters
        )
        self.safety = Safety(name)
        self.lifecycle = self.safety.lifecycle
        self.takeovers = Takeovers(name, self.store, operator_deadline_s, lockstep=lockstep, counters=self.counters)
        self.answers = Answers(
            seed,
            exploring=exploring,
            tells_drivers=tells_drivers,
            store=self.store,
            safety=self.safety,
            takeovers=self.takeovers,
            counters=self.counters,
        )
        self.desk = Desk(self.safety, self._verbs(), self.detail)
        self.safety_state = SafetyState()
        self.changes: list[LifecycleChange] = []
        self._autostart = autostart
        self._transport: Status | None = None

    @property
    def version(self) -> int:
        """The version of the newest policy; 0 before the first policy."""
        return self.store.newest

    @property
    def spec(self) -> RobotSpec | None:
        return self.store.serving.bundle.spec if self.store.serving else None

    @property
    def due(self) -> float | None:
        """The time (s) at which the core needs a turn even without new messages; None if it needs no such turn."""
        return self.safety.due

    def load(self, version: int, bundle: Bundle) -> None:
        """Serve this policy, which a person chose, from the next action on. See :meth:`PolicyStore.add`."""
        self.store.add(version, Actor(bundle), loaded=True)

    def resume(self, state: SafetyState, now: float) -> list[str]:
        """Restore the saved stops, faults and decisions after a restart. Return lines for the log."""
        lines: list[str] = []
        self.store.withdrawn = state.withdrawn
        if state.frozen and not self.store.frozen:
            self.store.frozen = True
            lines.append(
                "the server was frozen before the restart: it refuses learners' weights until the command unfreeze"
            )
        lines += self.safety.restore(state, now)
        lines += self.takeovers.restore(state.operated)
        lines += self._resume_server(state.server, now)
        self.safety_state = self._state_to_keep()
        return lines

    def _resume_server(self, held: Held | None, now: float) -> list[str]:
        stopped = held is not None and held.cause is Cause.STOP
        inactive = held is not None and not stopped and self._autostart
        withdrawn = self.store.is_withdrawn
        if not (stopped or inactive or withdrawn):
            return []
        if self._autostart:
            self._autostart = False
            self.lifecycle.command("configure", now, "autostart")
        if held and stopped:
            self.lifecycle.stop(held.reason, now)
            return [f"the emergency stop is still in force ({held.reason}): reset, then activate"]
        if withdrawn:
            return [
                "a rollback withdrew the loaded policy: activate the server to keep this policy, or load another policy"
            ]
        return ["the server was not active before the restart: activate it"]

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Process the inputs at ``now`` (s), and answer every Step that can be answered."""
        if self._autostart and self.lifecycle.state is State.UNCONFIGURED:
            self._autostart = False
            self.lifecycle.command("configure", now, "autostart")
            self.lifecycle.command("activate", now, "autostart")
        # Look for missing observations first. After a suspension of this process, the queued Steps are old, but a watch
        # would take them as new. Then it would not notice that observations were missing.
        outputs = self.answers.missing(self.desk.robots, now)
        changes: list[LifecycleChange] = []
        faults: list[str] = []  # names of robots that report a fault
        commanded = False
        weights: list[Weights] = []
        for origin, message in inputs:
            if isinstance(message, Weights):
                weights.append(message)
            elif isinstance(message, Status):
                self._transport = message  # the node reports its rate, and the messages that its links dropped
            elif not isinstance(origin, Peer):
                continue
            elif isinstance(message, Step):
                self.answers.take(origin, message, now)
            elif isinstance(message, LifecycleChange):
                changes.append(message)
                if message.state == State.FAULT.value:
                    faults.append(origin.name)
            else:
                if isinstance(message, Command):
                    commanded = True
                    # Take the weights before the Command, which can load a policy, freeze the server or roll back.
                    self.store.receive_all(weights)
                outputs += self._serve(origin, message, now)
        self.store.receive_all(weights)
        outputs += self.answers.answer_all(now)
        for name in faults:  # after the Steps, because a robot sends the last Step of its episode before the fault
            self.safety.robot_in_fault(name)
        changes += self.safety.changes()
        if changes or commanded:
            self.safety.forget_absent_robots(self.desk.robots)
            self.safety_state = self._state_to_keep()
        self.changes = changes
        return outputs + self.desk.announce(changes) if changes else outputs

    def _serve(self, peer: Peer, message: Message, now: float) -> list[Output]:
        """Process a client's Hello, Bye, Command, Teleop or Reply."""
        if isinstance(message, Command):
            return self._command(peer, message, now)
        if isinstance(message, Teleop):
            return self.takeovers.drive(peer, message, now)
        if isinstance(message, Reply):
            return self.desk.reply(peer, message)
        if isinstance(message, Hello):
            return self.desk.join(peer)
        if isinstance(message, Bye):
            self.desk.leave(peer)
            self.takeovers.leave(peer, message)
            self.answers.leave(peer)
            if peer.name not in self.desk.robots:
                self.safety.leave(peer.name, Farewell.of(message))
        return []

    def _command(self, peer: Peer, command: Command, now: float) -> list[Output]:
        if peer.role == "operator" and command.verb in self.takeovers.VERBS:
            error, detail = self.takeovers.command(peer, command, self.desk.robots, now)
            return [(peer, Reply(command.id, self.lifecycle.node, error, self.lifecycle.state.value, detail))]
        outputs = self.desk.command(peer, command, now)
        refused = any(isinstance(message, Reply) and message.error for _, message in outputs)
        if peer.role == "operator" and command.verb == "reset" and not refused:
            self.takeovers.reset(command.target)
        return outputs

    def _state_to_keep(self) -> SafetyState:
        store, operated = self.store, self.takeovers.robots()
        return replace(self.safety.state(), frozen=store.frozen, withdrawn=store.withdrawn, operated=operated)

    # -- operators -----------------------------------------------------------------------------------------------

    def detail(self) -> dict[str, Any]:
        """The ``detail`` of a Reply about this server, as plain JSON values. Sources that are not active come first."""
        serving = self.store.serving
        links: dict[str, Any] = {}
        if status := self._transport:
            links = {"dropped": status.counters, "last_dropped": status.detail}
            links |= {"loop": status.figures} if status.figures else {}
        watches = sorted(self.safety.watches.items(), key=lambda item: item[1].lifecycle.active)
        return {
            "version": serving.version if serving else 0,
            "newest": self.store.newest,
            "held": sorted(self.store.held),
            "frozen": self.store.frozen,
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
            **links,
            **({"taken_over": self.takeovers.detail()} if self.takeovers.held else {}),
        }

    def _verbs(self) -> Verbs:
        moves = ("configure", "activate", "deactivate", "reset", "estop", "shutdown")
        return {
            "state": lambda *_: None,
            **dict.fromkeys(moves, self._move),
            "load": lambda command, _: self.store.load(command.version, command.sha256, command.payload),
            "rollback": lambda command, _: self._roll_back(command.version),
            "freeze": lambda *_: self._freeze(True),
            "unfreeze": lambda *_: self._freeze(False),
        }

    def _move(self, command: Command, now: float) -> None:
        self.lifecycle.command(command.verb, now, command.reason)
        if command.verb == "activate":
            self.store.choose()

    def _roll_back(self, version: int) -> None:
        policy = self.store.roll_back(version)
        log.info("%s: serves weights version %d again, and is frozen", self.lifecycle.node, policy.version)

    def _freeze(self, frozen: bool) -> None:
        self.store.frozen = frozen
