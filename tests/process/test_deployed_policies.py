"""The policy of a running robot changes: through a learner, or through an operator."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgpack
import numpy as np
import yaml
import zmq

from td3_robot.bundle import sha256
from td3_robot.messages import PROTOCOL_VERSION, Weights, Welcome
from td3_robot.transport import codec
from tests.process.deployed_robot import (
    AUTOMATIC,
    EXAMPLE,
    PATIENT,
    POLICY,
    SAFE,
    Robot,
    bundle,
    periods,
)


class Learner:
    """A fake learner that sends the messages that the test chooses."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._client = b""

    def welcome(self) -> None:
        """Wait for the policy server's Hello and answer it with a Welcome."""
        while True:
            assert self._socket.poll(60_000), "no Hello"
            self._client, topic, payload = self._socket.recv_multipart()
            if topic == b"hello" and msgpack.unpackb(payload)["role"] == "policy":
                break
        self.send(b"welcome", codec.encode(Welcome(PROTOCOL_VERSION, "learner", 1)))

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._client, *frames])

    def weights(self, version: int, payload: bytes, digest: str = "") -> None:
        self.send(b"weights", codec.encode(Weights(version, 0, 0, digest or sha256(payload), payload)))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_server_refuses_bad_weights_and_keeps_good_weights_after_the_learner_ends(
    robot: Robot, rng: np.random.Generator
) -> None:
    """Bad weights change nothing. The server adopts good weights live and keeps them after the learner ends."""
    learner = Learner(f"ipc://{robot.folder}/learner")
    try:
        robot.configure(learner=f"ipc://{robot.folder}/learner", **PATIENT)
        robot.serve()
        robot.drive()
        begin = robot.running()
        learner.welcome()
        for size in (0, 1, 1000):
            learner.send(b"weights", rng.bytes(size))
            learner.send(rng.bytes(size))
        learner.weights(9, bundle(0.25).encode(), digest="0" * 64)
        learner.weights(9, rng.bytes(1000))
        bias = {"actor.1.bias": np.full(1, np.nan, np.float32)}
        learner.weights(9, bundle(0.25, **bias).encode())
        learner.weights(2, bundle(0.25).encode())  # older than the served version
        robot.wait("the refusals", lambda: robot.log("server.log").count("refused:") >= 4)
        assert set(robot.record()[begin:]) <= {"observe good", POLICY}
        learner.weights(9, bundle(0.25).encode())
        taught = robot.wait_for("apply 0.250000", begin)
    finally:
        learner.close()
    robot.wait("a second without a learner", lambda: periods(robot.record()[taught:]) > 50)
    assert set(robot.record()[taught:]) == {"observe good", "apply 0.250000"}


def test_remote_learner_adapts_the_policy_of_a_running_robot(robot: Robot) -> None:
    """A real learner gets the driver's Steps and sends Weights. After the learner ends, the robot keeps moving."""
    robot.configure(learner=f"ipc://{robot.folder}/learner", **AUTOMATIC)
    content = {
        "pacing": {"mode": "realtime"},
        "network": {"hidden": [4]},
        "evaluation": {"every": 0},
        "learner": {"learning_starts": 20, "batch_size": 16},
        "endpoints": {"learner": f"ipc://{robot.folder}/learner"},
    }
    (robot.folder / "run").mkdir()
    (robot.folder / "run" / "config.yaml").write_text(yaml.safe_dump(content))
    robot.serve()
    robot.drive()
    begin = robot.running()
    learner = robot._start("learner.log", "-m", "td3_robot.cli.main", "learner", "--run", "run")
    robot.wait(
        "actions of the learner's policy while it learns",
        lambda: len({*robot.record()[begin:], SAFE, POLICY, "observe good"}) > 5,
    )
    silent, again = "link learner: the server at ipc://", "link learner: the server answers again"

    def count(text: str) -> list[int]:
        return [robot.log(name).count(text) for name in ("server.log", "driver.log")]

    # The learner may begin more than 5 s after the server and the driver. Then there is a first warning.
    robot.wait("the learner's answers", lambda: count(silent) == count(again))
    warnings = count(silent)
    learner.kill()
    learner.wait()
    end = len(robot.record())
    robot.wait("a second without the learner", lambda: periods(robot.record()[end:]) > 50)
    robot.wait("actions of the learner's policy", lambda: {*robot.record()[-10:]} - {SAFE, POLICY, "observe good"})
    robot.wait("a warning of each", lambda: count(silent) == [number + 1 for number in warnings])
    state = json.loads(robot.operator("state", "--json").stdout)
    assert state["loop"]["learner_silent_s"] > 5
    robot._start("learner.log", "-m", "td3_robot.cli.main", "learner", "--run", "run")
    robot.wait("the learner's answers", lambda: count(again) == count(silent))
    assert "learner_silent_s" not in json.loads(robot.operator("state", "--json").stdout).get("loop", {})


def test_operator_loads_and_rolls_back_policies_and_ends_the_example_driver(robot: Robot) -> None:
    """Run the unchanged example driver. While the driver runs, load and roll back policies."""
    robot.configure(**PATIENT)
    server = robot.serve("--frozen")
    driver = robot._start("driver.log", str(EXAMPLE), "--config", "driver.yaml")

    def state(*words: str) -> Any:
        answer = robot.operator(*words, "--json")
        return json.loads(answer.stdout) if answer.stdout else {}

    robot.wait("the robot", lambda: state("state").get("connected") == ["pendulum"])
    assert state("state", "--target", "pendulum")["state"] == "active"
    bundle(0.25, version=8).save(robot.folder / "new.safetensors")
    assert (state("load", "new.safetensors")["version"], state("state")["frozen"]) == (8, True)
    assert "not newer than version 8" in robot.operator("load", "policy.safetensors").stderr
    assert state("rollback")["version"] == 3
    for target, process in (("pendulum", driver), ("policy", server)):
        assert robot.operator("shutdown", "--target", target).returncode == 0
        assert process.wait(120) == 0
    nobody = subprocess.run(
        [sys.executable, "-m", "td3_robot.cli.main", "node", "state", "--config", "robot.yaml", "--timeout", "0.2"],
        cwd=robot.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert nobody.returncode == 1
    assert nobody.stderr.startswith("td3-robot node: no answer from policy server at ipc://")
