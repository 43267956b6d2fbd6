"""``td3-robot train``: from a configuration to a trained policy, its evaluation and its curve."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from td3_robot.bundle import Bundle
from td3_robot.config import loading as configuration
from td3_robot.config import resume as changes
from td3_robot.config.learner import LearnerConfig
from td3_robot.config.schema import Config
from td3_robot.errors import EXIT_GOOD, NodeError, UsageError
from td3_robot.learner import beginning, room
from td3_robot.learner.machine_choices import resolve
from td3_robot.runtime import launch
from td3_robot.runtime import metrics_lines as records
from td3_robot.runtime.arguments import Parser
from td3_robot.runtime.progress import Progress
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.supervisor import Supervisor
from td3_robot.specs import RobotSpec
from td3_robot.topics import LINKS
from td3_robot.transport import endpoints
from td3_robot.transport.keys import open_keys
from td3_robot.util import extras, files
from td3_robot.util.machine import available_cores, compiler_lack

FINAL_EPISODES = 10
_LEARNER = "td3_robot.learner.node"
_RECORDER = "td3_robot.recording.node"
_A2C = "td3_robot_sims.a2c"

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
    parser = Parser(
        prog="td3-robot train",
        description="Train a policy with simulator, policy server and learner as processes of their own.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file, or the name of a shipped one")
    parser.add_argument("--steps", type=int, metavar="N", help="environment steps in all (total_steps)")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of everything random")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/CONFIG-DATE-TIME)")
    parser.add_argument("--lockstep", action="store_true", help="reproducible to the bit, a little slower")
    parser.add_argument(
        "--from", dest="recordings", nargs="+", default=[], metavar="FILE", help="begin with what these recordings hold"
    )
    parser.add_argument(
        "--offline", type=int, metavar="N", help="with --from: updates on that, before the first environment step"
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with this run; name what is to change")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a configuration key")
    parser.add_argument(
        "--log-every", type=float, default=10.0, metavar="S", help="seconds between progress lines off a terminal"
    )
    options = parser.parse_args(arguments)
    if not 0 < options.log_every < math.inf:  # NaN as well
        raise UsageError(f"--log-every is {options.log_every:g}; allowed: above 0 s")
    run, config, notices = _resumed(options) if options.resume else _created(options)
    with run.locked():
        return _train(run, config, notices, options.log_every)


Prepared = tuple[RunFolder, Config, list[str]]
"""The run, its configuration, and lines to say first."""


def _created(options: argparse.Namespace) -> Prepared:
    if options.config is None:
        raise UsageError("no CONFIG given; for example: td3-robot train walker2d_fast")
    overrides = list(options.set)
    for option, key in (("steps", "total_steps"), ("seed", "seed")):
        if getattr(options, option) is not None and any(item.partition("=")[0] == key for item in options.set):
            raise UsageError(f"--{option} and --set {key} say the same thing; give one of them")
    overrides += [f"total_steps={options.steps}"] if options.steps is not None else []
    overrides += [f"seed={options.seed}"] if options.seed is not None else []
    overrides += ["timing=lockstep"] if options.lockstep else []
    files = [str(Path(file).resolve()) for file in options.recordings]
    overrides += [f"learner.recordings={json.dumps(files)}"] if files else []
    overrides += [f"learner.offline_updates={options.offline}"] if options.offline is not None else []
    wanted = configuration.load(options.config, overrides)
    _check_installed(wanted)
    config, device_memory, settled = resolve(wanted)
    if start := config.learner.start_from:
        task: RobotSpec = importlib.import_module("td3_robot_sims.tasks").spec(config.task)
        beginning.check(Bundle.load(Path(start)), task, config.network.hidden, config.learner)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = options.out or Path("runs") / f"{Path(options.config).stem}-{stamp}"
    fits = _check(config, path, device_memory)
    return RunFolder.create(path, config), config, [*settled, *fits]


def _resumed(options: argparse.Namespace) -> Prepared:
    words = {name: getattr(options, name) for name in ("seed", "out", "lockstep", "recordings", "offline")}
    given = [name for name, value in words.items() if value is not None and value is not False and value != []]
    if given:
        raise UsageError(f"--resume goes on with a run; {given[0]} cannot be given, only CONFIG, --steps and --set")
    run = RunFolder.open(options.resume)
    before = run.trained_with() or run.config()
    overrides = list(options.set) + ([f"total_steps={options.steps}"] if options.steps is not None else [])
    wanted = configuration.load(options.config or run.config_file, overrides)
    _check_installed(wanted)
    config, device_memory, settled = resolve(wanted, before)
    declared = {override.partition("=")[0] for override in overrides}
    changed = changes.accepted(before, config, declared)
    made = run.steps_made()
    if config.total_steps != before.total_steps and config.total_steps < made:
        what = "--steps" if options.steps is not None else "total_steps"
        raise UsageError(f"{what} is {config.total_steps}; the run in {run.path} has already made {made}")
    if not any(run.checkpoints.glob("checkpoint-*.safetensors")):
        damaged = any(run.checkpoints.glob("checkpoint-*.damaged"))
        # In lock-step a run that was stopped before its first cut begins once more, by itself to the bit the same.
        if damaged or (made and run.policy_file.exists() and before.timing != "lockstep"):
            raise UsageError(
                f"--resume: the run in {run.path} has made {made} steps, and no whole checkpoint to go on from is left "
                f"in {run.checkpoints}; bring one back, or begin another run"
            )
    fits = _check(config, run.path, device_memory)
    with run.locked():
        files.write_atomically(run.config_file, config.to_yaml().encode())
    return run, config, [*settled, *(f"changed: {line}" for line in changed), *fits]


def _check_installed(config: Config) -> None:
    """Find out first what the processes need and do not find.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    recordings = extras.NEEDED["record"] if config.record.enabled or config.learner.recordings else ()
    for module in (*extras.NEEDED["train"], *recordings):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def _check(config: Config, path: Path, device_memory: int | None) -> list[str]:
    """Find out before anything is started or written what would stop the processes: robot and endpoints.

    Also whether what the learner keeps fits; what to say of that.
    """
    processes = launch.expand(launch.load(config.launch), config)
    if config.record.enabled and not any(process.row.module == _RECORDER for process in processes):
        raise UsageError(f"record.enabled is true; launch {config.launch!r} has no recorder, it must be false")
    if any(process.row.module == _A2C for process in processes):
        importlib.import_module("td3_robot_sims.a2c_config").check(config)
    keys = open_keys(config.endpoints.keys)
    for link in LINKS:
        if endpoint := getattr(config.endpoints, link):
            endpoints.check(endpoint, bind=True, keys=keys is not None)
    tasks = importlib.import_module("td3_robot_sims.tasks")
    spec: RobotSpec = tasks.check(config.task, config.randomization)
    if config.learner.recordings:
        experience = importlib.import_module("td3_robot.recording.experience")
        for file in config.learner.recordings:
            experience.check(Path(file), spec)
    if not any(process.row.module == _LEARNER for process in processes):
        return []
    fits = room.announce(config, spec.observation_size, spec.action_size, RunFolder(path), device_memory)
    return [*crowded(config.learner, available_cores()), *compiling(config.learner), fits]


