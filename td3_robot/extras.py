"""Which extra of the package brings a module that is not installed."""

from __future__ import annotations

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


def missing(error: ModuleNotFoundError) -> str | None:
    """What to do about a module that could not be imported, in words; None if no extra brings it."""
    extra = _EXTRAS.get((error.name or "").split(".")[0])
    return f"needs {error.name}, which is not installed; pip install 'td3-robot[{extra}]'" if extra else None
