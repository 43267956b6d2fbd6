"""The writer stores metrics as lines of JSON and as TensorBoard scalars. An incomplete line affects no other line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from td3_robot.learner.metrics_writer import MetricsWriter


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", []),
        ('{"kind": "train", "env_steps": 1}\n', [1]),
        ('{"kind": "train", "env_steps": 1}\n{"kind": "tra', [1]),
        ('{"ki', []),
    ],
)
def test_an_incomplete_line_does_not_affect_other_lines(before: str, after: list[int], tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(before)
    with contextlib.closing(MetricsWriter(file, tmp_path / "events")) as metrics:
        metrics.write({"kind": "train", "env_steps": 2})
    good = []
    for line in file.read_text().splitlines():
        try:
            good.append(json.loads(line)["env_steps"])
        except ValueError:
            assert line in before
    assert good == [*after, 2]


def test_tensorboard_tags_follow_stable_baselines3(tmp_path: Path) -> None:
    train = {"kind": "train", "env_steps": 1000, "updates": 900, "return_mean": 5.0, "length_mean": 40.0}
    losses = {"critic_loss": 0.5, "actor_loss": -2.0, "wall_s": 20.0, "steps_per_s": 60.0}
    evaluation = {"kind": "evaluation", "env_steps": 1000, "eval_return_mean": 7.0, "eval_return_std": 1.0}
    with contextlib.closing(MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "events")) as metrics:
        metrics.write({**train, **losses})
        metrics.write({**evaluation, "eval_length_mean": 30.0, "eval_returns": [6.0, 8.0]})
        metrics.write({"kind": "offline", "env_steps": 0, "updates": 1000, "critic_loss": 0.25})
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    written = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {tag: event.value for tag, event in written.items()} == {
        "rollout/ep_rew_mean": 5.0,
        "rollout/ep_len_mean": 40.0,
        "train/n_updates": 900.0,
        "train/critic_loss": 0.5,
        "train/actor_loss": -2.0,
        "time/fps": 60.0,
        "time/time_elapsed": 20.0,
        "eval/mean_reward": 7.0,
        "eval/std_reward": 1.0,
        "eval/mean_ep_length": 30.0,
        "offline/critic_loss": 0.25,
        "offline/env_steps": 0.0,
    }
    assert written["eval/mean_reward"].step == 1000
    keys = [set(json.loads(line)) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "eval_return_mean" in keys[1]
    assert "return_mean" in keys[0]
