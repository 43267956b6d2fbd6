"""A log that nobody reads holds up nobody."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from td3_robot import logs
from tests.conftest import poll_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, __file__, 1, text, None, None)


def test_lines_are_written_in_their_order(pipe: tuple[int, int]) -> None:
    log = logs.Aside(pipe[1])
    for number in range(5):
        log.handle(record(f"line {number} \udce9"))  # from a file name that is not UTF-8
    log.flush()
    assert os.read(pipe[0], 1000).decode().splitlines() == [f"line {number} \\udce9" for number in range(5)]


def test_where_nobody_reads_lines_are_left_out_and_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 64 KiB: 20 lines of 8 KiB do not fit, nor do they with three more that may wait."""
    monkeypatch.setattr(logs, "_WAITING", 3)
    monkeypatch.setattr(logs, "_PATIENCE", 0.01)
    log = logs.Aside(pipe[1])
    for number in range(20):
        log.handle(record(f"{number}".ljust(8191, ".")))
        log.flush()  # gives up where it does not help
    read = b""
    while len(read) < 12 * 8192 and not log._lines.empty():
        read += os.read(pipe[0], 1 << 16)
    log.handle(record("the end"))

    def ended() -> bool:
        nonlocal read
        read += os.read(pipe[0], 1 << 16)
        return read.endswith(b"the end\n")

    poll_until(ended, lambda: f"read {len(read)} bytes, {read[-200:]!r}", 60)
    lines = read.decode().splitlines()
    numbers = [int(line.rstrip(".")) for line in lines if line[0].isdigit()]
    assert numbers == list(range(len(numbers)))
    assert 8 <= len(numbers) < 20
    assert f"({20 - len(numbers)} lines are left out: nobody read them)" in lines


def test_a_closed_standard_error_is_no_error(tmp_path: Path) -> None:
    """What has its number then is another file, and gets no lines."""
    code = (
        "import sys, logging; from td3_robot import logs\n"
        f"file = open({str(tmp_path / 'other')!r}, 'w'); assert file.fileno() == 2\n"
        "logs.begin('leg'); logging.getLogger().warning('a line'); logs.last_words('the last'); print('good')"
    )
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "$0" 2>&-', code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "good\n")
    assert (tmp_path / "other").read_text() == ""


def test_last_words_come_after_the_log() -> None:
    code = (
        "import logging; from td3_robot import logs\n"
        "logs.begin('leg')\n"
        "for number in range(500): logging.getLogger('x').info('line %d', number)\n"
        "logs.last_words('leg: the end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 501
    assert lines[-1] == "leg: the end"
    assert lines[0].endswith(" leg INFO line 0")
