"""Starts, watches and resumes trainings from Python, and reads their results."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from td3_robot.config.loading import keys_of
from td3_robot.errors import EXIT_GOOD, BundleError, ConfigError
from td3_robot.messages import Status
from td3_robot.policies import Policy, load_policy
from td3_robot.runtime import metrics
from td3_robot.runtime.prepare import Prepared, new_run, resumed_run
from td3_robot.runtime.progress import Progress
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.supervisor import Watch
from td3_robot.runtime.training import evaluate_final, finished
from td3_robot.runtime.training import train as train_processes
from td3_robot.util import arguments, extras
from td3_robot.util.text import one_line

_KINDS = ("evaluation", "train", "offline")


@dataclass(frozen=True)
class TrainingProgress:
    """The state of a training, for its callback.

    Attributes:
        env_steps: environment steps that all simulators have made so far.
        total_steps: environment steps at which the training ends.
        updates: updates of the learner so far.
        return_mean: mean undiscounted return of the newest training episodes; None before the first whole episode.
        figures: all figures of the learner by name, for example ``steps_per_s`` and ``updates_per_s``.
    """

    env_steps: int
    total_steps: int
    updates: int
    return_mean: float | None
    figures: Mapping[str, float]


Callback = Callable[[TrainingProgress], object]
"""Called about twice a second during a training. The training stops if the callback returns False."""


@dataclass(frozen=True)
class Run:
    """A training and its results. :func:`train` and :func:`open_run` return a Run.

    Attributes:
        path: the run folder. It holds policies, checkpoints, metrics, logs and the configuration.
    """

    path: Path

    @property
    def env_steps(self) -> int:
        """Environment steps that the run has made.

        During a training, the steps after the newest checkpoint do not count.
        """
        return RunFolder(self.path).steps_made()

    @property
    def best_policy(self) -> Policy:
        """The policy whose evaluation had the highest mean return. Evaluations before the first update do not count.

        If the run has no evaluation after the first update, this is the final policy.

        Raises:
            BundleError: the run has not saved a policy yet.
        """
        return load_policy(self.path)

    @property
    def final_policy(self) -> Policy:
        """The policy that was saved when the training last ended or stopped.

        Raises:
            BundleError: the training has not ended yet, or nothing was learned.
        """
        file = RunFolder(self.path).policy_file
        if not file.exists():
            why = "the run has not ended yet, or has learned nothing"
            raise BundleError(f"run folder {str(self.path)!r} holds no {file.name}: {why}")
        return load_policy(file)

    def metrics(self, kind: str = "evaluation") -> list[dict[str, Any]]:
        """Return the records of one kind from ``metrics.jsonl``, sorted by ``env_steps``.

        Records of the kind ``offline`` are sorted by ``updates`` instead.

        Args:
            kind: ``evaluation`` (episodes without noise: ``eval_return_mean``, ``eval_return_std``, …), ``train`` (the
                learner's losses and rates) or ``offline`` (updates before the first environment step).

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in _KINDS:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(_KINDS)}")
        return metrics.read(RunFolder(self.path).metrics_file, kind)

    def resume(
        self,
        *,
        total_steps: int | None = None,
        overrides: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        progress: bool = True,
    ) -> Run:
        """Continue the training from its newest checkpoint. Blocks until the end of the training.

        A finished run continues only if an argument changes its configuration, and if the new configuration asks for
        more ``total_steps`` than the run has made. Otherwise, this method returns the finished run without training.

        Args:
            total_steps: environment steps of the whole run, including the steps made so far; None keeps the run's
                ``total_steps``.
            overrides: as in :func:`train`.
            callback: as in :func:`train`.
            progress: as in :func:`train`.

        Returns:
            This run.

        Raises:
            UsageError: the run has already made more than ``total_steps``, or has no checkpoint to resume from, or
                ``overrides`` has a key that cannot change in a resumed run.
            ConfigError: a key or value is wrong, or a package is not installed.
            RunFolderError: another process trains in the folder.
            NodeError: a process cannot run, died too often, or was not ready in time.
            ValueError, TypeError, KeyboardInterrupt: as in :func:`train`.
        """
        _check_callback(callback)
        with extras.advice():
            prepared = resumed_run(self.path, None, *_settings(overrides, total_steps=total_steps))
        return self if finished(prepared) else _train(prepared, callback, progress)


