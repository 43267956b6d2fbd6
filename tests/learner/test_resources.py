"""Compares the memory and disk that a learner announces with the memory and disk that it uses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config.loading import load, parse
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.learner.replay_buffer.storage import ROWS, File
from td3_robot.learner.resources import announce, needs
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import files, machine

# This many rows need 40 MB. A row has 10 float32 numbers: two observations (3 numbers each), an action (2 numbers), the
# reward and the discount.
MANY = 1_000_000

CHILD = """
import ctypes, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: otherwise the kernel may use pages of 2 MB
from pathlib import Path
import numpy as np
from td3_robot.config import loading as configuration
from td3_robot.learner.checkpointing import checkpoint, state
from td3_robot.learner.factory import make_core
from td3_robot.learner.replay_buffer.storage import File, Note, Storage
from td3_robot.specs import Channel, RobotSpec

folder, config = Path(sys.argv[1]), configuration.load(sys.argv[2])
many, in_file = config.learner.buffer_size, config.learner.replay_storage == "file"
durable = in_file and config.timing != "lockstep"
spec = RobotSpec("Toy", tuple(Channel(n, "m", -5, 5) for n in "abc"), tuple(Channel(n, "N", -1, 1) for n in "lr"), 0.02)

def room(capacity, width):
    return File(folder / "replay", capacity, width, recovers=durable) if in_file else Storage(capacity, width)

def memory():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def report(name, before):
    print(name, memory() - before, flush=True)

def add(replay, count):
    rows = np.ones((1000, 10), np.float32)
    for _ in range(count // len(rows)):
        replay.add(rows[:, :3], rows[:, 3:5], rows[:, 5], rows[:, 7:], rows[:, 6])

def update(training):
    for _ in range(2):
        training.algorithm.learn(training.experience.replay.sample(256))

other = make_core(configuration.parse({"learner": {"buffer_size": 1000}}))
other.start(spec)
add(other.training.experience.replay, 1000)
update(other.training)  # libraries take memory at their first use; this memory must not count
before = memory()
if sys.argv[3] == "fill":
    core = make_core(config, storage=room)
    core.start(spec)
    add(core.training.experience.replay, many)
    core.training.experience.replay.storage.commit(Note(many, many, "", {}, core.training.seen()))
    update(core.training)
    report("kept", before)
    path = checkpoint.save(folder, many, *state.save(core, 0.0), 2)
    print("checkpoint", path.stat().st_size, flush=True)
else:
    path, arrays, scalars = checkpoint.load_newest(folder)
    core = make_core(config, storage=room)
    state.resume(core, arrays, scalars)
    report("memory", before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure a process")
@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.replay=lap",),
        ("learner.replay=lap", "learner.replay_storage=file"),
        ("timing=lockstep", "learner.replay_storage=file"),
    ],
    ids=["memory", "file", "lock-step"],
)
def test_announced_sizes_equal_measured_sizes(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """One process fills a buffer and saves a checkpoint. Another process resumes from this checkpoint.

    The test measures the memory of both processes and the sizes of their files. The tolerance for memory and the
    checkpoint is 5 %, or 6 MB if that is more, because libraries also take memory.
    """
    config = parse({}, (f"learner.buffer_size={MANY}", f"total_steps={MANY}", *overrides))
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    used: dict[str, int] = {}
    for what in ("fill", "resume"):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(tmp_path / "config.yaml"), what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        used |= {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}
    need = needs(config, 3, 2)
    announced = {
        "kept": need.kept,
        "memory": need.memory,
        "checkpoint": need.checkpoints // (config.checkpoint.keep + 1),
    }
    assert used == {name: pytest.approx(number, rel=0.05, abs=6e6) for name, number in announced.items()}
    rows = tmp_path / "replay" / ROWS
    assert need.replay_file == (rows.stat().st_size if rows.exists() else 0)


def storages(thing: Any, found: dict[int, int], seen: set[int]) -> dict[int, int]:
    """Return the size in bytes of each memory block that the tensors of an object use. The keys are addresses."""
    if id(thing) in seen:
        return found
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, dict):
        for item in thing.values():
            storages(item, found, seen)
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            storages(item, found, seen)
    elif type(thing).__module__.startswith("td3_robot.learner") and hasattr(thing, "__dict__"):
        storages(vars(thing), found, seen)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_announced_gpu_memory_equals_the_memory_of_the_tensors(precision: str, device: torch.device) -> None:
    """The GPU holds the networks, one batch and a copy of the rows.

    The test also runs on the CPU, with the same tensors. The tolerance of 2 % covers gaps between parameters.
    """
    config = parse(
        {"learner": {"device": "cuda", "precision": precision, "policy_average": 0.01, "buffer_size": 20_000}}
    )
    td3 = FastTD3(22, 6, config.network.hidden, config.learner, 0, device)
    replay = ReplayBuffer(20_000, 22, 6, 0)
    replay.use_device(device)
    replay.add(*(np.ones((300, *shape), np.float32) for shape in ((22,), (6,), (), (22,), ())))
    td3.learn(replay.sample(256))
    blocks = storages(td3, {}, set())
    for name in ("_rows", "_batch"):
        storages(getattr(replay._on_device, name), blocks, set())
    assert sum(blocks.values()) == pytest.approx(needs(config, 22, 6).device, rel=0.02)


