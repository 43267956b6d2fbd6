"""The benchmark of a recorded training: its arithmetic, and one short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from td3_robot.bench.recorded_training import Point, Stretch, median_with_interval, report
from td3_robot.cli.main import main
from td3_robot.util.machine import processor_seconds


def stretch(recorded: bool, steps: float, wall: float, training: float, recorder: float = 0.0) -> Stretch:
    return Stretch(recorded, Point(100, 10, 20, 1), Point(100 + steps, 10 + wall, 20 + training, 1 + recorder))


def test_report_of_two_blocks() -> None:
    """Throughput in block 1: 1000 steps in 10 s plain, 900 in 10 s recorded, ratio 0.9. Block 2: 1000 each, ratio 1.

    Processor time per step in block 1: 12 s / 1000 plain, (9 + 0.9) s / 900 = 11 ms recorded, ratio 11/12.
    Block 2: 10 s / 1000 plain, (10 + 1) s / 1000 recorded, ratio 1.1.
    """
    figures = report(
        [
            stretch(False, 400, 4, 6),
            stretch(True, 500, 5, 5, 0.5),
            stretch(True, 400, 5, 4, 0.4),
            stretch(False, 600, 6, 6),
            stretch(False, 500, 5, 5),
            stretch(True, 500, 5, 5, 0.5),
            stretch(True, 500, 5, 5, 0.5),
            stretch(False, 500, 5, 5),
        ],
        7_000_000,
    )
    assert figures["throughput_ratio"]["values"] == [0.9, 1.0]
    assert figures["throughput_ratio"]["median"] == pytest.approx(0.95)
    assert figures["processor_time_ratio"]["values"] == [pytest.approx(11 / 12, abs=1e-4), 1.1]
    assert figures["steps_per_s"] == {"plain": 2000 / 20, "recorded": 1900 / 20}
    assert figures["recorder_ms_per_step"] == pytest.approx(1.9 / 1900 * 1000)
    assert figures["training_ms_per_step"] == {"plain": pytest.approx(11.0), "recorded": pytest.approx(10.0)}
    assert figures["recorder_share"] == pytest.approx(1.9 / 19)
    assert (figures["blocks"], figures["recorded_mb"]) == (2, 7.0)


def test_median_with_interval_of_at_least_95_percent() -> None:
    """Confidence by the sign test.

    - 6 values: lowest to highest gives 1 - 2/64 = 97 %.
    - 8 values: second lowest to second highest gives only 1 - 18/256 = 93 %, so the ends are taken.
    - 9 values: second lowest to second highest gives 1 - 2 (1 + 9)/512 = 96 %.
    """
    assert median_with_interval([3, 1, 2])["low"] is None
    six = median_with_interval([6, 1, 5, 2, 4, 3])
    assert (six["median"], six["low"], six["high"]) == (3.5, 1, 6)
    assert median_with_interval(range(8))["low"] == 0
    nine = median_with_interval(range(9))
    assert (nine["median"], nine["low"], nine["high"]) == (4, 1, 7)


def test_processor_seconds_are_those_of_the_process() -> None:
    assert processor_seconds(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.5)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    while (processor_seconds(busy.pid) or 0) < 0.1:
        pass
    busy.kill()
    busy.wait()
    assert processor_seconds(busy.pid) is None


def test_short_benchmark_and_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("network.hidden=[32, 32]", "learner.batch_size=32", "learner.threads=1", "learner.compile=false")
    arguments = ["bench", "record", "--training", "walker2d", "--blocks", "1", "--stretch", "1", "--warm-up", "200"]
    assert main([*arguments, "--json", *(word for item in small for word in ("--set", item))]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert figures["throughput_ratio"]["median"] > 0
    assert figures["processor_time_ratio"]["median"] > 0
    assert 0 <= figures["recorder_share"] < 1  # the system counts in ticks of 10 ms
    assert figures["recorded_mb"] > 0
    for wrong, words in (
        (("--blocks", "0"), "--blocks is 0; it must be at least 1"),
        (("--warm-up", "0"), "--warm-up is 0"),
        (("--stretch", "nan"), "--stretch is nan; it must be at least 1"),
        (("--training", "walker3d"), "no file 'walker3d'"),
    ):
        assert main(["bench", "record", *wrong]) == 2
        assert words in capsys.readouterr().err
