"""``python -m td3_robot.driver NAME``: drives a robot from an installed package.

A package adds its robot with an entry point. The entry point names a :class:`td3_robot.driver.robot.Robot`, or a
function without arguments that makes one::

    [project.entry-points."td3_robot.drivers"]
    leg = "leg_driver.robot:Leg"

A program that calls :func:`td3_robot.driver.node.main` needs no entry point.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from td3_robot.driver.node import main as drive
from td3_robot.errors import EXIT_USAGE, ConfigError
from td3_robot.registry import Registry

DRIVERS = Registry("driver", {}, "td3_robot.drivers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Drive the robot that the first argument names. The other arguments are the options of every driver.

    Returns:
        The exit code of the process.
    """
    name, *others = (sys.argv[1:] if arguments is None else arguments) or [""]
    try:
        if not DRIVERS.names():
            raise ConfigError(f"driver is {name!r}; no installed package has an entry point in {DRIVERS.group}")
        robot = DRIVERS.load(name)()
    except ConfigError as error:
        print(f"td3_robot.driver: {error}", file=sys.stderr)
        return EXIT_USAGE
    return drive(robot, name, others)


if __name__ == "__main__":
    sys.exit(main())
