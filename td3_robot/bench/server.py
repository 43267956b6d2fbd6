"""The server process of ``bench link`` and ``bench policy``: the real policy core on the real bus.

``python -m td3_robot.bench.server --endpoint ENDPOINT`` serves the endpoint, and prints it with the chosen port.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from td3_robot.bench import example
from td3_robot.bundle import Bundle
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.policy.core import ACCEPTS, PolicyCore
from td3_robot.runtime import realtime
from td3_robot.runtime.arguments import Parser
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ServerLink

_IDLE = 0.05  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m td3_robot.bench.server", description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--bundle", type=Path, help="policy to serve (default: the example)")
    parser.add_argument("--keys", help="folder of keys")
    parser.add_argument("--realtime", default="{}", help="RealtimeConfig as JSON")
    options = parser.parse_args(arguments)
    requested = msgspec.json.decode(options.realtime, type=RealtimeConfig)
    realtime.apply(requested)
    bundle = Bundle.load(options.bundle) if options.bundle else example.bundle()
    core = PolicyCore(0, exploring=False, safety=example.SAFETY)
    core.load(1, bundle)
    bus = Bus(keys=open_keys(options.keys))
    bus.spin = requested.spin_s
    link = ServerLink("policy", "bench", ACCEPTS, {}, os.getpid(), bundle.spec)
    print(bus.serve(options.endpoint, link), flush=True)
    while True:
        for to, action in core.step(bus.receive(_IDLE), time.monotonic()):
            bus.send(to, action)


if __name__ == "__main__":
    sys.exit(main())
