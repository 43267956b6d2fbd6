"""The section ``ros2`` of a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from td3_robot.config import loading as configuration
from td3_robot.config import reference
from td3_robot.errors import ConfigError

JOINT = {"channel": "angle", "joint": "hip"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"observations": [JOINT | {"scale": "b"}]}, "ros2.observations[0].scale is 'b'; it must be a number"),
        ({"observations": [JOINT, {"channel": "b", "joint": "x", "scale": 0}]}, "ros2.observations[1].scale is 0"),
        ({"observations": [JOINT | {"scle": 1}]}, "unknown key 'ros2.observations[0].scle'; did you mean 'scale'?"),
        ({"observations": [{"joint": "hip"}]}, "ros2.observations[0] has no 'channel', which is required"),
        (
            {"observations": [JOINT | {"field": "speed"}]},
            "ros2.observations[0].field is 'speed': invalid enum value 'speed'; allowed: position, velocity, effort",
        ),
        (
            {"observations": [JOINT | {"sign": 2}]},
            "ros2.observations[0].sign is 2: invalid enum value 2; allowed: 1, -1",
        ),
        (
            {"observations": [{"channel": "angle"}]},
            "ros2.observations of 'angle' sets no source; allowed: one of joint, imu and index",
        ),
        (
            {"observations": [JOINT | {"index": 0}]},
            "ros2.observations of 'angle' sets joint and index; allowed: one of joint, imu and index",
        ),
        (
            {"observations": [{"channel": "angle", "index": 0}]},
            "ros2.observations of 'angle' sets index and no topic; set the topic of the array",
        ),
        (
            {"observations": [JOINT, JOINT]},
            "ros2.observations names the channel 'angle' twice; allowed: each channel once",
        ),
        (
            {"command": {"type": "trajectory"}, "actions": [{"channel": "torque"}]},
            "ros2.command.type is 'trajectory' and ros2.actions names no joint for 'torque'; "
            "name the joint of each channel",
        ),
        ({"qos_in": {"depth": 0}}, "ros2.qos_in.depth is 0; it must be a whole number >= 1"),
        ({"stale_ms": 0}, "ros2.stale_ms is 0"),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_allowed(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.parse({"ros2": section})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_topic_has_a_default_except_the_topic_of_an_array() -> None:
    sources = [JOINT, {"channel": "roll", "imu": "orientation.x"}, {"channel": "foot", "topic": "feet", "index": 2}]
    section = configuration.parse({"ros2": {"observations": sources}}).ros2
    assert [it.source for it in section.observations] == ["joint_states", "imu", "feet"]
    assert (section.qos_in.reliability, section.qos_in.depth) == ("best_effort", 1)
    assert (section.qos_out.reliability, section.qos_out.depth) == ("reliable", 1)


def test_the_reference_describes_the_keys_of_list_items() -> None:
    rows = {key.name: key for key in reference.all_keys()}
    assert rows["ros2.observations"].type == "list of maps"
    assert rows["ros2.observations[].channel"].default == "required"
    assert (rows["ros2.observations[].sign"].type, rows["ros2.observations[].sign"].allowed) == ("integer", "-1, 1")
    assert all(key.doc for name, key in rows.items() if name.startswith("ros2."))
