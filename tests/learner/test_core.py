"""The learner's core without sockets or physics: grants, published weights, metrics and divergence.

A grant is the number of transitions that a Throttle allows a source.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, sha256
from td3_robot.config.schema import EvaluationConfig
from td3_robot.core_types import Output
from td3_robot.errors import ConfigError, DivergenceError
from td3_robot.learner import reports
from td3_robot.learner.checkpointing import state
from td3_robot.learner.evaluations import Evaluations
from td3_robot.learner.factory import make_core
from td3_robot.learner.warm_start import prefill
from td3_robot.messages import Bye, Evaluation, SimulatorState, Step
from td3_robot.policy.actor import Actor
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from tests.learner.world import World, config, published, throttles


def test_grants_follow_the_ratio(world: World) -> None:
    """With replay_ratio 1, replay_ratio_band 8 and learning_starts 10, u updates allow 18 + u transitions."""
    sim = world.peer("simulator", "sim-0", robots=1)
    [grant] = throttles(world.join(sim))
    assert (grant.transitions_allowed, grant.answers) == (18, 0)
    outputs: list[Output] = []
    for sequence in range(19):  # from Step 11 on, one more update is due after each Step
        outputs += world.give(sim, world.make_step(sequence))
    assert world.core.env_steps == 18
    assert world.core.updates == 8
    outputs += world.idle(20)
    assert world.core.updates == 8  # 8 updates (18 steps minus learning_starts 10): now the learner waits
    assert throttles(outputs)[-1].transitions_allowed == 26  # learning_starts 10 + band 8 + 8 updates


def test_a_leaving_source_returns_its_grant(world: World) -> None:
    a, b = (world.peer("simulator", name, robots=1) for name in ("a", "b"))
    assert throttles(world.join(a))[0].transitions_allowed == 18
    assert throttles(world.join(b)) == []  # `a` holds the whole grant
    outputs = world.give(a, Bye("done"))
    [grant] = throttles(outputs)
    assert (grant.source, grant.transitions_allowed) == ("b", 18)


def test_published_weights_are_complete_and_set_the_exploration(world: World) -> None:
    policy, sim = world.peer("policy", "policy"), world.peer("simulator", "sim-0", robots=1)
    assert world.join(policy) == []  # the learner does not know the robot yet
    [first] = published(world.join(sim))
    assert first.version == 1
    assert sha256(first.payload) == first.sha256
    assert Bundle.decode(first.payload).exploration.kind == "uniform_v2"
    sent = published([output for n in range(12) for output in world.give(sim, world.make_step(n))])
    # Gaussian noise starts at 10 steps. The first update follows at the next step.
    assert (sent[0].version, sent[0].env_steps, sent[0].updates) == (2, 10, 0)
    bundle = Bundle.decode(sent[0].payload)
    assert (bundle.exploration.kind, bundle.exploration.scale) == ("gaussian_v2", 0.1)
    assert bundle.spec == world.spec


def test_versions_increase_across_a_restart_of_the_learner(world: World) -> None:
    """A simulator joins first. Then the policy server joins, which serves version 70 of an earlier learner."""
    world.join(world.peer("simulator", "sim-0", robots=1))
    [weights] = published(world.join(world.peer("policy", "policy", version=70)))
    assert weights.version == 71


def test_evaluations_are_requested_and_the_best_policy_is_kept(world: World) -> None:
    sim, judge = world.peer("simulator", "sim-0", robots=1), world.peer("evaluator", "evaluator")
    world.join(sim)
    for sequence in range(21):
        world.give(sim, world.make_step(sequence))
    [weights] = published(world.join(judge))  # an evaluator that joins late gets the pending request
    assert weights.env_steps == 20

    def answer(version: int, mean: float) -> Evaluation:
        return Evaluation(version, 20, 10, np.array([mean]), np.array([5], np.uint32))

    world.give(judge, answer(weights.version, 3.0))
    assert world.core.publisher.evaluations.best == weights.payload
    [record] = [record for record in world.core.reports.take() if record["kind"] == "evaluation"]
    assert (record["eval_return_mean"], record["eval_returns"], record["env_steps"]) == (3.0, [3.0], 20)
    world.core.publisher.evaluations.best = None
    world.give(judge, answer(999, 4.0))
    assert world.core.publisher.evaluations.best is None


def test_a_policy_after_0_updates_is_never_the_best(world: World) -> None:
    sim, judge = world.peer("simulator", "sim-0", robots=1), world.peer("evaluator", "evaluator")
    world.join(sim)
    for sequence in range(21):
        world.give(sim, world.make_step(sequence))
    [weights] = published(world.join(judge))
    world.give(judge, Evaluation(weights.version, 20, 0, np.array([3.0]), np.array([5], np.uint32)))
    assert world.core.publisher.evaluations.best is None


@pytest.mark.parametrize("updates", [0, 1])
def test_only_a_policy_after_at_least_1_update_can_reach_the_target_return(updates: int) -> None:
    evaluations = Evaluations(EvaluationConfig(target_return=2.0))
    evaluations.take(Evaluation(1, 20, updates, np.array([3.0]), np.array([5], np.uint32)), 1.0)
    assert evaluations.reached == (updates > 0)


@pytest.mark.parametrize(("saved", "following"), [(0, 3000), (1000, 3000), (2000, 2000), (2700, 3000), (9000, 3000)])
def test_evaluations_after_a_resume_are_at_multiples_of_the_configured_period(saved: int, following: int) -> None:
    """The run continues at 2,500 steps, and evaluates every 1,000 steps. Its next evaluation is at step ``following``.

    The checkpoint says that the next evaluation is at step ``saved``. ``saved`` is 0 if the run had no evaluations. If
    ``saved`` is 2,000, that evaluation was due before the checkpoint, but the learner had not yet made it.
    """
    evaluations = Evaluations(EvaluationConfig(every=1000))
    evaluations.restore({"best_return": None, "next": saved, "skipped": 0}, env_steps=2500)
    assert evaluations.state()["next"] == following


def test_a_resumed_run_that_had_no_evaluations_does_not_evaluate_at_once() -> None:
    """The run continues at 500 steps, and evaluates every 1,000 steps.

    The saved 0 does not mean that an evaluation is due now.
    """
    evaluations = Evaluations(EvaluationConfig(every=1000))
    evaluations.restore({"best_return": None, "next": 0, "skipped": 0}, env_steps=500)
    assert not evaluations.due(500)
    assert evaluations.due(1000)


def test_actions_are_stored_normalised(world: World) -> None:
    """The limits are [-1, 3] and [-0.5, 0.5]: action (2, -0.25) becomes (2 - 1) / 2 = 0.5 and -0.25 / 0.5 = -0.5."""
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    world.give(sim, world.make_step(0))
    world.give(sim, world.make_step(1, action=np.array([[2, -0.25]], np.float32)))
    assert world.core.training.experience.replay.sample(1).action.tolist() == [[0.5, -0.5]]


def test_a_step_that_names_another_source_is_dropped(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    world.give(sim, world.make_step(0, source="sim-1"))
    assert world.core.counters["misnamed"] == 1
    assert world.core.counts().get("steps", 0) == 0


def test_training_stops_at_the_configured_steps(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    sequence = 0
    while not world.core.done:
        world.give(sim, world.make_step(sequence))
        sequence += 1
        assert sequence < 1000
    world.idle(5)
    assert (world.core.env_steps, world.core.updates) == (60, 50)


def test_in_lockstep_the_learner_answers_each_complete_round_with_the_version_to_use(
    spec: RobotSpec, make_step: Callable[..., Step]
) -> None:
    """A round has one Step of each simulator."""
    values = config(learning_starts=2)
    world = World(make_core(changed(values, timing="lockstep", simulators=2)), spec, make_step)
    a, b = (world.peer("simulator", name, robots=1) for name in ("a", "b"))
    assert throttles(world.join(a)) == []  # no policy server yet
    [sent] = published(world.join(world.peer("policy", "policy", version=7)))
    assert sent.version == 1  # in lock-step the server accepts an older version
    first = throttles(world.join(b))
    assert [(item.source, item.answers, item.weights_version) for item in first] == [("a", 0, 1), ("b", 0, 1)]
    for peer in (a, b):
        world.give(peer, SimulatorState(peer.name, 0, 0, b"state"))
    world.core.scheduler.snapshot_saved()
    for sequence in range(4):
        assert throttles(world.give(b, make_step(sequence, source="b"))) == []  # half a round
        outputs = world.give(a, make_step(sequence, source="a"))
        assert [(item.source, item.answers) for item in throttles(outputs)] == [
            ("a", sequence + 1),
            ("b", sequence + 1),
        ]
        assert {item.weights_version for item in throttles(outputs)} == {world.core.publisher.version}
        # Each round after the first adds two transitions. Each transition after the first two adds one update.
        assert world.core.updates == max(0, 2 * sequence - 2)


def test_no_n_step_return_contains_rewards_of_two_recordings(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    """The rewards are 0 to 5, and the discount is 0.99. No return contains rewards of two recordings."""
    recorded = [make_step(number, reward=np.array([number], np.float32)) for number in range(6)]
    core = make_core(config(n_step=3))
    assert prefill(core, [(spec, recorded[:4]), (spec, recorded[4:])]) == [3, 1]
    rewards = core.training.experience.replay.rows[:4, 3 + 2]  # the reward comes after 3 observations and 2 actions
    assert rewards == pytest.approx([1 + 2 * 0.99 + 3 * 0.99**2, 2 + 3 * 0.99, 3, 5])


def test_staleness_is_the_age_of_the_acting_weights(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(30):
        world.give(sim, changed(world.make_step(sequence), weights_version=2))
    # The learner published version 2 after 0 updates. Before Step n, it has made n - 11 updates. So the ages for Steps
    # 12 to 29 are 1 to 18. In the moving mean, a new age has weight 0.01.
    expected = sum(0.01 * age * 0.99 ** (18 - age) for age in range(1, 19))
    assert world.core.gauges.staleness == pytest.approx(expected)


def test_the_learning_rate_falls_linearly(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    """The rate is constant for 30 of 60 steps, then falls to a tenth.

    After 40 steps, a third of the fall is done: 0.001 · (1 - 0.9 / 3) = 0.0007.
    """
    falling = config(learning_rate=0.001, learning_rate_end=0.1, learning_rate_falls_from=0.5)
    world = World(make_core(falling), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(41):
        world.give(sim, world.make_step(sequence))
        assert (world.core.learning.learning_rate == 0.001) == (sequence <= 30)
    assert world.core.learning.learning_rate == pytest.approx(0.0007)
    for adam in (world.core.training.algorithm.actor_adam, world.core.training.algorithm.critics_adam):
        assert adam.learning_rate == pytest.approx(0.0007)


def test_a_new_learner_continues_the_version_numbers_of_the_server(world: World) -> None:
    """The policy server joins before any simulator, and serves version 57 of an earlier learner."""
    assert world.join(world.peer("policy", "policy", version=57)) == []
    [weights] = published(world.join(world.peer("simulator", "sim-0", robots=1)))
    assert weights.version == 58


def test_a_paused_source_does_not_stop_the_others(world: World) -> None:
    """Source `a` holds the grant of 18 steps and does nothing. After 5 s, the learner also grants them to `b`."""
    a, b = (world.peer("simulator", name, robots=1) for name in ("a", "b"))
    world.join(a)
    assert throttles(world.join(b)) == []
    world.time += 6
    [grant] = throttles(world.idle())
    assert (grant.source, grant.transitions_allowed) == ("b", 18)


def test_one_grant_covers_everything_if_there_is_no_ratio(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    world = World(make_core(config(replay_ratio=None, learning_starts=0)), spec, make_step)
    assert world.idle(3) == []  # no source and nothing to learn from
    sim = world.peer("simulator", "sim-0", robots=1)
    [grant] = throttles(world.join(sim))
    assert grant.transitions_allowed == 2**63
    outputs = [output for n in range(5) for output in world.give(sim, make_step(n))]
    assert throttles(outputs + world.idle(50)) == []


def test_the_number_of_pending_evaluations_is_bounded(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    base = config()
    every = changed(base, evaluation=changed(base.evaluation, every=1))
    world = World(make_core(every), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(12):
        world.give(sim, make_step(sequence))
    # Each of the steps 1 to 11 requests one evaluation. Four evaluations wait for an evaluator, and seven are skipped.
    assert world.core.counts()["evaluations_pending"] == 4
    assert world.core.counts()["evaluations_skipped"] == 7


def test_divergence_is_reported_and_the_final_policy_has_a_new_version(world: World) -> None:
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(14):
        world.give(sim, world.make_step(sequence))
    world.core.training.algorithm.learn(world.core.training.experience.replay.sample(4))
    before = world.core.publisher.version
    assert world.core.publisher.final_bundle().provenance["version"] == before + 1
    world.core.training.algorithm.actor.flat.fill_(float("nan"))
    with pytest.raises(DivergenceError, match=r"training diverged: the policy's weights are no longer finite \("):
        world.core.publisher.bundle()
    world.core.training.algorithm.critics.flat.fill_(float("nan"))
    world.core.training.algorithm.learn(world.core.training.experience.replay.sample(4))
    with pytest.raises(DivergenceError, match="critic_loss is nan"):
        state.save(world.core, 0.0)  # a diverged learner writes no checkpoint


def test_exploding_values_stop_the_run_and_keep_the_last_good_policy(
    spec: RobotSpec, make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With γ = 0.99 and rewards of 1, returns are at most 1 / (1 - 0.99) = 100. The limit is 100 times this: 10,000.

    The target critics return about 30,000, so the mean target is near 0.99 · 30,000 = 29,700.
    """
    monkeypatch.setattr(reports, "EVERY", 20)
    world = World(make_core(config(publish_every=1000)), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)

    def run(first: int, last: int) -> None:
        for sequence in range(first, last):
            step = make_step(sequence, reward=np.ones(1, np.float32), observation=np.zeros((1, 3), np.float32))
            world.give(sim, step)
            world.idle(2)

    run(0, 39)
    [record] = [item for item in world.core.reports.take() if item["kind"] == "train"]
    assert record["q_target_size"] < 10
    assert record["critic_gradient_norm"] > 0
    good = world.core.reports.sound
    assert good is not None
    assert Bundle.decode(good).provenance["env_steps"] == 20
    for name in ("critic1.1.bias", "critic2.1.bias"):
        world.core.training.algorithm.critics_target.named[name].fill_(30_000)
    message = (
        r"training diverged: the critics' values have exploded: q_target_size is 2.\d+e\+04, above 1e\+04, which is "
        r"100 times .* rewards up to 1 \(after 40 steps .*kept: the policy after 20 steps, and the earlier"
    )
    with pytest.raises(DivergenceError, match=message):
        run(39, 43)
    assert world.core.reports.sound == good
    with pytest.raises(DivergenceError):
        state.save(world.core, world.time)


