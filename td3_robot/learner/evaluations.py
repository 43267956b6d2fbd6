"""Which policies a learner has evaluated: asked for every so many steps, answered in any time, the best one kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from td3_robot.config.schema import EvaluationConfig
from td3_robot.messages import Evaluation, Weights
from td3_robot.runtime import metrics

_WAITING = 4  # payloads kept for an evaluator that is behind


class Evaluations:
    """What was asked of the evaluator, and what came of it.

    Attributes:
        pending: Weights that are not evaluated yet, by version.
        best_return: the highest mean return of all evaluations; minus infinity before the first.
        best: the bundle that had it, to be written by whoever does; None once taken.
        reached: an evaluation's mean return reached ``evaluation.target_return``.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self.config = config
        self.pending: dict[int, Weights] = {}
        self.best_return = float("-inf")
        self.best: bytes | None = None
        self.reached = False
        self._next = config.every
        self._skipped = 0

    def due(self, env_steps: int) -> bool:
        """Whether the policy of now is one to evaluate."""
        return self.config.every > 0 and env_steps >= self._next

    def ask(self, env_steps: int) -> bool:
        """Take note that one is due; whether it is to be made, which it is not if too many wait."""
        self._next = next_multiple(env_steps, self.config.every)
        room = len(self.pending) < _WAITING
        self._skipped += not room
        return room

    def take(self, message: Evaluation, wall_s: float) -> dict[str, Any]:
        """The record of an evaluation that has come in."""
        weights = self.pending.pop(message.version, None)
        record = metrics.evaluation(
            env_steps=message.env_steps,
            updates=message.updates,
            wall_s=wall_s,
            weights_version=message.version,
            returns=message.returns.tolist(),
            lengths=message.lengths.tolist(),
        )
        mean, target = record["eval_return_mean"], self.config.target_return
        if weights and mean > self.best_return:
            self.best_return, self.best = mean, weights.payload
        self.reached = self.reached or (target is not None and mean >= target)
        return record

    def counters(self) -> Counter[str]:
        """How many wait, and how many were not made because too many did."""
        return Counter(evaluations_pending=len(self.pending), evaluations_skipped=self._skipped)

    def state(self) -> dict[str, Any]:
        """What goes on over a restart, as plain JSON values."""
        best = self.best_return if np.isfinite(self.best_return) else None
        return {"best_return": best, "next": self._next, "skipped": self._skipped}

    def restore(self, state: Mapping[str, Any], env_steps: int) -> None:
        """Go on from :meth:`state` after so many steps; a better return than was known there stays known."""
        if state["best_return"] is not None:
            self.know(float(state["best_return"]))
        self._next, self._skipped = int(state["next"]), int(state["skipped"])
        if self.config.every:  # they may be wanted more often now
            self._next = min(self._next, next_multiple(env_steps, self.config.every))

    def know(self, mean: float) -> None:
        """There has been an evaluation with this mean return."""
        target = self.config.target_return
        self.best_return = max(self.best_return, mean)
        self.reached = self.reached or (target is not None and mean >= target)


def next_multiple(value: int, step: int) -> int:
    """The smallest multiple of ``step`` above ``value``."""
    return (value // step + 1) * step
