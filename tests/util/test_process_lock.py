"""Names and files that only one process of this machine can hold at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from td3_robot.errors import UsageError
from td3_robot.util.process_lock import claim, locked

_HOLD = """
import os, sys
from td3_robot.util.process_lock import claim

os.setuid(int(sys.argv[2]))
held = claim(sys.argv[1], "no")
print("held", flush=True)
input()
"""


@pytest.mark.parametrize("user", [os.getuid(), 65534])
def test_the_error_names_the_holder(user: int) -> None:
    if user != os.getuid() and os.getuid() != 0:
        pytest.skip("only root may start a process of another user")
    what = str(uuid.uuid4())
    command = [sys.executable, "-c", _HOLD, what, str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline() == b"held\n"
        user_text = "" if user == os.getuid() else " of the user with uid 65534"
        for _ in range(100):  # a failed claim must not block the next one
            with pytest.raises(UsageError) as refused:
                claim(what, "it is taken")
            assert str(refused.value) == f"it is taken (process {first.pid}{user_text})"
        first.kill()
    for _ in range(2):
        claim(what, "it is taken").close()


def test_a_claim_waits_until_the_holder_releases_the_name() -> None:
    what = str(uuid.uuid4())
    first = claim(what, "it is taken")
    threading.Timer(0.3, first.close).start()
    claim(what, "it is taken", patience=60).close()


def test_a_file_lock_has_one_holder(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock", wait=False), pytest.raises(BlockingIOError), locked(tmp_path / ".lock", wait=False):
        pass
    with locked(tmp_path / ".lock", wait=True):
        pass
