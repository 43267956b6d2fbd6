"""Finds the file of a policy by a shipped name, a run folder or a path."""

from __future__ import annotations

import contextlib
from pathlib import Path

from td3_robot.errors import BundleError
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import resources
from td3_robot.util.text import similar

_SUFFIX = ".safetensors"


def shipped_policies() -> dict[str, Path]:
    """Return the files of the policies that td3-robot ships, by name."""
    return {file.stem: file for file in sorted(resources.folder("policies").glob(f"*{_SUFFIX}"))}


def find_policy(name: str | Path) -> Path:
    """Return the file of a policy.

    Args:
        name: a shipped policy such as ``walker2d``, a run folder, or a policy file. A shipped name comes before a file
            or folder of this name; write ``./walker2d`` for the folder. In a run folder, this is the best policy, or
            the final one if the run has no best policy.

    Raises:
        BundleError: there is no such policy, or the folder holds none.
    """
    shipped = shipped_policies()
    if str(name) in shipped:
        return shipped[str(name)]
    path = Path(name)
    with contextlib.suppress(OSError):  # the name is too long for a file
        if path.is_dir():
            return _policy_of_run(RunFolder(path))
        if path.exists():
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
