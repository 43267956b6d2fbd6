"""Contract tests for the drivers of a pendulum and a cart, and tests of ``python -m td3_robot.driver NAME``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from td3_robot.driver import __main__ as by_name
from td3_robot.driver.__main__ import DRIVERS
from td3_robot.driver.robot import Robot
from td3_robot.messages import Phase
from td3_robot.registry import Registry
from td3_robot.specs import Channel, Float32, RobotSpec
from tests.contract.robot_driver import RobotContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "pendulum_driver.py"


class TestExampleDriver(RobotContract):
    @pytest.fixture
    def robot(self) -> Robot:
        spec = importlib.util.spec_from_file_location("example_driver", EXAMPLE)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        robot: Robot = module.Pendulum()
        return robot


class Cart(Robot):
    """A robot that defines every method except ``close``. Its episodes last three control periods."""

    spec = RobotSpec(
        "Cart",
        (Channel("position", "m", -5.0, 5.0), Channel("speed", "m/s", -2.0, 2.0)),
        (Channel("force", "N", 0.5, 3.0),),  # 0 is below the range, so the safe action ``zero`` is 0.5
        control_period=0.01,
    )

    def __init__(self) -> None:
        self._state = np.zeros(2, np.float32)
        self._force = 0.0
        self._periods = 0
        self._enabled = True

    def reset(self) -> Iterator[None]:
        yield  # between two parts, the driver can interrupt the reset
        self._state, self._periods, self._enabled = np.zeros(2, np.float32), 0, True

    def observe(self) -> Float32:
        self._periods += 1
        speed = self._state[1] + self.spec.control_period * self._force * self._enabled
        self._state = np.array([self._state[0] + self.spec.control_period * speed, speed], np.float32)
        return self._state

    def apply(self, action: Float32) -> None:
        self._force = float(action[0])

    def reward(self, observation: Float32, action: Float32) -> float:
        return float(observation[0] - 0.01 * action[0])

    def phase(self, observation: Float32) -> Phase:
        del observation
        return Phase.TRUNCATED if self._periods > 3 else Phase.MID

    def stop(self) -> None:
        self._enabled = False


class TestCart(RobotContract):
    @pytest.fixture
    def robot(self) -> Robot:
        return Cart()


def test_installed_package_adds_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m td3_robot.driver cart --config robot.yaml`` drives the package's robot under the name ``cart``."""
    point = metadata.EntryPoint("cart", f"{__name__}:Cart", "td3_robot.drivers")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == DRIVERS.group else [])
    monkeypatch.setattr(by_name, "DRIVERS", Registry(DRIVERS.kind, {}, DRIVERS.group))
    driven = []
    monkeypatch.setattr(by_name, "drive", lambda robot, name, others: driven.append((robot, name, others)) or 0)
    assert by_name.main(["cart", "--config", "robot.yaml"]) == 0
    [(robot, name, others)] = driven
    assert isinstance(robot, Cart)
    assert (name, others) == ("cart", ["--config", "robot.yaml"])


@pytest.mark.parametrize("arguments", [[], ["leg"]])
def test_missing_or_unknown_driver_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert by_name.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"driver is {(arguments or [''])[0]!r}; allowed: ros2" in error


def test_ros2_is_a_built_in_driver(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        by_name.main(["ros2", "--help"])
    assert "usage: td3-robot ros2 driver" in capsys.readouterr().out
