"""Lock-step's order: rounds, cuts between them, and going back to one; a learner core with made-up peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from td3_robot.core_types import Output, Peer
from td3_robot.learner import state
from td3_robot.learner.factory import make_core
from td3_robot.messages import Bye, SimulatorState, Step
from td3_robot.specs import RobotSpec
from tests.learner.test_core import World, config, published, throttles


def lockstep_config() -> Any:
    from msgspec.structs import replace as changed

    return changed(config(learning_starts=2), timing="lockstep", simulators=2)


@pytest.fixture
def world(spec: RobotSpec, make_step: Callable[..., Step]) -> World:
    """Two simulators and a policy server have joined, and somebody keeps cuts."""
    world = World(make_core(lockstep_config()), spec, make_step)
    world.core.rounds.keep()
    return world


def peers(world: World, *, client: int = 1, incarnation: int = 0) -> tuple[Peer, Peer]:
    made = [world.peer("simulator", name, robots=1, incarnation=incarnation) for name in ("a", "b")]
    a, b = (replace(peer, hello=replace(peer.hello, client=client)) for peer in made)
    return a, b


def begin(world: World) -> tuple[Peer, Peer, list[Output]]:
    a, b = peers(world)
    world.join(world.peer("policy", "policy"))
    world.join(a)
    return a, b, world.join(b)


def states(outputs: list[Output]) -> list[SimulatorState]:
    return [message for _, message in outputs if isinstance(message, SimulatorState)]


def saved(source: str, answers: int, payload: bytes | None = None, incarnation: int = 0) -> SimulatorState:
    return SimulatorState(source, incarnation, answers, f"{source}{answers}".encode() if payload is None else payload)


def a_round(world: World, a: Peer, b: Peer, sequence: int) -> list[Output]:
    world.give(a, world.make_step(sequence, source="a"))
    return world.give(b, world.make_step(sequence, source="b"))


def first_cut(world: World, a: Peer, b: Peer) -> None:
    world.give(a, saved("a", 0))
    world.give(b, saved("b", 0))
    assert world.core.rounds.cut_complete
    world.core.rounds.taken()


def test_the_run_begins_with_a_cut(world: World) -> None:
    a, b, outputs = begin(world)
    assert [(item.source, item.answers, item.save) for item in throttles(outputs)] == [("a", 0, 1), ("b", 0, 1)]
    world.give(a, saved("a", 0))
    assert not world.core.rounds.cut_complete
    assert a_round(world, a, b, 0) == []  # no round before the cut is there …
    world.give(b, saved("b", 0))
    assert world.idle() == []  # … and written
    assert state.save(world.core, 0.0)[0]["simulator.b"].tobytes() == b"b0"
    world.core.rounds.taken()
    assert [(item.answers, item.save) for item in throttles(world.idle())] == [(1, 0), (1, 0)]


def test_a_cut_is_asked_for_where_a_round_ends(world: World) -> None:
    a, b, _ = begin(world)
    first_cut(world, a, b)
    a_round(world, a, b, 0)
    world.give(a, world.make_step(1, source="a"))
    world.core.rounds.wanted = True
    outputs = world.give(b, world.make_step(1, source="b"))
    assert [(item.answers, item.save) for item in throttles(outputs)] == [(2, 1), (2, 1)]
    world.give(a, saved("a", 1))  # of another place: not taken
    world.give(a, saved("a", 2))
    assert not world.core.rounds.cut_complete
    world.give(b, Bye("gone"))  # then there is none, until the next round has ended
    assert not world.core.rounds.cut_complete
    assert world.core.rounds.wanted


def test_everybody_goes_back_when_one_is_lost(world: World) -> None:
    a, b, _ = begin(world)
    first_cut(world, a, b)
    for sequence in range(5):
        a_round(world, a, b, sequence)
    world.core.rounds.wanted = True
    a_round(world, a, b, 5)
    world.give(a, saved("a", 6))
    world.give(b, saved("b", 6))
    arrays, scalars = state.save(world.core, 0.0)
    arrays, scalars = {name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(scalars))
    world.core.rounds.taken()
    before = world.core.env_steps, world.core.updates, world.core.version
    for sequence in (6, 7, 8):
        a_round(world, a, b, sequence)
    world.give(b, Bye("killed"))
    _, anew = peers(world, client=2, incarnation=1)
    assert states(world.join(anew)) == []
    assert world.core.rounds.setback
    assert a_round(world, a, anew, 9) == []  # nothing goes on until all are back
    state.restore(world.core, arrays, scalars)
    world.core.went_back()
    assert (world.core.env_steps, world.core.updates, world.core.version) == before
    outputs = world.idle()
    assert [(item.source, item.incarnation, item.answers, item.payload) for item in states(outputs)] == [
        ("a", 0, 6, b"a6"),
        ("b", 0, 6, b"b6"),
    ]
    assert [item.version for item in published(outputs)] == sorted(before[2] - back for back in (0, 1))
    world.give(a, world.make_step(9, source="a"))  # from before: not taken
    assert world.core.counts()["set_back"] >= 1
    assert throttles(world.give(a, saved("a", 6, b""))) == []
    outputs = world.give(anew, saved("b", 6, b""))
    told = {(item.incarnation, item.answers, item.weights_version) for item in throttles(outputs)}
    assert told == {(0, 6, before[2])}
    for peer, name in ((a, "a"), (anew, "b")):
        assert world.give(peer, world.make_step(5, source=name)) == []  # what the next one follows
    assert len(throttles(a_round(world, a, anew, 6))) == 2
    assert world.core.env_steps == before[0] + 2
    assert world.core.counts()["missed"] == world.core.counts()["gaps"] == 0


def test_the_same_process_connected_anew_goes_on(world: World) -> None:
    a, b, _ = begin(world)
    first_cut(world, a, b)
    a_round(world, a, b, 0)
    world.give(b, Bye("silent for 5 s"))
    outputs = world.join(b)
    assert states(outputs) == []
    assert not world.core.rounds.setback
    assert [(item.source, item.answers) for item in throttles(outputs)] == [("b", 1)]
    world.give(b, world.make_step(0, source="b"))  # said again, and no Step of the next round
    assert throttles(world.give(a, world.make_step(1, source="a"))) == []
    assert len(throttles(world.give(b, world.make_step(1, source="b")))) == 2


def test_the_last_round_ends_with_a_cut(world: World) -> None:
    a, b, _ = begin(world)
    first_cut(world, a, b)
    sequence, outputs = 0, list[Output]()
    while not world.core.done:
        outputs = a_round(world, a, b, sequence)
        sequence += 1
    assert [(item.answers, item.save) for item in throttles(outputs)] == [(sequence, 1), (sequence, 1)]
    world.give(a, saved("a", sequence))
    world.give(b, saved("b", sequence))
    assert world.core.rounds.cut_complete
    steps = world.core.env_steps
    world.core.rounds.taken()
    a_round(world, a, b, sequence)
    assert world.core.env_steps == steps


def test_a_state_needs_its_arrays(world: World) -> None:
    from td3_robot.errors import BundleError

    a, b, _ = begin(world)
    first_cut(world, a, b)
    arrays, scalars = state.save(world.core, 0.0)
    missing = {name: array for name, array in arrays.items() if not name.startswith("sent.")}
    with pytest.raises(BundleError, match="does not fit"):
        state.restored(lockstep_config(), missing, scalars)
    assert np.array_equal(arrays["sent.1"], np.frombuffer(world.core.sent[0].payload, np.uint8))
