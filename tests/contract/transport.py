"""Contract tests for transports. To test a transport, write a harness and subclass the suite:

class TestMine(TransportContract):
    @pytest.fixture
    def harness(self, tmp_path): ...
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from td3_robot.core_types import Input, Peer
from td3_robot.errors import EndpointError, HandshakeError
from td3_robot.messages import Action, Bye, Hello, Message, Refused, Step, Throttle, Welcome
from td3_robot.specs import RobotSpec
from td3_robot.topics import QUEUE_LENGTH
from td3_robot.transport import codec
from td3_robot.transport.interface import Transport
from td3_robot.transport.link import LONG_SILENCE, PEER_TIMEOUT, ClientLink, ServerLink, hello

ENDLESS = 1_000_000  # messages; every queue must be full after fewer messages
_DEADLINE = 60.0  # s


class Stranger(ABC):
    """A client that the server does not know, and that sends arbitrary frames."""

    @abstractmethod
    def send(self, frames: list[bytes]) -> None:
        """Send frames to the server, without any handshake."""

    @abstractmethod
    def received(self) -> list[list[bytes]]:
        """Return the frames of every message received from the server so far."""


class Harness(ABC):
    """Makes transports for the suite and moves their clock.

    Attributes:
        endpoint: address at which servers serve and clients connect.
        elapsed: seconds that the test has skipped.
        made: open transports of the test.
    """

    endpoint: str

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.made: list[Transport] = []

    def clock(self) -> float:
        """Return real time plus the time that the test has skipped, in seconds."""
        return time.monotonic() + self.elapsed

    def bus(self) -> Transport:
        """Make a transport, which the harness closes after the test."""
        bus = self.make()
        self.made.append(bus)
        return bus

    def close(self) -> None:
        """Close all open transports, the newest first."""
        for bus in self.made[::-1]:
            bus.close()
        self.made.clear()

    def leave(self, bus: Transport, reason: str = "", *, in_order: bool = True) -> None:
        """Close one transport. ``in_order=False`` simulates a crash."""
        self.made.remove(bus)
        bus.close(reason, in_order=in_order)

    @abstractmethod
    def make(self) -> Transport:
        """Make a transport that uses :meth:`clock` and can connect to the other transports of this harness."""

    @abstractmethod
    def stranger(self) -> Stranger:
        """Make a raw client of :attr:`endpoint`."""

    @abstractmethod
    def inject(self, client: Transport, frames: list[bytes]) -> None:
        """Send raw frames on the link ``policy`` of a client that the server knows."""


SPEC = RobotSpec.from_description(
    {
        "name": "Toy",
        "observations": [{"name": f"o{index}", "unit": "m", "low": -5.0, "high": 5.0} for index in range(3)],
        "actions": [{"name": f"a{index}", "unit": "N", "low": -1.0, "high": 1.0} for index in range(2)],
        "control_period": 0.02,
    }
)


def server(session: int = 1) -> ServerLink:
    """The server's end of a link. It accepts Steps from simulators and drivers."""
    return ServerLink("policy", "server", {"simulator": (Step,), "driver": (Step,)}, {"task": "Toy"}, session)


def client(*, number: int = 7, task: str = "Toy", **fields: Any) -> ClientLink:
    """The simulator's end of a link."""
    greeting = hello("simulator", "sim-0", client=number, robots=1, spec=SPEC, agreement={"task": task}, **fields)
    return ClientLink("policy", greeting, (Action, Throttle))


def action(answers: int) -> Action:
    return Action("sim-0", 0, answers, 0, np.zeros((1, 2), np.float32), 1, 0, 0)


def kinds(inputs: list[Input]) -> list[type[Message]]:
    return [type(message) for _, message in inputs]


def of(inputs: list[Input], kind: type[Message]) -> list[Any]:
    return [message for _, message in inputs if isinstance(message, kind)]


def pump(condition: Callable[[list[list[Input]]], bool], *buses: Transport) -> list[list[Input]]:
    """Receive from one bus after another until ``condition`` returns True.

    ``condition`` gets a list for each bus, with the inputs that this bus has received so far.

    Returns:
        For each bus, the list of its inputs.
    """
    got: list[list[Input]] = [[] for _ in buses]
    end = time.monotonic() + _DEADLINE
    while not condition(got):
        assert time.monotonic() < end, f"the condition is false after {_DEADLINE} s; received: {got}"
        for inputs, bus in zip(got, buses, strict=True):
            inputs += bus.receive(0.005)
    return got


