"""A log call never waits, even if nobody reads the log."""

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


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``flush`` wait up to 60 s, because a busy machine can pause the thread that writes."""
    monkeypatch.setattr(logs, "_FLUSH_TIMEOUT", 60.0)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe that holds 4 KiB."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, __file__, 1, text, None, None)


def test_lines_are_written_in_their_order(pipe: tuple[int, int]) -> None:
    log = logs.LogQueue(pipe[1])
    for number in range(5):
        log.handle(record(f"line {number} \udce9"))  # how Python stores the byte E9 in a file name that is not UTF-8
    log.flush()
    assert os.read(pipe[0], 1000).decode().splitlines() == [f"line {number} \\udce9" for number in range(5)]


def test_lines_are_dropped_and_counted_if_nobody_reads(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 lines of 1 KiB, the pipe holds 4, the thread 1 and the queue 3. The other 12 are dropped."""
    monkeypatch.setattr(logs, "_MOST_WAITING", 3)
    log = logs.LogQueue(pipe[1])
    for number in range(20):
        if number < 5:  # the thread writes four lines, and blocks at the fifth
            poll_until(log.queue.empty, lambda: "the thread takes no line", 60)
        log.handle(record(f"{number}".ljust(1023, ".")))
        if number == 4:
            poll_until(log.queue.empty, lambda: "the thread takes no line", 60)
    monkeypatch.setattr(logs, "_FLUSH_TIMEOUT", 0.0)
    log.write_last("the end")  # the queue is full, but still takes this line
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
    assert lines[-2:] == ["(12 lines are missing: they could not be written)", "the end"]


def test_lines_that_could_not_be_written_are_counted(tmp_path: Path) -> None:
    """A full disk loses three lines, one after the other. Then the disk has room."""
    with open("/dev/full", "wb", buffering=0) as full, open(tmp_path / "log", "wb", buffering=0) as log_file:
        log = logs.LogQueue(full.fileno())
        for number in range(3):
            log.handle(record(f"{number}"))
            log.flush()
        os.dup2(log_file.fileno(), full.fileno())
        log.handle(record("3"))
        log.flush()
    wanted = ["(3 lines are missing: they could not be written)", "3"]
    assert (tmp_path / "log").read_text().splitlines() == wanted


def test_a_report_counts_only_the_lines_lost_after_the_previous_report(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log cannot write lines 0 and 1. Between them, it can write the report that one line is missing."""

    def write(descriptor: int, content: bytes) -> int:
        if content in (b"0\n", b"1\n"):
            raise OSError
        return original(descriptor, content)

    original = os.write
    monkeypatch.setattr(os, "write", write)
    log = logs.LogQueue(pipe[1])
    for number in range(3):
        log.handle(record(f"{number}"))
        log.flush()
    report = "(1 lines are missing: they could not be written)"
    assert os.read(pipe[0], 1000).decode().splitlines() == [report, report, "2"]


def test_a_mistake_in_a_log_call_raises_no_exception(pipe: tuple[int, int]) -> None:
    log = logs.LogQueue(pipe[1])
    log.handle(logging.LogRecord("battery", logging.INFO, __file__, 1, "%.1f V", (None,), None))
    log.flush()
    assert os.read(pipe[0], 1000).decode() == f"battery: TypeError in the log call at {__file__}:1\n"


def test_a_non_blocking_descriptor_gets_every_line(pipe: tuple[int, int]) -> None:
    """Another program can make standard error non-blocking."""
    os.set_blocking(pipe[1], False)
    log = logs.LogQueue(pipe[1])
    for number in range(20):
        log.handle(record(f"{number}".ljust(1023, ".")))
    read = b""
    while len(read) < 20 * 1024:
        read += os.read(pipe[0], 1 << 16)
    assert [int(line.rstrip(".")) for line in read.decode().splitlines()] == list(range(20))


def logged(code: str) -> list[str]:
    begin = "import logging, os, sys, warnings; from td3_robot.runtime import logs; log = logging.getLogger('x')\n"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=True, timeout=60)
    return done.stderr.splitlines()


def test_a_child_writes_its_own_lines() -> None:
    lines = logged(
        "warnings.simplefilter('ignore')\n"  # Python 3.12 warns about a fork in a process with threads
        "logs.begin('leg'); pid = os.fork(); log.info('child' if not pid else 'parent'); pid and os.wait()"
    )
    assert sorted(line.rpartition(" ")[2] for line in lines) == ["child", "parent"]


def test_warnings_go_through_the_log() -> None:
    [first, *_] = logged("logs.begin('leg'); warnings.warn('overflow')")
    assert first.endswith("UserWarning: overflow")
    assert " leg WARNING " in first


def test_an_object_in_place_of_standard_error_gets_the_lines() -> None:
    """The object has only the methods that logging.StreamHandler needs."""
    lines = logged(
        "class Tee:\n"
        "    def write(self, text): old.write(text)\n"
        "    def flush(self): pass\n"
        "old, sys.stderr = sys.stderr, Tee(); logs.begin('leg'); log.info('a line'); logs.last_words('the last')\n"
    )
    assert lines[0].endswith(" leg INFO a line")
    assert lines[1:] == ["the last"]


def test_a_standard_error_closed_by_python_gets_nothing() -> None:
    assert logged("sys.stderr.close(); logs.begin('leg'); log.info('a line'); logs.last_words('the last')") == []


def test_a_log_call_does_no_harm_if_the_shell_has_closed_standard_error(tmp_path: Path) -> None:
    """The next file that the process opens gets descriptor 2. The log must not write to this file."""
    code = (
        "import sys, logging; from td3_robot.runtime import logs\n"
        f"file = open({str(tmp_path / 'other')!r}, 'w'); assert file.fileno() == 2\n"
        "logs.begin('leg'); logging.getLogger().warning('a line'); logs.last_words('the last'); print('good')"
    )
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "$0" 2>&-', code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "good\n")
    assert (tmp_path / "other").read_text() == ""


def test_the_reason_why_a_process_ends_is_written_after_all_log_lines() -> None:
    lines = logged(
        "logs.begin('leg')\nfor number in range(500): log.info('line %d', number)\nlogs.last_words('leg: the end')"
    )
    assert len(lines) == 501
    assert lines[-1] == "leg: the end"
    assert lines[0].endswith(" leg INFO line 0")
