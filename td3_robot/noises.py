"""The table of exploration noises and their parameters.

The classes are in :mod:`td3_robot.policy.noise` and :mod:`td3_robot.policy.noise_v2`. The first module also explains
how to write such a class. Configurations and policy bundles name a noise by its key in this table.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from td3_robot.errors import ConfigError
from td3_robot.registry import Registry
from td3_robot.util.text import did_you_mean, one_line

NOISES = Registry(
    "exploration noise",
    {
        "none": "td3_robot.policy.noise:NoNoise",
        "gaussian": "td3_robot.policy.noise:Gaussian",
        "uniform": "td3_robot.policy.noise:Uniform",
        "ornstein_uhlenbeck": "td3_robot.policy.noise:OrnsteinUhlenbeck",
        "categorical": "td3_robot.policy.noise:Categorical",
        "gaussian_v2": "td3_robot.policy.noise_v2:GaussianV2",
        "uniform_v2": "td3_robot.policy.noise_v2:UniformV2",
        "ornstein_uhlenbeck_v2": "td3_robot.policy.noise_v2:OrnsteinUhlenbeckV2",
        "categorical_v2": "td3_robot.policy.noise_v2:CategoricalV2",
    },
    "td3_robot.noises",
)
CHOSEN_BY_THE_LEARNER = ("none", "uniform", "categorical", "uniform_v2", "categorical_v2")
"""Noises that a configuration cannot name. The learner chooses uniform noise for the warm-up, and categorical noise to
draw discrete actions. A policy without exploration has the noise ``none``."""
FIRST_INSTALLED, LAST_INSTALLED = 1000, (1 << 32) - 1
"""The lowest and the highest NUMBER that a noise of an installed package may have."""
_V2 = {kind: f"{kind}_v2" for kind in ("gaussian", "uniform", "ornstein_uhlenbeck", "categorical")}
"""The successor of each old kind. The old kinds draw the numbers robot by robot. Old runs use the old kinds."""


def like(kind: str, configured: str) -> str:
    """Return ``kind`` or its ``_v2`` kind, to match the ``configured`` noise.

    If the configured noise is a ``_v2`` kind, the result is the successor of ``kind``, for example ``uniform_v2`` for
    ``uniform``. Otherwise, the result is ``kind`` itself. So an old run draws the same random numbers again.
    """
    return _V2.get(kind, kind) if configured in _V2.values() else kind


class Parameter(NamedTuple):
    """A parameter of a noise: its default, and the lowest and highest allowed value."""

    default: float
    low: float
    high: float


def load(kind: str) -> Any:
    """Return the class of a noise.

    Raises:
        ConfigError: there is no such noise, it cannot be loaded, or it is no :class:`td3_robot.policy.noise.Noise` with
            a :class:`Parameter` for each name in PARAMETERS.
    """
    noise = NOISES.load(kind)
    base = importlib.import_module("td3_robot.policy.noise").Noise  # that module imports this one
    where = f"{NOISES.kind} {kind!r}"
    if not (isinstance(noise, type) and issubclass(noise, base)):
        raise ConfigError(f"{where} is {NOISES.rows[kind]}; it must be a subclass of {base.__module__}.Noise")
    known = getattr(noise, "PARAMETERS", None)
    if not (isinstance(known, Mapping) and all(isinstance(value, Parameter) for value in known.values())):
        raise ConfigError(
            f"{where} ({NOISES.rows[kind]}): PARAMETERS is {one_line(known)}; "
            f"it must map each name to a {__name__}.Parameter(default, low, high)"
        )
    return noise


def check(kind: str) -> None:
    """Check a noise that a configuration names.

    Raises:
        ConfigError: see :func:`load`; or another installed noise has the same NUMBER.
    """
    noise = load(kind)
    if noise.NUMBER < FIRST_INSTALLED:
        return  # a shipped noise; do not load installed packages for it
    for name, other in _loaded():
        if other.NUMBER == noise.NUMBER and other is not noise:
            raise ConfigError(
                f"{NOISES.kind} {kind!r} ({NOISES.rows[kind]}) has the NUMBER {noise.NUMBER} of {name!r} "
                f"({NOISES.rows[name]}); each noise needs another number from {FIRST_INSTALLED} to {LAST_INSTALLED}"
            )


def _loaded() -> Iterator[tuple[str, Any]]:
    """Yield the name and the class of each noise that can be loaded."""
    for name in NOISES.names():
        with contextlib.suppress(ConfigError):
            yield name, load(name)


def parameters(kind: str, given: Mapping[str, float]) -> dict[str, float]:
    """All parameters of a noise: the given values, and the defaults of the others.

    Raises:
        ConfigError: there is no such noise or parameter, or a value is out of range.
    """
    known: Mapping[str, Parameter] = load(kind).PARAMETERS
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{kind} noise has no parameter {name!r}; {did_you_mean(name, known, 'allowed:')}")
        _, low, high = known[name]
        if not low <= value <= high:
            raise ConfigError(f"{name} of {kind} noise is {value}; allowed: {low:g} to {high:g}")
    return {name: given.get(name, parameter.default) for name, parameter in known.items()}


def name_of(number: int) -> str:
    """The name of the noise with this ``noise_kind``; the number as text if this process finds no name."""
    return next((name for name, noise in _loaded() if number == noise.NUMBER), str(number))
