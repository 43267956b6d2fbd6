"""The safety filter: hand calculations, bounds for any input, and very wide settings, which have no effect."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from td3_robot.bundle import Bundle
from td3_robot.core_types import Peer
from td3_robot.messages import Action, Step
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.safety_filter import SafetyFilter
from td3_robot.safety.limits import SafetyConfig, joined
from td3_robot.specs import Channel, Float32, RobotSpec
from td3_robot.transport.link import hello

SPEC = RobotSpec(
    "Toy", (Channel("o", "m", -5.0, 5.0),), (Channel("left", "N", -1.0, 3.0), Channel("right", "N", -0.5, 0.5)), 0.02
)


def filtered(config: SafetyConfig, action: list[float], applied: list[float]) -> list[float]:
    safety = SafetyFilter(joined(config, SafetyConfig(), SPEC), SPEC)
    return safety(np.array([action], np.float32), np.array([applied], np.float32))[0].tolist()  # type: ignore[no-any-return]


def test_limits_clip_the_action() -> None:
    config = SafetyConfig(limits={"left": (0.0, 1.0)})
    assert filtered(config, [2, 0.25], [0, 0]) == [1, 0.25]
    assert filtered(config, [-1, -0.5], [0, 0]) == [0, -0.5]


def test_an_action_changes_by_at_most_the_rate_limit() -> None:
    """5 N/s in 0.02 s is 0.1 N."""
    config = SafetyConfig(rate=5.0)
    assert filtered(config, [3, -0.5], [1, 0.25]) == pytest.approx([1.1, 0.15])
    assert filtered(config, [1.05, 0.25], [1, 0.25]) == pytest.approx([1.05, 0.25])


def test_the_low_pass_mixes_the_new_action_with_the_applied_action() -> None:
    """The applied action is 1, and the new action is 2. The result is 1 + 0.71539·(2 - 1) = 1.71539.

    With a cut-off frequency of 10 Hz, the weight of the new action is 1 - exp(-2π · 10 Hz · 0.02 s) = 0.71539. The
    filter does not change channels without a cut-off frequency.
    """
    config = SafetyConfig(low_pass={"left": 10.0})
    assert filtered(config, [2, 0.5], [1, -0.5]) == pytest.approx([1.71539, 0.5], abs=1e-5)


def test_low_pass_comes_before_rate() -> None:
    """The low-pass filter changes the action from 1 to 1.71539. The rate of 25 N/s allows only 0.5 N: from 1 to 1.5."""
    assert filtered(SafetyConfig(low_pass=10.0, rate=25.0), [2, 0], [1, 0]) == pytest.approx([1.5, 0])


def test_limits_have_priority_over_the_rate() -> None:
    """The applied action of 2 N is outside the limits.

    The rate allows a change of only 0.1 N, to 1.9 N. But the filter returns the upper limit, 0.5 N.
    """
    assert filtered(SafetyConfig(limits={"left": (-1.0, 0.5)}, rate=5.0), [3, 0], [2, 0]) == [0.5, 0]


def test_each_robot_is_filtered_separately() -> None:
    """The action of each robot changes by at most 0.1 N per period, from the robot's own applied action."""
    safety = SafetyFilter(joined(SafetyConfig(rate=5.0), SafetyConfig(), SPEC), SPEC)
    action = np.array([[3, 0], [3, 0], [-1, 0]], np.float32)
    applied = np.array([[2, 0], [0, 0], [1, 0]], np.float32)
    assert safety(action, applied)[:, 0].tolist() == pytest.approx([2.1, 0.1, 0.9])


Actions = arrays.arrays(np.float32, (3, 2), elements=st.floats(-1e3, 1e3, width=32))


@given(Actions, Actions)
def test_bounds_hold_for_any_input(action: Float32, applied: Float32) -> None:
    config = SafetyConfig(limits={"left": (-0.5, 2.0)}, rate=5.0, low_pass=3.0)
    envelope = joined(config, SafetyConfig(), SPEC)
    applied = np.clip(applied, envelope.low, envelope.high)
    result = SafetyFilter(envelope, SPEC)(action.copy(), applied)
    assert result.dtype == np.float32
    assert (envelope.low <= result).all()
    assert (result <= envelope.high).all()
    assert (np.abs(result - applied) <= 0.1 + 1e-6).all()
    toward = (action - applied) * (result - applied)
    assert (toward >= -1e-6).all()  # the result never moves away from the policy's action


def test_the_filter_has_no_memory() -> None:
    """The same input gives the same result again, even after calls with other inputs."""
    safety = SafetyFilter(joined(SafetyConfig(rate=5.0, low_pass=3.0), SafetyConfig(), SPEC), SPEC)
    rng = np.random.default_rng(0)
    action, applied = rng.normal(size=(2, 4, 2)).astype("f4")
    before = safety(action.copy(), applied).tobytes()
    for robots in (1, 7):
        safety(rng.normal(size=(robots, 2)).astype("f4"), np.zeros((robots, 2), "f4"))
    assert safety(action.copy(), applied).tobytes() == before


@pytest.mark.parametrize(
    ("refuse", "value", "words"),
    [
        (False, float("nan"), "'o' of robot 1 is nan m"),
        (False, float("inf"), "'o' of robot 1 is inf m"),
        (False, 1e9, None),
        (True, 5.0, None),
        (True, 5.1, "'o' of robot 1 is 5.1 m; allowed: -5 to 5"),
        (True, float("nan"), "is nan m; allowed: -5 to 5"),
    ],
)
def test_the_filter_reports_invalid_observations(refuse: bool, value: float, words: str | None) -> None:
    envelope = joined(SafetyConfig(refuse_out_of_range=refuse), SafetyConfig(), SPEC)
    problem = SafetyFilter(envelope, SPEC).problem(np.array([[0], [value]], np.float32))
    assert (problem is None) == (words is None)
    assert words is None or (problem and words in problem)


def test_very_wide_settings_do_not_change_the_bytes_of_actions(
    make_step: Callable[..., Step], make_bundle: Callable[..., Bundle], spec: RobotSpec, rng: np.random.Generator
) -> None:
    """A server with very wide settings computes the same bytes as a server without settings."""
    peer = Peer("policy", b"1", hello("simulator", "sim-0", client=1, robots=4, spec=spec), {})
    wide = SafetyConfig(limits=(-1e6, 1e6), rate=1e9, observation_deadline_ms=1e9)
    cores = [PolicyCore(9), PolicyCore(9, safety=wide)]
    for core in cores:
        core.load(1, make_bundle(kind="gaussian", scale=0.1))
    for number in range(50):
        step = make_step(number, robots=4, observation=rng.normal(size=(4, 3)).astype("f4"))
        answers = [core.step([(peer, step)], number * 0.02)[0][1] for core in cores]
        assert isinstance(answers[0], Action)
        assert isinstance(answers[1], Action)
        assert answers[0].action.tobytes() == answers[1].action.tobytes()
