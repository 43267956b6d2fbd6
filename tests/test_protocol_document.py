"""docs/reference/protocol.md is up to date with the code, and is all that a person needs to write a peer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from td3_robot.bundle import Bundle
from td3_robot.core_types import ROBOT_ROLES
from td3_robot.messages import MESSAGES, Refused, Step, wire_fields
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.noise import Categorical, Gaussian, OrnsteinUhlenbeck, Uniform
from td3_robot.policy.noise_v2 import CategoricalV2, GaussianV2, OrnsteinUhlenbeckV2, UniformV2
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ServerLink

DOCS = Path(__file__).parent.parent / "docs"
PAGE = "reference/protocol.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")


def make(*arguments: str, folder: Path = DOCS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "produce.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the scripts docs/produce*.py, with an empty folder for protocol.md."""
    for script in DOCS.glob("produce*.py"):
        shutil.copy(script, tmp_path)
    (tmp_path / PAGE).parent.mkdir()
    return tmp_path


def test_produced_pages_are_up_to_date() -> None:
    result = make("--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("old", ["| HELLO_PERIOD | 0.25 s", "### Throttle", "| `weights` | learner |", "83 a8 70 72"])
def test_check_reports_an_outdated_document_and_a_run_without_check_updates_it(folder: Path, old: str) -> None:
    document = folder / PAGE
    assert old in TEXT
    document.write_text(TEXT.replace(old, "x"))
    result = make("--check", PAGE, folder=folder)
    assert result.returncode == 1
    assert result.stderr == f"{document} is out of date: run python docs/produce.py\n"
    assert document.read_text() != TEXT
    assert make(PAGE, folder=folder).returncode == 0
    assert document.read_text() == TEXT


def test_a_missing_marker_causes_a_one_line_error(folder: Path) -> None:
    (folder / PAGE).write_text(TEXT.replace("<!-- end: topics -->", ""))
    result = make(PAGE, folder=folder)
    assert result.returncode == 1
    assert re.fullmatch(r".*protocol.md: markers .* must each occur once, in this order\n", result.stderr)


def test_a_wrong_argument_exits_with_code_2() -> None:
    assert make("--chekc").returncode == 2


def test_every_message_and_field_is_named() -> None:
    for message in MESSAGES.values():
        part = TEXT.split(f"### {message.__name__}: topic `{message.NAME}`")[1].split("\n### ")[0]
        for name in wire_fields(message):
            assert f"| `{name}` |" in part


def test_every_refusal_code_is_explained() -> None:
    codes = wire_fields(MESSAGES["refused"])["code"].meaning.replace(" or ", ", ").split(", ")
    for code in codes:
        assert f"| `{code}` |" in TEXT


def code_blocks() -> dict[str, Any]:
    """Run the document's Python blocks and return the names that they define."""
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "protocol.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize(
    ("seed", "source", "incarnation"), [(0, "sim-0", 0), (2**63 + 5, "bein-ü", 2**33), (2**32 - 1, "x", 1000)]
)
@pytest.mark.parametrize("actions", [2, 5])
def test_the_noise_in_the_document_equals_the_noise_of_the_policy_server(
    seed: int, source: str, incarnation: int, actions: int
) -> None:
    robots = 3
    theirs = code_blocks()
    identity = seed, source, incarnation, robots, actions
    keys = theirs["keys"](seed, source, incarnation, robots)
    episodes, steps = np.array([0, 5, 2**50], np.uint64), np.array([0, 64, 200], np.uint32)
    uniform, normal = Uniform(*identity)(episodes, steps), Gaussian(*identity)(episodes, steps)
    gumbel = Categorical(*identity)(episodes, steps)
    uniform_v2, normal_v2 = UniformV2(*identity)(episodes, steps), GaussianV2(*identity)(episodes, steps)
    driving = OrnsteinUhlenbeckV2(*identity, theta=1.0)(episodes, steps)
    gumbel_v2 = CategoricalV2(*identity)(episodes, steps)
    for robot, (episode, step) in enumerate(zip(episodes.tolist(), steps.tolist(), strict=True)):
        assert theirs["uniform"](keys[robot], actions, episode, step) == uniform[robot].tolist()
        np.testing.assert_allclose(theirs["gumbel"](keys[robot], actions, episode, step), gumbel[robot], rtol=1e-6)
        moment = actions, episode, step
        assert theirs["uniform_v2"](keys[robot], 6, *moment) == uniform_v2[robot].tolist()
        for kind, numbers in ((5, normal_v2), (7, driving)):
            expected = theirs["normal_v2"](keys[robot], kind, *moment)
            np.testing.assert_allclose(numbers[robot], expected, rtol=1e-5, atol=1e-6)
        even = np.array(theirs["uniform_v2"](keys[robot], 8, *moment))
        np.testing.assert_allclose(gumbel_v2[robot], -np.log(-np.log(even + 2.0**-25)), rtol=1e-6)
        drawn = theirs["normal"](seed, source, incarnation, robots, robot, actions, episode, step)
        assert drawn.tolist() == normal[robot].tolist()
        for theta in (0.15, 0.5, 1.0):
            expected = OrnsteinUhlenbeck(*identity, theta=theta)(episodes, steps)[robot]
            drawn = theirs["ornstein_uhlenbeck"](
                seed, source, incarnation, robots, robot, actions, episode, step, theta
            )
            assert drawn.tolist() == expected.tolist()


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("hidden", [(), (8, 4)])
def test_the_policy_in_the_document_gives_the_action_of_the_policy_server(
    make_bundle: Callable[..., Bundle], rng: np.random.Generator, hidden: tuple[int, ...], normalised: bool
) -> None:
    """The test follows section 6 of protocol.md: it reads the header and the tensors, then computes the action."""
    bundle = make_bundle(3, hidden=hidden, tame=True)
    if normalised:
        mean, std = rng.normal(size=3).astype("f4"), rng.uniform(0.01, 2, 3).astype("f4")
        bundle = replace(bundle, tensors={**bundle.tensors, "observation.mean": mean, "observation.std": std})
    payload = bundle.encode()
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    ours = json.loads(header["__metadata__"]["td3_robot"])
    assert (payload[8:9], ours["format"], ours["hidden"]) == (b"{", 1, list(hidden))

    def tensor(name: str) -> Any:
        entry = header[name]
        assert entry["dtype"] == "F32"
        begin, end = entry["data_offsets"]
        return np.frombuffer(payload[8 + length :][begin:end], "<f4").reshape(entry["shape"])

    observation = rng.normal(size=3).astype(np.float32)
    x = observation
    if normalised:
        x = np.clip((observation - tensor("observation.mean")) / tensor("observation.std"), -10, 10)
    for k in range(len(hidden)):
        x = np.maximum(0, tensor(f"actor.{k}.weight") @ x + tensor(f"actor.{k}.bias"))
    u = np.tanh(tensor(f"actor.{len(hidden)}.weight") @ x + tensor(f"actor.{len(hidden)}.bias"))
    low, high = (np.array([item[key] for item in ours["spec"]["actions"]], np.float32) for key in ("low", "high"))
    action = np.clip(u * ((high - low) / 2) + (high + low) / 2, low, high)
    np.testing.assert_allclose(Actor(Bundle.decode(payload))(observation[None])[0], action, rtol=1e-5, atol=2e-5)


