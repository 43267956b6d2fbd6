"""Normalises observations with their running mean and standard deviation, so that all channels have the same scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from td3_robot.bundle import OBSERVATION_CLIP, OBSERVATION_MEAN, OBSERVATION_STD
from td3_robot.learner import compute
from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.specs import Float32

# Smallest divisor, in the channel's unit. A constant channel has deviation 0. Without a smallest divisor, a constant
# channel would give 0 / 0. The first tiny change of this channel would give ±OBSERVATION_CLIP.
_SMALLEST = 1e-4


class Normaliser:
    """The mean and deviation of each channel over all observations so far.

    Each group of new observations updates the mean and deviation (Chan et al. 1979). The replay buffer keeps raw
    observations. The learner normalises each drawn batch with the newest statistics.
    """

    def __init__(self, observation_size: int) -> None:
        self.count = 0
        self._mean = np.zeros(observation_size)
        self._squares = np.zeros(observation_size)  # the sum of (x - mean)²
        self._uploaded: tuple[Any, ...] | None = None  # device, and the offset and scale on it
        self._refresh()

    def add(self, observations: Float32) -> None:
        """Add observations float32[M, O]."""
        if not len(observations):
            return
        group = observations.astype(np.float64)
        mean, total = group.mean(0), self.count + len(group)
        shift = mean - self._mean
        self._squares += np.square(group - mean).sum(0) + shift * shift * (self.count * len(group) / total)
        self._mean += shift * (len(group) / total)
        self.count = total
        self._refresh()

    def begin_with(self, mean: Float32, std: Float32, count: int) -> None:
        """Start from the mean and deviation float32[O] of ``count`` observations."""
        self._mean, self._squares = mean.astype(np.float64), np.square(std.astype(np.float64)) * count
        self.count = count
        self._refresh()

    def tensors(self) -> dict[str, Float32]:
        """The mean and the divisor for a policy bundle, each float32[O].

        The divisor is the deviation, but at least 1e-4. Before the first observation, it is 1.
        """
        return {OBSERVATION_MEAN: self._offset.numpy().copy(), OBSERVATION_STD: self._scale.numpy().copy()}

    def __call__(self, batch: Batch) -> Batch:
        """Normalise a batch with the same float32 arithmetic as the policy server."""
        device = batch.observation.device
        if self._uploaded is None or self._uploaded[0] != device:  # new statistics or a new device
            self._uploaded = device, *(compute.upload(tensor.numpy(), device) for tensor in (self._offset, self._scale))
        _, offset, scale = self._uploaded
        return batch._replace(
            observation=((batch.observation - offset) / scale).clamp_(-OBSERVATION_CLIP, OBSERVATION_CLIP),
            next_observation=((batch.next_observation - offset) / scale).clamp_(-OBSERVATION_CLIP, OBSERVATION_CLIP),
        )

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        return {"mean": self._mean.copy(), "squares": self._squares.copy()}, {"count": self.count}

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        mean, squares, count = arrays["mean"], arrays["squares"], int(scalars["count"])
        same = mean.shape == squares.shape == self._mean.shape
        if not same or not np.isfinite([mean, squares]).all() or count < 0 or squares.min(initial=0) < 0:
            raise ValueError(
                "the observation statistics have a wrong shape, a negative count or sum of squares, "
                "or a value that is not finite"
            )
        self._mean, self._squares, self.count = mean.copy(), squares.copy(), count
        self._refresh()

    def _refresh(self) -> None:
        std = np.sqrt(self._squares / self.count) if self.count else np.ones_like(self._mean)
        self._offset = torch.from_numpy(self._mean.astype(np.float32))
        self._scale = torch.from_numpy(np.maximum(std, _SMALLEST).astype(np.float32))
        self._uploaded = None
