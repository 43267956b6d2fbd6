"""Multilayer perceptrons with a hand-written gradient, and Adam: the inner loop of the engine.

One vector holds all parameters of a network; both critics together are one network. So an Adam step, a Polyak update
and a change of precision are one call each. :mod:`td3_robot.learner.engine.compiled` computes the same in C++.
``td3-robot bench learner`` measures the speed. In the shapes of arrays, B is the number of rows in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

ALIGNMENT = 32  # elements: every parameter starts on a cache line, in both precisions
NORM_EPSILON = 1e-5  # as in torch.nn.LayerNorm


class Layer(NamedTuple):
    """The parameters of one layer, or their gradients. Without LayerNorm, ``scale`` and ``shift`` are None."""

    weight: Tensor  # [out, in]
    bias: Tensor  # [out]
    scale: Tensor | None = None  # [out]
    shift: Tensor | None = None  # [out]


class Layout:
    """The position of each parameter of a :class:`Network` in its vector.

    The weights and biases of hidden layers come first, in ``[0, low_size)``, so that one cast lowers the precision of
    all of them. Alignment leaves gaps between parameters.
    """

    def __init__(self, heads: Sequence[str], sizes: Sequence[int], layer_norm: bool) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.names: list[list[list[str]]] = []  # indices: head, layer, parameter
        low: list[str] = []
        high: list[str] = []
        for head in heads:
            self.names.append([])
            for index, (inputs, outputs) in enumerate(pairwise(sizes)):
                hidden = index < len(sizes) - 2
                kinds = Layer._fields[: 4 if layer_norm and hidden else 2]
                self.names[-1].append([f"{head}.{index}.{kind}" for kind in kinds])
                for kind, name in zip(kinds, self.names[-1][-1], strict=True):
                    self.shapes[name] = (outputs, inputs) if kind == "weight" else (outputs,)
                    (low if hidden and kind in ("weight", "bias") else high).append(name)
        self._slots: dict[str, slice] = {}
        self.size = self.low_size = 0
        for name in low + high:
            count = math.prod(self.shapes[name])
            self._slots[name] = slice(self.size, self.size + count)
            self.size += math.ceil(count / ALIGNMENT) * ALIGNMENT
            if name == low[-1]:
                self.low_size = self.size

    def begin(self, name: str) -> int:
        """Where a parameter begins in the vector."""
        begin: int = self._slots[name].start
        return begin

    def views(self, vector: Tensor, low_vector: Tensor | None = None) -> dict[str, Tensor]:
        """Views of the parameters, by name. ``low_vector``, if given, holds the parameters in ``[0, low_size)``."""
        views = {}
        for name, shape in self.shapes.items():
            slot = self._slots[name]
            source = vector if low_vector is None or slot.start >= self.low_size else low_vector
            views[name] = source[slot].view(shape)
        return views


class Trace(NamedTuple):
    """The values from a forward pass that the backward pass needs."""

    head: int
    inputs: list[Tensor]  # one for each layer, [in, B]; float32 for the last layer
    norms: list[tuple[Tensor, Tensor, Tensor]]  # for each LayerNorm: its input [B, out], mean, 1/deviation


Gradient = list[Tensor]
"""The gradient of every parameter of a network, float32 and contiguous, in the order of :attr:`Network.named`."""


class Network:
    """One or more perceptrons ("heads") of the same shape, with all parameters in one vector.

    A hidden layer is ``relu(linear(x))`` or ``relu(layer_norm(linear(x)))``; the last layer is linear. Matrix products
    of hidden layers take numbers of type ``dtype`` and accumulate in float32. The last layer, LayerNorm and the
    parameter vector are always float32. The 8 significant bits of bfloat16 are enough for the direction of a gradient.
    They are too few for an output such as Q(s, a), and for adding a small step to a weight.

    Args:
        heads: the names of the perceptrons.
        sizes: the sizes of the input, of at least one hidden layer, and of the output.

    Attributes:
        flat: float32[layout.size], the parameters; zero in the gaps of the layout.
        low_flat: ``dtype``[layout.low_size], a copy of the first elements of ``flat``, for the matrix products of
            hidden layers. If ``dtype`` is float32, ``low_flat`` is ``flat`` itself.
        named: views of ``flat``, named ``HEAD.LAYER.weight`` and so on, see :class:`Layer`. LAYER counts from 0.
    """

    def __init__(
        self,
        heads: Sequence[str],
        sizes: Sequence[int],
        *,
        layer_norm: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.dtype = dtype
        self.heads = heads
        self.layout = layout = Layout(heads, sizes, layer_norm)
        self.flat = torch.zeros(layout.size, device=device)
        self.named = layout.views(self.flat)
        same = dtype == torch.float32
        self.low_flat = self.flat if same else torch.zeros(layout.low_size, dtype=dtype, device=device)
        views = layout.views(self.flat, self.low_flat)
        self._layers = [[Layer(*map(views.__getitem__, names)) for names in layers] for layers in layout.names]
        # On an Intel Xeon, products in the memory layout [features, B] are up to 1.17 times as fast as in the layout
        # [B, features]. But LayerNorm and oneDNN need the layout [B, features].
        self._by_neuron = same and not layer_norm and self.flat.device.type == "cpu"
        self._relu_of_linear = self._relu_by_neuron if self._by_neuron else _relu_of_linear(self.flat.device, dtype)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw weights and biases as ``torch.nn.Linear`` does: uniformly, within 1/sqrt(in) of zero."""
        bound = 0.0
        for name, value in self.named.items():
            if name.endswith(".weight"):
                bound = 1 / math.sqrt(value.shape[1])
            if name.endswith((".weight", ".bias")):
                value.copy_(
                    torch.empty(value.shape, device=generator.device).uniform_(-bound, bound, generator=generator)
                )
            elif name.endswith(".scale"):
                value.fill_(1.0)
        self.refresh()

    def refresh(self) -> None:
        """Update the low-precision copy of the parameters after a change of ``flat``."""
        if self.low_flat is not self.flat:
            self.low_flat.copy_(self.flat[: self.layout.low_size])

    def polyak_update(self, other: Network, fraction: float) -> None:
        """θ ← θ + fraction (θ_other - θ)."""
        self.flat.lerp_(other.flat, fraction)
        self.refresh()

    def forward(self, x: Tensor, head: int = 0) -> tuple[Tensor, Trace]:
        """The outputs float32[B, out] of one head for inputs float32[B, in], and the trace for a backward pass."""
        trace = Trace(head, [], [])
        *hidden, last = self._layers[head]
        x = x.t().to(self.dtype)
        for layer in hidden:
            trace.inputs.append(x)
            x = self._hidden(x, layer, trace)
        x = x.float()
        trace.inputs.append(x)
        return self._product(last.weight, x).t() + last.bias, trace

    def backward(self, trace: Trace, d_output: Tensor) -> list[Layer]:
        """The gradient of the loss with respect to one head's parameters.

        ``d_output`` is the gradient with respect to the head's outputs, float32[B, out]. The gradient of hidden weights
        and biases has the type ``dtype``; :func:`joined` converts it.
        """
        d = d_output.t()
        layers = self._layers[trace.head]
        gradient: list[Layer] = []
        for index in range(len(layers) - 1, -1, -1):
            d_norm: list[Tensor] = []
            if index < len(layers) - 1:
                d, *d_norm = self._through_hidden(d, index, trace, with_norm=True)
            gradient.insert(0, Layer(torch.mm(d, trace.inputs[index].t()), torch.sum(d, 1), *d_norm))
            if index:
                d = self._product(layers[index].weight.t(), d)
        return gradient

    def input_gradient(self, trace: Trace, d_output: Tensor, columns: slice) -> Tensor:
        """The gradient of the loss with respect to some input columns, float32[B, columns]; see :meth:`backward`."""
        d = d_output.t()
        layers = self._layers[trace.head]
        for index in range(len(layers) - 1, -1, -1):
            if index < len(layers) - 1:
                d, *_ = self._through_hidden(d, index, trace, with_norm=False)
            weight = layers[index].weight if index else layers[index].weight[:, columns]
            d = self._product(weight.t(), d)
        return d.t().float()

    def _product(self, matrix: Tensor, x: Tensor) -> Tensor:
        """matrix @ x [features, B], in the fastest memory layout."""
        return torch.mm(matrix, x) if self._by_neuron else torch.mm(x.t(), matrix.t()).t()

    def _relu_by_neuron(self, x: Tensor, layer: Layer) -> Tensor:
        # torch.addmm would first copy the bias to every column of the result.
        return torch.mm(layer.weight, x).add_(layer.bias[:, None]).relu_()

    def _hidden(self, x: Tensor, layer: Layer, trace: Trace) -> Tensor:
        if layer.scale is not None:
            z = F.linear(x.t(), layer.weight, layer.bias).float()
            x, mean, rstd = torch.native_layer_norm(z, layer.bias.shape, layer.scale, layer.shift, NORM_EPSILON)
            trace.norms.append((z, mean, rstd))
            return x.relu_().to(self.dtype).t()
        return self._relu_of_linear(x, layer)

    def _through_hidden(self, d: Tensor, index: int, trace: Trace, *, with_norm: bool) -> tuple[Tensor, ...]:
        """The gradient with respect to a hidden layer's linear output.

        With LayerNorm and ``with_norm``, the method also returns the gradients with respect to scale and shift.
        ``d`` is the gradient with respect to the layer's output. This method overwrites ``d``.
        """
        layer = self._layers[trace.head][index]
        _relu_backward_(d, trace.inputs[index + 1])
        if layer.scale is None:
            return (d.to(self.dtype),)
        d, *d_norm = torch.ops.aten.native_layer_norm_backward(
            d.t().float(), trace.norms[index][0], layer.bias.shape, *trace.norms[index][1:],
            layer.scale, layer.shift, [True, with_norm, with_norm],
        )  # fmt: skip
        return d.to(self.dtype).t(), *d_norm


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) for all parameters of a network at once.

    Args:
        learning_rate: a number, or a tensor float32[] on the network's device. A step in a CUDA graph reads this tensor
            at each launch.
        clip: the limit for the norm of each head's gradient; None for no limit.
    """

    def __init__(self, network: Network, learning_rate: float | Tensor, clip: float | None = None) -> None:
        self.network = network
        self.learning_rate = learning_rate
        self.clip = clip
        self.mean = torch.zeros_like(network.flat)
        self.square = torch.zeros_like(network.flat)
        self.count = torch.zeros((), device=network.flat.device)
        views = network.layout.views
        self._of_parameters = [list(views(vector).values()) for vector in (network.flat, self.mean, self.square)]
        self._counts = [self.count] * len(network.named)
        self._gradient: Gradient = [torch.zeros_like(value) for value in network.named.values()]
        # A step in a CUDA graph always uses the same memory. So on a GPU, step() copies each gradient to this memory.
        self._keeps = network.flat.device.type == "cuda"
        self._norm = torch.zeros_like(self.count)  # gradient norm of the newest step, if ``clip`` is set

    def step(self, gradient: Gradient) -> None:
        """Make one step down this gradient; clipping may overwrite the gradient."""
        if self._keeps:
            torch._foreach_copy_(self._gradient, gradient)
        else:
            self._gradient = gradient
        if self.clip is not None:
            self._norm.copy_(self._clip(self.clip))
        self.count += 1
        parameters, means, squares = self._of_parameters
        torch._fused_adam_(
            parameters, self._gradient, means, squares, [], self._counts,
            lr=self.learning_rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        self.network.refresh()

    def gradient_norm(self) -> Tensor:
        """float32[]: the Euclidean norm of the newest step's gradient, before clipping."""
        return _norm(self._gradient) if self.clip is None else self._norm

    def _clip(self, limit: float) -> Tensor:
        """Limit the Euclidean norm of each head's gradient to ``limit``. Returns the norm of the whole gradient."""
        size = len(self._gradient) // len(self.network.heads)
        heads = [self._gradient[begin : begin + size] for begin in range(0, len(self._gradient), size)]
        norms = [_norm(gradients) for gradients in heads]
        for gradients, norm in zip(heads, norms, strict=True):
            torch._foreach_mul_(gradients, (limit / norm).clamp_(max=1.0))
        return _norm(norms)


