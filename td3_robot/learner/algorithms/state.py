"""Collects the state of an algorithm from its attributes, as named arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from td3_robot.learner.checkpointing.stateful import Arrays


def tensors(owner: object) -> dict[str, Tensor]:
    """The tensors in the attributes of ``owner``. A tensor of a module gets the name ``attribute.name``.

    A module that two attributes share appears once.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for attribute, value in vars(owner).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found |= {f"{attribute}.{name}": tensor for name, tensor in value.state_dict().items()}
        elif isinstance(value, Tensor):
            found[attribute] = value.detach()
    return found


def optimisers(owner: object) -> dict[str, Optimizer]:
    """The optimisers in attributes of ``owner``, by the attribute's name."""
    return {attribute: value for attribute, value in vars(owner).items() if isinstance(value, Optimizer)}


def optimiser_tensors(owner: object) -> dict[str, Tensor]:
    """The tensors that the optimisers keep for each parameter. Before the first step, there are no such tensors.

    The key is ``attribute.index.name``: the optimiser's attribute, the parameter's index and the tensor's name.
    """
    return {
        f"{attribute}.{index}.{name}": value
        for attribute, optimiser in optimisers(owner).items()
        for index, kept in optimiser.state_dict()["state"].items()
        for name, value in kept.items()
    }


def read_optimisers(owner: object, arrays: Arrays) -> list[tuple[Optimizer, dict[str, Any]]]:
    """The saved state of each optimiser, in the form that its ``load_state_dict`` takes."""
    found: list[tuple[Optimizer, dict[str, Any]]] = []
    for attribute, optimiser in optimisers(owner).items():
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        kept: dict[int, dict[str, Tensor]] = {}
        for key, array in arrays.items():
            if key.startswith(f"{attribute}."):
                index, _, name = key.removeprefix(f"{attribute}.").partition(".")
                if array.shape not in ((), tuple(parameters[int(index)].shape)):
                    raise ValueError(f"{key!r} is {array.dtype}{list(array.shape)}, which does not fit the networks")
                kept.setdefault(int(index), {})[name] = torch.tensor(array)
        complete = sorted(kept) == list(range(len(parameters))) and len(set(map(frozenset, kept.values()))) == 1
        if kept and not complete:
            raise ValueError(f"{attribute!r} is incomplete")
        found.append((optimiser, {"state": kept, "param_groups": optimiser.state_dict()["param_groups"]}))
    return found


def to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    copy: NDArray[np.float32] = tensor.detach().cpu().numpy().copy()
    return copy
