"""A simulator that restores a saved state publishes the same Steps as the simulator that saved it, bit for bit."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from td3_robot_sims import snapshot, tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.core import SimulatorCore
from td3_robot_sims.vector_env import VectorEnvironment

from td3_robot.core_types import Output
from td3_robot.errors import BundleError
from td3_robot.messages import Action, Message, Phase, SimulatorState, Step, Throttle
from td3_robot.transport import codec


def make(task: str = "Hopper", incarnation: int = 0, robots: int = 2) -> SimulatorCore:
    def environment(seed: int) -> Environment:
        return tasks.make(task, seed)

    return SimulatorCore(
        VectorEnvironment(environment, robots, 0, "sim-0", incarnation), "sim-0", incarnation, lockstep=True
    )


def of(outputs: list[Output], kind: type[Message]) -> list[Any]:
    return [message for _, message in outputs if isinstance(message, kind)]


def drive(core: SimulatorCore, count: int, save: bool = False) -> tuple[list[bytes], list[SimulatorState]]:
    """Return the next ``count`` Steps as bytes, and the saved states.

    With ``save``, the learner requests the state after the last Step.
    """
    steps: list[bytes] = []
    states: list[SimulatorState] = []
    for number in range(count + 1):
        sequence = core.next_sequence
        asks = save and number == count
        throttle = Throttle("sim-0", core.incarnation, sequence, 10**6, 1, int(asks))
        outputs = core.step([("learner", throttle)], 0.0)
        states += of(outputs, SimulatorState)
        if number < count:
            draws = np.random.default_rng(sequence).uniform(-1, 1, (len(core.envs), core.envs.spec.action_size))
            action = Action("sim-0", core.incarnation, sequence - 1, 0, draws.astype(np.float32), 1, 1, 0)
            outputs += core.step([("policy", action)], 0.0)
        steps += [codec.encode(step) for to, step in outputs if to == "learner" and isinstance(step, Step)]
    return steps, states


@pytest.mark.parametrize("count", [0, 1, 70])
def test_a_later_incarnation_continues_exactly(count: int) -> None:
    """In 70 steps with random actions, each Hopper makes several episodes."""
    core = make()
    before, [state] = drive(core, count, save=True)
    assert (state.source, state.incarnation, state.answers) == ("sim-0", 0, count)
    # If ``count`` is above 0, ``before[count:]`` is empty. If ``count`` is 0, ``before`` holds Step 0, which the
    # simulator made after it had saved its state.
    expected = before[count:] + drive(core, 40)[0]
    other = make(incarnation=1)
    outputs = other.step([("learner", state)], 0.0)
    [back] = of(outputs, SimulatorState)
    assert (back.incarnation, back.answers, back.payload) == (0, count, b"")
    assert {(to, step.sequence) for to, step in outputs if isinstance(step, Step)} == (
        {("learner", count - 1), ("policy", count - 1)} if count else set()
    )
    assert drive(other, 40)[0] == expected[:40]
    assert other.counters["episodes_not_restored"] == 0
    core.envs.close()
    other.envs.close()


def test_a_simulator_already_in_the_saved_state_only_confirms_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state comes first when the simulator is already in it, and again five Steps later.

    The second time, the simulator returns to the state, and its next Step is Step 5.
    """
    core = make("gymnasium:Pendulum-v1")
    _, [state] = drive(core, 5, save=True)
    with monkeypatch.context() as forbidding:
        forbidding.delattr(snapshot, "restore")
        [confirmed] = of(core.step([("learner", state)], 0.0), SimulatorState)
    assert (confirmed.answers, confirmed.payload) == (5, b"")
    drive(core, 5)
    core.step([("learner", state)], 0.0)
    assert core.next_sequence == 5
    core.envs.close()


def test_an_episode_that_cannot_be_repeated_is_reported_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The observations of robot 1 drift, as in a task with its own random generator.

    The saved actions do not lead to the saved observation, so the robot begins a new episode.
    """
    core = make("gymnasium:Pendulum-v1")
    _, [state] = drive(core, 5, save=True)
    other = make("gymnasium:Pendulum-v1", incarnation=1)
    step = other.envs._environments[1].step
    drift = iter(range(100))

    def elsewhere(action: Any) -> Any:
        outcome = step(action)
        other.envs._environments[1]._observation += next(drift)  # type: ignore[attr-defined]
        return outcome

    monkeypatch.setattr(other.envs._environments[1], "step", elsewhere)
    with caplog.at_level(logging.WARNING):
        other.step([("learner", state)], 0.0)
    assert "1 robot(s) cannot be restored, so they begin a new episode: robot 1: saved state of" in caplog.text
    assert other.counters["episodes_not_restored"] == 1
    drive(other, 1)
    assert other.envs.phase.tolist() == [Phase.MID, Phase.FIRST]
    assert other.envs.episode.tolist() == [0, 1]
    core.envs.close()
    other.envs.close()


def test_the_state_of_another_simulator_is_refused() -> None:
    core = make("gymnasium:Pendulum-v1")
    _, [state] = drive(core, 3, save=True)
    for other in (make("gymnasium:MountainCarContinuous-v0"), make("gymnasium:Pendulum-v1", robots=3)):
        with pytest.raises(BundleError, match="format, task and number of robots are"):
            snapshot.restore(state.payload, other.envs)
        other.envs.close()
    for damaged in (b"", state.payload[:-1], b"x" * 100, state.payload[:200]):
        with pytest.raises(BundleError, match="saved simulator"):
            snapshot.restore(damaged, core.envs)
    arrays = core.envs.save_state()
    for name, damaged_array in (("begun", np.array([], np.int64)), ("not_finite", np.array([0.5]))):
        with pytest.raises(BundleError, match=f"saved robots: '{name}' is "):
            core.envs.restore_state({**arrays, name: damaged_array})
    core.envs.close()
