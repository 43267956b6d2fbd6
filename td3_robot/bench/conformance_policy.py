"""The checks of a policy server: the kit is its drivers and its operator."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from msgspec.structs import replace

from td3_robot.bench import example
from td3_robot.bench.conformance import Checks, PeerStoppedError, Wire, read
from td3_robot.bundle import Bundle
from td3_robot.messages import (
    NO_NOISE,
    PROTOCOL_VERSION,
    Action,
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
    wire_fields,
)
from td3_robot.policy.actor import Actor
from td3_robot.safety.lifecycle import State
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Float32, RobotSpec
from td3_robot.transport import endpoints
from td3_robot.transport.link import hello

DEMANDS = {
    "frames": "a message has two frames, topic and payload (section 1)",
    "form": "a payload has all fields of its message, in their types and sizes, and no others (sections 2 and 4)",
    "stranger": "a message before the Hello gets Refused with code hello, and no other answer (section 3)",
    "welcome": "a Hello gets a Welcome with protocol 1; all Welcomes have the same session (section 3)",
    "refusals": "a Hello that does not fit gets Refused with the right code and a reason (section 3)",
    "name": "a second driver with the same name gets no Welcome while the first driver sends (section 3)",
    "heartbeat": "a Heartbeat comes back with its stamp and the session (section 3)",
    "answer": "each Step gets one Action with its source, incarnation, sequence and stamp (sections 4 and 5)",
    "policy": "an active server answers with its policy: weights_version is above 0 (section 8)",
    "action": "an Action holds the policy's action for each robot, within the limits (section 6)",
    "again": "a Step that comes again with the same sequence is answered again (section 5)",
    "newest": "of several waiting Steps, the newest gets an Action (section 1)",
    "wrong steps": "a Step that is malformed, or of another source or incarnation, gets no Action (sections 2 and 3)",
    "going back": "a Step with a lower sequence than an earlier Step gets no Action (section 5)",
    "unknown field": "a message with a field that you do not know is valid (section 2)",
    "optional": "a Hello without the meanings of its channels is valid (section 3)",
    "reply": "each Command of an operator gets one Reply with its id and the state (section 8)",
    "unknown verb": "a Command with an unknown verb gets an error (section 8)",
    "relay": "a Command for a robot reaches it with an empty target, and its Reply reaches the operator (section 8)",
    "stop": "estop reaches the robots, and their Steps get the safe action, until reset and activate (section 8)",
    "stop of a robot": "the estop of a driver stops the server, and comes back to the driver (section 8)",
    "joining a stop": "a driver that joins during an emergency stop gets estop (section 8)",
    "bye": "after its Bye a client is unknown (section 3)",
}
"""What each check demands, by the name of the check."""

_PATIENCE = 10.0  # seconds for an answer
_QUIET = 0.3  # seconds in which a wrong message must get no answer
_TOLERANCE = 1e-4


def check(endpoint: str, bundle: Bundle, wait: float) -> Checks:
    """Connect to the policy server at the endpoint, and check it.

    Args:
        endpoint: of the link policy.
        bundle: the policy that the server serves.
        wait: seconds to wait for the server.

    Raises:
        EndpointError: the endpoint is malformed or not allowed.
    """
    endpoints.check(endpoint, bind=False)
    checks = Checks(DEMANDS)
    with zmq.Context() as context:
        examination = _Examination(context, endpoint, bundle, checks)
        try:
            examination.run(wait)
        except PeerStoppedError:
            pass
        finally:
            examination.close()
    return checks


class _Client:
    """One client of the server: a driver with some robots, or an operator."""

    def __init__(self, wire: Wire, checks: Checks, greeting: Hello, dims: dict[str, int]) -> None:
        self.wire, self.hello, self.checks, self.dims = wire, greeting, checks, dims
        self.session = 0

    def send(self, message: Message, **changes: Any) -> None:
        self.wire.send(message, **changes)

    def receive(self, seconds: float, kind: type[Message]) -> Any:
        """The next message of a kind; None if no such message comes within this time. Drops other messages."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            frames = self.wire.receive(left)
            message = read(self.checks, frames, self.dims) if frames else None
            if isinstance(message, kind):
                return message
        return None

    def ask(self, message: Message, kind: type[Message], seconds: float = _PATIENCE, **changes: Any) -> Any:
        self.send(message, **changes)
        return self.receive(seconds, kind)


