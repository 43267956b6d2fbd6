"""``td3-robot eval``: episodes of a policy without noise, their returns, and a video."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import numpy as np

from td3_robot.bundle import Bundle
from td3_robot.config.schema import EvaluationConfig
from td3_robot.errors import BundleError, Td3RobotError, UsageError
from td3_robot.policies import find_policy
from td3_robot.policy.actor import Actor
from td3_robot.runtime.arguments import POLICY_HELP, Parser, integer
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.rollout import SEED_OFFSET, Episode, episodes

_EXAMPLES = """examples:
  td3-robot eval walker2d --video walk.mp4
  td3-robot eval runs/walker2d
  td3-robot eval runs/walker2d/policy.safetensors --episodes 20 --seed 7 --json
  td3-robot eval policy.safetensors --task gymnasium:my_tasks:Reach-v0
"""
MAX_STEPS = EvaluationConfig().max_steps
_FRAME_RATE = 30.0  # highest frame rate of a video, frames per second


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    file = find_policy(options.policy)
    bundle = Bundle.load(file)
    task = options.task or str(bundle.provenance.get("task", bundle.spec.name))
    with redirect_stdout(sys.stderr):  # a task may print; keep this out of the result
        if not options.task:
            tasks.refuse_import(task, f"policy {str(file)!r}", "--task {task}")
        environment = tasks.make(task)
        try:
            if difference := environment.spec.difference(bundle.spec):
                raise BundleError(f"policy {str(file)!r} is for another robot than {task!r}: {difference}")
            results = _run(environment, bundle, options)
        finally:
            environment.close()
    _report(task, bundle, results, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="td3-robot eval",
        description="Run a policy without noise; print mean, standard deviation and every return.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("policy", metavar="POLICY", help=POLICY_HELP)
    parser.add_argument("--task", "--env", metavar="NAME", help="task (default: the one it was trained on)")
    parser.add_argument(
        "--episodes", type=integer(1), default=10, metavar="N", help="number of episodes (default: %(default)s)"
    )
    parser.add_argument(
        "--max-steps", type=integer(1), default=MAX_STEPS, metavar="N", help="longest episode (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=integer(), default=0, metavar="S", help="seed of the starting states (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--video", type=Path, metavar="FILE", help="write the first episode as a video (.mp4)")
    return parser


def _run(environment: Environment, bundle: Bundle, options: argparse.Namespace) -> list[Episode]:
    """Run the episodes; with ``--video``, write the first one as a video."""
    results: list[Episode] = []
    with _video(options.video, environment) if options.video else nullcontext() as film:

        def frame() -> None:
            if film and not results:
                film()

        seed = options.seed + SEED_OFFSET
        for item in episodes(environment, Actor(bundle), options.episodes, seed, options.max_steps, frame):
            if item:
                results.append(item)
    return results


def _report(task: str, bundle: Bundle, results: Sequence[Episode], options: argparse.Namespace) -> None:
    returns = np.array([episode.episode_return for episode in results])
    if options.json:
        report = {
            "task": task,
            "mean": float(returns.mean()),
            "std": float(returns.std()),
            "returns": returns.tolist(),
            "lengths": [episode.length for episode in results],
            "seed": options.seed,
            "provenance": dict(bundle.provenance),
        }
        print(json.dumps(report))
        return
    print(f"{task}: mean return {returns.mean():.1f} ± {returns.std():.1f} over {len(returns)} episodes")
    for number, episode in enumerate(results):
        print(f"  episode {number}: return {episode.episode_return:.1f}, {episode.length} steps")
    if options.video:
        print(f"video: {options.video}")


@contextmanager
def _video(path: Path, environment: Environment) -> Iterator[Callable[[], None]]:
    """Open a video. Yields a function that adds a picture; call it after each reset and step."""
    import imageio.v2 as imageio  # imported here, because only a video needs it

    period = environment.spec.control_period
    every = max(1, round(1 / (period * _FRAME_RATE)))
    if path.suffix not in (".mp4", ".gif", ".mkv", ".webm"):
        raise UsageError(f"--video {str(path)!r}: the name must end in .mp4, .mkv, .webm or .gif")
    if not path.parent.is_dir():
        raise UsageError(f"--video {str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--video {str(path)!r}: a file cannot be written there")
    if path.suffix == ".gif":
        writer = imageio.get_writer(path, duration=1000 * period * every, loop=0)
    else:
        codec = "libvpx-vp9" if path.suffix == ".webm" else "libx264"
        writer = imageio.get_writer(path, fps=1 / (period * every), macro_block_size=16, codec=codec)
    count = 0

    def frame() -> None:
        nonlocal count
        if count % every == 0:
            try:
                writer.append_data(environment.render())
            except OSError as error:  # its further lines hold the encoder's command line
                raise UsageError(f"--video {str(path)!r} cannot be written: {str(error).splitlines()[0]}") from None
        count += 1

    try:
        yield frame
    finally:
        writer.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Td3RobotError as error:
        print(f"td3-robot eval: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