def test_the_policy_server_serves_a_peer_that_is_written_from_the_document_alone(
    tmp_path: Path, make_bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that uses only ZeroMQ and msgpack receives a Welcome and, for its Step, an Action."""
    monkeypatch.setattr("td3_robot.transport.link.PEER_TIMEOUT", 1e9)  # s; a busy machine must not cause a timeout
    endpoint = f"ipc://{tmp_path}/policy"
    bus, core = Bus(), PolicyCore(seed=0)
    core.load(1, make_bundle())
    assert core.spec
    bus.serve(endpoint, ServerLink("policy", "policy", dict.fromkeys(ROBOT_ROLES, (Step,)), {"task": "Toy"}, 5))
    bus.adopt("policy", core.spec)
    channels = [{"name": f"o{i}", "unit": "m", "low": -5.0, "high": 5.0} for i in range(3)]
    limits = (("left", -1.0, 3.0), ("right", -0.5, 0.5))
    spec = {
        "name": "Toy",
        "observations": channels,
        "actions": [{"name": name, "unit": "N", "low": low, "high": high} for name, low, high in limits],
        "control_period": 0.02,
    }
    hello = {"protocol": 1, "role": "driver", "name": "leg", "incarnation": 1, "client": 99, "robots": 1}
    hello |= {"weights_version": 0, "spec": spec, "agreement": {}}
    step = {"source": "leg", "incarnation": 1, "sequence": 0, "transitions": 0, "stamp": 123, "phase": b"\0"}
    step |= {"episode": bytes(8), "episode_step": bytes(4), "observation": bytes(12), "reward": bytes(4)}
    step |= {"action": bytes(8), "origin": 0, "answered": 0, "weights_version": 0, "noise_kind": 0, "noise_seed": 0}
    step |= {"needs_version": 0, "world": {}}
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(endpoint)

        def ask(topic: bytes, content: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
            socket.send_multipart([topic, msgpack.packb(content)])
            deadline = time.monotonic() + 60
            while not socket.poll(1):
                assert time.monotonic() < deadline, bus.dropped()
                for to, message in core.step(bus.receive(0.001), 0.0):
                    bus.send(to, message)
            name, payload = socket.recv_multipart()
            return name, msgpack.unpackb(payload)

        assert ask(b"step", step) == (
            b"refused",
            {"code": "hello", "reason": "policy has not met this client; send Hello"},
        )
        assert ask(b"hello", hello) == (b"welcome", {"protocol": 1, "name": "policy", "session": 5})
        name, action = ask(b"step", step)
        assert name == b"action"
        assert (action["answers"], action["incarnation"], action["stamp"]) == (0, 1, 123)
        assert len(action["action"]) == 8
        assert (action["weights_version"], action["noise_kind"]) == (1, 0)
        name, beat = ask(b"heartbeat", {"stamp": -7, "session": 5})
        assert (name, beat) == (b"heartbeat", {"stamp": -7, "session": 5})
        assert bus.dropped() == {"stranger": 1}  # the Step before the Hello
    finally:
        socket.close(linger=0)
        context.term()
        bus.close()


@pytest.mark.parametrize(
    ("frames", "codes"),
    [
        ([b"hello", b"\x80"], ["malformed"]),
        ([b"hello"], ["malformed"]),
        ([b"hello", b"", b""], ["malformed"]),
        ([b"step", b"no msgpack"], ["hello"]),
        ([b"heartbeat", b"\x80"], ["hello"]),
        ([b"bye", b"\x80"], ["hello"]),
        ([b"bye", bytes(1 << 20)], []),
        ([b"hallo", b"\x80"], []),
        ([b"", b"hello", b"\x80"], []),
        ([b"", b""], []),
        ([b"step"], []),
    ],
)
def test_an_unknown_client_gets_the_answer_in_the_table_of_section_3(frames: list[bytes], codes: list[str]) -> None:
    server = ServerLink("policy", "policy", dict.fromkeys(ROBOT_ROLES, (Step,)), {}, 1)
    inputs, replies = server.receive(b"1", frames, 0.0)
    assert inputs == []
    assert [reply.code for _, reply in replies if isinstance(reply, Refused)] == codes
