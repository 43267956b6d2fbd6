"""Compare the wall-clock time until a policy reaches a score: td3-robot, Stable-Baselines3, sb3-contrib and SBX.

    python benchmarks/time_to_score.py [CONTESTANT …] [--robots Walker2D Ant] [--seeds 0 1 2] [--steps 300000]

Trainings run one after another, so that each has all processor cores. A training evaluates its policy every 5,000 steps
with 10 episodes. A training reaches a score when the mean of two successive evaluations reaches it. A training ends
when it reaches the highest score of its robot, or after ``--steps`` steps. Each training has a small file in
``benchmarks/results/time_to_score``. The script skips finished trainings and repeats interrupted ones. If a chosen
training has finished with other values of ``--steps``, ``--every`` or ``--episodes``, the script reports an error and
starts no training. At the end, the script prints the times of all finished trainings in the folder with these values.
``--report`` starts no training. It writes these times to docs/explanation/results.md, and draws the charts.

The other packages are the *peers*. Each peer trains in one process, with the robot of pybullet_envs_gymnasium and the
settings of rl-baselines3-zoo. A peer's clock stops during an evaluation. The clock of td3-robot does not stop, because
its evaluator runs beside the training.

The peers need ``pip install stable-baselines3 sb3-contrib sbx-rl pybullet_envs_gymnasium``.
"""

from __future__ import annotations

import importlib
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from td3_robot_sims.quiet import stdout_to_stderr
from time_to_score_page import OURS, Point, compare, lines, times, write

from td3_robot import runs
from td3_robot.bench import harness
from td3_robot.errors import EXIT_GOOD, UsageError

DATA = Path(__file__).parent / "results" / "time_to_score"
PACKAGES = ("td3-robot", "torch", "numpy", "pybullet", "stable-baselines3", "sb3-contrib", "sbx-rl", "jax")


class Robot(NamedTuple):
    """A robot of the comparison.

    Attributes:
        published: the name of the robot in pybullet_envs_gymnasium.
        recipe: the configuration of td3-robot.
        scores: mean returns to reach.
        rate_falls: whether the learning rate of TQC falls linearly to 0 over a million steps.
    """

    published: str
    recipe: str
    scores: tuple[float, float]
    rate_falls: bool


class Peer(NamedTuple):
    """A package and algorithm that we compare with td3-robot.

    Attributes:
        module: the module that holds the algorithm.
        algorithm: name of the algorithm's class.
        settings: arguments of the class, from rl-baselines3-zoo (hyperparams/td3.yml and tqc.yml).
        noise: standard deviation of the exploration noise; 0 for TQC, whose policy is stochastic.
    """

    module: str
    algorithm: str
    settings: dict[str, Any]
    noise: float = 0.0


class Limits(NamedTuple):
    """How long a training runs, and how it is evaluated."""

    steps: int
    every: int
    episodes: int


ROBOTS = {
    "Walker2D": Robot("Walker2DBulletEnv-v0", "walker2d_fast", (1000.0, 1500.0), True),
    "Ant": Robot("AntBulletEnv-v0", "ant_fast", (1500.0, 2500.0), False),
}
SCORES = {name: robot.scores for name, robot in ROBOTS.items()}
_BOTH = {"gamma": 0.98, "batch_size": 256, "learning_starts": 10_000}
_TD3 = {**_BOTH, "learning_rate": 7e-4, "buffer_size": 200_000, "policy_kwargs": {"net_arch": [400, 300]}}
_TQC = {
    **_BOTH,
    "learning_rate": 7.3e-4,
    "buffer_size": 300_000,
    "tau": 0.02,
    "train_freq": 64,
    "gradient_steps": 64,
    "use_sde": True,
    "policy_kwargs": {"log_std_init": -3, "net_arch": [400, 300]},
}
PEERS = {
    "sb3-td3": Peer("stable_baselines3", "TD3", _TD3, 0.1),
    "sb3-tqc": Peer("sb3_contrib", "TQC", _TQC),
    "sbx-td3": Peer("sbx", "TD3", _TD3, 0.1),
    "sbx-tqc": Peer("sbx", "TQC", _TQC),
}


