"""Each exploration noise depends only on seed, source, incarnation, robot, episode and step."""

from __future__ import annotations

import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot import noises
from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.config import loading
from td3_robot.core_types import Peer
from td3_robot.errors import BundleError, ConfigError
from td3_robot.messages import Action, Step, Weights
from td3_robot.noises import NOISES
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.noise import (
    Categorical,
    Gaussian,
    Noise,
    OrnsteinUhlenbeck,
    Uniform,
    blocks_remembered,
    robot_scales,
)
from td3_robot.policy.noise_v2 import CategoricalV2, GaussianV2, OrnsteinUhlenbeckV2, UniformV2
from tests.conftest import install_metadata

KINDS: list[type[Noise]] = [
    *(Gaussian, Uniform, OrnsteinUhlenbeck, Categorical),
    *(GaussianV2, UniformV2, OrnsteinUhlenbeckV2, CategoricalV2),
]
CONFIGURABLE = "gaussian, ornstein_uhlenbeck, gaussian_v2, ornstein_uhlenbeck_v2"
IDENTITY: dict[str, Any] = {"seed": 1, "source": "sim-0", "incarnation": 0, "robots": 1, "actions": 10}


def made(kind: type[Noise], seed: int, robots: int, actions: int, **parameters: float) -> Noise:
    theta = {"theta": 0.15} if issubclass(kind, OrnsteinUhlenbeck) else {}
    return kind(seed, "sim-0", 0, robots, actions, **{**theta, **parameters})


def ask(noise: Noise, episode: list[int], step: list[int]) -> np.ndarray:
    return noise(np.array(episode, np.uint64), np.array(step, np.uint32))


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**64 - 1),
    moments=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_the_order_of_requests_does_not_matter(
    kind: type[Noise], seed: int, moments: list[tuple[int, int]], order: object
) -> None:
    forward = made(kind, seed, 1, 3)
    first = {moment: ask(forward, [moment[0]], [moment[1]]) for moment in moments}
    shuffled = list(moments)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = made(kind, seed, 1, 3)
    for episode, step in shuffled:
        assert np.array_equal(ask(again, [episode], [step]), first[episode, step])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("actions", [1, 2, 5, 17])
def test_one_draw_for_all_robots_equals_one_draw_for_each_robot(kind: type[Noise], actions: int, seed: int) -> None:
    """One draw for 64 robots gives the same bits as 64 draws for one robot each."""
    together, apart = (made(kind, seed, 64, actions) for _ in range(2))
    episode, number = np.arange(64, dtype=np.uint64) * np.uint64(2**40), np.arange(64, dtype=np.uint32) % np.uint32(5)
    drawn = together.draw(np.arange(64), episode, number)
    assert (drawn.shape, drawn.dtype) == ((64, *together.shape), np.float32)
    for robot in range(64):
        assert np.array_equal(apart.draw(np.array([robot]), episode, number)[0], drawn[robot])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("robots", [1, 5, 64])
