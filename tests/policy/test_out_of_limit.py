"""For an action outside the limits, the channel's setting decides: the action is clamped, or the robot stops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, layer_shapes
from td3_robot.core_types import Peer
from td3_robot.driver.guard import Guard
from td3_robot.messages import NO_NOISE, Action, Command, LifecycleChange, Phase, Step
from td3_robot.policy.core import PolicyCore
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Channel, Float32, RobotSpec
from td3_robot.transport.link import hello

SPEC = RobotSpec(
    "Toy", (Channel("o", "m", -5.0, 5.0),), (Channel("left", "N", -1.0, 3.0), Channel("right", "N", -0.5, 0.5)), 0.02
)
LIMITS = {"left": (0.0, 1.0), "right": (-0.25, 0.25)}
SAFE = {"left": 0.5, "right": -0.125}
PEER = Peer("policy", b"1", hello("driver", "leg", client=1, robots=1, spec=SPEC), {})
OPERATOR = Peer("policy", b"2", hello("operator", "op", client=2), {})

Modes = st.sampled_from(["clamp", "stop"])
Maps = st.none() | Modes | st.fixed_dictionaries({}, optional={"left": Modes, "right": Modes})
Shares = st.tuples(*[st.floats(-0.9, 0.9)] * 2)


def policy(shares: tuple[float, float]) -> Bundle:
    """A policy that always returns the same action.

    Each share gives the action of one channel: -1 is the low end of the channel's range, and 1 is the high end.
    """
    tensors = {name: np.zeros(shape, np.float32) for name, shape in layer_shapes(SPEC, (2,)).items()}
    tensors["actor.1.bias"][:] = np.arctanh(shares)
    return Bundle(SPEC, (2,), tensors, provenance={"version": 1})


def step(sequence: int) -> Step:
    number, zeros = np.full(1, sequence, np.uint32), np.zeros((1, 2), np.float32)
    phase = np.full(1, Phase.MID if sequence else Phase.FIRST, np.uint8)
    sent = np.full((1, 1), sequence, np.float32)
    episode, reward = np.zeros(1, np.uint64), np.zeros(1, np.float32)
    return Step(
        *("leg", 0, sequence, sequence, 0, phase, episode, number, sent, reward, zeros),
        *(1, max(0, sequence - 1), 0, 0, 0, 0, {}),
    )


def serve(core: PolicyCore, sequence: int, now: float) -> Action:
    outputs = core.step([(PEER, step(sequence))], now)
    [action] = [message for _, message in outputs if isinstance(message, Action)]
    return action


def server(safety: SafetyConfig, shares: tuple[float, float]) -> PolicyCore:
    core = PolicyCore(1, safety=safety)
    core.load(1, policy(shares))
    core.step([(PEER, PEER.hello), (OPERATOR, OPERATOR.hello)], 0.0)
    return core


def drive(safety: SafetyConfig, action: Float32) -> tuple[Guard, Float32 | None]:
    """Give an Action of a policy to a driver's guard. Return the guard and the action that it accepts."""
    guard = Guard(SPEC, "leg", safety)
    guard.look(0.0)
    return guard, guard.accept(Action("leg", 0, 0, 0, action, 1, NO_NOISE, 0), 0.0)


@given(Maps, Shares)
def test_server_and_driver_stop_for_the_same_actions(mode: object, shares: tuple[float, float]) -> None:
    safety = SafetyConfig(limits=LIMITS, out_of_limit=mode, safe_action=SAFE)  # type: ignore[arg-type]
    wanted = serve(server(SafetyConfig(), shares), 0, 0.1).action
    low, high = np.float32([0.0, -0.25]), np.float32([1.0, 0.25])
    outside = ((wanted < low) | (wanted > high))[0]
    modes = [mode.get(name, "clamp") if isinstance(mode, dict) else mode for name in ("left", "right")]
    stops = any(bad and each == "stop" for bad, each in zip(outside, modes, strict=True))

    core = server(safety, shares)
    action = serve(core, 0, 0.1)
    guard, used = drive(safety, wanted)
    assert core.safety.watches["leg"].lifecycle.stopped == guard.lifecycle.stopped == stops
    if stops:
        assert (action.weights_version, action.action.tolist()) == (0, [[0.5, -0.125]])
        assert used is None
        assert guard.safe
        assert core.safety.watches["leg"].lifecycle.reason == guard.lifecycle.reason
    else:
        assert used is not None
        np.testing.assert_array_equal(action.action, np.clip(wanted, low, high))
        np.testing.assert_array_equal(used, np.clip(wanted, low, high))


