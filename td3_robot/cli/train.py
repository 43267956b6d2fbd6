"""``td3-robot train``: trains a policy, evaluates it and draws its curve."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from td3_robot.config.loading import keys_of
from td3_robot.config.reference import all_keys
from td3_robot.errors import EXIT_GOOD, RunFolderError, UsageError
from td3_robot.runtime.arguments import Parser, integer, open_run, real, suggest
from td3_robot.runtime.prepare import Prepared, new_run, resumed_run
from td3_robot.runtime.progress import Progress, Working
from td3_robot.runtime.training import evaluate_final, finished, train
from td3_robot.util import resources

_FLAGS = {
    "task": "--task",
    "total_steps": "--steps",
    "seed": "--seed",
    "timing": "--lockstep",
    "learner.recordings": "--from",
    "learner.offline_updates": "--offline",
}
"""Maps a configuration key to its command-line option. Errors about the key contain the option.

The parser stores the value of the option under the name of the key.
"""
_EXAMPLES = """examples:
  td3-robot train walker2d_fast
  td3-robot train pendulum --steps 1e4
  td3-robot train --task gymnasium:Pendulum-v1 --steps 2e4 --set learner.learning_starts=1000
  td3-robot train configs/ant.yaml --steps 200000 --seed 3 --out runs/ant-3
  td3-robot train walker2d --set learner.batch_size=128 --set simulators=2
  td3-robot train walker2d --from runs/walker2d/session.mcap
  td3-robot train walker2d --from runs/walker2d/session.mcap --offline 20000
  td3-robot train walker2d --cluster auto --set cluster.simulators=8
  td3-robot train --resume runs/ant-3
  td3-robot train --resume runs/ant-3 --steps 400000 --set learner.learning_rate=1e-4
