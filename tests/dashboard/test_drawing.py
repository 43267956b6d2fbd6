"""The pictures of a robot come from the Steps since the last snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from td3_robot_sims.tasks import spec

from td3_robot.dashboard.drawing import FRAMES, Drawing
from td3_robot.messages import Phase
from td3_robot.recording.poses import Poses, ends
from td3_robot.transport import link as handshake

pytest.importorskip("starlette", reason="needs td3-robot[dashboard], which is not installed")
WALKER = spec("Walker2D")


@pytest.fixture
def steps(make_step: Callable[..., Any]) -> list[Any]:
    """25 Steps of six robots that move at random. A new episode begins at Step 10."""
    random = np.random.default_rng(3)
    return [
        make_step(
            number,
            6,
            source="sim-0",
            observation=random.normal(0, 0.2, (6, WALKER.observation_size)).astype(np.float32),
            action=np.zeros((6, WALKER.action_size), np.float32),
            phase=np.full(6, Phase.FIRST if number == 10 else Phase.MID, np.uint8),
        )
        for number in range(25)
    ]


def hello(robot: Any) -> Any:
    return handshake.hello("simulator", "sim-0", client=5, robots=6, spec=robot)


def test_a_snapshot_holds_pictures_of_the_steps_since_the_last_snapshot(steps: list[Any]) -> None:
    """The snapshot shows 4 (ROBOTS) of 6 robots. It shows 10 (FRAMES) of 25 Steps, including the first and the last."""
    drawing, poses = Drawing(), Poses(WALKER)
    drawing.learn(hello(WALKER))
    for step in steps:
        drawing.add(step)
    drawn = drawing.take()
    assert list(drawn) == [f"sim-0/{index}" for index in range(4)]
    frames = drawn["sim-0/1"]["frames"]
    assert (len(frames), len(drawn["sim-0/1"]["radii"])) == (FRAMES, 7)
    expected = [
        ends(poses.robot, poses.step(step.observation[1], bool(step.phase[1] == Phase.FIRST))).ravel() for step in steps
    ]
    np.testing.assert_allclose(frames[0], expected[0], atol=1e-3)
    np.testing.assert_allclose(frames[-1], expected[-1], atol=1e-3)
    assert drawing.take() == {}
    drawing.add(steps[0])
    assert len(drawing.take()["sim-0/0"]["frames"]) == 1


def test_unknown_robots_are_not_drawn(steps: list[Any]) -> None:
    drawing = Drawing()
    drawing.add(steps[0])  # before any Hello
    drawing.learn(hello(spec("gymnasium:Pendulum-v1")))
    drawing.add(steps[0])
    drawing.learn(hello(spec("Ant")))  # an Ant has observations of another size than steps[0]
    drawing.add(steps[0])
    assert drawing.take() == {}
