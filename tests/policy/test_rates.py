"""The rates at which a policy server answers its sources, and the deadlines that the answers miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.core_types import Peer
from td3_robot.messages import Phase, Step
from td3_robot.policy.rates import AnswerRates
from td3_robot.specs import RobotSpec
from tests.policy.served_robot import leg

PERIOD = 1.0


@pytest.fixture
def driver(spec: RobotSpec) -> Peer:
    return leg(spec)


def serve(rates: AnswerRates, peer: Peer, steps: list[Step], now: float, took: float = 0.001) -> None:
    rates.received([(peer, step) for step in steps], PERIOD, now)
    rates.answered(now + took)


def test_late_answers_and_queued_steps_miss_deadlines(driver: Peer, make_step: Callable[..., Step]) -> None:
    """The first Step starts the measurement. Of the next 5 Steps, one waits in the queue and one is answered late."""
    rates = AnswerRates(1.0, realtime=False)
    serve(rates, driver, [make_step(0)], 1.0)
    serve(rates, driver, [make_step(1)], 2.0)
    serve(rates, driver, [make_step(2), make_step(3)], 4.0)
    serve(rates, driver, [make_step(4)], 5.0, took=1.1)
    assert rates.figures(5.0) == {}
    serve(rates, driver, [make_step(5)], 6.0)
    expected = {
        "rate_hz": pytest.approx(4 / 5),  # 4 turns in 5 s
        "jitter_s": pytest.approx(np.std([1, 2, 1, 1])),
        "missed_share": pytest.approx(2 / 5),
    }
    assert rates.figures(6.0) == expected
    assert rates.figures(20.0) == expected
    assert rates.figures(22.0) == {}  # the measurement is older than 15 s


def test_a_server_that_does_not_answer_measures_nothing(driver: Peer, make_step: Callable[..., Step]) -> None:
    rates = AnswerRates(1.0, realtime=False)
    for number in range(20):
        rates.received([(driver, make_step(number))], PERIOD, float(number))
        rates.answered(number + 0.001, answers=False)
    assert rates.figures(20.0) == {}


def test_a_reset_is_not_measured(driver: Peer, make_step: Callable[..., Step]) -> None:
    rates = AnswerRates(1.0, realtime=False)
    for number, now in enumerate([1.0, 2.0, 3.0, 4.0]):
        serve(rates, driver, [make_step(number)], now)
    serve(rates, driver, [make_step(4, phase=np.full(1, Phase.FIRST, np.uint8))], 100.0)
    for number, now in enumerate([101.0, 102.0], 5):
        serve(rates, driver, [make_step(number)], now)
    assert rates.figures(102.0)["rate_hz"] == pytest.approx(1.0)


def test_the_figures_describe_the_source_with_the_most_missed_deadlines(
    driver: Peer, make_step: Callable[..., Step]
) -> None:
    other = replace(driver, hello=changed(driver.hello, name="arm"))
    rates = AnswerRates(1.0, realtime=False)
    for number in range(7):
        serve(rates, driver, [make_step(number)], number * PERIOD)
        serve(rates, other, [make_step(number)], number * PERIOD + 0.5, took=1.1 if number == 3 else 0.001)
    assert rates.figures(7.0)["missed_share"] == pytest.approx(1 / 5)  # one late answer in 5 measured Steps


@pytest.mark.parametrize(
    ("role", "realtime", "warns"), [("driver", False, True), ("simulator", False, False), ("simulator", True, True)]
)
def test_only_sources_in_real_time_are_measured(
    role: str,
    realtime: bool,
    warns: bool,
    driver: Peer,
    make_step: Callable[..., Step],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All answers are late. If the server warns, it does so every 5 s."""
    rates = AnswerRates(0.05, realtime=realtime)
    peer = replace(driver, hello=changed(driver.hello, role=role))
    for number in range(12):
        serve(rates, peer, [make_step(number)], number * PERIOD, took=1.1)
    assert bool(rates.figures(12.0)) is warns
    assert caplog.text.count("answers to leg: 1 of 1 Hz, jitter 0.00 ms; missed 100.0% of the deadlines") == 2 * warns