def joined(parts: Sequence[Sequence[Sequence[Layer]]]) -> Gradient:
    """Add the gradients of the parts of a batch. The indices of ``parts`` are part, head and layer."""
    first, *others = (
        [value.float() for layers in part for layer in layers for value in layer if value is not None] for part in parts
    )
    for other in others:
        torch._foreach_add_(first, other)
    return first


def _norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together, float32[]."""
    norm: Tensor = torch.stack(torch._foreach_norm(tensors)).norm()
    return norm


def _relu_backward_(d: Tensor, output: Tensor) -> None:
    """Overwrite ``d``: set the gradient to 0 where the ReLU's output is not positive."""
    if d.dtype == torch.bfloat16 and d.device.type == "cpu":
        # A bfloat16 and the int16 with the same bits have the same sign. Comparing int16 is three times as fast.
        d, output = d.view(torch.int16), output.view(torch.int16)
    torch.ops.aten.threshold_backward.grad_input(d, output, 0, grad_input=d)


def _relu_of_linear(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor, Layer], Tensor]:
    """The fastest function that computes ``relu(linear(x))`` in the memory layout [B, features] on this device.

    In bfloat16 on a CPU, this is oneDNN's fused operator, if torch and the processor support it. In float32 on an Intel
    Xeon, the fused operator takes 1.05 to 1.5 times as long as the three operators of ``Network._relu_by_neuron``.
    """
    operators: Any = torch.ops.mkldnn
    if (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and hasattr(operators, "_linear_pointwise")
        and operators._is_mkldnn_bf16_supported()
    ):
        fused: Callable[..., Tensor] = operators._linear_pointwise.default
        return lambda x, layer: fused(x.t(), layer.weight, layer.bias, "relu", [], "").t()
    return lambda x, layer: F.linear(x.t(), layer.weight, layer.bias).relu_().t()
