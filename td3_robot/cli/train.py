"""``td3-robot train``: trains a policy, evaluates it and draws its curve."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from td3_robot.cli.train_setup import Prepared, new_run, resumed_run
from td3_robot.config.schema import Config
from td3_robot.errors import EXIT_GOOD, NodeError, UsageError
from td3_robot.learner.evaluations import evaluation_record
from td3_robot.runtime import launch, metrics
from td3_robot.runtime.arguments import Parser
from td3_robot.runtime.progress import Progress
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.supervisor import Supervisor
from td3_robot.util import files

FINAL_EPISODES = 10
_EXAMPLES = """examples:
  td3-robot train walker2d_fast
  td3-robot train configs/ant.yaml --steps 200000 --seed 3 --out runs/ant-3
  td3-robot train walker2d --set learner.batch_size=128 --set simulators=2
  td3-robot train walker2d --from runs/walker2d/session.mcap
  td3-robot train walker2d --from runs/walker2d/session.mcap --offline 20000
  td3-robot train --resume runs/ant-3
  td3-robot train --resume runs/ant-3 --steps 400000 --set learner.learning_rate=1e-4
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not 0 < options.log_every < math.inf:  # excludes NaN
        raise UsageError(f"--log-every is {options.log_every:g}; allowed: above 0 s")
    prepared = resumed_run(options) if options.resume else new_run(options)
    with prepared.run.locked():
        return _train(prepared, options.log_every)


def _parser() -> Parser:
    parser = Parser(
        prog="td3-robot train",
        description="Train a policy. Simulator, policy server and learner run in separate processes.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file, or the name of a shipped one")
    parser.add_argument("--steps", type=int, metavar="N", help="environment steps of the whole run (total_steps)")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of everything random")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/CONFIG-DATE-TIME)")
    parser.add_argument("--lockstep", action="store_true", help="bit-identical in every run, and a little slower")
    parser.add_argument(
        "--from", dest="recordings", nargs="+", default=[], metavar="FILE", help="start with the data of recordings"
    )
    parser.add_argument(
        "--offline", type=int, metavar="N", help="with --from: updates before the first environment step"
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue this run; name the keys that change")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a configuration key")
    parser.add_argument(
        "--log-every", type=float, default=10.0, metavar="S", help="seconds between progress lines off a terminal"
    )
    return parser


def _train(prepared: Prepared, log_every: float) -> int:
    run, config, notices = prepared
    description = launch.load(config.launch)
    progress = Progress(sys.stderr, config.total_steps, log_every, run.steps_made())
    for line in (f"training {config.task} for {config.total_steps:,} steps in {run.path}", *notices):
        progress.say(line)
    run.write_run(config=config.to_yaml())
    begin = time.monotonic()
    with Supervisor(run, config, launch.expand(description, config), progress.say) as supervisor:
        try:
            code = supervisor.supervise(progress)
        finally:
            progress.end()
    run.write_final(supervisor.statuses())
    lost = _report_losses(supervisor, progress)
    if code != EXIT_GOOD:
        progress.say(f"stopped; everything learned is saved; continue: td3-robot train --resume {_quoted(run.path)}")
        return code
    figures = supervisor.statuses()["learner"].figures
    if figures.get("target_reached"):
        progress.say(f"an evaluation reached evaluation.target_return {config.evaluation.target_return:g}")
    minutes = (time.monotonic() - begin) / 60
    progress.say(f"trained in {minutes:.1f} min; {lost} Steps lost; evaluating the final policy")
    try:
        result = _evaluate(run, config, description.evaluate, figures["wall_s"])
    except KeyboardInterrupt:
        progress.say(f"stopped; the trained policy is saved: td3-robot eval {_quoted(run.policy_file)}")
        raise
    returns = " ".join(f"{value:.0f}" for value in result["returns"])
    print(
        f"final policy: mean return {result['mean']:.1f} ± {result['std']:.1f} over {len(result['returns'])} episodes"
    )
    print(f"returns: {returns}")
    print(_next_steps(run))
    return EXIT_GOOD


def _report_losses(supervisor: Supervisor, progress: Progress) -> int:
    """Print what went wrong during the training. Return the number of Steps that the learner missed."""
    statuses = supervisor.statuses()
    for name, times in supervisor.restarts.items():
        progress.say(f"{name} died and was restarted {times} times")
    for name, status in statuses.items():
        if lost := int(status.counters.get("episodes_not_restored", 0)):
            progress.say(f"{name}: {lost} episodes could not be continued, and new ones began; see its log")
    counters: dict[str, int] = statuses["learner"].counters if "learner" in statuses else {}

    def count(name: str) -> int:
        return int(counters.get(name, 0))

    if cut := count("cut"):
        progress.say(f"{cut} episodes were cut short by a restart or a gap; their transitions before it are kept")
    if failed := count("checkpoints_failed"):
        progress.say(f"{failed} checkpoints could not be saved; see {supervisor.run.logs / 'learner.log'}")
    if skipped := count("evaluations_skipped") + count("evaluations_pending"):
        progress.say(f"{skipped} evaluations during training were skipped or came too late; see the evaluator's log")
    if missed := count("missed"):
        progress.say(f"{missed} published Steps never reached the learner, at {count('gaps')} gaps")
    return missed


def _evaluate(run: RunFolder, config: Config, module: str, wall: float) -> dict[str, Any]:
    """Evaluate the final policy in another process, and add the result to the metrics and the curve.

    Args:
        module: module that evaluates a policy.
        wall: training time of the run in s.

    Returns:
        The result, as ``td3-robot eval --json`` prints it.
    """
    command = [sys.executable, "-m", module, str(run.policy_file), "--env", config.task, "--json"]
    command += ["--episodes", str(FINAL_EPISODES), "--seed", str(config.seed)]
    command += ["--max-steps", str(config.evaluation.max_steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no message"]
        raise NodeError(f"the final evaluation failed: {words[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    provenance = result["provenance"]
    record = evaluation_record(
        env_steps=provenance["env_steps"],
        updates=provenance["updates"],
        wall_s=wall,
        weights_version=provenance["version"],
        returns=result["returns"],
        lengths=result["lengths"],
        final=True,
    )
    with run.metrics_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    from td3_robot.runtime import learning_curve  # imported lazily: matplotlib takes a second to load

    learning_curve.draw(run.metrics_file, run.curve_file, f"{config.task}, seed {config.seed}")
    best = max(item["eval_return_mean"] for item in metrics.read(run.metrics_file, "evaluation"))
    if record["eval_return_mean"] >= best or not run.best_file.exists():
        files.write_atomically(run.best_file, run.policy_file.read_bytes())
    return result


def _next_steps(run: RunFolder) -> str:
    return (
        f"curve:   {run.curve_file}\n"
        f"see it:  td3-robot eval {_quoted(run.policy_file)} --video walk.mp4\n"
        f"metrics: tensorboard --logdir {_quoted(run.tensorboard)}"
    )


def _quoted(path: Path) -> str:
    """Quote a path for a shell."""
    return shlex.quote(str(path))