class TransportContract:
    """The suite. The subclass defines the fixture ``harness``."""

    @pytest.fixture
    def linked(self, harness: Harness) -> tuple[Transport, Transport, Peer]:
        """A server, a connected client, and the client as the server's Peer."""
        first, second = harness.bus(), harness.bus()
        first.serve(harness.endpoint, server())
        second.connect(harness.endpoint, client())
        at_server, _ = pump(lambda got: bool(got[0] and got[1]), first, second)
        peer = at_server[0][0]
        assert isinstance(peer, Peer)
        return first, second, peer

    # -- handshake ---------------------------------------------------------------------------------------------------

    def test_handshake_introduces_client_and_server(self, harness: Harness) -> None:
        serving, joining = harness.bus(), harness.bus()
        assert serving.serve(harness.endpoint, server(5)) == harness.endpoint
        joining.connect(harness.endpoint, client())
        assert (list(joining.clients), joining.welcome("policy")) == (["policy"], False)
        before = harness.clock()
        at_server, at_client = pump(lambda got: bool(got[0] and got[1]), serving, joining)
        ((peer, greeting),) = at_server
        ((origin, welcome),) = at_client
        assert isinstance(peer, Peer)
        assert isinstance(greeting, Hello)
        assert isinstance(welcome, Welcome)
        assert (peer.name, peer.role, peer.link, origin) == ("sim-0", "simulator", "policy", "policy")
        assert (greeting.robots, welcome.session) == (1, 5)
        assert serving.peers("policy") == [peer]
        assert joining.welcome("policy")
        assert joining.clients["policy"].received_at >= before
        assert not serving.dropped() + joining.dropped()

    def test_client_can_start_before_its_server(self, harness: Harness) -> None:
        joining, serving = harness.bus(), harness.bus()
        joining.connect(harness.endpoint, client())
        for _ in range(5):
            assert joining.receive(0.0) == []
        serving.serve(harness.endpoint, server())
        at_server, at_client = pump(lambda got: bool(got[0] and got[1]), serving, joining)
        assert (kinds(at_server), kinds(at_client)) == ([Hello], [Welcome])

    def test_hello_is_sent_before_the_first_message(self, harness: Harness, make_step: Any) -> None:
        serving, joining = harness.bus(), harness.bus()
        serving.serve(harness.endpoint, server())
        joining.connect(harness.endpoint, client())
        assert joining.send("policy", make_step(0))
        (got,) = pump(lambda got: bool(of(got[0], Step)), serving)
        assert kinds(got) == [Hello, Step]

    def test_refused_client_raises(self, harness: Harness) -> None:
        serving, joining = harness.bus(), harness.bus()
        serving.serve(harness.endpoint, server())
        joining.connect(harness.endpoint, client(task="Other"))
        with pytest.raises(HandshakeError, match=r"link policy.*task is Toy here, Other there"):
            pump(lambda _: False, serving, joining)
        assert set(serving.dropped()) == {"refused"}

    def test_busy_endpoint_is_refused(self, harness: Harness, linked: tuple[Transport, Transport, Peer]) -> None:
        with pytest.raises(EndpointError, match="is busy"):
            harness.bus().serve(harness.endpoint, server())
        serving, joining, peer = linked
        assert serving.send(peer, action(1))
        pump(lambda got: bool(of(got[0], Action)), joining)

    def test_server_that_adopts_another_robot_refuses_clients_with_the_old_robot(
        self, linked: tuple[Transport, Transport, Peer]
    ) -> None:
        serving, joining, peer = linked
        serving.adopt("policy", replace(SPEC, name="Other"))
        with pytest.raises(HandshakeError, match="robot is 'Other' here, 'Toy' there"):
            pump(lambda _: False, joining)
        (got,) = pump(lambda got: bool(got[0]), serving)
        assert got[0][0] is peer
        assert kinds(got) == [Bye]

    # -- clients with the same name ----------------------------------------------------------------------------------

    def test_taken_name_is_refused(self, harness: Harness, linked: tuple[Transport, Transport, Peer]) -> None:
        serving, first, peer = linked
        second = harness.bus()
        second.connect(harness.endpoint, client(number=8))
        with pytest.raises(HandshakeError, match="name 'sim-0' is taken by a simulator that is connected"):
            pump(lambda _: False, serving, first, second)
        assert serving.peers("policy") == [peer]

    def test_later_incarnation_takes_the_name(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        serving, _, old = linked
        second = harness.bus()
        second.connect(harness.endpoint, client(number=8, incarnation=1))
        at_server, _ = pump(lambda got: len(got[0]) == 2 and bool(got[1]), serving, second)
        assert kinds(at_server) == [Bye, Hello]
        assert at_server[0][0] is old
        assert second.send("policy", make_step(0))
        (got,) = pump(lambda got: bool(got[0]), serving)
        assert got[0][0] is at_server[1][0]
        assert not serving.send(old, action(0))

    # -- queues ------------------------------------------------------------------------------------------------------

    def test_messages_keep_their_order_in_both_directions(
        self, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        serving, joining, peer = linked
        for number in range(300):
            assert joining.send("policy", make_step(number))
            assert serving.send(peer, action(number))
        at_server, at_client = pump(lambda got: len(got[0]) == len(got[1]) == 300, serving, joining)
        assert [(origin, message.sequence) for origin, message in at_server if isinstance(message, Step)] == [
            (peer, number) for number in range(300)
        ]
        assert [(origin, message.answers) for origin, message in at_client if isinstance(message, Action)] == [
            ("policy", number) for number in range(300)
        ]

    def test_full_queue_to_the_server_refuses_messages_and_drops_none(
        self, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        serving, joining, _ = linked
        sent = 0
        while joining.send("policy", make_step(sent)):
            sent += 1
            assert sent < ENDLESS
        assert sent > 0.9 * QUEUE_LENGTH
        sent += joining.send("policy", make_step(sent))  # the transport's thread may have made room for one more
        (got,) = pump(lambda got: len(of(got[0], Step)) == sent, serving)
        assert [step.sequence for step in of(got, Step)] == list(range(sent))
        pump(lambda _: joining.send("policy", make_step(sent)), joining)
        (got,) = pump(lambda got: bool(got[0]), serving)
        assert [step.sequence for step in of(got, Step)] == [sent]

    def test_full_queue_to_a_client_refuses_messages_and_drops_none(
        self, linked: tuple[Transport, Transport, Peer]
    ) -> None:
        serving, joining, peer = linked
        sent = 0
        while serving.send(peer, action(sent)):
            sent += 1
            assert sent < ENDLESS
        assert sent > 0.9 * QUEUE_LENGTH
        assert serving.receive(0.0) == []  # no Bye: the client is only slow
        (got,) = pump(lambda got: len(of(got[0], Action)) == sent, joining)
        assert [message.answers for message in of(got, Action)] == list(range(sent))
        assert serving.send(peer, action(sent))

    def test_received_message_is_a_read_only_copy(
        self, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        serving, joining, _ = linked
        step = make_step(0)
        joining.send("policy", step)
        step.observation[:] = 9
        (got,) = pump(lambda got: bool(got[0]), serving)
        (received,) = of(got, Step)
        assert received.observation.tolist() == [[0, 0, 0]]
        assert not received.observation.flags.writeable

    # -- malformed input ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("frames", "kind"),
        [
            ([b"step"], "frames"),
            ([b"heartbeat", b"\x80", b""], "frames"),
            ([b"joystick", b"\x80"], "unknown-topic"),
            ([b"step", b"\xc1"], "malformed"),
            ([b"step", b"\x80"], "fields"),
            ([b"step", bytes(Step.MAX_BYTES + 1)], "oversize"),
            ([b"welcome", codec.encode(Welcome(1, "x", 1))], "unexpected"),
        ],
        ids=["one frame", "three frames", "unknown topic", "not msgpack", "no fields", "oversize", "wrong direction"],
    )
    def test_malformed_messages_are_only_counted(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any, frames: Any, kind: str
    ) -> None:
        serving, joining, peer = linked
        harness.inject(joining, frames)
        assert joining.send("policy", make_step(0))
        (got,) = pump(lambda got: bool(got[0]), serving)
        assert kinds(got) == [Step]
        assert serving.dropped() == {kind: 1}
        assert serving.peers("policy") == [peer]

    def test_random_frames_are_only_counted(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any, rng: np.random.Generator
    ) -> None:
        serving, joining, _ = linked
        for _ in range(200):
            harness.inject(joining, [rng.bytes(int(rng.integers(0, 50))) for _ in range(rng.integers(1, 4))])
        assert joining.send("policy", make_step(0))
        (got,) = pump(lambda got: bool(got[0]), serving)
        assert kinds(got) == [Step]
        assert serving.dropped().total() == 200

    def test_unknown_client_is_asked_for_a_hello(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        serving, _, peer = linked
        stranger = harness.stranger()
        stranger.send([b"step", codec.encode(make_step(0))])
        got = pump(lambda _: bool(stranger.received()), serving)
        ((topic, payload),) = stranger.received()
        refused = codec.decode(topic.decode(), payload)
        assert isinstance(refused, Refused)
        assert refused.code == "hello"
        assert got == [[]]
        assert serving.dropped() == {"stranger": 1}
        assert serving.peers("policy") == [peer]

    # -- silence, reconnect and close --------------------------------------------------------------------------------

    def test_heartbeats_keep_an_idle_link_alive(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        serving, joining, peer = linked
        for _ in range(20):
            before = joining.clients["policy"].received_at
            harness.elapsed += PEER_TIMEOUT / 4
            got = pump(lambda _, before=before: joining.clients["policy"].received_at > before, joining, serving)  # type: ignore[misc]
            assert got == [[], []]  # the cores see no Heartbeats
        assert serving.peers("policy") == [peer]
        assert joining.send("policy", make_step(0))

    def test_silent_client_times_out(self, harness: Harness, linked: tuple[Transport, Transport, Peer]) -> None:
        serving, _, peer = linked

        def later(got: list[list[Input]]) -> bool:
            # If the clock jumped by more than 1 s, the server could take the jump for a suspension of its own process.
            harness.elapsed += 0.5  # s
            return bool(got[0])

        (got,) = pump(later, serving)
        assert [(origin, type(message)) for origin, message in got] == [(peer, Bye)]
        assert serving.peers("policy") == []
        assert not serving.send(peer, action(0))

    def test_client_sends_hello_again_after_a_long_silence(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        serving, joining, _ = linked
        harness.elapsed += LONG_SILENCE + 0.1
        assert not joining.send("policy", make_step(0))
        assert not joining.welcome("policy")
        pump(lambda got: Welcome in kinds(got[1]), serving, joining)
        assert joining.send("policy", make_step(0))
        pump(lambda got: Step in kinds(got[0]), serving)

    def test_new_server_welcomes_the_clients_of_the_old_server(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        """After the old server has left, the client queues Steps. The new server drops them and asks for a Hello."""
        old, joining, _ = linked
        harness.leave(old)
        for number in range(50):
            assert joining.send("policy", make_step(number))
        new = harness.bus()
        new.serve(harness.endpoint, server(2))
        at_server, at_client = pump(lambda got: Welcome in kinds(got[1]), new, joining)
        assert [welcome.session for welcome in of(at_client, Welcome)] == [2]
        assert kinds(at_server) == [Hello]
        assert joining.send("policy", make_step(50))
        (got,) = pump(lambda got: bool(got[0]), new)
        assert [step.sequence for step in of(got, Step)] == [50]

    def test_client_moves_to_another_endpoint(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        """The old server notices that the client is gone, and the new server gets the next Steps."""
        old, joining, peer = linked
        new, endpoint = harness.bus(), f"{harness.endpoint}.new"
        new.serve(endpoint, server(2))
        joining.move("policy", endpoint)
        assert joining.clients["policy"].endpoint == endpoint
        at_new, at_client, _ = pump(lambda got: bool(got[0] and got[1]), new, joining, old)
        assert (kinds(at_new), kinds(at_client)) == ([Hello], [Welcome])
        assert [welcome.session for welcome in of(at_client, Welcome)] == [2]
        assert joining.send("policy", make_step(0))
        pump(lambda got: Step in kinds(got[0]), new)
        (got,) = pump(lambda got: not old.send(peer, action(0)) and Bye in kinds(got[0]), old)
        assert kinds(got) == [Bye]

    def test_client_that_leaves_sends_bye(self, harness: Harness, linked: tuple[Transport, Transport, Peer]) -> None:
        serving, joining, peer = linked
        harness.leave(joining, "done for today")
        (got,) = pump(lambda got: bool(got[0]), serving)
        ((origin, bye),) = got
        assert origin is peer
        assert isinstance(bye, Bye)
        assert bye.reason == "done for today"
        assert not serving.send(peer, action(0))

    def test_server_notices_a_crashed_client_when_a_send_fails(
        self, harness: Harness, linked: tuple[Transport, Transport, Peer], make_step: Any
    ) -> None:
        """The server's transport returns the client's last messages. Then it reports the crash as a Bye."""
        serving, joining, peer = linked
        assert joining.send("policy", make_step(0))
        harness.leave(joining, in_order=False)
        (got,) = pump(lambda got: not serving.send(peer, action(0)) and Bye in kinds(got[0]), serving)
        assert kinds(got) == [Step, Bye]
        assert of(got, Bye)[0].reason == "connection closed"
        assert serving.peers("policy") == []

    def test_closed_endpoint_can_be_served_again(self, harness: Harness) -> None:
        for session in range(3):
            bus = harness.bus()
            bus.serve(harness.endpoint, server(session))
            harness.leave(bus)

    def test_receive_without_an_input_returns_an_empty_list(self, harness: Harness) -> None:
        bus = harness.bus()
        bus.serve(harness.endpoint, server())
        for timeout in (0.0, 0.05):
            assert bus.receive(timeout) == []
