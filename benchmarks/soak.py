"""Run a training or a deployment for an hour, sample its processes, and check that nothing grows.

    python benchmarks/soak.py train [--minutes 60] [--every 10] [--out DIR] [--json]
    python benchmarks/soak.py deploy [--minutes 60]
    python benchmarks/soak.py report

``train`` starts a training of Pendulum in real time (20 Hz), with a recorder. ``deploy`` starts a policy server, a
driver at 100 Hz, a recorder, and a learner that publishes new weights every second. Both runs have a monitor, and
an operator who takes over the robot every 30 s, for 5 s.

The samples go to ``DIR/KIND.csv`` and the verdict to ``DIR/KIND.json`` (default: benchmarks/results/reliability). From
these files, ``report`` draws the plots in docs/images and writes the tables into docs/explanation/reliability.md. The
exit code is 1 if something grows, if the recordings lack messages, or if they hold no Action after the warm-up.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from processes import Processes
from reliability import DATA, write_soak
from soak_driver import SPEC

from td3_robot.bench import harness
from td3_robot.bundle import Bundle, layer_shapes
from td3_robot.errors import NodeError
from td3_robot.messages import Action, Step
from td3_robot.recording import info
from td3_robot.recording.reader import Session
from td3_robot.runtime.run_folder import RunFolder

TRAINING = (
    "pacing.mode=realtime",
    "network.hidden=[64, 64]",
    "learner.batch_size=64",
    "learner.precision=fp32",
    "learner.compile=false",
    "learner.learning_starts=200",
    "learner.buffer_size=5000",  # so the buffer is full, and stops growing, before the warm-up ends
    "evaluation.every=0",
    "record.enabled=true",
)
WARM_UP = 0.25  # the first quarter of the time; judge() ignores its samples
MEMORY_MB_PER_H, MEMORY_SHARE = 4.0, 0.05
"""The memory of a process counts as growing if the slope of the memory (MB per hour) is above both bounds.

The first bound is MEMORY_MB_PER_H. The second bound, also per hour, is MEMORY_SHARE times the memory right after the
warm-up.
"""
LATENCY_GROWTH = 1.5
"""Bound of the growth of the latency. If the load of the machine grows, the bound grows by the same factor.

The growth of the latency is the median of the last tenth of the samples, divided by the median of the first tenth.
"""

_Sample = dict[str, float]
"""Quantities of one sample.

A sample of a process has ``rss`` and ``uss`` in MB, ``files``, ``threads``, and ``cpu`` in s. A sample of the run has
``disk`` in MB, ``load``, and the latencies of :func:`add_latency`.
"""


def take_samples(processes: Processes) -> dict[str, _Sample]:
    """Return a sample of each process.

    Raises:
        NodeError: a process has ended.
    """
    samples = {}
    for name, process in processes.found.items():
        try:
            with process.oneshot():
                memory, used = process.memory_full_info(), process.cpu_times()
                samples[name] = {
                    "rss": memory.rss / 1e6,
                    "uss": memory.uss / 1e6,
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                    "cpu": used.user + used.system,
                }
        except (psutil.NoSuchProcess, psutil.ZombieProcess) as error:
            raise NodeError(f"{name} has ended; see {processes.folder / name}.log") from error
    return samples


def start_training(processes: Processes) -> None:
    sets = [word for item in TRAINING for word in ("--set", item)]
    processes.verb("supervisor", "train", "pendulum", "--out", "run", "--steps", "100000000", *sets)
    processes.wait("supervisor", "ready:")
    processes.adopt_children("supervisor")
    processes.verb("monitor", "monitor", "--run", "run", "--json", "--every", "60")
    run = RunFolder(processes.folder / "run")
    processes.script("operator", "soak_operator.py", run.endpoint("policy", run.config()), "sim-0")


def start_deployment(processes: Processes) -> None:
    folder = processes.folder
    tensors = {name: np.zeros(shape, np.float32) for name, shape in layer_shapes(SPEC, (64, 64)).items()}
    Bundle(SPEC, (64, 64), tensors, provenance={"version": 1}).save(folder / "policy.safetensors")
    endpoints = {name: f"ipc://{folder}/{name}" for name in ("policy", "learner", "recorder")}
    config = {
        "endpoints": endpoints,
        "safety": {"safe_action": {"torque": 0.0}, "recovery": "automatic"},
        "record": {"enabled": True},
    }
    (folder / "robot.yaml").write_text(json.dumps(config))  # JSON is YAML
    others = {name: endpoint for name, endpoint in endpoints.items() if name != "learner"}  # the learner takes no Steps
    (folder / "driver.yaml").write_text(json.dumps({**config, "endpoints": others}))
    (folder / "run").mkdir()
    deployed = ("--config", "robot.yaml")
    recording = ("run/session.mcap", "--split-s", "600", "--weights-every", "100")
    processes.verb("recorder", "record", *recording, *deployed)
    processes.wait("recorder", "recording into")
    processes.verb("policy", "policy", "--bundle", "policy.safetensors", *deployed)
    processes.script("learner", "soak_learner.py", endpoints["learner"], "policy.safetensors", "1")
    processes.script("driver", "soak_driver.py", "--config", "driver.yaml")
    processes.wait("driver", "inactive -> active")
    processes.verb("monitor", "monitor", *deployed, "--json", "--every", "60")
    processes.script("operator", "soak_operator.py", endpoints["policy"], "leg")


START = {"train": start_training, "deploy": start_deployment}


def size(folder: Path) -> float:
    """Return the size of all files of a folder in MB."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total / 1e6


