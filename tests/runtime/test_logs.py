"""A log that nobody reads holds up nobody."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from td3_robot.runtime import logs
from tests.conftest import poll_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Of 4 KiB."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
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
    """Of 20 lines of 1 KiB four are in the pipe, one is with the thread, and three may wait; the last words always."""
    monkeypatch.setattr(logs, "_WAITING", 3)
    log = logs.Aside(pipe[1])
    for number in range(20):
        if number < 5:  # it takes one after the other, and stays with the fifth
            poll_until(log._lines.empty, lambda: "the thread takes no line", 60)
        log.handle(record(f"{number}".ljust(1023, ".")))
        if number == 4:
            poll_until(log._lines.empty, lambda: "the thread takes no line", 60)
    log.put("the end", last=True)
    os.set_blocking(pipe[0], False)
    read = b""

    def ended() -> bool:
        nonlocal read
        with contextlib.suppress(BlockingIOError):
            read += os.read(pipe[0], 1 << 16)
        return read.endswith(b"the end\n")

    poll_until(ended, lambda: f"read {len(read)} bytes, {read[-200:]!r}", 60)
    lines = read.decode().splitlines()
    assert [int(line.rstrip(".")) for line in lines[:-2]] == list(range(8))
    assert lines[-2:] == ["(12 lines are left out: nobody read them)", "the end"]


def test_a_mistake_in_a_call_of_the_log_is_no_error(pipe: tuple[int, int]) -> None:
    log = logs.Aside(pipe[1])
    log.handle(logging.LogRecord("battery", logging.INFO, __file__, 1, "%.1f V", (None,), None))
    log.flush()
    assert os.read(pipe[0], 1000).decode() == f"battery: TypeError in a line of {__file__}:1\n"


def test_what_cannot_be_written_now_is_written_later(pipe: tuple[int, int]) -> None:
    """Where another program has made standard error non-blocking."""
    os.set_blocking(pipe[1], False)
    log = logs.Aside(pipe[1])
    for number in range(20):
        log.handle(record(f"{number}".ljust(1023, ".")))
    read = b""
    while len(read) < 20 * 1024:
        read += os.read(pipe[0], 1 << 16)
    assert [int(line.rstrip(".")) for line in read.decode().splitlines()] == list(range(20))


def said(code: str) -> list[str]:
    begin = "import logging, os, sys, warnings; from td3_robot.runtime import logs; log = logging.getLogger('x')\n"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=True, timeout=60)
    return done.stderr.splitlines()


def test_a_child_writes_its_own_lines() -> None:
    lines = said(
        "warnings.simplefilter('ignore')\n"  # of Python 3.12, about forks beside threads
        "logs.begin('leg'); pid = os.fork(); log.info('child' if not pid else 'parent'); pid and os.wait()"
    )
    assert sorted(line.rpartition(" ")[2] for line in lines) == ["child", "parent"]


def test_warnings_wait_for_nobody_either() -> None:
    [first, *_] = said("logs.begin('leg'); warnings.warn('overflow')")
    assert first.endswith("UserWarning: overflow")
    assert " leg WARNING " in first


def test_what_a_program_has_put_in_place_of_standard_error_is_written_to() -> None:
    """One that can do what a logging.StreamHandler needs, and nothing else."""
    lines = said(
        "class Tee:\n"
        "    def write(self, text): old.write(text)\n"
        "    def flush(self): pass\n"
        "old, sys.stderr = sys.stderr, Tee(); logs.begin('leg'); log.info('a line'); logs.last_words('the last')\n"
    )
    assert lines[0].endswith(" leg INFO a line")
    assert lines[1:] == ["the last"]


def test_after_standard_error_was_closed_nothing_is_said() -> None:
    assert said("sys.stderr.close(); logs.begin('leg'); log.info('a line'); logs.last_words('the last')") == []


def test_a_closed_standard_error_is_no_error(tmp_path: Path) -> None:
    """What has its number then is another file, and gets no lines."""
    code = (
        "import sys, logging; from td3_robot.runtime import logs\n"
        f"file = open({str(tmp_path / 'other')!r}, 'w'); assert file.fileno() == 2\n"
        "logs.begin('leg'); logging.getLogger().warning('a line'); logs.last_words('the last'); print('good')"
    )
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "$0" 2>&-', code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "good\n")
    assert (tmp_path / "other").read_text() == ""


def test_last_words_come_after_the_log() -> None:
    lines = said(
        "logs.begin('leg')\nfor number in range(500): log.info('line %d', number)\nlogs.last_words('leg: the end')"
    )
    assert len(lines) == 501
    assert lines[-1] == "leg: the end"
    assert lines[0].endswith(" leg INFO line 0")
