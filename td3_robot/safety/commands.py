"""Commands of operators: what is common to the policy server and the robots, which both take them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from td3_robot.errors import Td3RobotError
from td3_robot.messages import Command, Reply
from td3_robot.safety.lifecycle import Lifecycle
from td3_robot.util.text import one_line

log = logging.getLogger(__name__)

Verbs = Mapping[str, Callable[[Command, float], None]]
"""What each verb does, told the Command and the time in seconds; raises a Td3RobotError to refuse it."""

TO_ALL = ("configure", "activate", "deactivate", "reset", "estop")
"""Verbs that, said to a policy server without a target, hold for its robots too."""


def watch_follows(command: Command) -> bool:
    """Whether a policy server's watch over a robot follows a Command, too; ``deactivate`` where it names the robot."""
    return command.verb in ("activate", "reset", "estop") or (command.verb == "deactivate" and bool(command.target))


def carry_out(
    command: Command, sender: str, verbs: Verbs, lifecycle: Lifecycle, detail: Callable[[], dict[str, Any]], now: float
) -> Reply:
    """Do what a Command asks; the Reply says what became of it, and what the node's state is now. Never raises.

    Args:
        sender: who asks, for the log.
        detail: what the Reply says of the node beyond its state.
        now: in seconds.
    """
    error = ""
    verb = verbs.get(command.verb)
    if verb is None:
        error = f"{lifecycle.node}: no verb {command.verb[:40]!r}; allowed: {', '.join(verbs)}"
    else:
        try:
            verb(command, now)
        except Td3RobotError as refusal:
            error = str(refusal)
    if error or command.verb != "state":
        log.info("%s: %r from %s: %s", lifecycle.node, command.verb[:40], sender, one_line(error, 2048) or "done")
    return Reply(command.id, lifecycle.node, error[:2048], lifecycle.state, detail())
