"""The replay buffer: the newest transitions in one preallocated array, sampled uniformly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import BundleError
from td3_robot.learner.checkpointing.stateful import Arrays
from td3_robot.learner.replay_buffer.device import DeviceRows
from td3_robot.learner.replay_buffer.storage import Storage, row_size
from td3_robot.specs import Float32

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """B transitions as torch float32 tensors. The tensors from :meth:`ReplayBuffer.sample` share one block of memory.

    The robot has O observation channels and A action channels.

    ``discount`` is the factor of the next observation's value: γ to the power of the number of steps between the two
    observations. It is 0 where the episode terminated.
    """

    observation: Tensor  # [B, O], in the units of the robot's channels, or normalised
    action: Tensor  # [B, A], normalised to [-1, 1]
    reward: Tensor  # [B, 1], the reward of one step, or the discounted sum of the rewards of several steps
    next_observation: Tensor  # [B, O]
    discount: Tensor  # [B, 1]


class ReplayBuffer:
    """The newest ``capacity`` transitions, drawn uniformly and with replacement.

    A transition is one row ``[observation | action | reward | discount | next_observation]``. So a random batch
    needs only one gather of whole rows. Five gathers from five arrays would take four times as long.

    Args:
        storage: creates the storage from the capacity and the row width.

    Attributes:
        rows: float32[capacity, 2 O + A + 2], see :class:`Batch` for O and A. Callers must not change the rows.
            Transition n, counted from 0, is in row n modulo ``capacity``.
        total_added: number of transitions ever added.
    """

    def __init__(
        self,
        capacity: int,
        observation_size: int,
        action_size: int,
        seed: int,
        storage: Callable[[int, int], Storage] = Storage,
    ) -> None:
        self.capacity = capacity
        self.total_added = 0
        self.storage = storage(capacity, row_size(observation_size, action_size))
        self.rows = self.storage.rows
        self._widths = [observation_size, action_size, 1, 1, observation_size]
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._on_device: DeviceRows | None = None
        self._device_batch: tuple[Tensor, Batch] | None = None

    def use_device(self, device: torch.device) -> None:
        """Keep a copy of the rows on a device. Batches come from this copy, and are the same as without a device.

        The rows also stay on the host, because checkpoints and files need them. A method waits for the device only if
        it copies more than 8,192 rows at once. :meth:`use_device`, :meth:`restore`, :meth:`recover` and a very large
        :meth:`add` can copy so many rows.
        """
        self._on_device = DeviceRows(self.rows, device)
        self._copy(0)

    def _copy(self, since: int) -> None:
        """Copy transition ``since`` and all later transitions to the device, if there is one."""
        if self._on_device:
            self._on_device.copy(since, self.total_added)

    def __len__(self) -> int:
        """Number of stored transitions, at most ``capacity``."""
        return min(self.total_added, self.capacity)

    def add(
        self, observation: Float32, action: Float32, reward: Float32, next_observation: Float32, discount: Float32
    ) -> None:
        """Store M transitions in their order. In a full buffer they replace the oldest transitions.

        The arguments are arrays with M rows, as in :class:`Batch`. But ``reward`` and ``discount`` have the shape [M].
        """
        columns = observation, action, reward[:, None], discount[:, None], next_observation
        shapes, expected = [column.shape for column in columns], [(len(observation), width) for width in self._widths]
        if shapes != expected:
            raise ValueError(f"the columns of transitions have the shapes {shapes}; expected {expected}")
        rows = np.concatenate(columns, axis=1, dtype=np.float32)
        before = self.total_added
        start = before + max(0, len(rows) - self.capacity)
        rows = rows[-self.capacity :]
        first = start % self.capacity
        until_the_end = min(len(rows), self.capacity - first)
        self.storage.write(first, rows[:until_the_end])
        self.storage.write(0, rows[until_the_end:])
        self.total_added = start + len(rows)
        self._stored(before)

    def _stored(self, since: int) -> None:
        """Prepare transition ``since`` and all later transitions for sampling."""
        self._copy(since)

    def sample(self, batch_size: int) -> Batch:
        """Draw stored transitions, with replacement.

        Without a device, each batch has new memory. With a device, the batch is in device memory, and the next call
        with the same ``batch_size`` overwrites it.
        """
        if not self.total_added:
            raise ValueError("the replay buffer is empty: there is nothing to sample")
        chosen = self._draw(batch_size)
        if self._on_device:
            on_device = self._on_device.gather(chosen)
            # A CUDA graph reads its batch from the memory of one Batch object. If the engine gets a different object,
            # it copies the batch to this memory. To avoid this copy, return the same object as long as the rows are in
            # the same memory.
            if self._device_batch is None or self._device_batch[0] is not on_device:
                self._device_batch = on_device, self._batch(on_device)
            return self._device_batch[1]
        # Use torch's memory, which always has the same alignment. Then matrix products always add in the same order,
        # and equal batches give bitwise equal results. The alignment of numpy's memory varies.
        rows = torch.empty((batch_size, self.rows.shape[1]))
        np.take(self.rows, chosen, axis=0, out=rows.numpy(), mode="clip")  # "clip" writes into out without a copy
        return self._batch(rows)

    def _draw(self, batch_size: int) -> NDArray[np.int64]:
        """The row numbers of the next batch."""
        return self._random.integers(0, len(self), batch_size)

    def _batch(self, rows: Tensor) -> Batch:
        observation, action, reward, discount, next_observation = torch.split(rows, self._widths, 1)
        return Batch(observation, action, reward, next_observation, discount)

    def learned(self, errors: Sequence[Tensor]) -> None:
        """Use the TD errors of the first M rows of the newest batch. Each critic has its own errors, float32[M, 1].

        Uniform sampling ignores the errors.
        """

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The state. ``rows`` is a read-only view of the filled rows. Save or copy it before the next :meth:`add`.

        With a durable storage, the state has no rows, because the storage keeps them.
        """
        rows = self.rows[: len(self)]
        rows.flags.writeable = False
        generator: Any = self._random.bit_generator.state
        scalars = {
            "capacity": self.capacity,
            "total_added": self.total_added,
            # as text, because most JSON readers refuse or round 128-bit integers
            "random_state": {key: str(value) for key, value in generator["state"].items()},
            "random_buffer": [generator["has_uint32"], generator["uinteger"]],
        }
        return {} if self.storage.durable else {"rows": rows}, scalars

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        if scalars["capacity"] != self.capacity:
            raise ValueError(f"the saved capacity is {scalars['capacity']}; this buffer has capacity {self.capacity}")
        self.total_added = int(scalars["total_added"])
        if self.total_added < 0:
            raise ValueError(f"total_added is {self.total_added}; allowed: 0 or more")
        if self.storage.durable:
            self._check_file()
        else:
            rows, shape = arrays["rows"], (len(self), self.rows.shape[1])
            if rows.shape != shape or rows.dtype != np.float32:
                raise ValueError(f"the rows are {rows.dtype}{list(rows.shape)}; this buffer needs float32{list(shape)}")
            self.storage.write(0, rows)
        has_uint32, uinteger = scalars["random_buffer"]
        self._random.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {key: int(scalars["random_state"][key]) for key in ("state", "inc")},
            "has_uint32": has_uint32,
            "uinteger": uinteger,
        }
        self._copy(0)

    def _check_file(self) -> None:
        """Check that a durable storage holds the rows of a restored state."""
        total, journal = self.total_added, self.storage.committed
        if total > journal and not self.storage.found:
            raise BundleError(
                f"the checkpoint counts {total} transitions, but the journal of the replay file records {journal}; "
                "to continue with the rows of the file, move the journal away"
            )
        if total > journal:
            # There is a file without a journal. The rows that the checkpoint counts are complete, because the process
            # wrote them before the checkpoint.
            log.warning("the replay file has no journal; the checkpoint counts %d transitions", total)

    def recover(self) -> None:
        """Use the rows that a durable storage received after the restored state was saved."""
        before = self.total_added
        self.total_added = max(before, self.storage.committed)
        self._stored(before)
