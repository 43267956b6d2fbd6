"""``td3-robot eval`` as a command, on a policy file."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from sims import tasks
from td3_robot.bundle import Bundle, layer_shapes
from td3_robot.cli.main import main


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy with random weights for Walker2D."""
    spec = tasks.spec("Walker2D")
    rng = np.random.default_rng(0)
    shapes = layer_shapes(spec, (16,))
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    bundle = Bundle(spec, (16,), tensors, provenance={"task": "Walker2D"})
    bundle.save(tmp_path / "policy.safetensors")
    replace(bundle, spec=replace(spec, control_period=0.01)).save(tmp_path / "faster.safetensors")
    return tmp_path / "policy.safetensors"


def run(command: Any, *arguments: str, code: int = 0) -> str:
    process = command("eval", *arguments)
    assert process.finish() == code, process.output()
    text: str = process.output()
    return text


def test_figures_agree_and_repeat(command: Any, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three = (str(policy), "--episodes", "3", "--seed")
    first = json.loads(run(command, *three, "5", "--json").splitlines()[-1])
    assert main(["eval", *three, "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert main(["eval", *three, "6", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert first["returns"] != other["returns"]
    assert len(first["returns"]) == len(first["lengths"]) == 3
    assert first["mean"] == pytest.approx(sum(first["returns"]) / 3)
    assert first["std"] == pytest.approx(float(np.std(first["returns"])))
    text = run(command, *three, "5")
    assert f"Walker2D: mean return {first['mean']:.1f} ± {first['std']:.1f} over 3 episodes" in text
    assert f"episode 2: return {first['returns'][2]:.1f}, {first['lengths'][2]} steps" in text


def test_video_shows_the_robot(command: Any, policy: Path, tmp_path: Path) -> None:
    run(command, str(policy), "--episodes", "1", "--video", str(tmp_path / "walk.mp4"))
    decode = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-i",
        str(tmp_path / "walk.mp4"),
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    ]
    raw = subprocess.run(decode, check=True, capture_output=True).stdout
    frames = np.frombuffer(raw, np.uint8).reshape(-1, 480, 640, 3)
    assert len(frames) >= 3
    assert np.std(frames[0]) > 5  # not one colour
    assert np.abs(frames[0].astype(int) - frames[-1]).mean() > 0.5  # and it moves


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("policy.safetensors", "--env", "Ant"),
            "is for another robot than 'Ant': robot is 'Ant' here, 'Walker2D' there",
        ),
        (("policy.safetensors", "--env", "Walkr2D"), "near ones: Walker2D"),
        (("faster.safetensors",), "control_period is 0.0165 s here, 0.01 s there"),
        (("policy.safetensors", "--video", "walk.txt"), "the name must end in .mp4"),
        (("policy.safetensors", "--video", "folder.mp4"), "--video 'folder.mp4': a file cannot be written there"),
        (("policy.safetensors", "--video", "no/where.mp4"), "the folder 'no' does not exist"),
    ],
)
def test_bad_input_is_one_line(
    policy: Path,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(policy.parent)
    Path("folder.mp4").mkdir()
    assert main(["eval", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_bad_input_is_exit_code_2_of_a_process(command: Any, policy: Path) -> None:
    assert "--episodes is 0" in run(command, str(policy), "--episodes", "0", code=2)
