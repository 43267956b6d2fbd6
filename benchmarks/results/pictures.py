"""Draw docs/images/walking.png: a row for each policy in ``policies/``, a picture every sixth of a second.

python benchmarks/results/pictures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
from td3_robot_sims import tasks

from td3_robot.bundle import Bundle
from td3_robot.policy.actor import Actor

ROOT = Path(__file__).parents[2]
FIRST, EVERY, PICTURES = 200, 10, 6  # control periods before the first, control periods between two, number
WIDTH, HEIGHT = 200, 150


def row(policy: Path) -> np.ndarray:
    """Let a policy walk; the pictures side by side, uint8[HEIGHT, PICTURES * WIDTH, 3]."""
    bundle = Bundle.load(policy)
    actor, environment = Actor(bundle), tasks.make(bundle.spec.name, 0)
    observation, pictures = environment.reset(), []
    for step in range(FIRST + EVERY * PICTURES):
        if step >= FIRST and (step - FIRST) % EVERY == 0:
            pictures.append(environment.render(WIDTH, HEIGHT))
        observation = environment.step(actor(observation[None])[0]).observation
    environment.close()
    return np.concatenate(pictures, 1)


def main() -> int:
    rows = [row(ROOT / "policies" / f"{name}.safetensors") for name in ("walker2d", "ant")]
    imageio.imwrite(ROOT / "docs" / "images" / "walking.png", np.concatenate(rows, 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
