"""Notices when a connection to a server ends without a Bye.

libzmq closes a connection that sends a frame above the size limit, but it does not report the reason. So the log lists
such a frame as a possible reason.
"""

from __future__ import annotations

import zmq
from zmq.utils import monitor

from td3_robot.transport.curve import failed_handshake
from td3_robot.transport.link import ServerLink
from td3_robot.transport.tally import Tally


class Departures:
    """Compares the ended connections of a server's socket with the Byes that the server received.

    ``keys``: whether the server uses keys. Then it cannot tell some failed handshakes from ended connections, and
    counts both.
    """

    def __init__(self, socket: zmq.Socket[bytes], server: ServerLink, *, keys: bool) -> None:
        events = zmq.EVENT_DISCONNECTED | failed_handshake(keys=keys)
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._server, self._keys = server, keys
        self._limit = int(socket.getsockopt(zmq.MAXMSGSIZE))
        self._tally = Tally()
        self._unexplained = 0  # ended connections minus Byes; below 0 if a client sent a Bye and is still connected

    def read(self, now: float) -> None:
        """Count the ended connections. A failed handshake adds 0: its disconnect adds 1, and its failure adds -1."""
        del now
        while self.monitor.poll(0):
            event = monitor.recv_monitor_message(self.monitor)["event"]
            self._unexplained += 1 if event == zmq.EVENT_DISCONNECTED else -1

    def turn(self, now: float) -> None:
        """Log at ``now`` (s) the connections that ended without a Bye. Call this after the bus has read all Byes."""
        self._unexplained -= self._server.farewells
        self._server.farewells = 0
        while self._unexplained > 0:
            self._unexplained -= 1
            reasons = f"the client's process ended, the network failed, or a frame was above {self._limit} bytes"
            if self._keys:
                reasons += ", or the client has no keys or expects another key of this server"
            text = f"a connection on link {self._server.link} ended without a Bye: {reasons}"
            self._tally.note("connections", text, now, "noticed")
