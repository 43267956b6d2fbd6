"""Compiled updates equal plain updates up to rounding.

tests/process/test_training.py covers a machine without a compiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.config.loading import parse
from td3_robot.learner.engine import compiled
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.replay_buffer.buffer import Batch, ReplayBuffer
from td3_robot.learner.replay_buffer.storage import Storage
from td3_robot.learner.training import Training
from td3_robot.specs import RobotSpec
from td3_robot.util import machine
from tests.learner.td3_cases import A, B, O, filled_buffer


def example() -> Batch:
    return ReplayBuffer(1, O, A, seed=2).example(B)


def trained(config: LearnerConfig, updates: int, *, compiles: bool = False) -> FastTD3:
    td3 = FastTD3(O, A, (24, 16), config, seed=3)
    buffer = filled_buffer()
    if compiles:
        compiled.use(td3, buffer.example(B))
        assert td3.compiled
    for _ in range(updates):
        td3.learn(buffer.sample(B))
    return td3


@pytest.mark.slow
@pytest.mark.skipif(machine.compiler_lack() is not None, reason=str(machine.compiler_lack()))
def test_compiled_updates_equal_plain_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and plain updates differ only by rounding. Compiled code from the cache gives the same bits as new code.

    Four steps at the learning rate 0.001 move a weight by up to 0.004. If a gradient is near Adam's ε of 1e-8, the step
    depends on rounding. So the test allows 1 % of 0.004. It covers both memory layouts: the actor's layers compute one
    row for each neuron, and critics with LayerNorm compute one row for each sample.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # after the test, monkeypatch restores this variable
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    config = LearnerConfig(learning_rate=1e-3, threads=2, layer_norm=True, critic_loss="huber", gradient_clip=0.2)
    plain, quick = trained(config, 4), trained(config, 4, compiles=True)
    assert plain.second is not None
    assert quick.second is None
    assert any((tmp_path / "td3-robot" / "compiled").rglob("*.so"))  # the compiler filled the cache
    expected, found = plain.state()[0], quick.state()[0]
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=4e-5, err_msg=name)
    assert found["adam_mean/actor.0.weight"].any()
    torch._dynamo.reset()
    again = trained(config, 4, compiles=True).state()[0]
    assert all(again[name].tobytes() == array.tobytes() for name, array in found.items())


Spoiled = Callable[[torch.Tensor], torch.Tensor]


def spoiling(change: Spoiled, call: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A compiler whose compiled functions return changed gradients, from function number ``call`` on."""
    made = 0

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        nonlocal made
        made += 1
        if made < call:
            return function

        def spoiled(*inputs: Any) -> Any:
            *rest, gradient = function(*inputs)
            return *rest, [change(value) for value in gradient]

        return spoiled

    return compiler


@pytest.mark.parametrize(("call", "which"), [(1, "critics"), (2, "policy")])
@pytest.mark.parametrize(
    "change",
    [
        lambda value: value * 1.02,
        lambda value: value * float("nan"),
        lambda value: value.t().contiguous().t() if value.dim() == 2 else value,
    ],
    ids=["too large", "not a number", "another memory layout"],
)
def test_a_wrong_compilation_is_not_used(
    change: Spoiled, call: int, which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "compile_whole", spoiling(change, call))
    td3 = FastTD3(O, A, (24, 16), LearnerConfig(threads=2), seed=3)
    compiled.use(td3, example())
    assert f"slower: the compiled gradient of the {which} differs from the original one" in caplog.text
    assert not td3.compiled
    assert td3.critics_gradient == td3._critics_gradient
    assert td3.actor_gradient == td3._actor_gradient
    assert td3.second is not None


def test_updates_are_not_compiled_for_a_user_without_a_home_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In some containers, the user has no home folder. Then there is no folder for compiled code."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home folder
    td3 = FastTD3(O, A, (24, 16), LearnerConfig(), seed=3)
    compiled.use(td3, example())
    assert not td3.compiled
    assert "slower: Could not determine home directory." in caplog.text


def test_compilation_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_whole", lambda function: function)
    config = LearnerConfig(learning_rate=1e-3)
    plain, asked = trained(config, 3).state(), trained(config, 3, compiles=True).state()
    assert plain[1] == asked[1]
    assert all(np.array_equal(array, asked[0][name]) for name, array in plain[0].items())


def test_a_later_failure_falls_back_to_plain_updates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, a batch has another memory layout, and the user has removed the compiler."""
    calls = 0

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def quick(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 2:  # the first call of each function succeeds
                raise OSError("No such compiler")
            return function(*inputs)

        return quick

    monkeypatch.setattr(compiled, "compile_whole", compiler)
    config = LearnerConfig(learning_rate=1e-3)
    plain, failing = trained(config, 3).state()[0], trained(config, 3, compiles=True).state()[0]
    assert all(np.array_equal(array, failing[name]) for name, array in plain.items())
    assert calls == 3
    assert caplog.text.count("updates are not compiled and therefore slower: No such compiler") == 1


@pytest.mark.parametrize("normalised", [False, True])
def test_the_example_has_the_memory_layout_of_batches(
    normalised: bool, spec: RobotSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code fits one memory layout. Another layout would start a compilation during training."""
    layouts: list[Any] = []

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def quick(*inputs: Any) -> Any:
            layouts.append([(tuple(value.shape), value.stride()) for value in inputs])
            return function(*inputs)

        return quick

    monkeypatch.setattr(compiled, "compile_whole", compiler)
    overrides = [f"learner.normalise_observations={str(normalised).lower()}", "learner.batch_size=8"]
    config = parse({"network": {"hidden": [8]}, "learner": {"compile": True, "buffer_size": 50}}, overrides)
    training = Training(spec, config, Storage)
    random, o, a = np.random.default_rng(4), spec.observation_size, spec.action_size
    rows = [random.standard_normal((20, *shape)).astype(np.float32) for shape in ((o,), (a,), (), (o,), ())]
    training.experience.replay.add(*rows)
    training.update(1e-3)
    training.update(1e-3)
    critics, policy = layouts[0], layouts[1]
    # The first two calls check the compiled code. Update 1 calls the critics, and update 2 calls both.
    assert layouts == [critics, policy, critics, critics, policy]
