"""A recording as messages, arrays, transitions and data frames."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.errors import SessionError
from td3_robot.messages import Step
from td3_robot.recording.episodes import Episodes
from td3_robot.recordings import Recording, open_recording

SESSIONS = Path(__file__).parent / "replay" / "sessions"


@pytest.fixture
def pendulum() -> Recording:
    """A recorded training of one Pendulum."""
    return open_recording(SESSIONS / "pendulum.mcap")


def test_a_recording_describes_itself(pendulum: Recording) -> None:
    assert pendulum.topics["step"] == sum(1 for _ in pendulum.messages("step"))
    assert pendulum.spec.observation_size == 3
    assert pendulum.duration_s > 0
    assert "pendulum.mcap" in repr(pendulum)


def test_arrays_hold_the_recorded_numbers_and_have_a_row_for_each_robot(pendulum: Recording) -> None:
    arrays = pendulum.arrays("step")
    steps = [step for step in pendulum.messages("step") if isinstance(step, Step)]
    rows = sum(len(step.reward) for step in steps)
    assert {name: len(array) for name, array in arrays.items()} == dict.fromkeys(arrays, rows)
    assert arrays["observation"].tobytes() == np.concatenate([step.observation for step in steps]).tobytes()
    assert (arrays["phase"].dtype, arrays["sequence"].dtype, arrays["stamp"].dtype) == ("u1", "u8", "i8")
    assert (np.diff(arrays["received_s"]) >= 0).all()
    assert not {"source", "world"} & arrays.keys()  # text and a map do not become arrays


@pytest.mark.parametrize("name", ["pendulum", "walkers"])
def test_transitions_hold_the_same_numbers_as_the_episodes(name: str) -> None:
    recording = open_recording(SESSIONS / f"{name}.mcap")
    splitter = Episodes()
    episodes = [episode for step in recording.messages("step") for episode in splitter.add(step)]  # type: ignore[arg-type]
    episodes += splitter.finish()
    transitions = recording.transitions()
    assert len(transitions) == sum(len(episode.reward) for episode in episodes) > 0
    assert transitions.action.shape == (len(transitions), recording.spec.action_size)
    for number, episode in enumerate(episodes):
        chosen = transitions.episode == number
        assert transitions.observation[chosen].tobytes() == episode.observation[:-1].tobytes()
        assert transitions.next_observation[chosen].tobytes() == episode.observation[1:].tobytes()
        assert transitions.reward[chosen].tobytes() == episode.reward.tobytes()
        ends = (transitions.terminated | transitions.truncated)[chosen]
        assert ends.tolist() == [False] * (len(ends) - 1) + [episode.end is not None]


def test_a_data_frame_has_the_columns_and_numbers_of_an_export(pendulum: Recording, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    frame = pendulum.to_pandas("step")
    assert main(["export", str(SESSIONS / "pendulum.mcap"), "--out", str(tmp_path), "--topics", "step"]) == 0
    with (tmp_path / "step.csv").open(encoding="utf-8") as file:
        header, *table = csv.reader(file)
    assert (list(frame.columns), len(frame)) == (header, len(table))
    column = header.index("reward")
    assert frame["reward"].tolist() == [float(row[column]) for row in table]


def test_an_error_contains_the_name_of_the_file_or_of_the_missing_extra(
    monkeypatch: pytest.MonkeyPatch, pendulum: Recording
) -> None:
    with pytest.raises(SessionError, match=r"nowhere\.mcap' cannot be read"):
        open_recording("nowhere.mcap")
    with pytest.raises(SessionError, match="holds no 'steps'; it holds"):
        pendulum.arrays("steps")
    with pytest.raises(ValueError, match="no file given"):
        open_recording()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pandas, which is not installed; pip install 'td3-robot\[pan"):
        pendulum.to_pandas("step")
