"""The example pendulum as the robot of soak.py and faults.py. The arguments are those of a driver.

Environment variables: PERIOD_MS is the control period (default: 10). APPLIED is a file that gets a line for each
command to the motor: the monotonic time in ns, and the torque in N·m.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from td3_robot.driver.node import main
from td3_robot.specs import Float32

Pendulum: Any = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "pendulum_driver.py"))["Pendulum"]
SPEC = replace(Pendulum.spec, control_period=int(os.environ.get("PERIOD_MS", "10")) / 1e3)


class Timed(Pendulum):  # type: ignore[misc]
    spec = SPEC

    def __init__(self) -> None:
        super().__init__()
        self._applied = open(os.environ.get("APPLIED", os.devnull), "a", buffering=1)  # noqa: SIM115

    def apply(self, action: Float32) -> None:
        super().apply(action)
        self._applied.write(f"{time.monotonic_ns()} {action[0]:.6f}\n")


if __name__ == "__main__":
    sys.exit(main(Timed(), "leg", sys.argv[1:]))
