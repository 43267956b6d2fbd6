"""Checks a driver. The conformance kit takes the place of the policy server and of the operator."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from td3_robot.bench import conformance_wire
from td3_robot.bench.conformance import Checks, PeerStoppedError
from td3_robot.bench.conformance_steps import BEYOND, GROWN, NORMAL, StepRules
from td3_robot.bench.conformance_wire import Wire, read
from td3_robot.errors import ConfigError, EndpointError
from td3_robot.messages import (
    PROTOCOL_VERSION,
    ActionOrigin,
    Bye,
    Command,
    Heartbeat,
    Hello,
    LifecycleChange,
    Message,
    Refused,
    Reply,
    Step,
    Welcome,
)
from td3_robot.safety.lifecycle import State
from td3_robot.specs import RobotSpec
from td3_robot.transport import endpoints

DEMANDS = {
    "frames": "a message has two frames, topic and payload (section 1)",
    "form": "a payload has exactly the fields of its message, with the right types and sizes (sections 2 and 4)",
    "hello": "Hello names protocol 1, role driver, a name, robots and a valid specification (section 3)",
    "hello again": "without an answer, the same Hello comes again every 0.25 s (section 3)",
    "wait": "before the Welcome the driver sends only Hellos, even if the server sends a Heartbeat (section 3)",
    "topics": "a driver sends only Hello, Heartbeat, Bye, Step, Command, Reply and LifecycleChange (section 3)",
    "identity": "each Step has the name and the incarnation of the Hello (section 3)",
    "sequence": "the sequences of the Steps are 0, 1, 2, …; only the newest Step may come again, unchanged (section 5)",
    "transitions": "in each Step, `transitions` grows by the number of robots that are not at FIRST (section 5)",
    "episodes": "the phases are FIRST, MID, …, TERMINATED or TRUNCATED; then FIRST of the next episode (section 5)",
    "origin": "origin is 0 if all robots are at FIRST, else 1 to 4; not 5, because no operator acts (section 5)",
    "answered": "if origin is 1, `answered` is the sequence of the previous Step, and the Step has the version and "
    "the noise of the Action for the previous Step; if origin is 2, 3 or 4, `answered` is the Step's own sequence, and "
    "version and noise are 0 (section 5)",
    "action": "if origin is 1, the Step reports the Action, clipped to the limits; "
    "if origin is 2, the Step reports the action of the previous Step again (section 5)",
    "answers": "the driver applies the Actions that answer its newest Step (section 5)",
    "unknown field": "a message with an additional, unknown field is valid (section 2)",
    "pace": "a Step comes once in every control period (section 5)",
    "reply": "each Command gets one Reply with the same id, the state, and a detail with the key `stopped` (section 8)",
    "refusal": "a Command that is unknown, or not allowed in this state, gets an error (section 8)",
    "lifecycle": "each change of state is sent as LifecycleChange (section 8)",
    "stop": "an emergency stop leads to fault, and only reset ends the stop (section 8)",
    "inactive": "a driver that is not active keeps sending Steps; origin is 4, or 0 if all robots are at FIRST "
    "(section 8)",
    "garbage": "malformed messages change nothing (section 2)",
    "deadline": "without Actions the driver goes to fault (section 8)",
    "heartbeat": "if the server is silent for 1 s, the driver sends a Heartbeat with the Welcome's session (section 3)",
    "rejoin": "after Refused with code hello, the same Hello comes again, and then Steps (section 3)",
    "bye": "after shutdown the driver says Bye (sections 3 and 8)",
}
"""Maps the name of each check to what it demands. The sections are those of docs/reference/protocol.md."""

_TOPICS = (Heartbeat, Bye, Step, Command, Reply, LifecycleChange)
_QUEUED = 0.2  # seconds to wait for the Hellos that ZeroMQ queued before the kit served the endpoint
# The kit waits for this number of Steps. If the driver has not applied every kind of Action by then, the kit waits for
# at most 3 * _STEPS.
_STEPS = 48


def check(endpoint: str, wait: float, deadline: float) -> Checks:
    """Serve the endpoint, and check the driver that connects.

    Args:
        endpoint: address of the link ``policy``.
        wait: seconds to wait for the driver.
        deadline: the driver must be in fault at most this many seconds after the last Action.

    Raises:
        EndpointError: the endpoint is busy, malformed or not allowed.
    """
    checks = Checks(DEMANDS)
    context: zmq.Context[Any] = zmq.Context()
    try:
        wire = Wire(context, zmq.ROUTER)
        with endpoints.binding(endpoint):
            endpoints.check(endpoint, bind=True)
            try:
                wire.socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise EndpointError(f"endpoint {endpoint!r} cannot be served: {error}") from None
        try:
            _Examination(wire, checks).run(wait, deadline)
        except PeerStoppedError:
            pass
        finally:
            if not endpoints.is_tcp(endpoint):
                with contextlib.suppress(OSError):
                    Path(endpoint.removeprefix("ipc://")).unlink()
    finally:
        context.destroy()
    return checks


class _Examination:
    """The kit's knowledge of one driver.

    Attributes:
        session: session of the newest Welcome. ``session`` is 0 before the first Welcome, and while the kit refuses the
            driver.
        greets: whether the kit answers each Hello with a Welcome.
        silent: True while the kit leaves Steps and Heartbeats without an answer.
        state: the driver's state from its newest Reply.
    """

    def __init__(self, wire: Wire, checks: Checks) -> None:
        self.wire, self.checks = wire, checks
        self.key = b""
        self.hellos: list[tuple[float, Hello]] = []
        self.steps: StepRules | None = None
        self.dims: dict[str, int] = {}
        self.session = 0
        self.greets = self.silent = False
        self.replies: dict[int, list[Reply]] = {}
        self.changes: list[LifecycleChange] = []
        self.state = ""
        self.heartbeats = 0
        self.bye = False
        self._ids = itertools.count(2**40)

    def run(self, wait: float, deadline: float) -> None:
        rules = self._meet(wait)
        self._command("state")
        self._activate()
        self._watch_steps(rules)
        self._stop(rules)
        self._garbage(rules)
        self._fall_silent(deadline)
        self._forget(rules)
        self._end()

    # -- script --------------------------------------------------------------------------------------------------

    def _meet(self, wait: float) -> StepRules:
        expect = self.checks
        expect.require("hello", self._until(wait, lambda: bool(self.hellos)), f"no Hello within {wait:g} s")
        self._until(_QUEUED, lambda: False)
        count = len(self.hellos)
        again = self._until(3.0, lambda: len(self.hellos) >= count + 4)
        times = [at for at, _ in self.hellos[count:]]
        passed = times[-1] - times[0] if again else 3.0
        expect.expect("hello again", again and passed >= 0.3, f"{len(times)} further Hellos within {passed:.2f} s")
        self._send(Heartbeat(1, 7))
        count = len(self.hellos)
        self._until(3.0, lambda: len(self.hellos) >= count + 2)
        expect.require(
            "hello again",
            len(self.hellos) > count,
            "the kit sent a Heartbeat but no Welcome; then no further Hello came",
        )
        expect.expect("wait", True, "")
        assert self.steps
        self._welcome(7, self.steps, 1, "inactive")
        return self.steps

    def _welcome(self, session: int, rules: StepRules, steps: int, check: str) -> None:
        """Send a Welcome, and wait for ``steps`` new Steps."""
        begin, self.session, self.greets = rules.count, session, True
        self._send(Welcome(PROTOCOL_VERSION, "policy", session))
        joined = self._until(conformance_wire.PATIENCE, lambda: rules.count >= begin + steps)
        self.checks.require(check, joined, f"fewer than {steps} new Steps after the Welcome of session {session}")

    def _activate(self) -> None:
        if self.state == State.UNCONFIGURED:
            self._command("configure")
        reply = self._command("activate")
        self.checks.require("reply", reply.state == State.ACTIVE, f"activate leads to {reply.state!r}: {reply.error!r}")

    def _watch_steps(self, rules: StepRules) -> None:
        begin, expect = rules.count, self.checks.expect
        applied = {
            NORMAL: ("answers", "no Step with origin 1 reports an Action of the kit"),
            GROWN: ("unknown field", "the driver never applied an Action with the new field `later`"),
            BEYOND: ("action", "the driver must clip and apply an Action beyond the limits, but never did"),
        }

        def done() -> bool:
            made = rules.count - begin
            return made >= _STEPS and (rules.used >= applied.keys() or made >= 3 * _STEPS)

        enough = self._until(30.0, done)
        for case, (check, found) in applied.items():
            expect(check, case in rules.used, found)
        if expect("pace", enough or rules.count > begin + 8, f"{rules.count - begin} Steps within 30 s"):
            period = float(np.median(np.diff(rules.stamps[-_STEPS:]))) / 1e9
            wanted = rules.spec.control_period
            found = f"the median time between two Steps is {period:g} s; the period is {wanted:g} s"
            expect("pace", 0.6 * wanted <= period <= 1.9 * wanted, found)

    def _stop(self, rules: StepRules) -> None:
        expect, before = self.checks.expect, len(self.changes)
        self._expect_reply("stop", self._command("estop"), (State.FAULT,), stopped=True)
        expect(
            "lifecycle",
            self._fault_reported(before, conformance_wire.PATIENCE),
            "no LifecycleChange to fault after estop",
        )
        self._expect_safe(rules, "fault")
        reply = self._command("activate")
        expect(
            "refusal",
            bool(reply.error),
            f"activate during an emergency stop gets no error; the state is {reply.state!r}",
        )
        expect(
            "stop", reply.state == State.FAULT, f"after activate during an emergency stop, the state is {reply.state!r}"
        )
        expect("refusal", bool(self._command("dance").error), "the verb `dance` gets no error")
        self._expect_reply("stop", self._command("reset"), (State.INACTIVE, State.UNCONFIGURED), stopped=False)
        self._expect_safe(rules, "inactive")
        self._activate()

    def _expect_reply(self, check: str, reply: Reply, states: Sequence[str], stopped: bool) -> None:
        found = reply.detail.get("stopped")
        self.checks.expect(
            check,
            reply.state in states and found is stopped,
            f"the state is {reply.state}, and `stopped` is {found}; demanded: {' or '.join(states)}, and {stopped}",
        )

    def _expect_safe(self, rules: StepRules, state: str) -> None:
        """Expect only Steps with origin 4, or with origin 0 if all robots are at FIRST.

        The kit sends Actions for these Steps, but the driver must not apply them.
        """
        begin = rules.count
        more = self._until(conformance_wire.PATIENCE, lambda: rules.count >= begin + 6)
        self.checks.expect("inactive", more, f"the Steps stop in state {state}")
        found = set(rules.origins[begin + 2 :])  # actions of the first two Steps can be older than the state
        good = found <= {int(ActionOrigin.SAFE), int(ActionOrigin.NONE)}
        self.checks.expect("inactive", good, f"in state {state} Steps have origin {sorted(found)}")

    def _garbage(self, rules: StepRules) -> None:
        assert rules.newest
        action = rules.action(rules.newest)
        for frames in ([b"action"], [b"action", b"\xc1"], [b"nonsense", b"\x80"], [b"action", b"\x80", b""]):
            self.wire.send_frames(frames, self.key)
        for wrong in (..., b"\0", np.full_like(action.action, np.nan).tobytes()):
            self._send(action, action=wrong)
        begin, rules.used = rules.count, set()
        alive = self._until(conformance_wire.PATIENCE, lambda: rules.count >= begin + 8 and NORMAL in rules.used)
        self.checks.require("garbage", alive, "after malformed messages the driver no longer applies Actions")

    def _fall_silent(self, deadline: float) -> None:
        expect, beats, before = self.checks.expect, self.heartbeats, len(self.changes)
        self.silent = True
        fault = self._fault_reported(before, deadline)
        expect("deadline", fault, f"no LifecycleChange to fault within {deadline:g} s without an Action")
        expect("heartbeat", self._until(4.0, lambda: self.heartbeats > beats), "no Heartbeat within 4 s of silence")
        self.silent = False
        self._command("reset")

    def _fault_reported(self, before: int, seconds: float) -> bool:
        """Wait up to ``seconds`` for a LifecycleChange to fault. Ignore the first ``before`` changes."""
        return self._until(seconds, lambda: any(one.state == State.FAULT for one in self.changes[before:]))

    def _forget(self, rules: StepRules) -> None:
        """Behave like a restarted server: send Refused, wait for a Hello, and send a Welcome with another session."""
        count, self.greets, self.session = len(self.hellos), False, 0
        self._send(Refused("hello", "policy has not met this client; send Hello"))
        again = self._until(3.0, lambda: len(self.hellos) > count)
        self.checks.require("rejoin", again, "no Hello within 3 s after Refused with code hello")
        self._welcome(8, rules, 3, "rejoin")

    def _end(self) -> None:
        reply = self._command("shutdown")
        self.checks.expect("reply", reply.state == State.FINALIZED, f"shutdown leads to {reply.state!r}")
        self.checks.expect("bye", self._until(conformance_wire.PATIENCE, lambda: self.bye), "no Bye after shutdown")

    def _command(self, verb: str) -> Reply:
        """Send a Command, and wait for its Reply."""
        number, patience = next(self._ids), conformance_wire.PATIENCE
        self._send(Command(number, "", verb, "conformance", 0, "", b""))
        came = self._until(patience, lambda: number in self.replies)
        self.checks.require("reply", came, f"no Reply to {verb} within {patience:g} s")
        self._until(0.1, lambda: len(self.replies[number]) > 1)
        reply, *others = self.replies[number]
        self.checks.expect("reply", not others, f"{1 + len(others)} Replies to one {verb}")
        stopped = reply.detail.get("stopped")
        good = isinstance(stopped, bool) and reply.state in set(State)
        self.checks.expect("reply", good, f"{verb}: state {reply.state!r}, stopped {stopped!r}")
        self.state = reply.state
        return reply

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, message: Message, **changes: Any) -> None:
        self.wire.send(message, self.key, **changes)

    def _until(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Receive messages until ``done()`` is true, at most for ``seconds``. Return whether ``done()`` became true."""
        end = time.monotonic() + seconds
        while not done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._turn(min(left, 0.05))
        return True

    def _turn(self, seconds: float) -> None:
        frames = self.wire.receive_frames(seconds)
        if frames is None:
            return
        self.key, *frames = frames
        message = read(self.checks, frames, self.dims)
        if message is None and frames[:1] == [b"hello"]:
            self.checks.require("hello", False, "the kit cannot read the Hello; see the checks `frames` and `form`")
        if isinstance(message, Hello):
            self._take_hello(message)
        elif message is not None:
            welcomed = self.session > 0 or bool(self.steps and self.steps.newest)
            if self.checks.expect("wait", welcomed, f"{message.NAME} before the Welcome"):
                self._take(message)

    def _take(self, message: Message) -> None:
        expect = self.checks.expect
        expect("topics", isinstance(message, _TOPICS), f"the driver sent {message.NAME}, which a driver must not send")
        if isinstance(message, Step):
            assert self.steps
            self.steps.take(message, refused=not self.session)
            if not self.silent and self.session:
                for action, changes in self.steps.answers(message):
                    self._send(action, **changes)
        elif isinstance(message, Heartbeat):
            self.heartbeats += 1
            expect("heartbeat", message.session in (self.session, 7), f"a Heartbeat with session {message.session}")
            if not self.silent:
                self._send(Heartbeat(message.stamp, self.session))
        elif isinstance(message, Reply):
            self.replies.setdefault(message.id, []).append(message)
        elif isinstance(message, LifecycleChange):
            name = self.hellos[0][1].name
            follows = not self.changes or self.changes[-1].state == message.previous
            found = (
                f"a LifecycleChange of {message.node!r} from state {message.previous!r}; "
                "the previous LifecycleChange led to another state"
            )
            expect("lifecycle", follows, found)
            expect(
                "lifecycle",
                message.node == name,
                f"a LifecycleChange of node {message.node!r}; the Hello names {name!r}",
            )
            self.changes.append(message)
        elif isinstance(message, Bye):
            self.bye = True

    def _take_hello(self, hello: Hello) -> None:
        expect = self.checks.expect
        if self.hellos:
            first = self.hellos[0][1]
            fields = ("role", "name", "incarnation", "client", "robots", "spec", "agreement")
            changed = [name for name in fields if getattr(hello, name) != getattr(first, name)]
            check = "rejoin" if self.steps and self.steps.newest else "hello again"
            expect(check, not changed, f"a later Hello differs in {', '.join(changed)}")
        self.hellos.append((time.monotonic(), hello))
        good = hello.protocol == PROTOCOL_VERSION and hello.role == "driver" and hello.robots >= 1
        expect("hello", good, f"protocol {hello.protocol}, role {hello.role!r}, {hello.robots} robots")
        expect("hello", hello.client < 2**63, f"client {hello.client} is not below 2^63")
        if self.steps is None:
            try:
                spec = RobotSpec.from_description(hello.spec)
            except ConfigError as error:
                self.checks.expect("hello", False, str(error))
                raise PeerStoppedError from None
            self.dims = {"N": hello.robots, "O": spec.observation_size, "A": spec.action_size}
            self.steps = StepRules(self.checks, hello, spec)
        if self.greets:
            self._send(Welcome(PROTOCOL_VERSION, "policy", self.session))
