"""``python -m td3_robot.dashboard.reading`` acts like ``td3-robot``, and ends with the dashboard, even by SIGKILL."""

from __future__ import annotations

import os
import sys

from td3_robot.cli.main import main
from td3_robot.runtime.process import LIFELINE, follow_lifeline

if __name__ == "__main__":
    follow_lifeline()
    os.environ.pop(LIFELINE, None)  # the processes that this command starts do not inherit the pipe
    sys.exit(main())
