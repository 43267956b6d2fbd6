"""examples/minimal_driver.py, which does not import td3_robot, works with a real and with a fake policy server."""

from __future__ import annotations

import ast
import functools
import itertools
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

import td3_robot as tr
from td3_robot import messages
from td3_robot.core_types import Peer
from td3_robot.messages import Action, LifecycleChange, Phase, Reply, Step
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ServerLink
from tests.conftest import Command, poll_until
from tests.process.conftest import ROOT
from tests.process.deployed_robot import bundle

EXAMPLE = ROOT / "examples" / "minimal_driver.py"
DEADLINE = "5"  # seconds; long, because test machines are shared


@pytest.fixture
def start(command: Callable[..., Command]) -> Callable[..., Command]:
    """Returns a function that starts a Python program in a temporary folder."""
    return functools.partial(command, program=(sys.executable,))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/policy"


@pytest.fixture
def drive(start: Callable[..., Command], endpoint: str) -> Callable[..., Command]:
    def begin(*options: str) -> Command:
        return start(str(EXAMPLE), endpoint, "--action-deadline", DEADLINE, *options)

    return begin


def test_driver_imports_only_pyzmq_msgpack_and_the_standard_library() -> None:
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} == {"msgpack", "zmq"}


def test_driver_follows_a_policy_server_and_its_operator(
    start: Callable[..., Command], drive: Callable[..., Command], endpoint: str, tmp_path: Path
) -> None:
    bundle().save(tmp_path / "policy.safetensors")
    settings = {"endpoints": {"policy": endpoint}, "safety": {"observation_deadline_ms": 5000}}
    (tmp_path / "robot.yaml").write_text(yaml.safe_dump(settings))
    serve = ["-m", "td3_robot", "policy", "--bundle", "policy.safetensors", "--config", "robot.yaml"]
    server, driver = start(*serve), drive()
    operator = tr.connect(endpoint, timeout=60)

    def connected() -> bool:
        return operator.state().detail["connected"] == ["leg"]

    poll_until(connected, lambda: "the driver did not connect")
    assert operator.state(target="leg").state == "inactive"
    assert operator.activate("test").detail["confirmed"] == ["leg"]
    driver.wait_for("inactive -> active: activate test")

    assert operator.estop("smoke").detail["confirmed"] == ["leg"]
    driver.wait_for("active -> fault: emergency stop: smoke")
    assert "leg" in operator.state().detail["faults"]
    with pytest.raises(tr.CommandError, match=r"refused: .*emergency stop"):
        operator.activate(target="leg")
    operator.reset()
    driver.wait_for("fault -> inactive: reset")
    operator.activate()
    driver.wait_for("inactive -> active")
    with pytest.raises(tr.CommandError, match="no verb 'freeze'; allowed: estop, reset, configure, activate"):
        operator.ask(messages.Command(1, "leg", "freeze", "", 0, "", b""))

    def policy_actions() -> int:
        counters = operator.state().detail["counters"]
        return int(counters.get("actions", 0) - counters.get("safe_actions", 0))

    begin = policy_actions()  # the driver's deadline begins with the first Action after activate
    poll_until(lambda: policy_actions() > begin + 20, lambda: "the server does not answer")
    server.kill_all()
    driver.wait_for(f"active -> fault: no Action for {DEADLINE} s")
    start(*serve)
    poll_until(connected, lambda: "the driver did not connect again")
    assert operator.activate(target="leg").state == "active"

    other = drive()
    other.wait_for(r"refused \(name\)")
    assert other.process.wait(60) == 2
    driver.process.send_signal(signal.SIGTERM)
    assert driver.process.wait(60) == 0
    poll_until(lambda: operator.state().detail["connected"] == [], lambda: "the driver did not say Bye")


def test_steps_of_the_driver_follow_the_protocol(drive: Callable[..., Command], endpoint: str) -> None:
    """The fake server leaves one Step, Step n, without an answer. It answers Step n + 2 with the safe action.

    Step n is the first Step after Step 2 that reports an Action of the policy. So the driver can apply this action
    again.
    """
    bus = Bus()
    receives = (Step, messages.Command, Reply, LifecycleChange)
    bus.serve(endpoint, ServerLink("policy", "policy", {"driver": receives}, {}, session=7))
    driver = drive("--autostart")
    steps: list[Step] = []
    silent: int | None = None
    end = time.monotonic() + 60
    while silent is None or len(steps) < silent + 5 or sum(step.origin == 1 for step in steps) < 3:
        assert time.monotonic() < end
        for origin, message in bus.receive(0.1):
            if isinstance(origin, Peer) and isinstance(message, Step):
                steps.append(message)
                if silent is None and message.sequence >= 3 and message.origin == 1:
                    silent = message.sequence
                else:
                    torque = np.array([[2.0 if message.sequence == 1 else 0.25]], np.float32)  # 2 is beyond the limit
                    version = 0 if silent is not None and message.sequence == silent + 2 else 9
                    answer = Action(message.source, message.incarnation, message.sequence, 0, torque, version, 1, 42)
                    bus.send(origin, answer)
    driver.process.send_signal(signal.SIGINT)
    assert driver.process.wait(60) == 0
    bus.close()
    # On a busy machine an Action may arrive after its period. Only a Step with origin 1 reports an applied Action of
    # the policy. So the test compares only such Steps with an Action.
    numbers = list(range(len(steps)))
    assert [step.sequence for step in steps] == [step.transitions for step in steps] == numbers
    assert [int(step.phase[0]) for step in steps] == [Phase.FIRST, *(Phase.MID for _ in numbers[1:])]
    assert (steps[0].origin, steps[0].reward.tolist(), steps[0].action.tolist()) == (0, [0.0], [[0.0]])
    for before, step in itertools.pairwise(steps):
        if step.origin == 1:
            assert (step.answered, step.weights_version, step.noise_kind, step.noise_seed) == (
                before.sequence,
                9,
                1,
                42,
            )
            assert step.action.tolist() == [[1.0 if before.sequence == 1 else 0.25]]
        else:
            assert step.origin in (2, 4)  # 2: the last action again; 4: the safe action
            assert (step.answered, step.weights_version, step.noise_kind) == (step.sequence, 0, 0)
    held = steps[silent + 1]
    assert (held.origin, held.action.tolist()) == (2, steps[silent].action.tolist())
