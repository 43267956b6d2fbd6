"""Converts a policy bundle to ONNX, for runtimes in C++ and other languages. Needs the extra ``onnx``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from td3_robot.bundle import OBSERVATION_CLIP, OBSERVATION_MEAN, OBSERVATION_STD, Bundle

OPSET = 13
IR_VERSION = 8
"""OPSET and IR_VERSION are old versions, because runtimes on robots may be old. The model needs no newer feature."""


def convert(bundle: Bundle) -> bytes:
    """Return the ONNX model of a policy: input ``observation`` float32[N, O], output ``action`` float32[N, A].

    N is any number of robots; O and A are the numbers of observation and action channels.

    Except for rounding, the model computes the actions of the policy server, but without noise and safety filter. If
    the bundle normalises observations, the model does so, too. It computes the ReLU layers and tanh, scales the actions
    to their limits, and clips them. The metadata key ``td3_robot`` holds specification and provenance as JSON.
    """
    spec = bundle.spec
    half = (spec.action_high - spec.action_low) / np.float32(2)
    middle = (spec.action_high + spec.action_low) / np.float32(2)
    constants: dict[str, Any] = {
        **bundle.tensors,
        "half": half,
        "middle": middle,
        "low": spec.action_low,
        "high": spec.action_high,
    }
    nodes = []
    value = "observation"
    if OBSERVATION_MEAN in bundle.tensors:
        constants |= {"least": np.float32(-OBSERVATION_CLIP), "most": np.float32(OBSERVATION_CLIP)}
        nodes += [
            helper.make_node("Sub", [value, OBSERVATION_MEAN], ["centred"]),
            helper.make_node("Div", ["centred", OBSERVATION_STD], ["normal"]),
            helper.make_node("Clip", ["normal", "least", "most"], ["normalised"]),
        ]
        value = "normalised"
    last = len(bundle.hidden)
    for layer in range(last + 1):
        inputs = [value, f"actor.{layer}.weight", f"actor.{layer}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [f"linear.{layer}"], transB=1))
        value = f"active.{layer}"
        nodes.append(helper.make_node("Relu" if layer < last else "Tanh", [f"linear.{layer}"], [value]))
    nodes += [
        helper.make_node("Mul", [value, "half"], ["scaled"]),
        helper.make_node("Add", ["scaled", "middle"], ["moved"]),
        helper.make_node("Max", ["moved", "low"], ["above"]),
        helper.make_node("Min", ["above", "high"], ["action"]),
    ]
    graph = helper.make_graph(
        nodes,
        spec.name,
        [helper.make_tensor_value_info("observation", TensorProto.FLOAT, ["N", spec.observation_size])],
        [helper.make_tensor_value_info("action", TensorProto.FLOAT, ["N", spec.action_size])],
        [numpy_helper.from_array(np.asarray(array, np.float32, order="C"), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, producer_name="td3-robot", opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    described = {"spec": spec.describe(), "provenance": dict(bundle.provenance)}
    helper.set_model_props(model, {"td3_robot": json.dumps(described)})
    onnx.checker.check_model(model)
    encoded: bytes = model.SerializeToString()
    return encoded
