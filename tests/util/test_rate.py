"""Growth of counts per second, computed by hand."""

from __future__ import annotations

import pytest

from td3_robot.util.rate import RateMeter


def test_growth_since_the_last_call() -> None:
    meter = RateMeter()
    assert meter(10.0, steps=100, updates=0) == {}
    assert meter(12.0, steps=150, updates=4) == {"steps": 25.0, "updates": 2.0}
    assert meter(12.0, steps=150, updates=4) == {"steps": 25.0, "updates": 2.0}
    assert meter(13.0, steps=150, updates=5) == {"steps": 0.0, "updates": 1.0}


def test_a_smoothed_rate_approaches_the_new_one() -> None:
    """Smoothing over 5 s gives 1 s the weight 1/5: 10 + (20 - 10) / 5 = 12. The first rate is not smoothed."""
    meter = RateMeter(period=0.5, smoothing=5.0)
    meter(0.0, steps=0)
    assert meter(0.4, steps=999) == {}
    assert meter(1.0, steps=10) == {"steps": 10.0}
    assert meter(1.4, steps=999) == {"steps": 10.0}
    assert meter(2.0, steps=30) == {"steps": pytest.approx(12.0)}
    assert meter(9.0, steps=37) == {"steps": pytest.approx(1.0)}
