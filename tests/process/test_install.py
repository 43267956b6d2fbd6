"""What a robot installs: the wheel in an empty environment, with nothing but its base needs, in several Pythons."""

from __future__ import annotations

import contextlib
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
from tests.process.conftest import ROOT, MadeOnce

PYTHONS = ("3.10", "3.11", "3.12", "3.13") if "ALL_PYTHONS" in os.environ else ("3.10", "3.13")
"""The oldest and the newest; with ALL_PYTHONS=1 those between as well, at some 20 s each."""
BASE = {"numpy", "pyzmq", "msgspec", "pyyaml", "safetensors", "td3-robot"}
NUMPY = 60e6  # bytes of what numpy brings, half of it OpenBLAS: 53 to 59 MB. Compiled (.pyc), 8 to 14 MB more
BEYOND_NUMPY, BEYOND_NUMPY_COMPILED = 8.5e6, 11.5e6  # what we and the small libraries take: 8.1 MB, and 9.7 to 11.0
DEPLOY = ROOT / "docs" / "deploy.md"
RESIDENT = 60e6  # bytes of a policy server that has answered
START = 0.5  # seconds to the first action, where
IMPORT = 0.15  # seconds are more than a bare import of numpy takes; it takes thrice that beside much other work
_NO_NETWORK = (
    r"Network is unreachable|name resolution|NewConnectionError|ConnectTimeout|Connection refused|Connection reset"
    r"|ProtocolError|Read timed out|ReadTimeoutError|HTTP error 5\d\d"
)


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

    @property
    def limit(self) -> float:
        """Bytes of all packages, trimmed. The numpy of older Pythons has a larger OpenBLAS."""
        return 65e6 if self.site.parent.name in ("python3.10", "python3.11") else 60e6

    def run(self, *words: str, python: bool = False) -> subprocess.CompletedProcess[str]:
        """``td3-robot`` of this environment, or its Python; the checkout is out of its sight."""
        command = [str(self.path / "bin" / ("python" if python else "td3-robot")), *words]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=self.path, env=variables, capture_output=True, text=True, check=False)

    def size(self, *, numpy: bool, compiled: bool) -> int:
        """Bytes of numpy's files or of all others, with or without what was compiled from them."""
        files = (path for path in self.site.rglob("*") if compiled or path.parent.name != "__pycache__")
        total = 0
        for path in files:
            if path.relative_to(self.site).parts[0].startswith("numpy") == numpy:
                with contextlib.suppress(FileNotFoundError):  # what another test compiles, it renames
                    total += path.stat().st_size if path.is_file() else 0
        return total


@pytest.fixture(scope="session", params=PYTHONS)
def installed(request: pytest.FixtureRequest, wheel: Path, made_once: MadeOnce) -> Environment:
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"this machine has no Python {request.param}")

    def install(path: Path) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True)
        _install(path, ["--no-compile", str(wheel)])  # to compile numpy takes longer than all tests of it here

    return Environment(made_once(f"robot-{request.param}", install))


def _install(path: Path, what: Sequence[str]) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "--python", str(path / "bin" / "python"), "install", *options, *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and re.search(_NO_NETWORK, done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr


def test_installs_little(installed: Environment) -> None:
    """Nothing but the base needs."""
    found = {item.metadata["Name"].lower() for item in metadata.distributions(path=[str(installed.site)])}
    assert found == BASE
    assert 40e6 < installed.size(numpy=True, compiled=False) < NUMPY
    assert 6e6 < installed.size(numpy=False, compiled=False) < BEYOND_NUMPY
    ours = [str(path) for path in installed.site.iterdir() if path.is_dir() and not path.name.startswith("numpy")]
    done = installed.run("-m", "compileall", "-q", *ours, python=True)  # as pip does by itself
    assert done.returncode == 0, done.stderr
    assert installed.size(numpy=False, compiled=True) < BEYOND_NUMPY_COMPILED


def test_installs_less_trimmed(installed: Environment, tmp_path: Path) -> None:
    """As docs/deploy.md says it; and nothing is left to be compiled by a start that may not write."""
    [block] = re.findall(r"```console\n(# \S+/pip install --no-compile .*?)```", DEPLOY.read_text("utf-8"), re.DOTALL)
    trimmed = Environment(tmp_path / "trimmed")
    shutil.copytree(installed.path, trimmed.path, symlinks=True)  # which is what the first line makes
    script = trimmed.path / "bin" / "td3-robot"
    script.write_text(script.read_text().replace(str(installed.path), str(trimmed.path)))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def typed(line: str) -> None:
        command = line.removeprefix("# ").replace("/opt/td3-robot", str(trimmed.path))
        done = subprocess.run(["sh", "-c", command], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    _, *lines = block.splitlines()
    for line in lines:
        typed(line)
    held = sorted(trimmed.site.rglob("*.pyc"))
    assert sum(trimmed.size(numpy=numpy, compiled=True) for numpy in (True, False)) < trimmed.limit
    typed(lines[-1])
    assert sorted(trimmed.site.rglob("*.pyc")) == held


def test_serves_a_policy(installed: Environment) -> None:
    """Small in memory and soon: by processor time of the best start, and allowing for what others do to the caches."""
    done = installed.run("bench", "policy", "--json", "--actions", "50", "--memory", "1000", "--starts", "3")
    assert done.returncode == 0, done.stderr
    begun = json.loads(done.stdout)["start"]
    assert len(begun["to_first_action_s"]) == 3
    code = "import numpy, time; print(time.process_time())"
    bare = min(float(installed.run("-c", code, python=True).stdout) for _ in range(3))
    assert 0.01 < min(begun["processor_s"]) < START * max(1.0, bare / IMPORT)
    assert 10e6 < begun["resident_bytes"] < RESIDENT


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
        "extra = ('td3_robot.learner', 'td3_robot.runtime.learning_curve', 'td3_robot.convert.onnx_export',"
        " 'td3_robot.data', 'td3_robot.recording', 'td3_robot.replay',"
        " 'td3_robot.bench.learner', 'td3_robot.bench.profile', 'td3_robot.bench.record')\n"
        "for module in pkgutil.walk_packages(td3_robot.__path__, 'td3_robot.'):\n"
        "    if not module.name.startswith(extra):\n"
        "        importlib.import_module(module.name)\n"
        "print(*sorted({'torch', 'gymnasium', 'pybullet', 'td3_robot_sims'} & set(sys.modules)))\n"
    )
    done = installed.run("-c", code, python=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.fixture
def bundle_file(tmp_path: Path, make_bundle: Callable[..., Bundle]) -> Path:
    make_bundle().save(tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"
