"""A policy as one self-describing file. Weights messages carry the same bytes.

The format is safetensors. The file holds the float32 tensors ``actor.0.weight`` [out, in], ``actor.0.bias`` [out], …
in layer order. The actor applies ReLU between two layers, and tanh after the last layer. If observations are
normalised, the file also holds ``observation.mean`` and ``observation.std`` [in]. The metadata key ``td3_robot`` holds
a JSON header with everything else. Reading a bundle runs no code, and refuses tensors that do not fit the header.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import safetensors.numpy
from msgspec import Meta
from safetensors import SafetensorError

from td3_robot import noises
from td3_robot.errors import BundleError, ConfigError
from td3_robot.safety import limits as safety
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Float32, RobotSpec

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
OBSERVATION_MEAN, OBSERVATION_STD = "observation.mean", "observation.std"
OBSERVATION_CLIP = 10.0
"""The actor clips normalised observations to [-10, 10]."""
_KEY = "td3_robot"
_LONGEST = 1 << 28  # bytes of a file
_MAX_VERSION = 2**63 - 1  # highest version that a person can load
MAX_HEADER = 1 << 22  # bytes of the safetensors header


@dataclass(frozen=True)
class Exploration:
    """How the policy server explores.

    Attributes:
        kind: name of a row of :data:`td3_robot.noises.NOISES`.
        scale: sets the standard deviation of the noise. With scale 1, this deviation is half the range of each action.
            For Ornstein-Uhlenbeck noise, the scale sets the standard deviation of the normal numbers that drive the
            process. For categorical noise, the scale sets the temperature of the softmax. A pair [low, high] gives the
            robots of a source different scales from low to high. ``none``, ``uniform`` and ``uniform_v2`` ignore the
            scale.
        parameters: parameters of the noise by name. Missing parameters have their defaults.

    Raises:
        ConfigError: there is no such noise or parameter, or a value is out of range.
    """

    kind: str = "none"
    scale: float | tuple[float, float] = 0.0
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or len(self.kind) > 64:
            raise ConfigError(f"exploration kind is {repr(self.kind)[:80]}; allowed: text of at most 64 characters")
        low, high = self.scale if isinstance(self.scale, tuple) else (self.scale, self.scale)
        if not 0 <= low <= high < float("inf"):
            raise ConfigError(f"exploration scale is {self.scale}; allowed: 0 or more, or [low, high]")
        object.__setattr__(self, "parameters", noises.parameters(self.kind, self.parameters))

    def describe(self) -> dict[str, Any]:
        """Return the value of ``exploration`` in a bundle's header."""
        return {"kind": self.kind, "scale": self.scale, **self.parameters}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Exploration:
        """The inverse of :meth:`describe`.

        A missing key or a wrong value raises ConfigError, KeyError, TypeError, ValueError or msgspec.ValidationError.
        """
        bare = cls(description["kind"], msgspec.convert(description["scale"], float | tuple[float, float]))
        return replace(bare, parameters={name: float(description[name]) for name in bare.parameters})


class _Header(msgspec.Struct):
    """The JSON header of a bundle, without the key ``format``."""

    spec: RobotSpec
    hidden: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 16)], ...], Meta(max_length=64)]
    exploration: dict[str, Any]
    provenance: dict[str, Any]
    safety: SafetyConfig = SafetyConfig()