@dataclass
class Training:
    """A training and its file. The file holds every evaluation so far.

    Attributes:
        points: the evaluations.
    """

    contestant: str
    robot: str
    seed: int
    limits: Limits
    file: Path
    points: list[Point] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the file exists and belongs to a finished training.

        Raises:
            UsageError: the finished training had other limits.
        """
        kept = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {"partial": True}
        if kept["partial"]:
            return False
        if kept["limits"] != self.limits._asdict():
            raise UsageError(f"{self.file} has the limits {kept['limits']}; use them, or name another --out")
        return True

    def write(self, *, partial: bool = True) -> None:
        content = {
            "robot": self.robot,
            "contestant": self.contestant,
            "seed": self.seed,
            "limits": self.limits._asdict(),
            "partial": partial,
            "machine": harness.describe(*PACKAGES),
            "evaluations": self.points,
        }
        harness.write_result(self.file, content)

    def add(self, point: Point) -> bool:
        """Keep an evaluation. Return whether the training continues."""
        self.points.append(point)
        self.write()
        return times(self.points, SCORES[self.robot])[-1] is None


def main() -> int:
    command, known = "python benchmarks/time_to_score.py", [OURS, *PEERS]
    description = "Compare the time until a policy is good. Takes many hours."
    parser = harness.Options(command, description, ("", "td3-robot sb3-td3 --seeds 0"))
    parser.add_argument("contestants", nargs="*", metavar="CONTESTANT", help=f"{', '.join(known)} (default: all)")
    parser.add_argument("--robots", nargs="+", choices=ROBOTS, default=list(ROBOTS), help="default: all")
    parser.number("--seeds", [0, 1, 2], "N", "seeds", low=0)
    parser.number("--steps", 300_000, "N", "environment steps after which a training ends in any case")
    parser.number("--every", 5_000, "N", "environment steps between two evaluations")
    parser.number("--episodes", 10, "N", "episodes of an evaluation")
    parser.add_argument("--out", type=Path, default=DATA, metavar="DIR", help="folder of the results")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/time_to_score"), metavar="DIR", help="folder for the runs of td3-robot"
    )
    parser.add_argument("--report", action="store_true", help="train nothing; write the results into results.md")
    options = parser.parse_args()
    contestants = harness.chosen(parser, "contestant", options.contestants, known)
    limits = Limits(options.steps, options.every, options.episodes)
    if limits.steps <= 2 * limits.every:  # td3-robot might make only one evaluation before its final one
        parser.error(f"--steps is {limits.steps}; allowed: more than twice --every, which is {limits.every}")
    if options.report:
        write(finished(options.out, limits), SCORES)
        return EXIT_GOOD
    options.out.mkdir(parents=True, exist_ok=True)
    trainings = [
        Training(name, robot, seed, limits, options.out / f"{robot}-{name}-{seed}.json")
        for robot in options.robots
        for seed in options.seeds
        for name in contestants  # they alternate, so that a change of the load affects all of them
    ]
    for training in [it for it in trainings if not it.done]:
        training.write()
        train(training, options.runs)
    report = {"machine": harness.describe(*PACKAGES), "results": compare(finished(options.out, limits), SCORES)}
    return harness.show(report, options.json, lines)


def train(training: Training, folder: Path) -> None:
    if training.contestant == OURS:
        train_ours(training, folder / f"{training.file.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    else:
        with harness.process_of(training.contestant) as call:
            training.points = call(train_peer, training)
    training.write(partial=False)


def train_ours(training: Training, folder: Path) -> None:
    begin, limits = time.monotonic(), training.limits
    overrides = {"evaluation.every": limits.every, "evaluation.episodes": limits.episodes}
    # Seconds from ``begin`` to the start of the learner's clock. ``look`` computes them from the current time and
    # ``wall_s``, the time on the learner's clock. The learner reads its clock a little before ``look`` reads the
    # current time, so ``started`` is slightly too high.
    started = 0.0

    def add_evaluations() -> bool:
        made, continues = runs.open_run(folder).metrics(), True
        for item in [item for item in made if not item["final"]][len(training.points) :]:
            continues &= training.add((started + item["wall_s"], item["env_steps"], item["eval_return_mean"]))
        return continues

    def look(progress: runs.TrainingProgress) -> bool:
        nonlocal started
        started = time.monotonic() - begin - progress.figures["wall_s"]
        return add_evaluations()

    recipe = ROBOTS[training.robot].recipe
    runs.train(
        recipe,
        total_steps=limits.steps,
        seed=training.seed,
        out=folder,
        overrides=overrides,
        callback=look,
        progress=False,
    )
    add_evaluations()  # the evaluations since the last callback


def train_peer(training: Training) -> list[Point]:
    """Train with another package in this process. Return the evaluations."""
    warnings.simplefilter("ignore")  # the packages warn about each other
    begin, evaluating = time.monotonic(), 0.0
    with stdout_to_stderr():
        import gymnasium
        import pybullet_envs_gymnasium  # noqa: F401  registers its robots
        from stable_baselines3.common.evaluation import evaluate_policy
        from stable_baselines3.common.noise import NormalActionNoise

        peer, robot, limits = PEERS[training.contestant], ROBOTS[training.robot], training.limits
        environment, test = gymnasium.make(robot.published), gymnasium.make(robot.published)
        test.reset(seed=1000)  # the evaluations start from other states than the training
        settings = dict(peer.settings)
        if peer.noise:
            size = environment.action_space.shape
            settings["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, peer.noise))
        elif robot.rate_falls:
            settings["learning_rate"] = falling(settings["learning_rate"], limits.steps)
        algorithm: Any = getattr(importlib.import_module(peer.module), peer.algorithm)
        model = algorithm("MlpPolicy", environment, seed=training.seed, device="cpu", **settings)

        def after_step(local: Mapping[str, Any], _: Any) -> bool:
            nonlocal evaluating
            steps = local["self"].num_timesteps
            if steps % limits.every:
                return True
            stopped = time.monotonic()
            mean, _ = evaluate_policy(model, test, limits.episodes, warn=False)
            continues = training.add((stopped - begin - evaluating, steps, float(mean)))
            evaluating += time.monotonic() - stopped
            return continues

        model.learn(limits.steps, callback=after_step)
    return training.points


def falling(rate: float, steps: int) -> Callable[[float], float]:
    """Return a schedule: a function that takes the remaining share of ``steps`` and returns the learning rate.

    The share falls from 1 to 0. The learning rate falls from ``rate`` to 0 over a million steps, and then stays 0.
    """
    return lambda remaining: rate * max(0.0, 1 - (1 - remaining) * steps / 1e6)


def finished(folder: Path, limits: Limits) -> list[dict[str, Any]]:
    """Return the files of the finished trainings with these limits, in the order of contestants and seeds.

    Raises:
        UsageError: there are none.
    """
    files = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    found = [it for it in files if not it["partial"] and it["limits"] == limits._asdict()]
    if not found:
        raise UsageError(f"{folder} has no finished training with the limits {limits._asdict()}")
    names = [OURS, *PEERS]
    return sorted(found, key=lambda it: (names.index(it["contestant"]), it["seed"]))


if __name__ == "__main__":
    harness.run_script(main)
