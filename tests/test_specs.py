"""The robot specification: validation, and the first difference between two specifications."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from td3_robot.errors import ConfigError
from td3_robot.specs import Channel, RobotSpec


def test_a_specification_equals_the_one_read_from_its_description(spec: RobotSpec) -> None:
    assert RobotSpec.from_description(spec.describe()) == spec
    assert spec.action_low.tolist() == [-1.0, -0.5]
    assert spec.action_high.tolist() == [3.0, 0.5]
    assert (spec.observation_size, spec.action_size) == (3, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Other"}, "robot is 'Toy' here, 'Other' there"),
        ({"control_period": 0.01}, "control_period is 0.02 s here, 0.01 s there"),
        ({"actions": (Channel("left", "N", -1.0, 3.0),)}, "2 actions here, 1 there"),
        (
            {"actions": (Channel("left", "N", -1.0, 3.0), Channel("right", "N", -0.5, 0.6))},
            "actions[1].high is 0.5 here, 0.6 there",
        ),
        (
            {"actions": (Channel("left", "Nm", -1.0, 3.0), Channel("right", "N", -0.5, 0.5))},
            "actions[0].unit is 'N' here, 'Nm' there",
        ),
    ],
)
def test_difference_names_the_first_differing_value(spec: RobotSpec, change: dict[str, Any], words: str) -> None:
    assert spec.difference(replace(spec, **change)) == words


def test_difference_ignores_the_meaning_of_a_channel(spec: RobotSpec) -> None:
    described = tuple(replace(channel, meaning="a force") for channel in spec.actions)
    assert spec.difference(replace(spec, actions=described)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observations": ()}, "no observation channel"),
        ({"actions": (Channel("a", "1", 0.0, 1.0),) * 2}, "'a' appears twice"),
        ({"actions": (Channel("a", "1", 1.0, 1.0),)}, "low must be below high"),
        ({"actions": (Channel("a", "1", 0.0, float("inf")),)}, "finite float32 limits"),
        ({"actions": (Channel("a", "1", 0.0, 1e300),)}, "finite float32 limits"),
        ({"observations": tuple(Channel(str(n), "1", 0.0, 1.0) for n in range(4097))}, "at most 4096"),
        ({"observations": (Channel("o", "1", float("nan"), 1.0),)}, "low must be below high"),
        ({"control_period": 0.0}, "control_period is 0.0"),
    ],
)
def test_invalid_specification_is_refused(spec: RobotSpec, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(spec, **change)


@pytest.mark.parametrize(
    "description", [{}, {"name": "x"}, {"name": "x", "observations": 3, "actions": [], "control_period": 1}]
)
def test_invalid_description_is_refused(description: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="robot specification"):
        RobotSpec.from_description(description)
