"""Computes how the page draws the robots, from the Steps since the last snapshot."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import ConfigError
from td3_robot.messages import Hello, Phase, Step
from td3_robot.recording.poses import Poses, ends, known, radii
from td3_robot.specs import RobotSpec

FRAMES = 10
"""The maximum number of pictures of a robot in a snapshot, which is 20 per second."""
_ROBOTS = 4  # maximum number of robots of a source that are drawn
_STEPS = 1000  # maximum number of Steps of a source between two snapshots


class Drawing:
    """Draws the first robots of each source whose links are known."""

    def __init__(self) -> None:
        self._specs: dict[str, RobotSpec] = {}
        self._poses: dict[str, Poses] = {}  # by source and index, as in ``sim-0/2``
        self._steps: dict[str, deque[Step]] = {}

    def learn(self, hello: Hello) -> None:
        """Take the specification of a source from its Hello."""
        if hello.role not in ROBOT_ROLES:
            return
        self._specs.pop(hello.name, None)
        self._steps.pop(hello.name, None)
        for index in range(_ROBOTS):
            self._poses.pop(f"{hello.name}/{index}", None)
        try:
            spec = RobotSpec.from_description(hello.spec)
        except ConfigError:  # for example a Hello that a server refused
            return
        if known(spec):
            self._specs[hello.name] = spec

    def add(self, step: Step) -> None:
        """Keep a Step until the next snapshot."""
        spec = self._specs.get(step.source)
        if spec and step.observation.shape[1] == spec.observation_size:
            self._steps.setdefault(step.source, deque(maxlen=_STEPS)).append(step)

    def take(self) -> dict[str, dict[str, Any]]:
        """Return the pictures since the last call, by source and index of the robot.

        ``radii`` has the radius of each shape. Each of ``frames`` has, for each shape, x, y, z of its begin and of its
        end, in m, in one list.
        """
        drawn = {}
        for source, steps in self._steps.items():
            for index in range(min(_ROBOTS, *(len(step.phase) for step in steps))):
                drawn[f"{source}/{index}"] = self._frames(source, index, list(steps))
        self._steps.clear()
        return drawn

    def _frames(self, source: str, index: int, steps: list[Step]) -> dict[str, Any]:
        name = f"{source}/{index}"
        if name not in self._poses:
            self._poses[name] = Poses(self._specs[source])
        poses = self._poses[name]
        observations = np.stack([step.observation[index] for step in steps])
        places = poses.walk(observations, np.array([step.phase[index] == Phase.FIRST for step in steps]))
        shown = np.unique(np.linspace(0, len(steps) - 1, FRAMES).round().astype(int))
        frames = ends(poses.robot, poses.pose(observations[shown], places[shown]))
        return {"radii": radii(poses.robot), "frames": frames.reshape(len(shown), -1).round(3).tolist()}
