"""Three comparisons: the engine and the plain TD3; two threads and one thread; bfloat16 and float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.algorithms.ddpg import DDPG
from td3_robot.learner.algorithms.table import ALGORITHMS
from td3_robot.learner.algorithms.td3 import TD3
from td3_robot.learner.engine import selection, threads
from td3_robot.learner.engine.td3 import FastTD3
from tests.learner.td3_cases import (
    CONFIGS,
    A,
    B,
    Exact,
    O,
    actions,
    batches,
    distance,
    tensors_of,
    weights_of,
)


@pytest.mark.parametrize("count", [1, 2, 25])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_engine_equals_the_plain_algorithm_in_float64(
    config: LearnerConfig, count: int, device: torch.device
) -> None:
    engine = FastTD3(O, A, (24, 16), config, seed=11, device=device)
    for role in ("online", "target"):  # larger weights: with the initial weights no target action reaches a limit
        tensors_of(engine, role)["actor.2.weight"].mul_(8)
    engine.restored()
    exact, start = Exact(engine), weights_of(engine)
    for batch in batches(count, seed=12):
        errors, expected = engine.learn(batch), exact.learn(batch)
        torch.testing.assert_close(torch.cat(list(errors), 1).cpu().double(), torch.cat(expected, 1), atol=1e-4, rtol=0)
    # float32 has 24 significant bits, so rounding changes a value by up to 6e-8 of its size. Adam divides a gradient by
    # its size, so a relative error of about 1e-6 in a gradient moves a weight by learning_rate * 1e-6. The error is
    # larger only for gradients near ε = 1e-8: rounding can change the sign of such a gradient. Adam's first step then
    # has the opposite direction. After many steps, some ReLU has an input so close to 0 that rounding decides the sign
    # of this input. One sample then counts only in the gradient of the engine, or only in the gradient of the float64
    # algorithm. This changes a mean of gradients by about 3e-5. 25 steps of 1e-3 move a weight by up to 0.025. The
    # tolerance of 5e-5 is 500 times smaller, so the test finds a wrong update.
    near, close = (5e-6, 2e-6) if count <= 2 else (5e-5, 1e-4)
    assert distance(weights_of(engine), weights_of(exact.td3)) < near
    assert distance(weights_of(engine, "target"), weights_of(exact.td3, "target")) < near
    for name, tensor in engine.actor_tensors(averaged=True).items():
        np.testing.assert_allclose(tensor, exact.td3.actor_tensors(averaged=True)[name], atol=near)
    assert distance(weights_of(engine), start) > 2e-4
    # The scale of a gradient changes Adam's moments, but not Adam's steps. So only the moments show a wrong scale. Here
    # the moments are at most about 1.
    for moment in ("adam_mean", "adam_square"):
        expected_moments = weights_of(exact.td3, moment)
        for name, value in weights_of(engine, moment).items():
            assert np.abs(value - expected_moments[name]).max() < close, name
    assert engine.updates == exact.td3.updates == count
    found, wanted = engine.metrics(), exact.td3.metrics()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        limit = 1e-5 if name.startswith(("critic_loss", "q_")) or name == "actor_loss" else 1e-3
        assert found[name] == pytest.approx(value, rel=limit, abs=1e-5), name
    if config.gradient_clip and count > 1:
        assert wanted["critic_gradient_norm"] > config.gradient_clip  # a smaller gradient would not be clipped
    probe = batches(1, seed=13)[0]
    for action in (None, probe.action):
        given = None if action is None else action.double()
        expected_values = exact.td3.values(probe.observation.double(), given)
        torch.testing.assert_close(
            engine.values(probe.observation, action).cpu().double(), expected_values, atol=1e-4, rtol=0
        )


def test_a_subclass_runs_its_own_update(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(TD3):
        """A user's variant of TD3."""

    found = {}
    for kind in (TD3, DDPG, Mine):
        monkeypatch.setattr(ALGORITHMS, "load", lambda _, kind=kind: kind)
        found[kind] = selection.implementation(LearnerConfig())
    assert found == {TD3: FastTD3, DDPG: FastTD3, Mine: Mine}


def test_the_engine_starts_with_the_weights_and_noise_of_the_plain_algorithm() -> None:
    for config in (LearnerConfig(), LearnerConfig(layer_norm=True), LearnerConfig(twin_critics=False)):
        plain, engine = (kind(O, A, (24, 16), config, seed=3) for kind in (TD3, FastTD3))
        for role in ("online", "target"):
            assert distance(weights_of(plain, role), weights_of(engine, role)) == 0
        assert torch.equal(plain.randn_like(torch.empty(B, A)), engine.draw_noise(B))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("kind", [TD3, FastTD3])
