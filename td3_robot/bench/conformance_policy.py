"""The checks of a policy server. The kit acts as the server's drivers and operator."""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Any

import numpy as np
import zmq

from td3_robot.bench import conformance_wire, example
from td3_robot.bench.conformance import Checks, PeerStoppedError
from td3_robot.bench.conformance_wire import Client, Kind
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
from td3_robot.specs import Float32
from td3_robot.transport import endpoints
from td3_robot.transport.link import hello

DEMANDS = {
    "frames": "a message has two frames, topic and payload (section 1)",
    "form": "a payload has exactly the fields of its message, with the right types and sizes (sections 2 and 4)",
    "stranger": "a message before the Hello gets Refused with code hello, and no other answer (section 3)",
    "welcome": "a Hello gets a Welcome with protocol 1; all Welcomes have the same session (section 3)",
    "refusals": "a Hello that the server must refuse gets Refused with the right code and a reason (section 3)",
    "name": "a second driver with the same name gets no Welcome while the first driver is alive (section 3)",
    "heartbeat": "a Heartbeat comes back with its stamp and the session (section 3)",
    "answer": "each Step gets one Action with its source, incarnation, sequence and stamp (sections 4 and 5)",
    "policy": "an active server answers with its policy: weights_version is above 0 (section 8)",
    "action": "an Action holds the policy's action for each robot, within the limits (section 6)",
    "again": "a Step that comes again with the same sequence gets an Action again (section 5)",
    "newest": "of several waiting Steps, the newest gets an Action (section 1)",
    "wrong steps": "a malformed Step, or a Step with a wrong source or incarnation, gets no Action (sections 2 and 3)",
    "going back": "a Step with a lower sequence than an earlier Step gets no Action (section 5)",
    "unknown field": "the server accepts a message with an additional, unknown field (section 2)",
    "optional": "a Hello without the meanings of its channels is valid (section 3)",
    "reply": "each Command of an operator gets one Reply with its id and the state (section 8)",
    "unknown verb": "a Command with an unknown verb gets an error (section 8)",
    "relay": "if a Command is for a robot, the server relays the Command to this robot; "
    "the relayed Command has an empty target; the server relays the robot's Reply to the operator (section 8)",
    "stop": "estop reaches the robots; until reset and activate, their Steps get the safe action (section 8)",
    "stop from a driver": "after estop from a driver, the server is in fault and sends estop to the driver (section 8)",
    "joining during a stop": "a driver that joins during an emergency stop gets estop (section 8)",
    "bye": "after a Bye, the server does not know the client (section 3)",
}
"""Maps the name of each check to what the check demands."""

_TOLERANCE = 1e-4
_SECOND = 0.1  # seconds; after the Reply to a Command, wait this long for a second Reply, which would be a mistake


def check(endpoint: str, bundle: Bundle, wait: float) -> Checks:
    """Connect to the policy server at the endpoint, and check it.

    Args:
        endpoint: the endpoint of the server's link ``policy``.
        bundle: the policy that the server serves.
        wait: seconds to wait for the server.

    Raises:
        EndpointError: the endpoint is malformed or not allowed.
    """
    endpoints.check(endpoint, bind=False)
    checks = Checks(DEMANDS)
    context: zmq.Context[Any] = zmq.Context()
    examination = _Examination(context, endpoint, bundle, checks)
    try:
        examination.run(wait)
    except PeerStoppedError:
        pass
    finally:
        context.destroy()
    return checks


def _must(answer: Kind | None) -> Kind:
    """Return the answer. If it is None, raise PeerStoppedError, because the next checks need an answer."""
    if answer is None:
        raise PeerStoppedError
    return answer


