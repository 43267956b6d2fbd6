"""Install the wheel and its base requirements in an empty environment, as on a robot, for several Python versions."""

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
from tests.imports import IMPORT_ROBOT_SIDE
from tests.process.conftest import ROOT, MadeOnce

pytestmark = pytest.mark.slow
PYTHONS = ("3.10", "3.11", "3.12", "3.13") if "ALL_PYTHONS" in os.environ else ("3.10", "3.13")
"""The oldest and the newest supported Python. ALL_PYTHONS=1 adds the versions between them: about 20 s per version."""
BASE = {"numpy", "pyzmq", "msgspec", "pyyaml", "safetensors", "td3-robot"}
NUMPY = 60e6  # limit in bytes without .pyc files; numpy takes 53 to 59 MB; half of this is OpenBLAS
BEYOND_NUMPY, BEYOND_NUMPY_COMPILED = 10e6, 14.2e6
"""Limits in bytes for td3-robot and the small libraries, without and with .pyc files. These packages take 9.7 MB
without .pyc files (0.6 MB of this is policies), and 12.1 to 13.8 MB with .pyc files."""
DEPLOY = ROOT / "docs" / "how-to" / "deploy.md"
RESIDENT = 60e6  # limit in bytes for the memory of a policy server after its first answer
START = 0.5
"""Limit in CPU seconds until the first action. If numpy's import takes longer than IMPORT, the test increases the
limit."""
IMPORT = 0.15  # CPU seconds; numpy's import takes less than this on an idle machine; a busy machine triples the time
_NO_NETWORK = (
    r"Network is unreachable|name resolution|NewConnectionError|ConnectTimeout|Connection refused|Connection reset"
    r"|ProtocolError|Read timed out|ReadTimeoutError|HTTP error 5\d\d"
)


def interpreter(version: str) -> str | None:
    """Find a Python of this version on the path or in pyenv's folder."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *map(str, sorted(home.glob(f"versions/{version}.*/bin/python")))]
    for path in filter(None, found):
        asked = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        # The path can be a stub of pyenv that only prints an error.
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return str(path)
    return None


@dataclass(frozen=True)
class Environment:
    """A virtual environment with td3-robot installed."""

    path: Path

    @property
    def site(self) -> Path:
        return next(self.path.glob("lib/python*/site-packages"))

    @property
    def limit(self) -> float:
        """Return the size limit of the trimmed packages, in bytes. For older Pythons, numpy has a larger OpenBLAS."""
        return 67e6 if self.site.parent.name in ("python3.10", "python3.11") else 62e6

    def run(self, *words: str, python: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the environment's ``td3-robot`` or its Python, without the checkout on the path."""
        command = [str(self.path / "bin" / ("python" if python else "td3-robot")), *words]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=self.path, env=variables, capture_output=True, text=True, check=False)

    def size(self, *, numpy: bool, compiled: bool) -> int:
        """Return the size in bytes of numpy's files, or of all other files. ``compiled``: include ``__pycache__``."""
        files = (path for path in self.site.rglob("*") if compiled or path.parent.name != "__pycache__")
        total = 0
        for path in files:
            if path.relative_to(self.site).parts[0].startswith("numpy") == numpy:
                with contextlib.suppress(FileNotFoundError):  # compileall in another test renames files
                    total += path.stat().st_size if path.is_file() else 0
        return total


@pytest.fixture(scope="session", params=PYTHONS)
def installed(request: pytest.FixtureRequest, wheel: Path, made_once: MadeOnce) -> Environment:
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"this machine has no Python {request.param}")

    def install(path: Path) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True)
        _install(path, ["--no-compile", str(wheel)])  # compiling numpy would take longer than the tests

    return Environment(made_once(f"robot-{request.param}", install))


def _install(path: Path, what: Sequence[str]) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "--python", str(path / "bin" / "python"), "install", *options, *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and re.search(_NO_NETWORK, done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr


def test_install_is_small_and_contains_only_base_requirements(installed: Environment) -> None:
    found = {item.metadata["Name"].lower() for item in metadata.distributions(path=[str(installed.site)])}
    assert found == BASE
    assert 40e6 < installed.size(numpy=True, compiled=False) < NUMPY
    assert 6e6 < installed.size(numpy=False, compiled=False) < BEYOND_NUMPY
    ours = [str(path) for path in installed.site.iterdir() if path.is_dir() and not path.name.startswith("numpy")]
    done = installed.run("-m", "compileall", "-q", *ours, python=True)  # as pip does by default
    assert done.returncode == 0, done.stderr
    assert installed.size(numpy=False, compiled=True) < BEYOND_NUMPY_COMPILED


def test_trimmed_install_is_smaller_and_has_all_bytecode_of_the_server(installed: Environment, tmp_path: Path) -> None:
    """Run the commands of docs/how-to/deploy.md for a smaller installation.

    These commands must write all .pyc files that the policy server needs, because a service cannot write into /opt.
    """
    [block] = re.findall(r"```console\n(# \S+/pip install --no-compile .*?)```", DEPLOY.read_text("utf-8"), re.DOTALL)
    trimmed = Environment(tmp_path / "trimmed")
    # This copy replaces the first command of the block. It leaves out the temporary files of another test that is
    # possibly writing .pyc files now.
    ignored = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(installed.path, trimmed.path, symlinks=True, ignore=ignored)
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


def test_policy_server_starts_fast_and_uses_little_memory(installed: Environment) -> None:
    """Compare the CPU time of the fastest start with numpy's import time, because a busy machine slows both."""
    done = installed.run("bench", "policy", "--json", "--actions", "50", "--memory", "1000", "--starts", "3")
    assert done.returncode == 0, done.stderr
    begun = json.loads(done.stdout)["start"]
    assert len(begun["to_first_action_s"]) == 3
    code = "import numpy, time; print(time.process_time())"
    bare = min(float(installed.run("-c", code, python=True).stdout) for _ in range(3))
    assert 0.01 < min(begun["processor_s"]) < START * max(1.0, bare / IMPORT)
    assert 10e6 < begun["resident_bytes"] < RESIDENT


def test_commands_work_or_name_the_missing_package(installed: Environment, tmp_path: Path, bundle_file: Path) -> None:
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


def test_the_python_api_works_or_names_the_missing_extra(installed: Environment) -> None:
    code = (
        "import td3_robot as tr\n"
        "print(tr.__version__, tr.load_policy('ant').predict([0.0] * 28).shape)\n"
        "for use in (lambda: tr.train('walker2d'), lambda: tr.open_recording('x.mcap'), lambda: tr.evaluate('ant')):\n"
        "    try:\n"
        "        use()\n"
        "    except (ModuleNotFoundError, tr.Td3RobotError) as error:\n"
        "        print(error)\n"
    )
    done = installed.run("-c", code, python=True)
    assert done.returncode == 0, done.stderr
    first, *errors = done.stdout.splitlines()
    assert first.endswith(" (8,)")
    assert len(errors) == 3
    for error, extra in zip(errors, ("train", "record", "sim"), strict=True):
        assert "not installed" in error or "has wheels for Python" in error
        assert f"'td3-robot[{extra}]'" in error or extra == "sim"


def test_every_robot_side_module_can_be_imported(installed: Environment) -> None:
    done = installed.run("-c", IMPORT_ROBOT_SIDE, python=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.fixture
def bundle_file(tmp_path: Path, make_bundle: Callable[..., Bundle]) -> Path:
    make_bundle().save(tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"
