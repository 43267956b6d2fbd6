"""Tests the rounds, snapshots and rollbacks of lock-step, with a learner's core and fake peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.core_types import Output, Peer
from td3_robot.errors import BundleError
from td3_robot.learner.checkpointing import state
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.factory import make_core
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.learner.scheduling.lockstep import TRANSITIONS, State
from td3_robot.messages import Bye, SimulatorState, Step
from td3_robot.specs import RobotSpec
from tests.learner.world import World, config, published, resumed, throttles


def lockstep_config() -> Any:
    return changed(config(learning_starts=2), timing="lockstep", simulators=2)


@pytest.fixture
def world(spec: RobotSpec, make_step: Callable[..., Step]) -> World:
    """A learner in lock-step."""
    return World(make_core(lockstep_config()), spec, make_step)


def peers(world: World, incarnation: int = 0) -> tuple[Peer, Peer]:
    made = [world.peer("simulator", name, robots=1, incarnation=incarnation) for name in ("a", "b")]
    a, b = (replace(peer, hello=changed(peer.hello, client=incarnation + 1)) for peer in made)
    return a, b


def begin(world: World) -> tuple[Peer, Peer, list[Output]]:
    a, b = peers(world)
    world.join(world.peer("policy", "policy"))
    world.join(a)
    return a, b, world.join(b)


def states(outputs: list[Output]) -> list[SimulatorState]:
    return [message for _, message in outputs if isinstance(message, SimulatorState)]


def saved(source: str, answers: int, payload: bytes | None = None) -> SimulatorState:
    return SimulatorState(source, 0, answers, f"{source}{answers}".encode() if payload is None else payload)


def a_round(world: World, a: Peer, b: Peer, sequence: int) -> list[Output]:
    world.give(a, world.make_step(sequence, source="a"))
    return world.give(b, world.make_step(sequence, source="b"))


def first_snapshot(world: World, a: Peer, b: Peer) -> None:
    world.give(a, saved("a", 0))
    world.give(b, saved("b", 0))
    assert world.core.scheduler.snapshot_ready
    world.core.scheduler.snapshot_saved()


def test_a_run_starts_with_a_snapshot(world: World) -> None:
    a, b, outputs = begin(world)
    assert [(item.source, item.answers, item.save) for item in throttles(outputs)] == [("a", 0, 1), ("b", 0, 1)]
    world.give(a, saved("a", 0))
    assert not world.core.scheduler.snapshot_ready
    assert a_round(world, a, b, 0) == []  # the learner processes no round before the snapshot is complete
    world.give(b, saved("b", 0))
    assert world.idle() == []  # the learner also processes no round before the snapshot is saved
    assert state.save(world.core, 0.0)[0]["simulator.b"].tobytes() == b"b0"
    world.core.scheduler.snapshot_saved()
    assert [(item.answers, item.save) for item in throttles(world.idle())] == [(1, 0), (1, 0)]


def test_a_requested_snapshot_is_taken_at_the_end_of_a_round(world: World) -> None:
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    a_round(world, a, b, 0)
    world.give(a, world.make_step(1, source="a"))
    world.core.scheduler.request_snapshot()
    outputs = world.give(b, world.make_step(1, source="b"))
    assert [(item.answers, item.save) for item in throttles(outputs)] == [(2, 1), (2, 1)]
    world.give(a, saved("a", 1))  # the learner ignores the state of another round
    world.give(a, saved("a", 2))
    assert not world.core.scheduler.snapshot_ready
    world.give(b, Bye("gone"))  # the learner drops this snapshot, and takes a new one after the current round
    assert not world.core.scheduler.snapshot_ready
    world.join(b)
    outputs = a_round(world, a, b, 2)
    assert [(item.answers, item.save) for item in throttles(outputs)] == [(3, 1), (3, 1)]


def test_every_process_rolls_back_when_a_simulator_is_lost(world: World) -> None:
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    for sequence in range(5):
        a_round(world, a, b, sequence)
    world.core.scheduler.request_snapshot()
    a_round(world, a, b, 5)
    world.give(a, saved("a", 6))
    world.give(b, saved("b", 6))
    arrays, scalars = state.save(world.core, 0.0)
    arrays, scalars = {name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(scalars))
    world.core.scheduler.snapshot_saved()
    before = world.core.env_steps, world.core.updates, world.core.publisher.version
    for sequence in (6, 7, 8):
        a_round(world, a, b, sequence)
    world.give(b, Bye("killed"))
    _, restarted = peers(world, incarnation=1)
    assert states(world.join(restarted)) == []
    assert world.core.scheduler.must_roll_back
    assert a_round(world, a, restarted, 9) == []  # the learner processes no round before the rollback
    state.restore(world.core, arrays, scalars)
    world.core.rolled_back()
    assert (world.core.env_steps, world.core.updates, world.core.publisher.version) == before
    outputs = world.idle()
    assert [(item.source, item.incarnation, item.answers, item.payload) for item in states(outputs)] == [
        ("a", 0, 6, b"a6"),
        ("b", 0, 6, b"b6"),
    ]
    assert [item.version for item in published(outputs)] == sorted(before[2] - back for back in (0, 1))
    world.give(a, world.make_step(9, source="a"))  # the learner ignores a Step from before the rollback
    assert world.core.counts()["set_back"] >= 1
    assert throttles(world.give(a, saved("a", 6, b""))) == []
    outputs = world.give(restarted, saved("b", 6, b""))
    sent = {(item.incarnation, item.answers, item.weights_version) for item in throttles(outputs)}
    assert sent == {(0, 6, before[2])}
    for peer, name in ((a, "a"), (restarted, "b")):
        assert world.give(peer, world.make_step(5, source=name)) == []  # the learner has already processed this Step
    assert len(throttles(a_round(world, a, restarted, 6))) == 2
    assert world.core.env_steps == before[0] + 2
    assert world.core.counts()["missed"] == world.core.counts()["gaps"] == 0


def test_a_process_that_is_not_connected_during_a_rollback_rolls_back_when_it_reconnects(world: World) -> None:
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    arrays, scalars = state.save(world.core, 0.0)
    arrays = {name: array.copy() for name, array in arrays.items()}
    for sequence in range(3):
        a_round(world, a, b, sequence)
    world.give(a, Bye("silent for 5 s"))
    world.give(b, Bye("killed"))
    _, restarted = peers(world, incarnation=1)
    world.join(restarted)
    state.restore(world.core, arrays, scalars)
    world.core.rolled_back()
    assert [(item.source, item.payload) for item in states(world.idle())] == [("b", b"b0")]
    assert [(item.source, item.payload) for item in states(world.join(a))] == [("a", b"a0")]
    assert throttles(world.give(a, saved("a", 0, b""))) == []
    outputs = world.give(restarted, saved("b", 0, b""))
    assert [(item.source, item.answers) for item in throttles(outputs)] == [("a", 0), ("b", 0)]


def test_a_source_that_leaves_during_the_last_snapshot_causes_a_rollback(world: World) -> None:
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    arrays, scalars = state.save(world.core, 0.0)
    arrays = {name: array.copy() for name, array in arrays.items()}
    sequence = 0
    while not world.core.done:
        a_round(world, a, b, sequence)
        sequence += 1
    world.give(a, saved("a", sequence))
    world.give(b, Bye("silent for 5 s"))
    assert world.core.scheduler.must_roll_back
    state.restore(world.core, arrays, scalars)
    world.core.rolled_back()
    assert [item.source for item in states(world.idle() + world.join(b))] == ["a", "b"]
    for peer, name in ((a, "a"), (b, "b")):
        world.give(peer, saved(name, 0, b""))
    for number in range(sequence):
        outputs = a_round(world, a, b, number)
    assert world.core.done
    assert [(item.answers, item.save) for item in throttles(outputs)] == [(sequence, 1), (sequence, 1)]


def test_a_process_that_reconnects_continues(world: World) -> None:
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    a_round(world, a, b, 0)
    world.give(b, Bye("silent for 5 s"))
    outputs = world.join(b)
    assert states(outputs) == []
    assert not world.core.scheduler.must_roll_back
    assert [(item.source, item.answers) for item in throttles(outputs)] == [("b", 1)]
    world.give(b, world.make_step(0, source="b"))  # a repeated Step does not belong to the next round
    assert throttles(world.give(a, world.make_step(1, source="a"))) == []
    assert len(throttles(world.give(b, world.make_step(1, source="b")))) == 2


def test_the_last_round_ends_with_a_snapshot(world: World) -> None:
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    sequence, outputs = 0, list[Output]()
    while not world.core.done:
        outputs = a_round(world, a, b, sequence)
        sequence += 1
    assert [(item.answers, item.save) for item in throttles(outputs)] == [(sequence, 1), (sequence, 1)]
    world.give(a, saved("a", sequence))
    world.give(b, saved("b", sequence))
    assert world.core.scheduler.snapshot_ready
    steps = world.core.env_steps
    world.core.scheduler.snapshot_saved()
    a_round(world, a, b, sequence)
    assert world.core.env_steps == steps


def test_a_state_without_the_sent_weights_is_refused(world: World) -> None:
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    arrays, scalars = state.save(world.core, 0.0)
    missing = {name: array for name, array in arrays.items() if not name.startswith("sent.")}
    with pytest.raises(BundleError, match="does not fit"):
        resumed(lockstep_config(), missing, scalars)
    assert np.array_equal(arrays["sent.1"], np.frombuffer(world.core.publisher.sent[0].payload, np.uint8))


def test_a_snapshot_leads_to_stepping_and_a_lost_simulator_leads_to_a_rollback(world: World) -> None:
    a, b, _ = begin(world)
    seen = [world.core.scheduler.state]
    for message in (saved("a", 0), saved("b", 0)):
        world.give(a if message.source == "a" else b, message)
        seen.append(world.core.scheduler.state)
    world.core.scheduler.snapshot_saved()
    a_round(world, a, b, 0)
    seen.append(world.core.scheduler.state)
    world.give(b, Bye("killed"))
    world.join(peers(world, incarnation=1)[1])
    seen.append(world.core.scheduler.state)
    assert seen == [State.SNAPSHOT, State.SNAPSHOT, State.SAVING, State.STEPPING, State.ROLLBACK]
    assert set(TRANSITIONS) == set().union(*TRANSITIONS.values()) == set(State)


class Rollouts:
    """A stand-in for the training with an on-policy algorithm. An update needs 6 transitions and consumes them."""

    storage, compiled, on_policy = Storage(0, 0), False, True
    exploration = progress = None

    def __init__(self, spec: RobotSpec) -> None:
        self.spec, self.updates, self.collected = spec, 0, 0
        self.algorithm = self.experience = self

    @property
    def ready(self) -> bool:
        return self.collected >= 6

    def store(self, transitions: Any, step: Step) -> None:
        del step
        self.collected += len(transitions)

    def update(self, learning_rate: float) -> None:
        del learning_rate
        self.updates, self.collected = self.updates + 1, 0

    def policy_tensors(self, *, averaged: bool) -> dict[str, Any]:
        del averaged
        sizes = [(self.spec.observation_size, 4), (4, self.spec.action_size)]
        weights = {f"actor.{2 * i}.weight": np.zeros(pair[::-1], np.float32) for i, pair in enumerate(sizes)}
        return weights | {f"actor.{2 * i}.bias": np.zeros(pair[1], np.float32) for i, pair in enumerate(sizes)}


def test_an_on_policy_update_follows_each_rollout_while_the_sources_wait(
    spec: RobotSpec, make_step: Callable[..., Step]
) -> None:
    """Two sources fill a rollout of 6 transitions in three rounds.

    Round 0 gives no transitions, so updates follow rounds 3, 6 and 9.
    """
    base = lockstep_config()
    learner = changed(base.learner, replay_ratio=1.0, learning_starts=0, publish_every=1)
    base = changed(base, learner=learner, evaluation=changed(base.evaluation, every=0))
    world = World(LearnerCore(base, Rollouts, {}), spec, make_step)  # type: ignore[arg-type]
    a, b, _ = begin(world)
    first_snapshot(world, a, b)
    versions = []
    for sequence in range(10):
        outputs = a_round(world, a, b, sequence)
        versions.append((world.core.updates, {item.weights_version for item in throttles(outputs)}))
    assert versions == [(n // 3, {1 + n // 3}) for n in range(10)]
