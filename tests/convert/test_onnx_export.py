"""ONNX models compute the same actions as the policy server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest

from td3_robot.bundle import OBSERVATION_MEAN, OBSERVATION_STD, Bundle
from td3_robot.convert import onnx_export
from td3_robot.policy.actor import Actor
from td3_robot.specs import RobotSpec


@pytest.mark.parametrize("hidden", [(8, 4), (400, 300), (5,)])
@pytest.mark.parametrize("robots", [1, 7])
@pytest.mark.parametrize("normalised", [False, True])
def test_onnx_gives_the_actors_actions(
    make_bundle: Callable[..., Bundle], rng: np.random.Generator, hidden: tuple[int, ...], robots: int, normalised: bool
) -> None:
    bundle = make_bundle(hidden=hidden, tame=True)
    if normalised:  # the last standard deviation is so small that observations are clipped
        seen = {OBSERVATION_MEAN: np.float32([1, -2, 0]), OBSERVATION_STD: np.float32([2, 0.5, 0.01])}
        bundle = replace(bundle, tensors={**bundle.tensors, **seen})
    model = onnxruntime.InferenceSession(onnx_export.convert(bundle), providers=["CPUExecutionProvider"])
    observation = rng.uniform(-5, 5, (robots, 3)).astype(np.float32)
    (action,) = model.run(["action"], {"observation": observation})
    np.testing.assert_allclose(action, Actor(bundle)(observation), rtol=1e-5, atol=2e-5)
    assert (action >= bundle.spec.action_low).all()
    assert (action <= bundle.spec.action_high).all()


def test_the_model_describes_its_robot_and_shapes(make_bundle: Callable[..., Bundle], spec: RobotSpec) -> None:
    model = onnxruntime.InferenceSession(onnx_export.convert(make_bundle()), providers=["CPUExecutionProvider"])
    described = json.loads(model.get_modelmeta().custom_metadata_map["td3_robot"])
    assert RobotSpec.from_description(described["spec"]) == spec
    assert described["provenance"] == {"version": 1}
    assert [(item.name, item.shape) for item in (*model.get_inputs(), *model.get_outputs())] == [
        ("observation", ["N", 3]),
        ("action", ["N", 2]),
    ]