"""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.cluster:
        from td3_robot.cluster.connection import check_address  # only a training on a cluster needs Ray
        from td3_robot.cluster.hosts import RayHosts

        check_address(options.cluster)
    prepared = _resumed(options) if options.resume else _new(options)
    run = prepared.run
    if final := finished(prepared):
        print(_finished(prepared, final))
        return EXIT_GOOD
    progress = Progress(sys.stderr, prepared.config.total_steps, options.log_every, run.steps_made())
    with run.locked():
        resume, hosts = f"td3-robot train --resume {_quoted(run.path)}", None
        if options.cluster:
            resume += f" --cluster {options.cluster}"
            hosts = RayHosts(options.cluster, run, prepared.config, resume, progress.say)
        trained = train(prepared, progress, resume, hosts=hosts)
        if trained.exit_code != EXIT_GOOD:
            return trained.exit_code
        try:
            with Working("evaluating the final policy"):
                result = evaluate_final(prepared, trained.wall_s)
        except KeyboardInterrupt:
            progress.say(f"stopped; the trained policy is saved: {_evaluate(prepared, run.policy_file)}")
            raise
    returns = " ".join(f"{value:.0f}" for value in result["returns"])
    score = f"{result['mean']:.1f} ± {result['std']:.1f} over {len(result['returns'])} episodes"
    print(f"final policy: mean return {score}\nreturns: {returns}")
    print(_next_steps(prepared))
    return EXIT_GOOD


def _parser() -> Parser:
    parser = Parser(
        prog="td3-robot train",
        description="Train a policy. Simulator, policy server and learner run in separate processes.",
        epilog=_EXAMPLES,
    )
    config = parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a YAML file, or the name of a shipped one"
    )
    suggest(config, lambda: (file.stem for file in resources.folder("configs").glob("*.yaml")))
    task = parser.add_argument("--task", metavar="NAME", help="task to train, see td3-robot list tasks")
    suggest(task, lambda: importlib.import_module("td3_robot_sims.tasks").names())
    parser.add_argument(
        "--steps",
        dest="total_steps",
        type=integer(1),
        metavar="N",
        help="environment steps of the whole run, for example 1e5 (total_steps)",
    )
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), metavar="S", help="seed of all random numbers")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/NAME-DATE-TIME)")
    parser.add_argument(
        "--lockstep",
        dest="timing",
        action="store_const",
        const="lockstep",
        help="make all runs with the same seed identical, bit for bit; a little slower",
    )
    _add_beginning(parser)
    override = parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a configuration key"
    )
    suggest(override, lambda: (f"{key.name}=" for key in all_keys()))
    parser.add_argument(
        "--log-every",
        type=real(above=True, unit="s"),
        default=10.0,
        metavar="S",
        help="seconds between progress lines if the output is not a terminal (default: %(default)s)",
    )
    return parser


def _add_beginning(parser: Parser) -> None:
    """Add the options that say from what a training begins or continues, and on which machines."""
    parser.add_argument(
        "--from",
        dest="learner.recordings",
        nargs="+",
        type=_absolute,
        metavar="FILE",
        help="start with the data of recordings",
    )
    parser.add_argument(
        "--offline",
        dest="learner.offline_updates",
        type=integer(),
        metavar="N",
        help="with --from: updates before the first environment step",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue this run; CONFIG, --steps and --set can change it"
    )
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="train on a Ray cluster: auto for the cluster of this machine, or HOST:PORT",
    )


def _new(options: argparse.Namespace) -> Prepared:
    if options.config is None and options.task is None:
        raise UsageError("no CONFIG and no --task given; for example: td3-robot train walker2d_fast")
    overrides, flags = _settings(options)
    try:
        return new_run(options.config, overrides, options.out, flags, cluster=bool(options.cluster))
    except RunFolderError as error:
        holds_run = options.out and (options.out / "config.yaml").exists()
        hint = f", or continue it with --resume {_quoted(options.out)}" if holds_run else ""
        raise RunFolderError(f"--out: {error}{hint}") from None


def _resumed(options: argparse.Namespace) -> Prepared:
    for key, flag in {"out": "--out", **_FLAGS}.items():
        if key != "total_steps" and getattr(options, key) is not None:
            allowed = "CONFIG, --steps, --set, --cluster, --log-every"
            raise UsageError(f"{flag} cannot be combined with --resume; allowed: {allowed}")
    open_run("--resume", options.resume)
    overrides, flags = _settings(options)
    return resumed_run(options.resume, options.config, overrides, flags, cluster=bool(options.cluster))


def _settings(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return what the command line sets: a list of ``KEY=VALUE``, and a map from key to option.

    The map lacks the keys that ``--set`` sets.
    """
    flags = {key: flag for key, flag in _FLAGS.items() if getattr(options, key) is not None}
    for key in (key for override in options.set for key in keys_of(override)):
        if key in flags:
            raise UsageError(f"{flags[key]} and --set {key} set the same key; give one of them")
    return [*options.set, *(f"{key}={json.dumps(getattr(options, key))}" for key in flags)], flags


def _absolute(file: str) -> str:
    return str(Path(file).resolve())


def _finished(prepared: Prepared, final: Mapping[str, Any]) -> str:
    """Return the line that reports a finished run. ``final`` is the evaluation of its final policy."""
    run, config, _ = prepared
    return (
        f"the run in {run.path} is finished: {final['env_steps']:,} steps, final policy: mean return "
        f"{final['eval_return_mean']:.1f} ± {final['eval_return_std']:.1f}; to continue it: "
        f"td3-robot train --resume {_quoted(run.path)} --steps {2 * config.total_steps}"
    )


def _next_steps(prepared: Prepared) -> str:
    run = prepared.run
    return (
        f"curve:   {run.curve_file}\n"
        f"see it:  {_evaluate(prepared, run.path, ' --video walk.mp4')}\n"
        f"metrics: tensorboard --logdir {_quoted(run.tensorboard)}"
    )


def _evaluate(prepared: Prepared, policy: Path, video: str = "") -> str:
    """Return the command that evaluates a policy of the run.

    The name of a task can contain the name of a Python module. For safety, eval imports this module only if ``--task``
    names the task. The name in a policy file is not enough. The command makes no video of a task with a module, because
    some of these tasks have no pictures.
    """
    task = prepared.config.task
    backend, name = importlib.import_module("td3_robot_sims.tasks").find(task)
    return f"td3-robot eval {_quoted(policy)}{f' --task {shlex.quote(task)}' if backend.module(name) else video}"


def _quoted(path: Path) -> str:
    """Quote a path for a shell."""
    return shlex.quote(str(path))
