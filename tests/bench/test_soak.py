"""The soak test (benchmarks/soak.py): its verdict, its tables in the documents, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def rows(**slopes: float) -> Any:
    """Return samples of a process and of the run, one per minute for an hour.

    Every quantity begins at 20 and grows by its slope per hour.
    """
    quantities = ("rss", "uss", "files", "threads", "disk", "load", "median_ms", "p99_ms", "longest_ms")
    samples = [
        (60.0 * minute, {name: 20 + slopes.get(name, 0.0) * minute / 60 for name in quantities}) for minute in range(61)
    ]
    return {"policy": samples, "run": samples}


@pytest.mark.parametrize(
    ("slopes", "grows"),
    [
        ({}, []),
        ({"uss": 3.9, "disk": 1000.0, "files": -3.0}, []),
        ({"uss": 4.1}, ["memory of policy: 4.1 MB/h"]),
        ({"files": 2.0, "threads": 2.0}, ["files of policy", "threads of policy"]),
        ({"median_ms": 10.0}, []),  # medians: 22.8 ms after the warm-up, and 29.7 ms at the end
        ({"median_ms": 60.0}, ["latency"]),
        ({"median_ms": 60.0, "load": 40.0}, []),  # the latency is 2.1 times as long, but the load is 1.9 times as high
    ],
)
def test_the_verdict_lists_what_grows_after_the_warm_up(slopes: dict[str, float], grows: list[str]) -> None:
    """The memory may grow by 4 MB per hour, or by 5 % per hour if 5 % is more than 4 MB. The disk use has no limit.

    At the same load, the latency at the end may be at most 1.5 times the latency after the warm-up. The numbers of
    open files and threads must not grow.
    """
    import soak

    assert soak.judge(rows(**slopes))["grows"] == grows


def test_the_check_fails_if_the_samples_have_no_latency() -> None:
    import soak

    made = rows()
    for _, sample in made["run"]:
        for name in ("median_ms", "p99_ms", "longest_ms"):
            del sample[name]
    assert soak.judge(made)["grows"] == ["latency (unknown: no Action)"]


@pytest.mark.parametrize(("lost", "code"), [({}, 0), ({"step": 2}, 1)])
def test_the_check_fails_if_messages_are_missing(
    lost: dict[str, int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soak

    monkeypatch.setattr(soak, "soak", lambda *_: (rows(), 0.0))
    monkeypatch.setattr(soak, "add_latency", lambda *_: None)
    monkeypatch.setattr(soak, "missing", lambda _: lost)
    monkeypatch.setattr(soak.tempfile, "mkdtemp", lambda **_: str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(sys, "argv", ["soak.py", "deploy", "--out", str(tmp_path)])
    assert soak.main() == code
    assert json.loads((tmp_path / "deploy.json").read_text())["missing"] == lost


def test_the_tables_of_the_reliability_page_match_the_data(tmp_path: Path) -> None:
    import reliability

    page = tmp_path / "docs" / "explanation" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(reliability.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    reliability.write_soak(page=page)
    assert page.read_text(encoding="utf-8") == reliability.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_short_soak_of_a_deployment_measures_every_process(tmp_path: Path) -> None:
    """A verdict after a few seconds means nothing, so the test checks only the measurements."""
    words = [sys.executable, str(SCRIPTS / "soak.py"), "deploy", "--minutes", "0.15", "--every", "1"]
    done = subprocess.run([*words, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads((tmp_path / "deploy.json").read_text())
    assert set(report["processes"]) == {"policy", "driver", "learner", "recorder", "monitor", "operator"}
    assert report["missing"] == {}
    assert all(figures["uss"]["last"] > 1 for figures in report["processes"].values())
    assert report["longest_ms"] > 0
    assert report["run"]["disk"]["last"] > report["run"]["disk"]["first"] > 0
