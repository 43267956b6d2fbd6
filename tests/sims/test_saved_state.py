"""A saved environment continues in another process as if it had never stopped."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from td3_robot_sims import tasks
from td3_robot_sims.backends.saved_episode import pack_random, unpack_random

from td3_robot.errors import BundleError
from tests.contract.simulator_backend import trace
from tests.sims.policies import Random

CHILD = """
import json, sys
import numpy as np
from td3_robot_sims import tasks
from tests.contract.simulator_backend import trace
task, state = json.loads(sys.stdin.readline())
for key, dtype in (("random", np.uint64), ("actions", np.float32), ("observation", np.float32)):
    state[key] = np.array(state[key], dtype)
environment = tasks.make(task)
environment.restore_state(state)
print(json.dumps(trace(environment, 100, seed=3)))
"""


@pytest.mark.parametrize("task", ["Walker2D", "Ant", "Humanoid"])
def test_a_saved_episode_continues_in_another_process(task: str) -> None:
    environment = tasks.make(task, seed=5)
    environment.reset()
    trace(environment, 300, seed=1)
    state = {key: getattr(value, "tolist", lambda v=value: v)() for key, value in environment.save_state().items()}
    assert state["actions"]
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([task, state]), capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == json.loads(json.dumps(trace(environment, 100, seed=3)))
    environment.close()


def test_a_state_saved_after_an_episode_gives_the_same_start_of_the_next_episode() -> None:
    original, other = tasks.make("Hopper", seed=5), tasks.make("Hopper", seed=6)
    original.reset()
    policy = Random(1, 1.0)
    while not original.step(policy(np.zeros(0, np.float32), 3)).terminated:
        pass
    other.restore_state(original.save_state())
    with pytest.raises(RuntimeError, match="reset"):
        other.step(np.zeros(3, np.float32))
    np.testing.assert_array_equal(original.reset(), other.reset())
    original.close()
    other.close()


def test_a_state_that_does_not_fit_is_refused() -> None:
    robot, ant = tasks.make("Hopper", seed=1), tasks.make("Ant", seed=1)
    robot.reset()
    trace(robot, 4, seed=1)
    ant.reset()
    good = robot.save_state()
    cases = {
        "the state of another robot": (ant.save_state(), "'actions' is float32"),
        "a part missing": ({k: v for k, v in good.items() if k != "random"}, "must hold"),
        "another type": ({**good, "actions": good["actions"].astype(np.float64)}, "float64"),
        "not finite": ({**good, "actions": np.full_like(good["actions"], np.nan)}, "not finite"),
        "too large": ({**good, "actions": np.full_like(good["actions"], 3e38)}, "too large"),
        "not an array": ({**good, "actions": [[1.0], [1.0, 2.0]]}, "'actions' is list"),
        "not the state of a generator": ({**good, "random": np.full(6, 2**64 - 1, np.uint64)}, "PCG64"),
        "another start": (
            {**good, "random": good["random"] + np.array([1, 0, 0, 0, 0, 0], np.uint64)},
            "actions do not lead to the saved observation",
        ),
        "another end": ({**good, "observation": good["observation"] + 1}, "do not lead to the saved observation"),
        "steps after the end": (
            {**good, "actions": np.ones((500, 3), np.float32)},
            "actions do not lead to the saved observation",
        ),
    }
    for name, (state, text) in cases.items():
        print(name)
        with pytest.raises(BundleError, match=text):
            robot.restore_state(state)
    robot.restore_state(good)  # the robot still works
    robot.close()
    ant.close()


@given(seed=st.integers(0, 2**64), draws=st.integers(0, 20), narrow=st.booleans())
@settings(max_examples=50, deadline=None)
def test_the_state_of_a_random_generator_survives_packing(seed: int, draws: int, narrow: bool) -> None:
    generator, other = np.random.default_rng(seed), np.random.default_rng(0)
    generator.uniform(size=draws)
    if narrow:
        generator.integers(10, dtype=np.uint32)  # leaves 32 spare bits in the generator
    unpack_random(pack_random(generator), other)
    assert other.bit_generator.state == generator.bit_generator.state
