"""Runs a prepared training: its processes, then the evaluation of the final policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

from td3_robot.errors import EXIT_GOOD, NodeError
from td3_robot.learner.evaluations import evaluation_record
from td3_robot.runtime import best_policy, launch, metrics
from td3_robot.runtime.hosts import Hosts
from td3_robot.runtime.prepare import Prepared
from td3_robot.runtime.progress import Progress
from td3_robot.runtime.supervisor import Supervisor, Watch

_FINAL_EPISODES = 10


class Trained(NamedTuple):
    """How the processes of a training ended."""

    exit_code: int  # 0 if the training is complete
    wall_s: float  # training time of the whole run; 0 if the training is not complete
    signal: int  # number of the signal that stopped the training; 0 without a signal


def train(
    prepared: Prepared, progress: Progress, resume: str, watch: Watch | None = None, hosts: Hosts | None = None
) -> Trained:
    """Run the processes of a training until its end. The caller holds the lock of the run folder.

    ``resume`` is the command that continues a stopped training. A message shows it to the user.

    Raises:
        NodeError: see :meth:`Supervisor.supervise`.
    """
    run, config, notices = prepared
    run.write_run(config=config.to_yaml())
    begin = time.monotonic()

    def show(statuses: dict[str, Any]) -> bool | None:
        progress(statuses)
        return watch(statuses) if watch else None

    processes = launch.expand(launch.load(config.launch), config)
    with Supervisor(run, config, processes, progress.say, hosts) as supervisor:
        # Tell the user only now that the training runs: from here on, Ctrl-C stops the processes.
        for line in (f"training {config.task} for {config.total_steps:,} steps in {run.path}", *notices):
            progress.say(line)
        try:
            code = supervisor.supervise(show)
        finally:
            progress.end()
    run.write_final(supervisor.statuses())
    lost = _report_losses(supervisor, progress)
    if code != EXIT_GOOD:
        saved = "everything learned is saved" if supervisor.clean else "the newest checkpoint is saved"
        what = f"{saved}; continue" if run.has_checkpoints else "nothing was learned yet; start it again"
        progress.say(f"stopped; {what}: {resume}")
        return Trained(code, 0.0, supervisor.signal)
    figures = supervisor.statuses()["learner"].figures
    if figures.get("target_reached"):
        progress.say(f"an evaluation reached evaluation.target_return {config.evaluation.target_return:g}")
    minutes = (time.monotonic() - begin) / 60
    progress.say(f"trained in {minutes:.1f} min; {lost} Steps lost; evaluating the final policy")
    return Trained(code, figures["wall_s"], 0)


def finished(prepared: Prepared) -> dict[str, Any] | None:
    """Return the evaluation of the final policy; None if the run is not finished.

    If the configuration has changed, and asks for more steps than the run has made, the run is not finished.
    """
    run, config, _ = prepared
    final = metrics.final(run.metrics_file)
    if not final or run.steps_made() > final["env_steps"]:
        return None
    return None if config != run.trained_with() and config.total_steps > final["env_steps"] else final


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
        progress.say(f"{cut} episodes ended early because of a restart or lost Steps")
    if failed := count("checkpoints_failed"):
        progress.say(f"{failed} checkpoints could not be saved; see {supervisor.run.logs / 'learner.log'}")
    if skipped := count("evaluations_skipped") + count("evaluations_pending"):
        progress.say(f"{skipped} evaluations during training were skipped or came too late; see the evaluator's log")
    if missed := count("missed"):
        gaps = count("gaps")
        progress.say(f"{missed} published Steps never reached the learner; the received Steps have {gaps} gaps")
    return missed


def evaluate_final(prepared: Prepared, wall_s: float) -> dict[str, Any]:
    """Evaluate the final policy in another process. Add the result to the metrics, and draw the curve.

    The final policy becomes the run's best policy, unless an earlier policy has a higher mean return.

    Returns:
        the result, as ``td3-robot eval --json`` prints it.

    Raises:
        NodeError: the evaluation failed.
    """
    run, config, _ = prepared
    module = launch.load(config.launch).evaluate
    command = [sys.executable, "-m", module, str(run.policy_file), "--task", config.task, "--json"]
    command += ["--episodes", str(_FINAL_EPISODES), "--seed", str(config.seed)]
    command += ["--max-steps", str(config.evaluation.max_steps)]
    # With one thread, OpenBLAS adds numbers in the same order as in a simulator.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no message"]
        raise NodeError(f"the final evaluation failed: {words[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    provenance = result["provenance"]
    record = evaluation_record(
        env_steps=provenance["env_steps"],
        updates=provenance["updates"],
        wall_s=wall_s,
        weights_version=provenance["version"],
        returns=result["returns"],
        lengths=result["lengths"],
        final=True,
    )
    with run.metrics_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    from td3_robot.runtime import learning_curve  # imported lazily: matplotlib takes a second to load

    learning_curve.draw(run.metrics_file, run.curve_file, f"{config.task}, seed {config.seed}")
    learned = (item for item in metrics.read(run.metrics_file, "evaluation") if item["updates"])
    best = max((item["eval_return_mean"] for item in learned), default=float("-inf"))
    best = max(best, best_policy.mean_return(run.best_file))
    if record["eval_return_mean"] >= best or not run.best_file.exists():
        mean = record["eval_return_mean"] if record["updates"] else None
        best_policy.keep(run.best_file, run.policy_file.read_bytes(), mean)
    return result
