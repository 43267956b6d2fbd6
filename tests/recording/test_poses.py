"""The poses that ``Poses`` computes from observations equal the poses of the links in PyBullet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.recording.poses import Pose, Poses, Robot, ends, known, radii, read_links, robots
from td3_robot.specs import Channel, RobotSpec

pybullet = pytest.importorskip("pybullet")

from td3_robot_sims.backends.bullet.locomotion import Locomotion  # noqa: E402
from td3_robot_sims.backends.bullet.robots import MODELS, specification  # noqa: E402
from td3_robot_sims.backends.bullet.world import World  # noqa: E402

from tests.recording.links import describe  # noqa: E402

SEED = 7
STEPS = 60  # about a second


@pytest.fixture(params=MODELS)
def environment(request: pytest.FixtureRequest) -> Iterator[Locomotion]:
    made = Locomotion(MODELS[request.param], SEED)
    made.reset(SEED)
    yield made
    made.close()


def simulated(world: World) -> Pose:
    """Return PyBullet's pose of the torso and of the links with a joint.

    PyBullet gives the place of a link's centre of mass. A Pose has the place of the link's joint. In these models, the
    two places are the same for each link with a joint.
    """
    world.body()  # fills the arrays of the client
    client = world.client
    states = [client.links[7 * joint : 7 * joint + 7] for joint in (world._torso, *world._joints) if joint >= 0]
    if world._torso < 0:  # the torso is the root link
        states.insert(0, client.positions[:7])
    matrices = [np.reshape(pybullet.getMatrixFromQuaternion(state[3:]), (3, 3)) for state in states]
    return Pose(np.array([[state[:3] for state in states]]), np.array([matrices]))


def test_the_pose_equals_that_of_pybullet(environment: Locomotion) -> None:
    """The Humanoid's model turns two links by 0.004 rad. links.json ignores this turn.

    At a distance of 1.2 m from such a link, this causes an error of 5 mm.
    """
    tolerance = 0.01 if environment.spec.name == "Humanoid" else 1e-4
    world, random, poses = environment._world, np.random.default_rng(SEED), Poses(environment.spec)
    for _ in range(20):
        environment.reset()
        world.reset([random.uniform(low, low + width) for low, width in world.joint_ranges])
        world.tilt(random.uniform(0, 0.5), random.uniform(-3, 3))
        observation, _ = environment._observe()
        computed, expected = poses.step(observation, first=True), simulated(world)
        relative = [pose.positions - pose.positions[:, :1] for pose in (computed, expected)]
        np.testing.assert_allclose(*relative, atol=tolerance)
        np.testing.assert_allclose(computed.rotations, expected.rotations, atol=tolerance)
        assert computed.positions[0, 0, 2] == pytest.approx(expected.positions[0, 0, 2], abs=1e-4)


def test_the_place_on_the_floor_follows_the_torso(environment: Locomotion) -> None:
    """``Poses`` adds velocity · 16.5 ms in each step, so it ignores how the velocity changes within a step.

    The error is at most 16.5 ms times the sum of all changes of the velocity: 5 cm for a sum of 3 m/s.
    """
    random, poses = np.random.default_rng(SEED), Poses(environment.spec)
    observation = environment.reset(SEED)
    poses.step(observation, first=True)
    start = simulated(environment._world).positions[0, 0, :2]
    for _ in range(STEPS):
        action = random.uniform(-1, 1, environment.spec.action_size).astype(np.float32)
        observation, _, terminated, _ = environment.step(action)
        place = poses.step(observation, first=False).positions[0, 0, :2]
        moved = simulated(environment._world).positions[0, 0, :2] - start
        np.testing.assert_allclose(place, moved, atol=0.05)
        if terminated:
            break
    assert np.abs(moved).max() > 0.01, "the robot did not move"


def test_the_file_of_links_is_up_to_date() -> None:
    assert robots() == {name: describe(model) for name, model in MODELS.items()}, "run python -m tests.recording.links"


def test_a_new_episode_begins_at_the_origin() -> None:
    spec = specification(MODELS["Walker2D"])
    poses, observation = Poses(spec), np.zeros(spec.observation_size, np.float32)
    observation[3] = 0.6  # this channel is 0.3 s/m · forward velocity, so the forward velocity is 2 m/s
    observation[1:3] = 1, 0  # the target lies along +x and to the robot's left, so the robot looks along -y
    poses.step(observation, first=True)
    pose = poses.step(observation, first=False)
    # The control period is 0.0165 s. At the start, the torso is at 1.25 m.
    np.testing.assert_allclose(pose.positions[0, 0], [0, -2 * 0.0165, 1.25], atol=1e-6)
    np.testing.assert_allclose(poses.step(observation, first=True).positions[0, 0], [0, 0, 1.25], atol=1e-6)


def test_several_steps_at_once_equal_single_steps(environment: Locomotion) -> None:
    random, one, many = np.random.default_rng(SEED), Poses(environment.spec), Poses(environment.spec)
    observations = random.normal(0, 0.3, (30, environment.spec.observation_size)).astype(np.float32)
    first = random.random(30) < 0.2
    poses = [one.step(observation, bool(begins)) for observation, begins in zip(observations, first, strict=True)]
    together = many.pose(observations, many.walk(observations, first))
    np.testing.assert_allclose(together.positions, [pose.positions[0] for pose in poses], atol=1e-12)
    np.testing.assert_allclose(together.rotations, [pose.rotations[0] for pose in poses], atol=1e-12)


def test_shapes_begin_and_end_where_their_link_is() -> None:
    """All joints are at 0. The torso is between 1.05 m and 1.45 m. The feet are at 0.1 m, with x from 0 to 0.2 m."""
    spec = specification(MODELS["Walker2D"])
    poses, observation = Poses(spec), np.zeros((1, spec.observation_size), np.float32)
    observation[0, 2] = 1  # the target is ahead
    for index, link in enumerate(poses.robot.links[1:]):
        observation[0, 8 + 2 * index] = -1 - 2 * link.low / (link.high - link.low)  # angle 0
    [found] = ends(poses.robot, poses.pose(observation, np.zeros((1, 2))))
    assert found.shape == (len(radii(poses.robot)), 2, 3) == (7, 2, 3)
    np.testing.assert_allclose(sorted(found[0, :, 2]), [1.05, 1.45], atol=1e-5)
    for foot in (3, 6):
        np.testing.assert_allclose(sorted(found[foot].tolist()), [[0, 0, 0.1], [0.2, 0, 0.1]], atol=1e-5)


def test_a_robot_with_other_channels_is_not_known() -> None:
    spec = specification(MODELS["Walker2D"])
    renamed = tuple(replace(channel, name=f"x{index}") for index, channel in enumerate(spec.observations))
    assert known(spec)
    assert not known(replace(spec, observations=renamed))
    assert not known(RobotSpec("Leg", (Channel("torso.height", "m", -1, 1),), spec.actions, 0.02))


ARM: dict[str, Any] = {
    "height": 0.5,
    "links": [
        {"name": "torso", "parent": -1, "shapes": [{"begin": [0, 0, -0.5], "end": [0, 0, 0], "radius": 0.05}]},
        {
            "name": "elbow",
            "parent": 0,
            "origin": [0, 0, 0.25],
            "axis": [0, 1, 0],
            "shapes": [{"begin": [0, 0, 0], "end": [0, 0, 0.25], "radius": 0.02}],
        },
    ],
}


def test_a_file_of_links_gives_the_poses_of_another_robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm on a base of 0.5 m. Its forearm of 0.25 m begins at 0.75 m, and lies along x after a turn by 90°."""
    known_robots: dict[str, Robot] = {}
    monkeypatch.setattr("td3_robot.recording.poses.robots", lambda: known_robots)
    spec = RobotSpec("Arm", (Channel("elbow.position", "rad", -2, 2),), (Channel("elbow.torque", "N·m", -1, 1),), 0.02)
    assert not known(spec)
    (tmp_path / "arm.json").write_text(json.dumps({"Arm": ARM}))
    read_links(str(tmp_path / "arm.json"))
    assert known(spec)
    poses, observations = Poses(spec), np.array([[0.0], [np.pi / 2]], np.float32)
    upright, bent = ends(poses.robot, poses.pose(observations, poses.walk(observations, np.array([True, False]))))
    np.testing.assert_allclose(upright, [[[0, 0, 0], [0, 0, 0.5]], [[0, 0, 0.75], [0, 0, 1]]], atol=1e-6)
    np.testing.assert_allclose(bent, [[[0, 0, 0], [0, 0, 0.5]], [[0, 0, 0.75], [0.25, 0, 0.75]]], atol=1e-6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Input data was truncated"),
        ("[]", "Expected `object`"),
        ('{"A": {"height": 1, "links": []}}', "the parent of the first link must be -1"),
        (json.dumps({"A": {**ARM, "links": [ARM["links"][0], {"name": "x", "parent": 1}]}}), "allowed: 0 to 0"),
        (json.dumps({"A": {**ARM, "links": [{"name": "torso", "parent": -1}]}}), "no link has a shape"),
        (json.dumps({"A": ARM}).replace("origin", "orign"), "unknown field `orign`"),
        (json.dumps({"A": ARM}).replace("radius", "radios"), "unknown field `radios`"),
        (json.dumps({"A": ARM}).replace("[0, 1, 0]", "[0, 2, 0]"), "link 'elbow' has axis [0.0, 2.0, 0.0]; allowed: "),
        (json.dumps({"A": ARM}).replace('"axis": [0, 1, 0],', ""), "link 'elbow' has axis [0.0, 0.0, 0.0]; allowed: "),
    ],
)
def test_a_malformed_file_of_links_gives_one_line_of_error(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "arm.json"
    file.write_text(text)
    for words in (
        ["dashboard", "--config", "x"],
        ["monitor", "--config", "x", "--foxglove"],
        ["export", "x", "--out", str(tmp_path), "--format", "foxglove"],
    ):
        assert main([*words, "--links", str(file)]) == 2
        error = capsys.readouterr().err
        assert f"--links {str(file)!r}: " in error
        assert problem in error
        assert error.count("\n") == 1


def test_a_missing_file_of_links_gives_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "arm.json")
    assert main(["dashboard", "--config", "x", "--links", file]) == 2
    assert (
        capsys.readouterr().err == f"td3-robot dashboard: --links {file!r} cannot be read: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["monitor", "--config", "x"], "--links needs --foxglove"),
        (["export", "x", "--out", "y"], "--links draws a robot; it needs --format foxglove, not csv"),
    ],
)
def test_the_option_links_is_refused_without_foxglove(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--links", "arm.json"]) == 2
    assert problem in capsys.readouterr().err
