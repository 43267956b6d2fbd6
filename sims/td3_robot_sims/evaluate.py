"""``td3-robot eval``: episodes of a policy without noise, their returns, and a video."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from td3_robot.config.schema import EvaluationConfig
from td3_robot.errors import ArgumentError, BundleError, Td3RobotError
from td3_robot.policies import Policy, load_policy, shipped_policies
from td3_robot.policy.actor import Actor
from td3_robot.runtime.arguments import POLICY_HELP, Parser, integer, suggest
from td3_robot.runtime.progress import Working
from td3_robot.util import arguments, extras, files, resources
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.quiet import stdout_to_stderr
from td3_robot_sims.rollout import SEED_OFFSET, Episode
from td3_robot_sims.rollout import episodes as episodes_of

_EXAMPLES = """examples:
  td3-robot eval walker2d --video walk.mp4
  td3-robot eval runs/walker2d
  td3-robot eval runs/walker2d/policy.safetensors --episodes 20 --seed 7 --json
  td3-robot eval policy.safetensors --task gymnasium:my_tasks:Reach-v0
"""
MAX_STEPS = EvaluationConfig().max_steps
_FAST = {"libx264": ["-preset", "veryfast"], "libvpx-vp9": ["-deadline", "realtime", "-cpu-used", "8"]}
"""Fast settings of the encoders. With the default settings, half of the time for making a video goes into encoding."""
_ENCODERS = {
    ".mp4": ("libx264", "mp4"),
    ".mkv": ("libx264", "matroska"),
    ".webm": ("libvpx-vp9", "webm"),
}
"""Maps the suffix of a video to the codec and the container of ffmpeg."""
_FRAME_RATE = 30.0  # wanted frames per second of a video; the real rate is the step rate divided by a whole number


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of an evaluation with E episodes.

    Attributes:
        returns: float64[E], the undiscounted return of each episode.
        lengths: int64[E], the number of steps of each episode.
    """

    task: str
    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns, over these episodes."""
        return float(self.returns.std())


@extras.advice()
def evaluate(
    policy: str | Path | Policy,
    *,
    task: str | None = None,
    episodes: int = 10,
    seed: int = 0,
    max_steps: int = MAX_STEPS,
    video: str | Path | None = None,
) -> Evaluation:
    """Run episodes of a policy without noise in simulation. Needs the extra ``sim``.

    Args:
        policy: a Policy, the name of a shipped policy such as ``walker2d``, a run folder, or a policy file.
        task: a task such as ``Walker2D`` or ``gymnasium:Pendulum-v1``; None for the task of the training.
        episodes: number of episodes, at least 1.
        seed: seed of the starting states, at least 0. To compare policies, use the same seed.
        max_steps: largest number of steps of an episode, at least 1. It ends episodes of tasks without a time limit.
        video: file to write the first episode to: .mp4, .mkv, .webm or .gif; None for no video.

    Raises:
        ValueError: a number is too low, or the video cannot be written.
        TypeError: an argument has a wrong type.
        BundleError: the policy does not exist, its file is damaged, or its robot differs from the robot of ``task``.
        ConfigError: the task does not exist, or it cannot be made or drawn. Or ``task`` is None, and the task of the
            training needs a module that this process has not imported.
        NodeError: an observation or a reward is not finite.
        ModuleNotFoundError: a package is not installed. The error names the extra that installs it.
    """
    episodes, max_steps = arguments.whole("episodes", episodes, 1), arguments.whole("max_steps", max_steps, 1)
    seed = arguments.whole("seed", seed, 0)
    film = None if video is None else arguments.path("video", video)
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    task = _trained_task(policy, "task={task!r}") if task is None else arguments.text("task", task)
    environment = tasks.make(task)
    try:
        if difference := environment.spec.difference(policy.spec):
            raise BundleError(f"policy {policy.source!r} is for another robot than {task!r}: {difference}")
        results = _run(environment, Actor(policy.bundle), episodes, seed + SEED_OFFSET, max_steps, film)
    finally:
        environment.close()
    returns, lengths = zip(*results, strict=True)
    return Evaluation(task, np.array(returns, np.float64), np.array(lengths, np.int64))


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    policy = load_policy(options.policy)
    task = _trained_task(policy, "--task {task}") if options.task is None else options.task
    numbers = {"episodes": options.episodes, "seed": options.seed, "max_steps": options.max_steps}
    with stdout_to_stderr():  # if a task prints text, keep it out of the result
        result = evaluate(policy, task=task, video=options.video, **numbers)
    _report(result, policy, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="td3-robot eval",
        description="Run a policy without noise; print mean, standard deviation and every return.",
        epilog=_EXAMPLES,
    )
    suggest(parser.add_argument("policy", metavar="POLICY", help=POLICY_HELP), shipped_policies)
    task = parser.add_argument(
        "--task", "--env", metavar="NAME", help="task (default: the task of the policy's training)"
    )
    suggest(task, tasks.names)
    parser.add_argument(
        "--episodes", type=integer(1), default=10, metavar="N", help="number of episodes (default: %(default)s)"
    )
    parser.add_argument(
        "--max-steps",
        type=integer(1),
        default=MAX_STEPS,
        metavar="N",
        help="largest number of steps of an episode (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=integer(), default=0, metavar="S", help="seed of the starting states (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--video", type=Path, metavar="FILE", help="write the first episode as a video: .mp4, .mkv, .webm or .gif"
    )
    return parser


def _trained_task(policy: Policy, remedy: str) -> str:
    """Return the task of a policy's training. For ``remedy`` and the errors see :func:`tasks.refuse_import`."""
    task = str(policy.provenance.get("task", policy.spec.name))
    tasks.refuse_import(task, f"policy {policy.source!r}", remedy)
    return task


