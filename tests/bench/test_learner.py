"""What ``td3-robot bench learner`` reports; not how fast this machine happens to be."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import threading
import time
from typing import Any

import pytest
import torch

from td3_robot.bench import harness
from td3_robot.bench import learner as bench
from td3_robot.bench.learner_contestants import products
from td3_robot.bench.profile import kind_of, profile
from td3_robot.cli import main as cli
from td3_robot.errors import EXIT_USAGE, NodeError
from td3_robot.learner import compute

SHORT = ["--seconds", "0.01", "--repetitions", "1", "--networks", "256-256", "--threads", "1", "--no-compile"]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["bench", "learner", "--json", *SHORT, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_report_names_machine_contestants_and_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    found = report(capsys)
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["packages"].keys() == {"td3-robot", "torch", "numpy", "stable-baselines3"}
    assert found["gflop_per_update"].keys() == {"256-256"}
    rows = {row["kind"]: row for row in found["results"]}
    assert list(rows) == ["sb3", "fp32", "products fp32"]
    assert found["not_measured"] == dict.fromkeys(("bf16", "products bf16"), "this processor has none")
    for row in rows.values():
        assert (row["network"], row["threads"]) == ("256-256", 1)
        assert 0 < row["lowest"] <= row["updates_per_s"] <= row["highest"]
        assert row["cpu_ms_per_update"] > 0
    ours, theirs, limit = (rows[kind]["updates_per_s"] for kind in ("fp32", "sb3", "products fp32"))
    assert rows["fp32"]["over_sb3"] == pytest.approx(ours / theirs)
    assert rows["fp32"]["share_of_peak"] == pytest.approx(ours / limit)
    assert rows["fp32"]["gflops"] == pytest.approx(ours * found["gflop_per_update"]["256-256"])
    assert rows["sb3"]["share_of_peak"] is None


def test_without_stable_baselines3_there_is_no_ratio_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    monkeypatch.setattr(bench, "measure", lambda kinds, *_: {kind: [bench.Turn(2.0, 1.0)] for kind in kinds})
    found = report(capsys)
    assert found["not_measured"]["sb3"].startswith("stable-baselines3 is not installed; pip install")
    assert [row["over_sb3"] for row in found["results"]] == [None, None]
    assert cli.main(["bench", "learner", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not measured: sb3: stable-baselines3 is not installed" in lines[1]
    assert "× sb3" not in lines[-1]


def test_an_update_has_every_kind_of_operator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compute, "bf16_problem", lambda *_: "processor has none")
    monkeypatch.setattr(bench, "_PROFILED", 20)
    (found,) = report(capsys, "--profile", "--layer-norm")["profile"]
    parts = found["by_kind_us"]
    assert list(parts) == ["gemm", "adam", "relu", "layer_norm", "copies", "other", "python"]
    assert all(parts[kind] > 0 for kind in parts if kind != "python")
    assert max(parts, key=lambda kind: parts[kind]) == "gemm"  # 0.5 GFLOP, beside passes over a few MB
    assert sum(parts.values()) == pytest.approx(found["update_us"])


def test_a_turn_whose_time_is_over_before_it_begins_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(bench, "contestant", lambda _: made.append)
    ours, theirs = multiprocessing.Pipe()
    ours.send(0.0)
    threading.Thread(target=bench.serve, args=(theirs, "fp32", {}), daemon=True).start()
    assert ours.recv() is None
    assert ours.recv().updates_per_s > 0
    assert made[-1] == bench._BLOCK


def test_a_profile_by_a_clock_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator takes 1 µs, and a block of two updates 1 ms, when it is not profiled.

    An update is three products, one of them of other sizes, and a ReLU: 500 = 3 + 1 + 496 of Python.
    """
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time_ns", lambda: 1000 * next(ticks))
    milliseconds = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: 0.001 * next(milliseconds))
    square, wide = torch.ones(3, 3), torch.ones(3, 5)

    def run(updates: int) -> None:
        for _ in range(updates):
            torch.mm(square, square)
            torch.mm(square, square)
            torch.mm(square, wide).relu_()

    found = profile(run, 20)
    assert found["update_us"] == pytest.approx(500)
    kinds = {"gemm": 3.0, "relu": 1.0, "adam": 0.0, "layer_norm": 0.0, "copies": 0.0, "other": 0.0, "python": 496.0}
    assert found["by_kind_us"] == pytest.approx(kinds)


def test_operators_are_sorted_by_kind() -> None:
    for operator, kind in {
        "aten::mm.out": "gemm",
        "mkldnn::_linear_pointwise": "gemm",
        "aten::addmm": "gemm",
        "aten::_fused_adam_": "adam",
        "aten::threshold_backward": "relu",
        "aten::relu_": "relu",
        "aten::native_layer_norm_backward": "layer_norm",
        "aten::lerp_.Scalar": "copies",
        "aten::_to_copy": "copies",
        "aten::mul": "other",
        "aten::tanh_": "other",
    }.items():
        assert kind_of(operator) == kind, operator


def test_the_products_of_an_update_by_hand() -> None:
    """Networks 22-4-3-6 and 28-4-3-1, so that every product shows.

    Multiplications for one sample: actor 22·4 + 4·3 + 3·6 = 118, critic 28·4 + 4·3 + 3·1 = 127.
    Critic update: target actor 118; targets, critics, weights' gradients 3 · 2 · 127; back to both inputs but the
    first layer's 2 · (3·1 + 4·3) = 30: 910. Actor update: actor 118, critic 127; back to its action
    3·1 + 4·3 + 4·6 = 39; actor's weights 118, back 4·3 + 3·6 = 30: 432.
    """
    critic, actor = products((4, 3))
    assert sum(m * k * n for m, k, n in critic) == 256 * 910
    assert sum(m * k * n for m, k, n in actor) == 256 * 432


def test_a_ratio_is_the_median_of_the_turns_ratios() -> None:
    """4/2, 9/3 and 5/5; a machine that gets slower during a turn slows both."""
    assert harness.ratio([4, 9, 5], [2, 3, 5]) == 2


def test_a_contestant_that_dies_ends_the_wait(capfd: pytest.CaptureFixture[str]) -> None:
    """It knows no device of that name: the process ends with a traceback, and the benchmark with a line."""
    variant = {"hidden": (8,), "threads": 1, "device": "nowhere", "layer_norm": False}
    with pytest.raises(NodeError, match="the process of 'fp32' died; its output says why"):
        bench.measure(["fp32"], variant, 0.01, 1, {})
    assert "nowhere" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--repetitions", "0"], "--repetitions is 0; it must be at least 1"),
        (["--threads", "2", "0"], "--threads is 0; it must be at least 1"),
        (["--seconds", "nan"], "--seconds is nan; it must be at least 0.01"),
        (
            ["--profile", "--device", "cuda"],
            "--profile measures processor time; --device is 'cuda' and must be 'cpu'",
        ),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "learner", *arguments]) == EXIT_USAGE
    assert capsys.readouterr().err == f"td3-robot bench: {text}\n"