def test_with_many_robots_the_learner_makes_a_record_every_16_control_periods(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record takes about 2 ms. With 2 robots, a Step message holds 2 environment steps.

    If the learner made a record every 4 environment steps, every second Step message would wait for a record. So only
    the first record comes at 4 environment steps. The next records come at multiples of 16 · 2.
    """
    monkeypatch.setattr(reports, "EVERY", 4)
    world.core.reports.next_record = 4
    sim = world.peer("simulator", "sim-0", robots=2)
    world.join(sim)
    for sequence in range(36):
        world.give(sim, world.make_step(sequence, robots=2))
        world.idle(4)
    records = [record["env_steps"] for record in world.core.reports.take() if record["kind"] == "train"]
    assert records == [4, 32, 64]


def test_every_metric_of_td3_is_documented(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "EVERY", 10)
    document = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    sim, judge = world.peer("simulator", "sim-0", robots=1), world.peer("evaluator", "evaluator")
    world.core.reports.next_record = 10
    world.join(sim)
    for sequence in range(3):  # an episode of two steps gives returns
        world.give(sim, world.make_step(sequence, phase=np.array([(0, 1, 2)[sequence]], np.uint8)))
    for sequence in range(3, 30):
        number = np.array([sequence - 3], np.uint32)
        begins = np.array([0 if sequence == 3 else 1], np.uint8)
        step = world.make_step(sequence, phase=begins, episode=np.ones(1, np.uint64), episode_step=number)
        world.give(sim, step)
        world.idle()
    [weights] = published(world.join(judge))
    world.give(judge, Evaluation(weights.version, 20, 10, np.array([1.0]), np.array([5], np.uint32)))
    keys = {key for record in world.core.reports.take() for key in record}
    assert {"return_expected_mean", "steps_per_s", "return_mean", "length_mean", "eval_length_mean"} <= keys
    assert not {key for key in keys if f"`{key}`" not in document}


def test_learner_and_served_policy_compute_the_same_action(spec: RobotSpec, make_step: Callable[..., Step]) -> None:
    """The policy server's numpy actor takes raw observations, and the learner's actor takes normalised ones."""
    world = World(make_core(config(normalise_observations=True)), spec, make_step)
    sim = world.peer("simulator", "sim-0", robots=1)
    world.join(sim)
    for sequence in range(30):
        world.give(sim, make_step(sequence, observation=np.array([[sequence, 1e3 - sequence, 2]], np.float32)))
        world.idle()
    core = world.core
    batch = core.training.experience.replay.sample(16)
    assert core.training.normaliser
    seen = core.training.algorithm.actor.forward(core.training.normaliser(batch).observation)[0].tanh().numpy()
    actor = Actor(Bundle.decode(core.publisher.bundle().encode()))
    np.testing.assert_allclose(actor(batch.observation.numpy()), seen * actor.half + actor.middle, atol=1e-6)
    assert seen.std(0).max() > 1e-3


def test_policies_contain_the_safety_settings_and_a_wrong_setting_is_refused(
    spec: RobotSpec, make_step: Callable[..., Step]
) -> None:
    settings = SafetyConfig(limits={"left": (0.0, 1.0)}, rate=5.0)
    core = make_core(changed(config(), safety=settings))
    world = World(core, spec, make_step)
    world.join(world.peer("simulator", "sim-0", robots=1))
    assert core.publisher.bundle(averaged=False).safety == settings
    wrong = make_core(changed(config(), safety=SafetyConfig(rate={"up": 5.0})))
    world = World(wrong, spec, make_step)
    with pytest.raises(ConfigError, match="robot 'Toy' has no action 'up'"):
        world.join(world.peer("simulator", "sim-0", robots=1))


def test_an_algorithm_cannot_use_the_name_of_a_metric_of_the_learner(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join(world.peer("simulator", "sim-0", robots=1))
    monkeypatch.setattr(world.core.training, "metrics", lambda: {"loss": 0.5, "env_steps": 7.0})
    with pytest.raises(ConfigError, match="update returned the metric 'env_steps', which is the name of a metric of"):
        world.core.reports.record(world.time)
