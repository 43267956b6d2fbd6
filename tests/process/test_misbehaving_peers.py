"""If a peer breaks the protocol, a real policy server refuses the peer or drops its messages. The operator sees why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
import zmq

import td3_robot as tr
from td3_robot.bench import example

SPEC = example.spec()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tr.Operator]:
    """An operator that is connected to a policy server in another process."""
    endpoint = f"ipc://{tmp_path}/policy"
    example.bundle().save(tmp_path / "policy.safetensors")
    (tmp_path / "robot.yaml").write_text(yaml.safe_dump({"endpoints": {"policy": endpoint}}))
    words = ["policy", "--bundle", "policy.safetensors", "--config", "robot.yaml"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "td3_robot", *words], cwd=tmp_path, stdout=log, stderr=log)
    operator = tr.connect(endpoint, timeout=60)
    try:
        operator.state()  # waits for the server
        yield operator
    finally:
        process.kill()
        process.wait()


class Peer:
    """A plain DEALER socket that sends dicts as msgpack maps. It does not follow the rules of our clients."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)

    def send(self, topic: str, content: dict[str, Any]) -> None:
        self.socket.send_multipart([topic.encode(), msgpack.packb(content)])

    def receive(self) -> tuple[str, dict[str, Any]]:
        assert self.socket.poll(60_000)
        topic, payload = self.socket.recv_multipart()
        return topic.decode(), msgpack.unpackb(payload)

    def ask(self, topic: str, content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.send(topic, content)
        return self.receive()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with zmq.Context() as context:
        peer = Peer(context)
        peer.socket.connect(f"ipc://{tmp_path}/policy")
        yield peer
        peer.socket.close()


def hello(**changes: Any) -> dict[str, Any]:
    fields = {"protocol": 1, "role": "driver", "name": "leg", "incarnation": 3, "client": 9, "robots": 1}
    return {**fields, "weights_version": 0, "spec": SPEC.describe(), "agreement": {}, **changes}


def step(sequence: int, **changes: Any) -> dict[str, Any]:
    observations, actions = SPEC.observation_size, SPEC.action_size
    fields: dict[str, Any] = {"source": "leg", "incarnation": 3, "sequence": sequence, "transitions": sequence}
    fields |= {"stamp": sequence, "phase": b"\1" if sequence else b"\0", "episode": bytes(8), "origin": 0}
    fields |= {"episode_step": sequence.to_bytes(4, "little"), "observation": bytes(4 * observations)}
    fields |= {"reward": bytes(4), "action": bytes(4 * actions), "answered": sequence, "weights_version": 0}
    return fields | {"noise_kind": 0, "noise_seed": 0, "needs_version": 0, "world": {}, **changes}


def test_wrong_steps_get_no_action_and_the_state_reply_counts_them(server: tr.Operator, peer: Peer) -> None:
    assert "dropped" in server.state().detail
    assert server.state().detail["last_dropped"] == ""
    assert peer.ask("hello", hello())[0] == "welcome"
    assert peer.ask("step", step(5))[1]["answers"] == 5
    peer.send("step", step(6, source="arm"))
    peer.send("step", step(7, incarnation=2))
    peer.send("step", step(4))
    # The next answer is for Step 9. So the server has read the wrong Steps and sent no Action for them.
    assert peer.ask("step", step(9))[1]["answers"] == 9
    detail = server.state().detail
    assert {kind: detail["dropped"][kind] for kind in ("identity", "sequence", "gap")} == {
        "identity": 2,
        "sequence": 1,
        "gap": 1,
    }
    assert detail["last_dropped"] == "gap: step 9 from leg on link policy: the previous 3 Steps did not arrive"


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"name": "policy"}, "taken", "name 'policy' is reserved for this server; use another name"),
        ({"robots": "one"}, "malformed", "hello: Expected `int`, got `str` - at `$.robots`"),
        ({"spec": {"name": "Leg"}}, "spec", "robot specification: Object missing required field `observations`"),
    ],
)
def test_a_wrong_hello_is_refused_with_the_reason(
    server: tr.Operator, peer: Peer, change: dict[str, Any], code: str, reason: str
) -> None:
    topic, refused = peer.ask("hello", hello(**change))
    assert (topic, refused["code"]) == ("refused", code)
    assert refused["reason"].startswith(reason)
    assert reason in server.state().detail["last_dropped"]
    assert server.state().detail["connected"] == []
