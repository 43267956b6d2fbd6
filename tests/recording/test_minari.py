"""Read exported datasets with the minari package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.errors import EXIT_CHECK_FAILED
from td3_robot.messages import Phase, Step
from td3_robot.recording.info import examine
from td3_robot.recording.reader import Session
from td3_robot.specs import RobotSpec
from td3_robot.transport import link as handshake
from td3_robot.util import files
from tests.sessions import entries_of

pytest.importorskip("h5py")
minari = pytest.importorskip("minari")
Make = Callable[..., Any]
SESSIONS = Path(__file__).parent.parent / "replay" / "sessions"


@pytest.fixture
def export(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Returns a function that exports a recording. The function returns the loaded dataset and the printed counts."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))

    def run(path: Path, *options: str, name: str) -> tuple[Any, dict[str, int]]:
        arguments = ["export", str(path), "--out", str(tmp_path / "datasets"), "--format", "minari", "--json"]
        assert main([*arguments, *options]) == 0
        return minari.load_dataset(name), json.loads(capsys.readouterr().out)

    return run


def steps(make_step: Make) -> list[Step]:
    """13 Steps of two robots. Step 8 is lost. Robot 0 terminates at Step 5, robot 1 is truncated at Step 11."""
    made = []
    for number in range(13):
        phase = [Phase.MID, Phase.MID]
        if number in (0, 6):
            phase[0] = Phase.FIRST
        if number in (0, 12):
            phase[1] = Phase.FIRST
        if number == 5:
            phase[0] = Phase.TERMINATED
        if number == 11:
            phase[1] = Phase.TRUNCATED
        made.append(
            make_step(
                number,
                2,
                phase=np.array(phase, np.uint8),
                episode=np.array([number >= 6, number >= 12], np.uint64),
                episode_step=np.array([number - 6 * (number >= 6), number % 12], np.uint32),
                observation=np.array([[number, 0, 0], [number, 1, 1]], np.float32),
                reward=np.array([number, -number], np.float32),
                action=np.array([[number / 8, 0], [number / 16, 0]], np.float32),
                weights_version=number // 4,
                world={"0": {"mass": 2.5}} if number == 6 else {},
            )
        )
    return [step for step in made if step.sequence != 8]


def test_a_dataset_can_be_exported_to_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recording = str(SESSIONS / "pendulum.mcap")
    assert main(["export", recording, "--out", "some/where", "--format", "minari", "--dataset", "td3/pendulum-v0"]) == 0
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "some" / "where"))
    assert minari.load_dataset("td3/pendulum-v0").total_episodes > 0


def test_recorded_episodes_are_exported_and_cut_where_a_step_is_lost(
    make_step: Make, spec: RobotSpec, save: Make, export: Make, tmp_path: Path
) -> None:
    hello = handshake.hello("simulator", "sim-0", client=0, robots=2, spec=spec)
    path = save("a walk.mcap", entries_of([("sim-0", item) for item in (hello, *steps(make_step))]))
    dataset, counts = export(path, name="a_walk-v0")
    # Robot 0 has three episodes: Steps 0-5, 6-7 and 9-12. Robot 1 has two episodes: Steps 0-7 and 9-11. Its Step 12 is
    # alone. An episode with n Steps has n - 1 transitions.
    assert counts == {"episodes": 5, "whole": 1, "steps": 5 + 1 + 3 + 7 + 2, "missed": 1, "gaps": 1, "alone": 1}
    assert (dataset.total_episodes, dataset.total_steps) == (5, 18)
    about = list(dataset.storage.get_episode_metadata(range(5)))
    found = {
        (int(a["robot"]), tuple(e.infos["sequence"])): (bool(a["begun"]), a["end"], bool(e.terminations[-1]))
        for a, e in zip(about, dataset.iterate_episodes(), strict=True)
    }
    assert found == {
        (0, (0, 1, 2, 3, 4, 5)): (True, "terminated", True),
        (0, (6, 7)): (True, "missing", False),
        (0, (9, 10, 11, 12)): (False, "missing", False),
        (1, tuple(range(8))): (True, "missing", False),
        (1, (9, 10, 11)): (False, "truncated", False),
    }
    for episode in dataset.iterate_episodes():
        assert episode.truncations[-1] != episode.terminations[-1]  # exactly one of the two
        assert not np.concatenate([episode.truncations[:-1], episode.terminations[:-1]]).any()
    assert [a["world"] for a in about if a["number"] == 1 and a["begun"]] == [{"mass": 2.5}]
    first = next(e for a, e in zip(about, dataset.iterate_episodes(), strict=True) if a["end"] == "terminated")
    assert first.observations.tolist() == [[number, 0, 0] for number in range(6)]
    assert first.rewards.tolist() == [1, 2, 3, 4, 5]
    assert first.actions.tolist() == [[number / 8, 0] for number in range(1, 6)]
    assert first.infos["weights_version"].tolist() == [0, 0, 0, 0, 1, 1]
    assert dataset.action_space.high.tolist() == [3.0, 0.5]  # limits of the channels `left` and `right`
    assert dataset.observation_space.low.tolist() == [-5.0] * 3
    metadata = dataset.storage.metadata
    assert "1 Steps missing in 1 places" in metadata["description"]
    assert [channel["name"] for channel in metadata["td3_robot"]["robot"]["actions"]] == ["left", "right"]
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["a_walk-v0"]  # no unfinished dataset


def test_a_full_disk_gives_one_line_of_error_and_leaves_no_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has space for less than one episode. HDF5 would crash the process if it could not write."""
    monkeypatch.setattr(files, "free", lambda _: 50_000)
    out = tmp_path / "datasets"
    arguments = ["export", str(SESSIONS / "pendulum.mcap"), "--out", str(out), "--format", "minari"]
    assert main(arguments) == EXIT_CHECK_FAILED
    assert capfd.readouterr().err == f"td3-robot export: {out}/pendulum-v0: No space left on device\n"
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(("name", "robots"), [("walkers", 4), ("pendulum", 1), ("tampered", 3)])
def test_a_real_recording_is_exported_bit_exactly(name: str, robots: int, export: Make) -> None:
    """Every exported number equals the number in its Step. No transition is missing, and none appears twice."""
    path = SESSIONS / f"{name}.mcap"
    dataset, counts = export(path, "--dataset", f"mine/{name}-v3", name=f"mine/{name}-v3")
    recorded = {
        (m.source, m.incarnation, m.sequence): m
        for _, m in Session([path]).messages((Step.NAME,))
        if isinstance(m, Step)
    }
    made: list[tuple[Any, ...]] = []
    for about, episode in zip(
        dataset.storage.get_episode_metadata(range(len(dataset))), dataset.iterate_episodes(), strict=True
    ):
        robot = int(about["robot"])
        named = [recorded[about["source"], int(about["incarnation"]), int(n)] for n in episode.infos["sequence"]]
        assert episode.observations.tobytes() == b"".join(step.observation[robot].tobytes() for step in named)
        assert episode.actions.tobytes() == b"".join(step.action[robot].tobytes() for step in named[1:])
        assert episode.rewards.tobytes() == b"".join(step.reward[robot].tobytes() for step in named[1:])
        assert bool(episode.terminations[-1]) == (named[-1].phase[robot] == Phase.TERMINATED)
        made += [(step.source, step.incarnation, step.sequence, robot) for step in named[1:]]
    assert len(set(made)) == len(made) == dataset.total_steps == counts["steps"]
    assert len({(source, robot) for source, _, _, robot in made}) == robots
    moved = examine(path)["robot_steps"]
    lost = moved["mid"] + moved["terminated"] + moved["truncated"] - counts["steps"]
    # The first Step after a gap has no previous Step, so it gives no transition. The same holds for a late Step.
    assert lost == robots * (counts.get("gaps", 0) + counts.get("late", 0))
    assert dataset.recover_environment().observation_space.shape == dataset.observation_space.shape