def _run(
    environment: Environment, actor: Actor, count: int, seed: int, max_steps: int, video: Path | None
) -> list[Episode]:
    """Run the episodes. With ``video``, write the first episode as a video."""
    results: list[Episode] = []
    steps = -1
    with _video(video, environment) if video else nullcontext() as film, Working("eval") as working:
        for item in episodes_of(environment, actor, count, seed, max_steps):
            if film and not results:
                film()
            steps += 1
            if item:
                results.append(item)
                steps = -1
            working.show(f"episode {min(len(results) + 1, count)} of {count}, step {max(steps, 0)}")
    return results


def _report(result: Evaluation, policy: Policy, options: argparse.Namespace) -> None:
    if options.json:
        report = {
            "task": result.task,
            "mean": result.mean,
            "std": result.std,
            "returns": result.returns.tolist(),
            "lengths": result.lengths.tolist(),
            "seed": options.seed,
            "provenance": _plain(policy.provenance),
        }
        print(json.dumps(report))
        return
    updates = policy.provenance.get("updates")
    print(f"policy {policy.source}" + (f" after {updates:,} updates" if isinstance(updates, int) else ""))
    print(f"{result.task}: mean return {result.mean:.1f} ± {result.std:.1f} over {len(result.returns)} episodes")
    for number, (episode_return, length) in enumerate(zip(result.returns, result.lengths, strict=True)):
        print(f"  episode {number}: return {episode_return:.1f}, {length} steps")
    if options.video:
        print(f"video: {options.video}")


def _plain(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance with its configuration as plain values instead of YAML text."""
    if not isinstance(config := provenance.get("config"), str):
        return dict(provenance)
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        return {**provenance, "config": resources.read_yaml(config)}
    return dict(provenance)


@contextmanager
def _video(path: Path, environment: Environment) -> Iterator[Callable[[], None]]:
    """Make a video. Yield a function to call after each reset and each step. Every n-th call adds a frame.

    A complete video replaces the file ``path``. If the block fails, this file stays as it is.
    """
    period = environment.spec.control_period
    every = max(1, round(1 / (period * _FRAME_RATE)))
    if path.suffix not in (*_ENCODERS, ".gif"):
        raise ArgumentError("video", f"{str(path)!r}: the name must end in .mp4, .mkv, .webm or .gif")
    if not path.parent.is_dir():
        raise ArgumentError("video", f"{str(path)!r}: the folder {str(path.parent)!r} does not exist")
    target = path.resolve()  # the video replaces the target of a symbolic link, not the link
    writable = os.access(target.parent, os.W_OK) and (os.access(target, os.W_OK) or not target.exists())
    if target.is_dir() or not writable:
        raise ArgumentError("video", f"{str(path)!r}: a file cannot be written there")
    counter = itertools.count()
    with files.replacing(target) as temporary:
        shown_s = period * every
        gif = path.suffix == ".gif"
        encoder = _Gif(temporary, shown_s) if gif else _Ffmpeg(temporary, *_ENCODERS[path.suffix], shown_s)

        def frame() -> None:
            if next(counter) % every == 0:
                picture = environment.render()
                with _naming(path):
                    encoder.add(picture)

        try:
            yield frame
        except BaseException:
            encoder.abandon()
            raise
        with _naming(path):
            encoder.finish()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an OSError of an encoder into an error of the option ``--video``."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or "the encoder ended early; is the disk full?"
        raise ArgumentError("video", f"{str(path)!r} cannot be written: {problem}") from None


class _Ffmpeg:
    """Writes a video with ffmpeg. ``path`` is absolute: ffmpeg reads some relative names as options or protocols."""

    def __init__(self, path: Path, codec: str, container: str, frame_s: float) -> None:
        import imageio_ffmpeg as ffmpeg  # imported here, because only a video needs it

        parameters = [*_FAST[codec], "-f", container]  # the temporary file does not have the suffix of the container
        self._path, self._frames = path, 0
        self._count = ffmpeg.count_frames_and_secs
        self._writer: Generator[None, Any, None] | None = None
        self._open = partial(
            ffmpeg.write_frames,
            str(path),
            fps=1 / frame_s,
            codec=codec,
            ffmpeg_log_level="quiet",
            output_params=parameters,
        )

    def add(self, picture: NDArray[np.uint8]) -> None:
        if self._writer is None:
            height, width, _ = picture.shape
            self._writer = self._open((width, height))
            self._writer.send(None)
        self._writer.send(np.ascontiguousarray(picture))
        self._frames += 1

    def finish(self) -> None:
        """Complete the video. Raises OSError if frames are missing: imageio_ffmpeg does not report ffmpeg's errors."""
        self.abandon()
        frames = None
        with suppress(RuntimeError):  # ffmpeg cannot read the file
            frames, _ = self._count(self._path)
        if frames != self._frames:
            raise OSError

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Gif:
    """Collects the pictures of a GIF, and writes them at the end."""

    def __init__(self, path: Path, frame_s: float) -> None:
        from PIL import Image  # imported here, because only a video needs it

        self._path, self._pictures = path, list[Image.Image]()
        self._picture = Image.fromarray
        self._frame_ms = 1000 * frame_s

    def add(self, picture: NDArray[np.uint8]) -> None:
        self._pictures.append(self._picture(picture))

    def finish(self) -> None:
        first, *others = self._pictures
        first.save(self._path, "GIF", save_all=True, append_images=others, duration=self._frame_ms, loop=0)

    def abandon(self) -> None:
        self._pictures.clear()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Td3RobotError as error:
        print(f"td3-robot eval: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
