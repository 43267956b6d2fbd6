"""What recording costs a training: environment steps a second with and without, in turns, and processor time.

    python benchmarks/recording_cost.py [--steps 1500] [--rounds 3] [--json]

Walker2D, replay ratio 1, networks 400-300, batch 256, everything recorded (weights every 10 updates too). Steps a
second come from the learner's own metrics after the warm-up; a ratio is the median of the ratios within one round.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from td3_robot import machine

WARM_UP = 500


def training(recorded: bool, steps: int) -> dict[str, float]:
    """One training: steps a second after the warm-up, processor seconds of all its processes, bytes recorded."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides = [f"learner.learning_starts={WARM_UP}", "evaluation.every=0", "checkpoint.every=0"]
        overrides += [f"record={str(recorded).lower()}"]
        sets = [word for item in overrides for word in ("--set", item)]
        command = [sys.executable, "-m", "td3_robot.cli.main", "train", "walker2d", "--steps", str(steps + WARM_UP)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--out", str(run), *sets], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [line for line in lines if line["kind"] == "train" and line["env_steps"] >= WARM_UP]
        first, last = rows[0], json.loads((run / "final.json").read_text())["learner"]["figures"]
        session = run / "session.mcap"
        return {
            "steps_per_s": (last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]),
            "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "file_bytes": float(session.stat().st_size) if recorded else 0.0,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    computer = machine.describe(("torch", "pyzmq", "mcap"))
    rounds = []
    for number in range(options.rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        rounds.append({recorded: training(recorded, options.steps) for recorded in order})
    report = {
        "machine": computer,
        "steps_per_s": {
            name: [round(item[recorded]["steps_per_s"], 1) for item in rounds]
            for name, recorded in (("plain", False), ("recorded", True))
        },
        "throughput_ratio": statistics.median(r[True]["steps_per_s"] / r[False]["steps_per_s"] for r in rounds),
        "processor_time_ratio": statistics.median(r[True]["processor_s"] / r[False]["processor_s"] for r in rounds),
        "file_bytes_per_step": rounds[0][True]["file_bytes"] / (options.steps + WARM_UP),
    }
    print(json.dumps(report, indent=2) if options.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