def test_wrong_options_are_refused(
    make_step: Make,
    spec: RobotSpec,
    save: Make,
    export: Make,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hello = handshake.hello("driver", "leg", client=0, robots=1, spec=spec)
    messages = [hello, make_step(0, source="leg"), make_step(1, source="leg")]
    path = save("leg.mcap", entries_of([("leg", item) for item in messages]))
    assert export(path, name="leg-v0")[0].env_spec is None  # this robot cannot be recreated as an environment
    into = ["--out", str(tmp_path / "datasets"), "--format", "minari"]
    empty = save("empty.mcap", entries_of([("leg", item) for item in messages[:2]]))
    for arguments, words in (
        ([str(path), *into], "leg-v0' exists already; to replace it, add --force"),
        ([str(path), *into, "--dataset", "leg"], "--dataset is 'leg'; allowed: NAME-vN"),
        ([str(path), *into, "--dataset", "../leg-v0"], "--dataset is '../leg-v0'"),
        ([str(path), *into, "--topics", "step"], "--topics selects tables"),
        ([str(path), "--out", str(tmp_path), "--dataset", "leg-v0"], "it needs --format minari, not csv"),
        ([str(empty), *into], "holds no pair of consecutive Steps"),
    ):
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert main(["export", str(path), *into, "--dataset", "more-v0"]) == 2
    assert "needs h5py, which is not installed; pip install 'td3-robot[minari]'" in capsys.readouterr().err
    assert {item.name for item in (tmp_path / "datasets").iterdir()} == {"leg-v0"}
