"""What an operator can do on the page: each action is one Command to the policy server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from td3_robot.config.schema import Config
from td3_robot.errors import CommandError, Td3RobotError
from td3_robot.messages import Reply
from td3_robot.operators import Operator, connect
from td3_robot.runtime.run_folder import RunFolder

LONGEST = 1 << 13
"""The maximum size of a request, in bytes."""
Verb = Literal["estop", "reset", "activate", "deactivate", "load", "rollback", "freeze", "unfreeze"]


class Action(msgspec.Struct, forbid_unknown_fields=True):
    """A request of the page.

    Attributes:
        verb: what to do.
        policy: for ``load``: a policy file, a run folder or a shipped policy, on the machine of the dashboard.
    """

    verb: Verb
    policy: Annotated[str, msgspec.Meta(max_length=4096)] = ""


_REASON = "dashboard"
_VERBS: dict[str, Callable[[Operator, Action], Reply]] = {
    "estop": lambda operator, _: operator.estop(_REASON),
    "reset": lambda operator, _: operator.reset(_REASON),
    "activate": lambda operator, _: operator.activate(_REASON),
    "deactivate": lambda operator, _: operator.deactivate(_REASON),
    "load": lambda operator, action: operator.load(action.policy, _REASON),
    "rollback": lambda operator, _: operator.rollback(reason=_REASON),
    "freeze": lambda operator, _: operator.freeze(_REASON),
    "unfreeze": lambda operator, _: operator.unfreeze(_REASON),
}


def act(body: bytes, folder: RunFolder | None, config: Config) -> dict[str, Any]:
    """Send a command to the policy server of a run or configuration, and wait for the answer.

    Returns:
        ``done``: whether the server, and each robot that must follow, has confirmed the action. ``text``: the problem,
        empty if there is none. ``state``: the server's state in its reply. ``confirmed``: the robots that confirmed
        the action.

    Raises:
        msgspec.DecodeError: the request is malformed.
    """
    action = msgspec.json.decode(body, type=Action)
    reply, text = None, ""
    try:
        config = folder.config() if folder else config
        endpoint = folder.endpoint("policy", config) if folder else config.endpoints.policy
        if not endpoint:
            raise CommandError("the configuration sets no endpoints.policy")
        reply = _VERBS[action.verb](connect(endpoint, config.endpoints.keys), action)
    except (Td3RobotError, OSError, ValueError) as error:
        reply, text = getattr(error, "reply", None), str(error)
    detail = reply.detail if reply else {}
    state = reply.state if reply else ""
    return {"done": not text, "text": text, "state": state, "confirmed": detail.get("confirmed", [])}
