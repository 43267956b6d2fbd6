"""The shipped simulator backends, and one of an imaginary package, keep the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from td3_robot_sims import tasks

from tests.contract.simulator_backend import SimulatorBackendContract


@pytest.mark.parametrize("task", ["Walker2D", "Ant", "HalfCheetah", "Hopper", "Humanoid"])
class TestBullet(SimulatorBackendContract): ...


@pytest.mark.parametrize(
    "task", ["gymnasium:Pendulum-v1", "gymnasium:MountainCarContinuous-v0", "discrete:CartPole-v1"]
)
class TestGymnasium(SimulatorBackendContract): ...


@pytest.mark.parametrize("task", ["toy:Point"])
class TestPackage(SimulatorBackendContract):
    @pytest.fixture(autouse=True)
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(tasks.BACKENDS.rows, "toy", "tests.contract.point_mass:PointMassBackend")
            yield

    def test_tasks_of_packages_are_listed(self, task: str) -> None:
        assert task in tasks.names()
