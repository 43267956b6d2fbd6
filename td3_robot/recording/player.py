"""Connects ``play`` to live nodes.

When the player replaces a robot, it uses the robot's recorded handshake and name (``--remap`` can change the name).
When it replaces a server, it uses a new name and a new handshake.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache

import msgspec

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.messages import Action, Evaluation, Hello, Message, Record, Step, Throttle, Weights, wire_fields
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.topics import MONITOR, TOPICS
from td3_robot.transport import codec
from td3_robot.transport import link as handshake
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import AllowList
from td3_robot.transport.link import HEARTBEAT_PERIOD, ClientLink, ServerLink

PLAYED_LINKS = ("policy", "learner")
_PLAYED = (Step, Action, Throttle, Weights)  # no Commands, because only people may give Commands
_INCARNATIONS = 1000  # each loop adds this number to the recorded incarnations
_ACCEPTED: dict[str, tuple[type[Message], ...]] = {
    **dict.fromkeys(ROBOT_ROLES, (Step,)),
    "policy": (),
    "evaluator": (Evaluation,),
}


@cache
def playable() -> dict[str, list[tuple[str, bool]]]:
    """The links of each topic. The bool tells whether the server of the link publishes the topic."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for row in TOPICS:
        if row.link in PLAYED_LINKS and row.message in _PLAYED:
            link = row.link, row.publisher.split()[0] == row.link
            if link not in found.setdefault(row.message.NAME, []):
                found[row.message.NAME].append(link)
    return found