class _Examination:
    def __init__(self, context: zmq.Context[Any], endpoint: str, bundle: Bundle, checks: Checks) -> None:
        self._context, self._endpoint, self.bundle, self.checks = context, endpoint, bundle, checks
        self._wires: list[Wire] = []
        self._ids = itertools.count(2**40)
        self._sequences = itertools.count()
        self._actor = Actor(bundle)
        self._incarnation = time.time_ns() // 1_000_000
        self.server = ""

    @property
    def spec(self) -> RobotSpec:
        return self.bundle.spec

    def run(self, wait: float) -> None:
        driver = self._join(wait)
        operator = self._join_operator()
        self._activate(operator)
        self._exchange(driver)
        self._several_robots()
        self._wrong_hellos()
        self._second_driver(driver)
        self._wrong_steps(driver)
        self._commands(operator, driver)
        self._stops(operator, driver)
        driver.send(Bye("done"))
        refused = driver.ask(self._step(driver), Refused)
        self.checks.expect(
            "bye", refused is not None and refused.code == "hello", "a Step after the Bye is not refused"
        )

    def close(self) -> None:
        for wire in self._wires:
            wire.socket.close()

    # -- clients -------------------------------------------------------------------------------------------------

    def _client(self, role: str = "driver", name: str = "conformance", robots: int = 1, **changes: Any) -> _Client:
        wire = Wire(self._context, zmq.DEALER)
        self._wires.append(wire)
        wire.socket.connect(self._endpoint)
        robot = role == "driver"
        self._incarnation += 1
        greeting = hello(
            role,
            name,
            client=secrets.randbits(62),
            incarnation=self._incarnation,
            robots=robots if robot else 0,
            spec=self.spec if robot else None,
        )
        sizes = {"N": robots, "O": self.spec.observation_size, "A": self.spec.action_size}
        return _Client(wire, self.checks, replace(greeting, **changes), sizes if robot else {})

    def _joined(self, client: _Client, **changes: Any) -> Welcome | None:
        """Send Hello until the Welcome comes."""
        welcome: Welcome | None = client.ask(client.hello, Welcome, **changes)
        client.session = welcome.session if welcome else 0
        return welcome

    def _join(self, wait: float) -> _Client:
        driver, checks = self._client(), self.checks
        refused = driver.ask(self._step(driver), Refused, wait)
        checks.require("stranger", refused is not None, f"no Refused within {wait:g} s for a Step before the Hello")
        checks.expect("stranger", refused.code == "hello", f"a Step before the Hello gets the code {refused.code!r}")
        welcome = self._joined(driver)
        checks.require("welcome", welcome is not None, f"no Welcome within {_PATIENCE:g} s")
        assert welcome
        checks.expect("welcome", welcome.protocol == PROTOCOL_VERSION, f"protocol {welcome.protocol}")
        self.server = welcome.name
        again = driver.ask(driver.hello, Welcome)
        same = again is not None and again.session == welcome.session
        checks.expect("welcome", same, "a second Hello of the client gets another session, or no Welcome")
        beat = driver.ask(Heartbeat(-12345, driver.session), Heartbeat)
        good = beat is not None and (beat.stamp, beat.session) == (-12345, driver.session)
        checks.expect("heartbeat", good, f"the answer to a Heartbeat is {beat}")
        return driver

    def _join_operator(self) -> _Client:
        operator = self._client("operator", "conformance-operator")
        welcome = self._joined(operator)
        self.checks.require("welcome", welcome is not None, "an operator gets no Welcome")
        return operator

    def _command(self, operator: _Client, verb: str) -> Reply:
        number = next(self._ids)
        reply: Reply | None = operator.ask(Command(number, "", verb, "conformance", 0, "", b""), Reply)
        self.checks.require("reply", reply is not None, f"no Reply to {verb} within {_PATIENCE:g} s")
        assert reply
        good = reply.id == number and reply.state in set(State)
        self.checks.expect("reply", good, f"{verb}: id {reply.id}, demanded: {number}; state {reply.state!r}")
        return reply

    def _activate(self, operator: _Client) -> None:
        reply = self._command(operator, "state")
        if reply.state == State.UNCONFIGURED:
            self._command(operator, "configure")
        reply = self._command(operator, "activate")
        self.checks.require(
            "policy", reply.state == State.ACTIVE, f"activate leads to {reply.state!r}: {reply.error!r}"
        )

    # -- Steps ---------------------------------------------------------------------------------------------------

    def _step(self, driver: _Client, sequence: int | None = None) -> Step:
        """A Step with an observation in the middle of the ranges. The numbers differ from robot to robot."""
        sequence = next(self._sequences) if sequence is None else sequence
        robots, channels = driver.hello.robots, self.spec.observations
        middle = [(one.low + one.high) / 2 if np.isfinite(one.high - one.low) else 0.0 for one in channels]
        width = [min((one.high - one.low) / 4, 1.0) for one in channels]
        rng = np.random.default_rng(sequence)
        drawn = rng.uniform(-1, 1, (robots, len(channels)))
        return example.step(
            sequence,
            robots,
            rng,
            driver.hello.name,
            incarnation=driver.hello.incarnation,
            stamp=time.monotonic_ns(),
            episode_step=np.full(robots, sequence + 1, np.uint32),
            observation=(np.array(middle) + drawn * np.array(width)).astype(np.float32),
            action=np.zeros((robots, self.spec.action_size), np.float32),
            origin=int(ActionOrigin.HELD),
            answered=sequence,
            weights_version=0,
        )

    def _answered(self, driver: _Client, step: Step, check: str, **changes: Any) -> Action | None:
        """Send a Step, and check its Action; None without an Action."""
        action: Action | None = driver.ask(step, Action, **changes)
        expect = self.checks.expect
        if action is None:
            expect(check, False, f"step {step.sequence} gets no Action within {_PATIENCE:g} s")
            return None
        expect(check, True, "")
        theirs = (action.source, action.incarnation, action.answers, action.stamp)
        ours = (step.source, step.incarnation, step.sequence, step.stamp)
        expect("answer", theirs == ours, f"the Action for {ours} has {theirs}")
        return action

    def _check_action(self, step: Step, action: Action) -> None:
        low, high = self.spec.action_low, self.spec.action_high
        expect, found = self.checks.expect, action.action.tolist()
        expect(
            "action", bool((low <= action.action).all() and (action.action <= high).all()), f"beyond limits: {found}"
        )
        if action.noise_kind == NO_NOISE and self.bundle.safety == SafetyConfig():
            wanted: Float32 = self._actor(step.observation)
            same = np.allclose(action.action, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
            expect(
                "action", same, f"{found}; the policy gives {wanted.tolist()} (start the server without safety rules)"
            )

    def _exchange(self, driver: _Client) -> None:
        expect = self.checks.expect
        for _ in range(5):
            step = self._step(driver)
            action = self._answered(driver, step, "answer")
            self.checks.require("answer", action is not None, "Steps of a welcomed driver get no Action")
            assert action
            expect("policy", action.weights_version > 0, "an active server answers with weights_version 0")
            self._check_action(step, action)
        self._answered(driver, step, "again")
        self._answered(driver, self._step(driver), "unknown field", later={"new": [1, 2]})
        steps = [self._step(driver) for _ in range(5)]
        for one in steps:
            driver.send(one)
        answers = [action.answers for action in iter(lambda: driver.receive(_QUIET, Action), None)]
        newest = steps[-1].sequence in answers and answers == sorted(set(answers))
        expect("newest", newest, f"of the Steps {[one.sequence for one in steps]}, these get Actions: {answers}")

    def _several_robots(self) -> None:
        driver = self._client(name="conformance-pair", robots=2)
        if not self.checks.expect(
            "welcome", self._joined(driver) is not None, "a driver of two robots gets no Welcome"
        ):
            return
        step = self._step(driver)
        if action := self._answered(driver, step, "answer"):
            self._check_action(step, action)
        driver.send(Bye("done"))

    # -- wrong messages ------------------------------------------------------------------------------------------

    def _wrong_hellos(self) -> None:
        other = self.spec.describe() | {"control_period": self.spec.control_period * 2}
        cases: list[tuple[str, str, dict[str, Any]]] = [
            ("protocol 2", "protocol", {"protocol": PROTOCOL_VERSION + 1}),
            ("role joystick", "agreement", {"role": "joystick"}),
            ("another control period", "spec", {"spec": other}),
            ("a specification with only a name", "spec", {"spec": {"name": self.spec.name}}),
            ("no robots", "spec", {"robots": 0}),
            ("the name of the server", "taken", {"name": self.server}),
        ]
        cases += [
            (f"no field {name}", "malformed", {name: ...})
            for name, wire in wire_fields(Hello).items()
            if not wire.optional
        ]
        for what, code, changes in cases:
            client = self._client(name="conformance-wrong")
            refused = client.ask(client.hello, Refused, 2.0, **changes)
            found = f"code {refused.code!r}" if refused else "no Refused"
            good = refused is not None and refused.code == code and bool(refused.reason)
            self.checks.expect("refusals", good, f"a Hello with {what} gets {found}; demanded: {code!r} and a reason")
        client = self._client(name="conformance-plain")
        plain_spec = {**self.spec.describe()}
        for kind in ("observations", "actions"):
            plain_spec[kind] = [{k: v for k, v in one.items() if k != "meaning"} for one in plain_spec[kind]]
        welcome = self._joined(client, spec=plain_spec, later=1)
        self.checks.expect(
            "optional", welcome is not None, "a Hello without meanings, with a new field, gets no Welcome"
        )
        client.send(Bye("done"))

    def _second_driver(self, driver: _Client) -> None:
        rival, end = self._client(), time.monotonic() + 3.0
        refused = None
        while refused is None and time.monotonic() < end:
            rival.send(rival.hello)
            driver.send(Heartbeat(1, driver.session))
            frames = rival.wire.receive(0.25)
            message = read(self.checks, frames, {}) if frames else None
            self.checks.require("name", not isinstance(message, Welcome), "a second driver of the name gets a Welcome")
            refused = message if isinstance(message, Refused) else None
        good = refused is not None and refused.code == "name"
        self.checks.expect(
            "name", good, f"a second driver of the name gets {refused}; demanded: Refused with code name"
        )

    def _wrong_steps(self, driver: _Client) -> None:
        nan = np.full(self.spec.observation_size, np.nan, np.float32).tobytes()
        cases: list[tuple[str, dict[str, Any]]] = [
            ("another source", {"source": "somebody-else"}),
            ("another incarnation", {"incarnation": driver.hello.incarnation + 1}),
            ("an observation that is not a number", {"observation": nan}),
            ("an observation that is too short", {"observation": nan[:-4]}),
            ("phase 9", {"phase": b"\x09"}),
            ("text in place of sequence", {"sequence": "1"}),
        ]
        cases += [(f"no field {name}", {name: ...}) for name, wire in wire_fields(Step).items() if not wire.optional]
        for _, changes in cases:
            driver.send(self._step(driver), **changes)
        for frames in ([b"step"], [b"step", b"\xc1"], [b"nonsense", b"\x80"]):
            driver.wire.send_frames(frames)
        wrong = next(self._sequences)
        self._collect(driver, "wrong steps", lambda action: action.answers < wrong, "a wrong Step gets an Action")
        self._answered(driver, self._step(driver), "wrong steps")
        back = self._step(driver, 0)
        driver.send(back)
        self._collect(driver, "going back", lambda action: action.answers == 0, "step 0 gets an Action again")
        self._answered(driver, self._step(driver), "going back")

    def _collect(self, driver: _Client, check: str, wrong: Callable[[Action], bool], text: str) -> None:
        """Read the Actions of a short time; those for which ``wrong`` returns True are mistakes."""
        found = [action.answers for action in iter(lambda: driver.receive(_QUIET, Action), None) if wrong(action)]
        self.checks.expect(check, not found, f"{text}: {found}")

    # -- commands ------------------------------------------------------------------------------------------------

    def _commands(self, operator: _Client, driver: _Client) -> None:
        expect = self.checks.expect
        expect("unknown verb", bool(self._command(operator, "dance").error), "the verb `dance` gets no error")
        number, name = next(self._ids), driver.hello.name
        operator.send(Command(number, name, "state", "", 0, "", b""))
        command = driver.receive(_PATIENCE, Command)
        if not expect("relay", command is not None, f"a Command for {name} does not reach it"):
            return
        assert command
        relayed = command.verb == "state" and command.target == ""
        expect("relay", relayed, f"it arrives as {command.verb!r} for {command.target!r}")
        driver.send(Reply(command.id, name, "", "active", {"stopped": False}))
        reply = operator.receive(_PATIENCE, Reply)
        good = reply is not None and (reply.id, reply.node) == (number, name)
        expect("relay", good, f"the operator gets {reply and (reply.id, reply.node)}; demanded: {(number, name)}")

    def _stops(self, operator: _Client, driver: _Client) -> None:
        expect = self.checks.expect
        reply = self._command(operator, "estop")
        expect("stop", reply.state == State.FAULT, f"estop leads to {reply.state!r}")
        self._expect_estop(driver, "stop")
        self._expect_safe(driver)
        late = self._client(name="conformance-late")
        late.send(late.hello)
        self._expect_estop(late, "joining a stop")
        late.send(Bye("done"))
        refused = self._command(operator, "activate")
        expect("stop", bool(refused.error), "activate during an emergency stop gets no error")
        self._release(operator, driver)
        driver.send(Command(next(self._ids), "", "estop", "smoke", 0, "", b""))
        self._expect_estop(driver, "stop of a robot")
        state = self._command(operator, "state").state
        expect("stop of a robot", state == State.FAULT, f"after the estop of a driver, the server is {state!r}")
        self._release(operator, driver)

    def _release(self, operator: _Client, driver: _Client) -> None:
        self._command(operator, "reset")
        self._activate(operator)
        driver.send(LifecycleChange(driver.hello.name, "fault", "active", "activate", time.monotonic_ns()))
        step = self._step(driver)
        action = self._answered(driver, step, "stop")
        policy = action is not None and action.weights_version > 0
        self.checks.expect("stop", policy, "after reset and activate, no Action of the policy comes")

    def _expect_estop(self, driver: _Client, check: str) -> None:
        command = driver.receive(_PATIENCE, Command)
        found = command.verb if command else "no Command"
        good = command is not None and (command.verb, command.target) == ("estop", "")
        self.checks.expect(check, good, f"the driver gets {found}; demanded: estop with an empty target")

    def _expect_safe(self, driver: _Client) -> None:
        action = self._answered(driver, self._step(driver), "stop")
        safe = action is not None and action.weights_version == 0
        self.checks.expect(
            "stop", safe, "during an emergency stop, the Action is not the safe action (weights_version 0)"
        )
