"""``python -m td3_robot.cluster.stored_learner --run DIR`` runs a learner, and copies its files to the run's storage.

The environment variable ``TD3_ROBOT_LEARNER`` names the module of the learner.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
from pathlib import Path

from td3_robot.errors import Td3RobotError
from td3_robot.runtime.hosts import Start
from td3_robot.runtime.process import unblock_signals
from td3_robot.runtime.storage import Keeper, repeated

MODULE = "TD3_ROBOT_LEARNER"


def stored(start: Start) -> Start:
    """Return a Start for this program. This program then runs the learner, whose module is ``start.module``."""
    return start._replace(
        module="td3_robot.cluster.stored_learner", environment={**start.environment, MODULE: start.module}
    )


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the learner sets its own handler, Ctrl-C ends this process
    unblock_signals()
    try:
        keeper = Keeper(Path(sys.argv[sys.argv.index("--run") + 1]))
    except Td3RobotError as error:
        print(f"learner: {error}", file=sys.stderr)
        return error.exit_code
    with repeated(keeper.copy, keeper.copy, logging.getLogger(__name__).warning):
        runpy.run_module(os.environ.pop(MODULE), run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
