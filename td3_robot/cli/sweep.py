"""``td3-robot sweep``: trains one configuration with several seeds and values, and compares the runs."""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from td3_robot.config import loading as configuration
from td3_robot.config.resume import disagreements
from td3_robot.config.schema import Config
from td3_robot.errors import EXIT_GOOD, BundleError, UsageError, exit_code_of
from td3_robot.runtime import metrics
from td3_robot.runtime.arguments import Parser, integer, make_folder
from td3_robot.runtime.hosts import Running
from td3_robot.runtime.prepare import with_policy_file
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import signals
from td3_robot.util.machine import available_cores

if TYPE_CHECKING:
    from td3_robot.cluster.sweep_hosts import SweepHosts

_EXAMPLES = """examples:
  td3-robot sweep pendulum --seeds 0..4
  td3-robot sweep walker2d_fast --seeds 0..9 --vary learner.learning_rate=3e-4,7e-4 --out runs/rates
  td3-robot sweep ant --seeds 0..9 --cluster auto --out /shared/runs/ant
  td3-robot sweep pendulum --seeds 1,5 --vary network.hidden=[64,64],[256,256] --vary learner.n_step=1,3

To continue a stopped sweep, repeat the command. It skips finished runs.
If you change the configuration, also name another folder with --out.
"""
_PERIOD = 0.2  # seconds between two checks of the running trainings
_MOST_SEEDS = 1000
_SHOWN = 3  # differing keys in the error about an existing run


@dataclass(frozen=True, eq=False)
class Training:
    """One run of the sweep.

    Attributes:
        name: name of the run's folder.
        seed: seed of the run.
        values: the varied keys, with their values as text.
    """

    name: str
    seed: int
    values: dict[str, str]


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    trainings = _trainings(options)
    out: Path = options.out or Path("runs") / f"{Path(options.config).stem}-sweep"
    for training in trainings:
        asked = configuration.load(options.config, _overrides(options, training), _flags(training))
        if not asked.evaluation.every:
            raise UsageError("evaluation.every is 0, but a sweep compares final evaluations; allowed: from 1")
        _check_existing(RunFolder(out / training.name), asked)
    make_folder("--out", out)
    with contextlib.ExitStack() as stack:
        hosts = None
        if options.cluster:
            from td3_robot.cluster.sweep_hosts import SweepHosts  # only a sweep on a cluster needs Ray

            hosts = stack.enter_context(SweepHosts(options.cluster, out))
        failed = _train_all(trainings, options, out, hosts)
    _report({training: final for training in trainings if (final := _final(out, training))}, options, out)
    return 1 if failed else EXIT_GOOD


def _parser() -> Parser:
    parser = Parser(
        prog="td3-robot sweep",
        description="Train one configuration with several seeds and values, several runs at a time, and compare them.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a shipped one")
    parser.add_argument("--seeds", type=seeds, default=[0], metavar="S", help="seeds: 0..9, or 1,5,7 (default: 0)")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        type=variation,
        metavar="KEY=A,B,…",
        help="train with each of these values; if there are several --vary, train with each combination of the values",
    )
    parser.add_argument("--steps", type=integer(1), metavar="N", help="environment steps of each run (total_steps)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key in all runs"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: runs/CONFIG-sweep)")
    parser.add_argument(
        "--at-once",
        type=integer(1),
        metavar="N",
        help="number of parallel runs (default: one for every two cores of this machine; with --cluster: one for every "
        "two cores of all hosts)",
    )
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="train on those hosts of a Ray cluster that see the folder of the runs; ADDRESS is auto, or HOST:PORT",
    )
    return parser


