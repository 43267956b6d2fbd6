"""The lines of ``metrics.jsonl`` that more than one process writes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def evaluation(
    *,
    env_steps: int,
    updates: int,
    wall_s: float,
    weights_version: int,
    returns: Sequence[float],
    lengths: Sequence[int],
    final: bool = False,
) -> dict[str, Any]:
    """One evaluation of one policy.

    Args:
        env_steps, updates, weights_version: of the policy, when it was made.
        wall_s: seconds of training when it was evaluated.
        returns, lengths: undiscounted return and steps of each episode; the deviation is the population's.
        final: it is the policy that the training ended with.
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
