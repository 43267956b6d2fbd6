"""Train the rows of rows.yaml one after another. Write the result of each training to a small file.

    python benchmarks/results/run.py [ROW …] [--out runs/results] [--collect]

The script skips finished trainings and resumes interrupted ones, so you can stop and start it at any time.
``--collect`` trains nothing. It writes the results so far, and marks those of unfinished trainings as partial.
``report.py`` makes the tables and the charts from the files in ``data``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from td3_robot.bench import harness
from td3_robot.config import loading as configuration
from td3_robot.config import resume as changes
from td3_robot.config.schema import Config
from td3_robot.runtime import metrics
from td3_robot.runtime.arguments import Parser
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import machine

HERE = Path(__file__).parent
DATA = HERE / "data"
PACKAGES = ("td3-robot", "torch", "numpy", "pybullet", "gymnasium")


@cache
def rows() -> dict[str, dict[str, Any]]:
    """Return the rows by name, see rows.yaml."""
    content: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "rows.yaml").read_text(encoding="utf-8"))
    return content


def result_file(row: str, seed: int) -> Path:
    return DATA / f"{row}-{seed}.json"


def main() -> int:
    known = rows()
    parser = Parser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to train (default: all): {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("runs/results"), metavar="DIR", help="folder of all runs")
    parser.add_argument("--collect", action="store_true", help="train nothing, write the results so far")
    options = parser.parse_args()
    for name in harness.chosen(parser, "row", options.rows, known):
        for seed in known[name]["seeds"]:
            folder, result = options.out / f"{name}-{seed}", result_file(name, seed)
            if options.collect:
                if (folder / "metrics.jsonl").is_file():
                    collect(known[name], seed, folder, result)
            elif not done(result):
                while not finished(known[name], folder):
                    if code := train(known[name], seed, folder):
                        return code
                collect(known[name], seed, folder, result)
    return 0


def done(result: Path) -> bool:
    """Return whether the result of a finished training exists."""
    return result.exists() and not json.loads(result.read_text(encoding="utf-8"))["partial"]


def train(row: dict[str, Any], seed: int, folder: Path) -> int:
    """Begin or resume a training; return its exit code."""
    command = [sys.executable, "-m", "td3_robot.cli.main", "train", "--log-every", "60"]
    if row.get("even_if_slower") and not folder.exists():
        # `train` refuses a slower precision only when it begins a run. So create the run here; `train` then resumes it.
        RunFolder.create(folder, configuration.load(row["config"], [*row.get("set", []), f"seed={seed}"]))
    if (folder / "config.yaml").is_file():
        command += ["--resume", str(folder)]
        if ended(folder):
            command += ["--steps", str(row["goes_on_to"])]
    else:
        command += [row["config"], "--seed", str(seed), "--out", str(folder)]
        command += [word for override in row.get("set", []) for word in ("--set", override)]
    print(" ".join(command[2:]), flush=True)
    return subprocess.run(command, check=False).returncode


def finished(row: dict[str, Any], folder: Path) -> bool:
    """Return whether the training has made all its steps."""
    steps = ended(folder)
    return bool(steps) and steps >= row.get("goes_on_to", 0)


def ended(folder: Path) -> int:
    """Return the steps of the newest final evaluation; 0 if the training has not ended yet."""
    evaluations = metrics.read(RunFolder(folder).metrics_file, "evaluation")
    return max((item["env_steps"] for item in evaluations if item.get("final")), default=0)


def collect(row: dict[str, Any], seed: int, folder: Path, result: Path) -> None:
    """Evaluate the policies of a training, and keep the result with its learning curve."""
    run = RunFolder(folder)
    evaluations = [item for item in metrics.read(run.metrics_file, "evaluation") if not item["final"]]
    train_records = metrics.read(run.metrics_file, "train")
    config: Config = run.config()
    policies = {"final": run.policy_file, "best": run.best_file}
    content = {
        "command": f"td3-robot train {row['config']} --seed {seed}"
        + "".join(f" --set {override}" for override in row.get("set", []))
        + (f" && td3-robot train --resume DIR --steps {row['goes_on_to']}" if "goes_on_to" in row else ""),
        "partial": not finished(row, folder),
        "seed": seed,
        "differs_from_defaults": {key: new for key, (_, new) in changes.differences(Config(), config).items()},
        "wall_s": round((train_records or evaluations)[-1]["wall_s"], 1),
        "machine": machine.describe(PACKAGES),
        "curve": [
            [item["env_steps"], round(item["eval_return_mean"], 2), round(item["eval_return_std"], 2)]
            for item in evaluations
        ],
    } | {name: evaluate(path, row["episodes"]) for name, path in policies.items() if path.is_file()}
    DATA.mkdir(exist_ok=True)
    harness.write_result(result, content)
    print(f"{result.name}: {content.get('final', {}).get('mean')}{' (partial)' if content['partial'] else ''}")


def evaluate(policy: Path, episodes: int) -> dict[str, Any]:
    """Evaluate a policy without noise.

    The result has the returns with their mean and standard deviation, and the policy's steps and updates.
    """
    command = [sys.executable, "-m", "td3_robot.cli.main", "eval", str(policy), "--json", "--seed", "1"]
    done = subprocess.run([*command, "--episodes", str(episodes)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    made = report["provenance"]
    return {
        "mean": round(report["mean"], 2),
        "std": round(report["std"], 2),
        "returns": [round(value, 2) for value in report["returns"]],
        "env_steps": made["env_steps"],
        "updates": made["updates"],
    }


if __name__ == "__main__":
    harness.run_script(main)
