"""Operators take over robots: the core's answers, its refusals, and what survives a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from td3_robot.bundle import Bundle
from td3_robot.core_types import Farewell, Peer
from td3_robot.messages import Action, Bye, Command, Reply, Step, Teleop
from td3_robot.policy.core import PolicyCore
from td3_robot.safety import state as safety_state
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from td3_robot.transport.link import hello

DEADLINE = 0.2


def operator(name: str = "ann", client: int = 7, key: bytes = b"o1") -> Peer:
    return Peer("policy", key, hello("operator", name, client=client), {})


ANN, BOB = operator(), operator("bob", 8, b"o2")


class Server:
    """A core, one source with two robots, and a clock. The policy always returns (1, 0).

    The action limits are [-1, 3] and [-0.5, 0.5]. The rate of 25 units/s allows a change of 0.5 in a period of 0.02 s.
    """

    def __init__(self, bundle: Bundle, spec: RobotSpec, make_step: Callable[..., Step], **options: Any) -> None:
        zeros = {name: np.zeros_like(tensor) for name, tensor in bundle.tensors.items()}
        options = {"safety": SafetyConfig(rate=25.0), **options}
        self.core = PolicyCore(9, operator_deadline_s=DEADLINE, **options)
        self.core.load(1, replace(bundle, tensors=zeros))
        self.source = Peer("policy", b"1", hello("simulator", "sim-0", client=1, robots=2, spec=spec), {})
        self.now = 0.0
        self.sequence = 0
        self.applied = np.tile(np.array([1, 0], np.float32), (2, 1))
        self._make_step = make_step
        self.receive(self.source, self.source.hello)

    def receive(self, peer: Peer, message: Any) -> list[Any]:
        return [message for _, message in self.core.step([(peer, message)], self.now)]

    def command(self, peer: Peer, verb: str, robot: int = 0, target: str = "sim-0") -> Reply:
        replies = self.receive(peer, Command(5, target, verb, "test", 0, "", b"", robot))
        return next(item for item in replies if isinstance(item, Reply))

    def teleop(self, peer: Peer, action: list[float], sequence: int, robot: int = 0) -> list[Any]:
        return self.receive(peer, Teleop("sim-0", robot, sequence, 0, action))

    def act(self) -> Action:
        """Send a Step with the applied actions, apply the Action, and return it."""
        self.now += 0.02
        self.sequence += 1
        step = self._make_step(self.sequence, robots=2, action=self.applied.copy())
        [action] = [item for item in self.receive(self.source, step) if isinstance(item, Action)]
        self.applied = action.action.copy()
        return action


@pytest.fixture
def serve(make_bundle: Callable[..., Bundle], spec: RobotSpec, make_step: Callable[..., Step]) -> Callable[..., Server]:
    return lambda **options: Server(make_bundle(), spec, make_step, **options)


def test_an_action_of_an_operator_replaces_the_action_of_the_policy_within_the_rate_limits(
    serve: Callable[..., Server],
) -> None:
    """The action of robot 0 goes from 1 to 3 in steps of 0.5. After ``give_back``, it goes back to 1.

    The action of robot 1 stays at 1.
    """
    server = serve()
    assert server.act().operated == {}
    reply = server.command(ANN, "takeover")
    assert not reply.error
    assert reply.detail["deadline_ms"] == 200
    assert [(channel["low"], channel["high"]) for channel in reply.detail["actions"]] == [(-1, 3), (-0.5, 0.5)]
    firsts = []
    for number in range(1, 6):
        server.teleop(ANN, [7.0, 0.25], number)
        action = server.act()
        assert action.operated == {"0": "ann"}
        assert (action.weights_version, action.action[1].tolist()) == (1, [1, 0])
        firsts.append(action.action[0, 0])
    assert firsts == [1.5, 2, 2.5, 3, 3]  # the last two are at the limit
    assert not server.command(ANN, "give_back").error
    after = [server.act() for _ in range(5)]
    assert [action.action[0, 0] for action in after] == [2.5, 2, 1.5, 1, 1]
    assert after[0].operated == {}


def test_a_silent_operator_leads_to_the_safe_action_until_actions_come_again(serve: Callable[..., Server]) -> None:
    """By default, the safe action is the last applied action."""
    server = serve()
    server.command(ANN, "takeover")
    assert server.act().operated == {"0": ""}
    server.teleop(ANN, [1.25, 0], 1)
    assert server.act().action[0, 0] == 1.25
    server.now += DEADLINE
    late = server.act()
    assert (late.operated, late.action[0, 0]) == ({"0": ""}, 1.25)
    server.teleop(ANN, [2, 0], 2)
    back = server.act()
    assert (back.operated, back.action[0, 0]) == ({"0": "ann"}, 1.75)
    server.teleop(ANN, [3, 0], 2)  # ignored, because number 2 was used before
    assert server.act().action[0, 0] == 2


def test_a_takeover_obeys_the_rate_limits_but_the_safe_action_after_silence_does_not(
    serve: Callable[..., Server],
) -> None:
    """Until the first Teleop, the action goes from the policy's 1 to the safe action 0 in steps of 0.5.

    When a driving operator falls silent, the safe action comes at once.
    """
    server = serve(safety=SafetyConfig(rate=25.0, safe_action="zero"))
    assert server.act().action[0, 0] == 1
    server.command(ANN, "takeover")
    assert [server.act().action[0, 0] for _ in range(3)] == [0.5, 0, 0]
    for number in (1, 2):
        server.teleop(ANN, [1, 0], number)
        assert server.act().action[0, 0] == number / 2
    server.now += DEADLINE
    assert server.act().action[0, 0] == 0


def test_a_refused_reset_does_not_give_a_robot_back(serve: Callable[..., Server]) -> None:
    server = serve()
    server.command(ANN, "takeover")
    server.receive(ANN, Bye("connection closed"))
    server.receive(server.source, Bye("connection closed"))
    assert server.command(BOB, "reset").error
    server.receive(server.source, server.source.hello)
    assert server.act().operated == {"0": ""}


def test_the_policy_chooses_no_action_if_operators_have_all_robots(serve: Callable[..., Server]) -> None:
    server = serve()
    server.command(ANN, "takeover", 0)
    server.command(BOB, "takeover", 1)
    server.teleop(ANN, [0.75, 0], 1)
    action = server.act()
    assert (action.operated, action.weights_version, action.noise_kind) == ({"0": "ann", "1": ""}, 0, 0)


def test_a_second_operator_is_refused_while_the_first_drives(serve: Callable[..., Server]) -> None:
    server = serve()
    server.command(ANN, "takeover")
    taken = "policy: operator 'ann' has taken over robot 0 of 'sim-0'"
    assert server.command(BOB, "takeover").error == server.command(BOB, "give_back").error == taken
    [refusal] = server.teleop(BOB, [0, 0], 1)
    reason = "policy: you have not taken over robot 0 of 'sim-0'; operator 'ann' has it"
    assert (refusal.id, refusal.error) == (0, reason)
    assert server.command(BOB, "state", target="").detail["taken_over"] == {"sim-0/0": "ann"}


@pytest.mark.parametrize("sent", [0, 1])
def test_a_second_operator_can_take_over_from_a_silent_operator(serve: Callable[..., Server], sent: int) -> None:
    """Ann is silent after her takeover, or after an action. The robot has the safe action until Bob sends an action."""
    server = serve()
    server.command(ANN, "takeover")
    if sent:
        server.teleop(ANN, [1.25, 0], sent)
    server.now += DEADLINE
    assert server.command(BOB, "takeover").error == "policy: operator 'ann' has taken over robot 0 of 'sim-0'"
    server.now += 0.001
    assert server.command(BOB, "give_back").error == "policy: operator 'ann' has taken over robot 0 of 'sim-0'"
    assert not server.command(BOB, "takeover").error
    assert server.act().operated == {"0": ""}
    [refusal] = server.teleop(ANN, [0, 0], sent + 1)
    assert refusal.error.endswith("; operator 'bob' has it")
    assert server.command(ANN, "give_back").error.endswith("operator 'bob' has taken over robot 0 of 'sim-0'")
    server.receive(ANN, Bye("connection closed"))
    server.teleop(BOB, [1.5, 0], 1)
    assert server.act().operated == {"0": "bob"}


@pytest.mark.parametrize("verb", ["takeover", "give_back", "reset"])
def test_a_robot_gets_the_safe_action_after_its_operator_left(serve: Callable[..., Server], verb: str) -> None:
    """After ``give_back`` or ``reset``, the policy moves the robot. After ``takeover``, the robot waits for Bob."""
    server = serve()
    server.command(ANN, "takeover")
    server.teleop(ANN, [1.5, 0], 1)
    assert server.act().operated == {"0": "ann"}
    server.receive(ANN, Bye("connection closed"))
    left = server.act()
    assert (left.operated, left.action[0, 0]) == ({"0": ""}, 1.5)
    server.receive(BOB, Command(5, "sim-0", verb, "test", 0, "", b""))
    assert server.act().operated == ({"0": ""} if verb == "takeover" else {})


def test_a_reset_does_not_take_a_robot_from_its_connected_operator(serve: Callable[..., Server]) -> None:
    server = serve()
    server.command(ANN, "takeover")
    server.command(BOB, "reset", target="")
    assert server.act().operated == {"0": ""}


def test_an_operator_keeps_the_robot_after_a_reconnect(serve: Callable[..., Server]) -> None:
    server = serve()
    server.command(ANN, "takeover")
    server.teleop(ANN, [1.5, 0], 1)
    server.receive(ANN, Bye(Farewell.RECONNECTED.value))
    again = operator(key=b"o3")
    server.receive(again, again.hello)
    assert server.act().operated == {"0": "ann"}
    server.teleop(again, [1.25, 0], 2)
    assert server.act().action[0, 0] == 1.25


def test_an_emergency_stop_has_priority_over_an_operator(serve: Callable[..., Server]) -> None:
    server = serve()
    server.command(ANN, "takeover")
    server.command(BOB, "estop", target="")
    server.teleop(ANN, [3, 0], 1)
    stopped = server.act()
    assert (stopped.weights_version, stopped.operated, stopped.action[0, 0]) == (0, {}, 1)


@pytest.mark.parametrize(
    ("options", "robot", "target", "text"),
    [
        ({}, 0, "leg", "no robot 'leg' is connected; connected: sim-0"),
        ({}, 2, "sim-0", "'sim-0' has no robot 2; allowed: 0 to 1"),
        ({}, 0, "", "no robot '' is connected"),
        ({"lockstep": True}, 0, "sim-0", "an operator needs timing: free"),
    ],
)
def test_the_error_for_a_refused_takeover_names_the_reason(
    serve: Callable[..., Server], options: dict[str, Any], robot: int, target: str, text: str
) -> None:
    server = serve(**options)
    assert text in server.command(ANN, "takeover", robot, target).error
    assert server.command(ANN, "give_back", robot, target).error.endswith("is not taken over")


def test_an_action_of_a_wrong_length_is_refused(serve: Callable[..., Server]) -> None:
    server = serve()
    server.command(ANN, "takeover")
    [reply] = server.teleop(ANN, [0.5], 1)
    assert reply.error == "policy: the action has 1 numbers; the robot has 2 action channels"


def test_after_a_restart_no_policy_moves_the_robot_and_no_operator_has_it(serve: Callable[..., Server]) -> None:
    server, later = serve(), serve()
    server.command(ANN, "takeover", 1)
    stored = server.core.safety_state.stored()
    assert stored["operated"] == {"sim-0": [1]}
    [line] = later.core.resume(safety_state.read(stored), 0.0)
    assert line.startswith("an operator had taken over sim-0/1")
    assert later.act().operated == {"1": ""}
    assert later.teleop(ANN, [3, 0], 1, robot=1)[0].error
    assert not later.command(ANN, "give_back", 1).error
    assert later.act().operated == {}
    assert "operated" not in later.core.safety_state.stored()


def test_the_server_ignores_a_takeover_command_from_a_robot(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.receive(server.source, Command(5, "sim-0", "takeover", "", 0, "", b"")) == []
    assert server.act().operated == {}
