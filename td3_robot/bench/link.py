"""``td3-robot bench link``: time from observation to action over a real link, and missed deadlines of a control loop.

The policy server is another process, with the real core and bus. This process acts as the robot.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from td3_robot.bench import harness
from td3_robot.bench.harness import Report, percentile_row, percentiles
from td3_robot.bench.peers import Robot, serving
from td3_robot.config import loading as configuration
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.runtime import realtime
from td3_robot.runtime.arguments import integer
from td3_robot.transport.keys import AllowList, KeyFolder

ROBOTS = (1, 8, 64)
TRANSPORTS = ("ipc", "tcp", "curve")
_WARM_UP = 200  # round trips


@dataclass(frozen=True)
class Link:
    """The link to the policy server of a benchmark, over one of :data:`TRANSPORTS`.

    Attributes:
        folder: folder for sockets and keys.
        realtime: settings of the server.
    """

    transport: str
    folder: Path
    realtime: RealtimeConfig

    @property
    def keys(self) -> str | None:
        return str(self.folder / "keys") if self.transport == "curve" else None

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}" if self.transport == "ipc" else "tcp://127.0.0.1:*"

    @contextlib.contextmanager
    def policy(self) -> Iterator[str]:
        """Start a policy server and yield its endpoint."""
        options = ["--realtime", msgspec.json.encode(self.realtime).decode()]
        options += ["--keys", self.keys] if self.keys else []
        with serving(self.endpoint("policy"), *options) as (_, bound):
            yield bound

    @contextlib.contextmanager
    def robot(self, endpoint: str, robots: int) -> Iterator[Robot]:
        """Connect a source with this many robots to a policy server."""
        keys = AllowList(KeyFolder(Path(self.keys))) if self.keys else None
        with contextlib.closing(Robot(endpoint, robots, keys)) as robot:
            robot.round_trip()
            yield robot


def main(arguments: Sequence[str]) -> int:
    parser = harness.Options(
        "td3-robot bench link",
        "Measure the time from observation to action over a link, and the missed deadlines of a control loop.",
        ("", "--transport curve --seconds 60 --json > link.json", "--seconds 60 --priority 40 --processors 1"),
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="ipc", help="curve: TCP with keys (default: ipc)")
    parser.number("--trips", 5000, "N", "round trips for each number of robots", low=_WARM_UP)
    parser.number("--seconds", 60.0, "S", "seconds for which the control loop runs", low=0.1)
    parser.number("--rate", 1000.0, "HZ", "rate of the control loop")
    parser.add_argument(
        "--processors", type=_processors, default=[], metavar="N,N", help="processors that robot and server may use"
    )
    parser.add_argument(
        "--priority", type=integer(), default=0, metavar="N", help="SCHED_FIFO priority, 1 to 99; 0 for none"
    )
    parser.add_argument("--lock-memory", action="store_true", help="lock the memory of robot and server in RAM")
    parser.add_argument("--freeze-gc", action="store_true", help="stop the garbage collectors of robot and server")
    parser.add_argument("--spin", type=integer(), default=0, metavar="US", help="realtime.spin_us of the policy server")
    options = parser.parse_args(arguments)
    given = {"processors": options.processors, "priority": options.priority, "spin_us": options.spin}
    given |= {"lock_memory": options.lock_memory, "freeze_gc": options.freeze_gc}
    requested = configuration.parse({"realtime": given}, source="options").realtime
    computer = harness.describe("td3-robot", "numpy", "pyzmq")
    outcome = realtime.apply(requested)
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder:
        KeyFolder(Path(folder) / "keys").create("bench")
        link = Link(options.transport, Path(folder), requested)
        report: Report = {
            "machine": computer,
            "transport": options.transport,
            "realtime": {"applied": outcome.applied, "refused": outcome.refused, "spin_us": options.spin},
            "round_trip_us": {str(robots): round_trips(link, robots, options.trips) for robots in ROBOTS},
            "loop": control_loop(link, options.rate, options.seconds),
        }
    return harness.show(report, options.json, _lines)


def _processors(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of processors; allowed: numbers like 0,1")
    return [int(word) for word in text.split(",")]


def round_trips(link: Link, robots: int, trips: int) -> dict[str, Any]:
    """Measure ``trips`` round trips to the policy server after a warm-up. Return their percentiles in µs."""
    with link.policy() as served, link.robot(served, robots) as robot:
        taken = [robot.round_trip() for _ in range(_WARM_UP + trips)]
    return {"policy": percentiles(taken[_WARM_UP:])}


def control_loop(link: Link, rate: float, seconds: float) -> dict[str, Any]:
    """Run a control loop. Each turn sends a Step and waits for the Action.

    The turns have planned start times. The deadline for the Action of a turn is the planned start of the next turn.

    ``late_us`` is the time from the planned start of a turn to its real start. ``round_trip_us`` is the time from a
    Step to its Action. The loop skips each turn whose period has already ended, for example because the operating
    system did not run this process. It counts a skipped turn as a missed deadline.
    """
    period, turns = 1 / rate, max(1, round(seconds * rate))
    late: list[int] = []
    trips: list[int] = []
    missed = turn = 0
    clock = time.perf_counter
    with link.policy() as served, link.robot(served, 1) as robot:
        start = clock() + period
        while turn < turns:
            deadline = start + turn * period
            if (left := deadline - clock()) > 0:
                time.sleep(left)
            begin = clock()
            late.append(int((begin - deadline) * 1e9))
            if robot.answered(robot.send(), max(0.0, deadline + period - begin)):
                trips.append(int((clock() - begin) * 1e9))
            else:
                missed += 1
            turn += 1
            skipped = min(max(0, int((clock() - start) * rate) - turn), turns - turn)
            missed += skipped
            turn += skipped
    return {
        "rate_hz": rate,
        "seconds": seconds,
        "turns": turns,
        "missed_deadlines": missed,
        "missed_fraction": round(missed / turns, 6),
        "late_us": percentiles(late),
        "round_trip_us": percentiles(trips) if trips else None,
    }


def _lines(report: Report) -> Iterator[str]:
    settings = report["realtime"]
    yield from (f"real time: {what}" for what in settings["applied"])
    yield from (f"refused real-time setting: {what}" for what in settings["refused"])
    yield f"over {report['transport']}" + f"; the server spins for {settings['spin_us']} µs" * (settings["spin_us"] > 0)
    yield harness.PERCENTILES
    for robots, row in report["round_trip_us"].items():
        yield percentile_row(f"{robots:>2} robots", row["policy"])
    turned = report["loop"]
    yield percentile_row(f"{turned['rate_hz']:g} Hz: late", turned["late_us"])
    if turned["round_trip_us"]:
        yield percentile_row("   round trip", turned["round_trip_us"])
    yield f"{turned['missed_deadlines']} of {turned['turns']} deadlines missed in {turned['seconds']:g} s"
