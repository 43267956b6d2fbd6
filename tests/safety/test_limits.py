"""Safety settings: their effect on a robot, the joined settings of robot and policy, and refused settings."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.config import loading as configuration
from td3_robot.errors import ConfigError
from td3_robot.safety.limits import SafetyConfig, joined
from td3_robot.specs import Channel, RobotSpec

NOTHING = SafetyConfig()
SPEC = RobotSpec(
    "Toy", (Channel("o", "m", -5.0, 5.0),), (Channel("left", "N", -1.0, 3.0), Channel("right", "N", -0.5, 0.5)), 0.02
)


def test_without_settings_the_limits_are_those_of_the_specification(spec: RobotSpec) -> None:
    envelope = joined(NOTHING, NOTHING, spec)
    assert envelope.low.tolist() == [-1, -0.5]
    assert envelope.high.tolist() == [3, 0.5]
    assert envelope.step is envelope.blend is envelope.safe is envelope.observation_low is None
    assert envelope.observation_deadline_s is envelope.action_deadline_s is envelope.recovery_s is None
    assert not envelope.guarded
    assert NOTHING.settings() == {}


def test_settings_match_a_hand_calculation(spec: RobotSpec) -> None:
    """The control period is 0.02 s.

    The rate 5 N/s allows a step of 0.1 N. The low-pass filter of 10 Hz has the blend 1 - exp(-2π·10·0.02) = 0.71539.
    """
    robot = SafetyConfig(limits=(-0.8, 2.0), rate={"left": 5.0}, low_pass=10.0, safe_action={"left": 0.5})
    envelope = joined(robot, NOTHING, spec)
    assert envelope.low.tolist() == pytest.approx([-0.8, -0.5])  # the pair is clipped to each channel's limits
    assert envelope.high.tolist() == pytest.approx([2, 0.5])
    assert envelope.step is not None
    assert envelope.step.tolist() == pytest.approx([0.1, math.inf])
    assert envelope.blend is not None
    assert envelope.blend.tolist() == pytest.approx([0.71539, 0.71539], abs=1e-5)
    assert envelope.safe is not None
    assert envelope.safe.tolist() == [0.5, 0]
    assert envelope.guarded


@pytest.mark.parametrize(
    ("robot", "policy", "seconds"),
    [
        (NOTHING, NOTHING, 30),
        (SafetyConfig(reset_timeout_ms=5000), SafetyConfig(reset_timeout_ms=2000), 2),
        # the timeout is raised to the deadline
        (SafetyConfig(reset_timeout_ms=5, observation_deadline_ms=100), NOTHING, 0.1),
    ],
)
def test_the_shorter_reset_timeout_applies_and_the_default_is_30_seconds(
    spec: RobotSpec, robot: SafetyConfig, policy: SafetyConfig, seconds: float
) -> None:
    assert joined(robot, policy, spec).reset_timeout_s == seconds


def test_joining_takes_the_stricter_value(spec: RobotSpec) -> None:
    robot = SafetyConfig(
        limits={"left": (0.0, 3.0)}, rate=5.0, observation_deadline_ms=100, recovery="automatic", recovery_ms=50
    )
    policy = SafetyConfig(
        limits={"left": (-1.0, 1.0)},
        rate={"left": 10.0, "right": 1.0},
        observation_deadline_ms=80,
        action_deadline_ms=40,
        refuse_out_of_range=True,
        safe_action="zero",
        recovery_ms=200,
    )
    envelope = joined(robot, policy, spec)
    assert (envelope.low[0], envelope.high[0]) == (0, 1)
    assert envelope.step is not None
    assert envelope.step.tolist() == pytest.approx([0.1, 0.02])
    assert (envelope.observation_deadline_s, envelope.action_deadline_s) == (0.08, 0.04)
    assert envelope.observation_high is not None
    assert envelope.safe is not None
    assert envelope.safe.tolist() == [0, 0]
    assert envelope.recovery_s == 0.2
    assert joined(robot, SafetyConfig(recovery="manual"), spec).recovery_s is None
    assert joined(NOTHING, SafetyConfig(recovery="automatic"), spec).recovery_s is None
    hold = joined(SafetyConfig(safe_action="hold"), policy, spec)
    assert hold.safe is None  # the robot's safe action has priority


Bound = st.floats(-3, 3, width=32)
Ranges = st.tuples(Bound, Bound).filter(lambda pair: pair[0] < pair[1])
Modes = st.sampled_from(["clamp", "stop"])
Configs = st.builds(
    SafetyConfig,
    limits=st.none() | Ranges,
    rate=st.none() | st.floats(0.1, 100) | st.fixed_dictionaries({"left": st.floats(0.1, 100)}),
    low_pass=st.none() | st.floats(0.1, 100),
    observation_deadline_ms=st.none() | st.floats(1, 1e4),
    refuse_out_of_range=st.booleans(),
    out_of_limit=st.none() | Modes | st.fixed_dictionaries({}, optional={"left": Modes, "right": Modes}),
)


@given(Configs, Configs)
def test_joining_never_loosens_a_setting_of_robot_or_policy(robot: SafetyConfig, policy: SafetyConfig) -> None:
    def bounds(first: SafetyConfig, second: SafetyConfig) -> Any:
        try:
            envelope = joined(first, second, SPEC)
        except ConfigError:
            return None
        step = np.full(2, np.inf, np.float32) if envelope.step is None else envelope.step
        blend = np.ones(2, np.float32) if envelope.blend is None else envelope.blend
        deadline = envelope.observation_deadline_s or math.inf
        moves = np.ones(2) if envelope.stops is None else ~envelope.stops
        accepts = envelope.observation_low is None
        return np.array([*-envelope.low, *envelope.high, *step, *blend, *moves, deadline, accepts])

    both, alone = bounds(robot, policy), [bounds(robot, NOTHING), bounds(policy, NOTHING)]
    if both is not None:
        assert all(one is not None and (both <= one).all() for one in alone)
    assert (both is None) == (bounds(policy, robot) is None)


@given(Configs)
def test_settings_survive_writing_and_parsing(config: SafetyConfig) -> None:
    assert msgspec.convert(config.settings(), SafetyConfig) == config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"limits": {"lefft": (0.0, 1.0)}}, "no action 'lefft'; did you mean 'left'"),
        (
            {"limits": {"left": (-2.0, 1.0)}},
            r"'left' is \[-2.0, 1.0\] N; allowed: inside the specification's \[-1.0, 3.0\]",
        ),
        ({"out_of_limit": {"lefft": "stop"}}, "safety.out_of_limit: robot 'Toy' has no action 'lefft'; did you mean"),
        ({"limits": (4.0, 5.0)}, "limits of 'left' leave no value: low is 4.0, high is 3.0 N"),
        ({"rate": {"up": 1.0}}, "safety.rate: robot 'Toy' has no action 'up'; it has left, right"),
        ({"safe_action": {"left": 3.5}}, "safe_action of 'left' is 3.5 N; allowed: -1.0 to 3.0"),
        ({"limits": (-0.1, 0.1), "safe_action": {"left": 1.0}}, "safe_action of 'left' is 1.0 N"),
    ],
)
def test_settings_that_do_not_fit_the_robot_are_refused(spec: RobotSpec, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        joined(SafetyConfig(**config), NOTHING, spec)


def test_limits_of_robot_and_policy_without_a_common_range_are_refused(spec: RobotSpec) -> None:
    with pytest.raises(ConfigError, match="must have a common range"):
        joined(SafetyConfig(limits={"left": (-1.0, 0.0)}), SafetyConfig(limits={"left": (1.0, 2.0)}), spec)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rate": -1}, "safety.rate"),
        ({"limits": [1.0, 1.0]}, r"safety.limits of all is \[1.0, 1.0\]; low must be below high"),
        ({"safe_action": "wave"}, "safety.safe_action is 'wave'"),
        ({"obsrvation_deadline_ms": 5}, "did you mean 'observation_deadline_ms'"),
        ({"recovery": "maybe"}, "safety.recovery is 'maybe'"),
        ({"frozen_ms": 0}, "safety.frozen_ms is 0"),
    ],
)
def test_an_invalid_setting_gives_a_one_line_error(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        configuration.parse({"safety": content})
    assert "\n" not in str(caught.value)


def test_deadlines_are_refused_in_lockstep() -> None:
    with pytest.raises(ConfigError, match=r"safety\.observation_deadline_ms is 100\.0 and timing is 'lockstep'"):
        configuration.parse({"timing": "lockstep", "safety": {"observation_deadline_ms": 100.0}})


def test_a_learners_policy_can_only_tighten_the_floor(spec: RobotSpec) -> None:
    """A floor has the settings of the policy that a person deployed last. ``policy`` came later, from a learner.

    The floor's safe action has priority over the safe action of ``policy``.
    """
    floor = SafetyConfig(limits={"left": (-0.5, 1.0)}, rate=2.0, safe_action={"left": 0.25}, frozen_ms=100)
    policy = SafetyConfig(limits={"left": (-1.0, 0.75)}, rate=9.0, safe_action="hold", frozen_ms=50)
    envelope = joined(SafetyConfig(), policy, spec, floor=floor)
    assert (envelope.low[0], envelope.high[0], envelope.frozen_s) == (-0.5, 0.75, 0.05)
    assert envelope.step is not None
    assert envelope.step[0] == np.float32(2.0 * spec.control_period)
    assert envelope.safe is not None
    assert envelope.safe.tolist() == [0.25, 0]
    assert joined(SafetyConfig(), SafetyConfig(), spec, floor=floor).guarded
    automatic = SafetyConfig(recovery="automatic")
    assert joined(automatic, SafetyConfig(), spec, floor=SafetyConfig(recovery="manual")).recovery_s is None
