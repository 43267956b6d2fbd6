"""Which extra of the package brings a module that is not installed."""

from __future__ import annotations

import sys

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
    "pyarrow": "export",
    "minari": "minari",
    "h5py": "minari",
}
NEEDED = {
    "train": ("torch", "tensorboard", "matplotlib", "pybullet", "gymnasium"),
    "eval": ("gymnasium", "pybullet"),
    "record": ("mcap",),
    "export --format parquet": ("mcap", "pyarrow"),
    "export --format minari": ("mcap", "minari"),
    "bundle export --onnx": ("onnx",),
}
"""Commands, and the modules that they need beyond the base install."""


def missing(error: ModuleNotFoundError) -> str | None:
    """What to do about a module that could not be imported, in words; None if no extra brings it."""
    extra = _EXTRAS.get((error.name or "").split(".")[0])
    if extra == "sim" and sys.version_info >= (3, 12) and (error.name or "").startswith("pybullet"):
        version = ".".join(map(str, sys.version_info[:2]))
        return f"needs {error.name}, which has wheels for Python 3.10 and 3.11, not for {version}"
    return f"needs {error.name}, which is not installed; pip install 'td3-robot[{extra}]'" if extra else None
