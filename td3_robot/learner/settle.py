"""What ``learner.device`` and ``learner.precision`` are on this machine, found out once for a whole run.

A run keeps what it began with: ``auto`` is replaced in its configuration, so that another machine, or another day, does
not change its arithmetic without being told to. ``python -m td3_robot.learner.settle DEVICE PRECISION new|kept`` is the
process that looks: torch takes a second to load and 200 MB, which who only asks is spared.
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
NEW, KEPT = "new", "kept"  # whether the precision is a choice of now


class Settled(NamedTuple):
    """A configuration without ``auto``, and what was found.

    Attributes:
        config: with the device and the precision that this machine learns with.
        device_memory: bytes of the GPU that are free; None where none is used.
        notices: a line for each ``auto``: what it is here.
    """

    config: Config
    device_memory: int | None
    notices: list[str]


def settle(config: Config, before: Config | None = None) -> Settled:
    """The device and precision of a run on this machine.

    Args:
        before: with what the run has learned so far, where it goes on: a precision that stays is not measured again.

    Raises:
        ConfigError: this machine has not what the configuration wants.
        NodeError: the process that looks did not come to an end.
    """
    learner = config.learner
    if (learner.device, learner.precision) == ("cpu", "fp32"):
        return Settled(config, None, [])
    choice = KEPT if before and before.learner.precision == learner.precision else NEW
    command = [sys.executable, "-m", "td3_robot.learner.settle", learner.device, learner.precision, choice]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = done.stderr.strip().splitlines() or ["no message"]
    if done.returncode == ConfigError.exit_code:
        raise ConfigError(words[-1])
    if done.returncode:
        raise NodeError(f"what this machine can learn with could not be found out: {words[-1]}")
    found = json.loads(done.stdout)
    values = {"device": found["device"], "precision": found["precision"]}
    notices = [f"learner.{key} auto: {value} here" for key, value in values.items() if getattr(learner, key) == AUTO]
    return Settled(replace(config, learner=replace(learner, **values)), found["device_memory"], notices)


def main(device: str, precision: str, choice: str) -> int:
    """Print what was found as one JSON object, or on stderr why it cannot be."""
    from td3_robot.learner import compute  # here, because only this process is to load torch

    try:
        there = compute.device(device)
        found = {
            "device": there.type,
            "precision": compute.precision(precision, there, begins=choice == NEW),
            "device_memory": compute.free_memory(there),
        }
    except Td3RobotError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
