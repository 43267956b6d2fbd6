"""If a learner starts from a policy, it trains its new critics first. Only after that, it changes the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.bundle import OBSERVATION_MEAN, OBSERVATION_STD, Bundle
from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.core_types import Peer
from td3_robot.errors import BundleError, ConfigError
from td3_robot.learner import warm_start
from td3_robot.learner.checkpointing import state
from td3_robot.learner.factory import make_core
from td3_robot.messages import Step, Weights
from td3_robot.policy.actor import Actor
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.specs import RobotSpec
from td3_robot.transport.link import hello
from tests.learner.world import resumed

Make = Callable[..., Bundle]


def config(**learner: Any) -> Config:
    values = {"learning_starts": 10, "batch_size": 4, "replay_ratio_band": 8, "publish_every": 2, "buffer_size": 100}
    start = {"start_from": "policy.safetensors", "critics_first": 20}
    content = {
        "total_steps": 60,
        "network": {"hidden": [8, 4]},
        "evaluation": {"every": 0},
        "learner": {**values, **start, **learner},
    }
    return configuration.parse(content)


def peer(role: str, name: str, spec: RobotSpec, version: int = 0) -> Peer:
    robot = {"robots": 1, "spec": spec} if role == "driver" else {}
    return Peer("learner", name.encode(), hello(role, name, client=1, weights_version=version, **robot), {})


def actions(bundle: Bundle) -> np.ndarray[Any, Any]:
    """Return a policy's actions for 100 observations."""
    return Actor(bundle)(np.random.default_rng(1).uniform(-5, 5, (100, 3)).astype(np.float32))


def normalised(bundle: Bundle, **provenance: Any) -> Bundle:
    more = {OBSERVATION_MEAN: np.array([1, 2, 3], np.float32), OBSERVATION_STD: np.array([0.5, 1, 2], np.float32)}
    return replace(bundle, tensors={**bundle.tensors, **more}, provenance={"version": 1, **provenance})


def test_a_learner_starts_with_the_served_policy(
    spec: RobotSpec, make_bundle: Make, make_step: Callable[..., Step]
) -> None:
    """The learner publishes the served policy with the configured noise, not with uniform actions.

    The first 20 updates change only the critics.
    """
    served = make_bundle(seed=3)
    core = make_core(config())
    core.start(served.spec, served)
    driver, server = peer("driver", "leg", spec), peer("policy", "policy", spec, version=41)
    [(_, first)] = [item for item in core.step([(server, server.hello)], 0.0) if isinstance(item[1], Weights)]
    assert isinstance(first, Weights)
    assert first.version == 42
    begun = Bundle.decode(first.payload)
    assert begun.exploration.kind == "gaussian_v2"
    np.testing.assert_array_equal(actions(begun), actions(served))
    core.step([(driver, driver.hello)], 0.1)
    for sequence in range(60):
        core.step([(driver, make_step(sequence, source="leg", observation=np.full((1, 3), sequence % 5, "f4")))], 1.0)
        while core.busy:
            core.step([], 1.0)
        unchanged = (actions(core.publisher.bundle()) == actions(served)).all()
        assert unchanged == (core.updates < 22), core.updates  # the actor changes in update 22, 24, 26, …
    assert core.updates == 49  # 60 Steps give 59 transitions; learning starts after 10 of them


@pytest.mark.parametrize("whole", [True, False])
def test_start_from_can_name_a_run_folder_or_a_policy_file(make_bundle: Make, tmp_path: Path, *, whole: bool) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    policy = make_bundle(seed=3)
    policy.save(run.policy_file)
    core = make_core(config(start_from=str(run.path if whole else run.policy_file)))
    warm_start.begin(core)
    np.testing.assert_array_equal(actions(core.publisher.bundle()), actions(policy))


def test_a_resumed_learner_does_not_need_the_policy_file(make_bundle: Make) -> None:
    core = make_core(config())
    policy = make_bundle(seed=3)
    core.start(policy.spec, policy)
    again = resumed(config(), *state.save(core, 0.0))
    np.testing.assert_array_equal(actions(again.publisher.bundle()), actions(core.publisher.bundle()))
    assert again.publisher.bundle().exploration.kind == "gaussian_v2"


def test_the_policys_normalisation_is_continued(make_bundle: Make) -> None:
    """In the first channel, 30 values have mean 1, and 10 more have mean 5. All 40 have mean (30 + 50) / 40 = 2.

    The two groups have variances 0.25 and 0. The distance of the two means, 4, adds 30/40 · 10/40 · 4² = 3 to the
    variance. The variance of all 40 is (30 · 0.25 + 10 · 0) / 40 + 3 = 3.1875.
    """
    served = normalised(make_bundle(seed=3), env_steps=30)
    core = make_core(config(normalise_observations=True))
    core.start(served.spec, served)
    np.testing.assert_array_equal(actions(core.publisher.bundle()), actions(served))
    assert core.training.normaliser
    core.training.normaliser.add(np.tile(np.array([[5, 2, 3]], np.float32), (10, 1)))
    found = core.publisher.bundle().tensors
    assert found[OBSERVATION_MEAN][0] == pytest.approx(2)
    assert found[OBSERVATION_STD][0] == pytest.approx(np.sqrt(3.1875))


def test_a_policy_that_does_not_fit_the_robot_or_the_settings_is_refused(spec: RobotSpec, make_bundle: Make) -> None:
    plain, learner = make_bundle(), config().learner
    with pytest.raises(BundleError, match=r"hidden layers \[8, 4\], network.hidden is \[8, 5\]"):
        warm_start.check(plain, spec, (8, 5), learner)
    with pytest.raises(BundleError, match="for another robot"):
        warm_start.check(plain, replace(spec, control_period=0.01), (8, 4), learner)
    with pytest.raises(BundleError, match="normalise_observations must be true"):
        warm_start.check(normalised(plain, env_steps=3), spec, (8, 4), learner)
    means = config(normalise_observations=True).learner
    with pytest.raises(BundleError, match="normalise_observations must be false"):
        warm_start.check(plain, spec, (8, 4), means)
    with pytest.raises(BundleError, match="env_steps in its provenance is None"):
        warm_start.check(normalised(plain), spec, (8, 4), means)
    with pytest.raises(ConfigError, match="would spoil the policy at once; allowed for critics_first: 1 or more"):
        config(critics_first=0)


def test_replacing_a_served_policy_with_untrained_weights_is_logged(
    spec: RobotSpec, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(config(start_from=None))
    core.start(spec)
    server = peer("policy", "policy", spec, version=41)
    core.step([(server, server.hello)], 0.0)
    assert "the learner replaces version 41 with untrained weights" in caplog.text
