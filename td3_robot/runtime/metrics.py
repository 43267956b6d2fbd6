"""Records of ``metrics.jsonl``: reading them, and the evaluation record, which several processes write."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read(metrics: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of one kind; ``env_steps`` rises from one to the next.

    A line that a crash cut off is skipped. After a resume the learner repeats some steps; the later records hold.
    """
    records: list[dict[str, Any]] = []
    for text in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue
        if record.get("kind") == kind:
            while records and records[-1]["env_steps"] >= record["env_steps"]:
                records.pop()
            records.append(record)
    return records


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
    """Make the record of one evaluation.

    Args:
        env_steps, updates, weights_version: of the policy, when the learner made it.
        wall_s: seconds of training at the evaluation.
        returns, lengths: undiscounted return and steps of each episode. The record has the population's deviation.
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
