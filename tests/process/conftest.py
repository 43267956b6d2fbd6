"""Fixtures and constants that the process tests share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.deployed_robot import Robot

ROOT = Path(__file__).parent.parent.parent

MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """A function that makes a folder once for all tests and all pytest-xdist workers, at the first call.

    The function uses a lock file, because several workers can call it at the same time. With the marker
    ``xdist_group``, one worker would run all tests that need the folder. But the marker has no effect in pytest-xdist
    3.8 with pytest 9.2.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder, made, failed = (root / f"{name}{end}" for end in ("", ".made", ".failed"))
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                if failed.exists():
                    pytest.fail(f"{name} could not be made: {failed.read_text()}")
                shutil.rmtree(folder, ignore_errors=True)  # left behind by a worker that died
                folder.mkdir()
                try:
                    make(folder)
                except Exception as error:
                    failed.write_text(str(error))
                    raise
                made.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def wheel(made_once: MadeOnce) -> Path:
    """Build the wheel once for all tests."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        subprocess.run(command, check=True, capture_output=True)

    return next(made_once("wheel", build).glob("*.whl"))


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Robot]:
    it = Robot(tmp_path)
    yield it
    it.end()
