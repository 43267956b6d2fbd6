"""A replay buffer with a copy of its rows on the GPU, which gathers the batches there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import ConfigError
from td3_robot.learner.compute import upload
from td3_robot.learner.replay_buffer.buffer import Batch, ReplayBuffer
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.specs import Float32

_AT_ONCE = 8192  # rows copied to the device in one piece


class DeviceReplay:
    """A :class:`ReplayBuffer` whose batches are on a device, with the same samples from the same seed.

    The buffer on the host stays: checkpoints and files are made from it without the device. Only :meth:`restore` and
    :meth:`recover` wait for the device.

    Args:
        host: the buffer; use only this object from now on.
        device: of the batches.

    Raises:
        ConfigError: the device lacks the memory for all rows.
    """

    def __init__(self, host: ReplayBuffer, device: torch.device) -> None:
        self.host = host
        self._device = device
        try:
            self._rows = torch.zeros(host.rows.shape, device=device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"learner.buffer_size is {host.capacity}: {host.rows.nbytes / 1e9:.1f} GB do not fit into the memory "
                f"of {device.type}; use a smaller one, or learner.device cpu"
            ) from None
        self._batch_rows = self._rows[:0]
        self._batch = host.batch(self._batch_rows)
        self._copy(0)

    def __len__(self) -> int:
        return len(self.host)

    @property
    def storage(self) -> Storage:
        return self.host.storage

    @property
    def total_added(self) -> int:
        return self.host.total_added

    def add(
        self,
        observation: Float32,
        action: Float32,
        reward: Float32,
        next_observation: Float32,
        discount: Float32,
    ) -> None:
        """See :meth:`ReplayBuffer.add`."""
        before = self.host.total_added
        self.host.add(observation, action, reward, next_observation, discount)
        self._copy(before)

    def sample(self, batch_size: int) -> Batch:
        """See :meth:`ReplayBuffer.sample`; on the device, in memory that the next call overwrites.

        Raises:
            ValueError: the buffer is empty.
        """
        chosen = upload(self.host.draw(batch_size), self._device)
        if len(self._batch_rows) != batch_size:
            self._batch_rows = torch.empty((batch_size, self._rows.shape[1]), device=self._device)
            self._batch = self.host.batch(self._batch_rows)
        torch.index_select(self._rows, 0, chosen, out=self._batch_rows)
        return self._batch

    def learned(self, errors: Sequence[Tensor]) -> None:
        """See :meth:`ReplayBuffer.learned`; with prioritised replay it waits for the device."""
        self.host.learned(errors)

    def recover(self) -> None:
        """See :meth:`ReplayBuffer.recover`."""
        self.host.recover()
        self._copy(0)

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """See :meth:`ReplayBuffer.state`."""
        return self.host.state()

    def restore(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
        """See :meth:`ReplayBuffer.restore`.

        Raises:
            BundleError: as there.
        """
        self.host.restore(arrays, scalars)
        self._copy(0)

    def _copy(self, since: int) -> None:
        """Copy the transitions from number ``since`` on to the device."""
        total, capacity = self.host.total_added, self.host.capacity
        first = max(since, total - capacity)
        # Page-locked memory for a whole buffer would double its size, and torch would keep it.
        send = upload if total - first <= _AT_ONCE else lambda rows, _: torch.from_numpy(rows)
        while first < total:
            start = first % capacity
            count = min(total - first, capacity - start, _AT_ONCE)
            rows = self.host.rows[start : start + count].copy()  # torch refuses the read-only rows of a file
            self._rows[start : start + count].copy_(send(rows, self._device))
            first += count
