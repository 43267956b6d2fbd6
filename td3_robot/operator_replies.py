"""The replies to an operator's command: which robots have followed it, and which robots have a fault."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from td3_robot.errors import CommandError
from td3_robot.messages import Command, Message, Reply
from td3_robot.safety.lifecycle import State
from td3_robot.transport.bus import Bus
from td3_robot.util.text import one_line

LONGEST_ERROR = 2048  # maximum number of characters of a text from a peer
_ROBOTS_ANSWER = 1.0  # seconds within which robots answer a question about their state
FOLLOWED: dict[str, Callable[[Reply], bool]] = {
    "estop": lambda answer: answer.detail.get("stopped") is True,
    "configure": lambda answer: answer.state != State.UNCONFIGURED,
    "activate": lambda answer: answer.state == State.ACTIVE,
}
"""For each command that robots confirm: a function that takes a robot's Reply.

The function returns whether the robot has followed the command.
"""


def messages_of(bus: Bus, timeout: float) -> Iterator[Message | None]:
    """Yield the messages of the server until the timeout. Yield None once, after the Welcome of the server."""
    end, welcomed = time.monotonic() + timeout, False
    while time.monotonic() < end:
        for _, message in bus.receive(0.05):
            yield message
        if not welcomed and bus.welcome("policy"):
            welcomed = True
            yield None


def _states(bus: Bus, reply: Reply, messages: Iterator[Message | None]) -> dict[str, Reply | None]:
    """Ask each robot in the Reply for its state. Return a map from the robots' names to their answers.

    The value is None for a robot that does not answer.
    """
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


def confirmed(bus: Bus, verb: str, reply: Reply, messages: Iterator[Message | None]) -> Reply:
    """Ask the connected robots whether they have followed a Command that the server has passed on.

    Add two lists to ``detail`` of the server's Reply: ``confirmed`` (names of the robots that followed) and
    ``unconfirmed`` (names of the other robots). The Reply contains the names of at most 512 robots. This function asks
    only these robots.

    Raises:
        CommandError: a robot has not followed the Command; or the Reply omits the name of a connected robot; or the
            Command is ``estop`` and no robot is connected.
    """
    answers = _states(bus, reply, messages)
    in_all = reply.detail.get("connected_in_all")
    more = in_all - len(answers) if isinstance(in_all, int) else 0
    missing = {
        name: (answer.error or answer.state) if answer else "no answer"
        for name, answer in answers.items()
        if answer is None or answer.error or not FOLLOWED[verb](answer)
    }
    followed = sorted({*answers} - {*missing})
    reply = replace(reply, detail={**reply.detail, "confirmed": followed, "unconfirmed": sorted(missing)})
    if missing or more > 0:
        names = ", ".join(f"{name} ({state})" for name, state in sorted(missing.items()))
        who = [one_line(names, LONGEST_ERROR)] * bool(missing) + [f"{more} more robots"] * (more > 0)
        how = "" if verb == "estop" else "; to command one robot alone, give its name as target"
        raise CommandError(f"{verb} is NOT confirmed by {' and '.join(who)}{how}", reply)
    if verb == "estop" and not followed:
        raise CommandError("no robot is connected, so no robot has confirmed the stop", reply)
    return reply


def with_faults(bus: Bus, reply: Reply) -> Reply:
    """Add the faults and emergency stops of the server and its robots to the Reply that answers a Command ``state``.

    The detail of the new Reply begins with the map ``faults``. Its keys are the names of the nodes with a fault or an
    emergency stop, and its values are the reasons. Two more maps follow, unless they are empty. ``robots`` maps each
    robot to its state. ``loops`` maps each robot to the rate, the jitter and the share of missed deadlines of its
    control loop.
    """
    answers = _states(bus, reply, messages_of(bus, _ROBOTS_ANSWER))
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
    loops = {name: answer.detail["loop"] for name, answer in answers.items() if answer and "loop" in answer.detail}
    found = {"robots": states, "loops": loops}
    detail = {"faults": faults, **{key: value for key, value in found.items() if value}, **reply.detail}
    return replace(reply, detail=detail)
