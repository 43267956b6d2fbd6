"""``td3-robot node``: sends commands to a policy server and its robots, and prints the replies."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from td3_robot.cli.takeover import drive
from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, CommandError, UsageError
from td3_robot.messages import Command, LifecycleChange, Reply
from td3_robot.operators import Operator, ask_each, connect, load_command, make_command
from td3_robot.runtime.arguments import Parser, add_index, policy_servers, real
from td3_robot.util.text import one_line

_LONGEST = 2048  # maximum number of printed characters of a text from a peer
VERBS = {
    "state": "print the states of the policy server and its robots; faults and emergency stops come first",
    "watch": "print a line for each change of state, until Ctrl-C",
    "configure": "go from unconfigured to inactive",
    "activate": "go from inactive or fault to active: the policy moves the robots",
    "deactivate": "go from active or fault to inactive: the robots apply the safe action until activate",
    "estop": "emergency stop: all robots apply the safe action until reset and activate; print which robots confirm it",
    "reset": "end an emergency stop or a fault; the new state is inactive, or unconfigured if the node "
    "has never been configured",
    "load": "serve POLICY (a file, a run folder or a shipped policy) from the next action on",
    "rollback": "serve VERSION again, and refuse the weights of learners; without VERSION, go back to the newest "
    "earlier policy that a person loaded; if no person loaded an earlier policy, go back to the policy just before the "
    "current policy",
    "freeze": "refuse the weights of learners",
    "unfreeze": "accept the weights of learners again",
    "takeover": "drive the robot of --target with the keyboard, or with actions from standard input, one per line",
    "give_back": "give the robot of --target back to the policy, after its operator has left",
    "shutdown": "end the process",
}
_WITH_ANSWER = [verb for verb in VERBS if verb not in ("watch", "takeover")]
_USES = {
    "force": ["load"],
    "index": ["takeover", "give_back"],
    "json": _WITH_ANSWER,
    "reason": [*_WITH_ANSWER, "takeover"],
}
"""Maps an option to the verbs that use it. An option that is not in this table is allowed with every verb."""

_EPILOG = """verbs:
{verbs}

examples:
  td3-robot node state --run runs/walker2d
  td3-robot node estop --endpoint tcp://127.0.0.1:5601
  td3-robot node reset --config robot.yaml && td3-robot node activate --config robot.yaml
  td3-robot node activate --config robot.yaml --target leg-0
  td3-robot node load policy.safetensors --config robot.yaml
  td3-robot node takeover --config robot.yaml --target leg-0

