"""Wrong arguments of the Python API raise an error of one line, which names the mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import td3_robot as tr
from td3_robot.config import loading
from td3_robot.errors import ArgumentError, BundleError, ConfigError, EndpointError, KeysError, UsageError
from td3_robot.messages import Status
from td3_robot.runtime.run_folder import RunFolder

NAMES = "allowed: 1 to 64 letters, digits, '_', '-' and '.'"
PATHS = "allowed: the path of a file or folder, as text or pathlib.Path"
POLICIES = "allowed: a run folder, a .safetensors file or a shipped policy"


def raised(call: Callable[[], Any], kind: type[Exception]) -> str:
    """Return the text of the error that a call raises. Check that it is one line."""
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        (None, TypeError, f"policy is None, of type NoneType; {POLICIES}"),
        (3, TypeError, f"policy is 3, of type int; {POLICIES}"),
        ("", BundleError, "there is no policy ''; allowed: "),
        ("nope", BundleError, "there is no policy 'nope'; allowed: "),
        ("a\0b", BundleError, "there is no policy 'a\\x00b'; allowed: "),
    ],
)
def test_load_policy_refuses_wrong_arguments(source: Any, kind: type[Exception], text: str) -> None:
    assert text in raised(lambda: tr.load_policy(source), kind)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (None, "observation has shape []; robot 'Walker2D' needs [22] or [N, 22]"),
        ([1, 2], "observation has shape [2]; robot 'Walker2D' needs [22] or [N, 22]"),
        ([[1, 2], [3]], "observation has rows of different lengths; robot 'Walker2D' needs [22] or [N, 22]"),
        (np.zeros(22, complex), "observation has dtype complex128; allowed: real numbers"),
        ([object()] * 22, "observation has dtype object; allowed: real numbers"),
        (np.full(22, np.nan), "observation torso.height is nan; it must be finite in float32"),
        (np.full(22, 1e300), "observation torso.height is 1e+300; it must be finite in float32"),
    ],
)
def test_predict_refuses_wrong_observations(observation: Any, text: str) -> None:
    assert raised(lambda: tr.load_policy("walker2d").predict(observation), ValueError) == text


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({}, ValueError, "train needs a configuration or a task"),
        ({"config": 3}, TypeError, f"config is 3, of type int; {PATHS}"),
        ({"config": ""}, ArgumentError, f"config is ''; {PATHS}"),
        ({"config": "zzz"}, ConfigError, "there is no file 'zzz'; shipped files in configs: "),
        (
            {"config": "pendulum", "out": "s3://a/b"},
            UsageError,
            "out is 's3://a/b', which is a URL; it must be a folder",
        ),
        ({"task": 3}, ConfigError, "task is 3; it must be text"),
        ({"task": "Walker3D"}, ConfigError, "task 'Walker3D' does not exist; similar ones: Walker2D"),
        ({"total_steps": 0}, ConfigError, "total_steps is 0; it must be a whole number >= 1"),
        ({"total_steps": "many"}, ConfigError, "total_steps is 'many'; it must be a whole number"),
        ({"total_steps": float("nan")}, ConfigError, "total_steps is nan; allowed: finite numbers"),
        ({"seed": -1}, ConfigError, "seed is -1; it must be a whole number >= 0"),
        ({"out": 3}, TypeError, f"out is 3, of type int; {PATHS}"),
        ({"overrides": ["a=1"]}, TypeError, "overrides is ['a=1'], of type list; allowed: a dict"),
        ({"overrides": {3: 3}}, TypeError, "a key of overrides is 3, of type int; allowed: text"),
        ({"overrides": {"network.hidden": {3}}}, TypeError, "a value of overrides is {3}, of type set; allowed: "),
        ({"overrides": {"learner.batchsize": 3}}, ConfigError, "unknown key 'learner.batchsize'; did you mean"),
        ({"seed": 1, "overrides": {"seed": 2}}, ValueError, "seed is given twice: as an argument and in overrides"),
        (
            {"overrides": {"learner.batch_size": 8, "learner": {"batch_size": 9}}},
            ValueError,
            "learner.batch_size is given twice in overrides",
        ),
        ({"callback": 3}, TypeError, "callback is 3, of type int; allowed: a function of one TrainingProgress"),
    ],
)
def test_train_refuses_wrong_arguments(
    arguments: dict[str, Any], kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"config": "pendulum", **arguments} if arguments else {}
    if "task" in arguments:
        del given["config"]
    assert text in raised(lambda: tr.train(**given), kind)
    assert not list(tmp_path.iterdir())  # nothing was written


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"episodes": 0}, ArgumentError, "episodes is 0; allowed: whole numbers from 1"),
        ({"episodes": 1.5}, TypeError, "episodes is 1.5, of type float; allowed: whole numbers from 1"),
        ({"seed": -1}, ArgumentError, "seed is -1; allowed: whole numbers from 0"),
        ({"max_steps": None}, TypeError, "max_steps is None, of type NoneType; allowed: whole numbers from 1"),
        ({"task": 3}, TypeError, "task is 3, of type int; allowed: text"),
        ({"task": "Ant"}, BundleError, "is for another robot than 'Ant'"),
        ({"video": 3}, TypeError, f"video is 3, of type int; {PATHS}"),
        ({"video": "a.txt"}, ArgumentError, "video 'a.txt': the name must end in .mp4, .mkv, .webm or .gif"),
    ],
)
def test_evaluate_refuses_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    assert text in raised(lambda: tr.evaluate("walker2d", **arguments), kind)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"total_steps": 1000},
            UsageError,
            "total_steps is 1000; the run in {run} has already made 1500 steps; allowed: ",
        ),
        ({"total_steps": -5}, ConfigError, "total_steps is -5; it must be a whole number >= 1"),
        ({"overrides": {"total_steps": 1000}}, UsageError, "overrides: total_steps is 1000; the run in "),
        ({"overrides": {"seed": 3}}, UsageError, "seed is 0 in the run and cannot become 3: "),
        ({"callback": 3}, TypeError, "callback is 3, of type int; allowed: a function of one TrainingProgress"),
    ],
)
def test_resume_refuses_wrong_arguments(
    arguments: dict[str, Any], kind: type[Exception], text: str, tmp_path: Path
) -> None:
    """The run has made 1500 steps. A refused resume does not change the configuration of the run."""
    config = loading.load("pendulum", ["total_steps=1500", "learner.precision=fp32"])
    run = RunFolder.create(tmp_path / "run", config)
    run.write_final({"learner": Status("learner", "finished", "", {"env_steps": 1500.0}, {})})
    before = run.config_file.read_bytes()
    assert text.format(run=run.path) in raised(lambda: tr.open_run(run.path).resume(**arguments), kind)
    assert run.config_file.read_bytes() == before


def test_open_run_and_open_recording_refuse_wrong_arguments(tmp_path: Path) -> None:
    assert raised(lambda: tr.open_run(None), TypeError) == f"path is None, of type NoneType; {PATHS}"  # type: ignore[arg-type]
    assert raised(lambda: tr.open_run(""), ArgumentError) == f"path is ''; {PATHS}"
    assert raised(lambda: tr.open_recording(None), TypeError) == f"file is None, of type NoneType; {PATHS}"  # type: ignore[arg-type]
    twice = tmp_path / "a.mcap"
    assert "is given twice" in raised(lambda: tr.open_recording(twice, tmp_path / "." / "a.mcap"), ValueError)


class Odd:
    """A path object that is no pathlib.Path."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


