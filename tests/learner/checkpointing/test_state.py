"""A new learner restores the saved state of another learner. It refuses a state that does not fit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.config.schema import NetworkConfig
from td3_robot.errors import BundleError
from td3_robot.learner.checkpointing import state
from td3_robot.learner.factory import make_core
from td3_robot.learner.replay_buffer.storage import File
from td3_robot.learner.warm_start import prefill
from td3_robot.messages import Step
from td3_robot.specs import RobotSpec
from tests.learner.world import World, config, resumed


def test_a_restored_learner_continues_bit_exactly(
    world: World, spec: RobotSpec, make_step: Callable[..., Step]
) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(25):
        world.give(sim, world.make_step(sequence, reward=np.array([sequence], np.float32)))
    arrays, scalars = state.save(world.core, world.time)
    scalars = json.loads(json.dumps(scalars))  # as stored in a file
    other = World(resumed(config(), dict(arrays), scalars), spec, make_step)
    assert (other.core.env_steps, other.core.updates) == (24, world.core.updates)
    for item in (world, other):
        item.join(sim)
        for sequence in range(24, 40):
            item.give(sim, item.make_step(sequence))
        item.idle(10)
    ours, theirs = world.core.publisher.bundle().tensors, other.core.publisher.bundle().tensors
    assert world.core.updates == other.core.updates == 29  # 39 transitions, and learning starts after 10
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert other.core.counts()["missed"] == 0
    assert other.core.publisher.version == world.core.publisher.version + 1  # a restored learner publishes new weights


@pytest.mark.parametrize(("saved", "killed"), [(None, 3), (None, 30), (12, 13), (12, 37)])
def test_a_restarted_learner_equals_a_learner_that_was_never_killed(
    saved: int | None, killed: int, spec: RobotSpec, make_step: Callable[..., Step], tmp_path: Path
) -> None:
    """The learner saves a checkpoint after ``saved`` Steps. It is killed after ``killed`` Steps, and restarts.

    If ``saved`` is None, there is no checkpoint. Each Step after Step 0 gives three rows, or two rows if one robot
    starts an episode. The buffer holds 30 rows. The rows of Step 20 have the greatest reward. In the last case, the
    learner stores so many rows after its checkpoint that they overwrite the rows of Step 20. The restarted learner must
    still know the greatest reward.
    """
    random = np.random.default_rng(5)
    steps = []
    for number in range(40):
        phase = np.array([0 if number == 0 else 1] * 2 + [0 if number % 6 == 0 else 3 if number % 6 == 5 else 1], "u1")
        steps.append(
            make_step(
                number,
                3,
                phase=phase,
                episode=np.array([0, 0, number // 6], np.uint64),
                episode_step=np.array([number, number, number % 6], np.uint32),
                observation=random.normal(3, 2, (3, 3)).astype("f4"),
                reward=np.full(3, 7.5 if number == 20 else 1.0 + number / 100, np.float32),
            )
        )
    values = config(learning_starts=40, normalise_observations=True, replay_storage="file", buffer_size=30)

    def room(folder: str) -> Callable[[int, int], File]:
        return lambda capacity, width: File(tmp_path / folder, capacity, width)

    def feed(world: World, some: list[Step]) -> World:
        sim = world.peer("simulator", "sim-0", robots=3)
        world.join(sim)
        for step in some:
            world.give(sim, step)
        return world

    straight = feed(World(make_core(values, storage=room("straight")), spec, make_step), steps).core
    victim = World(make_core(values, storage=room("killed")), spec, make_step)
    at_checkpoint = None
    if saved is not None:
        feed(victim, steps[:saved])
        arrays, scalars = state.save(victim.core, 1.0)
        at_checkpoint = {name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(scalars))
    feed(victim, steps[saved or 0 : killed])
    rows = room("killed")
    again = resumed(values, *at_checkpoint, storage=rows) if at_checkpoint else make_core(values, storage=rows)
    feed(World(again, spec, make_step), steps[killed - 1 :])
    assert again.env_steps == straight.env_steps > 100
    assert again.training.experience.replay.total_added == straight.training.experience.replay.total_added
    assert again.training.seen() == straight.training.seen()
    assert again.sources.counters() - Counter(repeated=1) == straight.sources.counters()
    assert straight.counts()["episodes"] == 6  # at Steps 5, 11, … 35
    assert again.training.divergence.greatest_reward == 7.5
    assert again.training.normaliser is not None
    assert again.training.normaliser.count == straight.env_steps
    assert again.training.experience.replay.rows.tobytes() == straight.training.experience.replay.rows.tobytes()


def test_recordings_are_not_stored_again_if_the_replay_file_holds_them(
    spec: RobotSpec, make_step: Callable[..., Step], tmp_path: Path
) -> None:
    """The learner stops before a simulator sends a Step. It restarts with its replay file."""

    def room(capacity: int, width: int) -> File:
        return File(tmp_path, capacity, width)

    values = config(replay_storage="file", normalise_observations=True)
    recorded = [make_step(number, reward=np.array([number], np.float32)) for number in range(6)]
    core = make_core(values, storage=room)
    assert prefill(core, [(spec, recorded), (spec, recorded[2:])]) == [5, 3]
    arrays, scalars = state.save(core, 0.0)
    again = resumed(values, arrays, scalars, storage=room)
    fresh = make_core(values, storage=room)  # a learner without a checkpoint
    assert prefill(fresh, [(spec, recorded), (spec, recorded)]) == [0, 0]
    for other in (again, fresh):
        assert len(other.training.experience.replay) == 8
        assert other.training.seen() == core.training.seen()
        assert (other.env_steps, other.sources.state()) == (0, {})


def test_a_state_of_another_network_is_refused(world: World) -> None:
    world.join(world.peer("simulator", "sim-0", robots=1))
    arrays, scalars = state.save(world.core, 0.0)
    other = changed(config(), network=NetworkConfig(hidden=(5,)))
    with pytest.raises(BundleError, match="td3 state"):
        resumed(other, arrays, scalars)
    with pytest.raises(BundleError, match="does not fit"):
        resumed(config(), arrays, {"spec": world.spec.describe()})


def test_a_state_without_one_of_its_parts_is_refused(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    world = World(make_core(config(**OPTIONS)), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(5):
        world.give(sim, world.make_step(sequence))
    arrays, scalars = state.save(world.core, 0.0)
    for name in arrays:
        with pytest.raises(BundleError):
            resumed(config(**OPTIONS), {other: array for other, array in arrays.items() if other != name}, scalars)
    for name, part in scalars["parts"].items():
        for key in part:
            damaged = {**scalars["parts"], name: {other: value for other, value in part.items() if other != key}}
            with pytest.raises(BundleError):
                resumed(config(**OPTIONS), arrays, {**scalars, "parts": damaged})


def test_resuming_in_another_precision_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.join(world.peer("simulator", "sim-0", robots=1))
    arrays, scalars = state.save(world.core, 0.0)
    scalars["precision"] = "bf16"
    resumed(config(precision="fp32"), arrays, scalars)
    assert "the checkpoint has precision bf16; the learner continues with fp32, as configured" in caplog.text


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("C++", "before the checkpoint, updates were compiled; now they are not compiled, so"),
        (True, "before the checkpoint, updates were compiled by an earlier version; now"),
        (False, ""),
    ],
)
def test_a_checkpoint_records_whether_updates_were_compiled(
    before: str | bool, text: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """After the restart, updates are not compiled, for example because this machine has no compiler."""
    world.join(world.peer("simulator", "sim-0", robots=1))
    arrays, scalars = state.save(world.core, 0.0)
    assert scalars["compiled"] is False
    resumed(config(), arrays, scalars | {"compiled": before})
    assert ("round differently" in caplog.text) is bool(text)
    assert text in caplog.text


def test_nothing_can_be_saved_before_a_robot_is_known(world: World) -> None:
    with pytest.raises(BundleError, match="no simulator or driver has joined"):
        state.save(world.core, 0.0)
    with pytest.raises(BundleError, match="no simulator or driver has joined"):
        world.core.publisher.bundle()


OPTIONS = {
    "n_step": 3,
    "replay": "lap",
    "critic_loss": "huber",
    "gradient_clip": 1.0,
    "normalise_observations": True,
    "layer_norm": True,
    "twin_critics": False,
}


def test_a_learner_with_many_options_restores_bit_exactly(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    """Each episode has 7 transitions. When the test saves the state, two n-step returns are incomplete."""

    def step(sequence: int) -> Step:
        episode, number = divmod(sequence, 8)
        random = np.random.default_rng(sequence)
        return make_step(
            sequence,
            phase=np.array([0 if number == 0 else 2 if number == 7 else 1], np.uint8),
            episode=np.array([episode], np.uint64),
            episode_step=np.array([number], np.uint32),
            observation=random.normal(3, 5, (1, 3)).astype(np.float32),
            reward=random.normal(0, 3, 1).astype(np.float32),
        )

    world = World(make_core(config(**OPTIONS)), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(29):
        world.give(sim, step(sequence))
        world.idle(2)
    # 29 Steps make 28 pairs of consecutive Steps. 3 pairs cross the end of an episode, so there are 25 transitions.
    # For 2 transitions, the n-step return is incomplete, so the replay buffer holds only 23 transitions.
    assert (world.core.env_steps, len(world.core.training.experience.replay)) == (25, 23)
    arrays, scalars = state.save(world.core, world.time)
    arrays = {name: array.copy() for name, array in arrays.items()}
    scalars = json.loads(json.dumps(scalars))
    other = World(resumed(config(**OPTIONS), dict(arrays), scalars), spec, make_step)
    for item in (world, other):
        item.join(sim)
        for sequence in range(28, 50):
            item.give(sim, step(sequence))
            item.idle(2)
    mine, theirs = state.save(world.core, 0.0)[0], state.save(other.core, 0.0)[0]
    assert world.core.updates == other.core.updates > 25
    # The names of pending weights contain the version. A restored learner publishes a new version, so its names differ.
    named = {name for name in mine if not name.startswith("pending.")}
    assert named == {name for name in theirs if not name.startswith("pending.")}
    for name in named:
        assert mine[name].tobytes() == theirs[name].tobytes(), name
    tensors = world.core.publisher.bundle().tensors
    assert tensors["observation.mean"].shape == (3,)
    assert all(np.array_equal(tensors[name], tensor) for name, tensor in other.core.publisher.bundle().tensors.items())