class _Examination:
    def __init__(self, context: zmq.Context[Any], endpoint: str, bundle: Bundle, checks: Checks) -> None:
        self._context, self._endpoint, self._bundle, self._checks = context, endpoint, bundle, checks
        self._spec = bundle.spec
        self._actor = Actor(bundle)
        self._clients: list[Client] = []  # keeps the clients, because Python closes the socket of a deleted client
        self._ids, self._sequences = itertools.count(2**40), itertools.count()
        self._incarnation = time.time_ns() // 1_000_000

    def run(self, wait: float) -> None:
        driver = self._client()
        _must(driver.ask("stranger", "a Step before the Hello", self._step(driver), Refused, wait, code="hello"))
        others = [message.NAME for message in driver.all_of(Message)]
        self._checks.expect("stranger", not others, f"a Step before the Hello also gets {', '.join(others)}")
        welcome = self._join(driver)
        driver.ask("welcome", "a second Hello", driver.hello, Welcome, session=welcome.session)
        beat = Heartbeat(-12345, welcome.session)
        driver.ask("heartbeat", "a Heartbeat", beat, Heartbeat, stamp=beat.stamp, session=beat.session)
        operator = self._client("operator", "conformance-operator")
        self._join(operator, session=welcome.session)
        self._activate(operator)
        self._exchange(driver)
        self._several_robots()
        self._wrong_hellos(welcome.name)
        self._second_driver(driver)
        self._wrong_steps(driver)
        self._commands(operator, driver)
        self._stops(operator, driver)
        driver.send(Bye("done"))
        driver.ask("bye", "a Step after the Bye", self._step(driver), Refused, code="hello")

    # -- clients -------------------------------------------------------------------------------------------------

    def _client(self, role: str = "driver", name: str = "conformance", robots: int = 1) -> Client:
        self._incarnation += 1
        robot = role == "driver"
        greeting = hello(
            role,
            name,
            client=secrets.randbits(62),
            incarnation=self._incarnation,
            robots=robots if robot else 0,
            spec=self._spec if robot else None,
        )
        sizes = {"N": robots, "O": self._spec.observation_size, "A": self._spec.action_size}
        client = Client(self._context, self._checks, greeting, sizes if robot else {})
        self._clients.append(client)
        client.socket.connect(self._endpoint)
        return client

    def _join(self, client: Client, **wanted: Any) -> Welcome:
        what = f"the Hello of a {client.hello.role}"
        welcome = _must(client.ask("welcome", what, client.hello, Welcome, protocol=PROTOCOL_VERSION, **wanted))
        client.session = welcome.session
        return welcome

    def _command(self, operator: Client, verb: str) -> Reply:
        number = next(self._ids)
        command = Command(number, "", verb, "conformance", 0, "", b"")
        reply = _must(operator.ask("reply", f"the Command {verb}", command, Reply, id=number))
        self._expect_no_second(operator, verb)
        self._checks.expect("reply", reply.state in set(State), f"the Reply to {verb} has the state {reply.state!r}")
        return reply

    def _expect_no_second(self, operator: Client, verb: str) -> None:
        again = operator.receive(_SECOND, Reply)
        self._checks.expect("reply", again is None, f"the Command {verb} gets two Replies")

    def _activate(self, operator: Client) -> None:
        if self._command(operator, "state").state == State.UNCONFIGURED:
            self._command(operator, "configure")
        reply = self._command(operator, "activate")
        found = f"activate leads to {reply.state!r}: {reply.error!r}"
        self._checks.require("policy", reply.state == State.ACTIVE, found)

    # -- Steps ---------------------------------------------------------------------------------------------------

    def _step(self, driver: Client, sequence: int | None = None) -> Step:
        """A Step with observations well within their ranges. Each robot gets different observations."""
        sequence = next(self._sequences) if sequence is None else sequence
        robots, channels = driver.hello.robots, self._spec.observations
        width = [min((one.high - one.low) / 4, 1.0) for one in channels]
        middle = [_inside(one.low, one.high) for one in channels]
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
            action=np.zeros((robots, self._spec.action_size), np.float32),
            origin=int(ActionOrigin.HELD),
            answered=sequence,
            weights_version=0,
        )

    def _answered(self, driver: Client, check: str, step: Step | None = None, **changes: Any) -> Action | None:
        """Send a Step, and check that an Action answers it."""
        step = step or self._step(driver)
        action = driver.ask(check, f"step {step.sequence}", step, Action, changes=changes)
        if action:
            theirs = (action.source, action.incarnation, action.answers, action.stamp)
            ours = (step.source, step.incarnation, step.sequence, step.stamp)
            self._checks.expect("answer", theirs == ours, f"the Action for {ours} has {theirs}")
            self._check_action(step, action)
        return action

    def _check_action(self, step: Step, action: Action) -> None:
        expect, found = self._checks.expect, action.action.tolist()
        within = (self._spec.action_low <= action.action) & (action.action <= self._spec.action_high)
        expect("action", bool(within.all()), f"an Action beyond the limits: {found}")
        if action.weights_version and action.noise_kind == NO_NOISE and self._bundle.safety == SafetyConfig():
            wanted: Float32 = self._actor(step.observation)
            same = np.allclose(action.action, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
            found = (
                f"{found}; the policy gives {wanted.tolist()} (if the server has safety rules, start it without them)"
            )
            expect("action", same, found)

    def _exchange(self, driver: Client) -> None:
        for _ in range(5):
            step = self._step(driver)
            action = _must(self._answered(driver, "answer", step))
            others = driver.all_of(Action)
            self._checks.expect("answer", not others, f"step {step.sequence} gets {1 + len(others)} Actions")
            found = "an active server answers with weights_version 0"
            self._checks.expect("policy", action.weights_version > 0, found)
        self._answered(driver, "again", step)
        self._answered(driver, "unknown field", later={"new": [1, 2]})
        steps = [self._step(driver) for _ in range(5)]
        for one in steps:
            driver.send(one)
        answers: list[int] = []
        while steps[-1].sequence not in answers and (answer := driver.receive(conformance_wire.PATIENCE, Action)):
            answers.append(answer.answers)
        answers += [action.answers for action in driver.all_of(Action)]
        newest = steps[-1].sequence in answers and answers == sorted(set(answers))
        found = f"of the Steps {[one.sequence for one in steps]}, these get Actions: {answers}"
        self._checks.expect("newest", newest, found)

    def _several_robots(self) -> None:
        driver = self._client(name="conformance-pair", robots=2)
        if driver.ask("welcome", "a driver of two robots", driver.hello, Welcome):
            self._answered(driver, "answer")
            driver.send(Bye("done"))

    # -- wrong messages ------------------------------------------------------------------------------------------

    def _wrong_hellos(self, server: str) -> None:
        spec = self._spec.describe()
        cases: list[tuple[str, str, dict[str, Any]]] = [
            ("protocol 2", "protocol", {"protocol": PROTOCOL_VERSION + 1}),
            ("role joystick", "agreement", {"role": "joystick"}),
            ("another control period", "spec", {"spec": spec | {"control_period": self._spec.control_period * 2}}),
            ("a specification with only a name", "spec", {"spec": {"name": self._spec.name}}),
            ("no robots", "spec", {"robots": 0}),
            ("the name of the server", "taken", {"name": server}),
            *((f"the field `{name}` missing", "malformed", {name: ...}) for name in _required(Hello)),
        ]
        for what, code, changes in cases:
            client = self._client(name="conformance-wrong")
            refused = client.ask(
                "refusals", f"a Hello with {what}", client.hello, Refused, 2.0, changes=changes, code=code
            )
            self._checks.expect(
                "refusals", refused is None or bool(refused.reason), f"a Hello with {what} is refused without a reason"
            )
        client = self._client(name="conformance-plain")
        plain = {
            kind: [{key: value for key, value in one.items() if key != "meaning"} for one in spec[kind]]
            for kind in ("observations", "actions")
        }
        changes = {"spec": spec | plain, "later": 1}
        client.ask("optional", "a Hello without meanings, with a new field,", client.hello, Welcome, changes=changes)
        client.send(Bye("done"))

    def _second_driver(self, driver: Client) -> None:
        rival, end = self._client(), time.monotonic() + 3.0
        answer: Message | None = None
        while not isinstance(answer, (Refused, Welcome)) and time.monotonic() < end:
            rival.send(rival.hello)
            driver.send(Heartbeat(1, driver.session))
            answer = rival.receive(0.25, Message)
        self._checks.require("name", not isinstance(answer, Welcome), "a second driver gets a Welcome")
        good = isinstance(answer, Refused) and answer.code == "name"
        found = f"a second driver with the same name gets {answer}; demanded: Refused with code name"
        self._checks.expect("name", good, found)

    def _wrong_steps(self, driver: Client) -> None:
        nan = np.full(self._spec.observation_size, np.nan, np.float32).tobytes()
        cases: list[dict[str, Any]] = [
            {"source": "somebody-else"},
            {"incarnation": driver.hello.incarnation + 1},
            {"observation": nan},
            {"observation": nan[:-4]},
            {"phase": b"\x09"},
            {"sequence": "1"},
            *({name: ...} for name in _required(Step)),
        ]
        for changes in cases:
            driver.send(self._step(driver), **changes)
        for frames in ([b"step"], [b"step", b"\xc1"], [b"nonsense", b"\x80"]):
            driver.send_frames(frames)
        wrong = next(self._sequences)
        found = [action.answers for action in driver.all_of(Action) if action.answers < wrong]
        self._checks.expect("wrong steps", not found, f"wrong Steps get Actions: {found}")
        self._answered(driver, "wrong steps")
        driver.send(self._step(driver, 0))
        found = [action.answers for action in driver.all_of(Action) if action.answers == 0]
        self._checks.expect("going back", not found, "step 0 gets an Action after later Steps")
        self._answered(driver, "going back")

    # -- commands ------------------------------------------------------------------------------------------------

    def _commands(self, operator: Client, driver: Client) -> None:
        error = self._command(operator, "dance").error
        self._checks.expect("unknown verb", bool(error), "the verb `dance` gets no error")
        number, name = next(self._ids), driver.hello.name
        operator.send(Command(number, name, "state", "", 0, "", b""))
        command = driver.expect("relay", f"the robot {name}", Command, verb="state", target="")
        if command:
            driver.send(Reply(command.id, name, "", "active", {"stopped": False}))
            operator.expect("relay", "the operator", Reply, id=number, node=name)
            self._expect_no_second(operator, "state")

    def _stops(self, operator: Client, driver: Client) -> None:
        expect = self._checks.expect
        state = self._command(operator, "estop").state
        expect("stop", state == State.FAULT, f"estop leads to {state!r}")
        self._expect_stop(driver, "stop")
        action = self._answered(driver, "stop")
        expect("stop", action is not None and action.weights_version == 0, "during a stop, a Step gets no safe action")
        late = self._client(name="conformance-late")
        late.send(late.hello)
        self._expect_stop(late, "joining during a stop")
        late.send(Bye("done"))
        error = self._command(operator, "activate").error
        expect("stop", bool(error), "activate during an emergency stop gets no error")
        self._release(operator, driver)
        driver.send(Command(next(self._ids), "", "estop", "smoke", 0, "", b""))
        self._expect_stop(driver, "stop from a driver")
        state = self._command(operator, "state").state
        expect("stop from a driver", state == State.FAULT, f"after the estop of a driver, the server is {state!r}")
        self._release(operator, driver)

    @staticmethod
    def _expect_stop(driver: Client, check: str) -> None:
        driver.expect(check, f"driver {driver.hello.name}", Command, verb="estop", target="")

    def _release(self, operator: Client, driver: Client) -> None:
        self._command(operator, "reset")
        self._activate(operator)
        driver.send(LifecycleChange(driver.hello.name, "fault", "active", "activate", time.monotonic_ns()))
        action = self._answered(driver, "stop")
        policy = action is not None and action.weights_version > 0
        self._checks.expect("stop", policy, "after reset and activate, the server sends no Action of the policy")


def _inside(low: float, high: float) -> float:
    """A value in a range.

    If both bounds are finite, the value is the middle. If one bound is finite, the distance to this bound is 1. If no
    bound is finite, the value is 0.
    """
    if np.isfinite(low) and np.isfinite(high):
        return (low + high) / 2
    return low + 1 if np.isfinite(low) else high - 1 if np.isfinite(high) else 0.0


def _required(kind: type[Message]) -> list[str]:
    return [name for name, wire in wire_fields(kind).items() if not wire.optional]
