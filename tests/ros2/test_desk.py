"""The ``Desk`` between ROS and a driver follows the driver's state. A plain object replaces the driver's core here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from td3_robot.messages import ActionOrigin
from td3_robot.ros2.driver import Desk
from td3_robot.safety.lifecycle import Lifecycle


@pytest.mark.parametrize(
    ("held", "moved"),
    [
        (ActionOrigin.POLICY, True),
        (ActionOrigin.OPERATOR, True),
        (ActionOrigin.SAFE, False),
        (ActionOrigin.ZERO, False),
    ],
)
def test_a_held_action_moves_the_robot_only_if_a_policy_or_an_operator_chose_it(
    held: ActionOrigin, moved: bool
) -> None:
    unused: Any = None
    desk = Desk(unused, unused)
    for origin in (held, ActionOrigin.HELD, ActionOrigin.HELD):
        core: Any = SimpleNamespace(
            guard=SimpleNamespace(lifecycle=Lifecycle("leg"), safe=False, counters={}),
            newest=SimpleNamespace(origin=int(origin), weights_version=0),
            contact=SimpleNamespace(welcomed=True),
            figures=dict,
            counters={},
        )
        desk.follow(core)
        assert (desk.condition.origin, desk.condition.moved) == (origin.name.lower(), moved)
