"""Notifies systemd that a service is ready and alive, as sd_notify(3) does, without a library."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_RETRY = 0.1  # if systemd did not accept a notification: seconds until the next attempt


class Notifier:
    """First notifies systemd that the service is ready, then regularly that its loop still runs.

    systemd sets the environment variables. ``NOTIFY_SOCKET`` is the socket of systemd. ``WATCHDOG_USEC`` is the longest
    allowed time between two notifications, in µs. ``WATCHDOG_PID`` is the process that systemd watches. Without a
    socket the notifier does nothing.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = ""
        self._period: float | None = None  # seconds; None without a watchdog
        self._due = float("-inf")
        self._ready = False
        if address.startswith(("/", "@")):
            self._address = f"\0{address[1:]}" if address[0] == "@" else address
            limit = environment.get("WATCHDOG_USEC", "")
            for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
            if for_us and limit.isascii() and limit.isdigit() and int(limit):
                self._period = int(limit) / 1e6 / 4  # four notifications within the limit

    def turn(self, now: float) -> None:
        """Notify systemd if a notification is due. Call this method in each turn of the loop, with the time (s)."""
        if not self._address or now < self._due:
            return
        words = ["WATCHDOG=1"] if self._period else []
        if not self._ready:
            words.insert(0, "READY=1")
        self._due = now + (self._period or float("inf"))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notification:
                notification.sendto("\n".join(words).encode(), self._address)
            self._ready = True
        except OSError:  # systemd is slow or gone; the robot must continue
            self._due = now + min(self._period or _RETRY, _RETRY)
