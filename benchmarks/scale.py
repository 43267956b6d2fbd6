"""Measure how the cost of a learner grows with its sources, its robots and its policy servers.

    python benchmarks/scale.py [--rounds N] [--seconds S] [--only PART ...] [--out FILE] [--json]
    python benchmarks/scale.py --report

The simulators replay recorded Steps of a walking robot: they compute no physics. The learner is the real process. Its
links to sources and policy servers are TCP connections with keys, as on a cluster. The results go to FILE (default:
benchmarks/results/scale/scale.json). A run with ``--only`` keeps the other parts of FILE. Such a run needs the same
``--rounds``, ``--seconds``, processor and number of cores as the earlier measurements in FILE. ``--report`` writes the
results into docs/explanation/scale.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import scale_page
import scale_ray
import scale_steps

from td3_robot.bench import harness
from td3_robot.config import loading as configuration
from td3_robot.errors import NodeError
from td3_robot.messages import Status
from td3_robot.runtime.hosts import Lifeline
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import KeyFolder
from td3_robot.transport.link import ServerLink
from td3_robot.util import machine
from td3_robot.util.ports import keep_port, port_of

NODES = Path(__file__).with_name("scale_nodes.py")
SOURCES = (1, 2, 4, 8, 16, 32, 64)
ROBOTS = (1, 4, 16, 64, 256, 1024)
SERVERS = (1, 2, 4, 8, 16)
RATE = scale_page.RATE
PARTS = scale_page.MEASURED
_PATIENCE = 240.0  # longest time in s to wait for a process
_ATTEMPTS = 5
_WARM_UP = 1.0  # seconds before the measurement
_INTAKE = {"learner.learning_starts": 10**9}  # no updates: the learner only receives Steps
_COMMON = {
    "task": scale_steps.TASK,
    "total_steps": 2 * 10**9,
    "learner.buffer_size": 20_000,
    "learner.replay_ratio_band": 8192,
    "learner.precision": "fp32",
    "evaluation.every": 0,
    "checkpoint.every": 0,
}


class Load(NamedTuple):
    """What a learner serves during a measurement.

    Attributes:
        sources, robots, servers: number of sources, of robots in each source, and of policy servers.
        rate: Steps per second of each source; 0 for full speed.
    """

    sources: int
    robots: int = 1
    rate: float = 0.0
    servers: int = 0


class _Moment(NamedTuple):
    """State of the learner's process when one of its reports arrives.

    Attributes:
        main, io, all: processor time (s) of the main thread, of the threads for input and output, and of all threads.
        kept_waiting: time (s) during which the main thread was ready, but other threads used the CPU cores.
        slices: number of times that the main thread got a CPU core.
    """

    time: float
    status: Status
    main: float
    kept_waiting: float
    slices: int
    io: float
    all: float

    @property
    def steps(self) -> int:
        return self.status.counters.get("steps", 0)

    @property
    def version(self) -> float:
        return self.status.figures.get("weights_version", 0)


class _Learner(NamedTuple):
    """A running learner: its run folder, its process, and the bus that gets its reports."""

    run: Path
    process: int
    bus: Bus


def main() -> int:
    parser = harness.Options("python benchmarks/scale.py", "Measure the cost of many sources.", ("", "--report"))
    parser.number("--rounds", 3, "N", "measurements of each load; the report shows their median")
    parser.number("--seconds", 2.0, "S", "length of one measurement", low=0.5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=scale_page.DATA, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="write the results into docs/explanation/scale.md")
    options = parser.parse_args()
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.report:
        scale_page.write(report)
        return 0
    described = harness.describe("td3-robot", "numpy", "pyzmq", "torch", "ray", "torchrl")
    measured = {"machine": described, "rounds": options.rounds, "seconds": options.seconds}
    if set(options.only) == set(PARTS):
        report = {}
    elif report and _conditions(report) != _conditions(measured):
        found = f"{options.out} was measured with {_conditions(report)}"
        parser.error(f"{found}; this run has {_conditions(measured)}; measure all parts, or name another --out")
    report |= measured
    with tempfile.TemporaryDirectory(prefix="td3-robot-scale-") as folder:
        bench = _Bench(Path(folder), options.seconds, options.rounds)
        for part in options.only:
            report.setdefault("loads", {})[part] = machine.load()
            report[part] = getattr(bench, part)()
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return harness.show(report, options.json, scale_page.lines)


def _conditions(report: scale_page.Report) -> str:
    """Return the conditions of the measurements, as text. They must be the same for all parts of scale.md."""
    processor = harness.hardware(report["machine"])
    return f"--rounds {report['rounds']} --seconds {report['seconds']:g} on {processor}"


class _Bench:
    """Measures the parts of the benchmark."""

    def __init__(self, folder: Path, seconds: float, rounds: int) -> None:
        self._folder, self._seconds, self._rounds = folder, seconds, rounds
        self._steps = folder / "steps.npz"
        self._simulator = scale_steps.record(self._steps)
        self._runs = self._incarnation = 0

    def growth(self) -> list[dict[str, Any]]:
        """Measure 1 to 64 sources that send Steps in real time, with 1 and with 16 robots each."""
        return self._cells([Load(sources, robots, RATE) for robots in (1, 16) for sources in SOURCES], _INTAKE)

    def full(self) -> list[dict[str, Any]]:
        """Measure 1 to 64 sources at full speed, with 1 and with 16 robots each."""
        return self._cells([Load(sources, robots) for robots in (1, 16) for sources in SOURCES], _INTAKE)

    def robots(self) -> list[dict[str, Any]]:
        """Measure one source at full speed, with 1 to 1,024 robots."""
        return self._cells([Load(1, robots) for robots in ROBOTS], _INTAKE)

    def weights(self) -> list[dict[str, Any]]:
        """Measure a learner with 1 to 16 policy servers. It publishes weights at most five times a second."""
        settings = {"learner.learning_starts": 100, "learner.batch_size": 16, "learner.publish_every": 10}
        return self._cells([Load(1, 1, 50.0, servers) for servers in SERVERS], settings)

    def updates(self) -> list[dict[str, Any]]:
        """Measure a learner that makes one update for each environment step."""
        return self._cells([Load(1)], {"learner.learning_starts": 10, "learner.replay_ratio_band": 8})

    def costs(self) -> dict[str, Any]:
        """Measure the policy server and the recorder. The result also has the simulator's cost from ``__init__``."""
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as launch/train.yaml sets it for a policy server
        with harness.process_of("costs") as call:
            return {
                "simulator_us": self._simulator * 1e6,
                "policy_us": {str(n): call(scale_steps.policy_costs, n) for n in (1, 16, 64)},
                "recording": {str(n): call(scale_steps.recording_costs, self._steps, n) for n in (1, 16, 64)},
            }

    def ray(self) -> dict[str, Any]:
        """Measure a learner with two sources of 16 robots each, and Ray programs that move the same transitions."""
        others, missing = scale_ray.contestants(self._steps, sources=2, robots=16, seconds=self._seconds)
        with scale_ray.running(), self._learner(_INTAKE) as learner:

            def ours() -> dict[str, float]:
                figures = self._measure(learner, Load(2, 16))
                whole = {"family_us": figures["all_us"] + figures["source_us"]}
                return {name: figures[name] for name in ("steps_per_s", "all_us")} | whole

            turns = harness.take_turns({"td3-robot": ours, **others}, self._rounds)
        return {"rows": {name: _medians(rounds) for name, rounds in turns.items()}, "not_measured": missing}

    def _cells(self, loads: list[Load], settings: dict[str, Any]) -> list[dict[str, Any]]:
        with self._learner(settings) as learner:
            contestants = {load: partial(self._announced, learner, load) for load in loads}
            turns = harness.take_turns(contestants, self._rounds)
        return [{**load._asdict(), **_medians(rounds)} for load, rounds in turns.items()]

    def _announced(self, learner: _Learner, load: Load) -> dict[str, float]:
        result = self._measure(learner, load)
        print(load, {name: round(value, 3) for name, value in result.items()}, file=sys.stderr, flush=True)
        return result

    @contextlib.contextmanager
    def _learner(self, settings: dict[str, Any]) -> Iterator[_Learner]:
        """Start a learner with keys, and receive its reports."""
        self._runs += 1
        path = self._folder / str(self._runs)
        config = configuration.parse({}, [f"{key}={value}" for key, value in {**_COMMON, **settings}.items()])
        run = RunFolder.create(path, config)
        KeyFolder(path / "keys").create("scale")
        reports = f"ipc://{path}/supervisor"
        with contextlib.closing(Bus()) as bus, keep_port() as kept:
            endpoint = f"tcp://127.0.0.1:{port_of(kept)}"
            run.write_run(endpoints={"supervisor": reports, "learner": endpoint}, keys=str(path / "keys"))
            bus.serve(reports, ServerLink("supervisor", "supervisor", {"node": (Status,)}, config.agreement(), 1))
            with _process("learner", "--run", str(path), "--name", "learner", follows=True) as process:
                _next_status(bus, lambda status: status.state == "ready")
                yield _Learner(path, process.pid, bus)

    def _measure(self, learner: _Learner, load: Load) -> dict[str, float]:
        """Connect sources and policy servers to a learner, measure for some seconds, and disconnect them.

        On a busy machine, a connection can fail. The failure loses Steps, because the sources send no Step twice. After
        such a loss, the function repeats the measurement.

        Raises:
            NodeError: each of _ATTEMPTS measurements lost Steps.
        """
        for _ in range(_ATTEMPTS):
            figures = self._attempt(learner, load)
            if not figures.pop("missed"):
                return figures
        raise NodeError(f"{load}: Steps were lost in {_ATTEMPTS} attempts")

    def _attempt(self, learner: _Learner, load: Load) -> dict[str, float]:
        self._incarnation += 1
        words = ["--run", str(learner.run), "--incarnation", str(self._incarnation), "--count"]
        replayed = ["--robots", str(load.robots), "--rate", str(load.rate), "--steps", str(self._steps)]
        with contextlib.ExitStack() as stack:
            servers = stack.enter_context(_process("policies", *words, str(load.servers))) if load.servers else None
            begin = _settled(learner)
            sources = stack.enter_context(_process("sources", *words, str(load.sources), *replayed))
            _next_status(learner.bus, lambda status: status.counters.get("steps", 0) - begin.steps >= 20 * load.sources)
            time.sleep(_WARM_UP)
            while learner.bus.receive(0.0):  # drop older reports
                pass
            before, source_before = _moment(learner), sum(psutil.Process(sources.pid).cpu_times()[:2])
            after = before
            while after.time - before.time < self._seconds:
                after = _moment(learner)
            source_seconds = sum(psutil.Process(sources.pid).cpu_times()[:2]) - source_before
            memory = psutil.Process(learner.process).memory_full_info().uss
            totals = _stopped(sources)
            figures = _figures(before, after) | {
                "memory_mb": memory / 1e6,
                "source_us": source_seconds / max(after.steps - before.steps, 1) * 1e6,
                "bytes": totals["sent"] / max(totals["steps"], 1),
                "bytes_back": totals["received"] / max(totals["steps"], 1),
            }
            if servers:
                figures |= {f"server_{name}": value for name, value in _stopped(servers).items()}
                published = max(after.version - before.version, 1)
                figures["weights_per_s"] = published / (after.time - before.time)
                figures["io_ms_per_weights"] = (after.io - before.io) / published * 1e3
                figures["all_ms_per_weights"] = (after.all - before.all) / published * 1e3
            return figures


