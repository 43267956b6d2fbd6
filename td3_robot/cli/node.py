"""``td3-robot node``: sends commands to a policy server and its robots, and prints the replies."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from td3_robot.bundle import Bundle, sha256
from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, UsageError
from td3_robot.messages import LONGEST_PAYLOAD, Command, LifecycleChange, Message, Reply
from td3_robot.policies import find_policy
from td3_robot.runtime.arguments import Parser, check_name, deployment, real
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.safety.lifecycle import State
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ClientLink, hello
from td3_robot.util.text import one_line

_LONGEST_REASON = 1000  # characters
_SILENCE = 3.0  # seconds; an idle server answers a Heartbeat every second
_ROBOTS_ANSWER = 1.0  # seconds within which robots answer a question about their state
_LONGEST = 2048  # printed characters of a text from a peer
VERBS = {
    "state": "what state the policy server is in, what it serves, and how its robots are",
    "watch": "one line for every change of a state, until Ctrl-C",
    "configure": "unconfigured to inactive",
    "activate": "let the policy move the robots: from inactive, or from fault",
    "deactivate": "stop that, orderly, also from fault: the safe action, until activate",
    "estop": "emergency stop: the safe action everywhere, until reset and activate; says which robots confirm it",
    "reset": "end an emergency stop, or leave fault, to inactive",
    "load": "serve POLICY (a file, a run folder or a shipped policy) from the next action on",
    "rollback": "serve an older policy again (VERSION, or the one before), and freeze",
    "freeze": "refuse the weights of learners",
    "unfreeze": "accept them",
    "shutdown": "end the process",
}

_EPILOG = """verbs:
{verbs}

examples:
  td3-robot node state --run runs/walker2d
  td3-robot node estop --endpoint tcp://127.0.0.1:5601
  td3-robot node reset --config robot.yaml && td3-robot node activate --config robot.yaml
  td3-robot node activate --config robot.yaml --target leg-0
  td3-robot node load policy.safetensors --config robot.yaml

