"""The live end of ``play``: takes the place of recorded nodes, with their names and handshakes."""

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

_LINKS = ("policy", "learner")
_PLAYED = (Step, Action, Throttle, Weights)  # no Commands: only people give these
_STARTS = 1000  # added to incarnations for each loop
_ACCEPTED: dict[str, tuple[type[Message], ...]] = {
    **dict.fromkeys(ROBOT_ROLES, (Step,)),
    "policy": (),
    "evaluator": (Evaluation,),
}


@cache
def playable() -> dict[str, list[tuple[str, bool]]]:
    """For each topic the links that carry it, each with whether its publisher is the link's server."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for row in TOPICS:
        if row.link in _LINKS and row.message in _PLAYED:
            link = row.link, row.publisher.split()[0] == row.link
            if link not in found.setdefault(row.message.NAME, []):
                found[row.message.NAME].append(link)
    return found


class Player:
    """Connects as the recorded robots, or serves as the recorded server, and sends recorded messages.

    The player ignores the answers of live nodes. It never waits: it counts messages that find no room as lost.

    Args:
        topics: what will be played.
        endpoints: of the links policy, learner and monitor, as far as they are wanted. A monitor gets everything.
        names: new names of publishers.
        keys: of this machine, for endpoints beyond loopback.
        loop: how often this was played before; robots come back with a later incarnation.

    Raises:
        EndpointError: an endpoint to serve is busy, or one is not allowed.
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
        self._session = session
        self._names = names
        self._later = loop * _STARTS
        self._counts: Counter[str] = Counter()
        self._served: set[str] = set()
        self._buses: dict[str, Bus] = {}
        self._hellos: dict[str, Entry] = {}  # the first of each robot, for a monitor
        self._numbers: dict[tuple[str, str], tuple[int, int, int]] = {}  # incarnation, its first number, the newest
        self._keys = keys
        self._looked_at = self._looked_since = float(
            "-inf"
        )  # at the links: the last time, and since when without a long pause
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
        for hello in self._robots():
            self._connect(hello, link, endpoint, task)

    def _robots(self) -> list[Hello]:
        robots: dict[str, Hello] = {}
        for _, message in self._session.messages((Hello.NAME,)):
            if isinstance(message, Hello) and message.role in ROBOT_ROLES:
                robots[message.name] = message
        return list(robots.values())

    def _connect(self, recorded: Hello, link: str, endpoint: str, task: dict[str, str]) -> None:
        hello = msgspec.structs.replace(
            recorded,
            name=self._names.get(recorded.name, recorded.name),
            incarnation=recorded.incarnation + self._later,
            client=secrets.randbits(63),
            agreement=task,
        )
        spec = recorded.spec
        sizes = {"N": recorded.robots, "O": len(spec["observations"]), "A": len(spec["actions"])}
        bus = self._buses.setdefault(recorded.name, Bus(keys=self._keys))
        bus.connect(endpoint, ClientLink(link, hello, (Action, Throttle), sizes))

    def _show(self, endpoint: str) -> None:
        """Connect to a monitor in the place of every recorded node."""
        for entry, message in self._session.messages((Hello.NAME,)):
            if isinstance(message, Hello) and message.role in ROBOT_ROLES:
                self._hellos.setdefault(entry.publisher, entry)
        starts = {entry.publisher: entry.incarnation for entry in self._session.entries()}
        for publisher, incarnation in starts.items():
            name = self._names.get(publisher, publisher)
            hello = handshake.hello("node", name, client=secrets.randbits(63), incarnation=incarnation + self._later)
            bus = self._buses.setdefault(publisher, Bus(keys=self._keys))
            bus.connect(endpoint, ClientLink(MONITOR, hello, ()))

    def missing(self) -> list[str]:
        """The links on which no live node has answered yet."""
        missing = {link for link in self._served if not self._server.peers(link)}
        for bus in self._buses.values():
            missing |= {link for link in bus.links() if not bus.welcome(link)}
        return sorted(missing)

    def silent_since(self, then: float) -> str:
        """The first link whose server is silent since ``then`` (s, of ``time.monotonic``); empty if there is none.

        A monitor may leave.
        """
        if self._looked_since > then:
            return ""
        links = sorted((link, bus.heard(link)) for bus in self._buses.values() for link in bus.links())
        return next((f"the server of link {link}" for link, heard in links if link in _LINKS and heard <= then), "")

    def turn(self, timeout: float) -> None:
        """Receive on all links for up to ``timeout`` seconds.

        Raises:
            HandshakeError: a live node refuses us.
        """
        begin = time.monotonic()
        if begin - self._looked_at > HEARTBEAT_PERIOD:  # nothing was received meanwhile
            self._looked_since = begin
        buses = [*self._buses.values(), self._server]
        for bus in buses:
            bus.receive(timeout / len(buses))
        self._looked_at = time.monotonic()

    def say(self, entry: Entry) -> None:
        """Send a recorded message to its recorded receivers."""
        message = self._renamed(self._session.decode(entry))
        bus = self._buses.get(entry.publisher)
        hello = self._hellos.get(entry.publisher)
        if bus and MONITOR in bus.links() and (hello is None or entry.identity != hello.identity):
            self._count(MONITOR, bus.send(MONITOR, self._record(entry, message)))
        for link, serves in playable().get(entry.topic, ()):
            if serves and link in self._served:
                source, peers = getattr(message, "source", None), self._server.peers(link)
                wanted = [peer for peer in peers if (peer.name == source if source else peer.role not in ROBOT_ROLES)]
                for peer in wanted:
                    self._count(entry.topic, self._server.send(peer, message))
                if not wanted:
                    self._count(entry.topic, False)
            elif not serves and bus and link in bus.links():
                self._count(entry.topic, bus.send(link, message))

    def _renamed(self, message: Message) -> Message:
        """The message with the robot's new name and incarnation."""
        if "source" not in wire_fields(type(message)):
            return message
        source, incarnation = getattr(message, "source"), getattr(message, "incarnation")  # noqa: B009
        changes = {"source": self._names.get(source, source), "incarnation": incarnation + self._later}
        return msgspec.structs.replace(message, **changes)

    def introduce(self) -> None:
        """Send the Hellos of robots to a monitor, even if playing begins after them."""
        for publisher, entry in self._hellos.items():
            record = self._record(entry, self._session.decode(entry))
            self._count(MONITOR, self._buses[publisher].send(MONITOR, record))

    def _record(self, entry: Entry, message: Message) -> Record:
        return Record(entry.topic, entry.link, self._number(entry), time.time_ns(), codec.encode(message))

    def _number(self, entry: Entry) -> int:
        """The sequence number for a monitor, which sees all starts of a node as one. Gaps stay as recorded."""
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
        """Messages sent, by topic, and those lost."""
        return +self._counts

    def close(self) -> None:
        """Send Bye on all links."""
        for bus in (*self._buses.values(), self._server):
            bus.close("played")
