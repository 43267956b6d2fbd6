"""Compares the compiled update with the plain engine, and covers machines that cannot compile.

tests/process/test_training.py trains on a machine without a compiler.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.engine import compiled, selection
from td3_robot.learner.engine.compiled import CompiledTD3
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.util import machine
from tests.learner.td3_cases import CONFIGS, A, B, O, batches, distance, filled_buffer, tensors_of, weights_of

needs_compiler = pytest.mark.skipif(machine.compiler_lack() is not None, reason=str(machine.compiler_lack()))


def pair(config: LearnerConfig, hidden: tuple[int, ...] = (24, 16)) -> tuple[FastTD3, CompiledTD3]:
    """A plain and a compiled engine with the same weights.

    The weights of the last layer of the actor and its target are 8 times as large as usual, so that some target actions
    reach -1 or 1.
    """
    engines = FastTD3(O, A, hidden, config, seed=11), CompiledTD3(O, A, hidden, config, seed=11)
    for engine in engines:
        for role in ("online", "target"):
            tensors_of(engine, role)[f"actor.{len(hidden)}.weight"].mul_(8)
        engine.restored()
    return engines


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_compiled_updates_equal_plain_updates(config: LearnerConfig, threads: int) -> None:
    """Compiled and plain updates differ only by rounding.

    tests/learner/engine/test_td3.py explains why a tolerance of 5e-5 detects a wrong update.
    The test covers three hidden layers, and batches with an odd number of rows, which have unequal halves.
    """
    plain, quick = pair(replace(config, threads=threads), (24, 16, 20))
    assert quick.compiled
    assert not plain.compiled
    for batch in batches(25, seed=12, size=33):
        expected, found = plain.learn(batch), quick.learn(batch)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, atol=1e-4, rtol=0)
    for role in ("online", "target", "adam_mean", "adam_square"):
        assert distance(weights_of(quick, role), weights_of(plain, role)) < 5e-5, role
    assert plain.metrics() == pytest.approx(quick.metrics(), rel=1e-3, abs=1e-5)
    for name, tensor in plain.actor_tensors(averaged=True).items():
        np.testing.assert_allclose(quick.actor_tensors(averaged=True)[name], tensor, atol=5e-5)


@needs_compiler
@pytest.mark.parametrize("layer_norm", [False, True])
def test_compiled_bfloat16_is_as_exact_as_plain_bfloat16(layer_norm: bool) -> None:
    """In bfloat16, plain and compiled updates differ from float32 by rounding.

    The test compares Adam's first moments, which are means of the gradients. The error is the norm of the difference
    from float32, over all tensors. The error of compiled updates is at most 1.2 times the error of plain updates. With
    this seed, the factor is 0.8 to 0.9.
    """
    config = LearnerConfig(layer_norm=layer_norm, threads=2)
    (exact, _), (plain, quick) = (pair(replace(config, precision=each), (400, 300)) for each in ("fp32", "bf16"))
    for batch in batches(2, seed=21, size=256):
        for engine in (exact, plain, quick):
            engine.learn(batch)

    def gradients(engine: FastTD3) -> Any:
        return np.concatenate([moment.ravel() for moment in weights_of(engine, "adam_mean").values()])

    errors = [np.linalg.norm(gradients(engine) - gradients(exact)) for engine in (plain, quick)]
    print(errors)
    assert errors[0] > 0
    assert errors[1] <= 1.2 * errors[0]


@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_updates_are_deterministic_and_a_restored_engine_continues(precision: Any) -> None:
    config = LearnerConfig(precision=precision, threads=2, layer_norm=True, policy_average=0.1)
    stream = batches(6, seed=31, size=64)

    def run(restores: bool) -> dict[str, Any]:
        _, td3 = pair(config, (70, 50))
        for number, batch in enumerate(stream):
            if restores and number == 3:
                state = td3.state()
                _, td3 = pair(config, (70, 50))
                td3.restore(*state)
            td3.learn(batch)
        return td3.state()[0]

    one, again, restored = run(False), run(False), run(True)
    for name, array in one.items():
        assert array.tobytes() == again[name].tobytes() == restored[name].tobytes(), name


@needs_compiler
def test_batches_from_the_replay_buffer_are_read_correctly() -> None:
    """The tensors of a batch are columns of one larger array. So in memory, there are gaps between their rows."""
    plain, quick = pair(LearnerConfig(threads=2, learning_rate=1e-3))
    buffer = filled_buffer()
    for _ in range(4):
        batch = buffer.sample(B)
        assert not batch.observation.is_contiguous()
        plain.learn(batch)
        quick.learn(batch)
    assert distance(weights_of(quick), weights_of(plain)) < 5e-5


@needs_compiler
@pytest.mark.parametrize("clip", [None, 0.2])
def test_batch_sizes_may_change_and_nan_spreads_as_in_the_plain_engine(clip: float | None) -> None:
    """After updates with a reward that is NaN, the same weights are NaN in both engines."""
    plain, quick = pair(LearnerConfig(threads=2, gradient_clip=clip))
    for size in (32, 1, 33, 32):
        for batch in batches(2, seed=size, size=size):
            plain.learn(batch)
            quick.learn(batch)
    assert distance(weights_of(quick), weights_of(plain)) < 5e-5
    wrong = batches(1, seed=5)[0]
    wrong.reward[3] = float("nan")
    for engine in (plain, quick):
        engine.learn(wrong)
        engine.learn(wrong)
    for name, tensor in tensors_of(plain).items():
        assert torch.equal(tensor.isnan(), tensors_of(quick)[name].isnan()), name
    assert tensors_of(quick)["critic2.0.weight"].isnan().any()


@needs_compiler
def test_the_second_thread_works_and_does_not_change_the_results() -> None:
    """Work has two shares. The first thread computes share 0. The thread that is free first computes share 1.

    With these sizes, share 0 takes so long that the second thread begins share 1 before the first thread is free.
    """
    config = LearnerConfig(threads=2)
    one, two = (CompiledTD3(O, A, (400, 300), config, seed=3) for _ in range(2))
    for batch in batches(40, seed=41, size=256):
        one.learn(batch)
        two.learn(batch)
    assert one.shares_of_second_thread > 0
    assert all(array.tobytes() == two.state()[0][name].tobytes() for name, array in one.state()[0].items())
    assert CompiledTD3(O, A, (24, 16), LearnerConfig(), seed=3).shares_of_second_thread == 0


@needs_compiler
def test_the_second_thread_ends_with_its_engine() -> None:
    before = set(threading.enumerate())
    td3: CompiledTD3 | None = CompiledTD3(O, A, (24, 16), LearnerConfig(threads=2), seed=3)
    (second,) = set(threading.enumerate()) - before
    assert td3 is not None
    td3.learn(batches(1, seed=1)[0])
    del td3
    gc.collect()
    second.join(60)
    assert not second.is_alive()


@pytest.fixture
def forgets() -> Iterator[None]:
    """The process forgets the compiled code before and after the test."""
    forget()
    yield
    forget()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: None) -> Path:
    """An empty folder for compiled code."""
    del forgets  # needed only for its effect
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "td3-robot" / "compiled"


def forget() -> None:
    compiled.available.cache_clear()
    compiled.library.cache_clear()


@needs_compiler
def test_the_learner_compiles_once_for_a_machine(empty_cache: Path) -> None:
    assert compiled.available()
    (made,) = empty_cache.iterdir()
    first = made.stat().st_mtime_ns
    forget()
    assert compiled.available()
    assert [path.stat().st_mtime_ns for path in empty_cache.iterdir()] == [first]


@needs_compiler
def test_a_damaged_file_in_the_cache_is_compiled_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``CXX`` holds a compiler and an option here."""
    monkeypatch.setenv("CXX", f"{' '.join(machine.compiler())} -w")
    path = compiled.library_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert compiled.available()
    assert path.read_bytes() != b"not a library"
    assert list(empty_cache.iterdir()) == [path]


@needs_compiler
@pytest.mark.usefixtures("forgets")
def test_wrong_compiled_code_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = CompiledTD3.update_critics
    monkeypatch.setattr(
        CompiledTD3,
        "update_critics",
        lambda self, batch, noise: right(self, batch._replace(reward=batch.reward * 1.1), noise),
    )
    assert not compiled.available()
    assert "slower: the compiled update in fp32 differs from the plain update" in caplog.text


@pytest.mark.usefixtures("forgets")
def test_updates_are_not_compiled_for_a_user_without_a_home_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In some containers, the user has no home folder. Then there is no folder for compiled code."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home folder
    assert not compiled.available()
    assert "slower: Could not determine home directory." in caplog.text


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("/nowhere/g++", "No such file or directory: '/nowhere/g++'"), ("false", "false failed: no message")],
)
def test_without_a_working_compiler_the_plain_engine_learns(
    compiler: str, why: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    config = LearnerConfig(compile=True)
    assert selection.implementation(config) is FastTD3
    assert selection.implementation(config) is FastTD3
    (message,) = caplog.messages
    assert message.startswith("updates are not compiled and therefore slower: ")
    assert why in message
    assert not list(empty_cache.glob("*.so"))
