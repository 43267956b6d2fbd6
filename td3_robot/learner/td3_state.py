"""Everything that a TD3 consists of, as named arrays and JSON scalars, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.errors import BundleError
from td3_robot.learner.td3_metrics import GAUGES

if TYPE_CHECKING:
    from td3_robot.learner.td3 import TD3


def state(td3: TD3) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """See :meth:`TD3.state`."""
    arrays: dict[str, NDArray[Any]] = {name: array(tensor) for name, tensor in _tensors(td3).items()}
    arrays["generator"] = td3.random.get_state().numpy().copy()
    gauges = td3.measured.read_gauges(td3.updates)
    return arrays, {"updates": td3.updates, "sums_since": td3.measured.since, "gauges": gauges}


def restore(td3: TD3, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
    """See :meth:`TD3.restore`.

    Raises:
        BundleError: the state is incomplete, damaged or of other networks; nothing has changed then.
    """
    tensors = _tensors(td3)
    for name, tensor in tensors.items():
        saved = arrays.get(name)
        if saved is None or saved.shape != tensor.shape or saved.dtype != np.float32:
            found = "nothing" if saved is None else f"{saved.dtype}{list(saved.shape)}"
            raise BundleError(f"TD3 state: {name!r} is {found}; float32{list(tensor.shape)} belongs there")
    try:
        updates, sums_since = int(scalars["updates"]), int(scalars["sums_since"])
        gauges = {name: float(scalars["gauges"][name]) for name in GAUGES}
        td3.random.set_state(torch.tensor(arrays["generator"], dtype=torch.uint8))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BundleError(f"TD3 state: {type(error).__name__} {error}") from None
    for name, tensor in tensors.items():
        tensor.copy_(torch.tensor(arrays[name]))
    for network in (td3.actor, td3.actor_target, td3.critics, td3.critics_target):
        network.refresh()
    td3.updates = updates
    td3.measured.restore(sums_since, gauges, updates)


def array(tensor: Tensor) -> NDArray[np.float32]:
    """A copy in numpy."""
    copy: NDArray[np.float32] = tensor.detach().cpu().numpy().copy()
    return copy


def _tensors(td3: TD3) -> dict[str, Tensor]:
    """Every float32 tensor of the state, by a name of the form ``ROLE/HEAD.LAYER.weight``."""
    tensors = {"metrics": td3.measured.sums}
    for network, target, optimiser in (
        (td3.actor, td3.actor_target, td3.actor_adam),
        (td3.critics, td3.critics_target, td3.critics_adam),
    ):
        for role, vector in (
            ("online", network.flat),
            ("target", target.flat),
            ("adam_mean", optimiser.mean),
            ("adam_square", optimiser.square),
        ):
            tensors |= {f"{role}/{name}": view for name, view in network.layout.views(vector).items()}
    if td3.config.policy_average:
        average = td3.actor.layout.views(td3.actor_average.flat)
        tensors |= {f"average/{name}": view for name, view in average.items()}
    tensors["adam_count/actor"] = td3.actor_adam.count
    tensors["adam_count/critics"] = td3.critics_adam.count
    return tensors
