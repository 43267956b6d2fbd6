"""Fixtures of the policy server's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from td3_robot.bundle import Bundle
from td3_robot.core_types import Peer
from td3_robot.policy.core import PolicyCore
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from td3_robot.transport.link import hello
from tests.policy.served_robot import SAFE, Cores


@pytest.fixture
def peer(spec: RobotSpec) -> Peer:
    return Peer("policy", b"1", hello("simulator", "sim-0", client=1, robots=1, spec=spec), {})


@pytest.fixture
def operator() -> Peer:
    return Peer("policy", b"2", hello("operator", "op", client=2), {})


@pytest.fixture
def make_core(peer: Peer, operator: Peer, make_bundle: Callable[..., Bundle]) -> Cores:
    """Makes the core of a server with a policy, a connected robot and a connected operator."""

    def make(safety: SafetyConfig = SAFE, **options: Any) -> PolicyCore:
        core = PolicyCore(9, safety=safety, **options)
        core.load(1, make_bundle(1))
        core.step([(peer, peer.hello), (operator, operator.hello)], 0.0)
        return core

    return make
