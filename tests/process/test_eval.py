"""``td3-robot eval`` and ``td3_robot.evaluate`` with a policy file."""

from __future__ import annotations

import ctypes
import json
import math
import resource
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from gymnasium import spaces
from td3_robot_sims import tasks

import td3_robot
from td3_robot.bundle import Bundle, layer_shapes
from td3_robot.cli.main import main
from td3_robot.errors import EXIT_USAGE


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A random Walker2D policy. ``faster.safetensors`` has the same weights and a shorter control period."""
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


def test_printed_and_json_results_agree_and_repeat_with_the_same_seed(
    command: Any, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert f"policy {policy}\n" in text
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
    assert np.std(frames[0]) > 5  # the picture has more than one colour
    assert np.abs(frames[0].astype(int) - frames[-1]).mean() > 0.5  # the robot moves


@pytest.mark.parametrize("name", ["walk.webm", "walk.mkv", "walk.gif"])
def test_webm_mkv_and_gif_videos_are_written(policy: Path, name: str, tmp_path: Path) -> None:
    assert main(["eval", str(policy), "--episodes", "1", "--video", str(tmp_path / name)]) == 0
    probe = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(tmp_path / name), "-f", "null", "-"]
    done = subprocess.run(probe, check=True, capture_output=True, text=True)
    assert (tmp_path / name).stat().st_size > 1000
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["walk.mp4", "walk.webm", "walk.mkv", "walk.gif"])
def test_a_video_that_cannot_be_written_leaves_the_old_file_as_it_is(
    policy: Path, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for a full disk."""
    folder = tmp_path / "videos"
    folder.mkdir()
    (folder / name).write_bytes(b"old")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most))
    try:
        code = main(["eval", str(policy), "--episodes", "1", "--video", str(folder / name)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert code == EXIT_USAGE
    error = capfd.readouterr().err
    assert f"--video {str(folder / name)!r} cannot be written: " in error
    assert error.count("\n") == 1
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [(name, b"old")]


@pytest.mark.parametrize("name", ["at 10:30.mkv", "-walk.mp4", "walk.gif"])
def test_a_video_replaces_the_target_of_a_link_and_may_have_an_unusual_name(
    policy: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "videos").mkdir()
    target = tmp_path / "videos" / name
    target.write_bytes(b"old")
    (tmp_path / name).symlink_to(target)
    assert main(["eval", str(policy), "--episodes", "1", "--max-steps", "5", f"--video={name}"]) == 0
    assert (tmp_path / name).is_symlink()
    assert target.stat().st_size > 1000


class Talker(gymnasium.Env[Any, Any]):
    """A task that prints to stdout, from Python and from C code, and cannot be rendered.

    If ``broken``, the third reward is NaN.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
        super().reset(seed=seed)
        print("reset!")
        library = ctypes.CDLL(None)
        library.puts(b"reset in C!")
        library.fflush(None)
        self.made = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        del action
        self.made += 1
        return np.zeros(2, np.float32), math.nan if self.broken and self.made == 3 else 1.0, False, False, {}


gymnasium.register("td3_robot_tests/Talker-v0", Talker, max_episode_steps=5)
gymnasium.register("td3_robot_tests/Broken-v0", Talker, max_episode_steps=5, kwargs={"broken": True})


def test_task_output_goes_to_stderr_and_nan_rewards_are_errors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("Talker", "Broken"):
        task = f"gymnasium:td3_robot_tests/{name}-v0"
        spec = tasks.spec(task)
        tensors = {name: np.zeros(shape, np.float32) for name, shape in layer_shapes(spec, (4,)).items()}
        Bundle(spec, (4,), tensors, provenance={"task": task}).save(tmp_path / f"{name}.safetensors")
    talker = str(tmp_path / "Talker.safetensors")
    ctypes.CDLL(None).fflush(None)  # an earlier test can have left text in C's buffer
    capfd.readouterr()
    assert main(["eval", talker, "--episodes", "2", "--json"]) == 0
    output = capfd.readouterr()
    assert json.loads(output.out)["returns"] == [5.0, 5.0]
    assert output.err.count("reset!") == output.err.count("reset in C!") == 2
    assert main(["eval", talker, "--video", str(tmp_path / "a.mp4")]) == 2
    assert "cannot be drawn: its environment has no pictures" in capfd.readouterr().err
    assert main(["eval", str(tmp_path / "Broken.safetensors")]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.endswith("the reward of step 3 of episode 0 is nan; it must be finite")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("policy.safetensors", "--task", "Ant"),
            "is for another robot than 'Ant': robot is 'Ant' here, 'Walker2D' there",
        ),
        (("policy.safetensors", "--task", "Walkr2D"), "similar ones: Walker2D"),
        (("faster.safetensors",), "control_period is 0.0165 s here, 0.01 s there"),
        (("policy.safetensors", "--video", "walk.txt"), "the name must end in .mp4"),
        (("policy.safetensors", "--video", "folder.mp4"), "--video 'folder.mp4': a file cannot be written there"),
        (("policy.safetensors", "--video", "no/where.mp4"), "the folder 'no' does not exist"),
    ],
)
def test_bad_input_gives_one_line_of_error(
    policy: Path,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(policy.parent)
    Path("folder.mp4").mkdir()
    assert main(["eval", *arguments]) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_bad_input_gives_exit_code_2(command: Any, policy: Path) -> None:
    assert "--episodes is 0" in run(command, str(policy), "--episodes", "0", code=2)


def test_evaluate_in_python_agrees_with_the_command(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(policy), "--episodes", "2", "--seed", "5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    result = td3_robot.evaluate(policy, task="Walker2D", episodes=2, seed=5)
    again = td3_robot.evaluate(td3_robot.load_policy(policy), episodes=2, seed=5)
    assert result.returns.tolist() == again.returns.tolist() == printed["returns"]
    assert (result.lengths.tolist(), result.mean, result.std) == (printed["lengths"], printed["mean"], printed["std"])
    assert result.task == again.task == "Walker2D"
    with pytest.raises(td3_robot.Td3RobotError, match="is for another robot than 'Ant'"):
        td3_robot.evaluate(policy, task="Ant")
    with pytest.raises(ValueError, match="episodes is 0; allowed: whole numbers from 1"):
        td3_robot.evaluate(policy, episodes=0)
