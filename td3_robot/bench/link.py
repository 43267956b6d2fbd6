"""``td3-robot bench link``: from an observation to its action over a real link, beside what ZeroMQ alone costs.

The policy server is a process with the real core and bus. The echo is a process with a bare ROUTER that returns as many
bytes. This process asks both, block by block.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from td3_robot.bench import attack, harness
from td3_robot.bench.harness import Report, percentile_row, percentiles
from td3_robot.bench.peers import Echo, Robot, serving
from td3_robot.config.realtime import HIGHEST_PRIORITY, LONGEST_SPIN_US, RealtimeConfig
from td3_robot.errors import UsageError
from td3_robot.runtime import realtime
from td3_robot.transport.keys import AllowList, KeyFolder

ROBOTS = (1, 8, 64)
TRANSPORTS = ("ipc", "tcp", "curve")
_BLOCK = 200  # round trips in one turn
_JITTER_US = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True)
class Link:
    """How the policy server of a benchmark is reached, and what both ends ask of the operating system.

    Attributes:
        transport: one of :data:`TRANSPORTS`.
        folder: for sockets and keys.
        realtime: of the server.
    """

    transport: str
    folder: Path
    realtime: RealtimeConfig

    @property
    def keys(self) -> str | None:
        return str(self.folder / "keys") if self.transport == "curve" else None

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}" if self.transport == "ipc" else "tcp://127.0.0.1:*"

    def policy(self) -> contextlib.AbstractContextManager[str]:
        """Start a policy server; yields its endpoint."""
        return self._serving("policy")

    @contextlib.contextmanager
    def echo(self, robots: int) -> Iterator[Echo]:
        """Start a bare echo of messages as long as those for that many robots."""
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
        """Connect a source of that many robots to a policy server."""
        robot = Robot(endpoint, robots, AllowList(KeyFolder(Path(self.keys))) if self.keys else None)
        try:
            robot.round_trip()
            yield robot
        finally:
            robot.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.Options(
        "td3-robot bench link",
        "Measure the time from observation to action over a link, beside a bare echo, and a control loop at 1 kHz.",
        (
            "",
            "--transport curve --seconds 60 --json > link.json",
            "--seconds 60 --priority 40 --processors 1",
            "--attack",
        ),
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="ipc", help="curve: TCP with keys (default: ipc)")
    parser.number("--trips", 5000, "N", "round trips of each kind", low=_BLOCK)
    parser.number("--seconds", 60.0, "S", "length of the control loop", low=0.1)
    parser.number("--rate", 1000.0, "HZ", "rate of the control loop")
    parser.add_argument("--processors", type=_processors, default=(), metavar="N,N", help="pin both to these")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="SCHED_FIFO priority of both, 1 to 99")
    parser.add_argument("--lock-memory", action="store_true", help="keep the pages of both in RAM")
    parser.add_argument("--freeze-gc", action="store_true", help="stop the garbage collectors of both")
    parser.add_argument("--spin", type=int, default=0, metavar="US", help="realtime.spin_us of the policy server")
    parser.add_argument("--attack", action="store_true", help="measure under attack instead, over TCP with keys")
    options = parser.parse(arguments)
    requested = _realtime(options)
    computer = harness.describe("td3-robot", "numpy", "pyzmq")
    outcome = realtime.apply(requested)
    with tempfile.TemporaryDirectory(prefix="td3-robot-bench-") as folder:
        KeyFolder(Path(folder) / "keys").create("bench")
        transport = "curve" if options.attack else options.transport
        link = Link(transport, Path(folder), requested)
        report: Report = {
            "machine": computer,
            "transport": transport,
            "realtime": {"applied": outcome.applied, "refused": outcome.refused, "spin_us": options.spin},
        }
        if options.attack:
            report["attacks"] = attacks(link, options.trips)
        else:
            report["round_trip_us"] = {str(robots): round_trips(link, robots, options.trips) for robots in ROBOTS}
            report["loop"] = control_loop(link, options.rate, options.seconds)
    return harness.show(report, options.json, _lines)


def _realtime(options: argparse.Namespace) -> RealtimeConfig:
    """Return what to ask of the operating system.

    Raises:
        UsageError: a value is out of range.
    """
    for name, high in (("priority", HIGHEST_PRIORITY), ("spin", LONGEST_SPIN_US)):
        if not 0 <= getattr(options, name) <= high:
            raise UsageError(f"--{name} is {getattr(options, name)}; allowed: 0 to {high}")
    if options.priority and options.spin:
        raise UsageError(f"--spin is {options.spin} and --priority is {options.priority}; one of them must be 0")
    return RealtimeConfig(
        processors=options.processors,
        priority=options.priority,
        lock_memory=options.lock_memory,
        freeze_gc=options.freeze_gc,
        spin_us=options.spin,
    )


def _processors(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of processors; allowed: numbers like 0,1")
    return tuple(int(word) for word in text.split(","))


def round_trips(link: Link, robots: int, trips: int) -> dict[str, Any]:
    """Round trips to the policy server and to the echo; ``p50_over_echo`` compares blocks of the same round."""
    with link.policy() as served, link.robot(served, robots) as robot, link.echo(robots) as echo:
        blocks = in_turns({"echo": echo.round_trip, "policy": robot.round_trip}, trips)
    return {
        "policy": percentiles(blocks["policy"]),
        "echo": percentiles(blocks["echo"]),
        "p50_over_echo": p50_ratio(blocks["policy"], blocks["echo"]),
    }


Blocks = list[list[int]]
"""Times of round trips in ns, a list for each round."""


def block_of(round_trip: Callable[[], int]) -> Callable[[], list[int]]:
    """Make a turn of many round trips."""
    return lambda: [round_trip() for _ in range(_BLOCK)]


def in_turns(kinds: Mapping[str, Callable[[], int]], trips: int) -> dict[str, Blocks]:
    """Make that many round trips of each kind, block by block; a call makes one and returns its time in ns."""
    turns = {kind: block_of(round_trip) for kind, round_trip in kinds.items()}
    return harness.take_turns(turns, -(-trips // _BLOCK), warm_up=True)


def p50_ratio(ours: Blocks, theirs: Blocks) -> float:
    """Median of the ratios of the medians of blocks from the same round."""
    return round(harness.ratio(map(statistics.median, ours), map(statistics.median, theirs)), 2)


def control_loop(link: Link, rate: float, seconds: float) -> dict[str, Any]:
    """Run a control loop: a Step at every deadline, whose Action must be there by the next one.

    ``late`` is how long after its deadline a turn began: the jitter of the robot's own loop. ``round_trip`` is how long
    its Action took. A deadline that passes while the process does not run is a missed one; the loop skips its turn.
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
        "late_histogram_us": _histogram(late),
        "round_trip_us": percentiles(trips) if trips else None,
    }


