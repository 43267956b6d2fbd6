"""Carries out the Commands of operators in the policy server and in drivers."""

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
"""Maps each verb to its function. The function gets the Command and the time in seconds.

To refuse the Command, the function raises a Td3RobotError.
"""


def carry_out(
    command: Command, sender: str, verbs: Verbs, lifecycle: Lifecycle, detail: Callable[[], dict[str, Any]], now: float
) -> Reply:
    """Carry out a Command at ``now`` (s). Return the Reply, with an error if the node refuses the Command.

    Args:
        sender: who sent the Command, for the log.
        detail: returns the ``detail`` field of the Reply.
    """
    error = ""
    # A robot that keeps raising EmergencyStop sends ``estop`` in every control period, with id 0. Log only the first.
    repeated = command.verb == "estop" and lifecycle.stopped and not command.id
    quiet = command.verb == "state" or repeated
    verb = verbs.get(command.verb)
    if verb is None:
        error = f"{lifecycle.node}: no verb {command.verb[:40]!r}; allowed: {', '.join(verbs)}"
    else:
        try:
            verb(command, now)
        except Td3RobotError as refusal:
            error = str(refusal)
    if error or not quiet:
        log.info("%s: %r from %s: %s", lifecycle.node, command.verb[:40], sender, one_line(error, 2048) or "done")
    return Reply(command.id, lifecycle.node, error[:2048], lifecycle.state.value, detail())