def seeds(text: str) -> list[int]:
    """Read ``0..9`` or ``1,5,7``."""
    first, dots, last = text.partition("..")
    with contextlib.suppress(ValueError):
        found = range(int(first), int(last) + 1) if dots else [int(part) for part in text.split(",")]
        taken = list(found[: _MOST_SEEDS + 1])  # a range may be too long for a list
        fits = 0 < len(taken) <= _MOST_SEEDS and all(0 <= seed < 2**32 for seed in taken)
        if fits and len(set(taken)) == len(taken):
            return taken
    allowed = f"FIRST..LAST, or different whole numbers such as 1,5,7; at most {_MOST_SEEDS:,} seeds"
    raise argparse.ArgumentTypeError(f"is {text[:80]!r}; allowed: {allowed}")


def variation(text: str) -> tuple[str, list[str]]:
    """Read ``KEY=A,B``. A comma in brackets or braces does not separate values."""
    key, _, values = text.partition("=")
    parts, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    found = [part.strip() for part in parts]
    if not key or not all(found) or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed: KEY=A,B,… with different values")
    return key, found


def _trainings(options: argparse.Namespace) -> list[Training]:
    keys = [key for key, _ in options.vary]
    settings = [[f"{key}={value}" for value in values] for key, values in options.vary]
    settings += [[override] for override in options.overrides]
    taken: list[str] = []
    for lines in settings:
        taken += dict.fromkeys(key for line in lines for key in configuration.keys_of(line))
    for key in taken:
        if taken.count(key) > 1 or key in ("seed", "total_steps"):
            option = {"seed": "--seeds", "total_steps": "--steps"}.get(key, "one --vary or one --set")
            raise UsageError(f"{key} is set twice, or by the wrong option; allowed: {option}")
    labels, found = _labels(keys), []
    for values in itertools.product(*(values for _, values in options.vary)):
        for seed in options.seeds:
            words = [f"{label}={value}" for label, value in zip(labels, values, strict=True)]
            name = re.sub(r"[^\w.=,-]+", "_", "-".join([*words, f"seed{seed}"]))
            found.append(Training(name, seed, dict(zip(keys, values, strict=True))))
    return found


