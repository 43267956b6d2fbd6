"""Error and log messages of ``td3-robot record`` about its options and about a full disk."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from td3_robot.cli.main import main
from td3_robot.core_types import Peer
from td3_robot.errors import HandshakeError
from td3_robot.messages import Record, Status
from td3_robot.recording import writer
from td3_robot.recording.recorder import Recorder
from td3_robot.runtime import process
from td3_robot.runtime.node import Node
from td3_robot.transport import codec
from td3_robot.transport import link as handshake

FULL = "No space left on device"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns ``record(*options)``, which runs the command in this process and returns its exit code.

    No node connects to the recorder, and the recorder stops immediately.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_catch_signals", lambda _: None)  # pytest handles the signals
    monkeypatch.setattr(Node, "spin", lambda *_, **__: None)
    (tmp_path / "robot.yaml").write_text(f"task: walker2d\nendpoints: {{recorder: 'ipc://{tmp_path}/recorder'}}\n")
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda *options: main(["record", "leg.mcap", "--config", "robot.yaml", *options])
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("other", ["mb", "s"])
def test_a_ring_cannot_be_split(other: str, record: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record("--ring-s", "30", f"--split-{other}", "5") == 2
    error = capsys.readouterr().err
    assert f"record.ring_s is 30 and record.split_{other} is 5: a ring cannot be split" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "leg.mcap").exists()


def test_the_log_names_the_file_and_the_command_refuses_an_existing_file(record: Any, caplog: Any, capsys: Any) -> None:
    caplog.set_level("INFO")
    assert record() == 0
    assert "recording into leg.mcap" in caplog.messages
    assert caplog.messages[-1] == "recorded 0 messages, 0.0 MB: leg.mcap"
    caplog.clear()
    assert record("--ring-s", "30") == 2
    assert "'leg.mcap' exists already; name another file" in capsys.readouterr().err
    Path("leg.mcap").unlink()
    assert record("--ring-s", "30") == 0
    assert caplog.messages[-2:] == [
        "keeping the last 30 s; after a failure, fault, lost node or SIGUSR1, the recorder writes them to leg.mcap, "
        "then leg_1.mcap, …",
        "nothing was written to leg.mcap: there was no failure, fault, lost node or SIGUSR1",
    ]
    assert not Path("leg.mcap").exists()


class FullDisk(writer._File):
    """A file on a disk that fills up after the first write."""

    def write(self, data: Any, /) -> int:
        if self.tell():
            raise OSError(errno.ENOSPC, FULL, str(self.name))
        return super().write(data)


def test_a_full_disk_is_reported_once_with_a_remedy(
    record: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writing fails twice: for the chunk with the Status, and for the index at the end."""
    monkeypatch.setattr(writer, "_File", FullDisk)

    def spin(node: Node, core: Recorder, **_: Any) -> None:
        del node
        peer = Peer("recorder", b"k", handshake.hello("node", "leg", client=0), {})
        status = Status("leg", "ready", "", {}, {})
        core.step([(peer, Record("status", "supervisor", 0, 0, codec.encode(status)))], 0.0)

    monkeypatch.setattr(Node, "spin", spin)
    assert record() == 1
    assert capsys.readouterr().err == (
        f"td3-robot record: leg.mcap: {FULL}; make room on that disk, "
        "then start td3-robot record again: the recorded nodes keep running\n"
    )


def test_only_the_first_error_is_reported(
    record: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the HandshakeError, closing the file fails too, because the disk is full."""

    def spin(*_: Any, **__: Any) -> None:
        raise HandshakeError("the supervisor refuses us")

    monkeypatch.setattr(Node, "spin", spin)
    monkeypatch.setattr(writer, "_File", FullDisk)
    assert record() == 2
    assert capsys.readouterr().err == "td3-robot record: the supervisor refuses us\n"


def test_a_write_error_names_the_file() -> None:
    with pytest.raises(OSError, match=FULL) as caught, writer._File("/dev/full", "w") as file:
        file.write(b"x")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")
