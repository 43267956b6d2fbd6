"""Fixtures of the policy server's tests."""

from __future__ import annotations

import pytest

from td3_robot.core_types import Peer
from td3_robot.specs import RobotSpec
from td3_robot.transport.link import hello


@pytest.fixture
def peer(spec: RobotSpec) -> Peer:
    return Peer("policy", b"1", hello("simulator", "sim-0", client=1, robots=1, spec=spec), {})


@pytest.fixture
def operator() -> Peer:
    return Peer("policy", b"2", hello("operator", "op", client=2), {})
