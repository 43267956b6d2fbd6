"""The operator of a policy server commands the server and its robots, and watches their states."""

from __future__ import annotations

import enum
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from msgspec.structs import replace

from td3_robot.bundle import sha256
from td3_robot.errors import ArgumentError, CommandError, Td3RobotError, UsageError
from td3_robot.messages import LARGEST, LONGEST_PAYLOAD, Command, LifecycleChange, Reply, Teleop
from td3_robot.operator_replies import FOLLOWED, LONGEST_ERROR, confirmed, messages_of, with_faults
from td3_robot.policies import Policy, load_policy
from td3_robot.transport import endpoints
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import AllowList, open_keys
from td3_robot.transport.link import ClientLink, hello
from td3_robot.util import arguments
from td3_robot.util.text import NAME, NAME_RULE, one_line

_LONGEST_REASON = 1000  # characters
# If no message comes for this many seconds, the server counts as silent. If this client has sent nothing or received
# nothing for 1 s, the client sends a Heartbeat. The server returns the Heartbeat at once.
_SILENCE = 3.0


class Watching(enum.Enum):
    """A change of the connection while :meth:`Operator.watch` runs."""

    BEGUN = "watching"
    AGAIN = "watching again; changes in between are not shown"
    SILENT = "NOT watching: the policy server is silent; its changes of state are not shown"