@contextlib.contextmanager
def _process(*words: str, follows: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Start a process of scale_nodes.py, and kill it at the end.

    With ``follows``, the process also ends if this script dies.
    """
    lifeline = Lifeline()
    process = subprocess.Popen(
        [sys.executable, str(NODES), *words],
        env=lifeline.environment(scale_ray.ENVIRONMENT) if follows else scale_ray.ENVIRONMENT,
        pass_fds=(lifeline.read_end,),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        lifeline.close()


def _stopped(process: subprocess.Popen[str]) -> dict[str, float]:
    """Stop a process and return the totals that it prints as JSON."""
    process.send_signal(signal.SIGTERM)
    totals: dict[str, float] = json.loads(process.communicate(timeout=_PATIENCE)[0])
    return totals


def _next_status(bus: Bus, wanted: Callable[[Status], bool]) -> Status:
    """Wait for a report for which ``wanted`` is true.

    Raises:
        NodeError: no such report comes.
    """
    end, last = time.monotonic() + _PATIENCE, None
    while time.monotonic() < end:
        for _, message in bus.receive(0.1):
            if isinstance(message, Status):
                last = message
                if wanted(message):
                    return message
    raise NodeError(f"the learner of the benchmark does not answer as expected; its last report: {last}")


def _moment(learner: _Learner) -> _Moment:
    """Return the next report of the learner, with the processor times of its threads at this moment."""
    status = _next_status(learner.bus, lambda _: True)
    main = kept_waiting = io = total = 0.0
    slices = 0
    for task in Path(f"/proc/{learner.process}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            ran, waited, times = map(int, (task / "schedstat").read_text().split())
            name, seconds = (task / "comm").read_text(), ran / 1e9
            total += seconds
            if task.name == str(learner.process):
                main, kept_waiting, slices = seconds, waited / 1e9, times
            io += seconds * name.startswith("ZMQbg/IO")
    return _Moment(time.monotonic(), status, main, kept_waiting, slices, io, total)


def _settled(learner: _Learner) -> _Moment:
    """Wait until two successive reports have the same number of Steps. Then all Steps of earlier sources are there."""
    before, after = _moment(learner), _moment(learner)
    while after.steps > before.steps:
        before, after = after, _moment(learner)
    return after


def _figures(before: _Moment, after: _Moment) -> dict[str, float]:
    passed, steps = after.time - before.time, max(after.steps - before.steps, 1)
    turns = after.status.counters["turns"] - before.status.counters["turns"]
    updates = after.status.figures["updates"] - before.status.figures["updates"]
    transitions = after.status.figures["env_steps"] - before.status.figures["env_steps"]
    return {
        "steps_per_s": steps / passed,
        "transitions_per_s": transitions / passed,
        "update_ms": (after.all - before.all) / max(updates, 1) * 1e3,
        "turns_per_step": turns / steps,
        "missed": after.status.counters["missed"] - before.status.counters["missed"],
        "kept_waiting": (after.kept_waiting - before.kept_waiting) / passed,
        "slice_ms": (after.main - before.main) / max(after.slices - before.slices, 1) * 1e3,
        "main_us": (after.main - before.main) / steps * 1e6,
        "io_us": (after.io - before.io) / steps * 1e6,
        "all_us": (after.all - before.all) / steps * 1e6,
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}


if __name__ == "__main__":
    harness.run_script(main)