_Rows = dict[str, list[tuple[float, _Sample]]]
"""Maps a process to its samples, each with its time in s. The key ``run`` has disk, load and latency."""


def soak(kind: str, minutes: float, every: float, folder: Path) -> tuple[_Rows, float]:
    """Run the processes and sample them. Return the samples, and the wall-clock time of the first sample in s."""
    rows: _Rows = defaultdict(list)
    processes = Processes(folder)
    try:
        START[kind](processes)
        begun, wall = time.monotonic(), time.time()
        while (passed := time.monotonic() - begun) < 60 * minutes:
            for name, sample in take_samples(processes).items():
                rows[name].append((passed, sample))
            rows["run"].append((passed, {"disk": size(folder / "run"), "load": os.getloadavg()[0]}))
            time.sleep(max(0.0, begun + passed + every - time.monotonic()))
    finally:
        processes.end()
    return rows, wall


def add_latency(rows: _Rows, begun: float, every: float, recordings: Sequence[Path]) -> None:
    """Add the median, 99th percentile and longest latency (ms) to each sample of ``run``.

    The latencies of a sample belong to the Steps between this sample and the next sample.
    """
    trips = latencies(recordings)
    for passed, sample in rows["run"]:
        within = trips[np.abs(trips[:, 0] - begun - passed - every / 2) < every / 2, 1]
        if len(within):
            median, late, longest = np.percentile(within, (50, 99, 100)) * 1e3
            sample |= {"median_ms": float(median), "p99_ms": float(late), "longest_ms": float(longest)}


