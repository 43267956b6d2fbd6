"""Facts about this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from td3_robot.util import machine


def test_this_machine_has_a_core() -> None:
    assert machine.available_cores() >= 1


def test_versions_of_packages() -> None:
    assert machine.version("numpy")[0].isdigit()
    assert machine.version("no-such-package") == ""


def test_processor_seconds_are_those_of_the_process() -> None:
    assert machine.processor_seconds(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.5)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    while (machine.processor_seconds(busy.pid) or 0) < 0.1:
        pass
    busy.kill()
    busy.wait()
    assert machine.processor_seconds(busy.pid) is None
