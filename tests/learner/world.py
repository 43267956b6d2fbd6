"""A learner's core with fake peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.core_types import Output, Peer
from td3_robot.learner.checkpointing import state
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.factory import make_core
from td3_robot.messages import Step, Throttle, Weights
from td3_robot.specs import RobotSpec
from td3_robot.transport.link import hello


def config(**learner: Any) -> Config:
    values = {"learning_starts": 10, "batch_size": 4, "replay_ratio_band": 8, "publish_every": 2, "buffer_size": 100}
    return configuration.parse(
        {
            "total_steps": 60,
            "network": {"hidden": [4]},
            "evaluation": {"every": 20, "episodes": 1},
            "learner": {**values, **learner},
        }
    )


def resumed(config: Config, arrays: Any, scalars: Any, **options: Any) -> LearnerCore:
    """A new core that continues from a saved state."""
    core = make_core(config, **options)
    state.resume(core, arrays, scalars)
    return core


class World:
    """A learner's core with fake peers, and functions that send their messages."""

    def __init__(self, core: LearnerCore, spec: RobotSpec, make_step: Callable[..., Step]) -> None:
        self.core, self.spec, self.make_step = core, spec, make_step
        self.time = 0.0

    def peer(self, role: str, name: str, *, incarnation: int = 0, robots: int = 0, version: int = 0) -> Peer:
        spec = self.spec if robots else None
        introduction = hello(
            role, name, client=1, incarnation=incarnation, robots=robots, weights_version=version, spec=spec
        )
        return Peer("learner", name.encode(), introduction, {})

    def join(self, peer: Peer) -> list[Output]:
        return self.give(peer, peer.hello)

    def give(self, peer: Peer, message: Any) -> list[Output]:
        self.time += 0.001
        return self.core.step([(peer, message)], self.time)

    def idle(self, turns: int = 1) -> list[Output]:
        outputs = []
        for _ in range(turns):
            self.time += 0.001
            outputs += self.core.step([], self.time)
        return outputs


def throttles(outputs: list[Output]) -> list[Throttle]:
    return [message for _, message in outputs if isinstance(message, Throttle)]


def published(outputs: list[Output]) -> list[Weights]:
    return [message for _, message in outputs if isinstance(message, Weights)]
