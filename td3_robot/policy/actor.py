"""The actor in numpy: what runs on the robot."""

from __future__ import annotations

import numpy as np

from td3_robot.bundle import Bundle
from td3_robot.specs import Float32


class Actor:
    """Deterministic policy network: ReLU layers, tanh, scaled to the action limits of the robot."""

    def __init__(self, bundle: Bundle) -> None:
        layers = len(bundle.hidden) + 1
        # Row-major [in, out]: the product x·W then reads memory in order.
        self._weights = [np.ascontiguousarray(bundle.tensors[f"actor.{i}.weight"].T) for i in range(layers)]
        self._biases = [bundle.tensors[f"actor.{i}.bias"] for i in range(layers)]
        low, high = bundle.spec.action_low, bundle.spec.action_high
        self.low, self.high = low, high
        self.half: Float32 = (high - low) / np.float32(2)
        self.middle: Float32 = (high + low) / np.float32(2)
        self._rows = 0
        self._activations: list[Float32] = []
        self._zeros: list[Float32] = []

    def __call__(self, observation: Float32) -> Float32:
        """Actions for observations.

        Args:
            observation: float32[N, O].

        Returns:
            float32[N, A], within the limits; a new array.
        """
        if len(observation) != self._rows:
            self._rows = len(observation)
            self._activations = [np.empty((self._rows, w.shape[1]), np.float32) for w in self._weights]
            self._zeros = [
                np.zeros_like(out) for out in self._activations
            ]  # an array: the number 0 takes twice as long
        x = observation
        last = len(self._weights) - 1
        for layer, out in enumerate(self._activations):
            np.matmul(x, self._weights[layer], out=out)
            out += self._biases[layer]
            if layer < last:
                np.maximum(out, self._zeros[layer], out=out)
            x = out
        action: Float32 = np.tanh(x)
        action *= self.half
        action += self.middle
        # Rounding may step over a limit by one unit in the last place; the wire promises it does not.
        return self.clip(action)

    def clip(self, action: Float32) -> Float32:
        """The same array, float32[N, A], with what lies beyond the limits moved onto them."""
        np.maximum(action, self.low, out=action)
        return np.minimum(action, self.high, out=action)
