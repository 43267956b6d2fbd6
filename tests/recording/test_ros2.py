"""Read the exported ROS 2 file with independent readers: the mcap package, rosbags and mcap-ros2-support."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader

from td3_robot.cli.main import main
from td3_robot.messages import Action, Evaluation, LifecycleChange, Message, Phase, Status, Step
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import link as handshake
from tests.sessions import BEGIN, SECOND, entries_of

SESSIONS = Path(__file__).parent.parent / "replay" / "sessions"

typesys = pytest.importorskip("rosbags.typesys")
Make = Callable[..., Any]


@pytest.fixture
def converted(make_step: Make, save: Make, tmp_path: Path) -> Path:
    """The ROS 2 file for two robots with a knee and a hip. The hip has no velocity channel."""
    spec = RobotSpec(
        "Leg",
        tuple(Channel(name, "rad", -5.0, 5.0) for name in ("knee.position", "knee.velocity", "hip.position")),
        (Channel("knee.torque", "N·m", -1.0, 1.0), Channel("hip.torque", "N·m", -1.0, 1.0)),
        0.02,
    )
    hello = handshake.hello("simulator", "leg-1", client=5, robots=2, spec=spec)
    observation = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    action = np.array([[0.25, -0.5], [1, -1]], np.float32)
    step = make_step(1, 2, source="leg-1", observation=observation, action=action)
    status = Status("leg-1", "failed", "it fell", {"lag_s": 0.5}, {"steps": 3})
    path = save("a.mcap", entries_of([("leg-1", hello), ("leg-1", step), ("leg-1", status)], SECOND))
    assert main(["export", str(path), "--out", str(tmp_path / "t"), "--format", "ros2"]) == 0
    return tmp_path / "t" / "ros2.mcap"


def read(path: Path) -> dict[str, Any]:
    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    found = {}
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        assert reader.get_header().profile == "ros2"
        for schema, channel, message in reader.iter_messages():
            assert schema is not None
            assert (channel.message_encoding, schema.encoding) == ("cdr", "ros2msg")
            found[channel.topic] = store.deserialize_cdr(message.data, schema.name)
    return found


def test_joint_states_hold_the_recorded_values(converted: Path) -> None:
    found = read(converted)
    assert {"/leg_1/robot_0/joint_states", "/leg_1/robot_1/joint_states", "/diagnostics"} <= set(found)
    second = found["/leg_1/robot_1/joint_states"]
    assert second.name == ["knee", "hip"]
    assert second.position.tolist() == [4, 6]
    assert second.velocity[0] == 5
    assert np.isnan(second.velocity[1])
    assert second.effort.tolist() == [1, -1]
    assert second.header.stamp.sec == BEGIN // SECOND + 1
    assert second.header.stamp.nanosec == 0


def test_the_bytes_of_a_joint_state_match_a_hand_calculation(converted: Path) -> None:
    """The bytes are little-endian CDR: 4 header bytes, int32 sec, uint32 nanosec, an empty frame_id, and the names.

    The names begin with their count, 2. A string begins with its length. The length includes the zero byte at the end
    of the string. More zero bytes pad a string to a multiple of 4.
    """
    with converted.open("rb") as file:
        [data] = [
            m.data
            for _, channel, m in make_reader(file).iter_messages()
            if channel.topic.endswith("robot_1/joint_states")
        ]
    sec = (BEGIN // SECOND + 1).to_bytes(4, "little").hex()
    assert data[:40].hex() == "00010000" + sec + "00000000" + "01000000" + "00000000" + "02000000" + (
        "05000000" + "6b6e656500" + "000000" + "04000000"
    )
    assert data[40:44] == b"hip\0"


def test_a_missing_rosbags_package_is_reported_with_the_install_command(
    save: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rosbags.typesys", None)
    monkeypatch.delitem(sys.modules, "td3_robot.recording.ros2_messages", raising=False)
    monkeypatch.delattr("td3_robot.recording.ros2_messages", raising=False)
    path = save("b.mcap", [])
    assert main(["export", str(path), "--out", str(tmp_path / "u"), "--format", "ros2"]) == 2
    assert not (tmp_path / "u").exists()
    assert "needs rosbags.typesys, which is not installed; pip install 'td3-robot[ros2]'" in capsys.readouterr().err


def test_diagnostics_hold_the_recorded_values(converted: Path) -> None:
    (status,) = read(converted)["/diagnostics"].status
    assert int(np.uint8(status.level)) == 2
    assert (status.name, status.message) == ("leg-1", "failed: it fell")
    assert {item.key: item.value for item in status.values} == {"lag_s": "0.5", "steps": "3"}


def test_the_schemas_match_the_ros_definitions(converted: Path) -> None:
    """The message definitions in the file equal those in rosbags."""
    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    with converted.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    for schema in summary.schemas.values():
        parsed = typesys.get_types_from_msg(schema.data.decode(), schema.name)
        for name, definition in parsed.items():
            assert definition == store.fielddefs[name], name


@pytest.fixture
def exported(save: Make, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``exported(messages)`` exports a recording of these messages, and returns the newest message of each topic."""

    def run(messages: list[tuple[str, Message]]) -> dict[str, Any]:
        path = save("s.mcap", entries_of(messages, SECOND))
        assert main(["export", str(path), "--out", str(tmp_path / "s"), "--format", "ros2"]) == 0
        return read(tmp_path / "s" / "ros2.mcap")

    return run


