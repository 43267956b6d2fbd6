"""The policy server's core: its answers, the weights it uses, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.core_types import Peer
from td3_robot.messages import Action, Bye, Command, Step, Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.noise import OrnsteinUhlenbeck, robot_scales
from td3_robot.specs import RobotSpec


def weights(version: int, bundle: Bundle, **changes: Any) -> tuple[str, Weights]:
    payload = bundle.encode()
    return "learner", changed(Weights(version, 0, 0, sha256(payload), payload), **changes)


def test_an_action_names_its_step_and_the_weights_version(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9)
    bundle = make_bundle(1)
    assert core.step([(peer, make_step(0))], 0.0) == []  # no policy yet: the Step waits
    [(to, action)] = core.step([weights(4, bundle)], 0.1)
    assert to is peer
    assert isinstance(action, Action)
    assert (action.source, action.answers, action.weights_version, action.noise_kind) == ("sim-0", 0, 4, 0)
    assert np.array_equal(action.action, Actor(bundle)(np.zeros((1, 3), np.float32)))
    assert core.step([], 0.2) == []


def test_only_the_latest_step_is_answered(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9)
    outputs = core.step([weights(1, make_bundle()), (peer, make_step(3)), (peer, make_step(4))], 0.0)
    assert [action.answers for _, action in outputs if isinstance(action, Action)] == [4]
    assert core.counters["skipped"] == 1


def test_uniform_warm_up_uses_the_full_range_of_each_action_channel(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9)
    core.step([weights(1, make_bundle(kind="uniform"))], 0.0)
    actions = []
    for number in range(2000):
        [(_, action)] = core.step([(peer, make_step(number))], 0.0)
        assert isinstance(action, Action)
        assert (action.noise_kind, action.noise_seed) == (2, 9)
        actions.append(action.action[0])
    drawn = np.array(actions)
    # 2000 draws from U[-1, 3] and U[-0.5, 0.5]. The smallest and the largest draw differ from the limits by less than
    # 1 % of the range. For a random seed, each of these four comparisons fails with probability 0.99^2000 ~ 2e-9.
    for column, (low, high) in enumerate([(-1, 3), (-0.5, 0.5)]):
        assert low <= drawn[:, column].min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < drawn[:, column].max() <= high


def test_gaussian_noise_scales_with_half_the_range(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    tensors = {name: np.zeros_like(tensor) for name, tensor in make_bundle().tensors.items()}
    core = PolicyCore(seed=9)
    core.step([weights(1, replace(make_bundle(kind="gaussian", scale=0.1), tensors=tensors))], 0.0)
    drawn = np.array([core.step([(peer, make_step(n))], 0.0)[0][1].action[0] for n in range(4000)])  # type: ignore[attr-defined]
    # Zero weights give the middle of each action range: 1 and 0. Half ranges 2 and 0.5 give deviations 0.2 and 0.05.
    # The tolerances are at least four standard errors.
    np.testing.assert_allclose(drawn.mean(0), [1, 0], atol=4 * 0.2 / 4000**0.5)
    np.testing.assert_allclose(drawn.std(0), [0.2, 0.05], rtol=0.06)


def test_without_exploration_the_action_is_the_actors_output(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    bundle = make_bundle(kind="gaussian", scale=0.5)
    core = PolicyCore(seed=9, exploring=False)
    [(_, action)] = core.step([weights(1, bundle), (peer, make_step(1))], 0.0)
    assert isinstance(action, Action)
    assert np.array_equal(action.action, Actor(bundle)(np.ones((1, 3), np.float32)))


def test_lockstep_waits_for_the_required_version_and_uses_it(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9, lockstep=True)
    bundles = {version: make_bundle(version) for version in (1, 2, 3)}
    core.step([weights(1, bundles[1])], 0.0)
    assert core.step([(peer, make_step(5, needs_version=2))], 0.0) == []
    outputs = core.step([weights(2, bundles[2]), weights(3, bundles[3])], 0.0)
    [(_, action)] = outputs
    assert isinstance(action, Action)
    assert action.weights_version == 2
    assert np.array_equal(action.action, Actor(bundles[2])(np.full((1, 3), 5, np.float32)))


def test_outside_lockstep_the_server_decodes_only_the_newest_valid_weights(
    make_bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = Bundle.decode
    monkeypatch.setattr(Bundle, "decode", lambda raw, label: decoded.append(label) or decode(raw, label))
    core, lockstep = PolicyCore(seed=9), PolicyCore(seed=9, lockstep=True)
    good = [weights(version, make_bundle(version)) for version in range(1, 6)]
    queued = [*good, weights(6, make_bundle(6), sha256="0" * 64)]
    core.step(queued, 0.0)
    assert (core.version, decoded) == (5, ["weights version 5"])
    assert core.counters == {"weights_refused": 1, "weights_skipped": 4}
    lockstep.step(queued, 0.0)
    assert sorted(lockstep.store.held) == [2, 3, 4, 5]  # lock-step takes all valid versions, and keeps the newest four


def test_weights_are_applied_before_a_command_that_arrives_later(
    operator: Peer, make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9)
    freeze = Command(1, "", "freeze", "", 0, "", b"")
    core.step([weights(1, make_bundle(1)), (operator, freeze), weights(2, make_bundle(2))], 0.0)
    assert (core.version, core.counters["weights_frozen"]) == (1, 1)


def test_invalid_weights_are_refused_and_the_old_policy_stays(
    peer: Peer,
    make_step: Callable[..., Step],
    make_bundle: Callable[..., Bundle],
    spec: RobotSpec,
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = PolicyCore(seed=9)
    good = make_bundle(1)
    core.step([weights(5, good)], 0.0)
    nan = {**good.tensors, "actor.0.bias": np.full(8, np.nan, np.float32)}
    huge = {name: tensor * np.float32(1e30) for name, tensor in good.tensors.items()}
    other = replace(good, spec=replace(spec, name="Other"))
    bad = [
        (weights(6, good, sha256="0" * 64), "hash"),
        (weights(6, good, payload=b"garbage", sha256=sha256(b"garbage")), "not a safetensors file"),
        (weights(6, replace(good, tensors=nan)), "not finite"),
        (weights(6, replace(good, tensors=huge)), "weights version 6 gives actions that are not finite"),
        (weights(6, other), "another robot: robot is 'Toy' here, 'Other' there"),
        (weights(5, make_bundle(2)), "not newer than version 5"),
        (weights(4, make_bundle(2)), "not newer than version 5"),
    ]
    for count, (message, words) in enumerate(bad):
        caplog.clear()
        [(_, action)] = core.step([message, (peer, make_step(count))], 0.0)
        assert isinstance(action, Action)
        assert action.weights_version == 5
        assert core.counters["weights_refused"] == count + 1
        assert words in caplog.text


def test_a_robot_that_left_gets_no_answer(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9)
    core.step([(peer, make_step(0))], 0.0)
    core.step([(peer, Bye("gone"))], 0.0)
    assert core.step([weights(1, make_bundle())], 0.0) == []


def test_a_step_with_a_wrong_observation_size_is_not_answered(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9)
    step = make_step(0, observation=np.zeros((1, 7), np.float32))
    assert core.step([(peer, step), weights(1, make_bundle())], 0.0) == []
    core.step([], 0.1)
    assert core.counters["other_robot"] == 1


def test_in_lockstep_the_server_drops_versions_that_the_learner_makes_again(
    make_bundle: Callable[..., Bundle],
) -> None:
    """The server got versions 1 to 5. The learner resumes at 3 and makes 4 again, with other weights."""
    core = PolicyCore(seed=9, lockstep=True)
    core.step([weights(version, make_bundle(seed=version)) for version in (1, 2, 3, 4, 5)], 0.0)
    core.step([weights(3, make_bundle(seed=3))], 0.1)
    assert sorted(core.store.held) == [2, 3]
    again = make_bundle(seed=40)
    core.step([weights(4, again)], 0.2)
    assert core.version == 4
    assert np.array_equal(core.store.held[4].bundle.tensors["actor.0.weight"], again.tensors["actor.0.weight"])


def test_in_lockstep_the_server_forgets_a_loaded_policy_if_the_learner_returns_to_an_earlier_version(
    make_bundle: Callable[..., Bundle],
) -> None:
    core = PolicyCore(seed=9, lockstep=True)
    core.load(1, make_bundle(seed=1))
    core.step([weights(2, make_bundle(seed=2)), weights(3, make_bundle(seed=3))], 0.0)
    core.load(4, make_bundle(seed=4))
    assert core.store.loaded == [1, 4]
    core.step([weights(2, make_bundle(seed=2))], 0.1)
    assert core.store.loaded == [1]
    assert sorted(core.store.held) == [1, 2]


def test_in_lockstep_the_server_keeps_all_versions_if_it_refuses_weights(make_bundle: Callable[..., Bundle]) -> None:
    core = PolicyCore(seed=9, lockstep=True)
    for version in (1, 2, 3):
        core.load(version, make_bundle(seed=version))
    spec = replace(make_bundle().spec, control_period=0.5)
    core.step([weights(2, replace(make_bundle(), spec=spec))], 0.0)
    assert core.counters["weights_refused"] == 1
    assert sorted(core.store.held) == [1, 2, 3]


def test_each_robot_explores_with_its_own_scale(
    peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    """An actor with zero weights gives the middle of each action range: 1 and 0. The half ranges are 2 and 0.5.

    The scales are small, so that no action is clipped.
    """
    zeros = {name: np.zeros_like(tensor) for name, tensor in make_bundle().tensors.items()}
    core = PolicyCore(seed=9)
    exploration = Exploration("ornstein_uhlenbeck", (0.01, 0.03), {"theta": 0.5})
    core.step([weights(1, replace(make_bundle(), tensors=zeros, exploration=exploration))], 0.0)
    [(_, action)] = core.step([(peer, make_step(70, robots=3))], 0.0)
    assert isinstance(action, Action)
    assert (action.noise_kind, action.noise_seed) == (3, 9)
    noise = OrnsteinUhlenbeck(9, "sim-0", 0, 3, 2, theta=0.5)
    drawn = noise(np.zeros(3, np.uint64), np.full(3, 70, np.uint32))
    expected = drawn * robot_scales((0.01, 0.03), "sim-0", 3) * [2, 0.5] + [1, 0]
    np.testing.assert_allclose(action.action, expected, rtol=1e-5)
