"""Tests every target with every input of its corpus. The corpus includes inputs that once showed a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*"))


@pytest.mark.parametrize("name", INPUTS)
def test_the_input_shows_no_defect_of_the_target(name: str) -> None:
    TARGETS[name.split("/")[0]]((CORPUS / name).read_bytes())


def test_every_target_has_a_small_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) < 200_000
