"""Advice about modules that may be missing: modules of the package's extras, of ROS 2, and of the user."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator

from td3_robot.errors import USER_CODE
from td3_robot.util.text import exception_line

COMPLETING = "_ARGCOMPLETE"
"""Environment variable that a shell sets when it asks for completions, see argcomplete."""
_EXTRAS = {
    "torch": "learner",
    "tensorboard": "learner",
    "matplotlib": "learner",
    "pybullet": "sim",
    "pybullet_data": "sim",
    "gymnasium": "sim",
    "imageio": "sim",
    "onnx": "onnx",
    "mcap": "record",
    "zstandard": "record",
    "lz4": "record",
    "pyarrow": "export",
    "pandas": "pandas",
    "rosbags": "ros2",
    "foxglove": "foxglove",
    "minari": "minari",
    "h5py": "minari",
    "argcomplete": "completion",
    "starlette": "dashboard",
    "uvicorn": "dashboard",
    "ray": "cluster",
    "fsspec": "cluster",
}
_ROS = ("rcl_interfaces", "rclpy", "std_srvs")
"""Modules of a ROS 2 installation, in addition to modules whose names end with ``_msgs``."""
NEEDED = {
    "train": ("torch", "tensorboard", "matplotlib"),
    "tasks of PyBullet": ("pybullet",),
    "tasks of Gymnasium": ("gymnasium",),
    "record": ("mcap",),
    "Recording.to_pandas": ("mcap", "pandas"),
    "export --format parquet": ("mcap", "pyarrow"),
    "export --format ros2": ("mcap", "rosbags"),
    "export --format foxglove": ("mcap", "foxglove"),
    "export --format minari": ("mcap", "minari"),
    "monitor --foxglove": ("mcap", "foxglove"),
    "dashboard": ("starlette", "uvicorn"),
    "train --cluster": ("ray",),
    "ros2": ("rclpy",),
    "ros2 monitor": ("rclpy", "rosbags"),
    "bundle export --onnx": ("onnx",),
    "bundle import": ("torch",),
}
"""The modules that a command, a method or a kind of task needs in addition to the base install."""


def missing(error: ModuleNotFoundError, extra: str = "") -> str | None:
    """Return advice for a failed import; None if the module belongs neither to an extra nor to ROS 2.

    ``extra`` is the package extra that the advice recommends. For example, the command ``train`` calls this function
    with ``extra="train"``, because the package extra ``train`` installs all modules of the command. If ``extra`` is
    empty, the advice recommends the extra that the module belongs to.
    """
    module = (error.name or "").split(".")[0]
    if module in _ROS or module.endswith("_msgs"):
        source = "source the setup file of your ROS 2 installation and use its Python"
        return f"needs {error.name}, which is not installed; {source}, or for tests pip install 'td3-robot[ros2-node]'"
    if module in ("pybullet", "pybullet_data") and sys.version_info >= (3, 12):
        version = ".".join(map(str, sys.version_info[:2]))
        return f"needs {error.name}, which has wheels for Python 3.10 and 3.11, not for {version}"
    own = _EXTRAS.get(module)
    return f"needs {error.name}, which is not installed; pip install 'td3-robot[{extra or own}]'" if own else None


@contextlib.contextmanager
def advice() -> Iterator[None]:
    """If the block raises a ModuleNotFoundError, use the advice of :func:`missing` as the text of the error.

    If :func:`missing` returns no advice, the text does not change.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        text = missing(error)
        if text is None:
            raise
        raise ModuleNotFoundError(f"td3-robot {text}", name=error.name) from error


def import_user_module(module: str) -> str | None:
    """Import a module of the user. Return None, or the reason in one line if the import fails."""
    try:
        importlib.import_module(module)
    except USER_CODE as error:  # the user's code may raise anything
        where = f"; is the folder of {module!r} in PYTHONPATH?" if isinstance(error, ModuleNotFoundError) else ""
        return f"{exception_line(error)}{where}"
    return None
