"""The simulator's core: when it steps, which Steps it sends again, and what it ignores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from td3_robot_sims.vector_env import VectorEnvironment

from td3_robot.core_types import Output
from td3_robot.driver.core import SourceCore
from td3_robot.messages import Action, LifecycleChange, Message, Phase, Step, Throttle, Welcome
from td3_robot.topics import QUEUE_LENGTH


@pytest.fixture
def make_core(scripted: Callable[..., Any]) -> Callable[..., SourceCore]:
    def make(*, lockstep: bool = False) -> SourceCore:
        environment = scripted([(3, True, False)])
        return SourceCore(VectorEnvironment(lambda _: environment, 1, 0, "sim-0", 2), "sim-0", 2, lockstep=lockstep)

    return make


def action(answers: int, value: float = 0.5, incarnation: int = 2) -> tuple[str, Message]:
    return "policy", Action("sim-0", incarnation, answers, 0, np.full((1, 2), value, np.float32), 7, 1, 99)


def throttle(allowed: int, answers: int = 0, version: int = 0, incarnation: int = 2) -> tuple[str, Message]:
    return "learner", Throttle("sim-0", incarnation, answers, allowed, version, 0)


def welcome(link: str) -> tuple[str, Message]:
    return link, Welcome(1, link, 5)


def steps(outputs: list[Output], link: str = "learner") -> list[Step]:
    return [message for to, message in outputs if to == link and isinstance(message, Step)]


def one(outputs: list[Output]) -> Step:
    """Return the Step that goes to the policy server and to the learner."""
    [step] = steps(outputs)
    assert steps(outputs, "policy") == [step]
    return step


def test_every_step_of_an_episode_goes_to_policy_server_and_learner(make_core: Callable[..., SourceCore]) -> None:
    """The episode has three steps.

    The second Step names the Action that led to this Step. It also names the weights and the noise of the Action.
    """
    core = make_core()
    assert core.step([], 0.0) == []  # no Throttle has allowed a step yet
    first = one(core.step([throttle(100)], 1.5))
    assert (first.sequence, first.phase.tolist(), first.transitions, first.stamp) == (
        0,
        [Phase.FIRST],
        0,
        1_500_000_000,
    )
    assert (first.source, first.incarnation, first.answered, first.noise_kind) == ("sim-0", 2, 0, 0)
    second = one(core.step([action(0, 0.25)], 1.6))
    assert (second.sequence, second.transitions, second.answered) == (1, 1, 0)
    assert (second.weights_version, second.noise_kind, second.noise_seed) == (7, 1, 99)
    assert second.action.tolist() == [[0.25, 0.25]]
    assert second.observation.tolist() == [[0, 1, 0.25]]
    phases = [one(core.step([action(number)], 2.0)).phase[0] for number in range(1, 5)]
    assert phases == [Phase.MID, Phase.TERMINATED, Phase.FIRST, Phase.MID]
    assert core.transitions == 4


def test_the_core_waits_for_the_learner(make_core: Callable[..., SourceCore]) -> None:
    core = make_core()
    core.step([throttle(1)], 0.0)
    assert len(steps(core.step([action(0)], 0.1))) == 1
    assert core.step([action(1)], 0.2) == []  # the learner allowed one transition, and it is done
    assert core.step([throttle(1)], 0.3) == []
    assert len(steps(core.step([throttle(2)], 0.4))) == 1


def test_the_core_ignores_messages_for_another_step_or_incarnation(make_core: Callable[..., SourceCore]) -> None:
    core = make_core()
    assert core.step([throttle(100, incarnation=1)], 0.0) == []
    core.step([throttle(100)], 0.0)
    for wrong in (action(1), action(0, incarnation=1)):
        assert core.step([wrong], 0.1) == []
    assert core.counters["late_actions"] == 2
    core.step([action(0), action(0, 0.9)], 0.2)  # the first answer counts
    assert core.body.action.tolist() == [[0.5, 0.5]]


def test_the_core_sends_unprocessed_steps_again_to_a_new_policy_server_or_learner(
    make_core: Callable[..., SourceCore],
) -> None:
    core = make_core()
    outputs = core.step([welcome("policy"), welcome("learner")], 0.0)
    assert [(to, message.state) for to, message in outputs if isinstance(message, LifecycleChange)] == [
        ("policy", "inactive"),
        ("policy", "active"),
    ]
    assert len(outputs) == 2
    core.step([throttle(1)], 0.0)
    assert [to for to, _ in core.step([welcome("policy")], 0.1)] == ["policy"]
    core.step([action(0)], 0.2)
    core.step([action(1)], 0.2)  # the core has the Action, but waits for the learner
    assert core.step([welcome("policy")], 0.3) == []
    # The new learner has processed no Step. The Throttle of the previous learner does not count.
    again = core.step([throttle(2), welcome("learner")], 0.4)
    assert [step.sequence for step in steps(again)] == [0, 1]
    assert {to for to, _ in again} == {"learner"}
    assert core.step([throttle(1)], 0.5) == []
    assert len(steps(core.step([throttle(2)], 0.6))) == 1


def test_the_core_keeps_steps_until_the_learner_has_processed_them(make_core: Callable[..., SourceCore]) -> None:
    """The core keeps all Steps that the learner has not processed, and one Step before them."""
    core = make_core()
    core.step([throttle(2000)], 0.0)
    for number in range(6):
        core.step([action(number)], 0.1)
    assert [step.sequence for step in steps(core.step([welcome("learner")], 0.2))] == [0, 1, 2, 3, 4, 5, 6]
    core.step([throttle(2000, answers=4)], 0.3)  # the learner has processed Steps 0 to 3
    assert [step.sequence for step in steps(core.step([welcome("learner")], 0.4))] == [3, 4, 5, 6]


def test_the_core_waits_while_too_many_steps_are_unprocessed(make_core: Callable[..., SourceCore]) -> None:
    """The core waits as soon as it keeps QUEUE_LENGTH + 1 Steps that the learner has not processed."""
    core = make_core()
    core.step([throttle(10**6)], 0.0)
    number = 0
    while core.step([action(number)], 0.1):
        number += 1
    assert number == QUEUE_LENGTH
    core.step([throttle(10**6, answers=11)], 0.2)
    assert core.next_sequence == QUEUE_LENGTH + 2


def test_the_core_sends_the_step_again_if_no_action_arrives(make_core: Callable[..., SourceCore]) -> None:
    core = make_core()
    core.step([throttle(9)], 10.0)
    assert core.step([], 10.9) == []
    assert [to for to, _ in core.step([], 11.1)] == ["policy"]
    assert core.step([], 11.2) == []
    assert core.counters["asked_again"] == 1


def test_in_lockstep_a_step_needs_the_weights_version_that_the_throttle_names(
    make_core: Callable[..., SourceCore],
) -> None:
    core = make_core(lockstep=True)
    [first] = steps(core.step([throttle(9, answers=0, version=4)], 0.0))
    assert first.needs_version == 4
    assert core.step([action(0)], 0.1) == []  # the learner has not processed Step 0 yet
    [second] = steps(core.step([throttle(9, answers=1, version=5)], 0.2))
    assert (second.sequence, second.needs_version) == (1, 5)
