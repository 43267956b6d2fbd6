"""Draw docs/images/walking.gif: the policies in ``policies/`` walk side by side, in real time.

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
FIRST, EVERY = 200, 4  # control periods before the first picture, and between two pictures
PICTURES = 45
WIDTH, HEIGHT = 240, 180


def walk(policy: Path) -> list[np.ndarray]:
    """Let a policy walk. Return the pictures of the walk, each uint8[HEIGHT, WIDTH, 3]."""
    bundle = Bundle.load(policy)
    actor, environment = Actor(bundle), tasks.make(bundle.spec.name, 0)
    observation, pictures = environment.reset(), []
    for step in range(FIRST + EVERY * PICTURES):
        if step >= FIRST and (step - FIRST) % EVERY == 0:
            pictures.append(environment.render(WIDTH, HEIGHT))
        observation = environment.step(actor(observation[None])[0]).observation
    environment.close()
    return pictures


def main() -> int:
    walks = [walk(ROOT / "policies" / f"{name}.safetensors") for name in ("walker2d", "ant")]
    period = EVERY * tasks.spec("Walker2D").control_period
    pictures = [np.concatenate(pair, 1) for pair in zip(*walks, strict=True)]
    imageio.mimsave(ROOT / "docs" / "images" / "walking.gif", pictures, duration=1000 * period, loop=0, palettesize=32)
    return 0


if __name__ == "__main__":
    sys.exit(main())
