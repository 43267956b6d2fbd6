"""The file of a run's best policy. The provenance in this file holds the mean return of the policy's evaluation."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from td3_robot.bundle import Bundle
from td3_robot.errors import BundleError

_KEY = "eval_return_mean"


def keep(file: Path, payload: bytes, mean: float | None) -> None:
    """Write the best policy so far, with the mean return of its evaluation.

    Args:
        payload: the encoded policy bundle.
        mean: mean return of the evaluation; None for an untrained policy, so that every trained policy is better.
    """
    bundle = Bundle.decode(payload)
    evaluated = {} if mean is None else {_KEY: mean}
    replace(bundle, provenance={**bundle.provenance, **evaluated}).save(file)


def mean_return(file: Path) -> float:
    """Read the mean return of the best policy so far.

    Returns minus infinity if the file is missing or invalid, or holds no mean return.
    """
    with contextlib.suppress(BundleError, TypeError, ValueError):
        return float(Bundle.load(file).provenance.get(_KEY, "-inf"))
    return float("-inf")
