"""Helpers for tests of the policy server: a robot's driver, commands, and checks of the messages from the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as changed

from td3_robot.bundle import sha256
from td3_robot.core_types import Output, Peer
from td3_robot.messages import Action, Command, LifecycleChange, Reply, Step
from td3_robot.policy.core import PolicyCore
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import RobotSpec
from td3_robot.transport.link import hello

SAFE = SafetyConfig(safe_action={"left": 0.25}, observation_deadline_ms=100)
Cores = Callable[..., PolicyCore]


def leg(spec: RobotSpec) -> Peer:
    """Return a robot's driver as a peer of the policy server."""
    return Peer("policy", b"1", hello("driver", "leg", client=1, robots=1, spec=spec), {})


def command(verb: str, target: str = "", payload: bytes = b"", version: int = 0) -> Command:
    return Command(77, target, verb, "because", version, sha256(payload) if payload else "", payload)


def actions(outputs: list[Output]) -> list[Action]:
    return [message for _, message in outputs if isinstance(message, Action)]


def changes(outputs: list[Output]) -> list[tuple[str, str]]:
    return [(message.node, message.state) for _, message in outputs if isinstance(message, LifecycleChange)]


def reply(core: PolicyCore, operator: Peer, asked: Command, now: float = 0.0) -> Reply:
    [answer] = [m for to, m in core.step([(operator, asked)], now) if isinstance(m, Reply) and to is operator]
    assert answer.id == 77
    return answer


def is_safe(action: Action) -> bool:
    safe = action.weights_version == 0
    assert not safe or action.action.tolist() == [[0.25, 0]]
    return safe


def only_safe(outputs: list[Output]) -> bool:
    """Whether ``outputs`` contain at least one Action, and each Action is the safe action."""
    found = [is_safe(action) for action in actions(outputs)]
    return bool(found) and all(found)


def joined(core: PolicyCore, peer: Peer, number: int, name: str, step: Step, now: float) -> Peer:
    """Connect another robot with the same specification, and send its Step."""
    robot = replace(peer, key=b"%d" % (10 + number), hello=changed(peer.hello, name=name))
    core.step([(robot, robot.hello), (robot, step)], now)
    return robot
