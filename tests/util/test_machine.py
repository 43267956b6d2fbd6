"""Facts about this machine."""

from __future__ import annotations

from td3_robot.util import machine


def test_there_is_a_core() -> None:
    assert machine.available_cores() >= 1


def test_versions_of_packages() -> None:
    assert machine.version("numpy")[0].isdigit()
    assert machine.version("no-such-package") == ""