def test_bfloat16_stays_near_float32(kind: Any, layer_norm: bool) -> None:
    """The test makes 50 updates in float32 and in bfloat16, and compares the results.

    The RMS difference of values is below 8 % of the RMS change that the float32 updates made. The RMS difference of
    normalised actions is below 0.05.
    """
    ours = {
        precision: kind(O, A, (400, 300), LearnerConfig(precision=precision, layer_norm=layer_norm), seed=7)
        for precision in ("fp32", "bf16")
    }
    probe = batches(1, seed=9, size=256)[0]
    before = ours["fp32"].values(probe.observation, probe.action)
    for batch in batches(50, seed=8, size=256):
        for td3 in ours.values():
            td3.learn(batch)
    q = {precision: td3.values(probe.observation, probe.action) for precision, td3 in ours.items()}
    pi = {precision: actions(td3, probe.observation) for precision, td3 in ours.items()}
    learned = (q["fp32"] - before).square().mean().sqrt()
    q_error = (q["bf16"] - q["fp32"]).square().mean().sqrt()
    pi_error = (pi["bf16"] - pi["fp32"]).square().mean().sqrt()
    print(f"learned {learned:.4f}, q error {q_error:.4f}, pi error {pi_error:.4f}")
    assert q_error < 0.08 * learned
    assert pi_error < 0.05


def test_training_that_began_on_any_device_continues_on_the_cpu(device: torch.device) -> None:
    there, here = FastTD3(O, A, (24, 16), LearnerConfig(), 25, device), FastTD3(O, A, (24, 16), LearnerConfig(), 26)
    stream = batches(4, seed=27)
    for batch in stream[:3]:
        there.learn(batch)
    here.restore(*there.state())
    assert torch.equal(there.draw_noise(B).cpu(), here.draw_noise(B))
    there.learn(stream[3])
    here.learn(stream[3])
    assert distance(weights_of(there), weights_of(here)) < 2e-6  # each device adds numbers in its own order


def test_the_learning_rate_can_be_a_tensor() -> None:
    """One engine has the rate as a Python number, and one has it as a float32 tensor.

    float32 rounds the rate by up to 6e-8 of its value, and a step moves a weight by at most 1e-3. So the two rates
    change a weight by amounts that differ by only 1e-10. The rounding of a weight below 1 adds at most 6e-8.
    """
    number, tensor = (
        FastTD3(O, A, (24, 16), LearnerConfig(learning_rate=0.5), 28, torch.device("cpu")) for _ in range(2)
    )
    tensor.actor_adam.learning_rate = tensor.critics_adam.learning_rate = torch.tensor(0.5)
    for td3 in (number, tensor):
        td3.set_learning_rate(1e-3)
        for batch in batches(2, seed=29):
            td3.learn(batch)
    assert distance(weights_of(number), weights_of(tensor)) < 1e-7


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("where", "hidden", "size"), [("critics", 24, 1), ("critics", 24, 33), ("operators", 256, 256)]
)
def test_two_threads_are_deterministic_and_equal_one_thread(precision: Any, where: Any, hidden: int, size: int) -> None:
    """Sums over half batches round differently from sums over whole batches.

    In fp32, rounding changes a sum of about 1 by about 1e-7. In bf16, each rounding changes a number by up to 2^-9 of
    its size. Torch splits an elementwise operator among threads only above 32,768 elements. So the last case has
    256 · 256 elements.
    """

    def run(count: int) -> dict[str, Any]:
        threads.use_threads(count, where)
        config = LearnerConfig(precision=precision, threads=count, threads_in=where)
        td3 = FastTD3(O, A, (hidden, 16), config, seed=71)
        for batch in batches(4, seed=72, size=size):
            td3.learn(batch)
        return td3.state()[0]

    one, two, again = run(1), run(2), run(2)
    assert all(two[name].tobytes() == again[name].tobytes() for name in two)
    limit = 1e-5 if precision == "fp32" else 2e-2
    for name in (name for name in one if name.startswith("adam_mean/")):
        assert np.abs(two[name] - one[name]).max() < limit * max(1, np.abs(one[name]).max()), name