def _histogram(nanoseconds: Sequence[int]) -> dict[str, int]:
    """Count values up to each bound in µs."""
    counts = dict.fromkeys([f"<={bound}" for bound in _JITTER_US] + [f">{_JITTER_US[-1]}"], 0)
    for value in nanoseconds:
        name = next((f"<={bound}" for bound in _JITTER_US if value <= bound * 1e3), f">{_JITTER_US[-1]}")
        counts[name] += 1
    return counts


def attacks(link: Link, trips: int) -> dict[str, Any]:
    """Round trips of one robot without and under each attack; ``p99_over_quiet`` compares the two.

    Attacker, server and robot share one machine: the processor time of the attacker itself is part of the cost.
    """
    results: dict[str, Any] = {}
    with link.policy() as served, link.robot(served, 1) as robot:
        quiet_block = block_of(robot.round_trip)
        for kind, purpose in attack.KINDS.items():

            def attacked_block(kind: str = kind) -> list[int]:
                with attack.running(kind, served, str(link.keys)):
                    return quiet_block()

            turns = {"quiet": quiet_block, "attacked": attacked_block}
            blocks = harness.take_turns(turns, -(-trips // _BLOCK), warm_up=True)
            quiet, attacked = (percentiles(blocks[name]) for name in turns)
            results[kind] = {
                "attack": purpose,
                "quiet": quiet,
                "attacked": attacked,
                "p50_over_quiet": round(attacked["p50"] / quiet["p50"], 2),
                "p99_over_quiet": round(attacked["p99"] / quiet["p99"], 2),
            }
    return results


def _lines(report: Report) -> Iterator[str]:
    settings = report["realtime"]
    yield from (f"real time: {what}" for what in settings["applied"])
    yield from (f"real time, refused: {what}" for what in settings["refused"])
    yield f"over {report['transport']}" + f"; the server spins for {settings['spin_us']} µs" * (settings["spin_us"] > 0)
    yield harness.PERCENTILES
    for robots, row in report.get("round_trip_us", {}).items():
        yield percentile_row(f"{robots:>2} robots", row["policy"]) + f"   {row['p50_over_echo']} × echo"
        yield percentile_row("   bare echo", row["echo"])
    for kind, row in report.get("attacks", {}).items():
        yield percentile_row(f"{kind}, quiet", row["quiet"])
        yield percentile_row(f"{kind}, attacked", row["attacked"]) + f"   p99 × {row['p99_over_quiet']}"
    if turned := report.get("loop"):
        yield percentile_row(f"{turned['rate_hz']:g} Hz: late", turned["late_us"])
        if turned["round_trip_us"]:
            yield percentile_row("   round trip", turned["round_trip_us"])
        yield f"{turned['missed_deadlines']} of {turned['turns']} deadlines missed in {turned['seconds']:g} s"
        yield from (f"  late {name:>7} µs  {count:8}" for name, count in turned["late_histogram_us"].items())
