"""End-to-end training speed at replay ratio 1, three processes, beside Stable-Baselines3's TD3 on the same task.

    python benchmarks/train_speed.py [--steps 3000] [--rounds 2] [--json]

Same networks (400-300), batch size (256), learning rate and robot (Walker2D). Both make 1,000 uniform steps first;
what is measured is environment steps a second after that. The contestants take turns, so that a noisy machine treats
them alike; the figure of each is its median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM_UP = 1000

SB3 = """
import sys, time, warnings
warnings.simplefilter("ignore")
import gymnasium, torch, pybullet_envs_gymnasium
from stable_baselines3 import TD3
threads, warm_up, steps = map(int, sys.argv[1:])
torch.set_num_threads(threads)
model = TD3(
    "MlpPolicy", gymnasium.make("Walker2DBulletEnv-v0"), learning_rate=1e-3, learning_starts=warm_up, batch_size=256,
    train_freq=1, gradient_steps=1, buffer_size=1_000_000, policy_kwargs={"net_arch": [400, 300]}, device="cpu", seed=0,
)
model.learn(warm_up)
begin = time.perf_counter()
model.learn(steps, reset_num_timesteps=False)
print("speed", steps / (time.perf_counter() - begin))
"""


def stable_baselines3(threads: int, steps: int) -> float:
    """Environment steps a second of SB3's TD3."""
    command = [sys.executable, "-c", SB3, str(threads), str(WARM_UP), str(steps)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(next(line.split()[1] for line in output.splitlines() if line.startswith("speed")))


def ours(precision: str, threads: int, steps: int) -> float:
    """Environment steps a second of `td3-robot train`, from the learner's own metrics after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides = {
            "learner.learning_starts": WARM_UP,
            "learner.learning_rate": 0.001,
            "learner.batch_size": 256,
            "learner.replay_ratio": 1,
            "learner.precision": precision,
            "learner.threads": threads,
            "learner.layer_norm": False,
            "network.hidden": [400, 300],
            "simulators": 1,
            "robots": 1,
            "evaluation.every": 0,
            "checkpoint.every": 0,
        }
        sets = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        # One more record of metrics than needed: the first one after the warm-up holds its end.
        total = WARM_UP + steps + 1000
        command = [sys.executable, "-m", "td3_robot.cli.main", "train", "walker2d", "--steps", str(total)]
        subprocess.run([*command, "--out", str(run), *sets], check=True, capture_output=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        after = [line for line in lines if line["kind"] == "train" and line["env_steps"] >= WARM_UP + 1000]
        first, last = after[0], after[-1]
        return float((last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="measured steps of each run (a multiple of 1000)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    contestants = {
        "SB3, 1 thread": lambda: stable_baselines3(1, options.steps),
        "SB3, 2 threads": lambda: stable_baselines3(2, options.steps),
        "td3-robot fp32, 1 learner thread": lambda: ours("fp32", 1, options.steps),
        "td3-robot fp32, 2 learner threads": lambda: ours("fp32", 2, options.steps),
        "td3-robot bf16, 1 learner thread": lambda: ours("bf16", 1, options.steps),
        "td3-robot bf16, 2 learner threads": lambda: ours("bf16", 2, options.steps),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, measure in contestants.items():
            speeds[name].append(measure())
            print(f"{name}: {speeds[name][-1]:.1f} steps/s", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best_sb3 = max(value for name, value in medians.items() if name.startswith("SB3"))
    rows = {name: {"steps_per_s": value, "over_best_sb3": value / best_sb3} for name, value in medians.items()}
    if options.json:
        machine = {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"machine": machine, "replay_ratio": 1, "rows": rows}, indent=2))
    else:
        for name, row in rows.items():
            print(f"{name:36} {row['steps_per_s']:8.1f} steps/s {row['over_best_sb3']:6.2f} × the faster SB3")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