@dataclass(frozen=True, eq=False)
class Bundle:
    """A policy.

    Attributes:
        hidden: widths of the hidden layers.
        tensors: float32; the module's docstring lists names and shapes.
        exploration: how the policy server explores with this policy.
        safety: the safety settings of the training. A policy server joins these settings with its own settings, see
            ``limits.joined``.
        provenance: version, updates, env_steps, task, seed, config, … as plain JSON values.
    """

    spec: RobotSpec
    hidden: tuple[int, ...]
    tensors: Mapping[str, Float32]
    exploration: Exploration = field(default_factory=Exploration)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    safety: SafetyConfig = field(default_factory=SafetyConfig)

    def encode(self) -> bytes:
        """The bytes of the file. The encoding is deterministic."""
        header = {
            "format": FORMAT,
            "spec": self.spec.describe(),
            "hidden": list(self.hidden),
            "exploration": self.exploration.describe(),
            "provenance": dict(self.provenance),
        }
        if settings := self.safety.settings():
            header["safety"] = settings
        return safetensors.numpy.save(
            {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()},
            metadata={_KEY: json.dumps(header)},
        )

    @classmethod
    def decode(cls, payload: bytes, source: str = "policy") -> Bundle:
        """Decode the bytes of a file or a Weights message; ``source`` names the bytes in errors.

        Raises:
            BundleError: the payload is not a bundle; or its format version or noise is unknown; or its provenance has a
                wrong version; or its tensors are not finite or do not fit the header.
        """
        try:
            header = read_metadata(payload, source)
            if "scalars" in header:
                how = "make a policy from it: td3-robot bundle create CHECKPOINT OUT.safetensors"
                raise BundleError(f"{source}: this is a learner's checkpoint; {how}")
            if header["format"] != FORMAT:
                raise BundleError(
                    f"{source}: bundle format {str(header['format'])[:40]!r}; this version reads format {FORMAT}"
                )
            found = msgspec.convert(header, _Header)
            exploration = Exploration.from_description(found.exploration)
            safety.joined(SafetyConfig(), found.safety, found.spec)
            tensors = safetensors.numpy.load(payload)
        except ConfigError as error:  # in the specification, the noise or the safety settings
            raise BundleError(f"{source}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError, SafetensorError, msgspec.ValidationError) as error:
            raise BundleError(f"{source}: damaged policy bundle ({type(error).__name__}: {error})") from None
        version = found.provenance.get("version", 0)
        if type(version) is not int or not 0 <= version <= _MAX_VERSION:
            allowed = f"a whole number from 0 to {_MAX_VERSION}"
            raise BundleError(f"{source}: provenance.version is {repr(version)[:40]}; allowed: {allowed}")
        _check_tensors(tensors, found.spec, found.hidden, source)
        return cls(found.spec, found.hidden, tensors, exploration, found.provenance, found.safety)

    @classmethod
    def verified(cls, payload: bytes, digest: str, source: str) -> Bundle:
        """Check the :func:`sha256` of the bytes, then :meth:`decode` them."""
        if sha256(payload) != digest:
            raise BundleError(f"{source}: the hash does not fit the payload")
        return cls.decode(payload, source)

    @property
    def version(self) -> int:
        """The number (1 or more) that the learner gave to the policy; 0 if the policy is not from a learner."""
        version = self.provenance.get("version")
        return version if isinstance(version, int) and version > 0 else 0

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError if that fails."""
        from td3_robot.util import files  # not at the top: cores import this module, and must not import I/O

        files.write_atomically(path, self.encode())

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read a file. See :meth:`load_with_bytes`."""
        return cls.load_with_bytes(path)[0]

    @classmethod
    def load_with_bytes(cls, path: Path) -> tuple[Bundle, bytes]:
        """Return the bundle and the bytes of a file. Raises BundleError if the file is unreadable or not a bundle."""
        from td3_robot.util import files

        try:
            payload = files.read(path, _LONGEST)
        except OSError as error:
            raise BundleError(f"policy {str(path)!r} cannot be read: {error.strerror}") from None
        return cls.decode(payload, f"policy {str(path)!r}"), payload


def read_metadata(payload: bytes, source: str) -> dict[str, Any]:
    """Read the JSON object ``td3_robot`` in the metadata of a safetensors file. Raises BundleError if there is none."""
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or not 2 <= length <= min(len(payload) - 8, MAX_HEADER):
        raise BundleError(f"{source}: not a safetensors file")
    try:
        header = json.loads(json.loads(payload[8 : 8 + length])["__metadata__"][_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError(f"{source}: the file has no td3_robot header") from None
    if not isinstance(header, dict):
        raise BundleError(f"{source}: its td3_robot header is not a map")
    return header


def layer_shapes(spec: RobotSpec, hidden: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor of the actor, in layer order."""
    sizes = (spec.observation_size, *hidden, spec.action_size)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        shapes[f"actor.{layer}.weight"] = (outputs, inputs)
        shapes[f"actor.{layer}.bias"] = (outputs,)
    return shapes


def sha256(payload: bytes) -> str:
    """Return the SHA-256 as hexadecimal text. Weights messages carry this text."""
    return hashlib.sha256(payload).hexdigest()


def _check_tensors(tensors: Mapping[str, Any], spec: RobotSpec, hidden: tuple[int, ...], source: str) -> None:
    shapes = layer_shapes(spec, hidden)
    if OBSERVATION_MEAN in tensors or OBSERVATION_STD in tensors:
        shapes |= dict.fromkeys((OBSERVATION_MEAN, OBSERVATION_STD), (spec.observation_size,))
    if tensors.keys() != shapes.keys():
        raise BundleError(f"{source}: its tensors are {sorted(tensors)[:8]}…; needed: {sorted(shapes)}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.dtype != np.float32 or tensor.shape != shape:
            raise BundleError(f"{source}: {name} is {tensor.dtype}{list(tensor.shape)}, needed is float32{list(shape)}")
        if not np.isfinite(tensor).all():
            raise BundleError(f"{source}: {name} holds values that are not finite")
    if OBSERVATION_STD in tensors and not (tensors[OBSERVATION_STD] > 0).all():
        lowest = tensors[OBSERVATION_STD].min()
        raise BundleError(f"{source}: the lowest {OBSERVATION_STD} is {lowest}; allowed: above 0")
