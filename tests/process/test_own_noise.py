"""Train with an exploration noise from an installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import install_metadata

NOISE = """
import numpy as np
from td3_robot.policy.noise import Noise

class BadLater(Noise):
    NUMBER = 1000
    drawn = 0

    def block(self, generator):
        self.drawn += 1
        return generator.standard_normal(self.shape) if self.drawn < 3 else np.full(self.shape, np.nan)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Install a package in the folder where the commands run. Python finds the package there."""
    (tmp_path / "bad_later.py").write_text(NOISE)
    install_metadata(tmp_path, "bad_later", "td3_robot.noises", "bad = bad_later:BadLater")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_noise_that_fails_during_a_training_ends_the_training(train: Any) -> None:
    """The noise draws two good blocks of 64 steps. The warm-up of 100 steps uses uniform noise."""
    run = train(5000, "exploration.kind=bad", "learner.learning_starts=100")
    assert run.finish() == 2, run.output()
    assert "policy cannot run: exploration noise 'bad': block() returned numbers that are not finite" in run.output()
    assert "starting it again" not in run.output()