def robot(observations: dict[str, str], actions: dict[str, str]) -> RobotSpec:
    """Return a specification from the names and units of channels."""
    channels = (tuple(Channel(n, unit, -9.0, 9.0) for n, unit in kind.items()) for kind in (observations, actions))
    return RobotSpec("Leg", *channels, 0.02)


def hello(spec: RobotSpec, source: str = "leg") -> tuple[str, Message]:
    return source, handshake.hello("simulator", source, client=5, robots=1, spec=spec)


def one_step(make_step: Make, observations: int, actions: int, **fields: Any) -> tuple[str, Step]:
    """Return the publisher ``leg`` and its Step, with the observations 1, 2, 3, … and the actions 0.25, 0.5, …"""
    observation = np.arange(1, observations + 1, dtype=np.float32)[None]
    action = np.arange(1, actions + 1, dtype=np.float32)[None] / 4
    return "leg", make_step(1, 1, source="leg", observation=observation, action=action, **fields)


@pytest.mark.parametrize(
    ("observations", "actions", "joints", "position", "velocity", "effort", "command"),
    [
        # names of the form JOINT.FIELD
        (
            {"b.velocity": "1", "a.position": "1"},
            {"a.torque": "1", "b.torque": "1"},
            ["a", "b"],
            [2, None],
            [None, 1],
            [0.25, 0.5],
            {"effort": [0.25, 0.5]},
        ),
        # if the name has no field, the unit gives the field; no action drives `torso`, so `torso` is not a joint
        (
            {"torso": "rad", "hip": "rad", "hip_vel": "1"},
            {"hip": "rad"},
            ["hip"],
            [2],
            [3],
            [],
            {"position": [0.25]},
        ),
        # names with ``_``, and other words for the same fields
        (
            {"hip_pos": "rad", "target_pos": "m", "hip_effort": "N·m"},
            {"hip_speed": "rad/s"},
            ["hip"],
            [1],
            [],
            [3],
            {"velocity": [0.25]},
        ),
        # if the only joint has no name, it gets the robot's name
        (
            {"angle": "rad", "velocity": "rad/s"},
            {"torque": "N·m"},
            ["Leg"],
            [1],
            [2],
            [0.25],
            {"effort": [0.25]},
        ),
        # neither the name nor the unit of the action gives a field, so there are no joint commands
        ({"angle": "rad", "velocity": "rad/s"}, {"push": "1"}, ["Leg"], [1], [2], [], None),
    ],
)
def test_joints_are_found_by_names_and_units(
    make_step: Make,
    exported: Callable[..., dict[str, Any]],
    observations: dict[str, str],
    actions: dict[str, str],
    joints: list[str],
    position: list[float | None],
    velocity: list[float | None],
    effort: list[float | None],
    command: dict[str, list[float]] | None,
) -> None:
    step = one_step(make_step, len(observations), len(actions))
    answer = Action("leg", 0, 1, 0, step[1].action, 7, 0, 0)
    found = exported([hello(robot(observations, actions)), step, ("policy", answer)])
    state = found["/leg/robot_0/joint_states"]
    assert state.name == joints

    def values(array: Any) -> list[float | None]:
        return [None if np.isnan(value) else value for value in array.tolist()]

    assert [values(field) for field in (state.position, state.velocity, state.effort)] == [position, velocity, effort]
    commands = found.get("/leg/robot_0/joint_commands")
    fields = ("position", "velocity", "effort")
    sent = commands and {field: values(getattr(commands, field)) for field in fields if len(getattr(commands, field))}
    assert sent == command


