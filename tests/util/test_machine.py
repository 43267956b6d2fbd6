"""Facts about this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from td3_robot.util import machine
from tests.conftest import poll_until


def test_available_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.available_cores() >= 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert machine.available_cores() == 2


def test_a_package_that_is_not_installed_has_an_empty_version() -> None:
    assert machine.version("numpy")[0].isdigit()
    assert machine.version("no-such-package") == ""


def test_processor_seconds_returns_the_time_of_the_given_process() -> None:
    assert machine.processor_seconds(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.5)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            poll_until(lambda: (machine.processor_seconds(busy.pid) or 0) >= 0.1, lambda: "used less than 0.1 s")
        finally:
            busy.kill()
    assert machine.processor_seconds(busy.pid) is None


@pytest.mark.parametrize(
    ("lines", "contents", "expected"),
    [
        ("0::/box/inner", {"box/inner/memory.max": "max", "box/memory.max": "3000"}, 3000 - 1000 + 600),
        ("0::/box/inner", {}, 5120),
        ("4:cpu,memory:/box", {"memory/box/memory.limit_in_bytes": "4000"}, 4000 - 1000 + 600),
    ],
)
def test_a_containers_memory_limit_reduces_the_available_memory(
    lines: str, contents: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports 5 KiB of available memory. Each control group uses 1000 bytes; 600 of them are file cache."""
    groups = tmp_path / "cgroup"
    for name, text in contents.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        (path.parent / "memory.current").write_text("1000\n")
        (path.parent / "memory.usage_in_bytes").write_text("1000\n")
        (path.parent / "memory.stat").write_text("anon 400\ninactive_file 600\ntotal_inactive_file 600\n")
    fakes = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    5 kB\n", "/proc/self/cgroup": lines + "\n"}
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **more: fakes.get(str(path)) or real(path, **more))
    monkeypatch.setattr(machine, "_GROUPS", groups)
    assert machine.available_memory() == expected