exit codes:
  0  done
  1  the command is refused, or there is no answer
  1  state: the server or a robot is in FAULT or under an emergency stop
  1  estop, configure, activate: the server has done it, and a connected robot has not confirmed it in time
  1  estop: the server has done it, and no robot is connected
  2  a wrong option or configuration"""
_FOLLOWED: dict[str, Callable[[Reply], bool]] = {
    "estop": lambda answer: answer.detail.get("stopped") is True,
    "configure": lambda answer: answer.state != State.UNCONFIGURED,
    "activate": lambda answer: answer.state == State.ACTIVE,
}
"""Command to a function: returns whether a robot's Reply shows that the robot has followed the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    command = None if parsed.verb == "watch" else _command(parsed)
    endpoint, keys = _place(parsed)
    bus = Bus(keys=open_keys(keys))
    try:
        name = f"operator-{os.getpid()}"
        introduction = hello("operator", name, client=secrets.randbits(63))
        bus.connect(endpoint, ClientLink("policy", introduction, (Reply, LifecycleChange)))
        if command is None:
            return _watch(bus, parsed.timeout)
        return _ask(bus, command, _messages(bus, parsed.timeout), endpoint, parsed)
    finally:
        bus.close("done")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {verb:<{width}}{meaning}" for verb, meaning in VERBS.items())
    parser = Parser(
        prog="td3-robot node",
        description="Command a policy server and the robots it serves.",
        epilog=_EPILOG.format(verbs=verbs),
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do, see below")
    parser.add_argument("argument", nargs="?", metavar="POLICY|VERSION", help="of load and rollback")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, metavar="DIR", help="the policy server of this run")
    where.add_argument("--config", metavar="FILE", help="the policy server deployed with this configuration")
    where.add_argument("--endpoint", metavar="ENDPOINT", help="the policy server at this address")
    parser.add_argument("--keys", metavar="DIR", help="with --endpoint: folder of this machine's keys")
    parser.add_argument("--target", default="", metavar="NAME", help="one robot (default: the server; see protocol.md)")
    parser.add_argument("--reason", default="", help="why, for the log")
    parser.add_argument("--force", action="store_true", help="load: as the newest version, whatever its own is")
    parser.add_argument(
        "--timeout",
        type=real(above=True, unit="s"),
        default=5.0,
        metavar="S",
        help="seconds to wait for an answer (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    return parser


def _place(parsed: argparse.Namespace) -> tuple[str, str | None]:
    """Return the endpoint of the policy server, and the folder of keys for it; None without keys."""
    if parsed.endpoint is not None:
        return str(parsed.endpoint), parsed.keys
    if parsed.keys:
        raise UsageError("--keys goes with --endpoint; a configuration names its own in endpoints.keys")
    if parsed.run:
        run = RunFolder.open(parsed.run)
        config = run.config()
        return run.endpoint("policy", config), config.endpoints.keys
    endpoints = deployment(parsed.config).endpoints
    if not endpoints.policy:
        raise UsageError(f"configuration {parsed.config!r} sets no endpoints.policy; name one with --endpoint")
    return endpoints.policy, endpoints.keys


def _command(parsed: argparse.Namespace) -> Command:
    number, verb, argument = secrets.randbits(63), parsed.verb, parsed.argument
    if (verb == "load" and not argument) or (argument and verb not in ("load", "rollback")):
        raise UsageError(f"{verb} with {argument or 'no argument'}; allowed: load POLICY, rollback [VERSION]")
    if parsed.target:
        check_name("--target", parsed.target)
    reason = parsed.reason.encode("utf-8", "replace").decode()  # a terminal may pass invalid Unicode
    if len(reason) > _LONGEST_REASON and verb != "estop":  # a long reason must not prevent a stop
        raise UsageError(f"--reason has {len(reason)} characters; at most {_LONGEST_REASON} are allowed")
    version, payload = 0, b""
    if verb == "load":
        bundle = Bundle.load(find_policy(argument))
        payload = bundle.encode()
        if len(payload) > LONGEST_PAYLOAD:
            raise UsageError(
                f"policy {argument!r} takes {len(payload):,} bytes; at most {LONGEST_PAYLOAD:,} can be loaded into a "
                f"running server: start it with --bundle"
            )
        version = 0 if parsed.force else bundle.version
    elif argument:
        if not (re.fullmatch(r"[0-9]{1,19}", argument) and 0 < int(argument) < 2**63):
            raise UsageError(
                f"rollback to {argument[:40]!r}; allowed: the number of a version that state lists as held"
            )
        version = int(argument)
    digest = sha256(payload) if payload else ""
    return Command(number, parsed.target, verb, reason[:_LONGEST_REASON], version, digest, payload)


def _messages(bus: Bus, timeout: float) -> Iterator[Message | None]:
    """Yield the messages of the server. Yield None one time, when the server has welcomed this client."""
    end, welcomed = time.monotonic() + timeout, False
    while time.monotonic() < end:
        for _, message in bus.receive(0.05):
            yield message
        if not welcomed and bus.welcome("policy"):
            welcomed = True
            yield None


def _ask(
    bus: Bus, command: Command, messages: Iterator[Message | None], endpoint: str, parsed: argparse.Namespace
) -> int:
    for message in messages:
        if message is None:
            bus.send("policy", command)
        elif isinstance(message, Reply) and message.id == command.id:
            reply, unconfirmed = message, ""
            faults: dict[str, str] = {}
            if command.verb in _FOLLOWED and not command.target and not reply.error:
                reply, unconfirmed = _confirmed(bus, command.verb, reply, messages)
            if command.verb == "state" and not reply.error:
                reply, faults = _with_faults(bus, reply)
            (_print_json if parsed.json else _print)(reply)
            if unconfirmed:
                print(f"td3-robot node: {unconfirmed}", file=sys.stderr)
            return EXIT_CHECK_FAILED if reply.error or unconfirmed or faults else EXIT_GOOD
    who = command.target or "policy server"
    what = "; the stop is NOT confirmed" if command.verb == "estop" else ""
    print(f"td3-robot node: no answer from {who} at {endpoint} within {parsed.timeout:g} s{what}", file=sys.stderr)
    return EXIT_CHECK_FAILED


def _states(bus: Bus, reply: Reply, messages: Iterator[Message | None]) -> dict[str, Reply | None]:
    """Ask every connected robot for its state. Return the Replies by robot; None for a robot that does not answer."""
    connected = reply.detail.get("connected")
    robots = [name for name in connected if isinstance(name, str)] if isinstance(connected, list) else []
    asked = {secrets.randbits(63): name for name in robots}
    for number, name in asked.items():
        bus.send("policy", Command(number, name, "state", "", 0, "", b""))
    answers: dict[str, Reply | None] = dict.fromkeys(robots)
    while asked and (answer := next(messages, reply)) is not reply:
        if isinstance(answer, Reply) and answer.id in asked:
            answers[asked.pop(answer.id)] = answer
    return answers


def _confirmed(bus: Bus, verb: str, reply: Reply, messages: Iterator[Message | None]) -> tuple[Reply, str]:
    """Ask every connected robot whether it has followed a Command.

    The server passes commands on in order, so each robot gets the Command before the question.

    Returns:
        The server's Reply, with the robots that have followed added to its detail, and an error text.
            The text names the robots that have not followed; it is empty if all have followed. After an estop it is
            also an error if no robot has followed.
    """
    answers = _states(bus, reply, messages)
    in_all = reply.detail.get("connected_in_all")
    more = in_all - len(answers) if isinstance(in_all, int) else 0
    missing = {
        name: (answer.error or answer.state) if answer else "no answer"
        for name, answer in answers.items()
        if answer is None or answer.error or not _FOLLOWED[verb](answer)
    }
    followed = sorted({*answers} - {*missing})
    reply = replace(reply, detail={**reply.detail, "confirmed": followed, "unconfirmed": sorted(missing)})
    if missing or more > 0:
        names = ", ".join(f"{name} ({state})" for name, state in sorted(missing.items()))
        who = [one_line(names, _LONGEST)] * bool(missing) + [f"{more} more robots"] * (more > 0)
        how = "" if verb == "estop" else "; to command one of them alone: --target NAME"
        return reply, f"{verb} is NOT confirmed by {' and '.join(who)}{how}"
    return reply, "" if followed or verb != "estop" else "no robot is connected: none has confirmed the stop"


def _with_faults(bus: Bus, reply: Reply) -> tuple[Reply, dict[str, str]]:
    """Put the faults and emergency stops of the server and its robots first into a Reply about a state.

    Returns:
        The Reply, with ``faults`` and the states of the robots in its detail, and the faults: reasons by node.
    """
    answers = _states(bus, reply, _messages(bus, _ROBOTS_ANSWER))
    sources, stopped = reply.detail.get("sources"), reply.detail.get("stopped")
    faults: dict[str, str] = {}
    if reply.state == State.FAULT:
        faults[reply.node] = str(reply.detail.get("reason", ""))
    for name in stopped if isinstance(stopped, list) else ():
        faults[str(name)] = "emergency stop"
    for name, source in sources.items() if isinstance(sources, dict) else ():
        if isinstance(source, dict) and source.get("watch") == State.FAULT:
            faults[name] = str(source.get("reason", ""))
    for name, answer in answers.items():
        if answer and answer.state == State.FAULT:
            faults[name] = str(answer.detail.get("reason", ""))
    states = {name: answer.state if answer else "no answer" for name, answer in answers.items()}
    detail = {"faults": faults, **({"robots": states} if states else {}), **reply.detail}
    return replace(reply, detail=detail), faults


def _watch(bus: Bus, timeout: float) -> int:
    """Print every change of state, and every loss and return of the connection, until a signal comes."""
    begin, sees, saw = time.monotonic(), None, False
    while True:
        for _, message in bus.receive(0.05):
            if isinstance(message, LifecycleChange):
                _say(_line(message))
        now = time.monotonic()
        if bus.welcome("policy") and now - bus.clients["policy"].received_at < _SILENCE:
            if not sees:
                _say("watching again; changes in between are not shown" if saw else "watching")
            sees = saw = True
        elif sees or (sees is None and now > begin + timeout):
            _say("NOT watching: the policy server is silent; its changes of state are not shown")
            sees = False


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
        print(f"td3-robot node: refused: {one_line(reply.error, _LONGEST)}", file=sys.stderr)
        return
    for name, reason in reply.detail.get("faults", {}).items():
        print(f"FAULT {one_line(name)}: {one_line(reason, _LONGEST)}")
    print(f"{one_line(reply.node)}: {one_line(reply.state)}")
    for key, value in reply.detail.items():
        if key == "faults":
            continue
        if isinstance(value, dict):
            for name, item in value.items():
                text = ", ".join(f"{k} {v}" for k, v in item.items()) if isinstance(item, dict) else item
                print(f"  {one_line(key)} {one_line(name)}: {one_line(text, _LONGEST)}")
        elif value not in ("", None):
            print(f"  {one_line(key)}: {one_line(value, _LONGEST)}")


if __name__ == "__main__":
    sys.exit(main())
