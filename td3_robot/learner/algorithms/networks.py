"""Multilayer perceptrons in plain ``torch.nn``, for algorithms that are written with autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class Perceptron(nn.Sequential):
    """A perceptron. A hidden layer is ``relu(linear(x))`` or ``relu(layer_norm(linear(x)))``. The last layer is linear.

    Under ``torch.autocast`` the last layer stays in float32: bfloat16 has too few bits for a value or an action.

    Args:
        sizes: the sizes of the input, the hidden layers and the output.
    """

    def __init__(self, sizes: Sequence[int], *, layer_norm: bool = False) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes[:-1]):
            layers += [_linear(inputs, outputs), *([nn.LayerNorm(outputs)] if layer_norm else []), nn.ReLU()]
        super().__init__(*layers, _linear(sizes[-2], sizes[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """The outputs, float32[B, out], for a batch of B inputs, float32[B, in]."""
        *hidden, last = self
        for layer in hidden:
            x = layer(x)
        with torch.autocast(x.device.type, enabled=False):
            output: Tensor = last(x.to(next(last.parameters()).dtype))
        return output


class Actor(Perceptron):
    """π(s): tanh of a perceptron, so that each action is between -1 and 1."""

    def forward(self, s: Tensor) -> Tensor:
        """The actions, float32[B, A], for a batch of B observations, float32[B, O]."""
        return super().forward(s).tanh()


class Critics(nn.ModuleList):
    """One or more critics of the same shape. Their input is the observation followed by the action."""

    def __init__(self, count: int, sizes: Sequence[int], *, layer_norm: bool = False) -> None:
        super().__init__(Perceptron(sizes, layer_norm=layer_norm) for _ in range(count))

    def forward(self, s: Tensor, a: Tensor) -> list[Tensor]:
        """Q(s, a), one float32[B, 1] for each critic."""
        sa = torch.cat((s, a), 1)
        return [critic(sa) for critic in self]

    def first(self, s: Tensor, a: Tensor) -> Tensor:
        """Q1(s, a): float32[B, 1]."""
        q: Tensor = self[0](torch.cat((s, a), 1))
        return q


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the parameters of linear layers as ``torch.nn.Linear`` does: uniformly from -1/sqrt(in) to 1/sqrt(in)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with uninitialised parameters. By default, torch would draw them from its global generator."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    return layer
