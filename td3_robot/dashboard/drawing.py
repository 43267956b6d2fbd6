"""Computes the pictures of the robots for the dashboard.

The page gets snapshots of the live data. Each snapshot has pictures of the Steps since the previous snapshot.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from td3_robot.messages import Hello, Phase, Step
from td3_robot.recording.poses import Poses, ends, known, radii
from td3_robot.recording.values import robot_of
from td3_robot.specs import RobotSpec

FRAMES = 10
"""The maximum number of pictures of a robot in a snapshot. A page gets two snapshots per second."""
ROBOTS = 4
"""The maximum number of robots of a source that are drawn."""
NAMES = 1024
"""The maximum number of sources and nodes whose newest messages are kept. A run has fewer."""
_STEPS = 1000  # maximum number of Steps of a source that are kept for a snapshot


def keep(newest: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a name, and forget the oldest names if there are more than :data:`NAMES` of them."""
    newest[name] = value
    while len(newest) > NAMES:
        del newest[next(iter(newest))]


class _Source:
    """The poses of the first robots of a source, and its Steps since the last snapshot."""

    def __init__(self, spec: RobotSpec) -> None:
        self.spec = spec
        self.poses = [Poses(spec) for _ in range(ROBOTS)]
        self.steps: deque[Step] = deque(maxlen=_STEPS)

    def frames(self, index: int) -> dict[str, Any]:
        """Return the pictures of a robot, see :meth:`Drawing.take`."""
        poses = self.poses[index]
        observations = np.stack([step.observation[index] for step in self.steps])
        places = poses.walk(observations, np.array([step.phase[index] == Phase.FIRST for step in self.steps]))
        shown = np.unique(np.linspace(0, len(observations) - 1, FRAMES).round().astype(int))
        frames = ends(poses.robot, poses.pose(observations[shown], places[shown]))
        return {"radii": radii(poses.robot), "frames": frames.reshape(len(shown), -1).round(3).tolist()}


class Drawing:
    """Draws the first robots of each source.

    A source is drawn only if the shapes of its robots' links (rigid bodies) are known, and its observation has the
    angles of all joints.

    Attributes:
        sources: the drawn sources by name.
    """

    def __init__(self) -> None:
        self.sources: dict[str, _Source] = {}

    def learn(self, hello: Hello) -> None:
        """Take the specification of a source from its Hello."""
        spec = robot_of(hello)
        if spec is None:  # for example a Hello that a server refused
            return
        self.sources.pop(hello.name, None)
        if known(spec):
            keep(self.sources, hello.name, _Source(spec))

    def add(self, step: Step) -> None:
        """Keep a Step until the next snapshot."""
        source = self.sources.get(step.source)
        if source and step.observation.shape[1] == source.spec.observation_size:
            source.steps.append(step)

    def take(self) -> dict[str, dict[str, Any]]:
        """Return the pictures since the last call, by source and index of the robot, as in ``sim-0/2``.

        For each robot, ``radii`` has the radius of each shape, and ``frames`` has one list of numbers for each picture.
        For each shape, this list has x, y and z of the shape's start, then x, y and z of the shape's end, in m.
        """
        drawn = {}
        for name, source in self.sources.items():
            robots = min((len(step.phase) for step in source.steps), default=0)
            for index in range(min(ROBOTS, robots)):
                drawn[f"{name}/{index}"] = source.frames(index)
            source.steps.clear()
        return drawn
