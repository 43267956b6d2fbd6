"""Replaces ``auto`` in ``learner.device``, ``learner.precision`` and ``learner.threads`` with the best values.

A resumed run keeps its precision and threads, so that its arithmetic does not change. If the run uses a cluster and
``learner.device`` is not ``cpu``, the learner itself replaces ``auto`` at each start, see :func:`resolve`. In all other
runs, a separate process replaces ``auto``, because loading torch costs one second and 200 MB. The command of this
process is ``python -m td3_robot.learner.machine_choices REQUEST``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from td3_robot.config.learner import LearnerConfig
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError, NodeError, Td3RobotError
from td3_robot.util.machine import available_cores

if TYPE_CHECKING:  # the import loads torch
    from td3_robot.learner.compute import Precision

AUTO = "auto"
# ``_fastest`` takes the first choice with at least this fraction of the highest speed. Among choices with the same
# precision, those with fewer threads come first, because they leave more processor cores for other processes.
_AS_FAST = 0.97
Sizes = tuple[int, int]
"""The sizes of observation and action."""


class Resolved(NamedTuple):
    """The result of :func:`resolve`."""

    config: Config  # contains ``auto`` only if the learner itself replaces ``auto`` at each start
    device_memory: int | None  # free bytes of the GPU; None on the CPU, or if the learner itself replaces ``auto``
    notices: list[str]  # lines for the user: the value of each replaced ``auto``, and the measured speeds


class Request(msgspec.Struct):
    """What the separate process needs.

    Attributes:
        begins: whether the precision is new for the run, see :func:`td3_robot.learner.compute.precision`.
        others: number of processes that share the processor cores with the learner.
    """

    learner: LearnerConfig
    hidden: tuple[int, ...]
    sizes: Sizes
    begins: bool
    lockstep: bool
    others: int


def resolve(
    config: Config, sizes: Callable[[], Sizes], before: Config | None = None, *, cluster: bool = False
) -> Resolved:
    """Choose device, precision and threads of a run.

    Args:
        sizes: returns the sizes of the robot's observation and action.
        before: the configuration of the resumed run, if any. Its precision and threads replace ``auto``.
        cluster: whether the learner runs on a host of a cluster, where it does not share the cores. There, the learner
            itself replaces ``auto`` at each start, unless ``learner.device`` is ``cpu``.

    Raises:
        ConfigError: this machine does not support the configured device or precision.
        NodeError: the separate process failed.
    """
    learner = config.learner
    if cluster and learner.device != "cpu":
        return Resolved(config, None, [])
    if before:
        kept = {key: getattr(before.learner, key) for key in ("precision", "threads") if getattr(learner, key) == AUTO}
        learner = replace(learner, **kept)
    if (learner.device, learner.precision) == ("cpu", "fp32") and learner.threads != AUTO:
        return Resolved(replace(config, learner=learner), None, [])
    begins = not before or before.learner.precision != learner.precision
    others = 0 if cluster else config.simulators + 1  # the simulators and the policy server
    request = Request(learner, config.network.hidden, sizes(), begins, config.timing == "lockstep", others)
    command = [sys.executable, "-m", "td3_robot.learner.machine_choices", msgspec.json.encode(request).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = done.stderr.strip().splitlines() or ["no message"]
    if done.returncode == ConfigError.exit_code:
        raise ConfigError(words[-1])
    if done.returncode:
        raise NodeError(f"cannot choose device, precision and threads of the learner for this machine: {words[-1]}")
    found = json.loads(done.stdout)
    values = {key: found[key] for key in ("device", "precision", "threads")}
    notices = [
        f"learner.{key}: auto means {value} here" for key, value in values.items() if getattr(learner, key) == AUTO
    ]
    if measured := found["measured"]:
        notices.append(f"measured updates per second: {measured}")
    return Resolved(replace(config, learner=replace(learner, **values)), found["device_memory"], notices)


def main(text: str) -> int:
    """Print the choices as one JSON object. If a choice is impossible, print the reason on stderr."""
    from td3_robot.learner import compute  # imported here, so that only this process loads torch

    request = msgspec.json.decode(text, type=Request)
    learner = request.learner
    try:
        device = compute.device(learner.device)
        precision = compute.precision(learner.precision, device, begins=request.begins)
        found: dict[str, Any] = {"device": device.type, "device_memory": compute.free_memory(device)}
        found |= {"precision": precision, "threads": 1 if learner.threads == AUTO else learner.threads, "measured": ""}
        if device.type == "cpu" and not request.lockstep:
            found |= _fastest(request, precision)
    except Td3RobotError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


def _fastest(request: Request, precision: Precision) -> dict[str, Any]:
    """The fastest precision and number of threads.

    The result is empty if neither is ``auto``, or if the algorithm has no engine.

    Args:
        precision: the configured precision. For ``auto``: bf16 if the processor multiplies faster in bf16, else fp32.
    """
    from td3_robot.learner.engine import measure, selection

    learner = replace(request.learner, device="cpu")
    if AUTO not in (learner.precision, learner.threads) or not selection.has_engine(learner):
        return {}
    precisions: list[Precision] = ["fp32", "bf16"] if learner.precision == AUTO and precision == "bf16" else [precision]
    compared = measure.choices(learner, precisions, available_cores())
    if len(compared) == 1:
        return compared[0]._asdict()
    speeds = measure.speeds(learner, request.sizes, request.hidden, compared, request.others)
    measured = ", ".join(f"{choice} {speed:.0f}" for choice, speed in speeds.items())
    best = next(choice for choice in compared if speeds[choice] >= _AS_FAST * max(speeds.values()))
    return {**best._asdict(), "measured": measured}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
