"""Converts policies of Stable-Baselines3's TD3 and DDPG to bundles. Needs the extra ``learner``, for torch.

This module reads three members of SB3's zip. ``policy.pth`` is a file of ``torch.save`` with the networks. ``data`` is
JSON; some of its values are pickles, encoded as base64. ``_stable_baselines3_version`` is text. This module ignores the
pickles, because they could run code. It reads ``policy.pth`` with torch's safe loader, which makes tensors and runs no
code from the file.

The actor is ``actor.mu``: linear layers with an activation between them, and tanh at the end. SB3 scales the actor's
output from [-1, 1] to the limits of the action space. A bundle can describe this actor if the activation is ReLU.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from td3_robot.bundle import Bundle, sha256
from td3_robot.errors import BundleError
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util import files

_LONGEST = 1 << 30  # bytes of the zip, packed or unpacked; so large because the zip also holds critics and optimisers
_LONGEST_MEMBER = 1 << 28  # bytes of one unpacked member of the zip
_LAYER = re.compile(r"actor\.mu\.(\d+)\.(weight|bias)")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf)")


def read(path: Path, spec: RobotSpec) -> Bundle:
    """Read the policy in an SB3 zip, for the robot with this specification.

    Raises:
        BundleError: the file is unreadable, is not a TD3 or DDPG model, does not fit the robot, or has a policy that a
            bundle cannot describe.
    """
    source = f"Stable-Baselines3 model {str(path)!r}"
    try:
        content = files.read(path, _LONGEST)
    except OSError as error:
        raise BundleError(f"{source} cannot be read: {error.strerror}") from None
    archive = _zip(content, source)
    data = _data(_member(archive, "data", source), source)
    tensors = _layers(_actor(_member(archive, "policy.pth", source), source), source)
    _check_limits(data, spec, source)
    hidden = tuple(len(tensors[f"actor.{layer}.bias"]) for layer in range(len(tensors) // 2 - 1))
    version = "unknown"
    if "_stable_baselines3_version" in archive.namelist():
        version = _member(archive, "_stable_baselines3_version", source)[:64].decode("ascii", "replace")
    provenance = {
        "version": 1,
        "imported_from": "stable-baselines3",
        "stable_baselines3": version,
        "file": path.name,
        "sha256": sha256(content),
        "env_steps": _count(data.get("num_timesteps")),
        "updates": _count(data.get("_n_updates")),
    }
    bundle = Bundle(spec, hidden, tensors, provenance=provenance)
    return Bundle.decode(bundle.encode(), source)  # checks shapes and values, as for every bundle


def _zip(content: bytes, source: str) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise BundleError(f"{source}: not a zip file ({error})") from None
    if sum(member.file_size for member in archive.infolist()) > _LONGEST:
        raise BundleError(f"{source}: its members have more than {_LONGEST:,} bytes")
    return archive


def _member(archive: zipfile.ZipFile, name: str, source: str) -> bytes:
    try:
        with archive.open(name) as file:
            content = file.read(_LONGEST_MEMBER + 1)
    except KeyError:
        raise BundleError(f"{source}: it has no member {name!r}") from None
    except Exception as error:  # zipfile raises a dozen unrelated types for damaged members
        raise BundleError(f"{source}: member {name!r} is damaged ({type(error).__name__}: {error})") from None
    if len(content) > _LONGEST_MEMBER:
        raise BundleError(f"{source}: member {name!r} has more than {_LONGEST_MEMBER:,} bytes")
    return content


def _actor(content: bytes, source: str) -> dict[str, Float32]:
    """Return the actor's float32 tensors from a file of ``torch.save``."""
    _zip(content, f"{source}: policy.pth")  # refuses torch's older formats, which would avoid the size limits
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        tensors = {name: tensor for name, tensor in state.items() if name.startswith("actor.")}
    except Exception as error:  # torch raises a dozen unrelated types for damaged files
        reason = " ".join(str(error).split())[:200]
        raise BundleError(f"{source}: policy.pth is not a plain dictionary of tensors ({reason})") from None
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise BundleError(f"{source}: {name[:60]!r} is not a float32 tensor")
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def _data(content: bytes, source: str) -> dict[str, Any]:
    try:
        data = json.loads(content)
        kind = str(data["policy_class"]["__module__"])
        settings = data.get("policy_kwargs") or {}
        activation = str(settings.get("activation_fn", "torch.nn.modules.activation.ReLU"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{source}: its data does not describe a model ({type(error).__name__})") from None
    if kind != "stable_baselines3.td3.policies":
        raise BundleError(f"{source}: its policy is from {kind[:60]}; allowed: TD3 and DDPG")
    if not activation.removesuffix("'>").endswith("activation.ReLU"):
        raise BundleError(f"{source}: its activation is {activation[:60]}; allowed: ReLU")
    return dict(data)


def _layers(state: dict[str, Float32], source: str) -> dict[str, Float32]:
    """Return the layers of ``actor.mu``, named as in a bundle.

    SB3 counts activations as layers, too. So its linear layers have the indices 0, 2, 4, …
    """
    found = {name: match for name in state if (match := _LAYER.fullmatch(name))}
    strange = next((repr(name[:60]) for name in state if name not in found), "" if found else "no layers")
    if strange:
        raise BundleError(f"{source}: its actor has {strange}; allowed: only linear layers (MlpPolicy)")
    indices = sorted({int(match[1]) for match in found.values()})
    if indices != list(range(0, 2 * len(indices), 2)):
        raise BundleError(
            f"{source}: its actor has linear layers at indices {indices[:8]}; allowed: 0, 2, 4, …, with an activation "
            "after each"
        )
    if len(found) != 2 * len(indices):
        raise BundleError(f"{source}: its actor has a layer whose weight or bias is missing")
    order = {index: layer for layer, index in enumerate(indices)}
    return {f"actor.{order[int(match[1])]}.{match[2]}": state[name] for name, match in found.items()}


def _check_limits(data: dict[str, Any], spec: RobotSpec, source: str) -> None:
    space = data.get("action_space")
    if not isinstance(space, dict):
        return
    for name, key, mine in (("lower", "low", spec.action_low), ("upper", "high", spec.action_high)):
        text = str(space.get(key, ""))
        theirs = [float(number) for number in _NUMBER.findall(text)]
        shortened = "..." in text or len(theirs) != len(mine)  # numpy shortens long arrays
        if not shortened and not np.allclose(theirs, mine, rtol=1e-3, atol=1e-6):  # SB3 prints a few digits only
            raise BundleError(
                f"{source}: the {name} limits of its actions are {theirs[:8]}, {spec.name} has {mine.tolist()[:8]}: "
                "the model was trained on another robot"
            )


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0
