"""Real runs and recordings appear as ROS topics. A subscriber in another process reads the topics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from td3_robot_sims.tasks import spec

from td3_robot.cli.main import main
from td3_robot.messages import Action, Message, Step
from td3_robot.recording.reader import Session
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import link as handshake
from tests.conftest import Command
from tests.ros2.conftest import HIP_SECTION, SAFETY, World, moves
from tests.sessions import SECOND, entries_of

SESSIONS = Path(__file__).parents[1] / "replay" / "sessions"
FLOAT, ARRAY, TEXT, JOINTS, DIAGNOSTICS = (
    *("std_msgs/msg/Float64", "std_msgs/msg/Float64MultiArray", "std_msgs/msg/String"),
    *("sensor_msgs/msg/JointState", "diagnostic_msgs/msg/DiagnosticArray"),
)


class Listener:
    """The messages that a subscriber in another process receives.

    Attributes:
        got: the fields of each message, for each topic.
    """

    def __init__(self, world: World, topics: dict[str, str]) -> None:
        self._command = world.topics("listen", *(f"{topic}={kind}" for topic, kind in topics.items()))
        self._command.wait_for("^ready")
        self.got: dict[str, list[dict[str, Any]]] = {}

    def until(self, enough: Callable[[dict[str, list[dict[str, Any]]]], bool]) -> None:
        while not enough(self.got):
            topic, fields = json.loads(self._command.wait_for(r"^\["))
            self.got.setdefault(topic, []).append(fields)


@pytest.fixture
def ros(world: World) -> World:
    code = [world.python, "-c", "import rosbags.typesys, msgspec, zmq"]
    if subprocess.run(code, capture_output=True, check=False).returncode:
        pytest.skip(f"{world.python} has rclpy, but lacks packages of 'td3-robot[ros2]'")
    return world


def test_a_training_appears_as_ros_topics(ros: World, train: Callable[..., Command], tmp_path: Path) -> None:
    run = train(5_000_000, "learner.replay_ratio=0.05", "record=true")
    run.wait_for_steps(100)
    monitor = ros.monitor("--run", "run", "--ros-args", "-r", "__ns:=/walker")
    monitor.wait_for("the ROS node /walker/td3_robot_monitor publishes the messages")
    monitor.wait_for(r"^sim-0: 10 of 28 channels are in no joint message: torso\.height, ")
    base = "/walker/sim_0/robot_0"
    listener = Listener(ros, {
        f"{base}/joint_states": JOINTS,
        f"{base}/joint_commands": JOINTS,
        f"{base}/observation": ARRAY,
        f"{base}/observation/torso/height": FLOAT,
        f"{base}/reward": FLOAT,
        "/walker/policy/state+": TEXT,
        "/walker/sim_0/state+": TEXT,
        "/diagnostics": DIAGNOSTICS,
    })  # fmt: skip
    listener.until(
        lambda got: (
            len(got) == 8
            and len(got[f"{base}/joint_states"]) > 50
            and {"learner", "policy", "sim-0"}
            <= {status["name"] for it in got["/diagnostics"] for status in it["status"]}
            and got["/walker/policy/state"][-1] == got["/walker/sim_0/state"][-1] == {"data": "active"}
        )
    )
    run.interrupt()
    assert run.finish() == 130
    assert monitor.finish() == 0, monitor.output()  # the monitor ends with the run

    got = listener.got
    for states in (got["/walker/policy/state"], got["/walker/sim_0/state"]):
        # A node sends a late monitor all its changes of state.
        assert states in ([{"data": "active"}], [{"data": "inactive"}, {"data": "active"}])
    names = [channel.name for channel in spec("Walker2D").observations]
    assert got[f"{base}/observation"][0]["layout"]["dim"][0]["label"].split(", ") == names
    joints = [name.removesuffix(".position") for name in names if name.endswith(".position")]
    index = {name: number for number, name in enumerate(names)}
    session = Session([tmp_path / "run" / "session.mcap"])
    steps = [step for _, step in session.messages_of(Step)]
    states = {
        (
            *(float(step.observation[0, index[f"{joint}.position"]]) for joint in joints),
            *(float(step.observation[0, index[f"{joint}.velocity"]]) for joint in joints),
            *step.action[0].tolist(),
        )
        for step in steps
    }
    for state in got[f"{base}/joint_states"]:
        assert state["name"] == joints
        assert (*state["position"], *state["velocity"], *state["effort"]) in states
    commands = {tuple(action.action[0].tolist()) for _, action in session.messages_of(Action)}
    for message in got[f"{base}/joint_commands"]:
        assert (message["name"], message["position"]) == (joints, [])
        assert tuple(message["effort"]) in commands
    assert {it["data"] for it in got[f"{base}/observation/torso/height"]} <= {
        float(step.observation[0, 0]) for step in steps
    }
    assert {it["data"] for it in got[f"{base}/reward"]} <= {float(step.reward[0]) for step in steps}


def test_a_robot_appears_as_ros_topics(ros: World, command: Callable[..., Command]) -> None:
    """``td3-robot play`` plays a driver's recording. A remapping moves the joint states to /joint_states for RViz."""
    monitor = ros.monitor("--endpoint", "ipc://m", "--ros-args", "-r", "leg/robot_0/joint_states:=joint_states")
    monitor.wait_for("the ROS node /td3_robot_monitor publishes the messages")
    listener = Listener(ros, {"/joint_states": JOINTS, "/leg/robot_0/commands": ARRAY, "/policy/leg/state+": TEXT})
    command("play", str(SESSIONS / "deployed.mcap"), "--monitor", "ipc://m", "--loop")
    listener.until(lambda got: len(got) == 3 and len(got["/joint_states"]) > 50)
    monitor.interrupt()
    assert monitor.finish() == 130, monitor.output()
    recorded = {
        (*step.observation[0].tolist(), *step.action[0].tolist())
        for _, step in Session([SESSIONS / "deployed.mcap"]).messages_of(Step)
    }
    for state in listener.got["/joint_states"]:
        assert len(state["name"]) == 1
        assert (*state["position"], *state["velocity"], *state["effort"]) in recorded
    assert listener.got["/leg/robot_0/commands"][0]["layout"]["dim"][0]["label"] == "torque"


