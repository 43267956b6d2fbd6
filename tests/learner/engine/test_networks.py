"""Compares the engine's networks and Adam with torch's modules, autograd and optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from td3_robot.learner.engine.networks import Adam, Layer, Layout, Network, joined
from tests.learner.td3_cases import parameters_of

SIZES = [7, 33, 20, 3]


def torch_twin(network: Network, head: str, layer_norm: bool) -> nn.Sequential:
    """Build a perceptron from torch.nn with the parameters of one head."""
    modules: list[nn.Module] = []
    for index in range(len(SIZES) - 1):
        modules.append(nn.Linear(SIZES[index], SIZES[index + 1]))
        if index < len(SIZES) - 2:
            modules += [nn.LayerNorm(SIZES[index + 1]), nn.ReLU()] if layer_norm else [nn.ReLU()]
    twin = nn.Sequential(*modules)
    for name, parameter in parameters_of(twin, head):
        parameter.data.copy_(network.named[name])
    return twin


def made(heads: list[str], seed: int, **options: Any) -> tuple[Network, torch.Generator]:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    network = Network(heads, SIZES, **options)
    network.initialise(generator)
    for name, value in network.named.items():
        if name.endswith((".scale", ".shift")):  # with the initial values 1 and 0, mistakes would not show
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.3)
    network.refresh()
    return network, generator


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_autograd(layer_norm: bool, dtype: torch.dtype) -> None:
    network, generator = made(["one", "two"], 3, layer_norm=layer_norm, dtype=dtype)
    x = torch.randn((50, 7), generator=generator)
    d_output = torch.randn((50, 3), generator=generator)
    # float32 has 24 significant bits, so rounding errors are small. bfloat16 has 8, so each rounding changes a value by
    # up to 2^-9 = 0.2 %. The sums have about 50 terms of size one, so their errors are at most about 50 · 0.2 % = 0.1.
    # LayerNorm may double an error, to 0.2. Errors above 0.15 are rare, so the limit is 0.15.
    limit = 2e-5 if dtype == torch.float32 else 0.15
    expected: dict[str, Any] = {}
    slopes: list[list[Layer]] = []
    for head, name in enumerate(("one", "two")):
        twin = torch_twin(network, name, layer_norm)
        x_twin = x.clone().requires_grad_()
        y_twin = twin(x_twin)
        (y_twin * d_output).sum().backward()
        y, trace = network.forward(x, head)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, y_twin.detach(), atol=limit, rtol=limit)
        d_x = network.input_gradient(trace, d_output, slice(2, 6))
        assert x_twin.grad is not None
        torch.testing.assert_close(d_x, x_twin.grad[:, 2:6], atol=limit, rtol=limit)
        slopes.append(network.backward(trace, d_output))
        expected |= {each: parameter.grad for each, parameter in parameters_of(twin, name)}
    assert network.named.keys() == expected.keys()
    for name, value in zip(expected, joined([slopes]), strict=True):
        assert value.dtype == torch.float32
        scale = expected[name].abs().max()
        assert (value - expected[name]).abs().max() < limit * scale + 1e-5, name


def test_a_pass_does_not_change_its_arguments() -> None:
    network, generator = made(["one"], 4, layer_norm=True)
    x, d = torch.randn((9, 7), generator=generator), torch.randn((9, 3), generator=generator)
    copies = x.clone(), d.clone()
    _, trace = network.forward(x)
    network.backward(trace, d)
    network.input_gradient(trace, d, slice(0, 7))
    assert torch.equal(x, copies[0])
    assert torch.equal(d, copies[1])


def test_a_trace_can_be_used_twice() -> None:
    network, generator = made(["one"], 5)
    x, d = torch.randn((9, 7), generator=generator), torch.randn((9, 3), generator=generator)
    _, trace = network.forward(x)
    first, again = (joined([[network.backward(trace, d)]]) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_of_two_parts_of_a_batch_add_up_to_the_gradient_of_the_batch(dtype: torch.dtype) -> None:
    network, generator = made(["one"], 12, layer_norm=True, dtype=dtype)
    x, d = torch.randn((50, 7), generator=generator), torch.randn((50, 3), generator=generator)

    whole = joined([[network.backward(network.forward(x)[1], d)]])
    parts = [network.backward(network.forward(x[rows])[1], d[rows]) for rows in (slice(0, 20), slice(20, 50))]
    limit = 1e-5 if dtype == torch.float32 else 0.02  # bfloat16 rounds each part by up to 2^-9
    largest = max(value.abs().max() for value in whole)
    for sum_of_parts, expected in zip(joined([[part] for part in parts]), whole, strict=True):
        assert (sum_of_parts - expected).abs().max() < limit * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_equals_torch_and_keeps_the_gaps_between_parameters_at_0(dtype: torch.dtype) -> None:
    network, generator = made(["one", "two"], 6, dtype=dtype)
    theirs = {name: nn.Parameter(value.clone()) for name, value in network.named.items()}
    optimiser = torch.optim.Adam(theirs.values(), lr=1e-2, fused=False, foreach=False)
    ours = Adam(network, 1e-2)
    for _ in range(10):
        x, d = torch.randn((50, 7), generator=generator), torch.randn((50, 3), generator=generator)
        gradients = joined([[network.backward(network.forward(x, head)[1], d) for head in range(2)]])
        ours.step(gradients)
        for name, gradient in zip(network.named, gradients, strict=True):
            theirs[name].grad = gradient.clone()
        optimiser.step()
    # The ten steps of 0.01 have changed weights by up to 0.1. Compared with this, a difference of 1e-6 is small.
    for name, value in network.named.items():
        torch.testing.assert_close(value, theirs[name].data, atol=1e-6, rtol=1e-6)
    assert ours.count.item() == 10
    filled = sum(value.numel() for value in network.named.values())
    assert int((network.flat != 0).sum()) == filled  # the gaps between the aligned parameters are still 0
    assert network.layout.size > filled


def test_initial_weights_have_the_distribution_of_torch_linear() -> None:
    # Uniform numbers within ±1/sqrt(100) = ±0.1 have the variance 0.1²/3 and the standard deviation 0.0577. Over
    # 100 x 200 weights, the standard error of the mean is 0.0577/sqrt(20,000) = 4e-4. The standard error
    # of the variance is about 0.6 %.
    network = Network(["one"], [100, 200, 1])
    network.initialise(torch.Generator().manual_seed(7))
    for name, count in (("one.0.weight", 20_000), ("one.0.bias", 200)):
        value = network.named[name]
        assert value.numel() == count
        assert 0.095 < value.abs().max() <= 0.1
        assert abs(value.mean()) < 5 * 0.0577 / count**0.5
    assert network.named["one.0.weight"].var().item() == pytest.approx(0.1**2 / 3, rel=0.04)
    bound = nn.Linear(100, 200).weight.abs().max()
    assert 0.095 < bound <= 0.1


def test_a_polyak_update_moves_targets_by_a_fraction() -> None:
    a, _ = made(["one"], 8)
    b, _ = made(["one"], 9)
    start = b.flat.clone()
    b.polyak_update(a, 0.25)
    torch.testing.assert_close(b.flat, 0.75 * start + 0.25 * a.flat)
    b.polyak_update(a, 1.0)
    assert torch.equal(b.flat, a.flat)


def test_bfloat16_copies_of_parameters_change_only_at_a_refresh() -> None:
    network, generator = made(["one"], 10, dtype=torch.bfloat16)
    x = torch.randn((9, 7), generator=generator)
    before = network.forward(x)[0]
    network.flat[: network.layout.low_size].mul_(2)  # the hidden layers; the last layer has no copy
    assert torch.equal(network.forward(x)[0], before)
    network.refresh()
    assert not torch.equal(network.forward(x)[0], before)


def test_the_layout_aligns_parameters_and_puts_hidden_layers_first() -> None:
    # The layout rounds each size up to a multiple of 32.
    # Hidden layers: 33 x 7 = 231 -> 256, 33 -> 64, 20 x 33 = 660 -> 672, 20 -> 32; together 1024.
    # Scale and shift of LayerNorm: 2 x 64, 2 x 32. Last layer: 3 x 20 = 60 -> 64, 3 -> 32. Together 288.
    layout = Layout(["one"], SIZES, layer_norm=True)
    assert layout.low_size == 1024
    assert layout.size == 1024 + 288
    assert [name for name in layout.shapes if ".1." in name] == [
        "one.1.weight",
        "one.1.bias",
        "one.1.scale",
        "one.1.shift",
    ]
    vector = torch.arange(layout.size)
    assert all(int(view.flatten()[0]) % 32 == 0 for view in layout.views(vector).values())
