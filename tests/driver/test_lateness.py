"""Compares the warnings about late Actions with hand calculations."""

from __future__ import annotations

import pytest

from td3_robot.driver.lateness import Lateness


def test_too_many_late_actions_give_one_warning_every_5_s(caplog: pytest.LogCaptureFixture) -> None:
    """A control period of 20 ms gives 250 Steps in 5 s. 10 % of them are 25.

    The windows end after 5, 10, 15 and 20 s, with 25, 26, 0 and 250 late Actions.
    """
    lateness = Lateness("leg", 0.02, 0.1)
    for now, steps, late in ((0, 7, 3), (5, 257, 28), (7, 357, 50), (10, 507, 54), (15, 757, 54), (20, 1007, 304)):
        lateness.turn(float(now), steps, late)
    text = "arrived after their control period of 20 ms, so the robot did not get them"
    assert caplog.messages == [
        f"leg: in 5 s, {number} actions for 250 Steps {text}; allowed: 10.0% (realtime.missed_share)"
        for number in (26, 250)
    ]


def test_late_actions_without_a_step_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The robot is in a reset, so the driver has made no Step. Two old Actions arrive in this time."""
    lateness = Lateness("leg", 0.02, 0.1)
    lateness.turn(0.0, 10, 0)
    lateness.turn(30.0, 10, 2)
    assert caplog.messages == []
    lateness.turn(37.0, 20, 4)
    assert "leg: in 7 s, 2 actions for 10 Steps arrived after" in caplog.text