def test_the_monitor_prints_a_new_remark_even_if_no_topic_is_new(
    ros: World, command: Callable[..., Command], make_step: Callable[..., Step], save: Callable[..., Path]
) -> None:
    """The robot restarts with one channel fewer. So the monitor has a new remark about channels, but no new topic."""
    hip, height = Channel("hip.position", "rad", -9.0, 9.0), Channel("torso.height", "m", -9.0, 9.0)
    messages: list[tuple[str, Message]] = []
    for channels in ((hip, height), (height,)):
        spec = RobotSpec("Leg", channels, (Channel("hip.torque", "1", -9.0, 9.0),), 0.02)
        observation, action = np.zeros((1, len(channels)), np.float32), np.zeros((1, 1), np.float32)
        messages += [
            ("leg", handshake.hello("simulator", "leg", client=5, robots=1, spec=spec)),
            ("leg", make_step(source="leg", observation=observation, action=action)),
        ]
    monitor = ros.monitor("--endpoint", "ipc://m")
    monitor.wait_for("publishes the messages")
    command("play", str(save("a.mcap", entries_of(messages, 10 * SECOND))), "--monitor", "ipc://m")
    monitor.wait_for("^leg: 1 of 3 channels are in no joint message: torso.height;")
    monitor.wait_for(
        "^leg: no /leg/robot_0/joint_states, because no observation has a name like JOINT.position; "
        "channels in no joint message: torso.height"
    )


@pytest.mark.usefixtures("hip")
def test_a_robot_under_ros_appears_as_ros_topics_while_its_driver_runs(ros: World) -> None:
    """The driver reads the joint from ROS. The monitor publishes the driver's observation as a joint state."""
    endpoints = {link: f"ipc://{ros.folder / link}.sock" for link in ("policy", "monitor")}
    config = ros.configure(endpoints=endpoints, safety=SAFETY, ros2=HIP_SECTION)
    ros.robot()
    console = ros.console()
    ros.server()
    ros.driver("--name", "leg")
    moves(console)
    listener = Listener(ros, {
        "/leg/robot_0/joint_states": JOINTS,
        "/leg/robot_0/action/acceleration": FLOAT,
        "/leg/robot_0/commands": ARRAY,
        "/policy/state+": TEXT,
    })  # fmt: skip
    monitor = ros.monitor("--config", str(config))
    active = {"data": "active"}  # the first state may be older than the activation
    listener.until(
        lambda got: len(got) == 4 and len(got["/leg/robot_0/joint_states"]) > 50 and got["/policy/state"][-1] == active
    )
    monitor.interrupt()
    assert monitor.finish() == 130, monitor.output()
    for state in listener.got["/leg/robot_0/joint_states"]:
        assert state["name"] == ["Hip"]
        assert len(state["position"]) == len(state["velocity"]) == 1


@pytest.mark.parametrize("name", ["deployed", "pendulum", "walkers"])
def test_ros_decodes_an_exported_recording(ros: World, tmp_path: Path, name: str) -> None:
    """A node publishes the bytes of the file, as ``ros2 bag play`` does. ROS decodes them in the subscriber."""
    mcap_reader, rosbags = pytest.importorskip("mcap.reader"), pytest.importorskip("rosbags.highlevel")
    assert main(["export", str(SESSIONS / f"{name}.mcap"), "--out", str(tmp_path), "--format", "ros2"]) == 0
    expected: dict[str, list[Any]] = {}
    with rosbags.AnyReader([tmp_path / "ros2.mcap"]) as bag:
        for connection, _, data in bag.messages():
            message = bag.deserialize(data, connection.msgtype)
            expected.setdefault(connection.topic, []).append(as_maps(message))
    lines = []
    kinds = {}
    with (tmp_path / "ros2.mcap").open("rb") as file:
        for schema, channel, message in mcap_reader.make_reader(file).iter_messages():
            kinds[channel.topic] = schema.name
            lines.append(json.dumps([channel.topic, schema.name, message.data.hex()]))
    (tmp_path / "messages").write_text("\n".join(lines), encoding="utf-8")
    listener = Listener(ros, kinds)
    ros.topics("play", str(tmp_path / "messages")).wait_for("^played")
    listener.until(lambda got: sum(map(len, got.values())) == len(lines))
    assert listener.got == expected


def as_maps(value: Any) -> Any:
    """Return a message of rosbags as maps, lists, numbers and text, without the constants of its type."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_maps(getattr(value, name)) for name in value.__dataclass_fields__ if name[0].islower()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [as_maps(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("rclpy", "source the setup file of your ROS 2 installation"),
        ("rosbags.typesys", "pip install 'td3-robot[ros2]'"),
    ],
)
def test_a_missing_package_is_reported_in_one_line(
    module: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("td3_robot.recording.ros2_messages", "td3_robot.ros2.monitor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(name, raising=False)
    assert main(["ros2", "monitor", "--run", "runs/walker2d"]) == 2
    error = capsys.readouterr().err
    assert f"needs {module}, which is not installed; {advice}" in error
    assert error.count("\n") == 1
