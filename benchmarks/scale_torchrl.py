"""TorchRL's RayCollector for benchmarks/scale.py: collectors with replayed robots, and a replay buffer."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import scale_ray
import torch
from scale_steps import Replay
from tensordict import TensorDict
from torchrl.collectors.distributed import RayCollector
from torchrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import EnvBase

_FRAME = 960  # transitions in one batch
_STORED = 20_000  # capacity of the buffer in transitions, as with td3-robot


class Replayed(EnvBase):  # type: ignore[misc]
    """Robots that replay recorded Steps and ignore actions. Their episodes never end, so TorchRL resets no robot."""

    def __init__(self, steps: str, robots: int) -> None:
        super().__init__(device="cpu", batch_size=[robots])
        self._replay = Replay.load(Path(steps), f"source-{os.getpid()}", robots)
        spec = self._replay.spec
        self.observation_spec = Composite(
            observation=Unbounded((robots, spec.observation_size), dtype=torch.float32), shape=[robots]
        )
        self.action_spec = Bounded(-1, 1, (robots, spec.action_size), dtype=torch.float32)
        self.reward_spec = Unbounded((robots, 1), dtype=torch.float32)

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        del tensordict
        return TensorDict({"observation": torch.from_numpy(self._replay.step.observation)}, self.batch_size)

    def _step(self, tensordict: Any) -> TensorDict:
        del tensordict
        self._replay.advance()
        step = self._replay.step
        never = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        values = {
            "observation": torch.from_numpy(step.observation),
            "reward": torch.from_numpy(step.reward[:, None]),
            "done": never,
            "terminated": never.clone(),
        }
        return TensorDict(values, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        del seed


def measure(steps: Path, sources: int, robots: int, seconds: float) -> dict[str, float]:
    """Collect batches into a replay buffer in this process, and count Steps.

    TorchRL calls a transition a frame. One Step counts as one frame for each robot.
    """
    buffer = ReplayBuffer(storage=LazyTensorStorage(_STORED))
    collector = RayCollector(
        [partial(Replayed, str(steps), robots)] * sources,
        None,  # random actions
        frames_per_batch=_FRAME,
        total_frames=10**9,
        num_collectors=sources,
        sync=False,
        remote_configs={"num_cpus": 1, "num_gpus": 0, "memory": 200_000_000},
    )
    try:
        batches = iter(collector)
        for _ in range(2 * sources):  # the processes start during the first batches
            buffer.extend(next(batches).reshape(-1))
        count, begin, before, own = 0, time.monotonic(), scale_ray.family(), time.process_time()
        while time.monotonic() - begin < seconds:
            batch = next(batches).reshape(-1)
            buffer.extend(batch)
            count += len(batch)
        passed, own, after = time.monotonic() - begin, time.process_time() - own, scale_ray.family()
    finally:
        collector.shutdown(shutdown_ray=False)
    return {
        "steps_per_s": count / robots / passed,
        "all_us": own / count * robots * 1e6,
        "family_us": scale_ray.spent(before, after) / count * robots * 1e6,
    }
