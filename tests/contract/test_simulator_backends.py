"""The shipped simulator backends, and examples of installed packages, pass the contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.bullet.backend import BulletBackend
from td3_robot_sims.backends.bullet.robots import RobotModel

from tests.contract.simulator_backend import SimulatorBackendContract


@pytest.mark.parametrize("task", ["Walker2D", "Ant", "HalfCheetah", "Hopper", "Humanoid"])
class TestBullet(SimulatorBackendContract): ...


@pytest.mark.parametrize(
    "task", ["gymnasium:Pendulum-v1", "gymnasium:MountainCarContinuous-v0", "discrete:CartPole-v1"]
)
class TestGymnasium(SimulatorBackendContract): ...


TWO_LEGS = RobotModel(
    name="TwoLegs",
    file=str(Path(__file__).parent / "two_legs.urdf"),
    joints=(("left_hip", 50.0), ("right_hip", 50.0)),
    power=1.0,
    feet=("left_leg", "right_leg"),
    alive=lambda height, pitch, contacts: 1.0 if height > 0.2 and abs(pitch) < 1 else -1.0,  # noqa: ARG005
    base_height=0.36,
)


class OwnRobots(BulletBackend):
    """An example of a package that adds a robot from a URDF file."""

    models = {"TwoLegs": TWO_LEGS}  # noqa: RUF012


@pytest.fixture
def installed() -> Iterator[None]:
    """Add two backends to the table, as an installed package does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.BACKENDS.rows, "toy", "tests.contract.point_mass:PointMassBackend")
        patch.setitem(tasks.BACKENDS.rows, "own", "tests.contract.test_simulator_backends:OwnRobots")
        yield


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("task", ["own:TwoLegs"])
class TestOwnRobot(SimulatorBackendContract):
    def test_robot_stands_on_the_floor(self, task: str) -> None:
        """The legs reach 0.35 m below the centre of the body."""
        environment = tasks.make(task, 1)
        observation = environment.reset()
        names = [channel.name for channel in environment.spec.observations]
        for _ in range(20):
            observation = environment.step(0 * environment.spec.action_high).observation
        assert observation[names.index("left_leg.contact")] == 1
        assert abs(observation[names.index("torso.height")]) < 0.05
        environment.close()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("task", ["toy:Point"])
class TestPackage(SimulatorBackendContract):
    def test_tasks_of_packages_are_listed(self, task: str) -> None:
        assert task in tasks.names()
