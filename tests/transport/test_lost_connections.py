"""A TCP peer leaves while its messages fill the queue, or vanishes without closing its connection."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

SERVER = """
import time
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ClientLink, ServerLink, hello

server = Bus()

def serve():
    return server.serve("tcp://127.0.0.1:*", ServerLink("policy", "policy", {"operator": ()}, {}, 1))
"""
FLOOD = f"""{SERVER}
import zmq
from td3_robot.topics import QUEUE_LENGTH

place = serve()
with zmq.Context() as context:
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.SNDHWM, 0)
    client.connect(place)
    for _ in range(20 * QUEUE_LENGTH):
        client.send_multipart([b"step", bytes(1000)])
    assert server._sockets["policy"].poll(60_000)  # messages have come
    time.sleep(1)  # the server's queue fills up
    client.close(linger=0)
time.sleep(2.5)  # the pause of the server
server.receive(0)
print("dropped:", server.dropped()["stranger"])
server.close()
"""
VANISH = f"""{SERVER}
import logging, subprocess

class Log(logging.Handler):
    text = ""

    def emit(self, record):
        self.text += record.getMessage()

def switch(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

def wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        for bus in (server, client):
            bus.receive(0.02)

log = Log()
logging.getLogger().addHandler(log)
switch("up")
client = Bus()
client.connect(serve(), ClientLink("policy", hello("operator", "me", client=5, incarnation=0), ()))
wait(lambda: client.welcome("policy"))
begin = time.monotonic()
switch("down")
wait(lambda: "ended without a Bye" in log.text and not server.peers("policy"))
assert 3 < time.monotonic() - begin < 30, time.monotonic() - begin
switch("up")
wait(lambda: server.peers("policy"))
print("the client is back")
"""


def run(words: Sequence[str], program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*words, sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_a_client_that_floods_a_paused_server_and_leaves_does_not_end_the_server() -> None:
    """With heartbeats of libzmq 4.3.5, the server would abort."""
    done = run((), FLOOD)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0


def test_a_connection_to_a_vanished_peer_ends_after_5_s() -> None:
    """A network namespace of Linux has its own loopback device. While the device is down, all packets are lost.

    After 5 s without an answer, the kernel ends the connection. The limits of the time are wide, for a busy machine.
    """
    alone = ("unshare", "--net")
    if not shutil.which("ip") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces need root, unshare and ip")
    done = run(alone, VANISH)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the client is back\n"
