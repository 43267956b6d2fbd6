"""The file of a run's best policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from td3_robot.bundle import Bundle
from td3_robot.runtime import best_policy


def test_the_best_policy_is_kept_with_its_mean_return(make_bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    file, bundle = tmp_path / "best.safetensors", make_bundle()
    assert best_policy.mean_return(file) == float("-inf")
    best_policy.keep(file, bundle.encode(), 12.5)
    assert best_policy.mean_return(file) == 12.5
    assert Bundle.load(file).provenance == {**bundle.provenance, "eval_return_mean": 12.5}
    best_policy.keep(file, bundle.encode(), None)
    assert Bundle.load(file).provenance == bundle.provenance
    assert best_policy.mean_return(file) == float("-inf")
    file.write_bytes(b"damaged")
    assert best_policy.mean_return(file) == float("-inf")
