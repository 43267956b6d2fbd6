"""The two ends of a link: handshake, heartbeat and decoding, without sockets and clocks.

A ServerLink turns frames from many clients into inputs for a core. A ClientLink turns frames from one server into
inputs for a core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from td3_robot.core_types import MAX_ROBOTS, ROBOT_ROLES, Farewell, Input, Peer
from td3_robot.errors import ConfigError, HandshakeError, ProtocolError
from td3_robot.messages import PROTOCOL_VERSION, Bye, Heartbeat, Hello, Message, Record, Refused, Step, Welcome
from td3_robot.specs import RobotSpec
from td3_robot.transport import codec
from td3_robot.transport.codec import Frames
from td3_robot.transport.tally import Tally

HELLO_PERIOD = 0.25
"""Seconds after which a client without an answer repeats its Hello."""
HEARTBEAT_PERIOD = 1.0
"""If a client has sent nothing or received nothing for this number of seconds, it sends a Heartbeat."""
PEER_TIMEOUT = 5.0
"""Seconds of silence after which a server forgets a client."""
LONG_SILENCE = PEER_TIMEOUT - HEARTBEAT_PERIOD
"""If a client has sent nothing for this number of seconds, it must send Hello: the server has possibly forgotten it."""
ASK_AGAIN = 1.0
"""Seconds after which a refused client sends Hello again, if its link is not essential.

For example, the server can still know a killed process with the client's name, for at most PEER_TIMEOUT.
"""
DRIVER_SILENCE = 2 * HEARTBEAT_PERIOD
"""If a driver sends nothing for this number of seconds, another process may take this driver's name.

