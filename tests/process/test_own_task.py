"""Train, evaluate, record and replay with a task from the user's module."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bundle import Bundle

MODULE = '''
import gymnasium
import numpy as np


class Endless(gymnasium.Env):
    """Keep a point near zero. An episode never ends and has no time limit."""

    observation_space = gymnasium.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.at.copy(), {}

    def step(self, action):
        self.at = np.clip(self.at + 0.1 * action, -10, 10).astype(np.float32)
        return self.at.copy(), -abs(float(self.at[0])), False, False, {}


gymnasium.register("Endless-v0", Endless)
'''
TASK = "gymnasium:own_tasks:Endless-v0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_tasks.py").write_text(MODULE)
    (tmp_path / "broken_tasks.py").write_text("raise RuntimeError('no\\nlicence')\n")
    return tmp_path


@pytest.mark.slow
def test_own_task_trains_evaluates_and_replays(train: Any, command: Any, folder: Path) -> None:
    """``eval`` and ``replay`` import a user's module only if the command line names the module.

    A name in the policy file or in the recording is not enough.

    ``max_steps`` ends endless episodes.
    """
    sets = (f"task={TASK}", "evaluation.every=100", "evaluation.episodes=2", "evaluation.max_steps=7", "record=true")
    run = train(3000, *sets, "learner.replay_ratio=0.1")
    assert run.finish() == 0, run.output()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "evaluation"]
    assert len(evaluations) >= 2
    assert {record["eval_length_mean"] for record in evaluations} == {7}
    policy = Path("run", "policy.safetensors")
    assert Bundle.load(folder / policy).spec.name == "gymnasium:Endless-v0"

    refused = command("eval", str(policy))
    assert refused.finish() == 2
    assert f"its task '{TASK}' would import module 'own_tasks'; to allow this: --task {TASK}" in refused.output()
    [hint] = re.findall(r"^see it:  td3-robot (.*)$", run.output(), re.MULTILINE)
    meant = command(*shlex.split(hint), "--max-steps", "5", "--episodes", "2", "--json")
    assert meant.finish() == 0, meant.output()
    assert json.loads(meant.output().splitlines()[-1])["lengths"] == [5, 5]

    recording = str(Path("run", "session.mcap"))
    refused = command("replay", recording, "--core", "simulator")
    assert refused.finish() == 2
    assert "would import module 'own_tasks'; to allow this: --import own_tasks" in refused.output()
    meant = command("replay", recording, "--import", "own_tasks")
    assert meant.finish() == 0, meant.output()
    same = re.search(r"the same bit for bit: .*simulator \(\d+ turns\): (\d+) step", meant.output())
    assert same
    assert int(same[1]) >= 3000
    assert "DIFFERS" not in meant.output()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            "no_such_module:X-v0",
            "module 'no_such_module' cannot be imported: ModuleNotFoundError: No module named 'no_such_module'; is the "
            "folder of 'no_such_module' in PYTHONPATH?",
        ),
        ("broken_tasks:X-v0", "module 'broken_tasks' cannot be imported: RuntimeError: no licence"),
        ("own_tasks:Nothing-v0", "does not exist"),
    ],
)
def test_unavailable_task_gives_one_line_of_error(task: str, words: str, train: Any, folder: Path) -> None:
    run = train(700, f"task=gymnasium:{task}")
    assert run.finish() == 2
    [line] = run.output().splitlines()
    assert words in line
    assert not (folder / "run").exists()


def test_the_replay_command_reports_a_module_that_cannot_be_imported(command: Any, folder: Path) -> None:
    del folder
    run = command("replay", "a.mcap", "--import", "broken_tasks")
    assert run.finish() == 2
    assert run.output().splitlines() == ["td3-robot replay: --import broken_tasks: RuntimeError: no licence"]