def test_a_robot_without_joints_has_named_channels(
    make_step: Make, exported: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two names differ only in a character that ROS does not allow. One name begins with a digit."""
    spec = robot({"torso.height": "m", "a-b": "1", "a b": "1", "2nd.θ": "1", "torso": "1"}, {"left throttle": "1"})
    step = one_step(make_step, 5, 1)
    found = exported([hello(spec), step, ("policy", Action("leg", 0, 1, 0, step[1].action, 7, 0, 0))])
    base = "/leg/robot_0"
    assert f"{base}/joint_states" not in found
    assert f"{base}/joint_commands" not in found
    plotted = {topic.removeprefix(base): m.data for topic, m in found.items() if "/observation/" in topic}
    assert plotted == {
        "/observation/torso/height": 1,
        "/observation/a_b": 2,
        "/observation/a_b_2": 3,
        "/observation/x2nd/x": 4,
        "/observation/torso": 5,
    }
    assert found[f"{base}/action/left_throttle"].data == 0.25
    whole = found[f"{base}/observation"]
    assert whole.data.tolist() == [1, 2, 3, 4, 5]
    [dimension] = whole.layout.dim
    assert (dimension.label, dimension.size) == ("torso.height, a-b, a b, 2nd.θ, torso", 5)
    commands = found[f"{base}/commands"]
    assert (commands.layout.dim[0].label, commands.data.tolist()) == ("left throttle", [0.25])
    assert capsys.readouterr().err == (
        "leg: no /leg/robot_0/joint_states, because no observation has a name like JOINT.position; "
        "channels in no joint message: torso.height, a-b, a b, 2nd.θ, torso, …; "
        "the topics observation and action hold every channel\n"
    )


def test_channels_that_belong_to_no_joint_are_reported(
    make_step: Make, exported: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = robot({"hip.position": "rad", "torso.height": "m"}, {"hip.torque": "1"})
    exported([hello(spec), one_step(make_step, 2, 1)])
    assert capsys.readouterr().err == (
        "leg: 1 of 3 channels are in no joint message: torso.height; the topics observation and action hold every "
        "channel\n"
    )


@pytest.mark.parametrize("spec", [None, robot({"a": "1"}, {"b": "1"})])
def test_steps_without_a_matching_specification_have_numbered_channels(
    spec: RobotSpec | None,
    make_step: Make,
    exported: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = exported([one_step(make_step, 2, 1), *([hello(spec)] if spec else [])])
    assert found["/leg/robot_0/observation/channel_1"].data == 2
    assert (
        "leg: no matching specification is known, so the channels have the names channel_0" in capsys.readouterr().err
    )


def test_rewards_episodes_states_and_evaluations_are_exported(
    make_step: Make, exported: Callable[..., dict[str, Any]]
) -> None:
    spec = robot({"a": "1"}, {"b": "1"})
    step = one_step(
        make_step,
        1,
        1,
        reward=np.array([1.5], np.float32),
        episode=np.array([3], np.uint64),
        episode_step=np.array([40], np.uint32),
        phase=np.array([Phase.TRUNCATED], np.uint8),
        origin=2,
        weights_version=9,
    )
    change = LifecycleChange("policy/leg", "active", "fault", "no Step for 100 ms", 1)
    evaluation = Evaluation(4, 0, 0, np.array([1.0, 4.0]), np.array([5, 6], np.uint32))
    found = exported([hello(spec), step, ("policy", change), ("evaluator", evaluation)])
    expected = {
        "robot_0/reward": 1.5,
        "robot_0/episode": 3,
        "robot_0/episode_step": 40,
        "robot_0/phase": 3,
        "action_origin": 2,
        "weights_version": 9,
    }
    assert {topic: found[f"/leg/{topic}"].data for topic in expected} == expected
    assert found["/policy/leg/state"].data == "fault"
    [status] = found["/diagnostics"].status
    assert (int(status.level), status.name) == (2, "policy/leg lifecycle")
    assert status.message == "fault: no Step for 100 ms"
    assert found["/evaluation/returns"].data.tolist() == [1, 4]


def test_after_a_restart_with_other_channels_the_topics_have_the_new_channel_names(
    make_step: Make, exported: Callable[..., dict[str, Any]]
) -> None:
    found = exported([
        hello(robot({"a": "1"}, {"b": "1"})), one_step(make_step, 1, 1),
        hello(robot({"c": "1"}, {"d": "1"})), one_step(make_step, 1, 1),
    ])  # fmt: skip
    assert {"/leg/robot_0/observation/a", "/leg/robot_0/observation/c"} <= found.keys()
    assert found["/leg/robot_0/observation"].layout.dim[0].label == "c"


def test_two_sources_with_similar_names_keep_their_own_topics(
    make_step: Make, exported: Callable[..., dict[str, Any]]
) -> None:
    spec = robot({"a": "1"}, {"b": "1"})
    steps = []
    for number, source in enumerate(("sim-0", "sim_0")):
        observation = np.array([[number]], np.float32)
        step = make_step(1, 1, source=source, observation=observation, action=np.zeros((1, 1), np.float32))
        steps += [hello(spec, source), (source, step)]
    found = exported(steps)
    assert found["/sim_0/robot_0/observation/a"].data == 0
    assert found["/sim_0_2/robot_0/observation/a"].data == 1


def test_a_recording_without_messages_to_convert_is_refused(
    save: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save("e.mcap", entries_of([hello(robot({"a": "1"}, {"b": "1"}))]))
    assert main(["export", str(path), "--out", str(tmp_path / "e"), "--format", "ros2"]) != 0
    assert "holds no message to convert; it must hold one of action, evaluation, " in capsys.readouterr().err
    assert not (tmp_path / "e" / "ros2.mcap").exists()


@pytest.mark.parametrize("name", ["deployed", "pendulum", "walkers", "restarted"])
def test_independent_readers_decode_every_message(name: str, tmp_path: Path) -> None:
    """rosbags decodes with the definitions in the file. mcap-ros2-support, if installed, gives the same messages."""
    assert main(["export", str(SESSIONS / f"{name}.mcap"), "--out", str(tmp_path), "--format", "ros2"]) == 0
    from rosbags.highlevel import AnyReader

    by_rosbags: list[tuple[str, str, Any]] = []
    with AnyReader([tmp_path / "ros2.mcap"]) as bag:
        for connection, time, data in bag.messages():
            by_rosbags.append((connection.topic, time, plain(bag.deserialize(data, connection.msgtype))))
    joints = [message for topic, _, message in by_rosbags if topic.endswith("/joint_states")]
    if name != "pendulum":
        assert joints
        assert all(message["name"] and len(message["velocity"]) == len(message["name"]) for message in joints)
    decoder = pytest.importorskip("mcap_ros2.decoder")
    with (tmp_path / "ros2.mcap").open("rb") as file:
        reader = make_reader(file, decoder_factories=[decoder.DecoderFactory()])
        decoded = [(c.topic, m.log_time, plain(d)) for _, c, m, d in reader.iter_decoded_messages()]
    assert sorted(map(repr, decoded)) == sorted(map(repr, by_rosbags))


def plain(value: Any) -> Any:
    """Return a decoded message as maps, lists, numbers and text. NaN becomes text, because it differs from itself."""
    if hasattr(value, "__slots__") or hasattr(value, "__dataclass_fields__"):
        names = getattr(value, "__dataclass_fields__", None) or value.__slots__
        return {name: plain(getattr(value, name)) for name in names if name[0].islower()}  # no constants
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return int.from_bytes(value, "little")
    return "nan" if value != value else value
