"""The robots that operators have taken over, and the actions that the operators send for them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from td3_robot.core_types import Farewell, Output, Peer
from td3_robot.messages import Bye, Command, Reply, Step, Teleop
from td3_robot.policy.store import PolicyStore
from td3_robot.specs import Float32

log = logging.getLogger(__name__)

_MOST = 1024  # maximum number of robots that operators have taken over: the Reply and the state file list all of them

Robot = tuple[str, int]
"""The name of a source, and the index of a robot in it."""
Identity = tuple[str, int, str]
"""An operator's process: its name, the random number in its Hello, and its public key."""


@dataclass(eq=False)
class _Takeover:
    """One robot that an operator has taken over.

    Attributes:
        operator: the operator's process; ("", 0, "") after a restart of the server.
        here: whether the operator is connected.
        sequence: number of the newest Teleop; 0 before the first.
        action: float32[A] of the newest Teleop; None if the operator has sent no action, or has left.
        received: when the newest Teleop arrived (s); before the first Teleop: when the Command ``takeover`` arrived.
    """

    operator: Identity
    here: bool = True
    sequence: int = 0
    action: Float32 | None = None
    received: float = 0.0


class Takeovers:
    """Replaces the policy's actions for single robots by the actions of operators.

    A takeover does not end by itself. Its operator can give the robot back at any time. If the operator is silent or
    has left, the robot gets the safe action, and any operator may take it over. After the operator has left, any
    operator may also give the robot back, and a ``reset`` gives it back.

    Args:
        store: the server's policies. They contain the robot's action channels and limits.
        deadline_s: the age in seconds beyond which the safe action replaces an operator's action.
        lockstep: refuse every takeover, because each repetition of a lock-step run must give exactly the same result.
        counters: ``teleops`` counts the accepted actions of operators, and ``teleops_refused`` the refused actions.

    Attributes:
        held: the takeovers. While this map is empty, no method of this class runs for a Step.
    """

    VERBS: ClassVar = ("takeover", "give_back")

    def __init__(
        self, node: str, store: PolicyStore, deadline_s: float, *, lockstep: bool, counters: Counter[str]
    ) -> None:
        self.held: dict[Robot, _Takeover] = {}
        self._node = node
        self._store = store
        self._deadline_s = deadline_s
        self._lockstep = lockstep
        self._counters = counters

    # -- operators -----------------------------------------------------------------------------------------------

    def command(
        self, peer: Peer, command: Command, robots: Mapping[str, Peer], now: float
    ) -> tuple[str, dict[str, Any]]:
        """Carry out ``takeover`` or ``give_back`` at ``now`` (s). Return the error and the ``detail`` of the Reply."""
        robot = command.target, command.robot
        takes = command.verb == "takeover"
        error = self._refusal(peer, robot, robots, now) if takes else self._keeps(peer, robot)
        words = command.verb, command.target[:64], command.robot, peer.name, error or "done"
        log.warning("%s: %s of %r, robot %d, by operator %s: %s", self._node, *words)
        if error:
            return f"{self._node}: {error}", {}
        if takes:
            if (before := self.held.get(robot)) and before.here and before.operator != _identity(peer):
                log.warning("%s: operator %s was silent and loses the robot", self._node, before.operator[0])
            self.held[robot] = _Takeover(_identity(peer), received=now)
            return "", self._controls()
        del self.held[robot]
        return "", {}

    def drive(self, peer: Peer, teleop: Teleop, now: float) -> list[Output]:
        """Take an operator's action, which arrived at ``now`` (s). A Reply reports a refused action."""
        takeover = self.held.get((teleop.source, teleop.robot))
        error = ""
        serving = self._store.serving
        channels = serving.bundle.spec.action_size if serving else 0
        if takeover is None or takeover.operator != _identity(peer):
            error = f"you have not taken over robot {teleop.robot} of {teleop.source[:64]!r}"
            if takeover and takeover.here:
                error += f"; operator {takeover.operator[0]!r} has it"
        elif len(teleop.action) != channels:
            error = f"the action has {len(teleop.action)} numbers; the robot has {channels} action channels"
        if error or takeover is None:
            self._counters["teleops_refused"] += 1
            return [(peer, Reply(0, self._node, f"{self._node}: {error}", "", {}))]
        if teleop.sequence > takeover.sequence:  # a reconnect may deliver an action twice
            self._counters["teleops"] += 1
            takeover.here, takeover.sequence, takeover.received = True, teleop.sequence, now
            takeover.action = np.array(teleop.action, np.float32)
        return []

    def leave(self, peer: Peer, bye: Bye) -> None:
        """An operator's connection has ended: give its robots the safe action until the operator sends again.

        If the operator has reconnected already, nothing changes.
        """
        if not self.held or Farewell.of(bye) is Farewell.RECONNECTED:
            return
        for (source, robot), takeover in self.held.items():
            if takeover.operator == _identity(peer):
                takeover.here, takeover.action = False, None
                words = peer.name, robot, source
                log.warning("%s: operator %s has left; robot %d of %r gets the safe action", self._node, *words)

    def reset(self, target: str) -> None:
        """Give back the robots of ``target`` whose operators have left. An empty ``target`` means all robots."""
        for robot in [robot for robot, takeover in self.held.items() if not takeover.here]:
            if target in ("", robot[0]):
                log.warning("%s: reset gives back robot %d of %r", self._node, robot[1], robot[0])
                del self.held[robot]

    def _refusal(self, peer: Peer, robot: Robot, robots: Mapping[str, Peer], now: float) -> str:
        """Why an operator may not take over a robot; empty if the operator may."""
        name, index = robot
        source = robots.get(name)
        if self._lockstep:
            return "the run is in lock-step, which repeats exactly; an operator needs timing: free"
        if source is None:
            return f"no robot {name[:64]!r} is connected; connected: {', '.join(sorted(robots)[:20]) or 'none'}"
        if index >= source.hello.robots:
            return f"{name!r} has no robot {index}; allowed: 0 to {source.hello.robots - 1}"
        if self._store.serving is None:
            return "the server has no policy; an operator needs the limits of a policy"
        if robot not in self.held and len(self.held) >= _MOST:
            return f"{_MOST} robots are taken over already"
        takeover = self.held.get(robot)
        silent = takeover is not None and not self._in_time(takeover, now)
        return "" if silent else self._taken(peer, robot)

    def _keeps(self, peer: Peer, robot: Robot) -> str:
        """Why an operator may not give back a robot; empty if the operator may."""
        if robot not in self.held:
            return f"robot {robot[1]} of {robot[0][:64]!r} is not taken over"
        return self._taken(peer, robot)

    def _taken(self, peer: Peer, robot: Robot) -> str:
        """The error if another connected operator has the robot; else empty."""
        takeover = self.held.get(robot)
        if takeover is None or not takeover.here or takeover.operator == _identity(peer):
            return ""
        return f"operator {takeover.operator[0]!r} has taken over robot {robot[1]} of {robot[0]!r}"

    def _in_time(self, takeover: _Takeover, now: float) -> bool:
        return now - takeover.received <= self._deadline_s

    def _controls(self) -> dict[str, Any]:
        """What an operator must know to drive: channels with their limits, and the deadline."""
        policy = self._store.serving
        assert policy is not None
        spec, envelope = policy.bundle.spec, policy.safety.envelope
        limits = zip(spec.actions, envelope.low.tolist(), envelope.high.tolist(), strict=True)
        return {
            "robot": spec.name,
            "actions": [{"name": one.name, "unit": one.unit, "low": low, "high": high} for one, low, high in limits],
            "period_ms": spec.control_period * 1e3,
            "deadline_ms": self._deadline_s * 1e3,
        }

    # -- Steps ---------------------------------------------------------------------------------------------------

    def replace(self, name: str, action: Float32, safe: Float32, now: float) -> dict[str, str]:
        """Replace the rows of robots that operators have taken over. Return the Action's field ``operated``.

        Args:
            action: float32[N, A], the policy's actions; changed in place.
            safe: float32[N, A], the safe action, for robots whose operator is silent, has left, or has not
                sent an action yet.
        """
        operated: dict[str, str] = {}
        for (source, robot), takeover in self.held.items():
            if source != name or robot >= len(action):
                continue
            command = takeover.action
            if command is not None and len(command) == action.shape[1] and self._in_time(takeover, now):
                action[robot], operated[str(robot)] = command, takeover.operator[0]
            else:
                action[robot], operated[str(robot)] = safe[robot], ""
        return operated

    def begins(self, step: Step, robot: str) -> bool:
        """Whether the operator of a robot of this Step is connected but has not sent an action yet."""
        takeover = self.held[step.source, int(robot)]
        return takeover.here and takeover.sequence == 0

    # -- reports and restarts ------------------------------------------------------------------------------------

    def detail(self) -> dict[str, str]:
        """The operator of each robot that is taken over. The keys are ``SOURCE/INDEX``."""
        return {
            f"{source}/{robot}": takeover.operator[0] if takeover.here else "nobody: give it back, or take it over"
            for (source, robot), takeover in self.held.items()
        }

    def robots(self) -> dict[str, tuple[int, ...]]:
        """The robots that the policy must not move after a restart: their indices by source."""
        names = sorted({source for source, _ in self.held})
        return {name: tuple(sorted(robot for source, robot in self.held if source == name)) for name in names}

    def restore(self, robots: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Restore the takeovers after a restart, without operators. Return lines for the log."""
        self.held = {(name, robot): _Takeover(("", 0, ""), here=False) for name in robots for robot in robots[name]}
        return [f"an operator had taken over {name}: give it back, or take it over" for name in self.detail()]


def _identity(peer: Peer) -> Identity:
    return peer.name, peer.hello.client, peer.owner
