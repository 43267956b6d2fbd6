"""A node finds the sockets of this user's listeners, which are monitors and recorders."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from td3_robot.errors import EndpointError
from td3_robot.transport import attach
from td3_robot.transport.attach import Search, beside
from td3_robot.transport.link import ClientLink, hello


def bound(path: Path) -> socket.socket:
    result = socket.socket(socket.AF_UNIX)
    result.bind(str(path))
    return result


def search_for(endpoint: str, *, skip: bool = False) -> Search:
    return Search(endpoint, lambda: ClientLink("monitor", hello("node", "leg", client=0), ()), skip=skip)


def test_a_search_finds_sockets_only_while_their_files_exist(tmp_path: Path) -> None:
    endpoint = beside(f"ipc://{tmp_path}/policy", "monitor")
    search = search_for(endpoint)
    assert search.look() == set()
    with closing(bound(tmp_path / "policy.monitor")), closing(bound(tmp_path / "policy.monitor.7")):
        (tmp_path / "policy.monitor.2").touch()  # a file, not a socket
        assert search.look() == {endpoint, f"{endpoint}.7"}
        assert search_for(endpoint, skip=True).look() == {f"{endpoint}.7"}
    (tmp_path / "policy.monitor").unlink()
    assert search.look() == {f"{endpoint}.7"}


def test_a_search_does_not_read_a_folder_that_is_unchanged_for_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    search = search_for(f"ipc://{tmp_path}/monitor")
    assert search.look() == set()
    now[0] += 1.9
    # The search reads the folder again: within 2 s after a change, a second change could get the same time stamp.
    assert search.look() == set()
    now[0] += 0.1
    assert search.look() is None
    os.utime(tmp_path, (1.0, 1.0))
    assert search.look() == set()
    assert search_for(f"ipc://{tmp_path}/missing/monitor").look() == set()


def test_a_socket_of_another_user_is_no_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(bound(tmp_path / "monitor")):
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        assert search_for(f"ipc://{tmp_path}/monitor").look() == set()


def test_listeners_of_a_tcp_server_use_a_folder_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    endpoint = beside("tcp://0.0.0.0:5601", "monitor")
    assert endpoint == beside("tcp://10.0.0.5:5601", "monitor") != beside("tcp://0.0.0.0:5602", "monitor")
    assert beside("tcp://127.0.0.1:*", "monitor") == ""
    attach.prepare(endpoint)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    with closing(bound(folder / "5601.monitor")):
        assert search_for(endpoint).look() == {endpoint}
        folder.chmod(0o777)
        assert search_for(endpoint).look() == set()
        with pytest.raises(EndpointError, match="another user can write"):
            attach.prepare(endpoint)
        monkeypatch.setattr(Path, "lstat", lambda _: os.lstat(tmp_path / "missing"))
        assert search_for(endpoint).look() == set()  # the folder disappears during the search


def test_listeners_attach_again_after_their_folder_was_writable_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``chmod`` does not change a folder's time stamp. So the search looks at an unsafe folder each time."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(attach, "_SETTLED", 0.0)
    endpoint = beside("tcp://127.0.0.1:5601", "monitor")
    attach.prepare(endpoint)
    (folder,) = tmp_path.iterdir()
    with closing(bound(folder / "5601.monitor")):
        search = search_for(endpoint)
        folder.chmod(0o777)
        assert search.look() == set()
        folder.chmod(0o700)
        assert search.look() == {endpoint}


def test_a_file_in_place_of_the_folder_of_listeners_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    endpoint = beside("tcp://127.0.0.1:5601", "monitor")
    folder = Path(endpoint.removeprefix("ipc://")).parent
    folder.touch()
    with pytest.raises(EndpointError, match=rf"folder '{folder}' cannot be made: File exists; delete the file"):
        attach.prepare(endpoint)
