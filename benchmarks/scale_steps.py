"""Record the Steps of a walking robot for benchmarks/scale.py, and replay them as the Steps of many robots."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.bench.example import step
from td3_robot.core_types import Peer
from td3_robot.messages import Phase, Record
from td3_robot.specs import RobotSpec
from td3_robot.transport import codec
from td3_robot.transport import link as handshake

TASK, POLICY = "Walker2D", "walker2d"
_FIELDS = ("phase", "episode", "episode_step", "observation", "reward", "action")


def record(file: Path, episodes: int = 2) -> float:
    """Record whole episodes of one robot. Return the mean processor time of a simulated step, in s."""
    from td3_robot_sims import tasks  # imported lazily: source processes need no simulator
    from td3_robot_sims.vector_env import VectorEnvironment

    from td3_robot.policies import load_policy

    policy = load_policy(POLICY)
    envs = VectorEnvironment(lambda seed: tasks.make(TASK, seed), 1, 0, "recorded", 0)
    rows: dict[str, list[Any]] = {name: [] for name in _FIELDS}
    action = np.zeros((1, envs.spec.action_size), np.float32)
    processor, ended = 0.0, 0
    while ended < episodes:
        begin = time.process_time()
        envs.step(action)
        processor += time.process_time() - begin
        for name in _FIELDS:
            rows[name].append(getattr(envs, name)[0].copy())
        ended += int(envs.phase[0] >= Phase.TERMINATED)
        action = policy.predict(envs.observation)
    envs.close()
    description = json.dumps(envs.spec.describe())
    np.savez(file, spec=description, **{name: np.array(values) for name, values in rows.items()})  # type: ignore[arg-type]
    return processor / len(rows["phase"])


class Replay:
    """A source that replays the recording. Each robot begins at a random position in the recording.

    Attributes:
        step: the next Step.
        transitions: number of transitions of this source up to and including ``step``.
    """

    def __init__(self, spec: RobotSpec, rows: dict[str, Any], source: str, robots: int, incarnation: int) -> None:
        self.spec = spec
        self.transitions = 0
        self._rows = rows
        self._source, self._incarnation = source, incarnation
        self._length = len(rows["phase"])
        seed = int.from_bytes(source.encode()[-2:], "little")
        self._at = np.random.default_rng(seed).integers(0, self._length, robots)
        self._lap = np.zeros(robots, np.uint64)
        self._episodes = np.uint64(rows["episode"][-1] + 1)
        self.step = self._made(0)

    @classmethod
    def load(cls, file: Path, source: str, robots: int, incarnation: int = 0) -> Replay:
        with np.load(file) as arrays:
            spec = RobotSpec.from_description(json.loads(str(arrays["spec"])))
            return cls(spec, {name: arrays[name] for name in _FIELDS}, source, robots, incarnation)

    def advance(self) -> None:
        """Make the next Step."""
        self._at += 1
        again = self._at == self._length
        self._at[again] = 0
        self._lap += again
        self.step = self._made(self.step.sequence + 1)

    def _made(self, sequence: int) -> Any:
        rows = {name: self._rows[name][self._at] for name in _FIELDS}
        rows["episode"] = rows["episode"] + self._lap * self._episodes
        if sequence:
            self.transitions += int(np.count_nonzero(rows["phase"]))
        changes = {**rows, "transitions": self.transitions, "incarnation": self._incarnation}
        return step(sequence, 0, _NO_NUMBERS, self._source, **changes)


class _NoNumbers:
    """Replaces a generator of random numbers, because a replayed Step needs no random numbers."""

    def normal(self, size: Any) -> Any:
        return np.empty(size, np.float32)


_NO_NUMBERS: Any = _NoNumbers()


def recording_costs(file: Path, robots: int, steps: int = 2000) -> dict[str, float]:
    """Return how many bytes a Step takes in a recording, and the recorder's processor time (µs) for a Step."""
    from td3_robot.config.schema import Config, RecordConfig
    from td3_robot.recording.facts import facts_of_this_machine
    from td3_robot.recording.recorder import Recorder

    replay = Replay.load(file, "robot", robots)
    peer = Peer("recorder", b"robot", handshake.hello("node", "robot", client=0), {})
    records = []
    for sequence in range(steps):
        records.append(Record("step", "policy", sequence, 0, codec.encode(replay.step)))
        replay.advance()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.mcap"
        recorder = Recorder(path, facts_of_this_machine(Config()), RecordConfig(enabled=True), 0)
        begin = time.process_time()
        for number, item in enumerate(records):
            recorder.step([(peer, item)], number / 60)
        recorder.close(0.0)
        processor = time.process_time() - begin
        size = path.stat().st_size
    return {"file_bytes": size / steps, "recorder_us": processor / steps * 1e6}


def policy_costs(robots: int) -> float:
    """Return the median time (µs) in which a policy server decodes a Step and computes and encodes its Action."""
    from td3_robot.bench.policy import server_time

    return server_time(robots, 3000)["all"]["p50"]