def crowded(learner: LearnerConfig, cores: int) -> list[str]:
    """What to say of a learner whose threads will wait for processors."""
    if learner.device == "cuda":
        return []
    what, has = f"learner.threads is {learner.threads}", f"this machine has {cores} processors for all processes"
    if learner.threads_in == "critics" and learner.threads <= 2 * cores and learner.compiles:
        return []  # what is compiled has half of them
    if learner.threads > cores:
        return [f"{what}, and {has}: they will wait for one another"]
    if learner.threads_in == "operators" and 2 <= learner.threads == cores:
        return [f"{what} in operators, and {has}: in critics they wait less"]
    return []


def compiling(learner: LearnerConfig) -> list[str]:
    """What to say of a learner that compiles its updates: it begins later, or not compiled."""
    if not learner.compiles:
        return []
    if lack := compiler_lack():
        return [f"learner.compile is true, and {lack}: updates are made as they are, and slower"]
    return ["learner.compile: the first time on this machine the learner compiles its updates for some 20 s"]


def _train(run: RunFolder, config: Config, notices: list[str], log_every: float) -> int:
    description = launch.load(config.launch)
    progress = Progress(sys.stderr, config.total_steps, log_every, run.steps_made())
    progress.say(f"training {config.task} for {config.total_steps:,} steps in {run.path}")
    for notice in notices:
        progress.say(notice)
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
        progress.say(
            f"stopped; what was learned is kept: go on with td3-robot train --resume {shlex.quote(str(run.path))}"
        )
        return code
    figures = supervisor.statuses()["learner"].figures
    if figures.get("target_reached"):
        progress.say(f"an evaluation reached evaluation.target_return {config.evaluation.target_return:g}")
    progress.say(
        f"trained in {(time.monotonic() - begin) / 60:.1f} min; {lost} Steps lost; evaluating the final policy"
    )
    try:
        result = _evaluate(run, config, description.evaluate, figures["wall_s"])
    except KeyboardInterrupt:
        progress.say(f"stopped; the policy is trained and kept: td3-robot eval {shlex.quote(str(run.policy_file))}")
        raise
    returns = " ".join(f"{value:.0f}" for value in result["returns"])
    print(
        f"final policy: mean return {result['mean']:.1f} ± {result['std']:.1f} over {len(result['returns'])} episodes"
    )
    print(f"returns: {returns}")
    print(_next_steps(run))
    return EXIT_GOOD


