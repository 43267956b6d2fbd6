"""TD3 against a float64 reference, against Stable-Baselines3, against itself in bfloat16 and after a restore."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.errors import BundleError
from td3_robot.learner import compute
from td3_robot.learner.replay import Batch, ReplayBuffer
from td3_robot.learner.td3 import TD3
from td3_robot.learner.td3_metrics import GAUGES, MEANS
from tests.learner.reference import Net, ReferenceTD3

O, A, B = 5, 3, 32  # noqa: E741 - observation, action and batch size, as in the docstrings


def batches(count: int, seed: int, size: int = B) -> list[Batch]:
    """Random batches; a quarter or so of the transitions terminate, the others count the next value by 0.9 to 1."""
    print(f"batches from seed {seed}")
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    return [
        Batch(
            normal(size, O),
            torch.from_numpy(random.uniform(-1, 1, (size, A)).astype(np.float32)),
            normal(size, 1),
            normal(size, O),
            torch.from_numpy(
                (random.uniform(0.9, 1, (size, 1)) * (random.random((size, 1)) > 0.25)).astype(np.float32)
            ),
        )
        for _ in range(count)
    ]


def noise_to_come(td3: TD3, size: int = B, actions: int = A) -> torch.Tensor:
    """The standard normal numbers float32[B, A] that the next update will draw."""
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(td3.state()[0]["generator"]))
    return torch.randn((size, actions), generator=generator)


def nets_of(td3: TD3, role: str = "online") -> dict[str, Net]:
    """The networks in float64, in the form of reference.py."""
    nets: dict[str, Net] = {}
    for name, array in td3.state()[0].items():
        if name.startswith(role + "/"):
            head, index, kind = name.removeprefix(role + "/").split(".")
            net = nets.setdefault(head, [])
            if int(index) == len(net):
                net.append({})
            net[int(index)][kind] = array.astype(np.float64)
    return nets


def distance(a: dict[str, Net], b: dict[str, Net]) -> float:
    """The largest difference of any parameter."""
    return max(
        float(np.abs(x[key] - y[key]).max()) for name in a for x, y in zip(a[name], b[name], strict=True) for key in x
    )


CONFIGS = {
    "as published": LearnerConfig(learning_rate=1e-3),
    "layer norm": LearnerConfig(learning_rate=1e-3, layer_norm=True),
    "two threads": LearnerConfig(learning_rate=1e-3, layer_norm=True, threads=2),
    "other constants": LearnerConfig(
        learning_rate=3e-4, polyak=0.1, target_noise=0.5, target_noise_clip=0.3, policy_delay=3
    ),
    "DDPG": LearnerConfig(algorithm="ddpg", twin_critics=False, target_noise=0.0, policy_delay=1, learning_rate=1e-3),
    "one critic": LearnerConfig(twin_critics=False, learning_rate=1e-3),
    "no smoothing": LearnerConfig(target_noise=0.0, learning_rate=1e-3),
    "no delay": LearnerConfig(policy_delay=1, learning_rate=1e-3),
    "Huber": LearnerConfig(critic_loss="huber", learning_rate=1e-3),
    "clipped": LearnerConfig(gradient_clip=0.2, learning_rate=1e-3),
    "all at once": LearnerConfig(
        critic_loss="huber", gradient_clip=0.3, layer_norm=True, policy_delay=1, learning_rate=1e-3
    ),
}


@pytest.mark.parametrize("count", [1, 2, 25])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_equals_the_float64_reference(config: LearnerConfig, count: int, device: torch.device) -> None:
    td3 = TD3(O, A, (24, 16), config, seed=11, device=device)
    td3.actor.named["actor.2.weight"].mul_(8)  # a fresh actor is timid: target actions would never meet their limits
    td3.actor.refresh()
    td3.actor_target.track(td3.actor, 1.0)
    reference = ReferenceTD3(nets_of(td3), config)
    start = nets_of(td3)
    losses = []
    for batch in batches(count, seed=12):
        noise = noise_to_come(td3).numpy().astype(np.float64)
        errors = td3.update(batch)
        s, a, r, s2, discount = (tensor.numpy().astype(np.float64) for tensor in batch)
        expected_errors = reference.update(s, a, r[:, 0], s2, discount[:, 0], noise)
        np.testing.assert_allclose(torch.cat(errors, 1).numpy().T, expected_errors, atol=1e-4)
        losses.append((reference.critic_loss, reference.q_mean, reference.q_target_mean))
    # A float32 has 24 bits: 6e-8 of the value. Adam divides a gradient by its own size, so a gradient with a relative
    # error of some 1e-6 moves a weight by learning_rate * 1e-6; only gradients near ε = 1e-8, where Adam's first step
    # turns on their sign, are worse. In many steps a ReLU comes within rounding of its kink, and which side it falls on
    # is the processor's order of summation: one of 256 samples then counts in one gradient and not in the other, seen
    # as 3e-5 in a mean of gradients. 25 steps of 1e-3 move a weight by up to 0.025, 500 times the looser tolerance.
    near, close = (5e-6, 2e-6) if count <= 2 else (5e-5, 1e-4)
    assert distance(nets_of(td3), reference.nets) < near
    assert distance(nets_of(td3, "target"), reference.targets) < near
    assert distance(nets_of(td3), start) > 2e-4
    # Adam hides a gradient's scale; its moments do not. They are means of gradients, here up to about 1.
    assert distance(nets_of(td3, "adam_mean"), {name: adam.mean for name, adam in reference.adams.items()}) < close
    assert distance(nets_of(td3, "adam_square"), {name: adam.square for name, adam in reference.adams.items()}) < close
    assert td3.updates == reference.updates == count
    metrics = td3.metrics()
    expected = dict(zip(("critic_loss", "q_mean", "q_target_mean"), np.mean(losses, 0), strict=True))
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    critics = [norm for name, norm in reference.norms.items() if name != "actor"]
    assert metrics["critic_gradient_norm"] == pytest.approx(np.hypot.reduce(critics), rel=1e-4)
    if config.gradient_clip and count > 1:
        assert max(critics) > config.gradient_clip  # or nothing was tested
    if count >= config.policy_delay:
        assert metrics["actor_gradient_norm"] == pytest.approx(reference.norms["actor"], rel=1e-3)
    if count == config.policy_delay:
        assert metrics["actor_loss"] == pytest.approx(reference.actor_loss, rel=1e-5, abs=1e-5)


def test_policy_and_targets_wait_for_the_delayed_step() -> None:
    td3 = TD3(O, A, (24, 16), LearnerConfig(policy_delay=3, polyak=0.005), seed=1)
    start, start_targets = nets_of(td3), nets_of(td3, "target")
    assert distance(start, start_targets) == 0
    first, second, third = batches(3, seed=2)
    td3.update(first)
    td3.update(second)
    assert distance({"actor": start["actor"]}, {"actor": nets_of(td3)["actor"]}) == 0
    assert distance(start_targets, nets_of(td3, "target")) == 0
    assert distance({"critic1": start["critic1"]}, {"critic1": nets_of(td3)["critic1"]}) > 0
    td3.update(third)
    online, targets = nets_of(td3), nets_of(td3, "target")
    assert distance({"actor": start["actor"]}, {"actor": online["actor"]}) > 0
    # θ' ← θ' + 0.005 (θ - θ')
    moved = start["critic1"][1]["weight"] + 0.005 * (online["critic1"][1]["weight"] - start["critic1"][1]["weight"])
    np.testing.assert_allclose(targets["critic1"][1]["weight"], moved, atol=1e-8)


def test_a_termination_ignores_what_follows_and_a_truncation_does_not() -> None:
    (batch,) = batches(1, seed=3)
    elsewhere = batch._replace(next_observation=batch.next_observation + 1)
    for on, same in ((torch.zeros(B, 1), True), (torch.ones(B, 1), False)):
        a, b = (TD3(O, A, (24, 16), LearnerConfig(), seed=4) for _ in range(2))
        a.update(batch._replace(discount=on))
        b.update(elsewhere._replace(discount=on))
        assert (distance(nets_of(a), nets_of(b)) == 0) is same


def test_equals_stable_baselines3(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    class Nothing(gymnasium.Env):  # type: ignore[misc,name-defined]
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (O,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (A,), np.float32)

    config = LearnerConfig(learning_rate=1e-3)
    td3 = TD3(O, A, (24, 16), config, seed=5)
    theirs: Any = sb3.TD3(
        "MlpPolicy", Nothing(), learning_rate=1e-3, policy_kwargs={"net_arch": [24, 16]}, device="cpu", buffer_size=1
    )
    theirs.set_logger(Logger(None, []))
    copies = [(td3.actor, "actor", theirs.actor.mu), (td3.actor, "actor", theirs.actor_target.mu)]
    for head, index in (("critic1", 0), ("critic2", 1)):
        copies += [(td3.critics, head, c.q_networks[index]) for c in (theirs.critic, theirs.critic_target)]
    for network, head, module in copies:
        linear = [layer for layer in module if isinstance(layer, torch.nn.Linear)]
        for i, layer in enumerate(linear):
            layer.weight.data.copy_(network.named[f"{head}.{i}.weight"])
            layer.bias.data.copy_(network.named[f"{head}.{i}.bias"])

    for batch in batches(20, seed=6):
        batch = batch._replace(discount=0.99 * (batch.discount > 0).float())
        noise = noise_to_come(td3) * config.target_noise
        samples = ReplayBufferSamples(
            batch.observation, batch.action, batch.next_observation, (batch.discount == 0).float(), batch.reward, None
        )
        td3.update(batch)
        with monkeypatch.context() as patch:
            patch.setattr(theirs.replay_buffer, "sample", lambda *_a, samples=samples, **_k: samples)
            patch.setattr(torch.Tensor, "normal_", lambda _self, *_a, noise=noise: noise)
            theirs.train(gradient_steps=1, batch_size=B)

    # Both are float32 with differently ordered sums; 20 steps of 1e-3 move a weight by up to 0.02.
    for network, head, module in copies:
        if module in (theirs.actor_target.mu, *theirs.critic_target.q_networks):
            network = td3.actor_target if head == "actor" else td3.critics_target
        linear = [layer for layer in module if isinstance(layer, torch.nn.Linear)]
        for i, layer in enumerate(linear):
            torch.testing.assert_close(network.named[f"{head}.{i}.weight"], layer.weight.data, atol=2e-5, rtol=0)
            torch.testing.assert_close(network.named[f"{head}.{i}.bias"], layer.bias.data, atol=2e-5, rtol=0)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_bfloat16_stays_near_float32(layer_norm: bool) -> None:
    """After 50 updates the values differ by 8 % of what was learned, and the actions by 0.05 of half their range."""
    ours = {
        precision: TD3(O, A, (400, 300), LearnerConfig(precision=precision, layer_norm=layer_norm), seed=7)
        for precision in ("fp32", "bf16")
    }
    probe = batches(1, seed=9, size=256)[0]
    before = ours["fp32"].critics.forward(torch.cat((probe.observation, probe.action), 1))[0]
    for batch in batches(50, seed=8, size=256):
        for td3 in ours.values():
            td3.update(batch)
    q, pi = {}, {}
    for precision, td3 in ours.items():
        q[precision] = td3.critics.forward(torch.cat((probe.observation, probe.action), 1))[0]
        pi[precision] = td3.actor.forward(probe.observation)[0].tanh()
    learned = (q["fp32"] - before).square().mean().sqrt()
    q_error = (q["bf16"] - q["fp32"]).square().mean().sqrt()
    pi_error = (pi["bf16"] - pi["fp32"]).square().mean().sqrt()
    print(f"learned {learned:.4f}, q error {q_error:.4f}, pi error {pi_error:.4f}")
    assert q_error < 0.08 * learned
    assert pi_error < 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_goes_on_bit_for_bit_after_a_restore(precision: Any, layer_norm: bool, device: torch.device) -> None:
    config = LearnerConfig(precision=precision, layer_norm=layer_norm)
    through, stopped = (TD3(O, A, (40, 30), config, seed=21, device=device) for _ in range(2))
    stream = batches(9, seed=22)
    for batch in stream[:5]:  # an odd number: between two delayed steps
        through.update(batch)
        stopped.update(batch)
    arrays, scalars = stopped.state()
    stopped.update(stream[8])  # must not reach what was saved
    resumed = TD3(O, A, (40, 30), config, seed=99, device=device)
    resumed.restore(arrays, json.loads(json.dumps(scalars)))
    for batch in stream[5:]:
        through.update(batch)
        resumed.update(batch)
    expected, found = through.state(), resumed.state()
    assert expected[1] == found[1]
    assert list(expected[0]) == list(found[0])
    for name, array in expected[0].items():
        assert array.tobytes() == found[0][name].tobytes(), name
    assert through.metrics() == resumed.metrics()


def test_a_state_goes_on_on_any_device(device: torch.device) -> None:
    there, here = TD3(O, A, (24, 16), LearnerConfig(), 25, device), TD3(O, A, (24, 16), LearnerConfig(), 26)
    stream = batches(4, seed=27)
    for batch in stream[:3]:
        there.update(batch)
    here.restore(*there.state())
    assert torch.equal(there.draw_noise(B).cpu(), here.draw_noise(B))
    there.update(stream[3])
    here.update(stream[3])
    assert distance(nets_of(there), nets_of(here)) < 2e-6  # as to the reference


def test_the_learning_rate_can_lie_on_the_device(device: torch.device) -> None:
    """As a float32 it is off by up to 6e-8 of itself; a step moves a weight by 1e-3 at most."""
    number, tensor = (TD3(O, A, (24, 16), LearnerConfig(learning_rate=0.5), 28, device) for _ in range(2))
    for adam in (tensor.actor_adam, tensor.critics_adam):
        adam.learning_rate = rate = torch.tensor(0.5, device=device)
    tensor.actor_adam.learning_rate = rate
    for td3 in (number, tensor):
        td3.set_learning_rate(1e-3)
        for batch in batches(2, seed=29):
            td3.update(batch)
    assert distance(nets_of(number), nets_of(tensor)) < 1e-7


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_seed_decides_the_run_and_the_global_generator_does_not(precision: Any) -> None:
    def run(seed: int, global_seed: int) -> dict[str, Any]:
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        td3 = TD3(O, A, (24, 16), LearnerConfig(precision=precision), seed)
        for batch in batches(4, seed=31):
            td3.update(batch)
        assert torch.equal(before, torch.get_rng_state())
        return td3.actor_tensors()

    first, again, other = run(1, 1), run(1, 2), run(2, 1)
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert all(not np.array_equal(first[name], other[name]) for name in first)


def test_actor_tensors_are_copies_in_layer_order() -> None:
    td3 = TD3(O, A, (24, 16), LearnerConfig(), seed=41)
    tensors = td3.actor_tensors()
    assert {name: array.shape for name, array in tensors.items()} == {
        "actor.0.weight": (24, O),
        "actor.0.bias": (24,),
        "actor.1.weight": (16, 24),
        "actor.1.bias": (16,),
        "actor.2.weight": (A, 16),
        "actor.2.bias": (A,),
    }
    assert list(tensors) == [f"actor.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in tensors.values())
    before = {name: array.copy() for name, array in tensors.items()}
    for batch in batches(2, seed=42):
        td3.update(batch)
    assert all(np.array_equal(before[name], tensors[name]) for name in tensors)


def test_metrics_are_means_since_the_last_call() -> None:
    td3 = TD3(O, A, (24, 16), LearnerConfig(policy_delay=2), seed=51)
    assert td3.metrics() == dict.fromkeys((*MEANS, *GAUGES), 0.0)
    first, second = batches(2, seed=52)
    td3.update(first)
    assert td3.metrics()["actor_loss"] == 0.0
    td3.update(second)
    metrics = td3.metrics()
    assert metrics["actor_loss"] != 0.0
    assert all(td3.metrics()[name] == 0.0 for name in MEANS)
    assert all(td3.metrics()[name] == metrics[name] for name in GAUGES)  # of the newest update still


def test_gauges_by_hand() -> None:
    """All rewards 3 and nothing beyond: |y| = 3. An actor whose last bias is +9 in one of three dimensions: 1/3."""
    td3 = TD3(O, A, (24, 16), LearnerConfig(policy_delay=1), seed=53)
    td3.actor.named["actor.2.bias"][1] = 9.0  # tanh 9 = 0.99999997
    td3.actor.refresh()
    (batch,) = batches(1, seed=54)
    td3.update(batch._replace(reward=torch.full((B, 1), -3.0), discount=torch.zeros(B, 1)))
    metrics = td3.metrics()
    assert metrics["q_target_size"] == 3.0
    assert metrics["action_saturation"] == pytest.approx(1 / 3)


def test_clipping_keeps_the_direction_and_bounds_the_norm() -> None:
    """A first step of Adam hides a gradient's scale, its first moment is 0.1 g: |g| of each critic is 0.01 then."""
    plain, clipped = (TD3(O, A, (24, 16), LearnerConfig(gradient_clip=clip), seed=55) for clip in (None, 0.01))
    (batch,) = batches(1, seed=56)
    for td3 in (plain, clipped):
        td3.update(batch)
    moments, free = nets_of(clipped, "adam_mean"), nets_of(plain, "adam_mean")
    for name in ("critic1", "critic2"):
        short, long = (
            np.concatenate([v.ravel() for layer in m[name] for v in layer.values()]) for m in (moments, free)
        )
        assert np.linalg.norm(short) == pytest.approx(0.001, rel=1e-5)
        np.testing.assert_allclose(short / np.linalg.norm(short), long / np.linalg.norm(long), atol=1e-6)
    wide = TD3(O, A, (24, 16), LearnerConfig(gradient_clip=1e6), seed=55)
    wide.update(batch)
    assert distance(nets_of(wide), nets_of(plain)) == 0


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("adam_mean/critic2.1.bias", None),
        ("online/actor.0.weight", np.zeros((2, 2), np.float32)),
        ("online/actor.0.weight", np.zeros((24, O), np.float64)),
        ("generator", None),
        ("generator", np.zeros(10, np.uint8)),
        ("updates", None),
        ("updates", "many"),
        ("gauges", {"q_target_size": 1.0}),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, replacement: Any) -> None:
    td3 = TD3(O, A, (24, 16), LearnerConfig(), seed=61)
    arrays, scalars = TD3(O, A, (24, 16), LearnerConfig(), seed=62).state()
    part = arrays if name in arrays else scalars
    del part[name]
    if replacement is not None:
        part[name] = replacement
    before = td3.state()[0]
    with pytest.raises(BundleError, match="TD3 state"):
        td3.restore(arrays, scalars)
    assert all(array.tobytes() == before[name].tobytes() for name, array in td3.state()[0].items())


