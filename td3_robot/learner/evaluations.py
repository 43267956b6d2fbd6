"""Evaluations of a learner's policies: their schedule, the waiting policies, and the best policy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from td3_robot.config.schema import EvaluationConfig
from td3_robot.messages import Evaluation, Weights

_WAITING = 4  # largest number of policies that may wait for a slow evaluator


class Evaluations:
    """Evaluations that were requested, and their results.

    Attributes:
        pending: Weights that wait for the evaluator, by version.
        best_return: the highest mean return of a policy with at least one update; minus infinity if there is none.
        best: the policy bundle with ``best_return``. The node writes it to a file and sets this attribute to None.
        reached: whether the mean return of a policy with at least one update has reached ``evaluation.target_return``.
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
        """Whether an evaluation is due."""
        return self.config.every > 0 and env_steps >= self._next

    def plan(self, env_steps: int) -> bool:
        """Set the step of the next evaluation. Returns whether to make the current evaluation.

        The learner skips the current evaluation if too many policies wait for the evaluator.
        """
        self._next = next_multiple(env_steps, self.config.every)
        wanted = len(self.pending) < _WAITING
        self._skipped += not wanted
        return wanted

    def take(self, message: Evaluation, wall_s: float) -> dict[str, Any]:
        """Use the result of an evaluation, and return its record."""
        weights = self.pending.pop(message.version, None)
        record = evaluation_record(
            env_steps=message.env_steps,
            updates=message.updates,
            wall_s=wall_s,
            weights_version=message.version,
            returns=message.returns.tolist(),
            lengths=message.lengths.tolist(),
        )
        mean = record["eval_return_mean"]
        if message.updates:  # without an update, the run has learned nothing
            if weights and mean > self.best_return:
                self.best_return, self.best = mean, weights.payload
            self._compare_with_target(mean)
        return record

    def counters(self) -> Counter[str]:
        return Counter(evaluations_pending=len(self.pending), evaluations_skipped=self._skipped)

    def state(self) -> dict[str, Any]:
        best = self.best_return if np.isfinite(self.best_return) else None
        return {"best_return": best, "next": self._next, "skipped": self._skipped}

    def restore(self, state: Mapping[str, Any], env_steps: int) -> None:
        """Restore a result of :meth:`state`. The run continues at ``env_steps``.

        ``best_return`` becomes the higher of the current and the saved ``best_return``.
        """
        if state["best_return"] is not None:
            self.add_earlier(float(state["best_return"]))
        saved, self._skipped, every = int(state["next"]), int(state["skipped"]), self.config.every
        self._next = next_multiple(env_steps, every) if every else 0  # a resume may have changed evaluation.every
        if 0 < saved == self._next - every:  # at the checkpoint, an evaluation was due but not yet made
            self._next = saved

    def add_earlier(self, mean: float) -> None:
        """Use the mean return of an evaluation that an earlier process made."""
        self.best_return = max(self.best_return, mean)
        self._compare_with_target(mean)

    def _compare_with_target(self, mean: float) -> None:
        target = self.config.target_return
        self.reached = self.reached or (target is not None and mean >= target)


def next_multiple(value: int, step: int) -> int:
    """The smallest multiple of ``step`` above ``value``."""
    return (value // step + 1) * step


def evaluation_record(
    *,
    env_steps: int,
    updates: int,
    wall_s: float,
    weights_version: int,
    returns: Sequence[float],
    lengths: Sequence[int],
    final: bool = False,
) -> dict[str, Any]:
    """Make the record of one evaluation.

    Args:
        env_steps, updates, weights_version: environment steps, updates and version of the policy.
        wall_s: seconds of training until the evaluation.
        returns, lengths: undiscounted return and number of steps of each episode.
        final: whether this is the policy at the end of training.
    """
    return {
        "kind": "evaluation",
        "final": final,
        "env_steps": env_steps,
        "updates": updates,
        "wall_s": wall_s,
        "weights_version": weights_version,
        "eval_return_mean": statistics.fmean(returns),
        "eval_return_std": statistics.pstdev(returns),
        "eval_returns": list(returns),
        "eval_length_mean": statistics.fmean(lengths),
    }
