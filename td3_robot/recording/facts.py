"""Metadata and attachments for a recording that this machine makes."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence

from td3_robot.config.schema import Config
from td3_robot.messages import PROTOCOL_VERSION
from td3_robot.recording.entries import CONFIG, Attachment, Facts
from td3_robot.util import machine

_PACKAGES = ("numpy", "torch", "pybullet", "gymnasium", "pyzmq", "msgspec", "mcap")


def facts_of_this_machine(config: Config, attachments: Sequence[Attachment] = (), *, deployed: bool = False) -> Facts:
    """The facts of a recording with this configuration. A ``deployed`` robot has no task."""
    metadata = {
        "protocol": str(PROTOCOL_VERSION),
        "td3-robot": machine.version("td3-robot"),
        "python": platform.python_version(),
        **({} if deployed else {"task": config.task}),
        "host": json.dumps(machine.describe([name for name in _PACKAGES if machine.version(name)])),
    }
    return Facts(metadata, (Attachment(CONFIG, "application/yaml", config.to_yaml().encode()), *attachments))
