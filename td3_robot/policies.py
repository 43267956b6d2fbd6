"""Finds and loads policies by a shipped name, a run folder or a path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from td3_robot.bundle import Bundle
from td3_robot.errors import BundleError
from td3_robot.policy.actor import Actor
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.specs import Float32
from td3_robot.util import arguments, resources
from td3_robot.util.text import one_line, similar

_SUFFIX = ".safetensors"


def shipped_policies() -> dict[str, Path]:
    """Return the files of the policies that td3-robot ships, by name."""
    return {file.stem: file for file in sorted(resources.folder("policies").glob(f"*{_SUFFIX}"))}


def find_policy(name: str | Path) -> Path:
    """Return the file of a policy.

    Args:
        name: a shipped policy such as ``walker2d``, a run folder, or a policy file. If a file or folder has the name of
            a shipped policy, the function chooses the shipped policy. To choose the file or folder, write the text
            ``"./walker2d"``, not a Path: a Path drops the ``./``. From a run folder, the function chooses the best
            policy, or the final policy if the run has no best policy.

    Raises:
        BundleError: there is no such policy, or the folder holds no policy.
        TypeError: the name is not text and not a path.
    """
    if not isinstance(name, str | os.PathLike):
        allowed = f"a run folder, a {_SUFFIX} file or a shipped policy, as text or pathlib.Path"
        raise arguments.wrong_type("policy", name, allowed)
    shipped = shipped_policies()
    if str(name) in shipped:
        return shipped[str(name)]
    path = Path(name)
    with contextlib.suppress(OSError):  # the name is too long for a file
        if str(name) and path.is_dir():  # an empty name does not mean the working folder
            return _policy_of_run(RunFolder(path))
        if str(name) and path.exists():
            return path
    alike = similar(str(name), [*shipped, *_policies_beside(path)])
    allowed = f"allowed: a run folder, a {_SUFFIX} file, or a shipped policy ({', '.join(shipped)})"
    raise BundleError(f"there is no policy {str(name)!r}; {f'did you mean {alike[0]!r}?' if alike else allowed}")


def _policy_of_run(run: RunFolder) -> Path:
    for file in (run.best_file, run.policy_file):
        if file.is_file():
            return file
    names = f"neither {run.best_file.name} nor {run.policy_file.name}"
    why = "this run has not saved a policy yet" if run.config_file.is_file() else "it is not a run folder"
    raise BundleError(f"folder {str(run.path)!r} holds {names}: {why}")


def _policies_beside(path: Path) -> list[str]:
    """Return the run folders and policy files in the folder of a path."""
    with contextlib.suppress(OSError):
        return [
            str(other)
            for other in path.parent.iterdir()
            if other.suffix == _SUFFIX or (other / "config.yaml").is_file()
        ]
    return []


class Policy:
    """A trained policy that acts without noise. Needs only the base install.

    A policy reuses its buffers in each call. So give each thread its own policy.

    Args:
        bundle: the content of a policy file.
        source: name of the policy in errors.

    Attributes:
        spec: names, units and ranges of observations and actions, and the control period in s.
        provenance: where the policy comes from: task, algorithm, seed, env_steps, updates, config, …
    """

    def __init__(self, bundle: Bundle, source: str = "policy") -> None:
        self.bundle = bundle
        self.source = source
        self.spec = bundle.spec
        self.provenance: Mapping[str, Any] = bundle.provenance
        self._actor = Actor(bundle)

    def __repr__(self) -> str:
        spec = self.spec
        return f"<Policy for {spec.name}: {spec.observation_size} observations, {spec.action_size} actions>"

    def predict(self, observation: ArrayLike) -> Float32:
        """Return the actions for observations.

        Args:
            observation: numbers [O] for one robot or [N, O] for N robots, of any real dtype. The O channels have the
                order and units of ``spec.observations``. The policy computes with float32.

        Returns:
            float32[A] or float32[N, A], a new array. The A channels have the order, units and ranges of
            ``spec.actions``.

        Raises:
            ValueError: the observation is no array or has another shape, or a value is not real or is not finite in
                float32.
        """
        size = self.spec.observation_size
        needed = f"robot {self.spec.name!r} needs [{size}] or [N, {size}]"
        try:
            given = np.asarray(observation)
        except ValueError:
            raise ValueError(f"observation has rows of different lengths; {needed}") from None
        except (RuntimeError, TypeError) as error:  # for example a tensor of PyTorch that needs a gradient, or on a GPU
            raise ValueError(f"observation is no array: {one_line(str(error))}; {needed}") from None
        if given.ndim not in (1, 2) or given.shape[-1] != size:
            raise ValueError(f"observation has shape {list(given.shape)}; {needed}")
        if given.dtype.kind not in "fiu":
            raise ValueError(f"observation has dtype {given.dtype}; allowed: real numbers")
        with np.errstate(over="ignore"):  # the next check finds values that are too large
            rows = np.ascontiguousarray(np.atleast_2d(given), np.float32)
        if not np.isfinite(rows).all():
            row, channel = np.argwhere(~np.isfinite(rows))[0]
            where = self.spec.observations[channel].name + (f" of robot {row}" if given.ndim == 2 else "")
            raise ValueError(
                f"observation {where} is {np.atleast_2d(given)[row, channel]}; it must be finite in float32"
            )
        actions = self._actor(rows)
        return actions if given.ndim == 2 else actions[0]


def load_policy(source: str | Path) -> Policy:
    """Load a policy.

    Args:
        source: a shipped policy such as ``walker2d``, a run folder (its best policy, otherwise its final policy), or a
            policy file; see :func:`find_policy`.

    Raises:
        BundleError: there is no such policy, or its file is damaged. The error suggests similar names.
        TypeError: ``source`` is not text and not a path.
    """
    file = find_policy(source)
    return Policy(Bundle.load(file), str(file))