def _labels(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key. If other keys have the same last part, add as many parts as tell them apart."""

    def end(key: str, count: int) -> str:
        return ".".join(key.split(".")[-count:])

    labels = []
    for key in keys:
        count, others = 1, [other for other in keys if other != key]
        while count <= key.count(".") and end(key, count) in (end(other, count) for other in others):
            count += 1
        labels.append(end(key, count))
    return labels


def _check_existing(run: RunFolder, asked: Config) -> None:
    """Check that a run of an earlier sweep, if there is one, has the configuration that this sweep asks for."""
    if not run.config_file.exists():
        return
    stored = run.trained_with() or configuration.load(run.config_file)
    try:
        asked = with_policy_file(asked)
    except BundleError:  # the run no longer needs the policy that it started from
        asked = replace(asked, learner=replace(asked.learner, start_from=stored.learner.start_from))
    changed = disagreements(stored, asked)
    if changed:
        more = [f"other keys that differ: {len(changed) - _SHOWN}"] if len(changed) > _SHOWN else []
        what = "; ".join([*changed[:_SHOWN], *more])
        remedy = "set these keys as in the run, or name another --out"
        raise UsageError(f"run folder {str(run.path)!r} has another configuration: {what}; {remedy}")


def _overrides(options: argparse.Namespace, training: Training) -> list[str]:
    steps = [f"total_steps={options.steps}"] if options.steps else []
    values = [f"{key}={value}" for key, value in training.values.items()]
    return [*options.overrides, *values, f"seed={training.seed}", *steps]


def _flags(training: Training) -> dict[str, str]:
    """Map the overridden keys to the options that set them, except ``--set``."""
    varied = {key: f"--vary {key}={value}" for key, value in training.values.items()}
    return {**varied, "seed": "--seeds", "total_steps": "--steps"}


def _train_all(trainings: Sequence[Training], options: argparse.Namespace, out: Path, hosts: SweepHosts | None) -> bool:
    """Train all unfinished runs, and print a line when each one ends. Return whether a run failed."""
    waiting = [training for training in trainings if not _final(out, training)]
    done, failed = len(trainings) - len(waiting), False
    if done:
        print(f"{done} of {len(trainings)} runs are finished already", flush=True)
    running: dict[Training, Running] = {}
    with signals.noted() as caught:  # an exception could interrupt the start of a training
        while (waiting or running) and not caught:
            here = max(1, available_cores() // 2)
            slots = options.at_once or (max(1, hosts.slots) if hosts else here)
            while waiting and len(running) < slots:
                training = waiting.pop(0)
                running[training] = _start(training, options, out, hosts)
            time.sleep(_PERIOD)
            for training, process in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                del running[training]
                done += 1
                final = _final(out, training)
                failed |= code != EXIT_GOOD or not final
                results = [f"mean return {final['eval_return_mean']:.1f}"] if final else []
                if code or not final:
                    results.append(f"failed with exit code {code}" if code else "ended without a final evaluation")
                    results.append(f"see {out / training.name}.log")
                print(f"{done}/{len(trainings)} {training.name}: {'; '.join(results)}", flush=True)
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            process.wait()
    if caught:
        print(f"stopped; the runs are saved in {out}; the same command continues the sweep", file=sys.stderr)
        raise SystemExit(exit_code_of(caught[0]))
    return failed


def _start(training: Training, options: argparse.Namespace, out: Path, hosts: SweepHosts | None) -> Running:
    run = RunFolder((out / training.name).resolve())
    words = ["--resume", str(run.path)] if run.config_file.exists() else [_config(options), "--out", str(run.path)]
    words += [word for override in _overrides(options, training) for word in ("--set", override)]
    log = Path(f"{run.path}.log")
    if hosts:
        return hosts.start(training.name, words, log)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "td3_robot", "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the sweep, which forwards it once
        )


def _config(options: argparse.Namespace) -> str:
    """Return the name of a shipped configuration, or the absolute path of a file."""
    file = Path(options.config)
    return str(file.resolve()) if file.exists() else str(options.config)


def _final(out: Path, training: Training) -> dict[str, Any] | None:
    """Return the record of the final evaluation of a run; None if the run is not finished."""
    return metrics.final(RunFolder(out / training.name).metrics_file)


def _report(finals: dict[Training, dict[str, Any]], options: argparse.Namespace, out: Path) -> None:
    """Print the returns of each combination of values. Write each finished run to ``sweep.csv``; draw ``sweep.png``."""
    if not finals:
        return
    import numpy as np

    from td3_robot.runtime import comparison, learning_curve  # import late: matplotlib loads slowly

    keys = [key for key, _ in options.vary]
    with (out / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, "seed", "env_steps", "mean_return", "std_return"])
        for training, final in finals.items():
            figures = (final[key] for key in ("env_steps", "eval_return_mean", "eval_return_std"))
            writer.writerow([training.name, *training.values.values(), training.seed, *figures])
    groups: dict[str, list[Training]] = {}
    for training in finals:
        label = ", ".join(f"{key}={value}" for key, value in training.values.items()) or options.config
        groups.setdefault(label, []).append(training)
    width = max(map(len, groups))
    print(f"{'':<{width}}  seeds      mean    lowest   highest")
    bands = {}
    for label, members in groups.items():
        means = [finals[training]["eval_return_mean"] for training in members]
        print(f"{label:<{width}}  {len(means):5d} {np.mean(means):9.1f} {min(means):9.1f} {max(means):9.1f}")
        bands[label] = comparison.band([comparison.curve_of(out / training.name) for training in members])
    learning_curve.draw_bands(bands, out / "sweep.png", f"mean, lowest and highest evaluation of {options.config}")
    print(f"table:   {out / 'sweep.csv'}\ncurves:  {out / 'sweep.png'}")
    print(f"compare: td3-robot dashboard --runs {shlex.quote(str(out))}")
