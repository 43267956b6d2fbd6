"""Connects to a Ray cluster, and asks a host two questions.

The questions are: which version of td3-robot does the host have, and can the host read a shared file?
"""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from td3_robot.cluster.question import Question, first_line
from td3_robot.errors import NodeError, UsageError
from td3_robot.util.version import __version__

_CONNECT = 5.0  # seconds to wait until the head of the cluster accepts a connection


def check_address(address: str) -> None:
    """Check that something answers at an address. Without this check, Ray would wait for minutes.

    Raises:
        UsageError: the address is malformed, or nothing answers there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"--cluster is {address!r}; allowed: auto, or HOST:PORT with a port from 1 to 65535")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except OSError as error:
        raise UsageError(f"--cluster is {address!r}: nothing answers there ({error.strerror or error})") from None


def connect(address: str) -> None:
    """Connect to the cluster. Ray replaces signal handlers, so this function restores them.

    Raises:
        NodeError: Ray cannot connect.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many types: ConnectionError, ValueError, RuntimeError, …
        advice = "start Ray on this machine: ray start --head, or ray start --address HEAD:PORT"
        raise NodeError(f"--cluster is {address!r}: {first_line(error)}; {advice}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ask_probe(node: str, file: Path, content: str) -> Question:
    """Run :func:`probe` on a host. ``node`` is Ray's id of the host."""
    asking: Any = ray.remote(probe)
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return Question(asking.options(num_cpus=0, scheduling_strategy=where).remote(str(file), content))


def probe(file: str, content: str) -> tuple[str, bool]:
    """Return the version of td3-robot on this host, and whether this host can read ``content`` in ``file``."""
    try:
        return __version__, Path(file).read_text(encoding="utf-8") == content
    except (OSError, ValueError):  # ValueError: the file is not UTF-8
        return __version__, False
