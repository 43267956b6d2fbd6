"""``python -m td3_robot`` is the command ``td3-robot``."""

import sys

from td3_robot.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
