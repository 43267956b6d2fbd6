"""A run in one process begins with the policy of ``learner.start_from``, like a run of several processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from td3_robot_sims import tasks

from td3_robot.bundle import Bundle, Exploration, layer_shapes
from td3_robot.config import loading as configuration
from tests.in_process import InProcess

TASK = "gymnasium:Pendulum-v1"


def test_a_run_begins_with_the_named_policy(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = tasks.spec(TASK)
    tensors = {name: rng.normal(size=shape).astype("f4") for name, shape in layer_shapes(spec, (8, 4)).items()}
    file = tmp_path / "policy.safetensors"
    Bundle(spec, (8, 4), tensors, Exploration("none", 0.0), {"version": 1}).save(file)
    learner = {"start_from": str(file), "critics_first": 100, "learning_starts": 10, "batch_size": 4}
    content = {"task": TASK, "total_steps": 20, "timing": "lockstep", "network": {"hidden": [8, 4]}}
    run = InProcess(configuration.parse({**content, "learner": learner, "evaluation": {"every": 0}}))
    run.run()
    run.close()
    assert run.learner.updates > 0  # critics_first is 100, so these updates change only the critics
    assert run.policy.store.serving is not None
    served = run.policy.store.serving.bundle.tensors
    assert all(np.array_equal(served[name], tensor) for name, tensor in tensors.items())