def _report_losses(supervisor: Supervisor, progress: Progress) -> int:
    for name, times in supervisor.restarts.items():
        progress.say(f"{name} died and was started again {times} times")
    learner = supervisor.statuses().get("learner")
    counters: dict[str, int] = learner.counters if learner else {}
    for name, status in supervisor.statuses().items():
        if lost := int(status.counters.get("episodes_not_restored", 0)):
            progress.say(f"{name}: {lost} episodes could not be gone on with, new ones were begun; see its log")
    missed, cut = int(counters.get("missed", 0)), int(counters.get("cut", 0))
    if cut:
        progress.say(f"{cut} episodes were cut short by a restart or a gap; what was seen of them is kept")
    if failed := int(counters.get("checkpoints_failed", 0)):
        progress.say(f"{failed} checkpoints could not be saved; see {supervisor.run.logs / 'learner.log'}")
    if skipped := int(counters.get("evaluations_skipped", 0)) + int(counters.get("evaluations_pending", 0)):
        progress.say(f"{skipped} evaluations during training were not made, or not in time; see the evaluator's log")
    if missed:
        progress.say(f"{missed} Steps were published and never learned from, at {counters.get('gaps', 0)} gaps")
    return missed


def _evaluate(run: RunFolder, config: Config, module: str, wall: float) -> dict[str, Any]:
    """Evaluate the final policy in a process of its own, and put the result with the metrics and into the curve."""
    command = [sys.executable, "-m", module, str(run.policy_file), "--env", config.task, "--json"]
    command += ["--episodes", str(FINAL_EPISODES), "--seed", str(config.seed)]
    command += ["--max-steps", str(config.evaluation.max_steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no message"]
        raise NodeError(f"the final evaluation failed: {words[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    provenance = result["provenance"]
    record = records.evaluation(
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
    from td3_robot.runtime import (
        learning_curve as curve,  # here, because matplotlib takes a second to load and training does not need it
    )

    curve.draw(run.metrics_file, run.curve_file, f"{config.task}, seed {config.seed}")
    best = max(item["eval_return_mean"] for item in curve.read(run.metrics_file, "evaluation"))
    if record["eval_return_mean"] >= best or not run.best_file.exists():
        files.write_atomically(run.best_file, run.policy_file.read_bytes())
    return result


def _next_steps(run: RunFolder) -> str:
    return (
        f"curve:   {run.curve_file}\n"
        f"see it:  td3-robot eval {shlex.quote(str(run.policy_file))} --video walk.mp4\n"
        f"metrics: tensorboard --logdir {shlex.quote(str(run.tensorboard))}"
    )
