"""Loads the class of an algorithm, and checks that the algorithm follows the rules of its base class.

If an installed package breaks a rule, the learner ends with one line that names the algorithm and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from td3_robot.bundle import layer_shapes
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.table import ALGORITHMS, broken_rule
from td3_robot.specs import RobotSpec
from td3_robot.util.text import one_line

_ROWS = 8  # observations in the random batch of :func:`check`
_LONGEST = 400  # characters of a list of shapes in an error
_CLOSE = 1e-3  # largest difference between two actions from -1 to 1 that count as equal


def load(name: str) -> type[Algorithm]:
    """The class of an algorithm.

    Raises:
        ConfigError: there is no such algorithm, its class cannot be imported, or the class breaks a rule.
    """
    kind = ALGORITHMS.load(name)
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise broken_rule(name, f"{ALGORITHMS.rows[name]} is no subclass of {Algorithm.__module__}.Algorithm")
    if kind.build is Algorithm.build:
        raise broken_rule(name, f"{kind.__name__} has no method build")
    if kind.update is Algorithm.update and kind.learn is Algorithm.learn:
        raise broken_rule(name, f"{kind.__name__} has no method update")
    if kind.consumes not in ("transitions", "rollouts"):
        raise broken_rule(name, f"{kind.__name__}.consumes is {kind.consumes!r}; allowed: transitions, rollouts")
    return kind


@torch.no_grad()
def check(made: Algorithm, spec: RobotSpec) -> None:
    """Check the policy, the values and the progress of a new algorithm.

    The policy server computes actions from the weights of the policy's linear layers. So the policy must have the
    hidden layers of ``network.hidden``, ReLU after each of them, and tanh after the output layer. The function compares
    the policy with these layers on random observations.

    Raises:
        ConfigError: the algorithm breaks a rule.
    """
    name, kind = made.config.algorithm, type(made).__name__
    random = made.random.get_state()
    if type(made).policy is Algorithm.policy and not hasattr(made, "actor"):
        raise broken_rule(name, f"{kind}.build sets no attribute actor")
    s = torch.randn((_ROWS, made.observation_size), generator=torch.Generator().manual_seed(0)).to(made.device)
    for averaged in (False, True):
        network = made.policy(averaged=averaged)
        if not isinstance(network, nn.Module):
            raise broken_rule(name, f"{kind}.policy returned {one_line(network)}; allowed: a torch.nn.Module")
        tensors, needed = made.actor_tensors(averaged=averaged), layer_shapes(spec, tuple(made.hidden))
        if (shapes := {key: tensor.shape for key, tensor in tensors.items()}) != needed:
            raise broken_rule(
                name, f"the policy's layers are {_listed(shapes)}; needed by network.hidden: {_listed(needed)}"
            )
        actions, served = network(s), _served([torch.from_numpy(tensor) for tensor in tensors.values()], s.cpu())
        if actions.shape != served.shape:
            raise broken_rule(name, f"the policy's actions have the shape {_shape(actions)}; needed: {_shape(served)}")
        difference = float((actions.cpu() - served).abs().max())
        if not difference <= _CLOSE:
            raise broken_rule(
                name,
                "the policy is no perceptron with ReLU after its hidden layers and tanh after its last layer, so the "
                f"policy server would compute other actions (difference: {difference:.3g})",
            )
    for action in (torch.zeros(_ROWS, made.action_size, device=made.device), None):
        values = made.values(s, action)
        if values is not None and (not isinstance(values, Tensor) or values.shape != (_ROWS, 1)):
            found = f"the shape {_shape(values)}" if isinstance(values, Tensor) else one_line(values)
            raise broken_rule(name, f"{kind}.values returned {found} for {_ROWS} observations; needed: [{_ROWS}, 1]")
    progress = made.progress
    if progress is not None and not (isinstance(progress, (int, float)) and 0 <= progress <= 1):
        raise broken_rule(name, f"{kind}.progress is {one_line(progress)}; allowed: None, or a number from 0 to 1")
    made.random.set_state(random)  # the check changes no number of the training


def _served(parameters: list[Tensor], x: Tensor) -> Tensor:
    """The actions that a policy server computes, float32[B, A], before it scales them to the robot's limits.

    ``parameters`` are the weight [out, in] and the bias [out] of each layer in turn. ``x`` is float32[B, O].
    """
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    for weight, bias in layers[:-1]:
        x = torch.relu(x @ weight.T + bias)
    weight, bias = layers[-1]
    return torch.tanh(x @ weight.T + bias)


def _listed(shapes: Mapping[str, Any]) -> str:
    return one_line(", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()), _LONGEST)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
