"""Policies of Stable-Baselines3's TD3 (and DDPG, which saves the same) as bundles.

SB3's zip holds ``policy.pth``, a ``torch.save`` file with the networks, and ``data``, JSON whose values are in part
base64 of pickles. Of ``data`` only the plain text is looked at, of ``policy.pth`` only what :mod:`.torch_zip`
reads. The actor there is ``actor.mu``: linear layers with an activation between them and tanh at the end, its output
in [-1, 1] scaled to the limits of the action space: what a bundle describes, if the activation is ReLU.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.bundle import Bundle, sha256
from td3_robot.convert.torch_zip import open_zip, read_member, read_state_dict
from td3_robot.errors import BundleError
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util import files

_LONGEST = 1 << 30  # bytes; with both optimisers it is some ten times the policy
_LAYER = re.compile(r"actor\.mu\.(\d+)\.(weight|bias)")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf)")


def read(path: Path, spec: RobotSpec) -> Bundle:
    """The policy in an SB3 zip, for the robot that it was trained on.

    Raises:
        BundleError: the file cannot be read, is not a TD3 model, uses what a bundle cannot describe, or does not fit
            the robot: sizes, or limits of actions.
    """
    source = f"Stable-Baselines3 model {str(path)!r}"
    try:
        content = files.read(path, _LONGEST)
    except OSError as error:
        raise BundleError(f"{source} cannot be read: {error.strerror}") from None
    archive = open_zip(content, source)
    data = _data(read_member(archive, "data", source), source)
    tensors = _actor(read_state_dict(read_member(archive, "policy.pth", source), source, "actor."), source)
    _check_limits(data, spec, source)
    hidden = tuple(len(tensors[f"actor.{layer}.bias"]) for layer in range(len(tensors) // 2 - 1))
    version = "unknown"
    if "_stable_baselines3_version" in archive.namelist():
        version = read_member(archive, "_stable_baselines3_version", source, 64).decode("ascii", "replace")
    provenance = {
        "version": 1,
        "imported_from": "stable-baselines3",
        "stable_baselines3": version,
        "file": path.name,
        "sha256": sha256(content),
        "env_steps": _whole(data.get("num_timesteps")),
        "updates": _whole(data.get("_n_updates")),
    }
    bundle = Bundle(spec, hidden, tensors, provenance=provenance)
    return Bundle.decode(bundle.encode(), source)  # whose checks of shapes and values hold for every bundle


def _data(content: bytes, source: str) -> dict[str, Any]:
    try:
        data = json.loads(content)
        kind = str(data["policy_class"]["__module__"])
        settings = data.get("policy_kwargs") or {}
        activation = str(settings.get("activation_fn", "torch.nn.modules.activation.ReLU"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{source}: its data are not those of a model ({type(error).__name__})") from None
    if kind != "stable_baselines3.td3.policies":
        raise BundleError(f"{source}: its policy is of {kind[:60]}; needed is one of TD3 or DDPG")
    if not activation.removesuffix("'>").endswith("activation.ReLU"):
        raise BundleError(f"{source}: its activation is {activation[:60]}; a bundle has ReLU between its layers")
    return dict(data)


def _actor(state: dict[str, Float32], source: str) -> dict[str, Float32]:
    """The layers of ``actor.mu``, whose indices count activations too, in a bundle's names."""
    found = {name: match for name in state if (match := _LAYER.fullmatch(name))}
    if not found or len(found) != len(state):
        strange = next((name for name in state if name not in found), "no actor.mu")
        raise BundleError(f"{source}: its actor has {strange[:60]!r}; needed are linear layers alone (MlpPolicy)")
    indices = sorted({int(match[1]) for match in found.values()})
    if indices != list(range(0, 2 * len(indices), 2)):
        raise BundleError(
            f"{source}: its actor has layers {indices[:8]}; needed is an activation after each linear one"
        )
    order = {index: layer for layer, index in enumerate(indices)}
    return {f"actor.{order[int(match[1])]}.{match[2]}": state[name] for name, match in found.items()}


def _check_limits(data: dict[str, Any], spec: RobotSpec, source: str) -> None:
    space = data.get("action_space")
    if not isinstance(space, dict):
        return
    for key, mine in (("low", spec.action_low), ("high", spec.action_high)):
        text = str(space.get(key, ""))
        theirs = [float(number) for number in _NUMBER.findall(text)]
        if "..." in text or len(theirs) != len(mine):  # numpy shortens long arrays; sizes are checked with the tensors
            continue
        if not np.allclose(theirs, mine, rtol=1e-3, atol=1e-6):  # it prints some digits only
            raise BundleError(
                f"{source}: its actions' {key} is {theirs[:8]}, that of {spec.name} is {mine.tolist()[:8]}: "
                "it was trained on another robot"
            )


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0
