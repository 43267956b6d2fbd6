"""docs/how-to/write_a_driver.md has a valid configuration and names existing commands."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from td3_robot.cli.node import VERBS
from td3_robot.config import loading as configuration
from td3_robot.safety.limits import SafetyConfig, joined
from td3_robot.specs import Channel, RobotSpec

TEXT = (Path(__file__).parent.parent / "docs" / "how-to" / "write_a_driver.md").read_text(encoding="utf-8")


def test_configuration_is_valid_and_the_page_names_every_safety_key() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config = configuration.parse(yaml.safe_load(block))
    spec = RobotSpec("Pendulum", (Channel("o", "1", -1, 1),), (Channel("torque", "N·m", -1, 1),), 0.02)
    envelope = joined(config.safety, SafetyConfig(), spec)
    assert envelope.high.tolist() == pytest.approx([0.8])
    assert not config.policy.autostart
    keys = {field.name for field in msgspec.structs.fields(SafetyConfig)}
    assert keys - set(yaml.safe_load(block)["safety"]) == {"recovery_ms"}
    assert "`recovery_ms`" in TEXT


def test_named_verbs_exist() -> None:
    named = set(re.findall(r"td3-robot node (\w+)", TEXT))
    assert {"state", "activate", "estop"} <= named <= set(VERBS)
