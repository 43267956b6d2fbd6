"""The callback of a training."""

from __future__ import annotations

from td3_robot import runs
from td3_robot.messages import Status


def test_the_callback_is_not_called_again_after_it_has_returned_false() -> None:
    """The processes report again while they stop."""
    steps: list[int] = []

    def callback(progress: runs.TrainingProgress) -> bool:
        steps.append(progress.env_steps)
        return progress.env_steps < 200

    def status(env_steps: int) -> dict[str, Status]:
        return {"learner": Status("learner", "ready", "", {"env_steps": float(env_steps), "updates": 0.0}, {})}

    watch = runs._watch(callback, 1000)
    assert [watch(status(count)) for count in (100, 200, 300)] == [True, False, False]
    assert steps == [100, 200]
