"""Frames from a socket: limited in number and length; long ones are not copied."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from td3_robot.messages import Hello, Message, Refused, Welcome
from td3_robot.transport.codec import Buffer
from td3_robot.transport.link import MOST_FRAMES, ClientLink, ServerLink

_NOW = int(zmq.DONTWAIT)  # a plain integer is faster than an enum flag
_SHORT = 65536  # bytes up to which a copy is cheaper than a view
_BATCH = 256  # frames between two readings of the clock


class Receiver:
    """Takes messages from the sockets of one bus.

    Args:
        turn: seconds after which dropping the extra frames of one message pauses.
        clock: a clock in seconds.
    """

    def __init__(self, turn: float, clock: Callable[[], float]) -> None:
        self._turn = turn
        self._clock = clock
        self._unfinished: set[zmq.Socket[bytes]] = set()

    def frames(self, socket: zmq.Socket[bytes]) -> list[Buffer]:
        """The remaining frames of one message, MOST_FRAMES at most; :meth:`finish` drops the others.

        Raises:
            zmq.Again: there is no message.
        """
        frames: list[Buffer] = []
        more = True
        while more:
            if len(frames) == MOST_FRAMES:
                self._unfinished.add(socket)
                break
            frame = socket.recv(_NOW, copy=False)
            frames.append(frame.bytes if len(frame) <= _SHORT else frame.buffer)
            more = frame.more
        return frames

    def finish(self, socket: zmq.Socket[bytes]) -> None:
        """Drop the rest of a message with too many frames, before the next message.

        Raises:
            zmq.Again: the turn is over before the rest is dropped; the socket is still readable.
        """
        if socket not in self._unfinished:
            return
        end = self._clock() + self._turn
        while True:
            for _ in range(_BATCH):
                if not socket.recv(_NOW, copy=False).more:
                    self._unfinished.discard(socket)
                    return
            if self._clock() > end:
                raise zmq.Again


def longest_frame(end: ServerLink | ClientLink) -> int:
    """Bytes of the longest frame that this end accepts; libzmq closes a connection that sends a longer one."""
    if isinstance(end, ClientLink):
        kinds: set[type[Message]] = {Welcome, Refused, *end.accepts}
    else:
        kinds = {Hello, *(kind for accepted in end.accepts.values() for kind in accepted)}
    return max(kind.MAX_BYTES for kind in kinds) + 1024