def train(
    config: str | Path | None = None,
    *,
    task: str | None = None,
    total_steps: int | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    callback: Callback | None = None,
    progress: bool = True,
) -> Run:
    """Train a policy with separate processes for simulator, policy server and learner.

    Blocks until the training and the evaluation of the final policy have ended. Needs the extra ``train``. Ctrl-C saves
    a checkpoint, stops the processes, and raises KeyboardInterrupt. ``open_run(out).resume()`` continues the training.

    Args:
        config: a shipped configuration such as ``walker2d_fast``, or a YAML file; None for the default configuration.
        task: a task such as ``Walker2D`` or ``gymnasium:Pendulum-v1``; None for the task of ``config``.
        total_steps: environment steps of the whole training, at least 1; None for the number in ``config``.
        seed: seed of all random streams, at least 0; None for the seed of ``config``.
        out: the new run folder; None for ``runs/NAME-DATE-TIME`` in the current folder, where NAME is
            the name of the configuration or the task.
        overrides: configuration keys and their values, for example ``{"learner.batch_size": 128}``. A dict for a
            section changes only the keys in the dict, for example ``{"learner": {"batch_size": 128}}``.
        callback: called about twice a second with a :class:`TrainingProgress`. If it returns False, the training stops
            and saves a checkpoint. If it raises an exception, the processes stop, and ``train`` raises this exception.
        progress: whether to print the progress to ``sys.stderr``.

    Returns:
        The run.

    Raises:
        ConfigError: the configuration does not exist, a key or value is wrong, or a package is not installed.
        UsageError: ``config`` is the name of a task, or ``out`` is a URL.
        BundleError: ``learner.start_from`` names no policy that this training can begin with.
        ValueError: neither ``config`` nor ``task`` is given, or a key is given twice.
        TypeError: an argument has a wrong type.
        RunFolderError: ``out`` already holds files.
        NodeError: a process cannot run, died too often, or was not ready in time.
        KeyboardInterrupt: Ctrl-C stopped the training.
    """
    if config is None and task is None:
        raise ValueError("train needs a configuration or a task")
    source = None if config is None else str(arguments.path("config", config))
    folder = None if out is None else arguments.path("out", out)
    settings, names = _settings(overrides, task=task, total_steps=total_steps, seed=seed)
    _check_callback(callback)
    with extras.advice():
        prepared = new_run(source, settings, folder, {**names, "out": "out"})
    return _train(prepared, callback, progress)


def open_run(path: str | Path) -> Run:
    """Open the run folder of an earlier training.

    Raises:
        RunFolderError: the folder holds no run.
    """
    return Run(RunFolder.open(arguments.path("path", path)).path.absolute())


def _check_callback(callback: Callback | None) -> None:
    if callback is not None and not callable(callback):
        raise arguments.wrong_type("callback", callback, "a function of one TrainingProgress, or None")


def _train(prepared: Prepared, callback: Callback | None, progress: bool) -> Run:
    folder, config, _ = prepared
    show = Progress(sys.stderr if progress else io.StringIO(), config.total_steps, steps_made=folder.steps_made())
    watch = _watch(callback, config.total_steps) if callback else None
    with folder.locked():
        trained = train_processes(prepared, show, f"td3_robot.open_run({str(folder.path)!r}).resume()", watch)
        if trained.exit_code == EXIT_GOOD:
            evaluate_final(prepared, trained.wall_s)
    if trained.signal:
        signal.raise_signal(trained.signal)  # the supervisor caught Ctrl-C: repeat it to raise KeyboardInterrupt
    return Run(folder.path.absolute())


def _watch(callback: Callback, total_steps: int) -> Watch:
    """Return a function that calls the callback for each new report of the learner.

    After the callback has returned False, the function does not call it again.
    """
    newest: Status | None = None
    going = True

    def watch(statuses: dict[str, Status]) -> bool:
        nonlocal newest, going
        status = statuses.get("learner")
        if not going or status is newest or status is None or "env_steps" not in status.figures:
            return going
        newest, figures = status, status.figures
        state = TrainingProgress(
            env_steps=int(figures["env_steps"]),
            total_steps=total_steps,
            updates=int(figures["updates"]),
            return_mean=figures.get("return_mean"),
            figures=figures,
        )
        going = callback(state) is not False
        return going

    return watch


def _settings(overrides: Mapping[str, Any] | None, **named: str | int | None) -> tuple[list[str], dict[str, str]]:
    """Return each configuration key as ``KEY=VALUE``, and a map from each key to the argument that set it.

    Error messages name this argument.
    """
    given = {key: value for key, value in named.items() if value is not None}
    if overrides is not None and not isinstance(overrides, Mapping):
        raise arguments.wrong_type("overrides", overrides, "a dict of configuration keys and values")
    settings = {arguments.text("a key of overrides", key): value for key, value in (overrides or {}).items()}
    if twice := given.keys() & settings.keys():
        raise ValueError(f"{min(twice)} is given twice: as an argument and in overrides")
    lines = [f"{key}={_as_json(key, value)}" for key, value in {**settings, **given}.items()]
    keys = [key for line in lines for key in keys_of(line)]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"{repeated} is given twice in overrides")
    return lines, {**dict.fromkeys(settings, "overrides"), **{key: key for key in given}}


def _as_json(key: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        raise ConfigError(f"{key} is {one_line(repr(value))}; allowed: finite numbers") from None


def _plain(value: Any) -> Any:
    """Return the JSON value of a path, a numpy number or a numpy array."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not hasattr(value, "tolist"):
        raise arguments.wrong_type("a value of overrides", value, "numbers, text, lists, dicts and None")
    return value.tolist()
