"""The two ends of a link without the sockets: handshake, heartbeat, decoding, counting of what is malformed.

A server session turns frames from many clients into inputs for a core; a client session does so for one server. Both
are told the time, so that tests, replay and training in one process run the very same code.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from td3_robot.core_types import MAX_ROBOTS, ROBOT_ROLES, Farewell, Input, Peer
from td3_robot.errors import ConfigError, HandshakeError, ProtocolError
from td3_robot.messages import PROTOCOL_VERSION, Bye, Heartbeat, Hello, Message, Record, Refused, Welcome
from td3_robot.specs import RobotSpec
from td3_robot.transport import codec

log = logging.getLogger(__name__)

HELLO_PERIOD = 0.25
"""Seconds between two Hellos of a client nobody has answered."""
HEARTBEAT_PERIOD = 1.0
"""Seconds of silence after which a client sends a Heartbeat."""
PEER_TIMEOUT = 5.0
"""Seconds of silence after which a server takes a client for gone."""
LONG_SILENCE = PEER_TIMEOUT - HEARTBEAT_PERIOD
"""Seconds of a client's own silence after which its server may have taken it for gone: it was stopped, or busy."""
DRIVER_SILENCE = 2 * HEARTBEAT_PERIOD
"""Seconds of silence after which another process may take a driver's name: two must never move the same motors."""
LOG_PERIOD = 10.0
"""Seconds between two log lines about the same kind of malformed input."""

UNKNOWN_FIELDS = "unknown-fields"
"""The kind under which messages with unknown fields are counted."""
_LONGEST_LINE = 1000  # characters of a log line

MOST_FRAMES = 3
"""Frames of one message that are kept, to be refused: one more than any has."""

Frames = Sequence[codec.Buffer]


@dataclass
class Tally:
    """Counts by kind; the first of each kind is logged at once, later ones at a limited rate."""

    counts: Counter[str] = field(default_factory=Counter)
    _logged: dict[str, float] = field(default_factory=dict)

    def note(self, kind: str, text: str, now: float, verb: str = "dropped") -> None:
        self.counts[kind] += 1
        if now - self._logged.get(kind, float("-inf")) >= LOG_PERIOD:
            self._logged[kind] = now
            line = text[:_LONGEST_LINE] if text.isprintable() else repr(text[:_LONGEST_LINE])  # a peer wrote part of it
            log.warning("%s (%s, %d so far): %s", verb, kind, self.counts[kind], line)

    def extra(self, kind: type[Message], extra: int, whence: str, now: float) -> None:
        """Count a message with ``extra`` fields that this version does not know; the decoder ignores them."""
        text = f"{whence}: {kind.NAME} has {extra} fields more than this version knows"
        self.note(UNKNOWN_FIELDS, text, now, "ignored")


def _kind(frames: Frames) -> type[Message]:
    """What a multipart message says it is.

    Raises:
        ProtocolError: with ``kind`` frames, unknown-topic or oversize.
    """
    if len(frames) != 2:
        number = len(frames) if len(frames) < MOST_FRAMES else f"{MOST_FRAMES} or more"
        raise ProtocolError("frames", f"{number} frames, needs topic and payload")
    return codec.kind_of(bytes(frames[0][:64]).decode("ascii", "replace"), len(frames[1]))


def _dims(spec: RobotSpec | None, robots: int) -> dict[str, int]:
    dims = {"O": spec.observation_size, "A": spec.action_size} if spec else {}
    return {**dims, "N": robots} if robots else dims


