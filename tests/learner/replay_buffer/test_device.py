"""Compares a replay buffer on a device, for example a GPU, with a replay buffer in main memory (``host``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.errors import ConfigError
from td3_robot.learner.replay_buffer import device as device_buffer
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.learner.replay_buffer.storage import File, Note

O, A = 3, 2  # noqa: E741 - observation and action size, as in the docstrings


def transitions(random: np.random.Generator, count: int) -> tuple[Any, ...]:
    def normal(*shape: int) -> Any:
        return random.standard_normal((count, *shape)).astype(np.float32)

    return normal(O), np.tanh(normal(A)), normal(), normal(O), random.random(count) < 0.2


def mirrored(buffer: ReplayBuffer, device: torch.device) -> ReplayBuffer:
    buffer.use_device(device)
    return buffer


def same(device: ReplayBuffer, host: ReplayBuffer) -> bool:
    ours, theirs = device.sample(64), host.sample(64)
    return all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


def test_samples_equal_those_from_main_memory(seed: int, device: torch.device) -> None:
    """The capacity is 10. The additions fit, wrap around, fill the buffer exactly, or exceed it."""
    random = np.random.default_rng(seed)
    host, on_device = ReplayBuffer(10, O, A, seed=1), mirrored(ReplayBuffer(10, O, A, seed=1), device)
    for count in (1, 4, 3, 7, 10, 25, 1, 0, 9):
        new = transitions(random, count)
        host.add(*new)
        on_device.add(*new)
        assert len(on_device) == len(host)
        assert on_device.total_added == host.total_added
        assert same(on_device, host)


def test_rows_of_a_file_reach_the_device(
    seed: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer copies its 10 rows in blocks of at most 4 rows. A buffer that opens the file again copies all rows."""
    monkeypatch.setattr(device_buffer, "_AT_ONCE", 4)
    random = np.random.default_rng(seed)

    def in_file(number: int) -> ReplayBuffer:
        return ReplayBuffer(10, O, A, number, lambda *size: File(tmp_path, *size))

    host, on_device = ReplayBuffer(10, O, A, seed=1), mirrored(in_file(1), device)
    for count in (3, 6, 9):
        new = transitions(random, count)
        host.add(*new)
        on_device.add(*new)
        assert same(on_device, host)
    on_device.storage.commit(Note(18, 18, "sim-0", {}, {}))
    host, again = ReplayBuffer(10, O, A, seed=5), mirrored(in_file(5), device)
    assert len(again) == 0
    again.recover()
    host.total_added, host.rows[:] = 18, on_device.rows
    assert same(again, host)


def test_a_batch_uses_the_same_device_memory_each_time(device: torch.device) -> None:
    buffer = mirrored(ReplayBuffer(10, O, A, seed=1), device)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(4)
    buffer.add(*transitions(np.random.default_rng(0), 5))
    first = buffer.sample(4)
    assert buffer.sample(4) is first
    assert all(tensor.device.type == device.type for tensor in first)
    assert len(buffer.sample(6).reward) == 6


def test_a_saved_state_can_be_restored_on_any_device(device: torch.device) -> None:
    random = np.random.default_rng(2)
    host = ReplayBuffer(10, O, A, seed=1)
    host.add(*transitions(random, 13))
    host.sample(5)
    arrays, scalars = host.state()
    on_device = mirrored(ReplayBuffer(10, O, A, seed=9), device)
    on_device.restore({"rows": arrays["rows"].copy()}, json.loads(json.dumps(scalars)))
    assert same(on_device, host)
    again = ReplayBuffer(10, O, A, seed=9)
    again.restore(*on_device.state())
    assert same(on_device, again)


def test_rows_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ConfigError, match=r"10 rows of a replay buffer are 0\.0 GB, which do not fit into"):
        mirrored(ReplayBuffer(10, O, A, seed=1), torch.device("cpu"))
