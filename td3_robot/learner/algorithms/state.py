"""Collects the state of an algorithm from its attributes, as named arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from td3_robot.errors import ConfigError
from td3_robot.learner.checkpointing.stateful import Arrays


def parts(owner: object) -> Iterator[tuple[str, Any]]:
    """The attributes of ``owner`` with their names, and then the elements of its lists, tuples and dictionaries.

    An element has the name ``attribute.index`` or ``attribute.key``.
    """
    attributes = vars(owner)
    yield from attributes.items()
    for attribute, value in attributes.items():
        if isinstance(value, list | tuple):
            yield from ((f"{attribute}.{index}", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{attribute}.{key}", item) for key, item in value.items())


def tensors(owner: object) -> dict[str, Tensor]:
    """The tensors of the :func:`parts` of ``owner``. A tensor of a module gets the name ``part.name``.

    In lists, tuples and dictionaries, only modules and parameters count. An object with two names appears once, and so
    does a part of a module.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for part, value in parts(owner):
        if id(value) in seen:
            continue
        if isinstance(value, nn.Module):
            seen.update(map(id, (*value.modules(), *value.parameters())))
            found |= {f"{part}.{name}": tensor for name, tensor in value.state_dict().items()}
        elif isinstance(value, Tensor) and (part in vars(owner) or (value.is_leaf and value.requires_grad)):
            seen.add(id(value))
            found[part] = value.detach()
    return found


def optimisers(owner: object) -> dict[str, Optimizer]:
    """The optimisers among the :func:`parts` of ``owner``, by name. An optimiser with two names appears once."""
    found: dict[str, Optimizer] = {}
    for part, value in parts(owner):
        if isinstance(value, Optimizer) and value not in found.values():
            found[part] = value
    return found


def optimiser_tensors(owner: object) -> dict[str, Tensor]:
    """The tensors that the optimisers keep for each parameter. Before the first step, there are no such tensors.

    The key is ``optimiser.index.name``: the optimiser's name, the parameter's index and the tensor's name.

    Raises:
        ConfigError: an optimiser keeps something that a checkpoint cannot hold.
    """
    found: dict[str, Tensor] = {}
    for part, optimiser in optimisers(owner).items():
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        for index, kept in optimiser.state_dict()["state"].items():
            for name, value in kept.items():
                if not isinstance(value, Tensor) or value.shape not in ((), parameters[index].shape):
                    raise ConfigError(
                        f"the algorithm's optimiser {part!r} is {type(optimiser).__name__}, whose state {name!r} a "
                        "checkpoint cannot hold; allowed: optimisers whose state has one number or one tensor of the "
                        "parameter's shape, for example Adam and SGD"
                    )
                found[f"{part}.{index}.{name}"] = value
    return found


def partly_stepped(owner: object) -> dict[str, list[int]]:
    """Optimisers that have changed only some of their parameters, with the indices of these parameters.

    An optimiser keeps no state for a parameter that never had a gradient.
    """
    found = {part: optimiser.state_dict() for part, optimiser in optimisers(owner).items()}
    counts = {part: sum(len(group["params"]) for group in kept["param_groups"]) for part, kept in found.items()}
    return {part: sorted(kept["state"]) for part, kept in found.items() if 0 < len(kept["state"]) < counts[part]}


def read_optimisers(
    owner: object, arrays: Arrays, partly: Mapping[str, Sequence[int]]
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """The saved state of each optimiser, in the form that its ``load_state_dict`` takes.

    ``partly`` is the value of :func:`partly_stepped` when the state was saved.
    """
    found: list[tuple[Optimizer, dict[str, Any]]] = []
    for part, optimiser in optimisers(owner).items():
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        kept: dict[int, dict[str, Tensor]] = {}
        for key, array in arrays.items():
            if key.startswith(f"{part}."):
                index, _, name = key.removeprefix(f"{part}.").partition(".")
                if array.shape not in ((), tuple(parameters[int(index)].shape)):
                    raise ValueError(f"{key!r} is {array.dtype}{list(array.shape)}, which does not fit the networks")
                kept.setdefault(int(index), {})[name] = torch.tensor(array)
        stepped = list(partly.get(part, range(len(parameters))))
        complete = sorted(kept) == stepped and len(set(map(frozenset, kept.values()))) == 1
        if (kept or part in partly) and not complete:
            raise ValueError(f"{part!r} is incomplete")
        found.append((optimiser, {"state": kept, "param_groups": optimiser.state_dict()["param_groups"]}))
    return found


def to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    copy: NDArray[np.float32] = tensor.detach().cpu().numpy().copy()
    return copy