exit codes:
  0  done
  1  the command is refused, or there is no answer
  1  state: the server or a robot is in FAULT or under an emergency stop
  1  estop, configure, activate: the server has done it, but a connected robot has not confirmed it
  1  estop: the server has done it, but no robot is connected
  2  a wrong option or configuration"""


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    _refuse_unused(parsed)
    command = None if parsed.verb == "watch" else _command(parsed)
    servers, keys = policy_servers(parsed, parsed.target)
    operators = {server: connect(server, keys, timeout=parsed.timeout) for server in servers}
    if parsed.verb == "takeover":
        if sys.stdin is None:
            raise UsageError("takeover reads standard input, which is closed; allowed: a terminal, a pipe or a file")
        [operator] = operators.values()  # the server of --target
        with operator.takeover(parsed.target, parsed.index, parsed.reason) as robot:
            drive(robot, sys.stdin.fileno())
        return EXIT_GOOD
    if command:
        return _ask(list(operators.values()), command, _print_json if parsed.json else _print)
    *others, (_, last) = operators.items()
    for server, operator in others:
        threading.Thread(target=_watch, args=(operator, f"{server}: "), daemon=True).start()
    _watch(last, f"{servers[-1]}: " if others else "")
    return EXIT_GOOD


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {verb:<{width}}{meaning}" for verb, meaning in VERBS.items())
    parser = Parser(
        prog="td3-robot node",
        description="Command a policy server and the robots it serves.",
        epilog=_EPILOG.format(verbs=verbs),
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do, see below")
    parser.add_argument("argument", nargs="?", metavar="POLICY|VERSION", help="for load and rollback")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, metavar="DIR", help="the policy servers of this run")
    where.add_argument("--config", metavar="FILE", help="the policy server deployed with this configuration")
    where.add_argument("--endpoint", metavar="ENDPOINT", help="the policy server at this address")
    parser.add_argument("--keys", metavar="DIR", help="with --endpoint: folder of this machine's keys")
    parser.add_argument(
        "--target", default="", metavar="NAME", help="command only this robot (default: the server; see protocol.md)"
    )
    add_index(parser)
    parser.add_argument("--reason", default="", help="all verbs except watch: why you give the command, for the log")
    parser.add_argument(
        "--force",
        action="store_true",
        help="load: accept POLICY even if its version is not above all versions so far; POLICY then gets the highest "
        "version so far plus 1",
    )
    parser.add_argument(
        "--timeout",
        type=real(above=True, unit="s"),
        default=5.0,
        metavar="S",
        help="seconds to wait for an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="all verbs except watch and takeover: print each answer as one JSON object"
    )
    return parser


def _refuse_unused(parsed: argparse.Namespace) -> None:
    """Raise UsageError for an argument or option that the verb does not use, and for ``load`` without a policy."""
    verb, argument = parsed.verb, parsed.argument
    if (verb == "load" and not argument) or (argument and verb not in ("load", "rollback")):
        raise UsageError(
            f"{verb} with {argument or 'no argument'} is not allowed; "
            "these verbs have an argument: load POLICY, rollback [VERSION]"
        )
    for option, verbs in _USES.items():
        if getattr(parsed, option) and verb not in verbs:
            raise UsageError(f"--{option} is not allowed with {verb}; allowed: with {', '.join(verbs)}")


def _command(parsed: argparse.Namespace) -> Command:
    verb, argument = parsed.verb, parsed.argument
    if verb == "load":
        return load_command(argument, parsed.target, parsed.reason, force=parsed.force)
    if argument and not (re.fullmatch(r"[0-9]{1,19}", argument) and 0 < int(argument) < 2**63):
        raise UsageError(f"rollback to {argument[:40]!r}; allowed: a version from the output of 'td3-robot node state'")
    if verb == "takeover" and not parsed.target:
        raise UsageError("takeover needs --target NAME; 'td3-robot node state' lists the robots")
    return replace(make_command(verb, parsed.target, parsed.reason, int(argument or 0)), robot=parsed.index)


def _ask(operators: Sequence[Operator], command: Command, show: Callable[[Reply], None]) -> int:
    """Send a command to each policy server, and show the replies. Raise an error if a request failed."""
    answers = ask_each(operators, lambda operator: operator.ask(command))
    replies = [answer.reply for answer in answers if answer.reply]
    for reply in replies:
        show(reply)
    errors = [answer.error for answer in answers if answer.error]
    if len(errors) > 1:
        raise CommandError("; ".join(map(str, errors)))
    if errors:
        raise errors[0]
    return EXIT_CHECK_FAILED if any(reply.detail.get("faults") for reply in replies) else EXIT_GOOD


def _watch(operator: Operator, server: str) -> None:
    for event in operator.watch():
        _say(_line(event) if isinstance(event, LifecycleChange) else f"{server}{event.value}")


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def _line(change: LifecycleChange) -> str:
    # The text comes from a peer. It must not control the terminal or add lines.
    node, before, after = (one_line(text) for text in (change.node, change.previous, change.state))
    return f"{node}: {before} -> {after}: {one_line(change.reason, _LONGEST)}"


def _print_json(reply: Reply) -> None:
    print(json.dumps({"node": reply.node, "state": reply.state, "error": reply.error, **reply.detail}))


def _print(reply: Reply) -> None:
    if reply.error:
        return  # the caller prints the error
    for name, reason in reply.detail.get("faults", {}).items():
        print(f"FAULT {one_line(name)}: {one_line(reason, _LONGEST)}")
    print(f"{one_line(reply.node)}: {one_line(reply.state)}")
    for key, value in reply.detail.items():
        if key == "faults":
            continue
        if isinstance(value, dict):
            for name, item in value.items():
                text = ", ".join(f"{k} {_rounded(v)}" for k, v in item.items()) if isinstance(item, dict) else item
                print(f"  {one_line(key)} {one_line(name)}: {one_line(_rounded(text), _LONGEST)}")
        elif value not in ("", None):
            print(f"  {one_line(key)}: {one_line(_rounded(value), _LONGEST)}")


def _rounded(value: Any) -> Any:
    """Return a float as text with four digits. Return any other value unchanged."""
    return f"{value:.4g}" if isinstance(value, float) else value
