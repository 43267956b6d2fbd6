"""``python -m td3_robot.driver NAME``: drives a robot from an installed package.

A package adds its robot with an entry point. The entry point names a subclass of
:class:`td3_robot.driver.robot.Robot`, or a function without arguments that returns a robot::

    [project.entry-points."td3_robot.drivers"]
    leg = "leg_driver.robot:Leg"

An entry point can also name a function ``main``, as the shipped driver ``ros2`` does. This function takes the
options and drives a robot itself. A program that calls :func:`td3_robot.driver.node.main` needs no entry point.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from td3_robot.driver.node import main as drive
from td3_robot.errors import Td3RobotError
from td3_robot.registry import Registry

DRIVERS = Registry("driver", {"ros2": "td3_robot.ros2.driver:main"}, "td3_robot.drivers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Drive the robot that the first argument names. The other arguments are options. Return the exit code."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or [""]
    try:
        row = DRIVERS.load(name)
        if getattr(row, "__name__", "") == "main":
            return int(row(others))
        robot = row()
    except Td3RobotError as error:
        print(f"td3_robot.driver: {error}", file=sys.stderr)
        return error.exit_code
    return drive(robot, name, others)


if __name__ == "__main__":
    sys.exit(main())
