"""Compares the growth rates of counts, and the regularity of loops, with hand calculations."""

from __future__ import annotations

import logging

import pytest

from td3_robot.util.rate import LoopRate, RateMeter


def test_a_rate_is_the_growth_per_second_since_an_earlier_call() -> None:
    meter = RateMeter()
    assert meter(10.0, steps=100, updates=0) == {}
    assert meter(12.0, steps=150, updates=4) == {"steps": 25.0, "updates": 2.0}
    assert meter(12.0, steps=150, updates=4) == {"steps": 25.0, "updates": 2.0}
    assert meter(13.0, steps=150, updates=5) == {"steps": 0.0, "updates": 1.0}


def test_a_smoothed_rate_approaches_the_new_rate() -> None:
    """With smoothing over 5 s, a period of 1 s has the weight 1/5: 10 + (20 - 10) / 5 = 12.

    The first rate is not smoothed.
    """
    meter = RateMeter(period=0.5, smoothing=5.0)
    meter(0.0, steps=0)
    assert meter(0.4, steps=999) == {}
    assert meter(1.0, steps=10) == {"steps": 10.0}
    assert meter(1.4, steps=999) == {"steps": 10.0}
    assert meter(2.0, steps=30) == {"steps": pytest.approx(12.0)}
    assert meter(9.0, steps=37) == {"steps": pytest.approx(1.0)}  # 7 s are more than 5 s, so the weight is 1


def test_a_loop_reports_its_rate_jitter_and_missed_deadlines() -> None:
    """Intervals of 1, 1, 1 and 2 s: 4 turns in 5 s are 0.8 Hz. The standard deviation is 0.75^0.5 / 2 s."""
    loop = LoopRate(1.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        loop.turn(now)
        assert loop.figures == {}
    loop.turn(6.0, missed=1, deadlines=2)
    assert loop.figures == {
        "rate_hz": pytest.approx(0.8),
        "jitter_s": pytest.approx(0.75**0.5 / 2),
        "missed_share": pytest.approx(1 / 5),
    }


def test_each_measurement_starts_with_empty_counts() -> None:
    loop = LoopRate(1.0)
    for now in range(6):
        loop.turn(float(now), missed=1)
    assert (loop.measured, loop.figures["missed_share"]) == (5.0, 1.0)
    for now in (7.5, 10.0):
        loop.turn(now)
    assert loop.measured == 10.0
    assert loop.figures == {"rate_hz": pytest.approx(0.4), "jitter_s": 0.0, "missed_share": 0.0}


def test_a_pause_is_not_measured() -> None:
    loop = LoopRate(1.0)
    loop.turn(0.0)
    for now in (10.0, 20.0, 30.0, 40.0, 50.0):
        loop.pause()
        loop.turn(now, missed=9, deadlines=10)
        loop.turn(now + 1)
    assert loop.figures == {"rate_hz": pytest.approx(1.0), "jitter_s": 0.0, "missed_share": 0.0}


def test_the_log_has_the_first_measurement_and_all_measurements_with_too_many_missed_deadlines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A measurement has 40 turns, 8 per second for 5 s. In the second measurement, every fifth deadline is missed.

    In the other measurements, every tenth deadline is missed.
    """
    caplog.set_level(logging.INFO)
    loop = LoopRate(0.125)
    for number in range(170):
        loop.turn(number * 0.125, missed=int(number % (5 if 40 < number <= 80 else 10) == 0))
        loop.report(logging.getLogger(), "leg", 0.1)
    allowed = "of the deadlines in 5 s; allowed: 10.0% (realtime.missed_share)"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"leg: 8 of 8 Hz, jitter 0.00 ms; missed 10.0% {allowed}"),
        ("WARNING", f"leg: 8 of 8 Hz, jitter 0.00 ms; missed 20.0% {allowed}"),
    ]
