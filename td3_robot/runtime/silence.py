"""Notices when the servers of a node are silent."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from td3_robot.transport.link import HEARTBEAT_PERIOD, PEER_TIMEOUT, ClientLink

log = logging.getLogger(__name__)

_PERIOD = HEARTBEAT_PERIOD  # seconds between two looks


class Silence:
    """Logs when a server is silent, and when it answers again.

    A server answers each Heartbeat. It is silent if nothing has arrived for PEER_TIMEOUT. Time in which this node was
    suspended, or busy for example with a reset, does not count.
    """

    def __init__(self) -> None:
        self._silent: set[str] = set()  # links
        self._looked_at = self._listens_since = float("-inf")

    def turn(self, clients: Iterable[ClientLink], now: float) -> None:
        """Look at the links to servers at ``now`` (s). Call this method in each turn of a node."""
        if now - self._looked_at < _PERIOD:
            return
        if now - self._looked_at > 2 * _PERIOD:
            self._listens_since = now
        self._looked_at = now
        for client in clients:
            silent = now - max(client.received_at, self._listens_since) > PEER_TIMEOUT
            if silent and client.link not in self._silent:
                self._silent.add(client.link)
                reasons = "it does not run, it hangs, or the connection is broken"
                text = "link %s: the server at %s has sent nothing for %g s: %s"
                log.warning(text, client.link, client.endpoint, PEER_TIMEOUT, reasons)
            elif client.link in self._silent and now - client.received_at < PEER_TIMEOUT:
                self._silent.remove(client.link)
                log.info("link %s: the server answers again", client.link)
