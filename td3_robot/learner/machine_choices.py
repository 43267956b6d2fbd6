"""Replaces ``auto`` in ``learner.device`` and ``learner.precision`` with the best value on this machine.

A run keeps its first choice, so that a resume does not change its arithmetic. A separate process makes the choice,
because loading torch costs one second and 200 MB:
``python -m td3_robot.learner.machine_choices DEVICE PRECISION new|kept``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

from msgspec.structs import replace

from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError, NodeError, Td3RobotError

AUTO = "auto"
NEW, KEPT = "new", "kept"  # NEW: the run chooses its precision now. KEPT: it chose the precision before.


class Resolved(NamedTuple):
    """A configuration without ``auto``, and the free memory of the GPU."""

    config: Config
    device_memory: int | None  # free bytes of the GPU; None without a GPU
    notices: list[str]  # one line for each replaced ``auto``


def resolve(config: Config, before: Config | None = None) -> Resolved:
    """Find the device and precision of a run in another process, which loads torch.

    Args:
        before: the configuration of the resumed run, if any. If ``learner.precision`` has not changed, its speed is
            not measured again.

    Raises:
        ConfigError: this machine does not support the configured device or precision.
        NodeError: the other process failed.
    """
    learner = config.learner
    if (learner.device, learner.precision) == ("cpu", "fp32"):
        return Resolved(config, None, [])
    choice = KEPT if before and before.learner.precision == learner.precision else NEW
    command = [sys.executable, "-m", "td3_robot.learner.machine_choices", learner.device, learner.precision, choice]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = done.stderr.strip().splitlines() or ["no message"]
    if done.returncode == ConfigError.exit_code:
        raise ConfigError(words[-1])
    if done.returncode:
        raise NodeError(f"cannot choose learner.device and learner.precision for this machine: {words[-1]}")
    found = json.loads(done.stdout)
    values = {"device": found["device"], "precision": found["precision"]}
    notices = [
        f"learner.{key}: auto means {value} here" for key, value in values.items() if getattr(learner, key) == AUTO
    ]
    return Resolved(replace(config, learner=replace(learner, **values)), found["device_memory"], notices)


def main(device: str, precision: str, choice: str) -> int:
    """Print the choice as one JSON object. If a choice is impossible, print the reason on stderr."""
    from td3_robot.learner import compute  # imported here, so that only this process loads torch

    try:
        chosen = compute.device(device)
        found = {
            "device": chosen.type,
            "precision": compute.precision(precision, chosen, begins=choice == NEW),
            "device_memory": compute.free_memory(chosen),
        }
    except Td3RobotError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
