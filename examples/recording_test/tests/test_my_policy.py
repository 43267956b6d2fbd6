"""Tests of a policy with the pytest fixtures of td3-robot."""

import numpy as np

from td3_robot.bundle import Bundle
from td3_robot.messages import Action, Command, LifecycleChange, Reply, Step, Weights
from td3_robot.policy.core import PolicyCore
from td3_robot.transport.link import ClientLink, ServerLink, hello

RECORDING = "tests/sessions/pendulum.mcap"


def newest_policy(session):
    payloads = [message.payload for _, message in session.messages(["weights"]) if isinstance(message, Weights)]
    return Bundle.decode(payloads[-1])


def test_torque_stays_within_limits(recorded_session, fake_robot):
    robot = fake_robot(newest_policy(recorded_session(RECORDING)))
    for angle in np.linspace(0, 2 * np.pi, 50):
        action = robot.observe([np.cos(angle), np.sin(angle), 0.0])
        assert np.all(action.action >= robot.spec.action_low)
        assert np.all(action.action <= robot.spec.action_high)


def test_the_same_observation_gives_the_same_action(recorded_session, fake_robot, manual_clock):
    robot = fake_robot(newest_policy(recorded_session(RECORDING)))
    first = robot.observe([1.0, 0.0, 0.5])
    manual_clock.advance(60.0)
    again = robot.observe([1.0, 0.0, 0.5])
    assert np.array_equal(first.action, again.action)
    assert again.answers == first.answers + 1


def test_every_action_answers_a_step(recorded_session):
    messages = [message for _, message in recorded_session(RECORDING).messages(["step", "action"])]
    steps = {message.sequence for message in messages if isinstance(message, Step)}
    assert {message.answers for message in messages if isinstance(message, Action)} <= steps


def test_an_emergency_stop_is_answered_with_fault(memory_bus, manual_clock):
    server, operator, core = memory_bus(), memory_bus(), PolicyCore(seed=0)
    server.serve("policy", ServerLink("policy", "policy", {"operator": (Command,)}, {}, 1))
    me = hello("operator", "me", client=1)
    operator.connect("policy", ClientLink("policy", me, (Reply, LifecycleChange)))

    def heard():
        operator.receive(0.0)  # this call also sends Hello
        for to, message in core.step(server.receive(0.0), manual_clock()):
            server.send(to, message)
        return [message for _, message in operator.receive(0.0)]

    heard()
    stop = Command(id=1, target="", verb="estop", reason="it fell", version=0, sha256="", payload=b"")
    manual_clock.advance(1.0)
    assert operator.send("policy", stop)
    assert [(message.id, message.state) for message in heard() if isinstance(message, Reply)] == [(1, "fault")]
