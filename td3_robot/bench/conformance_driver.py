"""The checks of a driver: the kit is its policy server and its operator."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from td3_robot.bench.conformance import Checks, PeerStoppedError, Wire, bind, read, until
from td3_robot.errors import ConfigError
from td3_robot.messages import (
    PROTOCOL_VERSION,
    Action,
    ActionOrigin,
    Bye,
    Command,
    Heartbeat,
    Hello,
    LifecycleChange,
    Message,
    Phase,
    Refused,
    Reply,
    Step,
    Welcome,
)
from td3_robot.safety.lifecycle import State
from td3_robot.specs import Float32, RobotSpec
from td3_robot.transport.endpoints import is_tcp

DEMANDS = {
    "frames": "a message has two frames, topic and payload (section 1)",
    "form": "a payload has all fields of its message, in their types and sizes, and no others (sections 2 and 4)",
    "hello": "Hello names protocol 1, role driver, a name, robots and a valid specification (section 3)",
    "hello again": "without an answer, the same Hello comes again every 0.25 s (section 3)",
    "wait": "no other message comes before the Welcome, even after a Heartbeat without a Welcome (section 3)",
    "topics": "a driver sends Hello, Heartbeat, Bye, Step, Command, Reply and LifecycleChange (section 3)",
    "identity": "each Step names the name and the incarnation of the Hello (section 3)",
    "sequence": "the sequence counts 0, 1, 2, …; only the newest Step may come again, unchanged (section 5)",
    "transitions": "transitions grows by the number of robots that are not at FIRST (section 5)",
    "episodes": "FIRST, MID, …, TERMINATED or TRUNCATED; then FIRST of the next episode (section 5)",
    "origin": "origin is 0 if all robots are at FIRST, else 1 to 4; not 5, because the kit has no operator (section 5)",
    "answered": "origin 1 has version and noise of the Action for the Step before; other origins have none (section 5)",
    "action": "the reported action is the Action, within the limits; origin 2 repeats the last action (section 5)",
    "answers": "the driver applies the Actions that answer its newest Step (section 5)",
    "unknown field": "a message with a field that you do not know is valid (section 2)",
    "pace": "a Step comes once in every control period (section 5)",
    "reply": "each Command gets one Reply with its id, the state, and stopped in detail (section 8)",
    "refusal": "a Command that is unknown, or not allowed in this state, gets an error (section 8)",
    "lifecycle": "each change of state is sent as LifecycleChange (section 8)",
    "stop": "an emergency stop leads to fault, and only reset ends it (section 8)",
    "inactive": "a driver that is not active keeps sending Steps, with origin 4 (section 8)",
    "garbage": "malformed messages change nothing (section 2)",
    "deadline": "without Actions the driver goes to fault (section 8)",
    "heartbeat": "after 1 s of silence a Heartbeat with the session of the Welcome comes (section 3)",
    "rejoin": "after Refused with code hello, the same Hello comes again, and then Steps (section 3)",
    "bye": "after shutdown the driver says Bye (sections 3 and 8)",
}
"""What each check demands, by the name of the check."""

_PATIENCE = 10.0  # seconds for an answer
_QUEUED = 0.2  # seconds for the arrival of Hellos that ZeroMQ queued before the kit served the endpoint
_STEPS = 48  # Steps under observation
_NORMAL, _BEYOND, _NOTHING, _SAFE, _FOREIGN, _GROWN = range(6)  # the kit treats Step n in the way n % 6


def check(endpoint: str, wait: float, deadline: float) -> Checks:
    """Serve the endpoint, and check the driver that connects.

    Args:
        endpoint: of the link policy.
        wait: seconds to wait for the driver.
        deadline: seconds after the last Action within which the driver must be in fault.

    Raises:
        EndpointError: the endpoint is busy, malformed or not allowed.
    """
    checks = Checks(DEMANDS)
    with zmq.Context() as context:
        wire = Wire(context, zmq.ROUTER)
        try:
            bind(wire, endpoint)
        except BaseException:
            wire.socket.close()
            raise
        try:
            _Examination(wire, checks).run(wait, deadline)
        except PeerStoppedError:
            pass
        finally:
            wire.socket.close()
            if not is_tcp(endpoint):
                with contextlib.suppress(OSError):
                    Path(endpoint.removeprefix("ipc://")).unlink()
    return checks


class _Examination:
    """The kit's knowledge of one driver.

    Attributes:
        session: session of the newest Welcome; 0 before the first.
        silent: whether the kit sends nothing.
        steps: number of received Steps, without repetitions.
        sent: the Actions of the kit's policy, by the sequence of their Step.
        used: what the kit had done with the Steps whose Actions the driver applied.
        state: the driver's state from its newest Reply or LifecycleChange.
    """

    def __init__(self, wire: Wire, checks: Checks) -> None:
        self.wire, self.checks = wire, checks
        self.key = b""
        self.hellos: list[tuple[float, Hello]] = []
        self.spec: RobotSpec | None = None
        self.dims: dict[str, int] = {}
        self.session = 0
        self.greets = self.silent = False
        self.newest: Step | None = None
        self.steps = 0
        self.stamps: list[int] = []
        self.origins: list[int] = []
        self.sent: dict[int, Action] = {}
        self.used: set[int] = set()
        self.replies: dict[int, list[Reply]] = {}
        self.changes: list[LifecycleChange] = []
        self.state = ""
        self.heartbeats = 0
        self.bye = False
        self._ids = itertools.count(2**40)

    def run(self, wait: float, deadline: float) -> None:
        self._meet(wait)
        self._command("state")
        self._activate()
        self._watch_steps()
        self._stop()
        self._garbage()
        self._fall_silent(deadline)
        self._forget()
        self._end()

    # -- script --------------------------------------------------------------------------------------------------

    def _meet(self, wait: float) -> None:
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
        expect.require("hello again", len(self.hellos) > count, "after a Heartbeat in place of a Welcome: no Hello")
        expect.expect("wait", True, "")
        self.session, self.greets = 7, True
        self._send(Welcome(PROTOCOL_VERSION, "policy", self.session))
        joined = self._until(_PATIENCE, lambda: self.steps > 0)
        expect.require("inactive", joined, f"no Step within {_PATIENCE:g} s after the Welcome")

    def _activate(self) -> None:
        if self.state == State.UNCONFIGURED:
            self._command("configure")
        reply = self._command("activate")
        self.checks.require("reply", reply.state == State.ACTIVE, f"activate leads to {reply.state!r}: {reply.error!r}")

    def _watch_steps(self) -> None:
        begin, expect = self.steps, self.checks
        wanted = {_NORMAL, _BEYOND, _GROWN}
        most = 3 * _STEPS

        def done() -> bool:
            made = self.steps - begin
            return made >= _STEPS and (wanted <= self.used or made >= most)

        enough = self._until(30.0, done)
        expect.expect("answers", _NORMAL in self.used, "no Step reports one of the Actions of the kit with origin 1")
        expect.expect("unknown field", _GROWN in self.used, "an Action with the new field `later` was never applied")
        expect.expect("action", _BEYOND in self.used, "an Action beyond the limits was never applied, not even clipped")
        if expect.expect("pace", enough or self.steps > begin + 8, f"{self.steps - begin} Steps within 30 s"):
            assert self.spec
            period = float(np.median(np.diff(self.stamps[-_STEPS:]))) / 1e9
            wanted_s = self.spec.control_period
            good = 0.6 * wanted_s <= period <= 1.9 * wanted_s
            expect.expect(
                "pace", good, f"the median time between two Steps is {period:g} s; the period is {wanted_s:g} s"
            )

    def _stop(self) -> None:
        expect = self.checks
        before = len(self.changes)
        reply = self._command("estop")
        stopped = reply.state == State.FAULT and reply.detail.get("stopped") is True
        expect.expect("stop", stopped, f"estop leads to {reply.state!r}, stopped {reply.detail.get('stopped')!r}")
        reported = self._until(_PATIENCE, lambda: any(one.state == State.FAULT for one in self.changes[before:]))
        expect.expect("lifecycle", reported, "no LifecycleChange to fault after estop")
        self._expect_safe("fault")
        reply = self._command("activate")
        expect.expect("refusal", bool(reply.error), f"activate during an emergency stop: no error, {reply.state!r}")
        expect.expect("stop", reply.state == State.FAULT, f"activate ends an emergency stop: {reply.state!r}")
        reply = self._command("dance")
        expect.expect("refusal", bool(reply.error), "the verb `dance` gets no error")
        reply = self._command("reset")
        good = reply.state in (State.INACTIVE, State.UNCONFIGURED) and reply.detail.get("stopped") is False
        expect.expect("stop", good, f"reset leads to {reply.state!r}, stopped {reply.detail.get('stopped')!r}")
        self._expect_safe("inactive")
        self._activate()

    def _expect_safe(self, state: str) -> None:
        """The driver must publish Steps with origin 4, or 0 at FIRST, although the kit answers them."""
        begin = len(self.origins)
        more = self._until(_PATIENCE, lambda: len(self.origins) >= begin + 6)
        self.checks.expect("inactive", more, f"the Steps stop in state {state}")
        safe = {int(ActionOrigin.SAFE), int(ActionOrigin.NONE)}
        found = set(self.origins[begin + 2 :])  # the first Steps may report the time before the change
        self.checks.expect("inactive", found <= safe, f"in state {state} Steps have origin {sorted(found)}")

    def _garbage(self) -> None:
        assert self.newest
        action = self._policy_action(self.newest)
        for frames in ([b"action"], [b"action", b"\xc1"], [b"nonsense", b"\x80"], [b"action", b"\x80", b""]):
            self.wire.send_frames(frames, self.key)
        self.wire.send(action, self.key, action=...)
        self.wire.send(action, self.key, action=b"\0")
        self.wire.send(action, self.key, action=np.full_like(action.action, np.nan).tobytes())
        begin, self.used = self.steps, set()
        alive = self._until(_PATIENCE, lambda: self.steps >= begin + 8 and _NORMAL in self.used)
        self.checks.require("garbage", alive, "after malformed messages the driver applies no Actions any more")

    def _fall_silent(self, deadline: float) -> None:
        expect, begin, before = self.checks, self.heartbeats, len(self.changes)
        self.silent = True
        fault = self._until(deadline, lambda: any(one.state == State.FAULT for one in self.changes[before:]))
        expect.expect("deadline", fault, f"no LifecycleChange to fault within {deadline:g} s without an Action")
        beats = self._until(4.0, lambda: self.heartbeats > begin)
        expect.expect("heartbeat", beats, "no Heartbeat within 4 s of silence")
        self.silent = False
        self._command("reset")

    def _forget(self) -> None:
        """Behave like a restarted server: refuse the next message, then send a Welcome with another session."""
        count, self.greets = len(self.hellos), False
        self.session = 0
        self._send(Refused("hello", "policy has not met this client; send Hello"))
        again = self._until(3.0, lambda: len(self.hellos) > count)
        self.checks.require("rejoin", again, "no Hello within 3 s after Refused with code hello")
        begin, self.session, self.greets = self.steps, 8, True
        self._send(Welcome(PROTOCOL_VERSION, "policy", self.session))
        joined = self._until(_PATIENCE, lambda: self.steps > begin + 2)
        self.checks.require("rejoin", joined, f"no new Steps within {_PATIENCE:g} s after the second Welcome")

    def _end(self) -> None:
        reply = self._command("shutdown")
        self.checks.expect("reply", reply.state == State.FINALIZED, f"shutdown leads to {reply.state!r}")
        left = self._until(_PATIENCE, lambda: self.bye)
        self.checks.expect("bye", left, f"no Bye within {_PATIENCE:g} s after shutdown")

    def _command(self, verb: str) -> Reply:
        """Send a Command, and wait for its Reply."""
        number = next(self._ids)
        self._send(Command(number, "", verb, "conformance", 0, "", b""))
        came = self._until(_PATIENCE, lambda: number in self.replies)
        self.checks.require("reply", came, f"no Reply to {verb} within {_PATIENCE:g} s")
        self._until(0.1, lambda: len(self.replies[number]) > 1)
        self.checks.expect(
            "reply", len(self.replies[number]) == 1, f"{len(self.replies[number])} Replies to one {verb}"
        )
        reply = self.replies[number][0]
        good = isinstance(reply.detail.get("stopped"), bool) and reply.state in set(State)
        self.checks.expect("reply", good, f"{verb}: state {reply.state!r}, stopped {reply.detail.get('stopped')!r}")
        self.state = reply.state
        return reply

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, message: Message, **changes: Any) -> None:
        self.wire.send(message, self.key, **changes)

    def _until(self, seconds: float, done: Any) -> bool:
        return until(seconds, done, self._turn)

    def _turn(self, seconds: float) -> None:
        frames = self.wire.receive(seconds)
        if frames is None:
            return
        self.key, *frames = frames
        message = read(self.checks, frames, self.dims)
        if message is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        expect = self.checks.expect
        if isinstance(message, Hello):
            self._take_hello(message)
            return
        if not expect("wait", self.session > 0 or bool(self.newest), f"{message.NAME} before the Welcome"):
            return
        if isinstance(message, Step):
            self._take_step(message)
        elif isinstance(message, Heartbeat):
            self.heartbeats += 1
            expect("heartbeat", message.session in (self.session, 7), f"a Heartbeat with session {message.session}")
            if not self.silent:
                self._send(Heartbeat(message.stamp, self.session))
        elif isinstance(message, Reply):
            self.replies.setdefault(message.id, []).append(message)
        elif isinstance(message, LifecycleChange):
            follows = not self.changes or self.changes[-1].state == message.previous
            expect(
                "lifecycle", follows, f"a change from {message.previous!r}, but the last change led to another state"
            )
            name = self.hellos[0][1].name
            expect("lifecycle", message.node == name, f"a change of node {message.node!r}; the Hello names {name!r}")
            self.changes.append(message)
        elif isinstance(message, Bye):
            self.bye = True
        else:
            expect("topics", isinstance(message, Command), f"a driver sends {message.NAME}")

    def _take_hello(self, hello: Hello) -> None:
        expect = self.checks.expect
        if self.hellos:
            first = self.hellos[0][1]
            changed = [
                name
                for name in ("role", "name", "incarnation", "client", "robots", "spec", "agreement")
                if getattr(hello, name) != getattr(first, name)
            ]
            check = "rejoin" if self.newest else "hello again"
            expect(check, not changed, f"a later Hello differs in {', '.join(changed)}")
        self.hellos.append((time.monotonic(), hello))
        good = hello.protocol == PROTOCOL_VERSION and hello.role == "driver" and hello.robots >= 1
        expect("hello", good, f"protocol {hello.protocol}, role {hello.role!r}, {hello.robots} robots")
        expect("hello", hello.client < 2**63, f"client {hello.client} is not below 2^63")
        if self.spec is None:
            try:
                self.spec = RobotSpec.from_description(hello.spec)
            except ConfigError as error:
                self.checks.require("hello", False, str(error))
            assert self.spec
            self.dims = {"N": hello.robots, "O": self.spec.observation_size, "A": self.spec.action_size}
        if self.greets:
            self._send(Welcome(PROTOCOL_VERSION, "policy", self.session))

    def _take_step(self, step: Step) -> None:
        before, expect, hello = self.newest, self.checks.expect, self.hellos[0][1]
        named = (step.source, step.incarnation)
        expect("identity", named == (hello.name, hello.incarnation), f"step {step.sequence} names {named}")
        if before and step.sequence == before.sequence:
            same = step.observation.tobytes() == before.observation.tobytes() and step.stamp == before.stamp
            expect("sequence", same, f"step {step.sequence} comes again with other content")
        else:
            wanted = before.sequence + 1 if before else 0
            jump = before is not None and step.sequence > wanted and not self.session  # while the kit refuses Steps
            expect("sequence", step.sequence == wanted or jump, f"step {step.sequence} after {wanted - 1}")
            self._check_step(before, step)
            self.newest = step
            self.steps += 1
            self.stamps.append(step.stamp)
            self.origins.append(step.origin)
        if not self.silent and self.session:
            self._answer(step)

    def _check_step(self, before: Step | None, step: Step) -> None:
        expect, what = self.checks.expect, f"step {step.sequence}"
        first = step.phase == Phase.FIRST
        made = step.transitions - (before.transitions if before else 0)
        if before is None or step.sequence == before.sequence + 1:
            expect("transitions", made == int((~first).sum()), f"{what}: transitions grows by {made}")
            expect(
                "episodes", self._episode_follows(before, step), f"{what}: {_episode(before)} and then {_episode(step)}"
            )
        expect(
            "episodes", not step.reward[first].any(), f"{what}: the reward at FIRST is {step.reward[first].tolist()}"
        )
        if first.all():
            expect(
                "origin", step.origin == ActionOrigin.NONE, f"{what}: origin {step.origin}, and all robots are at FIRST"
            )
            return
        if not expect("origin", step.origin in (1, 2, 3, 4), f"{what}: origin {step.origin}"):
            return
        moving = ~first
        if step.origin == ActionOrigin.POLICY:
            self._check_applied(step, moving)
            return
        repeated = (step.answered, step.weights_version, step.noise_kind, step.noise_seed)
        none = (step.sequence, 0, 0, 0)
        expect("answered", repeated == none, f"{what}: origin {step.origin} with answered, version, noise {repeated}")
        if step.origin == ActionOrigin.HELD and before is not None and before.sequence + 1 == step.sequence:
            held = np.array_equal(step.action[moving], before.action[moving])
            expect(
                "action", held or before.origin == 0, f"{what}: origin 2, but the action differs from the last action"
            )

    def _check_applied(self, step: Step, moving: Any) -> None:
        """Check a Step that reports an Action of the policy."""
        assert self.spec
        expect, what = self.checks.expect, f"step {step.sequence}"
        action = self.sent.get(step.answered)
        if not expect(
            "answered",
            action is not None and step.answered == step.sequence - 1,
            f"{what}: origin 1 with answered {step.answered}, for which no policy sent an Action in this period",
        ):
            return
        assert action
        theirs = (step.weights_version, step.noise_kind, step.noise_seed)
        ours = (action.weights_version, action.noise_kind, action.noise_seed)
        expect("answered", theirs == ours, f"{what}: version and noise {theirs}; the Action has {ours}")
        low, high = self.spec.action_low, self.spec.action_high
        applied = step.action[moving]
        within = bool((low <= applied).all() and (applied <= high).all())
        expect("action", within, f"{what}: {applied.tolist()} is beyond the limits")
        mode = step.answered % 6
        if mode != _BEYOND:
            same = np.allclose(applied, action.action[moving], rtol=1e-5, atol=1e-6)
            expect(
                "action",
                same,
                f"{what}: {applied.tolist()} was applied; the Action is {action.action[moving].tolist()}",
            )
        self.used.add(mode)

    @staticmethod
    def _episode_follows(before: Step | None, step: Step) -> bool:
        first = step.phase == Phase.FIRST
        good = bool((step.episode_step[first] == 0).all())
        if before is None:
            return good and bool(first.all())
        ended = before.phase >= Phase.TERMINATED
        same = (step.episode == before.episode) & (step.episode_step == before.episode_step + np.uint32(1)) & ~first
        new = first & (step.episode == before.episode + np.uint64(1))
        return good and bool(np.where(ended, new, same).all())

    # -- Actions -------------------------------------------------------------------------------------------------

    def _answer(self, step: Step) -> None:
        mode, action = step.sequence % 6, self._policy_action(step)
        if mode in (_NORMAL, _BEYOND, _GROWN):
            self.sent[step.sequence] = action
        if mode == _SAFE:
            self._send(action, weights_version=0, noise_kind=0, noise_seed=0)
        elif mode == _FOREIGN:
            self._send(action, answers=step.sequence - 1)  # never + 1: a driver may have reached that Step
            self._send(action, incarnation=step.incarnation + 1)
        elif mode == _GROWN:
            self._send(action, later=[1, {"new": True}])
        elif mode != _NOTHING:
            self._send(action)

    def _policy_action(self, step: Step) -> Action:
        assert self.spec
        low, high = self.spec.action_low, self.spec.action_high
        share = np.float32(10.0 if step.sequence % 6 == _BEYOND else 0.05)
        value: Float32 = ((low + high) / 2 + (high - low) / 2 * share).astype(np.float32)
        actions = np.tile(value, (len(step.action), 1))
        return Action(step.source, step.incarnation, step.sequence, step.stamp, actions, 9, 1, 42)


def _episode(step: Step | None) -> str:
    if step is None:
        return "nothing"
    return f"phase {step.phase.tolist()}, episode {step.episode.tolist()}, step {step.episode_step.tolist()}"