@dataclass
class ServerLink:
    """The server's end of a link.

    Attributes:
        link: the endpoint's name: policy, learner or supervisor.
        name: the server's own name, for its Welcome.
        accepts: message types a welcomed client of each role may send; a role that is not here is refused.
        agreement: what clients must hold alike, see ``Config.agreement``.
        session: a number drawn at every start.
        spec: the robot served; None until the first simulator or driver, or the first weights, name it.
        may: on a link with keys, whether a public key may have a role.
    """

    link: str
    name: str
    accepts: Mapping[str, tuple[type[Message], ...]]
    agreement: Mapping[str, str]
    session: int
    spec: RobotSpec | None = None
    may: Callable[[str, str], bool] | None = None
    tally: Tally = field(default_factory=Tally)
    peers: dict[bytes, Peer] = field(default_factory=dict)
    _heard: dict[bytes, float] = field(default_factory=dict)
    _asked: dict[bytes, float] = field(default_factory=dict)  # since when a client waits for a driver's name
    _spoke: set[bytes] = field(default_factory=set)  # clients that have said something since their last Hello

    def receive(
        self, key: bytes, frames: Frames, now: float, owner: str = ""
    ) -> tuple[list[Input], list[tuple[bytes, Message]]]:
        """What one multipart message from the client ``key`` means: inputs for the core, and direct replies.

        ``owner`` is the public key its connection was made with. A client joining is an input holding its Hello; one
        leaving, its Bye. Never raises on any bytes.
        """
        peer = self.peers.get(key)
        if peer and peer.owner != owner:  # a routing identity that was somebody else's
            return [], []
        try:
            kind = _kind(frames)
            if peer is None and kind is not Hello:  # to unpack it would let anybody take our time
                return self._refuse_stranger(key, kind.NAME, len(frames[1]), now)
            if peer and kind not in (Hello, Heartbeat, Bye) and kind not in self.accepts[peer.role]:
                self.tally.note("unexpected", f"{kind.NAME} from {peer.role} {peer.name} on link {self.link}", now)
                self._heard[key] = now
                return [], []
            if peer and kind is Record:
                self._heard[key] = now
                self._spoke.add(key)
                return [(peer, record) for record in codec.decode_records(frames[1])], []
            message = codec.decode_as(kind, frames[1], peer.dims if peer else None)
            if extra := codec.extra_fields(kind, frames[1]):
                self.tally.extra(kind, extra, f"on link {self.link} from {peer.name if peer else 'a stranger'}", now)
        except ProtocolError as error:
            self.tally.note(error.kind, f"on link {self.link} from {peer.name if peer else 'a stranger'}: {error}", now)
            return [], []
        if isinstance(message, Hello):
            return self._meet(key, message, now, owner)
        assert peer
        self._heard[key] = now
        self._spoke.add(key)
        if isinstance(message, Heartbeat):
            return [], [(key, Heartbeat(message.stamp, self.session))]
        if isinstance(message, Bye):
            return self.forget(key, message.reason), []
        return [(peer, message)], []

    def expire(self, now: float) -> list[Input]:
        """A Bye for every client that has been silent for PEER_TIMEOUT."""
        self._asked = {key: asked for key, asked in self._asked.items() if now - asked <= PEER_TIMEOUT}
        gone = [key for key, heard in self._heard.items() if now - heard > PEER_TIMEOUT]
        return [item for key in gone for item in self.forget(key, f"silent for {PEER_TIMEOUT} s")]

    def forget(self, key: bytes, reason: str) -> list[Input]:
        """Drop a client; the input that tells the core, none if it was not known."""
        peer = self.peers.pop(key, None)
        self._heard.pop(key, None)
        self._spoke.discard(key)
        return [(peer, Bye(reason))] if peer else []

    def adopt(self, spec: RobotSpec) -> tuple[list[Input], list[tuple[bytes, Message]]]:
        """Serve this robot from now on; clients that are another robot are refused and leave."""
        self.spec = spec
        inputs: list[Input] = []
        replies: list[tuple[bytes, Message]] = []
        for key, peer in list(self.peers.items()):
            refused = self._other_robot(peer.hello)
            if refused:
                replies.append((key, refused))
                inputs += self.forget(key, refused.reason)
        return inputs, replies

    def _refuse_stranger(
        self, key: bytes, topic: str, size: int, now: float
    ) -> tuple[list[Input], list[tuple[bytes, Message]]]:
        self.tally.note("stranger", f"on link {self.link}: {topic} of {size} bytes before any hello", now)
        return [], [(key, Refused("hello", f"{self.name} has not met this client; send Hello"))]

    def _meet(
        self, key: bytes, hello: Hello, now: float, owner: str
    ) -> tuple[list[Input], list[tuple[bytes, Message]]]:
        refused = self._judge(hello, owner)
        rival = self._driver(hello) if hello.role == "driver" else None
        if rival:
            # The one that has the name says by itself whether it is there. Until then a Heartbeat tells the client to
            # wait, and to ask again. To the one that has the name it is sent because a closed connection shows by it.
            asked, heard = self._asked.setdefault(key, now), self._heard[rival]
            if heard <= asked and now - asked <= DRIVER_SILENCE:
                wait = Heartbeat(int(now * 1e9), self.session)
                return [], [(key, wait), (rival, wait)]
            if heard > asked:  # whatever else is wrong with it, another one moves that robot
                taken = f"name {hello.name!r} is taken by a driver that is connected"
                refused = Refused("name", refused.reason if refused else taken)
        self._asked.pop(key, None)
        if refused:
            self.tally.note("refused", f"{hello.role} {hello.name} on link {self.link}: {refused.reason}", now)
            return self.forget(key, refused.reason), [(key, refused)]
        inputs: list[Input] = []
        for other, peer in list(self.peers.items()):
            again = peer.hello.client == hello.client
            # On its own connection: a new process may use the routing identity of another one. And to a client that was
            # met before, this Welcome is a new one, and its core begins anew: so must ours. What was said before the
            # Hello is dealt with; a Hello right after a Hello is only one too many.
            anew = (not again or key in self._spoke) if other == key else peer.name == hello.name
            if anew:
                inputs += self.forget(other, Farewell.RECONNECTED.value if again else "replaced by a later incarnation")
        if key not in self.peers:
            spec = RobotSpec.from_description(hello.spec) if hello.spec else self.spec
            if self.spec is None:
                self.spec = spec
            peer = Peer(self.link, key, hello, _dims(spec, hello.robots), owner)
            self.peers[key] = peer
            inputs.append((peer, hello))
        self._heard[key] = now
        return inputs, [(key, Welcome(PROTOCOL_VERSION, self.name, self.session))]

    def _judge(self, hello: Hello, owner: str) -> Refused | None:
        """Why this client may not take part, None if it may."""
        if hello.protocol != PROTOCOL_VERSION:
            return Refused("protocol", f"protocol version is {PROTOCOL_VERSION} here, {hello.protocol} there")
        if hello.role not in self.accepts:
            return Refused("agreement", f"role {hello.role!r} is not served here; allowed: {', '.join(self.accepts)}")
        if self.may and not self.may(owner, hello.role):
            how = f"td3-robot keys allow NAME '{owner}' --role {hello.role}"
            why = f"the key of {hello.name!r} may not be {hello.role} here; to allow it there: {how}"
            return Refused("agreement", why)
        if hello.role in ROBOT_ROLES and not (1 <= hello.robots <= MAX_ROBOTS and hello.spec):
            allowed = f"allowed: 1 to {MAX_ROBOTS}, with a specification"
            return Refused("spec", f"{hello.role} names {hello.robots} robots; {allowed}")
        for key, mine in self.agreement.items():
            theirs = hello.agreement.get(key)
            if theirs is not None and theirs != mine:
                return Refused("agreement", f"configuration differs: {key} is {mine} here, {theirs} there"[:2048])
        for peer in self.peers.values():
            if peer.name == hello.name and peer.owner != owner:
                return Refused("taken", f"name {hello.name!r} is taken by a {peer.role} with another key")
            if peer.name == hello.name and peer.role != hello.role:  # a guest must not take the place of a server
                return Refused("taken", f"name {hello.name!r} is taken by a {peer.role} that is connected")
            taken = peer.name == hello.name and peer.hello.client != hello.client
            # Of two drivers, the one that is heard stays (see _driver). A clock that was set back must not keep the
            # successor of one that was killed away from a robot that moves.
            drivers = hello.role == peer.role == "driver" and hello.incarnation != peer.hello.incarnation
            drives = peer.role == "driver"  # and is not replaced by anything else
            if taken and not drivers and (drives or hello.incarnation <= peer.hello.incarnation):
                return Refused("taken", f"name {hello.name!r} is taken by a {peer.role} that is connected")
        return self._other_robot(hello)

    def _driver(self, hello: Hello) -> bytes | None:
        """The connection of a driver that another driver with its name wants to replace."""
        for key, peer in self.peers.items():
            if peer.name == hello.name and peer.role == "driver" and peer.hello.client != hello.client:
                return key
        return None

    def _other_robot(self, hello: Hello) -> Refused | None:
        if not hello.spec:
            return None
        try:
            theirs = RobotSpec.from_description(hello.spec)
        except ConfigError as error:
            return Refused("spec", str(error)[:2048])
        difference = self.spec.difference(theirs) if self.spec else None
        return Refused("spec", f"robot specification differs: {difference}"[:2048]) if difference else None


