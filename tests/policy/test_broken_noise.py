"""A noise with a mistake ends a training with one line of error. A server without a run keeps its robots safe."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from td3_robot.bundle import Bundle, Exploration
from td3_robot.cli.main import main
from td3_robot.core_types import Peer
from td3_robot.errors import EXIT_USAGE, ConfigError, NodeError
from td3_robot.messages import Step
from td3_robot.noises import NOISES
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.node import _Server
from td3_robot.policy.noise import BLOCK, Noise, rehearse
from td3_robot.specs import Float32
from tests.policy.served_robot import SAFE, actions, is_safe


class Silent(Noise):
    NUMBER = 1000

    def block(self, *_: Any) -> Any:
        """Return nothing, like a method without a return statement."""


class WrongShape(Noise):
    NUMBER = 1001

    def block(self, generator: np.random.Generator) -> Any:
        return generator.standard_normal(2)


class NotFinite(Noise):
    NUMBER = 1002

    def block(self, generator: np.random.Generator) -> Any:
        return generator.standard_normal(self.shape) * np.inf


class WrongBlocks(Noise):
    NUMBER = 1003

    def blocks(self, robots: NDArray[np.intp], *_: Any) -> Any:
        return np.zeros((len(robots), 1, self.shape[1]))


class Failing(Noise):
    NUMBER = 1004

    def block(self, *_: Any) -> Any:
        raise OSError("no\ndevice")


class Leaving(Noise):
    NUMBER = 1010

    def block(self, *_: Any) -> Any:
        sys.exit(3)


class FailingInit(Noise):
    NUMBER = 1005

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no\nlicence")


class WrongAct(Noise):
    NUMBER = 1006

    def act(self, *_: Any) -> Float32:
        return np.zeros((1, 7), np.float32)


class ActOfNumpy64(Noise):
    NUMBER = 1007

    def act(self, *_: Any) -> Any:
        return np.zeros((1, 2))


class ActNotFinite(Noise):
    NUMBER = 1008

    def act(self, *_: Any) -> Float32:
        return np.full((1, 2), np.nan, np.float32)


class BadLater(Noise):
    """Draws one good block, and then NaN."""

    NUMBER = 1009
    drawn = 0

    def block(self, generator: np.random.Generator) -> Any:
        self.drawn += 1
        return generator.standard_normal(self.shape) if self.drawn == 1 else np.full(self.shape, np.nan)


SHAPE = (BLOCK, 2)
DRAWING = {
    Silent: f"block() returned NoneType; it must return an array of shape {SHAPE}",
    WrongShape: f"block() returned float64 of shape (2,); it must return an array of shape {SHAPE}",
    NotFinite: "block() returned numbers that are not finite in float32; all numbers must be finite",
    WrongBlocks: (
        f"draw() or blocks() returned float64 of shape (1, 1, 2); it must return an array of shape (1, {BLOCK}, 2)"
    ),
    Failing: "OSError: no device",
    Leaving: "SystemExit: 3",
    FailingInit: "RuntimeError: no licence",
}
"""Noises that fail before they draw the first numbers, and the problem."""
ACTING = {
    WrongAct: "act() returned float32 of shape (1, 7); it must return float32 of shape (1, 2)",
    ActOfNumpy64: "act() returned float64 of shape (1, 2); it must return float32 of shape (1, 2)",
    ActNotFinite: "act() returned actions that are not finite; all actions must be finite",
}
BROKEN: dict[type[Noise], str] = {**DRAWING, **ACTING}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the noises to the table, as an installed package does."""
    for noise in (*BROKEN, BadLater):
        monkeypatch.setitem(NOISES.rows, noise.__name__, f"{__name__}:{noise.__name__}")


@pytest.fixture
def serve(peer: Peer, make_bundle: Callable[..., Bundle]) -> Callable[..., PolicyCore]:
    """Makes the core of a server whose policy has this noise."""

    def make(noise: type[Noise], **options: Any) -> PolicyCore:
        core = PolicyCore(9, **options)
        core.load(1, replace(make_bundle(1, tame=True), exploration=Exploration(noise.__name__, 0.1)))
        core.step([(peer, peer.hello)], 0.0)
        return core

    return make


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("noise", BROKEN)
def test_the_server_sends_the_safe_action_or_none(
    noise: type[Noise], guarded: bool, peer: Peer, serve: Callable[..., PolicyCore], make_step: Callable[..., Step]
) -> None:
    core = serve(noise, safety=SAFE) if guarded else serve(noise)
    for number in (1, 2):
        answers = actions(core.step([(peer, make_step(number))], number / 100))
        assert [is_safe(action) for action in answers] == [True] * guarded
    assert core.counters["not_finite"] == 2
    assert core.answers.noise_problem == f"exploration noise '{noise.__name__}': {BROKEN[noise]}"


def test_a_noise_may_fail_in_a_later_block(
    peer: Peer, serve: Callable[..., PolicyCore], make_step: Callable[..., Step]
) -> None:
    core = serve(BadLater)
    assert actions(core.step([(peer, make_step(BLOCK - 1))], 0.0))
    assert not core.answers.noise_problem
    assert not actions(core.step([(peer, make_step(BLOCK))], 0.1))
    assert core.answers.noise_problem.startswith("exploration noise 'BadLater': block() returned numbers that are not")


def test_a_policy_with_a_good_noise_acts_again(
    peer: Peer,
    serve: Callable[..., PolicyCore],
    make_step: Callable[..., Step],
    make_bundle: Callable[..., Bundle],
) -> None:
    core = serve(Failing)
    assert not actions(core.step([(peer, make_step(1))], 0.0))
    core.load(2, make_bundle(1, kind="gaussian_v2", scale=0.1, tame=True))
    [action] = actions(core.step([(peer, make_step(2))], 0.1))
    assert action.weights_version == 2


def told(core: PolicyCore, folder: Path | None) -> None:
    """Call the method of the server's process twice, as after two turns of the core."""
    server = SimpleNamespace(core=core, node=SimpleNamespace(folder=folder), _noise_problem="")
    for _ in range(2):
        _Server._tell_noise_problem(cast("_Server", server))


def test_the_server_of_a_run_ends_and_a_deployed_server_logs_the_problem_once(
    peer: Peer,
    serve: Callable[..., PolicyCore],
    make_step: Callable[..., Step],
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = serve(NotFinite)
    told(core, Path("run"))
    core.step([(peer, make_step(1))], 0.0)
    problem = f"exploration noise 'NotFinite': {BROKEN[NotFinite]}"
    with pytest.raises(NodeError, match=problem.replace("(", r"\(").replace(")", r"\)")) as error:
        told(core, Path("run"))
    assert error.value.exit_code == EXIT_USAGE, "the supervisor would start the server again"
    caplog.clear()
    told(core, None)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(f"{problem}; ")


@pytest.mark.parametrize("noise", BROKEN)
def test_a_rehearsal_finds_the_mistakes_of_block_and_init(noise: type[Noise]) -> None:
    if noise in ACTING:
        rehearse(noise.__name__, {}, 1, 2)  # act() is not called
        return
    with pytest.raises(ConfigError) as refused:
        rehearse(noise.__name__, {}, 1, 2)
    assert str(refused.value) == f"exploration noise '{noise.__name__}': {BROKEN[noise]}"


def test_a_training_with_a_broken_noise_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "pendulum", "--out", str(run), "--set", "exploration.kind=Silent"]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    wanted = (
        "td3-robot train: exploration.kind is 'Silent': exploration noise 'Silent': block() returned NoneType; it must"
    )
    assert line.startswith(wanted)
    assert not run.exists()
