"""``td3-robot bench link``: from observation to action over a real link, beside what ZeroMQ alone takes for it.

The policy server is a process of its own with the real core and bus; so is the echo, a bare ROUTER that returns as many
bytes. Both are asked in turns, block by block, so that a noisy machine treats them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from td3_robot.bench import attack, example
from td3_robot.bench.peers import Echo, Robot, serving
from td3_robot.errors import UsageError
from td3_robot.runtime import realtime
from td3_robot.runtime.node import Parser
from td3_robot.runtime.realtime import HIGHEST_PRIORITY, LONGEST_SPIN_US, RealtimeConfig
from td3_robot.transport.keys import AllowList, KeyFolder
from td3_robot.util import machine

ROBOTS = (1, 8, 64)
TRANSPORTS = ("ipc", "tcp", "curve")
_BLOCK = 200  # round trips until it is the other's turn
_JITTER_US = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

_EXAMPLES = """examples:
  td3-robot bench link
  td3-robot bench link --transport curve --seconds 60 --json > link.json
  td3-robot bench link --seconds 60 --priority 40 --processors 1
  td3-robot bench link --attack
"""


@dataclass(frozen=True)
class Link:
    """Where the policy server of a benchmark is, how a robot gets in, and how both ask for real time."""

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
        """A policy server; the endpoint that it serves."""
        with self._serving("policy") as bound:
            yield bound

    @contextlib.contextmanager
    def echo(self, robots: int) -> Iterator[Echo]:
        """A bare echo of messages as long as those for so many robots."""
        with self._serving("echo") as bound, contextlib.closing(Echo(bound, robots, self.keys)) as echo:
            yield echo

    @contextlib.contextmanager
    def _serving(self, what: str) -> Iterator[str]:
        options = ["--realtime", msgspec.json.encode(self.realtime).decode()]
        options += ["--keys", self.keys] if self.keys else []
        with serving(what, self.endpoint(what), *options) as (_, bound):
            yield bound

    @contextlib.contextmanager
    def robot(self, endpoint: str, robots: int) -> Iterator[Robot]:
        robot = Robot(endpoint, robots, AllowList(KeyFolder(Path(self.keys))) if self.keys else None)
        try:
            robot.round_trip()
            yield robot
        finally:
            robot.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot bench link",
        description="Measure the way from observation to action and back, beside a bare echo, and a loop at 1 kHz.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="ipc", help="curve: TCP with keys (default: ipc)")
    parser.add_argument("--trips", type=int, default=5000, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of the loop (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1000.0, metavar="HZ", help="of the loop (default: %(default)s)")
    parser.add_argument("--processors", type=_numbers, default=(), metavar="N,N", help="pin policy server and robot to")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="SCHED_FIFO priority of both, 1 to 99")
    parser.add_argument("--lock-memory", action="store_true", help="keep the pages of both in RAM")
    parser.add_argument("--freeze-gc", action="store_true", help="stop the garbage collectors of both")
    parser.add_argument("--spin", type=int, default=0, metavar="US", help="realtime.spin_us of the policy server")
    parser.add_argument("--attack", action="store_true", help="measure under attack instead, over TCP with keys")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for name, low in (("trips", _BLOCK), ("seconds", 0.1), ("rate", 1)):
        if not low <= getattr(options, name) < math.inf:
            raise UsageError(f"--{name} is {getattr(options, name)}; at least {low} is needed")
    for name, high in (("priority", HIGHEST_PRIORITY), ("spin", LONGEST_SPIN_US)):
        if not 0 <= getattr(options, name) <= high:
            raise UsageError(f"--{name} is {getattr(options, name)}; allowed: 0 to {high}")
    if options.priority and options.spin:
        raise UsageError(f"--spin is {options.spin} and --priority is {options.priority}; one of them must be 0")
    asked = RealtimeConfig(
        processors=options.processors,
        priority=options.priority,
        lock_memory=options.lock_memory,
        freeze_gc=options.freeze_gc,
        spin_us=options.spin,
    )
    computer = machine.describe(("td3-robot", "numpy", "pyzmq"))
    outcome = realtime.apply(asked)
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder:
        KeyFolder(Path(folder) / "keys").create("bench")
        transport = "curve" if options.attack else options.transport
        link = Link(transport, Path(folder), asked)
        report: dict[str, Any] = {
            "machine": computer,
            "transport": transport,
            "realtime": {"applied": outcome.applied, "refused": outcome.refused, "spin_us": options.spin},
        }
        if options.attack:
            report["attacks"] = attacks(link, options.trips)
        else:
            report["round_trip_us"] = {str(robots): round_trips(link, robots, options.trips) for robots in ROBOTS}
            report["loop"] = loop(link, options.rate, options.seconds)
    print(json.dumps(report) if options.json else _text(report))
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of processors; allowed: numbers like 0,1")
    return tuple(int(word) for word in text.split(","))


def round_trips(link: Link, robots: int, trips: int) -> dict[str, Any]:
    """Times of the policy server and of the echo; ``p50_over_echo`` is the median of the ratios of adjacent blocks."""
    with link.policy() as served, link.robot(served, robots) as robot, link.echo(robots) as echo:
        taken = in_turns({"echo": echo.round_trip, "policy": robot.round_trip}, trips)
    return {
        "policy": example.spread(taken["policy"].times),
        "echo": example.spread(taken["echo"].times),
        "p50_over_echo": taken["policy"].ratio,
    }


@dataclass
class Taken:
    """Round trips of one kind.

    Attributes:
        times: in ns.
        ratio: the median, over the blocks, of its median to that of the first kind's block beside it.
    """

    times: list[int]
    ratio: float


def in_turns(kinds: Mapping[str, Callable[[], int]], trips: int) -> dict[str, Taken]:
    """So many round trips of each kind (each call one, in ns), block by block."""
    times: dict[str, list[int]] = {kind: [] for kind in kinds}
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-1, -(-trips // _BLOCK)):
        blocks = {kind: [trip() for _ in range(_BLOCK)] for kind, trip in kinds.items()}
        if number < 0:  # the first block only warms up
            continue
        bare = statistics.median(next(iter(blocks.values())))
        for kind, block in blocks.items():
            times[kind] += block
            ratios[kind].append(statistics.median(block) / bare)
    return {kind: Taken(times[kind], round(statistics.median(ratios[kind]), 2)) for kind in kinds}


def loop(link: Link, rate: float, seconds: float) -> dict[str, Any]:
    """A closed loop by the clock: a Step at every deadline, whose Action is to be there by the next one.

    ``late`` is how long after its deadline a turn began (the jitter of the robot's own loop), ``round_trip`` how long
    its Action took. Deadlines that pass while the process does not run are missed, not made up for.
    """
    period, turns = 1 / rate, max(1, round(seconds * rate))
    late: list[int] = []
    trips: list[int] = []
    missed = skipped = 0
    with link.policy() as served, link.robot(served, 1) as robot:
        clock = time.perf_counter
        start, turn = clock() + period, 0
        while turn < turns:
            deadline = start + turn * period
            if (left := deadline - clock()) > 0:
                time.sleep(left)
            begin = clock()
            late.append(int((begin - deadline) * 1e9))
            sequence = robot.send()
            if robot.answered(sequence, max(0.0, deadline + period - begin)):
                trips.append(int((clock() - begin) * 1e9))
            else:
                missed += 1
            turn += 1
            behind = int((clock() - start) * rate) - turn
            if behind > 0:
                behind = min(behind, turns - turn)
                skipped += behind
                turn += behind
    return {
        "rate_hz": rate,
        "seconds": seconds,
        "turns": turns,
        "missed_deadlines": missed + skipped,
        "missed_fraction": round((missed + skipped) / turns, 6),
        "late_us": example.spread(late),
        "late_histogram_us": _histogram(late),
        "round_trip_us": example.spread(trips) if trips else None,
    }


def _histogram(nanoseconds: Sequence[int]) -> dict[str, int]:
    """Counts of values up to each bound in µs."""
    counts = dict.fromkeys([f"<={bound}" for bound in _JITTER_US] + [f">{_JITTER_US[-1]}"], 0)
    for value in nanoseconds:
        name = next((f"<={bound}" for bound in _JITTER_US if value <= bound * 1e3), f">{_JITTER_US[-1]}")
        counts[name] += 1
    return counts


def attacks(link: Link, trips: int) -> dict[str, Any]:
    """Round trips of one robot in quiet and under each attack, in turns; ``p99_over_quiet`` compares the two.

    Attacker, server and robot share one machine: part of what the attack costs is the processor that it takes itself.
    """
    results: dict[str, Any] = {}
    with link.policy() as served, link.robot(served, 1) as robot:
        for kind in attack.KINDS:
            quiet: list[int] = []
            attacked: list[int] = []
            for number in range(-1, -(-trips // _BLOCK)):
                calm = [robot.round_trip() for _ in range(_BLOCK)]
                with attack.running(kind, served, str(link.keys)):
                    stormy = [robot.round_trip() for _ in range(_BLOCK)]
                if number >= 0:
                    quiet += calm
                    attacked += stormy
            before, under = example.spread(quiet), example.spread(attacked)
            results[kind] = {
                "attack": attack.KINDS[kind],
                "quiet": before,
                "attacked": under,
                "p50_over_quiet": round(under["p50"] / before["p50"], 2),
                "p99_over_quiet": round(under["p99"] / before["p99"], 2),
            }
    return results


def _text(report: dict[str, Any]) -> str:
    computer = report["machine"]
    lines = [f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before"]
    lines += [f"real time: {what}" for what in report["realtime"]["applied"]]
    lines += [f"real time, not granted: {what}" for what in report["realtime"]["refused"]]
    spin = report["realtime"]["spin_us"]
    lines += [f"over {report['transport']}" + f"; the server spins for {spin} µs" * (spin > 0), example.HEAD]
    for robots, row in report.get("round_trip_us", {}).items():
        lines.append(example.row(f"{robots:>2} robots", row["policy"]) + f"   {row['p50_over_echo']} × echo")
        lines.append(example.row("   bare echo", row["echo"]))
    for kind, row in report.get("attacks", {}).items():
        lines.append(example.row(f"{kind}, quiet", row["quiet"]))
        lines.append(example.row(f"{kind}, attacked", row["attacked"]) + f"   p99 × {row['p99_over_quiet']}")
    if turned := report.get("loop"):
        lines.append(example.row(f"{turned['rate_hz']:g} Hz: late", turned["late_us"]))
        if turned["round_trip_us"]:
            lines.append(example.row("   round trip", turned["round_trip_us"]))
        lines.append(f"{turned['missed_deadlines']} of {turned['turns']} deadlines missed in {turned['seconds']:g} s")
        counts = turned["late_histogram_us"]
        lines += [f"  late {name:>7} µs  {count:8}" for name, count in counts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
