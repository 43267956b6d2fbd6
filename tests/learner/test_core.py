"""The learner's core: what it grants, publishes, survives and saves; no sockets, no physics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from td3_robot import config as configuration
from td3_robot.bundle import Bundle, sha256
from td3_robot.config import Config
from td3_robot.errors import BundleError, ConfigError
from td3_robot.learner import state
from td3_robot.learner.core import LearnerCore
from td3_robot.messages import Bye, Evaluation, Step, Throttle, Weights
from td3_robot.safety import SafetyConfig
from td3_robot.specs import RobotSpec
from td3_robot.transport.session import Output, Peer, hello


def config(**learner: Any) -> Config:
    values = {"learning_starts": 10, "batch_size": 4, "replay_ratio_band": 8, "publish_every": 2, "buffer_size": 100}
    return configuration.parse(
        {
            "total_steps": 60,
            "network": {"hidden": [4]},
            "evaluation": {"every": 20, "episodes": 1},
            "learner": {**values, **learner},
        }
    )


class World:
    """A learner core with made-up peers, and their messages."""

    def __init__(self, core: LearnerCore, spec: RobotSpec, make_step: Callable[..., Step]) -> None:
        self.core, self.spec, self.make_step = core, spec, make_step
        self.time = 0.0

    def peer(self, role: str, name: str, *, incarnation: int = 0, robots: int = 0, version: int = 0) -> Peer:
        spec = self.spec if robots else None
        introduction = hello(
            role, name, client=1, incarnation=incarnation, robots=robots, weights_version=version, spec=spec
        )
        return Peer("learner", name.encode(), introduction, {})

    def join(self, peer: Peer) -> list[Output]:
        return self.give(peer, peer.hello)

    def give(self, peer: Peer, message: Any) -> list[Output]:
        self.time += 0.001
        return self.core.step([(peer, message)], self.time)

    def idle(self, turns: int = 1) -> list[Output]:
        outputs = []
        for _ in range(turns):
            self.time += 0.001
            outputs += self.core.step([], self.time)
        return outputs


@pytest.fixture
def world(spec: RobotSpec, make_step: Callable[..., Step]) -> World:
    return World(LearnerCore(config()), spec, make_step)


def throttles(outputs: list[Output]) -> list[Throttle]:
    return [message for _, message in outputs if isinstance(message, Throttle)]


def published(outputs: list[Output]) -> list[Weights]:
    return [message for _, message in outputs if isinstance(message, Weights)]


def test_grants_follow_the_ratio(world: World) -> None:
    """Ratio 1, band 8, start 10: one robot may make 18 transitions before any update, 18 + u after u updates."""
    sim = world.peer("simulator", "sim-0", robots=1)
    [grant] = throttles(world.join(sim))
    assert (grant.transitions_allowed, grant.answers) == (18, 0)
    outputs: list[Output] = []
    for sequence in range(19):  # transitions 0 to 18; from 11 on each Step makes an update due
        outputs += world.give(sim, world.make_step(sequence))
    assert world.core.env_steps == 18
    assert world.core.updates == 8
    outputs += world.idle(20)
    assert world.core.updates == 8  # 18 - 10: never ahead of the data
    assert throttles(outputs)[-1].transitions_allowed == 26  # 10 + 8 + 8


def test_two_sources_share_and_one_that_leaves_gives_back(world: World) -> None:
    a, b = (world.peer("simulator", name, robots=1) for name in ("a", "b"))
    assert throttles(world.join(a))[0].transitions_allowed == 18
    assert throttles(world.join(b)) == []  # all of it is out already
    outputs = world.give(a, Bye("done"))
    [grant] = throttles(outputs)
    assert (grant.source, grant.transitions_allowed) == ("b", 18)


def test_weights_say_how_to_explore_and_are_whole(world: World) -> None:
    policy, sim = world.peer("policy", "policy"), world.peer("simulator", "sim-0", robots=1)
    assert world.join(policy) == []  # nothing is known of the robot yet
    [first] = published(world.join(sim))
    assert first.version == 1
    assert sha256(first.payload) == first.sha256
    assert Bundle.decode(first.payload).exploration.kind == "uniform"
    sent = published([output for n in range(12) for output in world.give(sim, world.make_step(n))])
    # At 10 steps learning starts: Gaussian from there, at once.
    assert (sent[0].version, sent[0].env_steps, sent[0].updates) == (2, 10, 0)
    bundle = Bundle.decode(sent[0].payload)
    assert (bundle.exploration.kind, bundle.exploration.scale) == ("gaussian", 0.1)
    assert bundle.spec == world.spec


def test_versions_never_go_back_over_a_restart(world: World) -> None:
    """A policy server that already serves version 70 gets something newer from a learner that is behind."""
    world.join(world.peer("simulator", "sim-0", robots=1))
    [weights] = published(world.join(world.peer("policy", "policy", version=70)))
    assert weights.version == 71


def test_evaluations_are_asked_for_answered_and_the_best_kept(world: World) -> None:
    sim, judge = world.peer("simulator", "sim-0", robots=1), world.peer("evaluator", "evaluator")
    world.join(sim)
    for sequence in range(21):
        world.give(sim, world.make_step(sequence))
    [weights] = published(world.join(judge))  # it came late, and still gets what is waiting
    assert weights.env_steps == 20

    def answer(version: int, mean: float) -> Evaluation:
        return Evaluation(version, 20, 10, np.array([mean]), np.array([5], np.uint32))

    world.give(judge, answer(weights.version, 3.0))
    assert world.core.evaluations.best == weights.payload
    [record] = [record for record in world.core.take_records() if record["kind"] == "evaluation"]
    assert (record["eval_return_mean"], record["eval_returns"], record["env_steps"]) == (3.0, [3.0], 20)
    world.core.evaluations.best = None
    world.give(judge, answer(999, 2.0))
    assert world.core.evaluations.best is None


def test_actions_are_stored_normalised(world: World) -> None:
    """Limits [-1, 3] and [-0.5, 0.5]: the action (2, -0.25) is (2 - 1) / 2 = 0.5 and -0.25 / 0.5 = -0.5."""
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    world.give(sim, world.make_step(0))
    world.give(sim, world.make_step(1, action=np.array([[2, -0.25]], np.float32)))
    assert world.core.replay.sample(1).action.tolist() == [[0.5, -0.5]]


def test_a_step_in_another_name_is_not_taken(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    world.give(sim, world.make_step(0, source="sim-1"))
    assert world.core.counters["misnamed"] == 1
    assert world.core.counts().get("steps", 0) == 0


def test_runs_to_the_end_and_no_further(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    sequence = 0
    while not world.core.done:
        world.give(sim, world.make_step(sequence))
        sequence += 1
        assert sequence < 1000
    world.idle(5)
    assert (world.core.env_steps, world.core.updates) == (60, 50)


def test_lockstep_answers_each_round_with_the_version_to_use(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    values = config(learning_starts=2)
    from msgspec.structs import replace as changed

    world = World(LearnerCore(changed(values, timing="lockstep", simulators=2)), spec, make_step)
    a, b = (world.peer("simulator", name, robots=1) for name in ("a", "b"))
    assert throttles(world.join(a)) == []  # no policy server yet
    [sent] = published(world.join(world.peer("policy", "policy", version=7)))
    assert sent.version == 1  # it goes back with us
    first = throttles(world.join(b))
    assert [(item.source, item.answers, item.weights_version) for item in first] == [("a", 0, 1), ("b", 0, 1)]
    for sequence in range(4):
        assert throttles(world.give(b, make_step(sequence, source="b"))) == []  # half a round
        outputs = world.give(a, make_step(sequence, source="a"))
        assert [(item.source, item.answers) for item in throttles(outputs)] == [
            ("a", sequence + 1),
            ("b", sequence + 1),
        ]
        assert {item.weights_version for item in throttles(outputs)} == {world.core.version}
        # Each round adds two transitions (the first none); two start learning; one update for each after that.
        assert world.core.updates == max(0, 2 * sequence - 2)


def test_state_restores_to_the_bit(world: World, spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(25):
        world.give(sim, world.make_step(sequence, reward=np.array([sequence], np.float32)))
    arrays, scalars = state.save(world.core, world.time)
    import json

    scalars = json.loads(json.dumps(scalars))  # as a file would hold them
    other = World(state.restored(config(), dict(arrays), scalars), spec, make_step)
    assert (other.core.env_steps, other.core.updates) == (24, world.core.updates)
    for item in (world, other):
        item.join(sim)
        for sequence in range(24, 40):
            item.give(sim, item.make_step(sequence))
        item.idle(10)
    ours, theirs = world.core.bundle().tensors, other.core.bundle().tensors
    assert world.core.updates == other.core.updates == 29
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert other.core.counts()["missed"] == 0
    assert other.core.version > world.core.version - 1


def test_a_state_of_another_network_is_refused(world: World) -> None:
    world.join(world.peer("simulator", "sim-0", robots=1))
    arrays, scalars = state.save(world.core, 0.0)
    with pytest.raises(BundleError):
        state.restored(
            configuration.parse({"network": {"hidden": [5]}, "learner": {"buffer_size": 1000}}), arrays, scalars
        )
    with pytest.raises(BundleError, match="does not fit"):
        state.restored(config(), arrays, {"spec": world.spec.describe()})


def test_nothing_to_save_before_a_robot_is_known(world: World) -> None:
    with pytest.raises(BundleError, match="no simulator has joined"):
        state.save(world.core, 0.0)
    with pytest.raises(BundleError, match="no simulator has joined"):
        world.core.bundle()


def test_staleness_is_the_age_of_the_weights_that_acted(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(30):
        world.give(sim, replace(world.make_step(sequence), weights_version=2))
    # Version 2 is from 0 updates; the moving mean (weight 0.01) moves towards the updates made since.
    assert 0 < world.core.meter.staleness < world.core.updates


def test_the_learning_rate_falls_in_a_straight_line(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    """Held to half of 60 steps, then down to a tenth: after 40, a third of the way, 0.001 · (1 - 0.9 / 3) = 0.0007."""
    falling = config(learning_rate=0.001, learning_rate_end=0.1, learning_rate_falls_from=0.5)
    world = World(LearnerCore(falling), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(41):
        world.give(sim, world.make_step(sequence))
        assert (world.core.learning_rate == 0.001) == (sequence <= 30)
    assert world.core.learning_rate == pytest.approx(0.0007)
    for adam in (world.core.td3._actor_adam, world.core.td3._critics_adam):
        assert adam.learning_rate == pytest.approx(0.0007)


def test_a_fresh_learner_goes_on_from_the_version_a_server_holds(world: World) -> None:
    """The policy server was there before any simulator, and serves version 57 of a learner that died."""
    assert world.join(world.peer("policy", "policy", version=57)) == []
    [weights] = published(world.join(world.peer("simulator", "sim-0", robots=1)))
    assert weights.version == 58


def test_a_source_that_stands_still_does_not_starve_the_others(world: World) -> None:
    """All 18 steps went to the first source, which then does nothing for more than 5 s."""
    a, b = (world.peer("simulator", name, robots=1) for name in ("a", "b"))
    world.join(a)
    assert throttles(world.join(b)) == []
    world.time += 6
    [grant] = throttles(world.idle())
    assert (grant.source, grant.transitions_allowed) == ("b", 18)


def test_without_a_ratio_leave_is_given_once(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    world = World(LearnerCore(config(replay_ratio=None, learning_starts=0)), spec, make_step)
    assert world.idle(3) == []  # nothing to learn from, and nobody there
    sim = world.peer("simulator", "sim-0", robots=1)
    [grant] = throttles(world.join(sim))
    assert grant.transitions_allowed == 2**63
    outputs = [output for n in range(5) for output in world.give(sim, make_step(n))]
    assert throttles(outputs + world.idle(50)) == []


def test_evaluations_do_not_pile_up(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    from msgspec.structs import replace as changed

    base = config()
    every = changed(base, evaluation=changed(base.evaluation, every=1))
    world = World(LearnerCore(every), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(12):
        world.give(sim, make_step(sequence))
    # Steps 1 to 11 ask for one each; four wait for an evaluator, seven are not made.
    assert world.core.counts()["evaluations_pending"] == 4
    assert world.core.counts()["evaluations_skipped"] == 7


def test_divergence_is_named_and_the_final_version_is_its_own(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(14):
        world.give(sim, world.make_step(sequence))
    world.core.td3.update(world.core.replay.sample(4))
    before = world.core.version
    assert world.core.final_bundle().provenance["version"] == before + 1
    world.core.td3.actor.flat.fill_(float("nan"))
    with pytest.raises(BundleError, match=r"training diverged: .* not|no longer finite"):
        world.core.bundle()


def test_safety_settings_go_into_its_policies_or_are_refused_at_once(
    spec: RobotSpec, make_step: Callable[..., Step]
) -> None:
    settings = SafetyConfig(limits={"left": (0.0, 1.0)}, rate=5.0)
    core = LearnerCore(msgspec.structs.replace(config(), safety=settings))
    world = World(core, spec, make_step)
    world.join(world.peer("simulator", "sim-0", robots=1))
    assert core.bundle(averaged=False).safety == settings
    wrong = LearnerCore(msgspec.structs.replace(config(), safety=SafetyConfig(rate={"up": 5.0})))
    world = World(wrong, spec, make_step)
    with pytest.raises(ConfigError, match="robot 'Toy' has no action 'up'"):
        world.join(world.peer("simulator", "sim-0", robots=1))
