"""The scripts of ``benchmarks/`` run and report consistent results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bench import harness

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def report(script: str, *arguments: str) -> Any:
    """Run a script in a child process and return its JSON output."""
    command = [sys.executable, str(SCRIPTS / script), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_script_learner_peers_compares_td3_robot_with_sb3_and_with_the_matrix_products() -> None:
    sizes = ("--seconds", "0.01", "--repetitions", "1", "--networks", "256-256", "--threads", "1", "--no-compile")
    rows = {row["kind"]: row for row in report("learner_peers.py", *sizes)["results"]}
    assert rows.keys() >= {"sb3", "fp32", "products fp32"}
    ours, theirs, limit = (rows[kind]["updates_per_s"] for kind in ("fp32", "sb3", "products fp32"))
    assert rows["fp32"]["over_sb3"] == pytest.approx(ours / theirs)
    assert rows["fp32"]["share_of_peak"] == pytest.approx(ours / limit)
    assert rows["sb3"]["share_of_peak"] is None


def test_products_of_an_update_match_a_hand_calculation() -> None:
    """The actor is 22-4-3-6 and the critic is 28-4-3-1. In each network, all layers differ in size. The batch is 32.

    Multiplications for one sample: actor 22·4 + 4·3 + 3·6 = 118, critic 28·4 + 4·3 + 3·1 = 127.

    Critic update: target actor 118; two target critics 2 · 127; two critics 2 · 127; weight gradients of the two
    critics 2 · 127; input gradients of both critics except in the first layer 2 · (3·1 + 4·3) = 30; sum 910.

    Actor update: actor 118; critic 127; gradient of the critic's action input 3·1 + 4·3 + 4·6 = 39; weight gradients
    of the actor 118; input gradients of the actor except in the first layer 4·3 + 3·6 = 30; sum 432.
    """
    critic, actor = importlib.import_module("learner_peers").products((4, 3), 32)
    assert sum(m * k * n for m, k, n in critic) == 32 * 910
    assert sum(m * k * n for m, k, n in actor) == 32 * 432


@pytest.mark.slow
def test_the_script_train_peers_compares_td3_robot_with_the_faster_sb3() -> None:
    tiny = ("--threads", "1", "--hidden", "8", "--batch", "4", "--no-compile", "--steps", "1000", "--rounds", "1")
    rows = {row["kind"]: row for row in report("train_peers.py", *tiny)["results"]}
    ours, theirs = rows["fp32"], rows["sb3"]
    assert theirs["over_faster_sb3"] == 1
    assert ours["over_faster_sb3"] == pytest.approx(ours["steps_per_s"] / theirs["steps_per_s"])


def test_each_training_is_compared_with_the_faster_sb3_of_each_round() -> None:
    """The higher speed of "sb3" is 30 in round 1 and 20 in round 2. The median of 60/30 and 60/20 is 2.5."""
    rows = [
        {"kind": kind, "rounds": rounds} for kind, rounds in (("sb3", [10, 20]), ("sb3", [30, 5]), ("fp32", [60, 60]))
    ]
    importlib.import_module("train_peers").compare(rows)
    assert rows[2]["over_faster_sb3"] == 2.5


def test_automatic_choices_are_compared_with_the_best_fixed_choice() -> None:
    """The fixed choices have medians 15 and 25, so bf16 is the best. The ratios of auto to bf16 are 24/20 and 27/30."""
    speeds = {("auto", "auto"): [24, 27], ("fp32", 1): [10, 20], ("bf16", 1): [20, 30]}
    rows: list[dict[str, Any]] = [
        {"kind": kind, "threads": threads, **harness.summary("steps_per_s", made)}
        for (kind, threads), made in speeds.items()
    ]
    importlib.import_module("auto_choice").compare(rows)
    assert [row["over_best_fixed"] for row in rows] == pytest.approx([(1.2 + 0.9) / 2, (0.5 + 2 / 3) / 2, 1.0])


def test_a_recording_of_fewer_policies_is_smaller() -> None:
    """Each setting records fewer policies than the setting before it."""
    rows = report("recording_size.py", str(SCRIPTS.parent / "tests/replay/sessions/walkers.mcap"), "--rounds", "1")
    assert rows["messages"] > 1000
    sizes = [row["mb"] for row in rows["results"]]
    assert [row["weights_every"] for row in rows["results"]] == [1, 100, 0]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2]
    assert all(row["processor_us_per_message"] > 0 for row in rows["results"])


def test_foxglove_size_compares_an_export_with_its_recording() -> None:
    pytest.importorskip("foxglove", reason="needs td3-robot[foxglove], which is not installed")
    file = SCRIPTS.parent / "tests/replay/sessions/walkers.mcap"
    (row,) = report("foxglove_size.py", str(file))["results"]
    assert row["bytes"] == file.stat().st_size
    assert row["ratio"] == pytest.approx(row["foxglove_bytes"] / row["bytes"])
    # Recordings contain no Foxglove messages, because these would make a recording more than a tenth larger.
    assert 0.1 < row["ratio"] < 2


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("link_attack", "--trips"),
        ("link_floor", "--trips"),
        ("live_weights", "--seconds"),
        ("recorded_training", "--blocks"),
        ("versus", "--rounds"),
        ("watched", "--seconds"),
    ],
)
def test_a_wrong_number_gives_one_line_of_error(script: str, option: str) -> None:
    more = ["--base", "."] if script == "versus" else []
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), option, "0", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"python benchmarks/{script}.py: {option} is 0; allowed: ")
    assert done.stderr.count("\n") == 1


def test_a_missing_package_gives_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        harness.run_script(lambda: int(bool(importlib.import_module("no_such_package"))))
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(": No module named 'no_such_package'\n")


recorded_training = importlib.import_module("recorded_training")


def stretch(recorded: bool, steps: float, wall: float, training: float, recorder: float = 0.0) -> Any:
    return recorded_training.Stretch(
        recorded,
        recorded_training.Point(100, 10, 20, 1),
        recorded_training.Point(100 + steps, 10 + wall, 20 + training, 1 + recorder),
    )


def test_the_report_of_two_blocks_matches_a_hand_calculation() -> None:
    """A plain stretch has no recorder. The processor time of a recorded stretch includes the recorder's processor time.

    Throughput: block 1 has 1000 plain steps in 10 s and 900 recorded steps in 10 s, so the ratio is 0.9. Block 2 has
    1000 plain steps in 10 s and 1000 recorded steps in 10 s, so the ratio is 1.

    Processor time per step in block 1: a plain step takes 12 s / 1000 = 12 ms. A recorded step takes
    (9 + 0.9) s / 900 = 11 ms. So the ratio is 11/12.

    In block 2, a plain step takes 10 s / 1000 = 10 ms. A recorded step takes (10 + 1) s / 1000 = 11 ms. So the ratio is
    1.1.
    """
    figures = recorded_training.report(
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


def test_the_interval_of_a_median_has_at_least_95_percent_confidence() -> None:
    """The sign test gives the confidence that the true median lies in an interval of the sorted values.

    - 6 values: the interval from lowest to highest has 1 - 2/64 = 97 %.
    - 8 values: second lowest to second highest has only 1 - 18/256 = 93 %, so the interval is lowest to highest.
    - 9 values: second lowest to second highest has 1 - 2 (1 + 9)/512 = 96 %.
    """
    assert recorded_training.median_with_interval([3, 1, 2])["low"] is None
    six = recorded_training.median_with_interval([6, 1, 5, 2, 4, 3])
    assert (six["median"], six["low"], six["high"]) == (3.5, 1, 6)
    assert recorded_training.median_with_interval(range(8))["low"] == 0
    nine = recorded_training.median_with_interval(range(9))
    assert (nine["median"], nine["low"], nine["high"]) == (4, 1, 7)


@pytest.mark.slow
def test_recorded_training_reports_ratios_and_sizes() -> None:
    small = ("network.hidden=[32, 32]", "learner.batch_size=32", "learner.threads=1", "learner.compile=false")
    settings = (word for item in small for word in ("--set", item))
    figures = report("recorded_training.py", "--blocks", "1", "--stretch", "1", "--warm-up", "200", *settings)
    assert figures["throughput_ratio"]["median"] > 0
    assert figures["processor_time_ratio"]["median"] > 0
    assert 0 <= figures["recorder_share"] < 1  # can be 0: the system counts processor time in ticks of 10 ms
    assert figures["recorded_mb"] > 0


def test_the_script_link_floor_compares_the_servers_with_an_echo() -> None:
    rows = report("link_floor.py", "--trips", "200", "--robots", "1", "8")["robots"]
    for kinds in rows.values():
        assert kinds["echo"]["p50_over_echo"] == 1
        assert all(row["p50"] > 0 for row in kinds.values())


@pytest.mark.slow
def test_policy_server_answers_every_step_under_attack() -> None:
    """The benchmark fails if a Step gets no Action."""
    attacks = report("link_attack.py", "--trips", "200")["attacks"]
    assert attacks.keys() == importlib.import_module("link_attack").KINDS.keys()
    assert all(row["attacked"]["p50"] > 0 for row in attacks.values())


def test_the_script_sim_peers_compares_td3_robot_with_the_published_robots() -> None:
    """Standard output holds only the JSON, although the C code of the published robots prints text."""
    found = report("sim_peers.py", "--steps", "2", "--rounds", "1", "--resets", "1")
    for task in ("Walker2D", "Ant"):
        alone = found["one_robot"][task]
        ours, theirs = (alone[name]["steps_per_s"] for name in ("td3_robot", "pybullet_envs_gymnasium"))
        assert alone["td3_robot_over_published"] == pytest.approx(ours / theirs)
        assert alone["td3_robot_gymnasium_over_published"] > 0
        assert all(row["td3_robot_over_published"] > 0 for row in found["fleet"][task].values())


def test_the_page_of_results_shows_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell has one evaluation for each seed (101 and 102): mean return, and reward per step in parentheses.

    The title of a column is a number of steps. A cell shows an evaluation only if the evaluation's number of steps
    differs from the title by less than 1,000.
    """
    trials = importlib.import_module("trials")
    assert "\n".join(trials.tables()) in trials.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(trials, "FILE", tmp_path / "trials.json")
    trials.keep("robots_4-102", [[20_001, 85.2, 50], [30_000, 108.0, 108], [31_500, 1, 1]])
    trials.keep("robots_4-101", [[20_000, 94.4, 1000]])
    [row] = [line for line in trials.tables() if "with 4 robots" in line]
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["94 (0.1), 85 (1.7)", "–, 108 (1.0)", "–, –"]