class Operator:
    """Commands a policy server and its robots. :func:`connect` returns an Operator.

    Each method that returns a Reply opens a connection, sends one command, waits for the answer and closes the
    connection. So several threads can share an operator. A command with ``target`` is for the robot with this name. A
    command without ``target`` is for the server. The server passes ``configure``, ``activate``, ``deactivate``,
    ``reset`` and ``estop`` on to all its robots.

    In a Reply, ``node`` is the node that answered. ``state`` is the new state of this node: unconfigured, inactive,
    active, fault or finalized. ``detail`` is a map with more facts about the node.

    The methods raise a CommandError if the node refuses the command or does not answer in time. ``configure``,
    ``activate`` and ``estop`` without ``target`` also raise a CommandError if a connected robot does not follow the
    command. The methods raise an ArgumentError if an argument is not allowed.

    Args:
        endpoint: address of the policy server.
        keys: the keys of this machine; None without keys.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, endpoint: str, keys: AllowList | None, timeout: float) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._timeout = timeout

    def state(self, *, target: str = "") -> Reply:
        """Return the state, the policy and the robots.

        If a node has a fault or an emergency stop, ``detail["faults"]`` holds the reason under the name of this node.
        """
        return self.ask(make_command("state", target))

    def configure(self, reason: str = "", *, target: str = "") -> Reply:
        """Change the state from unconfigured to inactive."""
        return self.ask(make_command("configure", target, reason))

    def activate(self, reason: str = "", *, target: str = "") -> Reply:
        """Let the policy move the robots. Allowed in the states inactive and fault, except during an emergency stop."""
        return self.ask(make_command("activate", target, reason))

    def deactivate(self, reason: str = "", *, target: str = "") -> Reply:
        """Stop the robots in an orderly way. They apply the safe action until :meth:`activate`."""
        return self.ask(make_command("deactivate", target, reason))

    def estop(self, reason: str = "", *, target: str = "") -> Reply:
        """Stop the robots in an emergency. They apply the safe action until :meth:`reset` and :meth:`activate`.

        Without ``target``, ``detail["confirmed"]`` names the robots that have stopped. This method cuts a reason after
        1000 characters, because a long reason must not prevent a stop.

        Without ``target``, this method also raises a CommandError if a robot has not confirmed its stop, or if no robot
        is connected. In both cases, the emergency stop of the server itself is in force, and the ``reply`` of the
        CommandError has an empty ``error``.
        """
        return self.ask(make_command("estop", target, reason))

    def reset(self, reason: str = "", *, target: str = "") -> Reply:
        """End an emergency stop, or leave the state fault.

        The next state is inactive. If nobody has configured the node, the next state is unconfigured.
        """
        return self.ask(make_command("reset", target, reason))

    def load(self, policy: str | Path | Policy, reason: str = "", *, force: bool = False) -> Reply:
        """Serve another policy from the next action on.

        Args:
            policy: a :class:`Policy`, the name of a shipped policy, a run folder, or a policy file.
            reason: why the operator loads it, for the log; at most 1000 characters.
            force: replace the version of the policy by the highest version so far plus 1. So the server also accepts a
                policy with a lower version.
        """
        return self.ask(load_command(policy, "", reason, force=force))

    def rollback(self, version: int = 0, reason: str = "") -> Reply:
        """Serve another policy that the server holds, usually an older one, and refuse the weights of learners.

        Args:
            version: version of the policy, see :meth:`state`. 0 chooses from the held versions before the current
                version. The choice is the newest version that a person loaded. If no person loaded any of these
                versions, the choice is the newest of these versions.
            reason: why the operator does this, for the log.
        """
        return self.ask(make_command("rollback", "", reason, version))

    def freeze(self, reason: str = "") -> Reply:
        """Refuse the weights of learners."""
        return self.ask(make_command("freeze", "", reason))

    def unfreeze(self, reason: str = "") -> Reply:
        """Accept the weights of learners."""
        return self.ask(make_command("unfreeze", "", reason))

    def shutdown(self, reason: str = "", *, target: str = "") -> Reply:
        """End the process of the server. With ``target``, end the driver of this robot."""
        return self.ask(make_command("shutdown", target, reason))

    def takeover(self, robot: str, index: int = 0, reason: str = "") -> Takeover:
        """Take over one robot: your actions replace the policy's actions until you give the robot back.

        The server refuses while another operator drives the robot. A silent operator does not prevent a takeover.

        Args:
            robot: name of the driver or simulator, as in ``detail["connected"]`` of :meth:`state`.
            index: index of the robot in the source; a driver has only robot 0.
            reason: why the operator does this, for the log.

        Returns:
            The takeover, which is also a context manager. It has its own connection.

        Raises:
            ArgumentError: the name or the index is not allowed.
            CommandError: the server refuses, or does not answer in time.
        """
        if not arguments.text("robot", robot):
            allowed = "the name of a driver or simulator, see detail['connected'] of Operator.state"
            raise ArgumentError("robot", f"is ''; allowed: {allowed}")
        _check_name("robot", robot)
        index = arguments.whole("index", index, 0, 2**32 - 1)
        connection = ExitStack()
        try:
            bus = connection.enter_context(self._connection())
            command = replace(make_command("takeover", robot, reason), robot=index)
            return Takeover(connection, bus, command, self._ask_over)
        except BaseException:
            connection.close()
            raise

    def watch(self) -> Iterator[LifecycleChange | Watching]:
        """Yield each change of a state, and each loss and return of the connection. The iterator never ends."""
        with self._connection() as bus:
            begin, sees, saw = time.monotonic(), None, False
            while True:
                yield from (message for _, message in bus.receive(0.05) if isinstance(message, LifecycleChange))
                now = time.monotonic()
                if bus.welcome("policy") and now - bus.clients["policy"].received_at < _SILENCE:
                    if not sees:
                        yield Watching.AGAIN if saw else Watching.BEGUN
                    sees = saw = True
                elif sees or (sees is None and now > begin + self._timeout):
                    yield Watching.SILENT
                    sees = False

    def ask(self, command: Command) -> Reply:
        """Send any Command and return its Reply."""
        with self._connection() as bus:
            return self._ask_over(bus, command)

    def _ask_over(self, bus: Bus, command: Command) -> Reply:
        begin, messages = time.monotonic(), messages_of(bus, self._timeout)
        for message in messages:
            if message is None:
                bus.send("policy", command)
            elif isinstance(message, Reply) and message.id == command.id:
                if message.error:
                    raise CommandError(f"refused: {one_line(message.error, LONGEST_ERROR)}", message)
                if command.verb == "state":
                    return with_faults(bus, message)
                if command.verb in FOLLOWED and not command.target:
                    return confirmed(bus, command.verb, message, messages)
                return message
        server, within = f"policy server at {endpoints.absolute(self._endpoint)}", f"within {self._timeout:g} s"
        heard = bus.welcome("policy") and bus.clients["policy"].received_at > max(begin, time.monotonic() - _SILENCE)
        only_robot = command.target and heard
        silent = f"{command.target} {within}, but the {server} answers" if only_robot else f"{server} {within}"
        what = "; the stop is NOT confirmed" if command.verb == "estop" else ""
        raise CommandError(f"no answer from {silent}{what}")

    @contextmanager
    def _connection(self) -> Iterator[Bus]:
        """Connect with a new name. The server possibly still knows the name of an earlier connection that has ended."""
        bus = Bus(keys=self._keys)
        try:
            name = f"operator-{os.getpid()}-{secrets.token_hex(4)}"
            introduction = hello("operator", name, client=secrets.randbits(63))
            bus.connect(self._endpoint, ClientLink("policy", introduction, (Reply, LifecycleChange)))
            yield bus
        finally:
            bus.close("done")


class Takeover:
    """A robot that this process has taken over. :meth:`Operator.takeover` returns a Takeover.

    Call :meth:`wait` in each control period, and :meth:`command` at least as often as the server's deadline requires.
    After a longer pause the robot gets the safe action until the next command. At the end of a ``with`` block the robot
    goes back to the policy. If an exception ends the block, the robot gets the safe action until an operator gives it
    back, takes it over or resets it. Use a Takeover from one thread only.

    Attributes:
        actions: the action channels. Each has a name, a unit, and the server's limits ``low`` and ``high``.
        period_s: the control period of the robot, in seconds.
        deadline_s: the longest time between two commands, in seconds.
    """

    def __init__(self, connection: ExitStack, bus: Bus, command: Command, ask: Callable[[Bus, Command], Reply]) -> None:
        reply = ask(bus, command)
        self.actions: list[dict[str, Any]] = reply.detail["actions"]
        self.period_s = float(reply.detail["period_ms"]) / 1e3
        self.deadline_s = float(reply.detail["deadline_ms"]) / 1e3
        self._connection = connection
        self._bus = bus
        self._robot = command.target, command.robot
        self._ask = ask
        self._open = True
        self._sequence = 0
        self._begun = self._next = self._polled = time.monotonic()

    def command(self, action: Sequence[float]) -> None:
        """Send an action. The server applies the limits and rate limits of the robot.

        Args:
            action: one number for each channel of ``actions``, in the unit of the channel.

        Raises:
            CommandError: the server has refused an earlier action, or is silent.
            ValueError: see :meth:`check`.
        """
        values = self.check(action)
        self._sequence += 1
        self._bus.send("policy", Teleop(*self._robot, self._sequence, time.monotonic_ns(), values))
        self._receive(0.0)

    def check(self, action: Sequence[float | str]) -> list[float]:
        """Return an action as numbers.

        Raises:
            ValueError: the action has a wrong length, or a value is not a finite number.
        """
        try:
            values = [float(value) for value in action]
        except (TypeError, ValueError):
            raise ValueError(f"{one_line(repr(action))} is not an action; allowed: a sequence of numbers") from None
        if len(values) != len(self.actions) or not all(abs(value) <= LARGEST for value in values):
            raise ValueError(f"{values[:8]} is not an action; allowed: {len(self.actions)} finite number(s)")
        return values

    def wait(self) -> None:
        """Wait until the next action is due: one control period after the previous action was due.

        If this time has passed, return at once. If the period is longer than half of the deadline, wait for half of the
        deadline instead.

        Raises:
            CommandError: see :meth:`command`.
        """
        self._next = max(self._next + min(self.period_s, self.deadline_s / 2), time.monotonic())
        while (rest := self._next - time.monotonic()) > 0:
            self._receive(rest)

    def _receive(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for messages. This also tells the server that this process is alive."""
        if time.monotonic() - self._polled > 1.0:  # this process was suspended and sent no Heartbeat
            self._begun = time.monotonic()
        for _, message in self._bus.receive(timeout):
            if isinstance(message, Reply) and message.id == 0 and message.error:
                raise CommandError(f"refused: {one_line(message.error, LONGEST_ERROR)}", message)
        self._polled = time.monotonic()
        newest = max(self._bus.clients["policy"].received_at, self._begun)
        if time.monotonic() - newest > _SILENCE:
            name = self._robot[0]
            raise CommandError(f"the policy server has been silent for {_SILENCE:g} s; {name} has the safe action")

    def give_back(self) -> None:
        """Give the robot back to the policy, and close the connection.

        Raises:
            CommandError: the server does not answer, or refuses because the policy or another operator has the robot.
        """
        name, robot = self._robot
        command = replace(make_command("give_back", name), robot=robot)
        try:
            self._ask(self._bus, command)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection without giving the robot back. The robot gets the safe action."""
        self._open = False
        self._connection.close()

    def __enter__(self) -> Takeover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._open:
            self.give_back()
        else:
            self.close()


class Answer(NamedTuple):
    """The answer of a policy server: a Reply, an error, or an error that came with a Reply."""

    reply: Reply | None
    error: Td3RobotError | None


def ask_each(operators: Sequence[Operator], ask: Callable[[Operator], Reply]) -> list[Answer]:
    """Ask several policy servers at the same time. Return their answers."""

    def outcome(operator: Operator) -> Answer:
        try:
            return Answer(ask(operator), None)
        except CommandError as error:
            return Answer(error.reply, error)
        except Td3RobotError as error:
            return Answer(None, error)

    if len(operators) == 1:
        return [outcome(operators[0])]
    with ThreadPoolExecutor(len(operators)) as pool:
        return list(pool.map(outcome, operators))


def connect(endpoint: str, keys: str | Path | None = None, *, timeout: float = 5.0) -> Operator:
    """Return an operator of the policy server at an endpoint. The server may start later.

    Args:
        endpoint: ``endpoints.policy`` in the configuration of the server: ``ipc://PATH`` or ``tcp://HOST:PORT``.
        keys: folder of this machine's keys; None without keys. Every TCP endpoint except loopback needs keys.
        timeout: seconds to wait for each answer: finite and above 0.

    Raises:
        EndpointError: the endpoint is malformed, or needs keys.
        KeysError: the keys cannot be used.
        ArgumentError: the timeout is not above 0, or not finite.
        TypeError: an argument has a wrong type.
    """
    timeout = arguments.seconds("timeout", timeout)
    endpoint = arguments.text("endpoint", endpoint)
    opened = open_keys(str(arguments.path("keys", keys)) if keys is not None else None)
    endpoints.check(endpoint, bind=False, keys=opened is not None)
    return Operator(endpoint, opened, timeout)


def make_command(verb: str, target: str = "", reason: str = "", version: int = 0, payload: bytes = b"") -> Command:
    """Make a Command. :class:`td3_robot.messages.Command` describes its fields.

    The function raises TypeError or ArgumentError if an argument has a wrong type or a value that is not allowed.
    """
    if arguments.text("target", target):
        _check_name("target", target)
    version = arguments.whole("version", version, 0, 2**63 - 1)
    reason = arguments.text("reason", reason).encode("utf-8", "replace").decode()  # a terminal may pass invalid Unicode
    if len(reason) > _LONGEST_REASON and verb != "estop":  # a long reason must not prevent a stop
        raise ArgumentError("reason", f"has {len(reason)} characters; at most {_LONGEST_REASON} are allowed")
    digest = sha256(payload) if payload else ""
    return Command(secrets.randbits(63), target, verb, reason[:_LONGEST_REASON], version, digest, payload)


def _check_name(argument: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ArgumentError(argument, f"is {one_line(repr(name))}; allowed: {NAME_RULE}")


def load_command(policy: str | Path | Policy, target: str, reason: str, *, force: bool) -> Command:
    """Make the Command that loads a policy, see :meth:`Operator.load`.

    Raises:
        UsageError: the policy is too large for a Command.
    """
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    payload = policy.bundle.encode()
    if len(payload) > LONGEST_PAYLOAD:
        raise UsageError(
            f"policy {policy.source!r} takes {len(payload):,} bytes; at most {LONGEST_PAYLOAD:,} can be loaded into a "
            "running server; start the server with this policy: td3-robot policy --bundle FILE"
        )
    return make_command("load", target, reason, 0 if force else policy.bundle.version, payload)