def small(*overrides: str) -> Config:
    """Return a config with 100,000 rows and 5 hidden units. A row has 10 float32 numbers, so the rows need 4 MB."""
    return parse({"network": {"hidden": [5]}, "learner": {"buffer_size": 100_000}}, overrides)


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the free bytes of memory and disk. None means unknown."""

    def have(memory: int | None, disk: int | None) -> None:
        monkeypatch.setattr(machine, "available_memory", lambda: memory)
        monkeypatch.setattr(files, "free", lambda _: disk)

    return have


def test_needs_match_a_hand_calculation() -> None:
    """The actor has 3 inputs, 5 hidden units and 2 outputs: 5 · 3 + 5 + 2 · 5 + 2 = 32 numbers.

    The two critics have 5 inputs, 5 hidden units and one output: 2 · (5 · 5 + 5 + 5 + 1) = 72 numbers. The learner
    keeps these 32 + 72 = 104 numbers five times: weights, targets, gradient and Adam's two moments. A checkpoint holds
    all of them except the gradient. A checkpoint also holds the rows, unless the run is free-running and has a replay
    file. With LAP, a checkpoint holds one priority of 8 bytes for each row. The disk must hold two kept checkpoints and
    a new one. The sum tree has three levels of 3125 · 32, 98 · 32 and 4 · 32 nodes. A node has 8 bytes. A GPU holds the
    rows, a batch of 256 rows of 40 bytes, and the networks.
    """
    rows, networks, saved = 4_000_000, 5 * 104 * 4, 4 * 104 * 4
    plain = needs(small(), 3, 2)
    assert plain == (rows + networks, 2 * rows + networks + saved, 0, 3 * (rows + saved), 0)
    tree, priorities = 8 * (100_000 + 3136 + 128), 800_000
    lap = needs(small("learner.replay=lap", "learner.replay_storage=file"), 3, 2)
    assert lap == (tree + networks, tree + networks + saved + priorities, rows, 3 * (saved + priorities), 0)
    gpu = needs(small("learner.device=cuda"), 3, 2)
    assert gpu == (rows, 2 * rows + saved, 0, 3 * (rows + saved), rows + 256 * 40 + networks)
    # This learner saves only one checkpoint, at its end. needs() assumes total_steps rows and one more for each robot.
    last = small("total_steps=30000", "checkpoint.every=0")
    assert needs(last, 3, 2).checkpoints == 30_001 * 40 + saved
    lockstep = needs(small("timing=lockstep", "learner.replay_storage=file"), 3, 2)
    assert lockstep == (networks, networks + saved + rows, rows, 3 * (saved + rows), 0)


def test_needs_that_fit_are_announced_and_larger_needs_are_refused(machine_of: Any, tmp_path: Path) -> None:
    """The learner needs 8,003,744 bytes of memory and 12,004,992 bytes of disk.

    A row has 40 bytes. The memory holds each row twice, in the buffer and in a loaded checkpoint: 80 bytes. The disk
    holds each row three times, once in each of three checkpoints: 120 bytes. The networks need the remaining 3,744
    bytes of memory and 4,992 bytes of disk.
    """
    run = RunFolder(tmp_path / "run")
    machine_of(8_003_744, 12_004_992)
    assert announce(small(), 3, 2, run) == (
        "networks and a replay buffer of 100,000 transitions: 4.0 MB of memory; with checkpoints: "
        f"8.0 MB of memory (8.0 MB free), 12.0 MB of the disk of {str(run.path)!r} (12.0 MB free)"
    )
    for memory, disk, words in (
        (8_003_743, None, "8,003,744 bytes of memory, and 8,003,743 are free; allowed: a buffer of at most 99999"),
        (4_003_744, None, "8,003,744 bytes of memory, and 4,003,744 are free; allowed: a buffer of at most 50000"),
        (3_800, None, "8,003,744 bytes of memory, and 3,800 are free; no transition would fit"),
        (
            None,
            12_004_991,
            f"12,004,992 bytes of the disk of {str(run.path)!r}, and 12,004,991 are free; allowed: a buffer of at most",
        ),
    ):
        machine_of(memory, disk)
        with pytest.raises(ConfigError, match=re.escape(f"learner.buffer_size is 100000: the learner needs {words}")):
            announce(small(), 3, 2, run)
    machine_of(None, None)
    assert "memory (free space unknown)" in announce(small(), 3, 2, run)
    gpu = small("learner.device=cuda")  # bytes: rows 4,000,000, batch 10,240, networks 2,080
    assert "4.0 MB of the GPU's memory (4.0 MB free)" in announce(gpu, 3, 2, run, 4_012_320)
    words = "needs 4,012,320 bytes of the GPU's memory, and 4,012,319 are free; allowed: a buffer of at most 99999"
    with pytest.raises(ConfigError, match=words):
        announce(gpu, 3, 2, run, 4_012_319)


def test_without_a_replay_buffer_the_error_does_not_name_buffer_size(machine_of: Any, tmp_path: Path) -> None:
    machine_of(100, None)
    with pytest.raises(ConfigError, match=r"^the learner needs [\d,]+ bytes of memory, and 100 are free$"):
        announce(load("cartpole_a2c"), 3, 2, RunFolder(tmp_path / "run"))


def test_existing_files_and_loaded_arrays_do_not_count_again(machine_of: Any, tmp_path: Path) -> None:
    """The replay file and the checkpoints exist. The learner needs 3,744 bytes of memory, of which 1,000 are loaded."""
    config, run = small("learner.replay_storage=file"), RunFolder(tmp_path)
    File(run.replay, 100_000, 10).close()
    run.checkpoints.mkdir()
    (run.checkpoints / "checkpoint-1.safetensors").write_bytes(bytes(needs(config, 3, 2).checkpoints))
    machine_of(3_744 - 1_000, 0)
    announce(config, 3, 2, run, loaded=1_000)
    # A learner that saves only at its end writes a checkpoint next to the existing one, so it needs free disk space.
    saves_at_its_end = small("learner.replay_storage=file", "checkpoint.every=0")
    with pytest.raises(ConfigError, match="bytes of the disk"):
        announce(saves_at_its_end, 3, 2, run, loaded=1_000)
    machine_of(3_744 - 1_001, 0)
    with pytest.raises(ConfigError, match="needs 2,744 bytes of memory"):
        announce(config, 3, 2, run, loaded=1_000)
    machine_of(None, None)
    gpu = small("learner.replay_storage=file", "learner.device=cuda")  # needs less memory than is loaded
    assert announce(gpu, 3, 2, run, loaded=10_000).endswith(
        "checkpoints: 4.0 MB of the GPU's memory (free space unknown)"
    )