@given(Shares)
def test_clamp_is_the_default_setting(shares: tuple[float, float]) -> None:
    default, clamp = (SafetyConfig(limits=LIMITS, rate=5.0, low_pass=10.0, out_of_limit=m) for m in (None, "clamp"))
    actions = [serve(server(safety, shares), 0, 0.1).action for safety in (default, clamp)]
    assert actions[0].tobytes() == actions[1].tobytes()


def test_the_reason_of_a_stop_names_the_channel_and_the_stop_lasts_until_reset_and_activate() -> None:
    """The stop is an emergency stop of this robot, so automatic recovery does not end it."""
    safety = SafetyConfig(
        limits=LIMITS, out_of_limit={"right": "stop"}, safe_action=SAFE, recovery="automatic", recovery_ms=1
    )
    core = server(safety, (0.0, 0.8))
    outputs = core.step([(PEER, step(0))], 0.1)
    [(to, stop)] = [(to, m) for to, m in outputs if isinstance(m, Command)]
    assert (to, stop.verb, stop.reason) == (PEER, "estop", "action 'right' of robot 0 is 0.4 N; allowed: -0.25 to 0.25")
    *_, change = [m for _, m in outputs if isinstance(m, LifecycleChange)]
    assert (change.node, change.state) == ("policy/leg", "fault")
    assert change.reason == "emergency stop: action 'right' of robot 0 is 0.4 N; allowed: -0.25 to 0.25"
    assert core.safety_state.sources["leg"].reason == change.reason.removeprefix("emergency stop: ")
    core.load(2, replace(policy((0.0, 0.0)), provenance={"version": 2}))
    assert [serve(core, number, 0.1 * number).weights_version for number in range(1, 5)] == [0] * 4
    for verb in ("reset", "activate"):
        core.step([(OPERATOR, Command(1, "leg", verb, "", 0, "", b""))], 0.5)
    assert serve(core, 5, 0.6).weights_version == 2


def test_a_recorded_server_that_did_not_tell_its_drivers_sends_no_estop() -> None:
    core = PolicyCore(1, safety=SafetyConfig(limits=LIMITS, out_of_limit="stop"), tells_drivers=False)
    core.load(1, policy((0.0, 0.8)))
    core.step([(PEER, PEER.hello)], 0.0)
    outputs = core.step([(PEER, step(0))], 0.1)
    assert core.safety.watches["leg"].lifecycle.stopped
    assert not [m for _, m in outputs if isinstance(m, Command)]


STOPS, CLAMPS = (SafetyConfig(limits=LIMITS, out_of_limit=mode) for mode in ("stop", "clamp"))


@pytest.mark.parametrize(("robot", "bundle"), [(CLAMPS, STOPS), (STOPS, CLAMPS)], ids=["bundle", "robot"])
def test_an_action_outside_the_limits_stops_the_robot_if_the_setting_of_the_robot_or_of_the_bundle_is_stop(
    robot: SafetyConfig, bundle: SafetyConfig
) -> None:
    core = PolicyCore(1, safety=robot)
    core.load(1, replace(policy((0.9, 0.0)), safety=bundle))
    core.step([(PEER, PEER.hello)], 0.0)
    assert serve(core, 0, 0.1).weights_version == 0


def test_a_safe_action_outside_the_limits_of_the_driver_does_not_stop_the_driver() -> None:
    guard = Guard(SPEC, "leg", STOPS)
    guard.look(0.0)
    action = Action("leg", 0, 0, 0, np.float32([[2.0, 0.0]]), 1, NO_NOISE, 0)
    used = guard.accept(changed(action, weights_version=0), 0.0)
    assert used is not None
    assert used.tolist() == [[1.0, 0.0]]
    assert guard.accept(action, 0.0) is None
    assert guard.lifecycle.stopped


@pytest.mark.parametrize("robots", [1, 3])
def test_the_reason_of_a_stop_names_the_robot(robots: int) -> None:
    wanted = np.zeros((robots, 2), np.float32)
    wanted[-1, 0] = -0.5
    guard, used = drive(STOPS, wanted)
    assert used is None
    assert f"action 'left' of robot {robots - 1} is -0.5 N; allowed: 0 to 1" in guard.lifecycle.reason