@pytest.mark.parametrize(("path", "kind"), [("", ArgumentError), ("a\0b", ArgumentError), (b"a", TypeError)])
def test_a_path_object_is_checked_like_text(path: Any, kind: type[Exception]) -> None:
    assert PATHS in raised(lambda: tr.open_run(Odd(path)), kind)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"endpoint": None}, TypeError, "endpoint is None, of type NoneType; allowed: text"),
        ({"endpoint": "foo"}, EndpointError, "endpoint 'foo' is not understood; allowed: ipc://PATH, tcp://HOST:PORT"),
        (
            {"endpoint": "tcp://192.0.2.1:5"},
            EndpointError,
            "set the folder of the keys (in endpoints.keys, or in the argument 'keys')",
        ),
        ({"keys": "/nope"}, KeysError, "key folder '/nope' has no key pair; make one: "),
        ({"keys": 3}, TypeError, f"keys is 3, of type int; {PATHS}"),
        ({"timeout": 0}, ArgumentError, "timeout is 0; allowed: finite numbers above 0, in s"),
        ({"timeout": float("nan")}, ArgumentError, "timeout is nan; allowed: finite numbers above 0, in s"),
        # 10**400 is too large for a float
        ({"timeout": 10**400}, ArgumentError, "timeout is inf; allowed: finite numbers above 0, in s"),
        ({"timeout": "1"}, TypeError, "timeout is '1', of type str; allowed: finite numbers above 0, in s"),
    ],
)
def test_connect_refuses_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    assert text in raised(lambda: tr.connect(**{"endpoint": "ipc:///nope", **arguments}), kind)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda it: it.estop(target="a/b"), ArgumentError, f"target is 'a/b'; {NAMES}"),
        (lambda it: it.state(target=3), TypeError, "target is 3, of type int; allowed: text"),
        (lambda it: it.estop(3), TypeError, "reason is 3, of type int; allowed: text"),
        (lambda it: it.freeze("x" * 1001), ArgumentError, "reason has 1001 characters; at most 1000 are allowed"),
        (lambda it: it.rollback(-1), ArgumentError, "version is -1; allowed: whole numbers from 0 to"),
        (lambda it: it.load("nope"), BundleError, "there is no policy 'nope'"),
        (lambda it: it.takeover("leg", -1), ArgumentError, "index is -1; allowed: whole numbers from 0 to 4294967295"),
        (lambda it: it.takeover(""), ArgumentError, "robot is ''; allowed: the name of a driver or simulator, see "),
        (lambda it: it.takeover("a/b"), ArgumentError, f"robot is 'a/b'; {NAMES}"),
    ],
)
def test_an_operator_refuses_wrong_arguments(call: Callable[[Any], Any], kind: type[Exception], text: str) -> None:
    assert text in raised(lambda: call(tr.connect("ipc:///nope")), kind)
