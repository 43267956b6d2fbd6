"""An operator for soak.py. The operator takes over a robot every 30 s, for 5 s.

python soak_operator.py ENDPOINT ROBOT
"""

from __future__ import annotations

import contextlib
import sys
import time

import td3_robot as tr
from td3_robot.errors import CommandError


def main(endpoint: str, robot: str) -> None:
    operator = tr.connect(endpoint, timeout=30)
    while True:
        due = time.monotonic() + 30
        with contextlib.suppress(CommandError), operator.takeover(robot) as takeover:
            end = time.monotonic() + 5
            while time.monotonic() < end:
                takeover.command([0.5])
                takeover.wait()
        with contextlib.suppress(CommandError):
            operator.state()
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
