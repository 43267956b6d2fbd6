"""Read the exported Foxglove file with independent readers: the mcap package and Google's protobuf."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcap.reader import make_reader

from td3_robot.cli.main import main
from td3_robot.messages import Step
from td3_robot.recording.poses import Poses
from td3_robot.recording.reader import Session
from td3_robot.specs import RobotSpec

pytest.importorskip("foxglove")
pytest.importorskip("google.protobuf")

from tests.recording.protobuf import decoder

SESSIONS = Path(__file__).parent.parent / "replay" / "sessions"


def read(path: Path) -> dict[str, list[tuple[str, Any, int]]]:
    """Return schema name, decoded message and time of each message, by topic."""
    found = defaultdict(list)
    decoders: dict[int, Callable[[bytes], Any]] = {}
    with path.open("rb") as file:
        for schema, channel, message in make_reader(file, validate_crcs=True).iter_messages():
            assert schema is not None
            if (channel.message_encoding, schema.encoding) == ("json", "jsonschema"):
                value = json.loads(message.data)
                assert json.loads(schema.data)["type"] == "object"
            else:
                assert (channel.message_encoding, schema.encoding) == ("protobuf", "protobuf")
                if schema.id not in decoders:
                    decoders[schema.id] = decoder(schema.name, schema.data)
                value = decoders[schema.id](message.data)
            found[channel.topic].append((schema.name, value, message.log_time))
    return found


@pytest.fixture(scope="module")
def walkers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Any, int]]]:
    """The messages for two simulators with two Walker2D robots each, by topic."""
    folder = tmp_path_factory.mktemp("walkers")
    assert main(["export", str(SESSIONS / "walkers.mcap"), "--out", str(folder), "--format", "foxglove"]) == 0
    return read(folder / "foxglove.mcap")


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """The recorded Steps of simulator sim-0."""
    session = Session([SESSIONS / "walkers.mcap"])
    return [m for _, m in session.messages((Step.NAME,)) if isinstance(m, Step) and m.source == "sim-0"]


def test_json_messages_name_each_channel(walkers: dict[str, Any], steps: list[Step]) -> None:
    found = walkers["/sim-0/step/1"]
    assert len(found) == len(steps) > 100
    times = [time for _, _, time in found]
    assert times == sorted(times)
    for (schema, values, _), step in zip(found, steps, strict=True):
        assert (schema, values["sequence"]) == ("td3_robot.Step", step.sequence)
        assert values["observation"]["torso.height"] == step.observation[1, 0]
        assert list(values["action"].values()) == step.action[1].tolist()
        assert values["reward"] == step.reward[1]


def test_joint_states_hold_the_recorded_values(walkers: dict[str, Any], steps: list[Step]) -> None:
    found = walkers["/sim-0/1/joint_states"]
    for (schema, message, _), step in zip(found, steps, strict=True):
        assert schema == "foxglove.JointStates"
        assert [joint.name for joint in message.joints][:2] == ["thigh_joint", "leg_joint"]
        assert [joint.position for joint in message.joints] == step.observation[1, 8:20:2].tolist()
        assert [joint.velocity for joint in message.joints] == step.observation[1, 9:20:2].tolist()
        assert [joint.effort for joint in message.joints] == step.action[1].tolist()
        assert not any(joint.HasField("acceleration") for joint in message.joints)


def test_frames_are_the_poses_of_the_links(walkers: dict[str, Any], steps: list[Step]) -> None:
    """Robots stand 2 m apart along y.

    A unit quaternion turns v into v + 2 w (axis × v) + 2 axis × (axis × v). Here, axis is (x, y, z) of the quaternion.
    """
    spec = spec_of("sim-0")
    poses = Poses(spec)
    frames = [m for _, m, _ in walkers["/tf"] if m.transforms[0].child_frame_id == "sim-0/1/torso"]
    track = frames[0].transforms[0].translation.y
    assert track % 2 == 0
    for message, step in zip(frames, steps, strict=True):
        pose = poses.step(step.observation[1], first=step.phase[1] == 0)
        assert len(message.transforms) == len(pose.positions[0]) == 7
        for transform, position, rotation in zip(message.transforms, pose.positions[0], pose.rotations[0], strict=True):
            assert transform.parent_frame_id == "world"
            place = transform.translation
            np.testing.assert_allclose([place.x, place.y - track, place.z], position, atol=1e-12)
            q = transform.rotation
            axis, vector = np.array([q.x, q.y, q.z]), np.array([0.3, -0.2, 0.9])
            turned = vector + 2 * q.w * np.cross(axis, vector) + 2 * np.cross(axis, np.cross(axis, vector))
            np.testing.assert_allclose(turned, rotation @ vector, atol=1e-12)


def test_the_scene_has_a_shape_for_each_part(walkers: dict[str, Any]) -> None:
    """The walker has 7 capsules: torso, 2 thighs, 2 legs, 2 feet. A foot lies along x: length 0.2 m, radius 0.06 m."""
    entities = {entity.frame_id: entity for entity in walkers["/sim-0/1/scene"][0][1].entities}
    assert sum(len(entity.cylinders) for entity in entities.values()) == 7
    assert sum(len(entity.spheres) for entity in entities.values()) == 14
    frames = {t.child_frame_id for _, m, _ in walkers["/tf"] for t in m.transforms}
    assert set(entities) <= frames
    [foot] = entities["sim-0/1/foot_joint"].cylinders
    assert (foot.size.x, foot.size.y) == pytest.approx((0.12, 0.12))
    assert foot.size.z == pytest.approx(0.2, abs=1e-6)
    q = foot.pose.orientation  # turns z (the axis of a cylinder) into x
    along = [2 * (q.x * q.z + q.w * q.y), 2 * (q.y * q.z - q.w * q.x), 1 - 2 * (q.x**2 + q.y**2)]
    assert np.abs(along) == pytest.approx([1, 0, 0], abs=1e-6)


def test_the_log_has_a_line_for_each_new_state(tmp_path: Path) -> None:
    assert main(["export", str(SESSIONS / "faulted.mcap"), "--out", str(tmp_path), "--format", "foxglove"]) == 0
    found = read(tmp_path / "foxglove.mcap")
    lines = [(message.name, message.message, message.level) for _, message, _ in found["/log"]]
    changes = [values for topic in found if topic.endswith("/lifecycle") for _, values, _ in found[topic]]
    assert {"active", "fault"} <= {change["state"] for change in changes}
    for change in changes:
        text = f"{change['state']}: {change['reason']}" if change["reason"] else change["state"]
        level = 4 if change["state"] == "fault" else 2  # ERROR and INFO
        assert (f"{change['node']} lifecycle", text, level) in lines
    assert all(lines[i] != lines[i + 1] for i in range(len(lines) - 1))


def test_the_layout_shows_topics_of_the_file(tmp_path: Path) -> None:
    assert main(["export", str(SESSIONS / "takeover.mcap"), "--out", str(tmp_path), "--format", "foxglove"]) == 0
    layout = json.loads((tmp_path / "foxglove_layout.json").read_text())
    panels = layout["configById"]
    assert panels["RawMessages!step"]["topicPath"] == "/leg/step"
    assert panels["Plot!reward"]["paths"][0]["value"] == "/leg/step.reward"
    assert {"/leg/step", "/log"} <= set(read(tmp_path / "foxglove.mcap"))
    assert json.dumps(layout["layout"]).count("!") == len(panels)


def test_the_layout_names_the_first_of_several_robots(tmp_path: Path) -> None:
    assert main(["export", str(SESSIONS / "walkers.mcap"), "--out", str(tmp_path), "--format", "foxglove"]) == 0
    panels = json.loads((tmp_path / "foxglove_layout.json").read_text())["configById"]
    shown = {panels["RawMessages!step"]["topicPath"], *panels["3D!robot"]["topics"]}
    assert shown == {"/sim-0/step/0", "/sim-0/0/scene"}
    assert shown <= set(read(tmp_path / "foxglove.mcap"))
    assert panels["Plot!reward"]["paths"][0]["value"] == "/sim-0/step/0.reward"
    assert panels["3D!robot"]["followTf"] == "sim-0/0/torso"


def test_the_exported_layout_of_a_training_is_the_shipped_layout(tmp_path: Path) -> None:
    from td3_robot.recording.foxglove_messages import LAYOUT

    assert main(["export", str(SESSIONS / "pendulum.mcap"), "--out", str(tmp_path), "--format", "foxglove"]) == 0
    assert (tmp_path / "foxglove_layout.json").read_bytes() == LAYOUT.read_bytes()
    assert "/sim-0/step" in read(tmp_path / "foxglove.mcap")


def test_existing_files_and_a_missing_package_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(SESSIONS / "takeover.mcap"), "--out", str(tmp_path), "--format", "foxglove"]
    (tmp_path / "foxglove_layout.json").write_text("{}")
    assert main(words) == 2
    assert "foxglove_layout.json' exists already; to replace it, add --force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    capsys.readouterr()
    assert main([*words, "--topics", "step"]) == 2
    assert "--topics selects tables; --format foxglove writes no tables" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "foxglove", None)
    monkeypatch.delitem(sys.modules, "td3_robot.recording.foxglove_messages", raising=False)
    monkeypatch.delattr("td3_robot.recording.foxglove_messages", raising=False)
    assert main([*words, "--force"]) == 2
    assert "needs foxglove, which is not installed; pip install 'td3-robot[foxglove]'" in capsys.readouterr().err


@given(st.tuples(*[st.floats(-1, 1)] * 4).filter(lambda q: sum(x * x for x in q) > 0.01))
def test_a_matrix_and_its_quaternion_are_the_same_rotation(values: tuple[float, float, float, float]) -> None:
    from td3_robot.recording.foxglove_messages import _quaternion

    x, y, z, w = np.array(values) / np.linalg.norm(values)
    matrix = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
    decode = decoder("foxglove.Quaternion", type(_quaternion(matrix)).get_schema().data)
    found = decode(_quaternion(matrix).encode())
    # q and -q are the same rotation, so the dot product of the two quaternions is 1 or -1.
    dot = abs(found.x * x + found.y * y + found.z * z + found.w * w)
    assert dot == pytest.approx(1, abs=1e-6)


def spec_of(source: str) -> RobotSpec:
    [hello, *_] = [h for e, h in Session([SESSIONS / "walkers.mcap"]).robots() if e.publisher == source]
    return RobotSpec.from_description(hello.spec)
