"""``python -m td3_robot.cluster.training`` acts like ``td3-robot train``. It runs one training of a sweep on a cluster.

When the sweep gets Ctrl-C or is killed, the training saves a checkpoint and stops.
"""

from __future__ import annotations

import os
import sys

from td3_robot.cli.main import main
from td3_robot.runtime.process import LIFELINE, follow_lifeline, unblock_signals

if __name__ == "__main__":
    unblock_signals()
    follow_lifeline()
    os.environ.pop(LIFELINE, None)  # the processes of the training end with the training, not with the sweep
    sys.exit(main(["train", *sys.argv[1:]]))
