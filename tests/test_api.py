"""The public names of td3_robot, their signatures, and which packages are loaded by an import of these names."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import td3_robot

ROOT = Path(__file__).parent.parent

FUNCTIONS = {
    "connect": "(endpoint: 'str', keys: 'str | Path | None' = None, *, timeout: 'float' = 5.0) -> 'Operator'",
    "evaluate": (
        "(policy: 'str | Path | Policy', *, task: 'str | None' = None, episodes: 'int' = 10, seed: 'int' = 0,"
        " max_steps: 'int' = 100000, video: 'str | Path | None' = None) -> 'Evaluation'"
    ),
    "load_policy": "(source: 'str | Path') -> 'Policy'",
    "open_recording": "(*files: 'str | Path') -> 'Recording'",
    "open_run": "(path: 'str | Path') -> 'Run'",
    "shipped_policies": "() -> 'dict[str, Path]'",
    "train": (
        "(config: 'str | Path | None' = None, *, task: 'str | None' = None, total_steps: 'int | None' = None,"
        " seed: 'int | None' = None, out: 'str | Path | None' = None, overrides: 'Mapping[str, Any] | None' = None,"
        " callback: 'Callback | None' = None, progress: 'bool' = True) -> 'Run'"
    ),
}
_COMMAND = "(self, reason: 'str' = '', *, target: 'str' = '') -> 'Reply'"
CLASSES = {
    "Evaluation": {"mean": "property", "std": "property"},
    "Operator": {
        **dict.fromkeys(("configure", "activate", "deactivate", "estop", "reset", "shutdown"), _COMMAND),
        **dict.fromkeys(("freeze", "unfreeze"), "(self, reason: 'str' = '') -> 'Reply'"),
        "ask": "(self, command: 'Command') -> 'Reply'",
        "load": "(self, policy: 'str | Path | Policy', reason: 'str' = '', *, force: 'bool' = False) -> 'Reply'",
        "rollback": "(self, version: 'int' = 0, reason: 'str' = '') -> 'Reply'",
        "state": "(self, *, target: 'str' = '') -> 'Reply'",
        "watch": "(self) -> 'Iterator[LifecycleChange | Watching]'",
        "takeover": "(self, robot: 'str', index: 'int' = 0, reason: 'str' = '') -> 'Takeover'",
    },
    "Policy": {"predict": "(self, observation: 'ArrayLike') -> 'Float32'"},
    "Recording": {
        "arrays": "(self, topic: 'str' = 'step') -> 'dict[str, NDArray[Any]]'",
        "duration_s": "property",
        "messages": "(self, topic: 'str') -> 'Iterator[Message]'",
        "spec": "property",
        "to_pandas": "(self, topic: 'str' = 'step') -> 'pandas.DataFrame'",
        "topics": "property",
        "transitions": "(self) -> 'Transitions'",
    },
    "Run": {
        "best_policy": "property",
        "env_steps": "property",
        "final_policy": "property",
        "metrics": "(self, kind: 'str' = 'evaluation') -> 'list[dict[str, Any]]'",
        "resume": (
            "(self, *, total_steps: 'int | None' = None, overrides: 'Mapping[str, Any] | None' = None,"
            " callback: 'Callback | None' = None, progress: 'bool' = True) -> 'Run'"
        ),
    },
    "Takeover": {
        "command": "(self, action: 'Sequence[float]') -> 'None'",
        "wait": "(self) -> 'None'",
        "check": "(self, action: 'Sequence[float | str]') -> 'list[float]'",
        "give_back": "(self) -> 'None'",
        "close": "(self) -> 'None'",
    },
    "TrainingProgress": {},
    "Transitions": {},
}
FIELDS = {
    "Evaluation": ["task", "returns", "lengths"],
    "Run": ["path"],
    "TrainingProgress": ["env_steps", "total_steps", "updates", "return_mean", "figures"],
    "Transitions": ["observation", "action", "reward", "next_observation", "terminated", "truncated", "episode"],
}
OTHERS = {"Channel", "CommandError", "RobotSpec", "Td3RobotError", "__version__"}
"""The public names that are in none of the tables above."""


def test_the_tables_contain_exactly_the_public_names() -> None:
    assert set(td3_robot.__all__) == {*FUNCTIONS, *CLASSES, *OTHERS}
    assert set(td3_robot.__all__) <= set(dir(td3_robot))
    with pytest.raises(AttributeError, match="module 'td3_robot' has no attribute 'trian'"):
        _ = td3_robot.trian  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_keeps_its_signature(name: str) -> None:
    function = getattr(td3_robot, name)
    assert str(inspect.signature(function)) == FUNCTIONS[name]
    assert inspect.getdoc(function)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_keeps_its_methods_and_fields(name: str) -> None:
    found = {}
    for attribute, value in vars(getattr(td3_robot, name)).items():
        if not attribute.startswith("_") and not inspect.ismemberdescriptor(value):
            is_method = inspect.isfunction(value)
            found[attribute] = str(inspect.signature(value)) if is_method else "property"
            assert inspect.getdoc(value), attribute
    assert found == CLASSES[name]
    assert list(getattr(getattr(td3_robot, name), "__dataclass_fields__", [])) == FIELDS.get(name, [])


def python(code: str) -> set[str]:
    """Run code in a new interpreter, and return the words that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_none_of_its_dependencies() -> None:
    loaded = python("import sys, td3_robot; dir(td3_robot); print(*{name.split('.')[0] for name in sys.modules})")
    assert not loaded & {"numpy", "zmq", "msgspec", "yaml", "safetensors", "torch", "gymnasium", "pybullet", "mcap"}


def test_every_public_name_needs_only_the_base_install() -> None:
    extras = ("torch", "gymnasium", "pybullet", "mcap", "pandas", "matplotlib", "tensorboard", "imageio")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"  # importing one of the extras now fails
        "import td3_robot\n"
        "for name in td3_robot.__all__: getattr(td3_robot, name)\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    assert {"numpy", "zmq", "td3_robot_sims"} <= python(code)


def test_the_version_equals_the_version_in_pyproject() -> None:
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert written
    assert td3_robot.__version__ == written[1]
    done = subprocess.run([sys.executable, "-m", "td3_robot", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"td3-robot {written[1]}\n"


def test_the_version_is_the_same_if_the_package_is_not_installed() -> None:
    code = (
        "from importlib import metadata\n"
        "def absent(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = absent\n"
        "import td3_robot\n"
        "print(td3_robot.__version__)"
    )
    assert python(code) == {td3_robot.__version__}