class Player:
    """Connects like the recorded robots, or serves like the recorded server, and sends the recorded messages.

    The player ignores the answers of live nodes. It never waits: if a queue is full, it drops the message and counts it
    as lost.

    Args:
        endpoints: endpoints by link: policy, learner, monitor. A monitor gets all played messages.
        names: new names of publishers, by recorded name.
        loop: number of completed loops. In each loop the robots get higher incarnations.
        keys: keys of this machine, for endpoints beyond loopback.

    Raises:
        EndpointError: an endpoint is not allowed, or the player cannot serve an endpoint, for example because another
            process serves this endpoint.
    """

    def __init__(
        self,
        session: Session,
        topics: Collection[str],
        endpoints: Mapping[str, str],
        names: Mapping[str, str],
        loop: int = 0,
        keys: AllowList | None = None,
    ) -> None:
        self.endpoints = endpoints
        self._session = session
        self._names = names
        self._later = loop * _INCARNATIONS
        self._counts: Counter[str] = Counter()
        self._served: set[str] = set()
        self._buses: dict[str, Bus] = {}
        self._hellos: dict[str, Entry] = {}  # first Hello of each robot, for a monitor
        # For a monitor, by publisher and topic: the newest incarnation, the number that the player adds to the
        # recorded sequence numbers of this incarnation, and the highest sequence number sent.
        self._numbers: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._keys = keys
        # Times (s). _looked_at: end of the newest call of ``turn``. _looked_since: begin of the first call of ``turn``
        # after the newest suspension of this process.
        self._looked_at = self._looked_since = float("-inf")
        self._server = Bus(keys=keys)
        links = {link for topic in topics for link in playable().get(topic, ()) if link[0] in endpoints}
        try:
            for link, serves in sorted(links):
                self._open(link, endpoints[link], serves)
            if MONITOR in endpoints:
                self._show(endpoints[MONITOR])
        except BaseException:
            self.close()
            raise

    def _open(self, link: str, endpoint: str, serves: bool) -> None:
        task = {"task": self._session.metadata.get("task", "")}
        if serves:
            self._served.add(link)
            accepted = ServerLink(link, f"player of {link}", _ACCEPTED, task, secrets.randbits(63))
            self._server.serve(endpoint, accepted)
            return
        newest = {hello.name: hello for _, hello in self._session.robots()}
        for hello in newest.values():
            self._connect(link, endpoint, msgspec.structs.replace(hello, agreement=task), (Action, Throttle))

    def _show(self, endpoint: str) -> None:
        for entry, _ in self._session.robots():
            self._hellos.setdefault(entry.publisher, entry)
        starts = {entry.publisher: entry.incarnation for entry in self._session.entries()}
        for publisher, incarnation in starts.items():
            hello = handshake.hello("node", publisher, client=0, incarnation=incarnation)
            self._connect(MONITOR, endpoint, hello, ())

    def _connect(self, link: str, endpoint: str, recorded: Hello, accepted: tuple[type[Message], ...]) -> None:
        name, incarnation = self._names.get(recorded.name, recorded.name), recorded.incarnation + self._later
        client = secrets.randbits(63)
        hello = msgspec.structs.replace(recorded, name=name, incarnation=incarnation, client=client)
        bus = self._buses.setdefault(recorded.name, Bus(keys=self._keys))
        bus.connect(endpoint, ClientLink(link, hello, accepted))

    def missing(self) -> list[str]:
        """The links on which the player has not found a live node yet."""
        missing = {link for link in self._served if not self._server.peers(link)}
        for bus in self._buses.values():
            missing |= {link for link in bus.clients if not bus.welcome(link)}
        return sorted(missing)

    def silent_since(self, then: float) -> str:
        """A text about a server that has been silent since ``then`` (s, ``time.monotonic``).

        The text is empty if no server has been silent. It is also empty if this process was suspended after ``then``.
        This method ignores monitors, because a monitor is allowed to leave.
        """
        if self._looked_since > then:
            return ""
        clients = [client for bus in self._buses.values() for client in bus.clients.items()]
        silent = sorted(name for name, link in clients if name in PLAYED_LINKS and link.received_at <= then)
        return f"the server of link {silent[0]}" if silent else ""

    def turn(self, timeout: float) -> None:
        """Receive for up to ``timeout`` seconds. Raises a HandshakeError if a live node refuses the player."""
        begin = time.monotonic()
        if begin - self._looked_at > HEARTBEAT_PERIOD:  # the process was suspended, so earlier silence means nothing
            self._looked_since = begin
        buses = [*self._buses.values(), self._server]
        for bus in buses:
            bus.receive(timeout / len(buses))
        self._looked_at = time.monotonic()

    def play(self, entry: Entry) -> None:
        """Send a recorded message on the links that carry it, and to a monitor."""
        message = self._renamed(self._session.decode(entry))
        bus, introduced = self._buses.get(entry.publisher), self._hellos.get(entry.publisher)
        if bus and MONITOR in bus.clients and (introduced is None or entry.identity != introduced.identity):
            self._count(MONITOR, bus.send(MONITOR, self._record(entry, message)))
        if isinstance(message, Weights) and not message.payload:  # the recording leaves this policy out
            return
        for link, serves in playable().get(entry.topic, ()):
            if serves and link in self._served:
                source, peers = getattr(message, "source", None), self._server.peers(link)
                wanted = [peer for peer in peers if (peer.name == source if source else peer.role not in ROBOT_ROLES)]
                for sent in [self._server.send(peer, message) for peer in wanted] or [False]:
                    self._count(entry.topic, sent)
            elif not serves and bus and link in bus.clients:
                hello = bus.clients[link].hello
                if isinstance(message, Step) and message.incarnation != hello.incarnation:
                    bus.join_again(link, msgspec.structs.replace(hello, incarnation=message.incarnation))
                self._count(entry.topic, bus.send(link, message))

    def _renamed(self, message: Message) -> Message:
        """The message with the robot's new name and incarnation."""
        if "source" not in wire_fields(type(message)):
            return message
        source, incarnation = getattr(message, "source"), getattr(message, "incarnation")  # noqa: B009
        changes = {"source": self._names.get(source, source), "incarnation": incarnation + self._later}
        return msgspec.structs.replace(message, **changes)

    def introduce(self) -> None:
        """Send the Hellos of robots to a monitor, even if ``--start`` skips them."""
        for publisher, entry in self._hellos.items():
            record = self._record(entry, self._session.decode(entry))
            self._count(MONITOR, self._buses[publisher].send(MONITOR, record))

    def _record(self, entry: Entry, message: Message) -> Record:
        return Record(entry.topic, entry.link, self._number(entry), time.time_ns(), codec.encode(message))

    def _number(self, entry: Entry) -> int:
        """The sequence number for a monitor. If the recorded node restarts, the numbers continue. Gaps stay gaps."""
        stream = entry.publisher, entry.topic
        incarnation, base, newest = self._numbers.get(stream, (entry.incarnation, 0, -1))
        if incarnation != entry.incarnation:
            base = newest + 1
        number = base + entry.sequence
        self._numbers[stream] = entry.incarnation, base, max(newest, number)
        return number

    def _count(self, topic: str, sent: bool) -> None:
        self._counts[topic if sent else "lost"] += 1

    def counts(self) -> Counter[str]:
        """Numbers of messages. Keys: the topics of sent messages, ``monitor`` (sent to a monitor) and ``lost``."""
        return +self._counts

    def close(self) -> None:
        """Send Bye on all links."""
        for bus in (*self._buses.values(), self._server):
            bus.close("played")
