"""One process of this machine at a time, and who it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid

import pytest

from td3_robot.errors import UsageError
from td3_robot.util.process_lock import claim

_HOLD = """
import os, sys
from td3_robot.util.process_lock import claim

os.setuid(int(sys.argv[2]))
held = claim(sys.argv[1], "no")
print("held", flush=True)
input()
"""


@pytest.mark.parametrize("user", [os.getuid(), 65534])
def test_the_second_is_told_who_the_first_is(user: int) -> None:
    if user != os.getuid() and os.getuid() != 0:
        pytest.skip("only root may start a process of another user")
    what = str(uuid.uuid4())
    command = [sys.executable, "-c", _HOLD, what, str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline() == b"held\n"
        whose = "" if user == os.getuid() else " of another user, 65534"
        for _ in range(100):  # whoever asks leaves nothing behind that would stand in the way of the next
            with pytest.raises(UsageError) as refused:
                claim(what, "it is taken")
            assert str(refused.value) == f"it is taken (process {first.pid}{whose})"
        first.kill()
    for _ in range(2):
        claim(what, "it is taken").close()


def test_one_that_is_about_to_end_is_waited_for() -> None:
    what = str(uuid.uuid4())
    first = claim(what, "it is taken")
    threading.Timer(0.3, first.close).start()
    claim(what, "it is taken", patience=60).close()
