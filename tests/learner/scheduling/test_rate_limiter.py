"""Compares the rate limiter with hand calculations, and tests the bounds of the lead (the number of due updates)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from td3_robot.learner.scheduling.rate_limiter import RateLimiter


def test_limits_match_a_hand_calculation() -> None:
    """The ratio is 0.5, the band is 8, and learning starts at step 100 of 1,000. By step 120, 0.5 · 20 = 10
    updates are due.
    """
    limiter = RateLimiter(0.5, 8.0, 100, 1000)
    assert not limiter.updates_due(99, 0)
    assert not limiter.updates_due(101, 0)  # half an update
    assert limiter.updates_due(102, 0)
    assert limiter.lead(120, 4) == 6
    assert limiter.updates_due(120, 9)
    assert not limiter.updates_due(120, 10)
    assert limiter.steps_allowed(0) == 116  # 100 + 8 / 0.5
    assert limiter.steps_allowed(10) == 136  # 100 + 18 / 0.5
    assert limiter.steps_allowed(10, overshoot=3) == 133  # three fewer, because four robots step together
    assert limiter.steps_allowed(10_000) == 1000
    assert not limiter.done(1000, 449)
    assert limiter.done(1000, 450)  # 0.5 · 900


def test_offline_updates_come_first_and_do_not_count_in_the_ratio() -> None:
    """30 offline updates come first. By step 120, 0.5 · 20 = 10 more updates are due."""
    limiter = RateLimiter(0.5, 8.0, 100, 1000, offline=30)
    assert limiter.updates_due(0, 0)
    assert limiter.updates_due(0, 29)
    assert not limiter.updates_due(0, 30)
    assert limiter.steps_allowed(29) == 0
    assert limiter.steps_allowed(30) == 116  # 100 + 8 / 0.5
    assert limiter.updates_due(120, 39)
    assert not limiter.updates_due(120, 40)
    assert limiter.lead(120, 34) == 6
    assert not limiter.done(1000, 479)
    assert limiter.done(1000, 480)  # 30 + 0.5 · 900


def test_learner_and_simulators_run_freely_without_a_ratio() -> None:
    limiter = RateLimiter(None, 8.0, 100, 1000)
    assert not limiter.updates_due(99, 0)
    assert limiter.updates_due(100, 10**9)
    assert limiter.steps_allowed(0) == 1000
    assert limiter.done(1000, 0)
    assert not limiter.done(999, 10**9)


@given(
    ratio=st.floats(0.01, 8),
    robots=st.integers(1, 16),
    slack=st.floats(0, 50),
    start=st.integers(0, 50),
    eager=st.lists(st.booleans(), min_size=50, max_size=300),
)
def test_learner_and_simulator_never_wait_at_the_same_time_and_the_lead_stays_within_the_band(
    ratio: float, robots: int, slack: float, start: int, eager: list[bool]
) -> None:
    """``eager`` is a random order of turns: True for a turn of the learner, False for a turn of the simulator."""
    band = ratio * robots + 1 + slack
    limiter = RateLimiter(ratio, band, start, 10**9)
    steps = updates = 0
    for learner in eager:
        may_step = steps < limiter.steps_allowed(updates, robots - 1)
        may_update = limiter.updates_due(steps, updates)
        assert may_step or may_update
        if learner and may_update:
            updates += 1
        elif not learner and may_step:
            steps += robots
        if steps >= start:
            assert -1e-6 <= limiter.lead(steps, updates) <= band + 1e-6
