"""A learner for soak.py and faults.py. Every SECONDS seconds, it publishes the file POLICY as new weights.

python soak_learner.py ENDPOINT POLICY SECONDS [KEYS]
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

from live_weights import learn

from td3_robot.bundle import Bundle


def main(endpoint: str, policy: str, seconds: str, keys: str | None = None) -> None:
    publishing = multiprocessing.Event()
    publishing.set()
    learn(publishing, endpoint, Bundle.load(Path(policy)), float(seconds), keys)


if __name__ == "__main__":
    main(*sys.argv[1:])
