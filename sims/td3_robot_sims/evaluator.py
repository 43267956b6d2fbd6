"""The evaluator process of a training run: it receives Weights and sends Evaluations."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from td3_robot.bundle import Bundle
from td3_robot.config.schema import EvaluationConfig
from td3_robot.core_types import Input, Output
from td3_robot.errors import BundleError
from td3_robot.messages import Evaluation, Weights
from td3_robot.policy.actor import Actor
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot_sims import tasks
from td3_robot_sims.backends.base import Environment
from td3_robot_sims.rollout import SEED_OFFSET, Episode, episodes

log = logging.getLogger(__name__)

_STEPS = 20  # maximum number of environment steps in one call of EvaluatorCore.step()


class EvaluatorCore:
    """Evaluates the received Weights one after the other.

    It ignores Weights with a version that is already in the queue or in evaluation.

    Args:
        seed: seed of the starting states, the same for all Weights.

    Attributes:
        done: number of evaluations sent.
        refused: number of Weights that were damaged or for another robot.
    """

    def __init__(self, environment: Environment, config: EvaluationConfig, seed: int) -> None:
        self.environment = environment
        self.config = config
        self.seed = seed
        self.done = 0
        self.refused = 0
        self._queue: deque[Weights] = deque()
        self._running: Iterator[Episode | None] | None = None
        self._episodes: list[Episode] = []

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running or waiting."""
        return bool(self._queue)

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Queue new Weights, and run a few environment steps."""
        del now
        known = {weights.version for weights in self._queue}
        arrived = [message for _, message in inputs if isinstance(message, Weights)]
        self._queue.extend(weights for weights in arrived if weights.version not in known)
        if not self._queue:
            return []
        if self._running is None:
            actor = self._actor(self._queue[0])
            if actor is None:
                self._queue.popleft()
                return []
            config = self.config
            self._running = episodes(self.environment, actor, config.episodes, self.seed, config.max_steps)
            self._episodes = []
        for _ in range(_STEPS):
            episode = next(self._running)
            if episode:
                self._episodes.append(episode)
            if len(self._episodes) == self.config.episodes:
                return [("learner", self._result())]
        return []

    def _actor(self, weights: Weights) -> Actor | None:
        """Return the policy to evaluate; None if the weights are damaged or for another robot."""
        try:
            bundle = Bundle.verified(weights.payload, weights.sha256, f"weights version {weights.version}")
            if difference := self.environment.spec.difference(bundle.spec):
                raise BundleError(f"weights version {weights.version} are for another robot: {difference}")
        except BundleError as error:
            self.refused += 1
            log.warning("refused: %s", error)
            return None
        return Actor(bundle)

    def _result(self) -> Evaluation:
        weights, self._running = self._queue.popleft(), None
        self.done += 1
        returns, lengths = zip(*self._episodes, strict=True)
        return Evaluation(
            version=weights.version,
            env_steps=weights.env_steps,
            updates=weights.updates,
            returns=np.array(returns),
            lengths=np.array(lengths, np.uint32),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    command = "python -m td3_robot_sims.evaluator"
    parser = node_parser(command, "evaluator", "Evaluate a run's policy from time to time.")
    return run_node("evaluator", parser.parse_args(arguments), _evaluate)


def _evaluate(node: Node) -> None:
    config = node.config
    environment = tasks.make(config.task, config.seed)
    core = EvaluatorCore(environment, config.evaluation, config.seed + SEED_OFFSET)
    node.connect("learner", (Weights,))

    def report() -> Figures:
        return Figures(counters={"evaluations": core.done, "weights_refused": core.refused})

    try:
        node.spin(core, busy=lambda: core.busy, report=report, after=lambda: False)
    finally:
        environment.close()


if __name__ == "__main__":
    sys.exit(main())
