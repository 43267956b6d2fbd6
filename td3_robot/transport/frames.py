"""Reads messages from sockets. If a message has more than MOST_FRAMES frames, Receiver drops the rest."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from td3_robot.transport.codec import MOST_FRAMES, Buffer

_NOW = int(zmq.DONTWAIT)  # a plain integer is faster than an enum flag
_SHORT = 65536  # bytes; a copy of a frame up to this size is cheaper than a view
_BATCH = 256  # number of frames to drop before the next look at the clock


class Receiver:
    """Reads messages from the sockets of one bus. A peer can send a message with any number of frames.

    Args:
        turn: maximum time in seconds for one call of :meth:`finish`. With this limit, other sockets do not wait long.
    """

    def __init__(self, turn: float, clock: Callable[[], float]) -> None:
        self._turn = turn
        self._clock = clock
        self._unfinished: set[zmq.Socket[bytes]] = set()

    def frames(self, socket: zmq.Socket[bytes]) -> list[Buffer]:
        """The first frames of the next message, at most MOST_FRAMES. A long frame is a view, not a copy.

        Raises zmq.Again if there is no message.
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
        """Drop the remaining frames of a message with too many frames. Call this before you read the next message.

        Raises zmq.Again if ``turn`` seconds were not enough to drop all frames.
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
