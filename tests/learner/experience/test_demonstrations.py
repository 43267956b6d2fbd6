"""An operator's transitions are stored like all others, left out, or used for a fixed share of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from td3_robot.learner.checkpointing import state
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.experience.rollouts import Rollouts
from td3_robot.learner.experience.transitions import Assembler
from td3_robot.learner.factory import make_core
from td3_robot.learner.warm_start import prefill
from td3_robot.messages import Phase, Step
from td3_robot.specs import RobotSpec
from tests.learner.world import World, config, resumed

OPERATED = range(20, 30)  # Steps in which an operator has robot 1; Step n ends the transition from Step n - 1


def trained(spec: RobotSpec, make_step: Callable[..., Step], **learner: Any) -> LearnerCore:
    """A learner after 41 Steps of two robots.

    An operator has taken over robot 1 in 10 Steps. In the last of these Steps, the operator is silent, so the robot
    applies the safe action.
    """
    world = World(make_core(config(learning_starts=4, **learner)), spec, make_step)
    source = world.peer("simulator", "sim-0", robots=2)
    world.join(source)
    for number in range(41):
        operated = {"1": "" if number == OPERATED[-1] else "anna"} if number in OPERATED else {}
        world.give(source, make_step(number, robots=2, operated=operated))
        world.idle(4)
    return world.core


def steps(rows: Any) -> list[int]:
    """The number of the first Step of each row. The observation contains this number."""
    return sorted(int(number) for number in rows[:, 0])


def test_by_default_an_operators_transitions_are_like_all_others(
    spec: RobotSpec, make_step: Callable[..., Step]
) -> None:
    core = trained(spec, make_step)
    assert len(core.training.experience.replay) == core.env_steps == 80  # type: ignore[union-attr]


@pytest.mark.parametrize("n_step", [1, 3])
def test_the_learner_leaves_out_an_operators_transitions(
    spec: RobotSpec, make_step: Callable[..., Step], n_step: int
) -> None:
    core = trained(spec, make_step, learn_from_operator=False, n_step=n_step)
    core.training.experience.end()
    rows = core.training.parts()["replay"].state()[0]["rows"]
    assert steps(rows) == sorted([*range(40), *(n for n in range(40) if n + 1 not in OPERATED[:-1])])
    assert core.env_steps == 80  # the learner counts all steps, so that the pace of the run stays the same


@pytest.mark.parametrize("replay", ["uniform", "lap"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_demonstrations_have_a_separate_buffer_and_a_share_of_each_batch(
    spec: RobotSpec, make_step: Callable[..., Step], replay: str, n_step: int
) -> None:
    loss = {"critic_loss": "huber"} if replay == "lap" else {}
    core = trained(spec, make_step, operator_share=0.5, batch_size=4, replay=replay, n_step=n_step, **loss)
    experience = core.training.experience
    experience.end()
    parts = core.training.parts()
    assert steps(parts["demonstrations"].state()[0]["rows"]) == [n - 1 for n in OPERATED[:-1]]
    assert len(parts["replay"].state()[0]["rows"]) == 80 - 9
    for _ in range(20):
        batch = experience.take()
        assert batch.observation.shape == (4, 3)
        assert {int(number) + 1 for number in batch.observation[2:, 0]} <= set(OPERATED[:-1])
    # The last row ends at Step 28: the operator chose the action of Step 28, but not the action of Step 29.
    if n_step == 3:
        demonstrations = parts["demonstrations"].state()[0]["rows"]
        assert demonstrations[:, -3].max() == OPERATED[-2]


def test_prefill_also_counts_the_recorded_transitions_of_an_operator(
    spec: RobotSpec, make_step: Callable[..., Step]
) -> None:
    """Six Steps give five transitions. The operator chose the actions of the last three.

    So only the first two are in the replay buffer. ``prefill`` also counts the three in the separate buffer.
    """
    steps = [make_step(number, operated={"0": "anna"} if number > 2 else {}) for number in range(6)]
    core = make_core(config(operator_share=0.5))
    assert prefill(core, [(spec, steps)]) == [5]
    assert core.training.experience.total_added == 2


def test_a_checkpoint_contains_the_demonstrations(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    core = trained(spec, make_step, operator_share=0.25)
    arrays, scalars = state.save(core, 1.0)
    arrays = {name: array.copy() for name, array in arrays.items()}
    again = resumed(core.config, arrays, scalars)
    for _ in range(5):
        one, other = core.training.experience.take(), again.training.experience.take()
        assert all((a == b).all() for a, b in zip(one, other, strict=True))
    rows = [it.training.parts()["demonstrations"].state()[0]["rows"] for it in (core, again)]
    assert len(rows[0]) == 9
    assert rows[0].tobytes() == rows[1].tobytes()


def test_rollouts_leave_out_an_episode_with_an_operator(make_step: Callable[..., Step]) -> None:
    rollouts, assembler = Rollouts(0.99, 3, 2), Assembler()
    for number in range(5):
        phase = np.array([Phase.FIRST if not number else Phase.MID if number < 4 else Phase.TRUNCATED] * 2, np.uint8)
        operated = {"1": "anna"} if number == 2 else {}
        step = make_step(number, robots=2, phase=phase, operated=operated)
        transitions = assembler.add(step)
        assert transitions is not None
        rollouts.add(transitions, step)
    assert len(rollouts.take().reward) == 4
    assert not rollouts.ready
