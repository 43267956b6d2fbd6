"""A copy of a replay buffer's rows on the GPU. The GPU gathers the batches."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import ConfigError
from td3_robot.learner.compute import upload
from td3_robot.specs import Float32

_AT_ONCE = 8192  # rows copied to the device in one piece


class DeviceRows:
    """A copy of a buffer's rows on a device. :meth:`gather` does not wait for the device."""

    def __init__(self, rows: Float32, device: torch.device) -> None:
        self._host, self._device = rows, device
        try:
            self._rows = torch.zeros(rows.shape, device=device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{len(rows)} rows of a replay buffer are {rows.nbytes / 1e9:.1f} GB, which do not fit into the memory "
                f"of {device.type}; use a smaller learner.buffer_size, or learner.device cpu"
            ) from None
        self._batch = self._rows[:0]

    def gather(self, chosen: NDArray[Any]) -> Tensor:
        """Return the rows with the B numbers ``chosen``: float32[B, width].

        If the next call is for B rows, too, it overwrites the returned rows.
        """
        if len(self._batch) != len(chosen):
            self._batch = torch.empty((len(chosen), self._rows.shape[1]), device=self._device)
        torch.index_select(self._rows, 0, upload(chosen, self._device), out=self._batch)
        return self._batch

    def copy(self, since: int, total: int) -> None:
        """Copy transitions to the device: from number ``since`` to number ``total - 1``.

        Only a copy of more than 8,192 rows waits for the device.
        """
        capacity = len(self._host)
        first = max(since, total - capacity)
        # Only small copies use pinned memory. Torch keeps this memory after a copy, so a copy of a whole buffer would
        # occupy as much pinned memory as the buffer.
        send = upload if total - first <= _AT_ONCE else lambda rows, _: torch.from_numpy(rows)
        while first < total:
            start = first % capacity
            count = min(total - first, capacity - start, _AT_ONCE)
            rows = self._host[start : start + count].copy()  # else torch warns about the read-only rows of a file
            self._rows[start : start + count].copy_(send(rows, self._device))
            first += count
