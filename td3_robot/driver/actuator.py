"""Applies actions and the safe action to the robots, and handles what the robots report."""

from __future__ import annotations

from td3_robot.driver.body import Body
from td3_robot.driver.guard import Guard
from td3_robot.messages import Command
from td3_robot.specs import Float32


class Actuator:
    """Applies actions to the robots of a source. The guard decides when the safe action is due.

    Attributes:
        made_safe: whether the robots got the safe action in this turn.
        own_stop: the emergency stop that the robots asked for; None if they asked for no stop, or if the stop has
            ended. The source sends this stop again after each Welcome of the policy server.
    """

    def __init__(self, body: Body, guard: Guard, source: str) -> None:
        self.made_safe = False
        self.own_stop: Command | None = None
        self._body = body
        self._guard = guard
        self._source = source
        self._is_safe = False  # whether the safe action was already applied since it became due
        self._unsent: list[Command] = []

    def apply(self, action: Float32) -> None:
        """Apply ``action``, float32[N, A], from now on."""
        self._body.command(action)

    def make_safe(self) -> None:
        """Apply the safe action now."""
        self.made_safe = True
        self.apply(self._guard.envelope.safe_action(self._body.commanded))

    def follow_guard(self) -> None:
        """If the safe action has become due, apply it now.

        While the safe action stays due, the source applies the safe action again in each control period.
        """
        if self._guard.safe and not self._is_safe and not self.made_safe:
            self.make_safe()
        self._is_safe = self._guard.safe

    def lose_robots(self) -> None:
        """Forget that the safe action was applied, because another process could move the robots from now on."""
        self._is_safe = False

    def listen(self, now: float) -> None:
        """Handle the robots' reports.

        An emergency stop stops all robots of the policy server. A problem leads to FAULT.
        """
        if self._body.stop:
            reason, self._body.stop = self._body.stop, ""
            self._guard.lifecycle.stop(reason, now)
            self.own_stop = Command(0, "", "estop", f"{self._source}: {reason}"[:2048], 0, "", b"")
            self._unsent.append(self.own_stop)
        if self._body.problem:
            self._guard.trouble(self._body.problem, now)

    def take_stops(self) -> list[Command]:
        """Return the emergency stops that the source must send to the policy server. Each stop is returned once."""
        taken, self._unsent = self._unsent, []
        return taken
