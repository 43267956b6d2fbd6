"""Links within one process: the same sessions and bytes as over ZeroMQ, in queues, on a clock that is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from td3_robot.core_types import Input, Origin, Peer
from td3_robot.messages import Message
from td3_robot.topics import RECORDER
from td3_robot.transport import codec
from td3_robot.transport.link import ClientLink, Frames, ServerLink


class MemoryBus:
    """The links of one node in memory. ``deliver`` can be replaced by a test to lose, change or reorder frames.

    Attributes:
        tap: told the link, the message and the payload of whatever is sent; None for nobody.
    """

    def __init__(self) -> None:
        self.tap: Callable[[str, Message, bytes], None] | None = None
        self._server: ServerLink | None = None
        self._clients: dict[str, tuple[ClientLink, MemoryBus, bytes]] = {}
        self._back: dict[bytes, tuple[MemoryBus, str]] = {}
        self._inbox: deque[tuple[bytes | str, Frames]] = deque()

    def serve(self, session: ServerLink) -> None:
        """Let other buses connect to this one."""
        self._server = session

    def connect(self, session: ClientLink, server: MemoryBus) -> None:
        """Link this bus to the server of another."""
        key = b"%d" % len(server._back)
        self._clients[session.link] = (session, server, key)
        server._back[key] = (self, session.link)

    def receive(self, now: float) -> list[Input]:
        """Everything that has arrived; never waits."""
        inputs: list[Input] = []
        while self._inbox:
            origin, frames = self._inbox.popleft()
            if isinstance(origin, str):
                inputs += self._clients[origin][0].receive(frames, now)
            elif self._server:
                received, replies = self._server.receive(origin, frames, now)
                inputs += received
                for key, message in replies:
                    self._return(key, message)
        for session, server, key in self._clients.values():
            session.check()
            for message in session.due(now):
                server.deliver(key, self._frames(session.link, message))
        if self._server:
            inputs += self._server.expire(now)
        return inputs

    def send(self, to: Origin, message: Message, now: float) -> bool:
        """Queue a message; a queue in memory is never full. False if the peer is gone."""
        if isinstance(to, Peer):
            if not self._server or to.key not in self._server.peers:
                return False
            self._return(to.key, message)
            return True
        if to == RECORDER:
            if self.tap:
                self.tap(to, message, codec.encode(message))
            return True
        session, server, key = self._clients[to]
        if session.wake(now):
            for greeting in session.due(now):
                server.deliver(key, self._frames(to, greeting))
        session.sent(now)
        server.deliver(key, self._frames(to, message))
        return True

    def deliver(self, origin: bytes | str, frames: Frames) -> None:
        """Put frames from another bus into this one's inbox."""
        self._inbox.append((origin, frames))

    def _return(self, key: bytes, message: Message) -> None:
        bus, link = self._back[key]
        bus.deliver(link, self._frames(link, message))

    def _frames(self, link: str, message: Message) -> Frames:
        payload = codec.encode(message)
        if self.tap:
            self.tap(link, message, payload)
        return [message.NAME.encode(), payload]
