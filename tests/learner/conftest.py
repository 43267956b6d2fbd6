"""Fixtures of the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from td3_robot.learner.factory import make_core
from td3_robot.messages import Step
from td3_robot.specs import RobotSpec
from tests.learner.world import World, config


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread. For small matrices, more threads do not help, and they cost time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the learner can run on. Without a GPU, pytest skips the tests on the GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU here")
    return torch.device(request.param)


@pytest.fixture
def world(spec: RobotSpec, make_step: Callable[..., Step]) -> World:
    """A learner with the configuration of :func:`tests.learner.world.config`, and fake peers."""
    return World(make_core(config()), spec, make_step)
