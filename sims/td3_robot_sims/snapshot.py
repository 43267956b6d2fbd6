"""A snapshot of a simulator: the payload of a SimulatorState, as safetensors with a JSON header."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from td3_robot.bundle import read_metadata, sha256
from td3_robot.errors import BundleError, ProtocolError
from td3_robot.messages import MAX_PAYLOAD, Step
from td3_robot.transport import codec

if TYPE_CHECKING:
    from td3_robot_sims.vector_env import VectorEnvironment

FORMAT = 1
_STEP = "step"
_ROBOTS = "fleet."  # the names of the robots' arrays begin with this; do not change it, because checkpoints contain it


def encode(envs: VectorEnvironment, transitions: int, step: Step | None) -> bytes:
    """Encode the state of a simulator. ``step`` is its newest published Step, or None before the first Step.

    Raises:
        BundleError: the state does not fit into a message.
    """
    arrays: dict[str, NDArray[Any]] = {f"{_ROBOTS}{name}": array for name, array in envs.save_state().items()}
    if step:
        arrays[_STEP] = np.frombuffer(codec.encode(step), np.uint8)
    header = {"format": FORMAT, "task": envs.spec.name, "robots": len(envs), "transitions": transitions}
    payload: bytes = safetensors.numpy.save(arrays, metadata={"td3_robot": json.dumps(header)})
    if len(payload) > MAX_PAYLOAD:
        raise BundleError(
            f"the state of {len(envs)} robots takes {len(payload):,} bytes; a message may hold {MAX_PAYLOAD:,}; "
            "use fewer robots in each simulator"
        )
    return payload


def restore(payload: bytes, envs: VectorEnvironment) -> tuple[int, Step | None, list[str]]:
    """Set the robots to a state that :func:`encode` has encoded.

    Returns:
        The number of transitions, the newest Step (None before the first), and a reason for each robot that cannot be
        restored. Such a robot begins a new episode.

    Raises:
        BundleError: the payload is damaged, or its format, its task or its number of robots is different.
    """
    where = f"saved simulator ({sha256(payload)[:8]})"
    sizes = {"N": len(envs), "O": envs.spec.observation_size, "A": envs.spec.action_size}
    try:
        header = read_metadata(payload, where)
        arrays: dict[str, NDArray[Any]] = safetensors.numpy.load(payload)
        found = header["format"], header["task"], header["robots"]
        if found != (FORMAT, envs.spec.name, len(envs)):
            raise BundleError(
                f"{where}: format, task and number of robots are {found}, not {FORMAT, envs.spec.name, len(envs)}"
            )
        step = codec.decode(Step.NAME, arrays.pop(_STEP).tobytes(), sizes) if _STEP in arrays else None
        assert step is None or isinstance(step, Step)
        transitions = int(header["transitions"])
        reasons = envs.restore_state({name.removeprefix(_ROBOTS): array for name, array in arrays.items()})
    except (SafetensorError, ProtocolError, KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{where} is damaged: {type(error).__name__} {error}") from None
    return transitions, step, reasons
