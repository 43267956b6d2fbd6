"""The actor in numpy, which runs on the robot."""

from __future__ import annotations

import numpy as np

from td3_robot.bundle import OBSERVATION_CLIP, OBSERVATION_MEAN, OBSERVATION_STD, Bundle
from td3_robot.specs import Float32


class Actor:
    """Deterministic policy network: optional normalisation of observations, ReLU layers, tanh, action limits.

    Attributes:
        low, high, half, middle: the action limits, half the distance between them, and their mean. Each of them is
            float32[1, A] for A action channels.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        layers = len(bundle.hidden) + 1
        # Row-major [in, out]: the product x·W then reads memory in order.
        self._weights = [np.ascontiguousarray(bundle.tensors[f"actor.{i}.weight"].T) for i in range(layers)]
        # Biases are rows [1, size]. With one robot, a layer's output is also [1, size]. Adding two arrays of equal
        # shape takes numpy half as long as adding a bias of shape [size].
        self._biases = [bundle.tensors[f"actor.{i}.bias"][None] for i in range(layers)]
        self._zeros = [np.zeros_like(bias) for bias in self._biases]
        self._mean = bundle.tensors.get(OBSERVATION_MEAN)
        self._std = bundle.tensors.get(OBSERVATION_STD)
        low, high = bundle.spec.action_low[None], bundle.spec.action_high[None]
        self.low, self.high = low, high
        self.half: Float32 = (high - low) / np.float32(2)
        self.middle: Float32 = (high + low) / np.float32(2)
        self._rows = -1  # the first call makes the activations, even for 0 rows
        self._activations: list[Float32] = []

    def __call__(self, observation: Float32) -> Float32:
        """Map observations of N robots, float32[N, O], to actions within the limits, float32[N, A] in a new array."""
        return self.clip(self.unclipped(observation))

    def unclipped(self, observation: Float32) -> Float32:
        """Return unclipped actions. Rounding can move an action over a limit by one unit in the last place."""
        if len(observation) != self._rows:
            self._rows = len(observation)
            self._activations = [np.empty((self._rows, w.shape[1]), np.float32) for w in self._weights]
        x = observation
        if self._mean is not None and self._std is not None:
            x = np.clip((x - self._mean) / self._std, -OBSERVATION_CLIP, OBSERVATION_CLIP)
        last = len(self._weights) - 1
        for layer, out in enumerate(self._activations):
            x.dot(self._weights[layer], out)
            out += self._biases[layer]
            if layer < last:
                np.maximum(out, self._zeros[layer], out=out)
            x = out
        action: Float32 = np.tanh(x)
        action *= self.half
        action += self.middle
        return action

    def clip(self, action: Float32) -> Float32:
        """Clip ``action``, float32[N, A], to the limits, in place. Return the same array."""
        np.maximum(action, self.low, out=action)
        return np.minimum(action, self.high, out=action)