def test_the_number_of_robots_does_not_change_the_noise_of_a_robot(kind: type[Noise], robots: int, seed: int) -> None:
    few, many = made(kind, seed, robots, 3), made(kind, seed, 1024, 3)
    for step in (0, 15, 16, 63, 64, 255, 256, 1000):
        expected = ask(many, [7] * 1024, [step] * 1024)[:robots]
        assert np.array_equal(ask(few, [7] * robots, [step] * robots), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_of_a_robot_does_not_depend_on_the_steps_of_other_robots(kind: type[Noise], seed: int) -> None:
    """In both calls, robot 1 is at step 70 of episode 2, so it gets the same noise.

    The episodes and steps of the other robots differ between the calls.
    """
    together = ask(made(kind, seed, 3, 2), [0, 2, 9], [5, 70, 200])
    apart = ask(made(kind, seed, 3, 2), [4, 2, 1], [64, 70, 63])
    assert np.array_equal(together[1], apart[1])
    assert not np.array_equal(together[0], apart[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_the_identity_changes_the_noise(kind: type[Noise]) -> None:
    theta = {"theta": 0.15} if issubclass(kind, OrnsteinUhlenbeck) else {}
    base: dict[str, Any] = {**IDENTITY, "robots": 2, "actions": 4, **theta}
    reference = ask(kind(**base), [1, 1], [10, 10])
    assert not np.array_equal(reference[0], reference[1])  # robots differ
    for change in ({"seed": 2}, {"source": "sim-1"}, {"incarnation": 1}):
        assert not np.array_equal(ask(kind(**{**base, **change}), [1, 1], [10, 10]), reference), change
    noise = kind(**base)
    assert not np.array_equal(ask(noise, [2, 2], [10, 10]), reference)
    assert not np.array_equal(ask(noise, [1, 1], [11, 11]), reference)
    assert np.array_equal(ask(noise, [1, 1], [10, 10]), reference)


@pytest.mark.parametrize(
    ("white", "process"),
    [(Gaussian, OrnsteinUhlenbeck), (GaussianV2, OrnsteinUhlenbeckV2)],
    ids=["one robot at a time", "all robots at once"],
)
def test_gaussian_and_ornstein_uhlenbeck_noise_draw_different_numbers(white: type[Noise], process: type[Noise]) -> None:
    """With θ = 1, Ornstein-Uhlenbeck noise equals the normal numbers that drive the process."""
    normal, driving = ask(white(**IDENTITY), [0], [0]), ask(process(**IDENTITY, theta=1.0), [0], [0])
    assert not np.array_equal(normal, driving)


@pytest.mark.parametrize(
    ("white", "flat"), [(Gaussian, Uniform), (GaussianV2, UniformV2)], ids=["one robot at a time", "all robots at once"]
)
def test_the_distributions_have_the_expected_moments(white: type[Noise], flat: type[Noise]) -> None:
    """10,000 draws with a fixed seed.

    Uniform numbers from 0 to 1 have the standard deviation 1/√12 = 0.289. The means are within four standard errors:
    4 · 1/√10⁴ = 0.04 and 4 · 0.289/√10⁴ = 0.012.
    """
    normal, uniform = (
        np.concatenate([ask(noise, [0], [step]) for step in range(1000)])
        for noise in (white(**IDENTITY), flat(**IDENTITY))
    )
    assert abs(normal.mean()) < 0.04
    assert abs(normal.std() - 1) < 0.04
    assert abs(uniform.mean() - 0.5) < 0.012
    assert 0 <= uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1
    assert abs(np.corrcoef(normal[:-1, 0], normal[1:, 0])[0, 1]) < 0.13  # 4/√999: steps are independent


def test_numbers_drawn_at_once_are_independent_and_normal() -> None:
    """256 robots draw 16 steps of 6 actions: 24,576 numbers with a fixed seed.

    The bounds of the means are four standard errors. The standard error of the mean of n numbers is 1/√n. The mean of
    their fourth powers is 3, with standard error √(96/n). The standard error of a correlation over m pairs is 1/√m.
    Kolmogorov's distance is above 1.63/√n with probability 1 %.
    """
    noise = GaussianV2(7, "sim-0", 0, 256, 6)
    drawn = noise.draw(np.arange(256), np.zeros(256, np.uint64), np.zeros(256, np.uint32)).astype(np.float64)
    n = drawn.size
    assert n == 24_576
    assert abs(drawn.mean()) < 4 / n**0.5
    assert abs((drawn**4).mean() - 3) < 4 * (96 / n) ** 0.5
    sample = np.sort(drawn.ravel())
    expected = np.array([0.5 * math.erfc(-value / 2**0.5) for value in sample])
    assert abs(expected - np.arange(n) / n).max() < 1.63 / n**0.5
    neighbours = {
        "robots": (drawn[1:], drawn[:-1]),
        "steps": (drawn[:, 1:], drawn[:, :-1]),
        "channels": (drawn[:, :, 1:], drawn[:, :, :-1]),
        # One random word gives two channels: 0 and 3, 1 and 4, or 2 and 5.
        "channels of one word": (drawn[:, :, 3:], drawn[:, :, :3]),
    }
    for name, (one, other) in neighbours.items():
        assert abs((one * other).mean()) < 4 / one.size**0.5, name


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("gaussian", ["uniform", "categorical", "none"]),
        ("sign", ["uniform", "categorical", "none"]),
        ("gaussian_v2", ["uniform_v2", "categorical_v2", "none"]),
        ("ornstein_uhlenbeck_v2", ["uniform_v2", "categorical_v2", "none"]),
    ],
)
def test_all_noises_of_a_run_have_the_version_of_the_configured_noise(configured: str, expected: list[str]) -> None:
    assert [noises.like(kind, configured) for kind in ("uniform", "categorical", "none")] == expected


def test_the_gaussian_stream_equals_its_definition() -> None:
    """The stream is part of the protocol, because later versions must be able to recompute a recorded action."""
    drawn = ask(Gaussian(42, "sim-0", 0, 1, 2), [3], [65])
    generator = np.random.Generator(
        np.random.Philox(
            key=np.random.SeedSequence([42, zlib.crc32(b"sim-0"), 0]).generate_state(2, np.uint64),
            counter=np.array([0, 1, 1, 3], np.uint64),  # draw, NUMBER of Gaussian, block 65 // 64, episode
        )
    )
    assert np.array_equal(drawn[0], generator.standard_normal((64, 2), np.float32)[1])  # 65 % 64 = 1


@pytest.mark.parametrize("kind", [Categorical, CategoricalV2])
def test_categorical_draws_from_the_softmax_of_the_scores(
    kind: type[Noise], make_bundle: Callable[..., Bundle]
) -> None:
    """10,000 draws with a fixed seed. Each frequency is within four standard errors: 4 · √(p (1 - p) / 10⁴) <= 0.02.

    All weights are zero, so every observation has the same scores: tanh(bias) · half range + middle.
    """
    bundle = make_bundle()
    tensors = {name: np.zeros_like(tensor) for name, tensor in bundle.tensors.items()}
    last = f"actor.{len(bundle.hidden)}.bias"
    tensors[last] = np.float32([0.1, -0.3])
    actor = Actor(replace(bundle, tensors=tensors))
    noise, observation = kind(1, "sim-0", 0, 1, 2), np.zeros((1, bundle.spec.observation_size), np.float32)
    logits = actor(observation)[0].astype(np.float64) / 0.5
    scale = np.full((1, 2), 0.5, np.float32)
    drawn = np.concatenate(
        [
            noise.act(actor, observation, np.array([0], np.uint64), np.array([step], np.uint32), scale)
            for step in range(10_000)
        ]
    )
    low, high = bundle.spec.action_low, bundle.spec.action_high
    chosen = (drawn == high).argmax(1)
    assert np.array_equal(drawn, np.where(chosen[:, None] == np.arange(2), high, low))
    np.testing.assert_allclose(np.mean(chosen == 0), 1 / (1 + np.exp(logits[1] - logits[0])), atol=0.02)


@pytest.mark.parametrize("kind", [OrnsteinUhlenbeck, OrnsteinUhlenbeckV2])
@pytest.mark.parametrize("theta", [0.15, 0.5])
def test_ornstein_uhlenbeck_equals_its_definition_as_a_sum(kind: type[Noise], theta: float, seed: int) -> None:
    """x(t) is the sum of (1 - θ)^k ε(t - k) for k = 0 to t. With θ = 1, x is ε.

    The tolerances cover two errors. float32 has a relative precision of 6e-8. The noise also omits old terms, whose
    weights for θ = 0.15 are at most (1 - θ)^(64 · 2) = 9e-10.
    """
    noise, white = made(kind, seed, 1, 3, theta=theta), made(kind, seed, 1, 3, theta=1.0)
    driving = np.concatenate([ask(white, [4], [step]) for step in range(400)]).astype(np.float64)
    assert abs(driving.std() - 1) < 0.15
    for step in (0, 1, 63, 64, 65, 191, 192, 399):
        expected = sum((1 - theta) ** k * driving[step - k] for k in range(step + 1))
        np.testing.assert_allclose(ask(noise, [4], [step])[0], expected, rtol=2e-7, atol=1e-6)


def test_ornstein_uhlenbeck_remembers_only_the_blocks_it_needs() -> None:
    """n blocks of 64 steps are enough if (1 - θ)^(64 n) <= 2^-24 = 6e-8.

    For θ = 0.15, one block is not enough: 0.85^64 = 3e-5. Two blocks are enough: 0.85^128 = 9e-10. For θ = 0.01,
    0.99^64 is e^-0.6432, so n must be at least 24 ln 2 / 0.6432 = 25.9.
    """
    assert blocks_remembered(0.15) == 2
    assert blocks_remembered(0.01) == 26
    assert blocks_remembered(1.0) == 1
    assert blocks_remembered(0.5) == 1


def test_ornstein_uhlenbeck_has_the_expected_variance_and_correlation() -> None:
    """The variance tends to 1 / (1 - 0.85²) = 3.6036, so the standard deviation tends to 1.898.

    The seed is fixed. The correlation of successive steps is 0.85. With this correlation, the effective sample size
    of n numbers is at least n (1 - 0.85) / 2. So 3,800 steps of 10 actions have an effective sample size of at least
    3800 · 10 · 0.15 / 2 = 2850. Three standard errors of the standard deviation, 3/√(2 · 2850), are below 4 %. The
    first 200 steps do not count, because the process begins at 0.
    """
    noise = OrnsteinUhlenbeck(**IDENTITY, theta=0.15)
    x = np.concatenate([ask(noise, [0], [step]) for step in range(4000)])[200:]
    assert abs(x.std() / 1.898 - 1) < 0.04
    assert abs(np.mean(x[1:] * x[:-1]) / np.mean(x * x) - 0.85) < 0.01


def test_robot_scales_match_a_hand_calculation() -> None:
    """crc32("a") = 0xE8B7BE43 = 0.90905 · 2^32. Robot i of 4 has the scale 0.1 + 0.4 · (i + 0.90905) / 4."""
    scales = robot_scales((0.1, 0.5), "a", 4)
    assert scales.shape == (4, 1)
    np.testing.assert_allclose(scales[:, 0], [0.190905, 0.290905, 0.390905, 0.490905], atol=1e-5)
    assert robot_scales(0.1, "a", 2).tolist() == [[np.float32(0.1)], [np.float32(0.1)]]
    alone = [float(robot_scales((0.0, 1.0), f"sim-{i}", 1)[0, 0]) for i in range(20)]
    assert len(set(alone)) == 20
    assert max(alone) - min(alone) > 0.5


SIGN_NOISE = '''
import numpy as np
from td3_robot.noises import Parameter
from td3_robot.policy.noise import Noise

class Sign(Noise):
    """Plus or minus ``size``, each with the probability 1/2."""

    NUMBER = {number}
    PARAMETERS = {{"size": Parameter(1.0, 0.0, 4.0)}}

    def block(self, generator):
        return self.parameters["size"] * np.where(generator.random(self.shape) < 0.5, -1.0, 1.0)
'''


@pytest.fixture
def install_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a package with the module ``sign_noise`` of this source and these entry points.

    The fixture removes the package after the test.
    """

    def installed(source: str, rows: str) -> None:
        (tmp_path / "sign_noise.py").write_text(source)
        install_metadata(tmp_path, "sign_noise", "td3_robot.noises", rows)
        monkeypatch.syspath_prepend(tmp_path)
        NOISES.__dict__.pop("rows", None)

    yield installed
    NOISES.__dict__.pop("rows", None)
    sys.modules.pop("sign_noise", None)


@pytest.fixture
def install(install_module: Callable[[str, str], None]) -> Callable[[int], None]:
    """Installs a package that adds the noise ``sign`` with this NUMBER."""
    return lambda number: install_module(SIGN_NOISE.format(number=number), "sign = sign_noise:Sign")


def test_an_installed_package_adds_a_noise(
    install: Callable[[int], None],
    make_bundle: Callable[..., Bundle],
    make_step: Callable[..., Step],
    peer: Peer,
) -> None:
    """An actor with zero weights gives the middles of the action ranges, (1, 0). The half ranges are 2 and 0.5.

    With size 2 and scale 0.1, the noise changes an action by ±2 · 0.1 · (2, 0.5) = ±(0.4, 0.1).
    """
    install(1000)
    config = loading.parse({"exploration": {"kind": "sign", "parameters": {"size": 2.0}}}).exploration
    exploration = Exploration(config.kind, config.noise, config.noise_parameters())
    zeros = {name: np.zeros_like(tensor) for name, tensor in make_bundle().tensors.items()}
    payload = replace(make_bundle(), tensors=zeros, exploration=exploration).encode()
    core = PolicyCore(seed=9)
    core.step([("learner", Weights(1, 0, 0, sha256(payload), payload))], 0.0)
    [(_, action)] = core.step([(peer, make_step(70, robots=3))], 0.0)
    assert isinstance(action, Action)
    assert (action.noise_kind, action.noise_seed) == (1000, 9)
    np.testing.assert_allclose(abs(action.action - [1, 0]), np.tile([0.4, 0.1], (3, 1)), rtol=1e-5)
    assert len(np.unique(action.action[:, 0])) == 2  # robots draw independently
    assert noises.name_of(1000) == "sign"
    assert noises.name_of(1001) == "1001"


def test_the_number_of_an_installed_noise_is_at_least_1000(install: Callable[[int], None]) -> None:
    install(3)
    with pytest.raises(ConfigError, match=r"Sign.NUMBER is 3; allowed: 1000 to 4294967295"):
        NOISES.load("sign")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "Sign = 3",
            "exploration noise 'sign' is sign_noise:Sign; it must be a subclass of td3_robot.policy.noise.Noise",
        ),
        ("class Sign: pass", "exploration noise 'sign' is sign_noise:Sign; it must be a subclass of"),
        (
            "from td3_robot.policy.noise import Noise\nclass Sign(Noise): pass",
            "Sign.NUMBER is missing; allowed: 1000 to 4294967295",
        ),
        (
            SIGN_NOISE.format(number=1000).replace("Parameter(1.0, 0.0, 4.0)", "3"),
            "exploration noise 'sign' (sign_noise:Sign): PARAMETERS is {\"size\": 3}; "
            "it must map each name to a td3_robot.noises.Parameter(default, low, high)",
        ),
        (
            SIGN_NOISE.format(number=1000) + "\nclass Other(Sign): pass",
            "exploration noise 'sign' (sign_noise:Sign) has the NUMBER 1000 of 'other' (sign_noise:Other); "
            "each noise needs another number from 1000 to 4294967295",
        ),
    ],
)
def test_a_configuration_with_a_broken_noise_is_refused(
    install_module: Callable[[str, str], None], source: str, words: str
) -> None:
    install_module(source, "broken = sign_noise:Missing\nother = sign_noise:Other\nsign = sign_noise:Sign")
    with pytest.raises(ConfigError, match=re.escape(f"exploration.kind is 'sign': {words}")) as refused:
        loading.parse({"exploration": {"kind": "sign"}})
    assert "\n" not in str(refused.value)
    assert noises.name_of(5) == "gaussian_v2"
    loading.parse({"exploration": {"kind": "gaussian_v2"}})


def test_two_names_of_one_noise_have_the_same_number(install_module: Callable[[str, str], None]) -> None:
    install_module(SIGN_NOISE.format(number=1000), "plus = sign_noise:Sign\nsign = sign_noise:Sign")
    assert loading.parse({"exploration": {"kind": "sign"}}).exploration.kind == "sign"


def test_a_noise_that_cannot_be_loaded_does_not_hide_the_name_of_another_noise(
    install_module: Callable[[str, str], None],
) -> None:
    install_module(SIGN_NOISE.format(number=1000), "broken = sign_noise:Missing\nsign = sign_noise:Sign")
    assert noises.name_of(1000) == "sign"


def test_a_bundle_with_an_unknown_noise_is_refused(
    install: Callable[[int], None], make_bundle: Callable[..., Bundle]
) -> None:
    install(1000)
    payload = replace(make_bundle(), exploration=Exploration("sign", 0.1)).encode()
    allowed = f"allowed: {', '.join([*NOISES.names()[:-1], 'sign'])}"
    with pytest.raises(BundleError, match=rf"^weights: exploration noise is 'xkcd'; {allowed}$"):
        Bundle.decode(payload.replace(b"sign", b"xkcd"), "weights")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kind": "pink"}, f"exploration.kind is 'pink'; allowed: {CONFIGURABLE}$"),
        ({"kind": "uniform_v2"}, f"exploration.kind is 'uniform_v2'; allowed: {CONFIGURABLE}$"),
        (
            {"parameters": {"size": 1}},
            "exploration.parameters: gaussian_v2 noise has no parameter 'size'; allowed",
        ),
    ],
)
def test_an_invalid_noise_configuration_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loading.parse({"exploration": section})
