"""The page that compares the runs of a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.config import loading
from td3_robot.runtime.run_folder import RunFolder
from tests.dashboard.browser import Page
from tests.dashboard.conftest import Site


def make_runs(folder: Path) -> None:
    """Make two runs with different seeds, and a third run with another batch size. Each run has two evaluations."""
    for name, seed, batch, scores in (("a1", 1, 128, (10, 20)), ("a2", 2, 128, (30, 60)), ("b", 1, 256, (5, 6))):
        config = loading.load("walker2d_fast", [f"seed={seed}", f"learner.batch_size={batch}"])
        run = RunFolder.create(folder / name, config)
        records = [
            {"kind": "evaluation", "env_steps": 1000 * (number + 1), "eval_return_mean": score, "eval_return_std": 1.5}
            for number, score in enumerate(scores)
        ]
        run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "a1" / "walk.mp4").write_bytes(b"video")
    (folder / "no_run").mkdir()


def test_runs_of_a_folder_are_compared(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    site = serve("--runs", "runs")
    page.open(site.address)
    page.wait("document.querySelectorAll('#runs tbody tr').length === 3")
    assert page.run("[...document.querySelectorAll('#runs thead th')].slice(4).map((cell) => cell.textContent)") == [
        "learner.batch_size",
        "seed",
    ]
    assert page.run("[...document.querySelector('[data-run=a2]').cells].map((cell) => cell.textContent)") == [
        *("a2", "60", "1.5", "2,000", "128", "2"),
    ]
    assert page.run("compared.labels")[::3] == ["batch_size 128 (2 seeds)", "b"]
    # The steps; then the mean, highest and lowest score of the two seeds; then the same of run b, which has one seed.
    assert page.run("compared.data") == [[1000, 2000], [20, 40], [30, 60], [10, 20], [5, 6], [5, 6], [5, 6]]
    page.layout(360, 800, dark=True)
    page.wait("document.documentElement.scrollWidth <= 360")
    cookie = site.cookie()
    status, headers, body = site.get("/video/a1/walk.mp4", cookie)
    assert (status, headers["content-type"], body) == (200, "video/mp4", b"video")
    for path in ("/video/a1/metrics.jsonl", "/video/..%2Fa1/walk.mp4", "/video/a1/..%2F..%2Fb%2Fconfig.yaml"):
        assert site.get(path, cookie)[0] == 404
    assert [problem for problem in page.problems if "walk.mp4" not in problem] == []


def test_a_video_in_a_run_folder_plays(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v2", reason="needs imageio, which is not installed")
    make_runs(tmp_path / "runs")
    with imageio.get_writer(tmp_path / "runs" / "a1" / "walk.mp4", fps=10) as film:
        for shade in range(20):
            film.append_data(np.full((64, 96, 3), 10 * shade, np.uint8))
    page.open(serve("--runs", "runs").address)
    page.wait("document.querySelectorAll('video').length === 1")
    page.run("document.querySelector('video').muted = true, document.querySelector('video').play()")
    page.wait("document.querySelector('video').currentTime > 0.2")
    assert page.run("document.querySelector('video').videoWidth") == 96
    assert page.problems == []


def test_a_lost_connection_is_shown(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    site = serve("--runs", "runs")
    page.open(site.address)
    page.wait("document.querySelector('#connection').textContent.startsWith('3 runs')")
    site.process.interrupt()
    assert site.process.finish(30) == 130, site.process.output()
    page.click("#again")
    page.wait(
        "document.querySelector('#connection.bad').textContent.startsWith('no connection to td3-robot dashboard')"
    )


def test_a_missing_folder_or_an_override_without_config_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", "--runs", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["dashboard", "--runs", str(tmp_path), "--set", "seed=1", "--port", "0"]) == 2
    assert "--set needs --config" in capsys.readouterr().err
