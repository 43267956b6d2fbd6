"""Errors about modules that are not installed."""

from __future__ import annotations

import sys

import pytest

from td3_robot.util.extras import missing


@pytest.mark.parametrize(
    ("module", "version", "text"),
    [
        ("pybullet", (3, 11), "needs pybullet, which is not installed; pip install 'td3-robot[sim]'"),
        (
            "pybullet_data",
            (3, 12),
            "needs pybullet_data, which has wheels for Python 3.10 and 3.11, not for 3.12",
        ),
        ("gymnasium.spaces", (3, 12), "needs gymnasium.spaces, which is not installed; pip install 'td3-robot[sim]'"),
        (
            "rclpy",
            (3, 12),
            "needs rclpy, which is not installed; source the setup file of your ROS 2 installation and use its Python, "
            "or for tests pip install 'td3-robot[ros2-node]'",
        ),
        ("nothing", (3, 12), None),
    ],
)
def test_the_error_names_the_remedy_or_the_reason(
    module: str, version: tuple[int, int], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert missing(ModuleNotFoundError(f"No module named {module!r}", name=module)) == text
