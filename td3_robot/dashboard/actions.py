"""What an operator can do on the dashboard's page: each action is one Command to each policy server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from td3_robot.config.schema import Config
from td3_robot.errors import CommandError, Td3RobotError
from td3_robot.operators import Answer, ask_each, connect, load_command, make_command
from td3_robot.runtime.run_folder import RunFolder

LONGEST = 1 << 13
"""The maximum size of a request, in bytes."""
Verb = Literal["estop", "reset", "activate", "deactivate", "load", "rollback", "freeze", "unfreeze"]


class Action(msgspec.Struct, forbid_unknown_fields=True):
    """A request from the page.

    Attributes:
        verb: what to do.
        policy: for ``load``: a policy file, a run folder or a shipped policy, on the machine of the dashboard.
    """

    verb: Verb
    policy: Annotated[str, msgspec.Meta(max_length=4096)] = ""


_REASON = "dashboard"


def act(action: Action, folder: RunFolder | None, config: Config) -> dict[str, Any]:
    """Send a command to the policy servers of a run or configuration, and wait for the answers.

    Only a run on a cluster has several policy servers.

    Returns:
        ``done``: whether each server has confirmed the action. For ``estop`` and ``activate``, each connected robot
        must have confirmed it, too. ``text``: the problems. The text is empty if there are no problems. ``state``: the
        states that the servers report, without repetitions. ``confirmed``: the robots that confirmed the action.
    """
    answers: list[Answer] = []
    problems = []
    try:
        config = folder.config() if folder else config
        servers = folder.policy_servers(config) if folder else [config.endpoints.policy or ""]
        if not all(servers):
            raise CommandError("the configuration sets no endpoints.policy")
        operators = [connect(server, config.endpoints.keys) for server in servers]
        if action.verb == "load":
            command = load_command(action.policy, "", _REASON, force=False)
        else:
            command = make_command(action.verb, reason=_REASON)
        answers = ask_each(operators, lambda operator: operator.ask(command))
    except (Td3RobotError, OSError, ValueError) as error:
        problems.append(str(error))
    problems += [str(answer.error) for answer in answers if answer.error]
    replies = [answer.reply for answer in answers if answer.reply]
    return {
        "done": not problems,
        "text": "; ".join(problems),
        "state": ", ".join(dict.fromkeys(reply.state for reply in replies)),
        "confirmed": [name for reply in replies for name in reply.detail.get("confirmed", [])],
    }
