"""Read the exported ROS 2 file with the mcap package and the message types of rosbags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader

from td3_robot.cli.main import main
from td3_robot.messages import Status
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import link as handshake
from tests.sessions import BEGIN, SECOND, entries_of

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
    assert set(found) == {"/leg_1/robot_0/joint_states", "/leg_1/robot_1/joint_states", "/diagnostics"}
    second = found["/leg_1/robot_1/joint_states"]
    assert second.name == ["knee", "hip"]
    assert second.position.tolist() == [4, 6]
    assert second.velocity[0] == 5
    assert np.isnan(second.velocity[1])
    assert second.effort.tolist() == [1, -1]
    assert second.header.stamp.sec == BEGIN // SECOND + 1
    assert second.header.stamp.nanosec == 0


def test_the_bytes_of_a_joint_state_match_a_hand_calculation(converted: Path) -> None:
    """The bytes are little-endian CDR: 4 header bytes, int32 sec, uint32 nanosec, strings with length and zero."""
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
    monkeypatch.delitem(sys.modules, "td3_robot.recording.ros2", raising=False)
    monkeypatch.delattr("td3_robot.recording.ros2", raising=False)
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
