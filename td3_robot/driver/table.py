"""The table of robots from installed packages: ``python -m td3_robot.driver NAME`` drives one of them.

A package adds a row with an entry point. The row names a :class:`td3_robot.driver.robot.Robot`, or a function without
arguments that makes one::

    [project.entry-points."td3_robot.drivers"]
    leg = "leg_driver.robot:Leg"

A program of its own that calls :func:`td3_robot.driver.node.main` needs no row.
"""

from __future__ import annotations

from td3_robot.registry import Registry

DRIVERS = Registry("driver", {}, "td3_robot.drivers")
