"""Modules with deadlines measure time only with the monotonic clock. A jump of the wall clock moves no deadline."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KEEPERS = sorted(
    path
    for place in ("policy/*.py", "driver/*.py", "transport/*.py", "safety/*.py", "runtime/node.py")
    for path in (ROOT / "td3_robot").glob(place)
)
MONOTONIC = {"monotonic", "sleep"}
WALL_CLOCK = {
    "td3_robot/transport/tap.py": {"time_ns"},  # recordings hold the time of each publication
}
"""These modules may also call these functions of ``time``, because no deadline depends on the results."""


@pytest.mark.parametrize("module", KEEPERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_deadlines_use_only_the_monotonic_clock(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    assert used - MONOTONIC <= WALL_CLOCK.get(str(module.relative_to(ROOT)), set())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "datetime" not in imported
    assert not [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
    ]