@dataclass
class ClientLink:
    """The client's end of a link.

    Attributes:
        link: name of the server's endpoint.
        hello: what to introduce ourselves with.
        accepts: message types the server may send.
        essential: whether a refusal is the end; otherwise it is logged, and the server asked again after a while.
        heard: when the server has said something last (s); minus infinity is never.
    """

    link: str
    hello: Hello
    accepts: tuple[type[Message], ...]
    dims: Mapping[str, int] = field(default_factory=dict)
    essential: bool = True
    tally: Tally = field(default_factory=Tally)
    state: Literal["connecting", "welcome", "refused"] = "connecting"
    refusal: Refused | None = None
    session: int | None = None
    heard: float = float("-inf")
    _sent: float = float("-inf")
    _asked: float = float("-inf")  # when the last Hello or Heartbeat went out
    _stamps: deque[int] = field(default_factory=lambda: deque(maxlen=64))  # of the newest Heartbeats

    def due(self, now: float) -> list[Message]:
        """What the handshake has to send at this time: a Hello while unanswered, a Heartbeat after silence."""
        if now - self._asked < HELLO_PERIOD:
            return []
        self.wake(now)
        silent = max(now - self._sent, now - self.heard) >= HEARTBEAT_PERIOD
        if not self.essential and self.state == "refused" and now - self._asked >= LOG_PERIOD:
            self.state = "connecting"
        if self.state == "connecting":
            message: Message = self.hello
        elif self.state == "welcome" and silent:
            message = Heartbeat(int(now * 1e9), self.session or 0)
            self._stamps.append(message.stamp)
        else:
            return []
        self._sent = self._asked = now
        return [message]

    def wake(self, now: float) -> bool:
        """Whether we have been silent for so long that the server must be told first who we are; once."""
        if self.state != "welcome" or now - self._sent < LONG_SILENCE:
            return False
        self.state, self._asked = "connecting", float("-inf")
        return True

    def sent(self, now: float) -> None:
        """Told by the bus that an application message went out."""
        self._sent = now

    def receive(self, frames: Frames, now: float) -> list[Input]:
        """What one multipart message from the server means to the core. Never raises on any bytes.

        A Welcome after the link was new or lost is passed on: whatever the server was told is to be told again. So is,
        to a driver, a Heartbeat before it: the server does not know yet whether another one moves the robot.
        """
        try:
            kind = _kind(frames)
            message = codec.decode_as(kind, frames[1], self.dims)
            if extra := codec.extra_fields(kind, frames[1]):
                self.tally.extra(kind, extra, f"on link {self.link} from its server", now)
        except ProtocolError as error:
            self.tally.note(error.kind, f"on link {self.link} from its server: {error}", now)
            return []
        self.heard = now
        if isinstance(message, self.accepts):
            return [(self.link, message)]
        if isinstance(message, Welcome):
            return self._welcomed(message)
        if isinstance(message, Refused):
            if message.code == "hello":
                if self.state == "welcome":  # only once: each of many queued messages is answered like this
                    self.state, self._asked = "connecting", float("-inf")
            else:
                self.state, self.refusal = "refused", message
                if not self.essential:
                    self.tally.note("refusals", f"link {self.link}: {message.reason}", now)
            return []
        if isinstance(message, Heartbeat):
            answer = message.stamp in self._stamps
            waits = self.state == "connecting" and self.hello.role == "driver" and not answer
            return [(self.link, message)] if waits else []
        self.tally.note("unexpected", f"{message.NAME} from the server of link {self.link}", now)
        return []

    def _welcomed(self, message: Welcome) -> list[Input]:
        if message.protocol != PROTOCOL_VERSION:
            self.state = "refused"
            self.refusal = Refused("protocol", f"protocol version is {PROTOCOL_VERSION} here, {message.protocol} there")
            return []
        new = self.state != "welcome" or message.session != self.session
        self.state, self.session = "welcome", message.session
        return [(self.link, message)] if new else []

    def check(self) -> None:
        """Raise if the server has refused us.

        Raises:
            HandshakeError: with the link, and what differs.
        """
        if self.refusal and self.essential:
            raise HandshakeError(f"link {self.link}: refused by the server: {self.refusal.reason}")


def hello(
    role: str,
    name: str,
    *,
    client: int,
    incarnation: int = 0,
    robots: int = 0,
    weights_version: int = 0,
    spec: RobotSpec | None = None,
    agreement: Mapping[str, str] | None = None,
) -> Hello:
    """A Hello of this protocol version."""
    return Hello(
        PROTOCOL_VERSION,
        role,
        name,
        incarnation,
        client,
        robots,
        weights_version,
        spec.describe() if spec else {},
        dict(agreement or {}),
    )
