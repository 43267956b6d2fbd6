"""Tells systemd that a service is ready and alive: sd_notify(3), without a library."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_AGAIN = 0.1  # seconds after which what systemd had no room for is said again


class Notifier:
    """One process's line to systemd. While its loop stands still it says nothing, which is the point.

    Args:
        environment: ``NOTIFY_SOCKET`` names where to say it (without it nothing is said), ``WATCHDOG_USEC`` within how
            many microseconds systemd wants to hear again, ``WATCHDOG_PID`` from whom.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._period: float | None = None
        self._due = float("-inf")
        self._address = ""
        if address.startswith(("/", "@")):
            self._address = f"\0{address[1:]}" if address[0] == "@" else address
            within = environment.get("WATCHDOG_USEC", "")
            ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
            if ours and within.isascii() and within.isdigit() and int(within):
                self._period = int(within) / 1e6 / 4
        self._ready = False

    def turn(self, now: float) -> None:
        """The loop turns, at ``now`` in seconds: said when it is time to."""
        if not self._address or now < self._due:
            return
        words = ["WATCHDOG=1"] if self._period else []
        if not self._ready:
            words.insert(0, "READY=1")
        self._due = now + (self._period or float("inf"))
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        try:
            with socket.socket(socket.AF_UNIX, kind) as line:
                line.sendto("\n".join(words).encode(), self._address)
            self._ready = True
        except OSError:  # a systemd that does not listen must not stop a robot, and is told soon again
            self._due = now + min(self._period or _AGAIN, _AGAIN)
