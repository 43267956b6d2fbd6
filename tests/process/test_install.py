"""What a robot installs: the wheel in an empty environment, with nothing but its base needs, in several Pythons."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from td3_robot.bundle import Bundle

PYTHONS = ("3.10", "3.11", "3.12", "3.13") if "ALL_PYTHONS" in os.environ else ("3.10", "3.13")
"""The oldest and the newest; with ALL_PYTHONS=1 those between as well, at some 20 s each."""
BASE = {"numpy", "pyzmq", "msgspec", "pyyaml", "safetensors", "td3-robot"}
BEYOND_NUMPY = 9e6  # bytes: what we and the small libraries may take
RESIDENT = 60e6  # bytes of a policy server that has answered
_NO_NETWORK = r"Network is unreachable|name resolution|NewConnectionError|ConnectTimeout|Connection refused"


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or where pyenv keeps them."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *map(str, sorted(home.glob(f"versions/{version}.*/bin/python")))]
    for path in filter(None, found):
        asked = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)  # pyenv has stubs that only complain
        if done.stdout.strip() == version:
            return str(path)
    return None


@dataclass(frozen=True)
class Environment:
    """An environment with td3-robot installed."""

    path: Path

    @property
    def site(self) -> Path:
        return next(self.path.glob("lib/python*/site-packages"))

    def run(self, *words: str, python: bool = False) -> subprocess.CompletedProcess[str]:
        """``td3-robot`` of this environment, or its Python; the checkout is out of its sight."""
        command = [str(self.path / "bin" / ("python" if python else "td3-robot")), *words]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=self.path, env=variables, capture_output=True, text=True, check=False)

    def size(self, *tops: str) -> int:
        """Bytes of all files, or of those whose place begins with one of ``tops``."""
        files = (path for path in self.site.rglob("*") if path.is_file())
        names = ((path, path.relative_to(self.site).parts[0]) for path in files)
        return sum(path.stat().st_size for path, top in names if not tops or top.startswith(tops))


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"this machine has no Python {request.param}")
    path = tmp_path_factory.mktemp("robot") / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True)
    _install(path, ["--no-compile", str(wheel)])
    return Environment(path)


def _install(path: Path, what: Sequence[str]) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "--python", str(path / "bin" / "python"), "install", *options, *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and re.search(_NO_NETWORK, done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr


def test_installs_little(installed: Environment) -> None:
    """Nothing but the base needs; beyond numpy, which alone is 56 to 59 MB, at most 9 MB."""
    found = {item.metadata["Name"].lower() for item in metadata.distributions(path=[str(installed.site)])}
    assert found == BASE
    assert installed.size() - installed.size("numpy") < BEYOND_NUMPY


def test_serves_a_policy(installed: Environment) -> None:
    done = installed.run("bench", "policy", "--json", "--actions", "50", "--memory", "1000", "--starts", "1")
    assert done.returncode == 0, done.stderr
    begun = json.loads(done.stdout)["start"]
    assert begun["to_first_action_s"][0] > 0
    assert begun["resident_bytes"] < RESIDENT


def test_commands_work_or_say_what_they_need(installed: Environment, tmp_path: Path, bundle_file: Path) -> None:
    assert installed.run("keys", "create", "robot-7", "--keys", str(tmp_path / "keys")).returncode == 0
    assert installed.run("bundle", "verify", str(bundle_file)).returncode == 0
    export = installed.run("bundle", "export", str(bundle_file), str(tmp_path / "x.onnx"), "--onnx")
    assert (export.returncode, export.stderr) == (
        2,
        "td3-robot bundle: needs onnx, which is not installed; pip install 'td3-robot[onnx]'\n",
    )
    train = installed.run("train", "walker2d")
    assert train.returncode == 2
    assert "pip install 'td3-robot[" in train.stderr
    assert train.stderr.count("\n") == 1


def test_every_module_of_the_robot_side_loads(installed: Environment) -> None:
    """In this Python, with these packages: a module that needs more than the base install is one of an extra."""
    code = (
        "import importlib, pkgutil, sys, td3_robot\n"
        "extra = ('td3_robot.learner', 'td3_robot.curve', 'td3_robot.onnx_export', 'td3_robot.data',"
        " 'td3_robot.session')\n"
        "for module in pkgutil.walk_packages(td3_robot.__path__, 'td3_robot.'):\n"
        "    if not module.name.startswith(extra):\n"
        "        importlib.import_module(module.name)\n"
        "print(*sorted({'torch', 'gymnasium', 'pybullet', 'sims'} & set(sys.modules)))\n"
    )
    done = installed.run("-c", code, python=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.fixture
def bundle_file(tmp_path: Path, make_bundle: Callable[..., Bundle]) -> Path:
    make_bundle().save(tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"
