"""The report of ``td3-robot bench learner``. No test checks the speed, because it depends on the machine."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from td3_robot.bench import harness
from td3_robot.bench import learner as bench
from td3_robot.cli import main as cli
from td3_robot.errors import EXIT_USAGE, NodeError
from td3_robot.learner import compute
from td3_robot.learner.replay_buffer.buffer import Batch, ReplayBuffer

SHORT = ["--seconds", "0.01", "--repetitions", "1", "--networks", "256-256", "--threads", "1", "--no-compile"]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["bench", "learner", "--json", *SHORT, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_report_names_the_machine_and_every_kind_of_update(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    found = report(capsys, "--threads", "2", "--batch", "32", "--layer-norm")
    assert found["machine"]["cores"] >= 1
    assert found["batch"] == 32
    assert found["machine"]["packages"].keys() == {"td3-robot", "torch", "numpy"}
    assert found["not_measured"] == dict.fromkeys(("bf16", "operators bf16"), "this processor has none")
    assert [row["kind"] for row in found["results"]] == ["fp32", "operators fp32"]
    for row in found["results"]:
        assert (row["network"], row["threads"]) == ("256-256", 2)
        assert 0 < row["lowest"] <= row["updates_per_s"] <= row["highest"]
        assert row["cpu_ms_per_update"] > 0


def test_the_printed_text_has_one_line_for_each_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    monkeypatch.setattr(bench, "take_turns", lambda kinds, *_: {kind: [bench.Turn(2.0, 1.0)] for kind in kinds})
    assert cli.main(["bench", "learner", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "not measured: bf16: this processor has none",
        "256-256  batch 256  1 thread(s)  fp32                2.0 updates/s [2.0, 2.0]   1.00 ms of processor time",
    ]


def test_updates_use_the_given_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sample = list[int](), ReplayBuffer.sample

    def recorded(buffer: ReplayBuffer, count: int) -> Batch:
        sizes.append(count)
        return sample(buffer, count)

    monkeypatch.setattr(ReplayBuffer, "sample", recorded)
    bench.ours("fp32", (8,), 1, "cpu", batch=32, layer_norm=False)(2)
    assert sizes == [32, 32]


def test_turn_of_zero_seconds_makes_one_block_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(bench, "_prepared", [made.append])
    assert bench.turn(0.0).updates_per_s > 0
    assert made[-1] == bench._BLOCK


def test_ratio_is_the_median_of_the_ratios_of_all_rounds() -> None:
    """The ratios are 4/2, 9/3 and 5/5.

    Both numbers of a ratio come from the same round, so a slow machine affects both numbers.
    """
    assert harness.ratio([4, 9, 5], [2, 3, 5]) == 2


def test_crash_of_a_contestant_ends_the_benchmark() -> None:
    """The contestant uses a device that does not exist."""
    fp32 = partial(bench.ours, "fp32", (8,), 1, "nowhere", batch=4, layer_norm=False)
    with pytest.raises(NodeError, match=r"fp32 failed: RuntimeError: .*nowhere"):
        bench.take_turns({"fp32": fp32}, 0.01, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--repetitions", "0"], "--repetitions is 0; allowed: whole numbers from 1"),
        (["--threads", "2", "0"], "--threads is 0; allowed: whole numbers from 1"),
        (["--seconds", "nan"], "--seconds is nan; allowed: 0.01 or more"),
    ],
)
def test_wrong_arguments_give_one_line_of_error(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "learner", *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.endswith(f": {text}\n")
    assert error.count("\n") == 1
