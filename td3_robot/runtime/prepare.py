"""Prepares a training: replaces ``auto`` values and checks the configuration before the supervisor starts a process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from td3_robot.bundle import Bundle
from td3_robot.config import loading as configuration
from td3_robot.config import resume as changes
from td3_robot.config.learner import LearnerConfig
from td3_robot.config.schema import Config
from td3_robot.errors import BundleError, ConfigError, EndpointError, RunFolderError, UsageError
from td3_robot.learner import resources, warm_start
from td3_robot.learner.algorithms.table import ALGORITHMS, CONSUMES
from td3_robot.learner.checkpointing import checkpoint
from td3_robot.learner.machine_choices import resolve
from td3_robot.policies import find_policy
from td3_robot.policy.noise import rehearse
from td3_robot.runtime import launch, storage
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.specs import RobotSpec
from td3_robot.topics import LINKS
from td3_robot.transport import endpoints
from td3_robot.transport.keys import open_keys
from td3_robot.util import extras, files
from td3_robot.util.machine import available_cores, compiler_lack, version

_LEARNER = "td3_robot.learner.node"
_RECORDER = "td3_robot.recording.node"


class Prepared(NamedTuple):
    """A run that is ready to start, and lines to print for the user."""

    run: RunFolder
    config: Config
    notices: list[str]


def new_run(
    source: str | Path | None,
    overrides: Sequence[str],
    out: Path | None,
    flags: Mapping[str, str] | None = None,
    *,
    cluster: bool = False,
) -> Prepared:
    """Create a run. If a check fails, raise a Td3RobotError and create no run folder.

    Args:
        source: a configuration file, or the name of a shipped one; None for the defaults.
        overrides: configuration keys to change, each as ``KEY=VALUE``.
        out: the new run folder; None for ``runs/NAME-DATE-TIME``. NAME is the name of the configuration. Without a
            source, NAME is the task.
        flags: maps the full name of a key to the command-line option or argument that sets this key. Errors name this
            option or argument.
        cluster: whether the run trains on a cluster.
    """
    if out and re.match(r"\w+:/", str(out)):
        option = (flags or {}).get("out", "--out")
        url = str(out).replace(":/", "://", 1)  # pathlib has made one slash of two
        raise UsageError(f"{option} is {url!r}, which is a URL; it must be a folder: mount this storage first")
    if source is None:
        wanted = configuration.parse({}, overrides, "the default configuration", flags)
    else:
        _refuse_task(str(source))
        wanted = configuration.load(source, overrides, flags)
    if cluster:
        wanted = _on_cluster(wanted)
    name = Path(source).stem if source else re.sub(r"[^\w.-]+", "-", wanted.task)
    path = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    RunFolder(path).check_new()
    _check(wanted)
    wanted = with_policy_file(wanted)
    if start := wanted.learner.start_from:
        warm_start.check(Bundle.load(Path(start)), _tasks().spec(wanted.task), wanted.network.hidden, wanted.learner)
    config, device_memory, notices = resolve(wanted, partial(_sizes, wanted.task), cluster=cluster)
    # On a cluster, the learner checks its host itself.
    notices += [] if cluster else _announce(config, path, device_memory)
    return Prepared(RunFolder.create(path, config), config, notices)


def with_policy_file(config: Config) -> Config:
    """Return the configuration with the path of a policy file in ``learner.start_from``.

    Raises:
        BundleError: ``learner.start_from`` names no policy.
    """
    if not config.learner.start_from:
        return config
    try:
        policy = find_policy(config.learner.start_from)
    except BundleError as error:
        raise BundleError(f"learner.start_from: {error}") from None
    return replace(config, learner=replace(config.learner, start_from=str(policy)))


def _tasks() -> Any:
    """Import the module of tasks. td3_robot never imports simulators statically."""
    return importlib.import_module("td3_robot_sims.tasks")


def _refuse_task(source: str) -> None:
    """Raise UsageError if the name of a configuration is the name of a task."""
    if os.path.exists(source):
        return
    tasks = _tasks()
    kind, colon, _ = source.partition(":")
    if kind in tasks.BACKENDS if colon else source in tasks.find(source)[0].names():
        raise UsageError(
            f"CONFIG is {source!r}, which is a task; allowed: a YAML file, or the name of a shipped one; "
            f"to train this task with the default configuration: td3-robot train --task {source} "
            f"(in Python: task={source!r})"
        )


def resumed_run(
    folder: Path,
    source: str | None,
    overrides: Sequence[str],
    flags: Mapping[str, str] | None = None,
    *,
    cluster: bool = False,
) -> Prepared:
    """Open a run, and write the configuration for the resume.

    If a check fails, raise an error and keep the old configuration. If the storage of a cluster has newer files of the
    run, this function fetches them first.

    For the arguments see :func:`new_run`. Without a source, the run keeps its configuration.
    """
    run = RunFolder.open(folder)
    if run.of_deployed_learner:
        what = f"run folder {str(folder)!r} belongs to a deployed learner, not to td3-robot train"
        raise RunFolderError(f"{what}; to continue it: td3-robot learner --run {shlex.quote(str(folder))}")
    storage.fetch(run)
    newest = max(run.checkpoints.glob("checkpoint-*.safetensors"), default=None)
    if newest and checkpoint.of_another_program(newest):
        raise UsageError(
            f"{newest.name} comes from A2C in version 0.1.0; the present version can use the policies of this run, "
            "but cannot continue the run; start a new run"
        )
    what = (flags or {}).get("total_steps", "total_steps")
    if what == "overrides":
        what = "overrides: total_steps"
    for override in overrides:
        key, _, text = override.partition("=")
        if key == "total_steps" and text.isdecimal():  # check it before load(), whose error names another key
            _check_steps(run, int(text), what)
    before = run.trained_with() or run.config()
    wanted = configuration.load(source or run.config_file, overrides, flags)
    declared = {key for override in overrides for key in configuration.keys_of(override)}
    if cluster:
        wanted = _on_cluster(wanted, run)
        declared |= {"simulators"}
    _check(wanted)
    config, device_memory, notices = resolve(wanted, partial(_sizes, wanted.task), before, cluster=cluster)
    changed = changes.accepted(before, config, declared)
    if config.total_steps != before.total_steps:
        _check_steps(run, config.total_steps, what)
    _check_progress(run, before)
    notices += [f"changed: {line}" for line in changed]
    notices += [] if cluster else _announce(config, run.path, device_memory)
    with run.locked():
        files.write_atomically(run.config_file, config.to_yaml().encode())
    return Prepared(run, config, notices)


def _sizes(task: str) -> tuple[int, int]:
    """Return the sizes of observation and action of a task."""
    spec: RobotSpec = _tasks().spec(task)
    return spec.observation_size, spec.action_size


def _on_cluster(config: Config, run: RunFolder | None = None) -> Config:
    """Return the configuration with the highest number of simulators that ``cluster.simulators`` allows.

    ``run`` is the run to resume. Raise ConfigError if a cluster cannot run the configuration.
    """
    if config.timing == "lockstep":
        raise ConfigError(
            "timing is 'lockstep', which trains on one machine only; with --cluster, timing must be 'free'"
        )
    for key in (*LINKS, "keys"):
        if value := getattr(config.endpoints, key):
            raise ConfigError(f"endpoints.{key} is {value!r}; with --cluster it must be null: each run makes its own")
    if url := config.cluster.storage:
        if config.learner.replay_storage == "file":
            raise ConfigError(
                "learner.replay_storage is 'file'; with cluster.storage, learner.replay_storage must be 'memory'"
            )
        storage.check(url, run)
    try:
        return replace(config, simulators=config.cluster.range(config.simulators)[1])
    except ValueError as error:  # other keys must fit the number of simulators
        raise ConfigError(f"cluster.simulators: {error}") from None


def _check_steps(run: RunFolder, total: int, what: str) -> None:
    """Check that the run has not passed its new ``total_steps``. ``what`` is the option or key that sets it."""
    made = run.steps_made()
    if total < made:
        raise UsageError(
            f"{what} is {total}; the run in {run.path} has already made {made} steps; allowed: {made} or more"
        )


def _check_progress(run: RunFolder, before: Config) -> None:
    """Check that the run has a checkpoint if it needs one."""
    made = run.steps_made()
    if any(run.checkpoints.glob("checkpoint-*.safetensors")):
        return
    damaged = any(run.checkpoints.glob("checkpoint-*.damaged"))
    # A lock-step run without a checkpoint starts from the beginning, and repeats the same steps bit for bit.
    if damaged or (made and run.policy_file.exists() and before.timing != "lockstep"):
        raise UsageError(
            f"the run in {run.path} has made {made} steps, but {run.checkpoints} has no complete checkpoint; "
            "restore one, or start a new run"
        )


def _check_installed(config: Config) -> None:
    """Check that the algorithm exists, and that the packages of learner, recorder and simulator are installed."""
    ALGORITHMS.check(config.learner.algorithm, "learner.algorithm")
    recordings = extras.NEEDED["record"] if config.record.enabled or config.learner.recordings else ()
    lacking = [name for name in (*extras.NEEDED["train"], *recordings) if importlib.util.find_spec(name) is None]
    backend, _ = _tasks().find(config.task)
    lacking += [name for name in backend.packages if not version(name)]
    if lacking:
        text = extras.missing(ModuleNotFoundError(name=lacking[0]), "train")
        raise ConfigError(text or f"task {config.task!r} needs the package {lacking[0]}, which is not installed")


def _check(config: Config) -> None:
    """Check packages, recorder, keys, endpoints, task, noise and recordings before the processes need them."""
    _check_installed(config)
    if config.record.enabled and _RECORDER not in _modules(config):
        raise UsageError(
            f"record.enabled is true and launch {config.launch!r} has no recorder; record.enabled must be false"
        )
    keys = open_keys(config.endpoints.keys)
    for link in LINKS:
        if endpoint := getattr(config.endpoints, link):
            try:
                endpoints.check(endpoint, bind=True, keys=keys is not None)
            except EndpointError as error:
                raise EndpointError(f"endpoints.{link}: {error}") from None
    spec: RobotSpec = _tasks().check(config.task, config.randomization)
    exploration = config.exploration
    try:
        rehearse(exploration.kind, exploration.noise_parameters(), config.robots, spec.action_size)
    except ConfigError as error:
        raise ConfigError(f"exploration.kind is {exploration.kind!r}: {error}") from error
    if config.learner.recordings:
        experience = importlib.import_module("td3_robot.recording.experience")
        for file in config.learner.recordings:
            experience.check(Path(file), spec)


def _announce(config: Config, path: Path, device_memory: int | None) -> list[str]:
    """Check threads, memory and disk for the learner. Return lines for the user."""
    if _LEARNER not in _modules(config):
        return []
    notices = [*thread_notices(config.learner, available_cores()), *compile_notices(config.learner)]
    if config.learner.algorithm not in CONSUMES:
        return notices  # an algorithm of another package: the learner checks memory and disk when a simulator joins
    return [*notices, resources.announce(config, *_sizes(config.task), RunFolder(path), device_memory)]


def _modules(config: Config) -> list[str]:
    return [process.row.module for process in launch.expand(launch.load(config.launch), config)]


def thread_notices(learner: LearnerConfig, cores: int) -> Sequence[str]:
    """Return warnings for the user if the learner's threads do not fit this machine."""
    if learner.device == "cuda":
        return []
    count = learner.thread_count
    threads, machine = f"learner.threads is {learner.threads}", f"this machine has {cores} cores for all processes"
    if count > cores:
        return [f"{threads} and {machine}: the threads will wait for each other"]
    if learner.threads_in == "operators" and 2 <= count == cores:
        return [f"{threads}, threads_in is operators, and {machine}: the threads wait less if threads_in is critics"]
    return []


def compile_notices(learner: LearnerConfig) -> Sequence[str]:
    """Return lines for the user if the learner compiles its updates."""
    if not learner.compiles:
        return []
    if lack := compiler_lack():
        return [f"learner.compile is true and {lack}: updates run uncompiled, which is slower"]
    return ["learner.compile: the first run on this machine compiles the update, which takes about 10 s"]