Two processes must never move one robot.
"""
_HELLO = Hello.NAME.encode()

Replies = list[tuple[bytes, Message]]
"""Messages of the handshake to clients, each with the routing identity of its client."""


def _dims(spec: Mapping[str, Any], robots: int) -> dict[str, int]:
    """Return the sizes of arrays, by letter.

    N is the number of robots. O is the number of observation channels of ``spec``, and A the number of action channels.
    """
    sizes = {"O": len(spec["observations"]), "A": len(spec["actions"])} if spec else {}
    return {**sizes, "N": robots} if robots else sizes


def _decode(
    kind: type[Message], payload: codec.Buffer, dims: codec.Dims | None, tally: Tally, sender: str, now: float
) -> Message:
    """Decode a payload. Count the message if it has fields that this version does not know."""
    message = codec.decode_as(kind, payload, dims)
    if extra := codec.extra_fields(kind, payload):
        text = f"{sender}: {kind.NAME} has {extra} fields unknown to this version"
        tally.note("unknown-fields", text, now, "ignored")
    return message


def _other_protocol(theirs: int) -> Refused:
    return Refused("protocol", f"protocol version is {PROTOCOL_VERSION} here, {theirs} there")


@dataclass
class ServerLink:
    """The server's end of a link.

    Attributes:
        accepts: by role, the message types that a client may send. The server refuses other roles.
        agreement: configuration that clients must share, see ``Config.agreement``.
        session: a random number, new at each start of the server.
        spec: the robot's specification; None until a policy, a simulator or a driver provides it.
        may: a function that returns whether a public key may have a role; None on a link without keys.
        without_keys: whether a client without a key may have any role. Such a client connects through a socket
            file. Only the user who runs the server can open this file.
        peers: the welcomed clients, by routing identity.
        farewells: number of received Byes; :mod:`td3_robot.transport.departures` sets it to 0.
    """

    link: str
    name: str
    accepts: Mapping[str, tuple[type[Message], ...]]
    agreement: Mapping[str, str]
    session: int
    spec: RobotSpec | None = None
    may: Callable[[str, str], bool] | None = None
    without_keys: bool = False
    tally: Tally = field(default_factory=Tally)
    peers: dict[bytes, Peer] = field(default_factory=dict)
    farewells: int = 0
    _received_at: dict[bytes, float] = field(default_factory=dict)
    _waiting_since: dict[bytes, float] = field(default_factory=dict)  # when a client began to wait for a driver's name
    _active: set[bytes] = field(default_factory=set)  # clients that sent a message since their last Hello
    _sequences: dict[bytes, int] = field(default_factory=dict)  # by client: sequence of its newest Step since it joined

    def receive(self, key: bytes, frames: Frames, now: float, owner: str = "") -> tuple[list[Input], Replies]:
        """Take one message from a client at ``now`` (s). Return the inputs for the core, and direct replies.

        Malformed bytes raise no error. The core gets the Hello of a client that joins, and a Bye when a client leaves.
        ``key`` is the client's routing identity. ``owner`` is the client's public key, or empty if the client has
        no key.
        """
        peer = self.peers.get(key)
        if peer and peer.owner != owner:  # the sender uses the routing identity of another client
            return [], []
        sender = f"on link {self.link} from {peer.name if peer else 'a stranger'}"
        try:
            kind = codec.kind_of(frames)
            if peer is None and kind is not Hello:  # do not unpack: an unknown client must cost little time
                text = f"on link {self.link}: {kind.NAME} of {len(frames[1])} bytes before any hello"
                if kind not in (Heartbeat, Record):  # a client may send these to a restarted server
                    self.tally.note("stranger", text, now)
                return [], [(key, Refused("hello", f"{self.name} has not met this client; send Hello"))]
            if peer and kind not in (Hello, Heartbeat, Bye) and kind not in self.accepts[peer.role]:
                self.tally.note("unexpected", f"{kind.NAME} from {peer.role} {peer.name} on link {self.link}", now)
                self._received_at[key] = now
                return [], []
            if kind is Record:
                messages = codec.decode_records(frames[1])
            else:
                messages = [_decode(kind, frames[1], peer.dims if peer else None, self.tally, sender, now)]
        except ProtocolError as error:
            self.tally.note(error.kind, f"{sender}: {error}", now)
            # A client that repeats a malformed Hello needs the reason.
            is_hello = bool(frames) and bytes(frames[0][:64]) == _HELLO
            return [], [(key, Refused("malformed", str(error)[:2048]))] if is_hello else []
        if peer and kind is not Hello:
            return self._from_peer(peer, messages, now)
        (hello,) = messages
        assert isinstance(hello, Hello)
        return self._answer_hello(key, hello, now, owner)

    def _from_peer(self, peer: Peer, messages: Sequence[Message], now: float) -> tuple[list[Input], Replies]:
        self._received_at[peer.key] = now
        self._active.add(peer.key)
        match messages:
            case [Heartbeat() as beat]:
                return [], [(peer.key, Heartbeat(beat.stamp, self.session))]
            case [Bye() as bye]:
                self.farewells += 1
                return self.forget(peer.key, bye.reason), []
            case [Step() as step] if not self._is_next(peer, step, now):
                return [], []
        return [(peer, message) for message in messages], []

    def _is_next(self, peer: Peer, step: Step, now: float) -> bool:
        """Whether a Step belongs to the source of this connection, and is not older than the newest Step that arrived.

        In lock-step, other incarnations and older Steps are allowed: a source that returns to a checkpoint continues
        with the incarnation and the sequence of the checkpoint.
        """
        hello, lockstep = peer.hello, step.needs_version > 0
        newest = self._sequences.get(peer.key, step.sequence)
        if step.source != hello.name or (step.incarnation != hello.incarnation and not lockstep):
            kind, verb = "identity", "dropped"
            text = f"the Step names source {step.source!r}, incarnation {step.incarnation}; "
            text += f"the client's Hello names {hello.name!r}, incarnation {hello.incarnation}"
        elif step.sequence < newest and not lockstep:
            kind, verb, text = "sequence", "dropped", f"the sequence goes back: step {newest} has already arrived"
        else:
            self._sequences[peer.key] = step.sequence
            if step.sequence <= newest + 1:
                return True
            kind, verb, text = "gap", "noticed", f"the previous {step.sequence - newest - 1} Steps did not arrive"
        self.tally.note(kind, f"step {step.sequence} from {peer.name} on link {self.link}: {text}", now, verb)
        return kind == "gap"

    def expire(self, now: float) -> list[Input]:
        """Forget clients that were silent for PEER_TIMEOUT. Return a Bye for each."""
        self._waiting_since = {key: asked for key, asked in self._waiting_since.items() if now - asked <= PEER_TIMEOUT}
        gone = [key for key, received in self._received_at.items() if now - received > PEER_TIMEOUT]
        return [item for key in gone for item in self.forget(key, f"silent for {PEER_TIMEOUT} s")]

    def forget(self, key: bytes, reason: str) -> list[Input]:
        """Forget a client. Return a Bye for the core, or nothing if the client is unknown."""
        peer = self.peers.pop(key, None)
        self._received_at.pop(key, None)
        self._sequences.pop(key, None)
        self._active.discard(key)
        return [(peer, Bye(reason))] if peer else []

    def forget_revoked(self) -> list[Input]:
        """Forget each client whose key no longer permits the client's role. Return a Bye for each."""
        gone = [key for key, peer in self.peers.items() if not self._may(peer.owner, peer.role)]
        return [item for key in gone for item in self.forget(key, "its key was revoked")]

    def _may(self, owner: str, role: str) -> bool:
        """Whether a client may have a role. ``owner`` is the client's public key, or empty if the client has no key."""
        return self.may is None or (self.without_keys and not owner) or self.may(owner, role)

    def adopt(self, spec: RobotSpec) -> tuple[list[Input], Replies]:
        """Serve this robot from now on. Refuse and forget clients with another robot."""
        self.spec = spec
        inputs: list[Input] = []
        replies: Replies = []
        for key, peer in list(self.peers.items()):
            if refused := self._other_robot(peer.hello):
                replies.append((key, refused))
                inputs += self.forget(key, refused.reason)
        return inputs, replies

    def _answer_hello(self, key: bytes, hello: Hello, now: float, owner: str) -> tuple[list[Input], Replies]:
        """Answer a Hello with Welcome or Refused.

        While another driver is possibly still using the name, answer with Heartbeat.
        """
        refused = self._refusal(hello, owner)
        rival = self._holder(hello.name)
        if rival and rival.role == hello.role == "driver" and rival.hello.client != hello.client:
            asked, received = self._waiting_since.setdefault(key, now), self._received_at[rival.key]
            if received <= asked and now - asked <= DRIVER_SILENCE:
                # The client waits and asks again. A message to the rival shows whether its connection is closed.
                wait = Heartbeat(int(now * 1e9), self.session)
                return [], [(key, wait), (rival.key, wait)]
            if received > asked:  # the rival still sends: use the code ``name``, even if ``refused`` has another code
                taken = f"name {hello.name!r} is taken by a driver that is connected"
                refused = Refused("name", refused.reason if refused else taken)
        self._waiting_since.pop(key, None)
        if refused:
            self.tally.note("refused", f"{hello.role} {hello.name} on link {self.link}: {refused.reason}", now)
            return self.forget(key, refused.reason), [(key, refused)]
        inputs = self._replace(key, hello)
        if key not in self.peers:
            if self.spec is None and hello.spec:
                self.spec = RobotSpec.from_description(hello.spec)
            spec = hello.spec or (self.spec.describe() if self.spec else {})
            peer = self.peers[key] = Peer(self.link, key, hello, _dims(spec, hello.robots), owner)
            inputs.append((peer, hello))
        self._received_at[key] = now
        return inputs, [(key, Welcome(PROTOCOL_VERSION, self.name, self.session))]

    def _replace(self, key: bytes, hello: Hello) -> list[Input]:
        """Forget the clients that a welcomed client replaces. Return the Byes for the core."""
        inputs: list[Input] = []
        for other, peer in list(self.peers.items()):
            same_process = peer.hello.client == hello.client
            # The core must forget a client that starts again. A client starts again in three cases:
            # 1. A new process has the routing identity of an old process.
            # 2. The Hello has another incarnation or another weights version than the client's previous Hello.
            # 3. The client sent messages between its previous Hello and this Hello.
            # Any other Hello is a repetition. While no server runs, a client repeats its Hello, and all repetitions
            # arrive when a server starts.
            known = peer.hello
            changed = (hello.weights_version, hello.incarnation) != (known.weights_version, known.incarnation)
            starts_again = not same_process or changed or key in self._active
            if starts_again if other == key else peer.name == hello.name:
                reason = Farewell.RECONNECTED.value if same_process else "replaced by a later incarnation"
                inputs += self.forget(other, reason)
        return inputs

    def _refusal(self, hello: Hello, owner: str) -> Refused | None:
        """The refusal of this client; None if the server accepts it."""
        if hello.protocol != PROTOCOL_VERSION:
            return _other_protocol(hello.protocol)
        if hello.role not in self.accepts:
            return Refused("agreement", f"role {hello.role!r} is not served here; allowed: {', '.join(self.accepts)}")
        if not self._may(owner, hello.role):
            how = f"td3-robot keys allow NAME '{owner}' --role {hello.role}"
            why = f"the key of {hello.name!r} may not have role {hello.role}; on this server's machine, run: {how}"
            return Refused("agreement", why)
        if hello.role in ROBOT_ROLES and not (1 <= hello.robots <= MAX_ROBOTS and hello.spec):
            text = f"{hello.role} names {hello.robots} robots; allowed: 1 to {MAX_ROBOTS}, with a specification"
            return Refused("spec", text)
        for key, mine in self.agreement.items():
            theirs = hello.agreement.get(key)
            if theirs is not None and theirs != mine:
                return Refused("agreement", f"configuration differs: {key} is {mine} here, {theirs} there"[:2048])
        return self._taken(hello, owner) or self._other_robot(hello)

    def _taken(self, hello: Hello, owner: str) -> Refused | None:
        """The refusal if the name is reserved or another client keeps it; None if this client may use the name."""
        # A LifecycleChange uses the name SERVER/ROBOT for the server's watch over a robot.
        if hello.name == self.name or hello.name.startswith(f"{self.name}/"):
            return Refused("taken", f"name {hello.name!r} is reserved for this server; use another name")
        peer = self._holder(hello.name)
        if peer is None:
            return None
        if peer.owner != owner:
            return Refused("taken", f"name {hello.name!r} is taken by a {peer.role} with another key")
        # If the old driver is silent, its robot is possibly still moving. So the new driver must get the name, and with
        # the name the control of the robot. The new driver is allowed to have a lower incarnation than the old driver:
        # the default incarnation is a time, and somebody has possibly set the clock back.
        known = peer.hello
        older = peer.role != "driver" and hello.incarnation < known.incarnation
        keeps = hello.incarnation == known.incarnation or older
        if peer.role != hello.role or (keeps and known.client != hello.client):
            return Refused("taken", f"name {hello.name!r} is taken by a {peer.role} that is connected")
        return None

    def _holder(self, name: str) -> Peer | None:
        """The client that has this name, or None. Two clients never have the same name."""
        return next((peer for peer in self.peers.values() if peer.name == name), None)

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
        essential: whether a refusal ends this process. If not, the client logs the refusal and asks again after
            ASK_AGAIN.
        received_at: time (s) of the last message from the server; minus infinity before the first message.
        sent_at: time (s) of the last message to the server; minus infinity before the first message.
        endpoint: where the transport finds the server.
    """

    link: str
    hello: Hello
    accepts: tuple[type[Message], ...]
    essential: bool = True
    tally: Tally = field(default_factory=Tally)
    state: Literal["connecting", "welcome", "refused"] = "connecting"
    refusal: Refused | None = None
    session: int | None = None
    received_at: float = float("-inf")
    sent_at: float = float("-inf")
    endpoint: str = ""
    _asked_at: float = float("-inf")  # when the last Hello or Heartbeat went out
    _stamps: deque[int] = field(default_factory=lambda: deque(maxlen=64))  # of the newest Heartbeats of this client

    def __post_init__(self) -> None:
        self._dims = _dims(self.hello.spec, self.hello.robots)

    def due(self, now: float) -> list[Message]:
        """The handshake's messages to send at ``now`` (s): Hello until the server answers, Heartbeat after silence."""
        if now - self._asked_at < HELLO_PERIOD:
            return []
        self.needs_hello(now)
        silent = now - min(self.sent_at, self.received_at) >= HEARTBEAT_PERIOD
        if not self.essential and self.state == "refused" and now - self._asked_at >= ASK_AGAIN:
            self.state = "connecting"
        if self.state == "connecting":
            message: Message = self.hello
        elif self.state == "welcome" and silent:
            message = Heartbeat(int(now * 1e9), self.session or 0)
            self._stamps.append(message.stamp)
        else:
            return []
        self.sent_at = self._asked_at = now
        return [message]

    def join_again(self, hello: Hello) -> None:
        """Send this Hello next, even if the server has welcomed this client."""
        self.hello, self.state, self._asked_at = hello, "connecting", float("-inf")

    def needs_hello(self, now: float) -> bool:
        """Whether this client was silent for LONG_SILENCE and must send Hello first.

        If the result is True, :meth:`due` returns the Hello next. The next call of this method returns False.
        """
        if self.state != "welcome" or now - self.sent_at < LONG_SILENCE:
            return False
        self.join_again(self.hello)
        return True

    def receive(self, frames: Frames, now: float) -> list[Input]:
        """Take one message from the server at ``now`` (s). Return the inputs for the core.

        Malformed bytes raise no error. The core gets the Welcome when the link starts and after each reconnect, and
        then sends the messages that the server needs. If another driver is possibly still moving the robot, a driver's
        core gets a Heartbeat before the Welcome.
        """
        sender = f"on link {self.link} from its server"
        try:
            message = _decode(codec.kind_of(frames), frames[1], self._dims, self.tally, sender, now)
        except ProtocolError as error:
            self.tally.note(error.kind, f"{sender}: {error}", now)
            return []
        self.received_at = now
        if isinstance(message, self.accepts):
            return [(self.link, message)]
        if isinstance(message, Welcome):
            return self._welcomed(message, now)
        if isinstance(message, Refused):
            if message.code == "hello":
                if self.state == "welcome":  # react only once, because the server may refuse many queued messages
                    self.join_again(self.hello)
            else:
                self._refused(message, now)
            return []
        if isinstance(message, Heartbeat):
            answer = message.stamp in self._stamps
            waits = self.state == "connecting" and self.hello.role == "driver" and not answer
            return [(self.link, message)] if waits else []
        self.tally.note("unexpected", f"{message.NAME} from the server of link {self.link}", now)
        return []

    def _refused(self, refusal: Refused, now: float) -> None:
        self.state, self.refusal = "refused", refusal
        if not self.essential:
            text = f"link {self.link}: {refusal.reason}; this node asks again in {ASK_AGAIN:g} s"
            self.tally.note("refusals", text, now, "refused")

    def _welcomed(self, message: Welcome, now: float) -> list[Input]:
        if message.protocol != PROTOCOL_VERSION:
            self._refused(_other_protocol(message.protocol), now)
            return []
        new = self.state != "welcome" or message.session != self.session
        self.state, self.session = "welcome", message.session
        return [(self.link, message)] if new else []

    def check(self) -> None:
        """Raise HandshakeError if the server refused this client and the link is essential."""
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
    robot, shared = spec.describe() if spec else {}, dict(agreement or {})
    return Hello(PROTOCOL_VERSION, role, name, incarnation, client, robots, weights_version, robot, shared)