def test_the_averaged_policy_by_hand(seed: int) -> None:
    """Weight 0.4, delay 1. After update 1 it is the actor; then 1/2 each (a mean); from 3 on 0.4 of the new."""
    config = LearnerConfig(batch_size=8, policy_delay=1, policy_average=0.4)
    td3 = TD3(3, 2, (4,), config, seed=1)
    plain = TD3(3, 2, (4,), LearnerConfig(batch_size=8, policy_delay=1), seed=1)
    buffer = ReplayBuffer(50, 3, 2, seed=2)
    rng = np.random.default_rng(seed)
    observation, following = (rng.normal(size=(50, 3)).astype(np.float32) for _ in range(2))
    action = rng.uniform(-1, 1, (50, 2)).astype(np.float32)
    buffer.add(observation, action, rng.normal(size=50).astype(np.float32), following, np.full(50, 0.99, np.float32))
    assert np.array_equal(td3.actor_tensors(averaged=True)["actor.0.weight"], td3.actor_tensors()["actor.0.weight"])
    expected = np.zeros(0)
    for weight in (1.0, 0.5, 0.4, 0.4):
        batch = buffer.sample(8)
        td3.update(batch)
        plain.update(batch)
        actor = td3.actor_tensors()["actor.0.weight"].astype(float)
        expected = actor if weight == 1.0 else (1 - weight) * expected + weight * actor
        np.testing.assert_allclose(td3.actor_tensors(averaged=True)["actor.0.weight"], expected, rtol=1e-5, atol=1e-7)
    assert np.array_equal(
        plain.actor_tensors()["actor.0.weight"], td3.actor_tensors()["actor.0.weight"]
    )  # learns alike
    other = TD3(3, 2, (4,), config, seed=9)
    other.restore(*td3.state())
    kept = other.actor_tensors(averaged=True)
    assert all(np.array_equal(kept[name], value) for name, value in td3.actor_tensors(averaged=True).items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("where", "hidden", "size"), [("critics", 24, 1), ("critics", 24, 33), ("operators", 256, 256)]
)
def test_two_threads_do_the_same_each_time_and_what_one_does(
    precision: Any, where: Any, hidden: int, size: int
) -> None:
    """Halves of a batch round otherwise than the whole: fp32 by 1e-7 of sums of size one, bf16 by up to 2^-9 each.

    Operators are shared out from 32,768 elements on.
    """

    def run(threads: int) -> dict[str, Any]:
        compute.use_threads(threads, where)
        config = LearnerConfig(precision=precision, threads=threads, threads_in=where)
        td3 = TD3(O, A, (hidden, 16), config, seed=71)
        for batch in batches(4, seed=72, size=size):
            td3.update(batch)
        return td3.state()[0]

    one, two, again = run(1), run(2), run(2)
    assert all(two[name].tobytes() == again[name].tobytes() for name in two)
    limit = 1e-5 if precision == "fp32" else 2e-2
    for name in (name for name in one if name.startswith("adam_mean/")):
        assert np.abs(two[name] - one[name]).max() < limit * max(1, np.abs(one[name]).max()), name