def latencies(recordings: Sequence[Path]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a row for each Action whose Step is recorded: wall time of the Step (s), time from Step to Action (s).

    The latency includes the transport of the Step and the server's work. Each process reads the clock after it has
    sent its message. If a busy machine delays the source between sending a Step and reading the clock, the latency is
    too short or even negative.
    """
    sent: dict[tuple[str, int], int] = {}
    rows: list[tuple[float, float]] = []
    for entry, message in Session(recordings).messages():
        if isinstance(message, Step):
            sent[message.source, message.sequence] = entry.published
        elif isinstance(message, Action) and (step := sent.pop((message.source, message.answers), 0)):
            rows.append((step * 1e-9, (entry.published - step) * 1e-9))
    return np.array(rows).reshape(-1, 2)


def missing(recordings: Iterable[Path]) -> dict[str, int]:
    """Return the number of missing messages of each topic in all recordings together."""
    total: dict[str, int] = defaultdict(int)
    for path in recordings:
        for topic, stream in info.examine(path)["topics"].items():
            total[topic] += stream["missing"]
    return {topic: count for topic, count in total.items() if count}


def main() -> int:
    parser = harness.Options("python benchmarks/soak.py", "Check that nothing grows in an hour.", ("train", "deploy"))
    parser.add_argument("kind", choices=(*START, "report"), help="what to run; 'report' only writes plots and tables")
    parser.number("--minutes", 60.0, "N", "minutes to run", low=0.1)
    parser.number("--every", 10.0, "S", "seconds between samples", low=0.5)
    parser.add_argument("--out", type=Path, default=DATA, metavar="DIR", help=f"folder of the data (default: {DATA})")
    options = parser.parse_args()
    if options.kind == "report":
        write_soak(options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="td3-robot-soak-"))
    rows, begun = soak(options.kind, options.minutes, options.every, folder)
    samples, recordings = options.out / f"{options.kind}.csv", sorted((folder / "run").glob("*.mcap"))
    save(samples, rows)  # save now, because add_latency() fails if a recording cannot be read
    add_latency(rows, begun, options.every, recordings)
    save(samples, rows)
    report: harness.Report = {
        "machine": harness.describe("td3-robot", "numpy", "pyzmq"),
        "kind": options.kind,
        "minutes": options.minutes,
        "recordings": len(recordings),
        "missing": missing(recordings),
        **judge(rows),
    }
    (options.out / f"{options.kind}.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = bool(report["grows"] or report["missing"])
    if failed:
        print(f"soak.py: the files of the processes are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    harness.show(report, options.json, _lines)
    return int(failed)


def save(path: Path, rows: _Rows) -> None:
    """Write the samples as CSV: time, process, quantity, value."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("time_s", "process", "quantity", "value"))
        for name, samples in rows.items():
            for passed, sample in samples:
                writer.writerows((f"{passed:.1f}", name, key, f"{value:.5g}") for key, value in sample.items())


def judge(rows: _Rows) -> dict[str, Any]:
    """Compare the samples after the warm-up, and name everything that grows.

    If none of these samples has a latency, the growth of the latency is unknown. In that case the list ``grows`` also
    contains the latency, so the run fails.
    """
    end = rows["run"][-1][0]
    late = {
        name: [(passed, sample) for passed, sample in samples if passed >= WARM_UP * end]
        for name, samples in rows.items()
    }
    processes, grows = {}, []
    for name, samples in late.items():
        if name == "run":
            continue
        figures = {key: trend(samples, key) for key in ("rss", "uss", "files", "threads")}
        slope = figures["uss"]["slope_per_h"]
        if slope > max(MEMORY_MB_PER_H, MEMORY_SHARE * figures["uss"]["first"]):
            grows.append(f"memory of {name}: {slope:.1f} MB/h")
        grows += [f"{key} of {name}" for key in ("files", "threads") if figures[key]["last"] > figures[key]["first"]]
        processes[name] = figures
    run = {key: trend(late["run"], key) for key in ("disk", "load", "median_ms", "p99_ms")}
    busier = max(1.0, run["load"]["last"] / max(1.0, run["load"]["first"]))  # growth of the load
    if not any("median_ms" in sample for _, sample in late["run"]):
        grows.append("latency (unknown: no Action)")
    elif run["median_ms"]["last"] > LATENCY_GROWTH * busier * run["median_ms"]["first"]:
        grows.append("latency")
    longest = max(sample.get("longest_ms", 0.0) for _, sample in late["run"])
    return {"processes": processes, "run": run, "longest_ms": longest, "grows": grows}


def trend(samples: Sequence[tuple[float, _Sample]], key: str) -> dict[str, float]:
    """Return the medians of the first and the last tenth, and the slope of the least-squares line, per hour."""
    values = np.array([(passed, sample[key]) for passed, sample in samples if key in sample]).reshape(-1, 2)
    tenth = math.ceil(len(values) / 10)
    slope = float(np.polyfit(values[:, 0] / 3600, values[:, 1], 1)[0]) if len(values) > 1 else 0.0
    first, last = (float(np.median(part[:, 1])) if len(part) else 0.0 for part in (values[:tenth], values[-tenth:]))
    return {"first": first, "last": last, "slope_per_h": slope}


def _lines(report: harness.Report) -> Iterator[str]:
    yield f"{report['kind']}, {report['minutes']:g} minutes; the first {WARM_UP:.0%} are warm-up"
    yield f"{'process':<12} {'USS first':>10} {'USS last':>10} {'MB/h':>7} {'files':>9} {'threads':>9}"
    for name, figures in report["processes"].items():
        uss, files, threads = (figures[key] for key in ("uss", "files", "threads"))
        yield (
            f"{name:<12} {uss['first']:10.1f} {uss['last']:10.1f} {uss['slope_per_h']:7.2f} "
            f"{files['first']:4.0f}–{files['last']:<4.0f} {threads['first']:4.0f}–{threads['last']:<4.0f}"
        )
    run = report["run"]
    yield f"disk: {run['disk']['slope_per_h']:.1f} MB/h"
    yield f"load: {run['load']['first']:.0f}, at the end {run['load']['last']:.0f}"
    yield f"latency: median {run['median_ms']['first']:.2f} ms, at the end {run['median_ms']['last']:.2f} ms"
    yield f"missing in the recordings: {report['missing'] or 'nothing'}"
    yield f"grows: {', '.join(report['grows']) or 'nothing'}"


if __name__ == "__main__":
    harness.run_script(main)
