"""The shipped simulator backends pass the contract tests, and so do two examples of backends from other packages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from td3_robot_sims import tasks
from td3_robot_sims.backends.bullet.backend import BulletBackend
from td3_robot_sims.backends.bullet.robots import MODELS, RobotModel, specification

from td3_robot.specs import Float32
from tests.contract.point_mass import PointMass
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
    """Add two backends to the table ``tasks.BACKENDS``, as an installed package does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.BACKENDS.rows, "toy", "tests.contract.point_mass:PointMassBackend")
        patch.setitem(tasks.BACKENDS.rows, "own", "tests.contract.test_simulator_backends:OwnRobots")
        yield


class FailingReset(PointMass):
    """An environment whose second reset fails."""

    resets = 0

    def _reset(self) -> Float32:
        self.resets += 1
        if self.resets == 2:
            raise OSError("the world is gone")
        return super()._reset()


def test_after_a_failed_reset_no_episode_is_running() -> None:
    environment = FailingReset(1, None)
    environment.reset()
    environment.step(np.zeros(1, np.float32))
    with pytest.raises(OSError, match="the world is gone"):
        environment.reset()
    with pytest.raises(RuntimeError, match="PointMass: no episode is running"):
        environment.step(np.zeros(1, np.float32))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("task", ["own:TwoLegs"])
class TestOwnRobot(SimulatorBackendContract):
    def test_robot_stands_on_the_floor(self, task: str) -> None:
        """The legs reach 0.35 m below the centre of the body, which starts at a height of 0.36 m."""
        environment = tasks.make(task, 1)
        observation = environment.reset()
        names = [channel.name for channel in environment.spec.observations]
        for _ in range(20):
            observation = environment.step(0 * environment.spec.action_high).observation
        assert observation[names.index("left_leg.contact")] == 1
        assert abs(observation[names.index("torso.height")]) < 0.05
        environment.close()


def test_a_robot_of_a_package_has_no_gymnasium_id_even_if_it_has_the_name_of_a_shipped_robot() -> None:
    class Heavy(BulletBackend):
        models = {"Ant": replace(MODELS["Ant"], power=1.0)}  # noqa: RUF012

    assert BulletBackend("bullet").gymnasium_id("Ant") == "td3_robot/Ant-v0"
    assert Heavy("own").gymnasium_id("Ant") is None
    assert OwnRobots("own").gymnasium_id("TwoLegs") is None


@pytest.mark.parametrize(("height", "meaning"), [(None, "its height at reset"), (0.8, "0.8 m"), (1.25, "1.25 m")])
def test_the_specification_says_where_the_observed_height_is_zero(height: float | None, meaning: str) -> None:
    spec = specification(replace(TWO_LEGS, start_height=height))
    assert spec.observations[0].meaning == f"height of the torso above {meaning}"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("task", ["toy:Point"])
class TestPackage(SimulatorBackendContract):
    def test_tasks_of_packages_are_listed(self, task: str) -> None:
        assert task in tasks.names()
