"""Test both ends of a link: handshake, refusals, heartbeats and expiry. The tests supply the frames and the time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from td3_robot.core_types import Peer
from td3_robot.errors import HandshakeError
from td3_robot.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    Bye,
    Evaluation,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Status,
    Step,
    Throttle,
    Weights,
    Welcome,
)
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import codec
from td3_robot.transport.link import (
    DRIVER_SILENCE,
    HEARTBEAT_PERIOD,
    HELLO_PERIOD,
    PEER_TIMEOUT,
    ClientLink,
    ServerLink,
    hello,
)
from td3_robot.transport.tally import LOG_PERIOD

MakeServer = Callable[..., ServerLink]
MakeClient = Callable[..., ClientLink]
MakeHello = Callable[..., Hello]


def frames(message: Message) -> list[bytes]:
    return [message.NAME.encode(), codec.encode(message)]


def ask(server: ServerLink, message: Message, key: bytes = b"1", now: float = 0.0) -> tuple[list[Any], list[Any]]:
    """Send a message to the server. Return the inputs for the core, and the replies without routing identities."""
    inputs, replies = server.receive(key, frames(message), now)
    assert all(other == key for other, _ in replies)
    return inputs, [reply for _, reply in replies]


def refusal(server: ServerLink, message: Message, key: bytes = b"1") -> Refused:
    """Return the server's refusal of a message. The message must give the core no input."""
    inputs, replies = ask(server, message, key)
    assert inputs == []
    (reply,) = replies
    assert isinstance(reply, Refused)
    return reply


# -- the server: joining --------------------------------------------------------------------------------------------


def test_a_hello_is_answered_with_a_welcome(make_server: MakeServer, make_hello: MakeHello, spec: RobotSpec) -> None:
    server = make_server(5)
    inputs, replies = ask(server, make_hello(robots=4))
    ((peer, message),) = inputs
    assert (peer.name, peer.role, peer.link) == ("sim-0", "simulator", "policy")
    assert peer.dims == {"N": 4, "O": 3, "A": 2}
    assert message.robots == 4
    (welcome,) = replies
    assert (welcome.protocol, welcome.name, welcome.session) == (PROTOCOL_VERSION, "server", 5)
    assert server.spec == spec
    again, replies = ask(server, make_hello(robots=4))
    assert again == []  # the client is known already and does not join again
    assert isinstance(replies[0], Welcome)


def test_another_protocol_version_is_refused(make_server: MakeServer, make_hello: MakeHello) -> None:
    refused = refusal(make_server(), changed(make_hello(), protocol=PROTOCOL_VERSION + 1))
    assert refused.code == "protocol"
    assert refused.reason == f"protocol version is {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} there"


def test_an_unknown_role_is_refused(make_server: MakeServer, make_hello: MakeHello) -> None:
    refused = refusal(make_server(), make_hello("joystick"))
    assert refused.code == "agreement"
    assert refused.reason == "role 'joystick' is not served here; allowed: simulator, driver, policy, evaluator"


@pytest.mark.parametrize("robots", [0, 1025])
def test_an_invalid_number_of_robots_is_refused(make_server: MakeServer, make_hello: MakeHello, robots: int) -> None:
    refused = refusal(make_server(), make_hello(robots=robots))
    assert refused.code == "spec"
    assert refused.reason == f"simulator names {robots} robots; allowed: 1 to 1024, with a specification"


def test_a_robot_without_a_specification_is_refused(make_server: MakeServer, make_hello: MakeHello) -> None:
    refused = refusal(make_server(), make_hello("driver", spec=None))
    assert refused.code == "spec"
    assert "with a specification" in refused.reason


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "Other"}, "robot is 'Toy' here, 'Other' there"),
        ({"control_period": 0.01}, "control_period is 0.02 s here, 0.01 s there"),
        ({"observations": 2}, "3 observations here, 2 there"),
        ({"actions": 1}, "2 actions here, 1 there"),
        ({"observations": {"name": "x"}}, "observations[1].name is 'o1' here, 'x' there"),
        ({"observations": {"unit": "rad"}}, "observations[1].unit is 'm' here, 'rad' there"),
        ({"observations": {"low": -6.0}}, "observations[1].low is -5.0 here, -6.0 there"),
        ({"observations": {"high": 6.0}}, "observations[1].high is 5.0 here, 6.0 there"),
        ({"actions": {"name": "x"}}, "actions[1].name is 'right' here, 'x' there"),
        ({"actions": {"unit": "m"}}, "actions[1].unit is 'N' here, 'm' there"),
        ({"actions": {"low": -0.25}}, "actions[1].low is -0.5 here, -0.25 there"),
        ({"actions": {"high": 0.75}}, "actions[1].high is 0.5 here, 0.75 there"),
    ],
)
def test_another_robot_is_refused_with_the_difference(
    make_server: MakeServer, make_hello: MakeHello, spec: RobotSpec, change: dict[str, Any], text: str
) -> None:
    ((key, value),) = change.items()
    if isinstance(value, dict):
        channels = list(getattr(spec, key))
        channels[1] = replace(channels[1], **value)
        value = tuple(channels)
    elif key in ("observations", "actions"):
        value = getattr(spec, key)[:value]
    other = replace(spec, **{key: value})
    refused = refusal(make_server(spec=spec), make_hello(spec=other))
    assert refused.code == "spec"
    assert refused.reason == f"robot specification differs: {text}"


def test_a_robot_is_accepted_if_only_the_meaning_field_of_its_channels_differs(
    make_server: MakeServer, make_hello: MakeHello, spec: RobotSpec
) -> None:
    other = replace(spec, observations=tuple(replace(item, meaning="new") for item in spec.observations))
    assert ask(make_server(spec=spec), make_hello(spec=other))[0]


@pytest.mark.parametrize(
    "description",
    [
        {"name": "Toy"},
        {"name": "Toy", "observations": [1], "actions": [], "control_period": 1.0},
        {"name": "Toy", "observations": "abc", "actions": "d", "control_period": 1.0},
        {"name": "Toy", "observations": {"a": 1}, "actions": {"a": 1}, "control_period": 1.0},
        {"name": "Toy", "observations": [], "actions": [], "control_period": 0.02},
    ],
)
def test_an_invalid_specification_is_refused(
    make_server: MakeServer, make_hello: MakeHello, description: dict[str, Any]
) -> None:
    server = make_server()
    refused = refusal(server, changed(make_hello(), spec=description))
    assert refused.code == "spec"
    assert refused.reason.startswith("robot ")
    assert server.spec is None


def test_a_different_agreement_is_refused(make_server: MakeServer, make_hello: MakeHello) -> None:
    refused = refusal(make_server(), make_hello(agreement={"task": "Toy", "timing": "lockstep"}))
    assert refused.code == "agreement"
    assert refused.reason == "configuration differs: timing is free here, lockstep there"


@pytest.mark.parametrize("agreement", [{}, {"task": "Toy"}, {"unknown": "x"}])
def test_agreement_keys_are_compared_only_if_both_sides_have_them(
    make_server: MakeServer, make_hello: MakeHello, agreement: dict[str, str]
) -> None:
    assert ask(make_server(), make_hello(agreement=agreement))[0]


def test_an_agreement_that_is_not_a_map_is_refused(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server()
    refused = refusal(server, changed(make_hello(), agreement=["task"]))  # type: ignore[arg-type]
    assert (refused.code, refused.reason) == ("malformed", "hello: Expected `object`, got `array` - at `$.agreement`")
    assert server.tally.counts == {"fields": 1}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"hello", b"\xc1"], "hello: not msgpack"),
        ([b"hello", b"\x80"], "hello: Object missing required field `protocol`"),
        ([b"hello", bytes(Hello.MAX_BYTES + 1)], "hello: 131073 bytes, above the limit of 131072"),
        ([b"hello", b"", b""], "3 or more frames; a message has two: topic and payload"),
        ([b"hello"], "1 frames; a message has two: topic and payload"),
    ],
)
def test_a_malformed_hello_is_refused_with_the_reason(make_server: MakeServer, parts: list[bytes], reason: str) -> None:
    inputs, ((key, refused),) = make_server().receive(b"1", parts, 0.0)
    assert (inputs, key) == ([], b"1")
    assert isinstance(refused, Refused)
    assert refused.code == "malformed"
    assert refused.reason.startswith(reason)


def test_the_refusal_of_an_incomplete_specification_names_the_missing_field(
    make_server: MakeServer, make_hello: MakeHello
) -> None:
    refused = refusal(make_server(), changed(make_hello(), spec={"name": "Toy"}))
    assert refused.code == "spec"
    assert refused.reason == (
        "robot specification: Object missing required field `observations`; see docs/reference/protocol.md"
    )
    assert "\n" not in refused.reason


@pytest.mark.parametrize("name", ["server", "server/leg"])
def test_the_name_of_the_server_is_reserved(make_server: MakeServer, make_hello: MakeHello, name: str) -> None:
    """The server is named "server". In a LifecycleChange, "server/leg" is the server's watch over the robot "leg"."""
    server = make_server()
    for role in ("driver", "simulator", "evaluator"):
        refused = refusal(server, make_hello(role, name))
        assert (refused.code, refused.reason) == (
            "taken",
            f"name {name!r} is reserved for this server; use another name",
        )
    assert server.peers == {}
    assert ask(server, make_hello(name="server-2"))[0]


# -- the server: Steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"source": "sim-1"}, {"incarnation": 2}, {"incarnation": 4}])
def test_a_step_of_another_source_or_incarnation_is_dropped(
    make_server: MakeServer, make_hello: MakeHello, make_step: Any, caplog: pytest.LogCaptureFixture, change: Any
) -> None:
    server = make_server()
    ask(server, make_hello(incarnation=3))
    own = {"incarnation": 3}
    with caplog.at_level(logging.WARNING):
        for sequence in range(5):
            assert ask(server, make_step(sequence, **{**own, **change})) == ([], [])
    assert server.tally.counts == {"identity": 5}
    (line,) = (record.message for record in caplog.records)
    source, incarnation = change.get("source", "sim-0"), change.get("incarnation", 3)
    assert line == (
        "dropped (identity, 1 so far): step 0 from sim-0 on link policy: "
        f"the Step names source {source!r}, incarnation {incarnation}; the client's Hello names 'sim-0', incarnation 3"
    )
    assert ask(server, make_step(0, **own))[0]


def test_a_step_whose_sequence_goes_back_is_dropped_and_a_jump_is_counted(
    make_server: MakeServer, make_hello: MakeHello, make_step: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    ask(server, make_hello())
    with caplog.at_level(logging.WARNING):
        arrived = [bool(ask(server, make_step(sequence))[0]) for sequence in (7, 8, 8, 6, 7, 12, 11, 13)]
    assert arrived == [True, True, True, False, False, True, False, True]  # a source may repeat its newest Step
    assert server.tally.counts == {"sequence": 3, "gap": 1}
    assert [record.message for record in caplog.records] == [
        "dropped (sequence, 1 so far): step 6 from sim-0 on link policy: "
        "the sequence goes back: step 8 has already arrived",
        "noticed (gap, 1 so far): step 12 from sim-0 on link policy: the previous 3 Steps did not arrive",
    ]
    assert server.tally.last[1].startswith("sequence: step 11 from sim-0")
    ask(server, make_hello())  # after a new Hello, the source may repeat Steps
    assert ask(server, make_step(3))[0]


def test_a_lockstep_source_may_return_to_the_incarnation_and_sequence_of_a_checkpoint(
    make_server: MakeServer, make_hello: MakeHello, make_step: Any
) -> None:
    server = make_server()
    ask(server, make_hello(incarnation=5))
    for sequence, incarnation in ((9, 5), (4, 5), (4, 2), (5, 2)):
        assert ask(server, make_step(sequence, incarnation=incarnation, needs_version=1))[0]
    assert ask(server, make_step(6, source="sim-1", needs_version=1)) == ([], [])
    assert server.tally.counts == {"identity": 1}


def test_a_name_in_use_is_refused(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server()
    ask(server, make_hello(incarnation=3))
    for incarnation in (0, 3):
        refused = refusal(server, make_hello(client=8, incarnation=incarnation), b"2")
        assert refused.code == "taken"
        assert refused.reason == "name 'sim-0' is taken by a simulator that is connected"
    assert list(server.peers) == [b"1"]
    assert ask(server, make_hello(name="sim-1", client=8), b"3")[0]


def test_a_later_incarnation_replaces_the_earlier_incarnation(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server()
    ((first, _),), _ = ask(server, make_hello())
    inputs, replies = ask(server, make_hello(client=8, incarnation=1), b"2")
    (gone, bye), (second, joined) = inputs
    assert gone is first
    assert bye.reason == "replaced by a later incarnation"
    assert (second.key, joined.incarnation) == (b"2", 1)
    assert isinstance(replies[0], Welcome)
    assert refusal(server, Bye("late"), b"1").code == "hello"  # the server no longer knows the old connection


def test_no_client_takes_the_name_of_a_client_with_another_role(make_server: MakeServer, make_hello: MakeHello) -> None:
    """The server refuses a simulator or evaluator that starts later with the name of a policy server."""
    server = make_server()
    server.receive(b"a", frames(make_hello("policy", "policy", incarnation=0)), 0.0)
    for role in ("simulator", "evaluator"):
        inputs, ((_, refused),) = server.receive(b"b", frames(make_hello(role, "policy", client=8, incarnation=9)), 1.0)
        assert inputs == []
        assert isinstance(refused, Refused)
        assert (refused.code, refused.reason) == ("taken", "name 'policy' is taken by a policy that is connected")
    assert server.peers.keys() == {b"a"}


def test_a_new_process_replaces_the_old_process_with_the_same_routing_identity(
    make_server: MakeServer, make_hello: MakeHello
) -> None:
    server = make_server()
    ((first, _),), _ = server.receive(b"a", frames(make_hello(client=7, incarnation=1)), 0.0)
    inputs, replies = server.receive(b"a", frames(make_hello(client=8, incarnation=2)), 1.0)
    assert [(type(message), origin is first) for origin, message in inputs] == [(Bye, True), (Hello, False)]
    assert [type(message) for _, message in replies] == [Welcome]
    assert server.peers[b"a"].hello.incarnation == 2


def test_the_server_uses_the_newest_of_several_hellos(make_server: MakeServer, make_hello: MakeHello) -> None:
    """While the server is away, Hellos wait in libzmq's queue. A server that returns reads the oldest Hello first."""
    server = make_server()
    old, new = make_hello(incarnation=1), make_hello(incarnation=1, weights_version=704)
    server.receive(b"a", frames(old), 0.0)
    inputs, _ = server.receive(b"a", frames(new), 0.0)
    assert [type(message) for _, message in inputs] == [Bye, Hello]
    assert server.peers[b"a"].hello.weights_version == 704


def test_a_repeated_hello_after_other_messages_makes_the_client_join_again(
    make_server: MakeServer, make_hello: MakeHello
) -> None:
    """A Welcome makes the client's core start again. The server's core must do the same, or both cores wait forever."""
    server = make_server()
    hello = make_hello()
    ((first, _),), _ = server.receive(b"a", frames(hello), 0.0)
    assert server.receive(b"a", frames(hello), 0.1)[0] == []  # a repeated Hello
    server.receive(b"a", frames(Heartbeat(0, 0)), 1.0)
    inputs, replies = server.receive(b"a", frames(hello), 5.5)
    assert [(type(message), origin is first) for origin, message in inputs] == [(Bye, True), (Hello, False)]
    assert isinstance(inputs[0][1], Bye)
    assert inputs[0][1].reason == "connected anew"
    assert [type(message) for _, message in replies] == [Welcome]
    assert server.receive(b"a", frames(hello), 5.6)[0] == []


def test_the_answer_to_a_heartbeat_is_not_a_request_to_wait(make_client: MakeClient) -> None:
    """The link sends a Heartbeat. The server's answer is a Heartbeat with the same stamp, and comes late.

    The driver's core must not get this answer. Only a Heartbeat with another stamp tells the core to wait.
    """
    client = make_client(role="driver")
    assert client.due(0.0) == [client.hello]
    client.receive(frames(Welcome(PROTOCOL_VERSION, "server", 5)), 0.0)
    (heartbeat,) = client.due(1.1)
    assert client.needs_hello(6.0)
    assert client.receive(frames(Heartbeat(heartbeat.stamp, 5)), 6.0) == []
    ((link, wait),) = client.receive(frames(Heartbeat(17, 5)), 6.0)
    assert isinstance(wait, Heartbeat)
    assert (link, wait.stamp) == ("policy", 17)


def test_a_driver_that_still_sends_is_not_replaced(
    make_server: MakeServer, make_hello: MakeHello, make_step: Any
) -> None:
    """Two drivers must not move the same motors. So driver 2 waits until the server knows whether driver 1 is alive."""
    server = make_server()
    ask(server, make_hello("driver"), now=0.0)
    second = make_hello("driver", client=8, incarnation=99)
    # No message came for 10 s, but perhaps the server itself was paused.
    assert must_wait(server, second, b"2", now=10.0)
    ask(server, make_step(1), now=10.1)
    inputs, (refused,) = ask(server, second, b"2", now=10.25)
    assert (inputs, refused.reason) == ([], "name 'sim-0' is taken by a driver that is connected")
    assert list(server.peers) == [b"1"]
    assert ask(server, make_step(2), now=10.3)[0]
    again, _ = ask(server, make_hello("driver"), b"3", now=10.4)  # the first driver uses a new connection
    assert [message.NAME for _, message in again] == ["bye", "hello"]


def must_wait(server: ServerLink, message: Hello, key: bytes, now: float) -> bool:
    """Return whether the server sends one Heartbeat to this client, one to the first client, and nothing else."""
    inputs, replies = server.receive(key, frames(message), now)
    return not inputs and [(to, reply.NAME) for to, reply in replies] == [(key, "heartbeat"), (b"1", "heartbeat")]


@pytest.mark.parametrize("how", ["left", "silent"])
def test_a_refusal_tells_a_driver_whether_another_driver_has_its_name(
    make_server: MakeServer, make_hello: MakeHello, spec: RobotSpec, how: str
) -> None:
    """The code "name" means that another driver has the robot.

    If the code is not "name", no other driver has the robot. Then the refused driver must make the robot safe.
    """
    server = make_server()
    other = make_hello("driver", client=8, incarnation=99, spec=replace(spec, name="Other"))
    ask(server, make_hello("driver"))
    assert must_wait(server, other, b"2", now=1.0)  # the first driver may have been killed
    ask(server, Heartbeat(0, 1), now=1.1)
    _, (refused,) = ask(server, other, b"2", now=1.25)
    assert (refused.code, refused.reason[:28]) == ("name", "robot specification differs:")
    if how == "left":
        ask(server, Bye("done"), now=1.3)
    else:
        assert must_wait(server, other, b"2", now=1.5)
    _, (refused,) = ask(server, other, b"2", now=1.51 + DRIVER_SILENCE)
    assert refused.code == "spec"


@pytest.mark.parametrize(
    "first", [("policy", {"incarnation": 5}), ("driver", {"incarnation": 5}), ("driver", {"owner": "other"})]
)
def test_a_driver_gets_the_refusal_code_named_taken_if_a_dead_driver_or_another_role_has_its_name(
    make_server: MakeServer, make_hello: MakeHello, first: tuple[str, dict[str, Any]]
) -> None:
    """With the code "taken", the refused driver keeps the robot safe, because no other driver does.

    Either another role has the name, or a dead driver has it. The server does not replace a dead driver if the
    new driver has another key or the same incarnation.
    """
    role, how = first
    server = make_server()
    server.receive(b"1", frames(make_hello(role, incarnation=5)), 0.0, how.get("owner", ""))
    hello = make_hello("driver", client=8, incarnation=how.get("incarnation", 6))
    if role == "driver":
        assert must_wait(server, hello, b"2", now=1.0)
    assert ask(server, hello, b"2", now=1.01 + DRIVER_SILENCE)[1][0].code == "taken"
    if role == "driver":
        assert must_wait(server, hello, b"3", now=4.0)
        server.receive(b"1", frames(Heartbeat(0, 1)), 4.1, how.get("owner", ""))
        assert ask(server, hello, b"3", now=4.2)[1][0].code == "name"


def test_only_a_driver_replaces_a_driver(make_server: MakeServer, make_hello: MakeHello) -> None:
    """The server immediately refuses a client of another role, even if its incarnation is higher."""
    server = make_server()
    ask(server, make_hello("driver", incarnation=5))
    for role in ("simulator", "policy"):
        refused = refusal(server, make_hello(role, client=8, incarnation=6), b"2")
        assert (refused.code, refused.reason) == ("taken", "name 'sim-0' is taken by a driver that is connected")
    assert list(server.peers) == [b"1"]


@pytest.mark.parametrize("incarnation", [99, 0])
def test_a_silent_driver_is_replaced(make_server: MakeServer, make_hello: MakeHello, incarnation: int) -> None:
    """The server also accepts a lower incarnation, because the clock of the new driver may have been set back."""
    server = make_server()
    ((first, _),), _ = ask(server, make_hello("driver", incarnation=5), now=0.0)
    second = make_hello("driver", client=8, incarnation=incarnation)
    assert must_wait(server, second, b"2", now=1.0)
    assert must_wait(server, second, b"2", now=1.0 + DRIVER_SILENCE)
    inputs, (welcome,) = ask(server, second, b"2", now=1.01 + DRIVER_SILENCE)
    assert [(peer is first, message.NAME) for peer, message in inputs] == [(True, "bye"), (False, "hello")]
    assert isinstance(welcome, Welcome)
    third = make_hello("driver", client=9, incarnation=100)
    [(waits, _), (probed, _)] = server.receive(b"3", frames(third), 4.0)[1]
    assert (waits, probed) == (b"3", b"2")
    assert ask(server, Bye("done"), b"2", now=4.1)[0]
    assert isinstance(ask(server, third, b"3", now=4.25)[1][0], Welcome)  # the driver left, so the server does not wait


def test_a_client_may_reconnect_on_a_new_connection(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server()
    ((first, _),), _ = ask(server, make_hello())
    inputs, _ = ask(server, make_hello(), b"2")
    assert inputs[0][0] is first
    assert inputs[0][1].reason == "connected anew"
    assert inputs[1][0].key == b"2"


def test_an_unknown_client_is_asked_for_a_hello(make_server: MakeServer, make_step: Any) -> None:
    for message in (make_step(), Heartbeat(0, 1), Bye(""), Status("n", "ready", "", {}, {})):
        refused = refusal(make_server(), message)
        assert refused.code == "hello"
        assert refused.reason == "server has not met this client; send Hello"


def test_the_server_decodes_only_hello_from_an_unknown_client(
    make_server: MakeServer, make_hello: MakeHello, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an unknown client, the server decodes only Hello. Of other messages it reads only the topic and the size.

    From a welcomed client, the server decodes only the messages that the client's role may send.
    """
    server, unpacked = make_server(), []
    decode = codec.decode_as
    monkeypatch.setattr(codec, "decode_as", lambda *message: unpacked.append(message) or decode(*message))
    ((_, refused),) = server.receive(b"1", [b"step", bytes(1 << 22)], 0.0)[1]
    assert (refused.code, server.tally.counts) == ("hello", {"stranger": 1})
    ((_, refused),) = server.receive(b"1", [b"hello", bytes(Hello.MAX_BYTES + 1)], 0.0)[1]
    assert refused.code == "malformed"
    assert server.receive(b"1", [b"weights", bytes(Weights.MAX_BYTES + 1)], 0.0) == ([], [])
    assert server.tally.counts == {"stranger": 1, "oversize": 2}
    assert unpacked == []
    ask(server, make_hello())
    assert len(unpacked) == 1
    assert server.receive(b"1", [b"weights", bytes(1000)], 0.0) == ([], [])
    assert server.tally.counts == {"stranger": 1, "oversize": 2, "unexpected": 1}
    assert len(unpacked) == 1


@pytest.mark.parametrize("topic", [b"heartbeat", b"record"])
def test_a_client_of_an_earlier_server_causes_no_warning(
    make_server: MakeServer, topic: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, the server is a monitor and the client is a node.

    If the node does not know yet that an earlier monitor has ended, it sends messages for the earlier monitor to the
    new monitor.
    """
    server = make_server()
    ((_, refused),) = server.receive(b"1", [topic, bytes(33)], 0.0)[1]
    assert refused.code == "hello"
    assert server.tally.counts == {}
    assert caplog.text == ""


def test_a_refused_client_is_forgotten(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server()
    ask(server, make_hello())
    inputs, replies = ask(server, make_hello(agreement={"task": "Other"}))
    assert isinstance(inputs[0][1], Bye)
    assert isinstance(replies[0], Refused)
    assert not server.peers
    assert server.tally.counts == {"refused": 1}


# -- the server: messages --------------------------------------------------------------------------------------------


def test_the_server_accepts_only_messages_that_the_role_of_the_client_may_send(
    make_server: MakeServer, make_hello: MakeHello, make_step: Any
) -> None:
    server = make_server()
    ((peer, _),), _ = ask(server, make_hello())
    ((origin, message),), replies = ask(server, make_step(3))
    assert origin is peer
    assert (message.sequence, replies) == (3, [])
    for kind in (Throttle("s", 0, 0, 0, 0, 0), Status("n", "ready", "", {}, {}), Welcome(1, "x", 1), Refused("x", "y")):
        assert ask(server, kind) == ([], [])
    assert server.tally.counts == {"unexpected": 4}
    ask(server, make_hello("policy", name="p"), b"2")
    assert ask(server, make_step(4), b"2") == ([], [])
    assert server.tally.counts == {"unexpected": 5}


def test_arrays_must_have_the_sizes_that_the_handshake_sets(
    make_server: MakeServer, make_hello: MakeHello, make_step: Any
) -> None:
    server = make_server()
    ask(server, make_hello(robots=2))
    assert ask(server, make_step(robots=3)) == ([], [])
    assert server.tally.counts == {"shape": 1}
    assert ask(server, make_step(robots=2))[0]


def test_a_heartbeat_is_answered_with_its_stamp(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server(9)
    ask(server, make_hello())
    _, (reply,) = ask(server, Heartbeat(-5, 9))
    assert (reply.stamp, reply.session) == (-5, 9)


def test_a_bye_ends_the_link(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server()
    ((peer, _),), _ = ask(server, make_hello())
    inputs, replies = ask(server, Bye("done"))
    assert inputs[0][0] is peer
    assert inputs[0][1].reason == "done"
    assert replies == []
    assert refusal(server, Bye("again")).code == "hello"


def test_silent_clients_expire(make_server: MakeServer, make_hello: MakeHello, make_step: Any) -> None:
    server = make_server()
    ((silent, _),), _ = ask(server, make_hello(), now=0.0)
    ask(server, make_hello(name="sim-1", client=8), b"2", now=0.0)
    ask(server, make_step(0), b"2", now=1.0)
    server.receive(b"1", [b"step", b"garbage"], 4.0)  # malformed input does not extend the timeout
    assert server.expire(PEER_TIMEOUT) == []
    ((peer, bye),) = server.expire(PEER_TIMEOUT + 0.5)
    assert peer is silent
    assert isinstance(bye, Bye)
    assert bye.reason == "silent for 5.0 s"
    assert list(server.peers) == [b"2"]
    assert refusal(server, make_step(1)).code == "hello"
    assert ask(server, make_hello())[0]  # the client may join again


def test_adopting_a_robot_removes_clients_of_another_robot(
    make_server: MakeServer, make_hello: MakeHello, spec: RobotSpec
) -> None:
    server = make_server()
    other = replace(spec, name="Other")
    ((peer, _),), _ = ask(server, make_hello(spec=other))
    ask(server, make_hello("policy", name="p"), b"2")
    inputs, replies = server.adopt(spec)
    ((origin, bye),) = inputs
    assert origin is peer
    assert isinstance(bye, Bye)
    ((key, refused),) = replies
    assert key == b"1"
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (
        "spec",
        "robot specification differs: robot is 'Toy' here, 'Other' there",
    )
    assert [item.name for item in server.peers.values()] == ["p"]
    assert refusal(server, make_hello(spec=other)).code == "spec"
    assert ask(server, make_hello(name="sim-1"), b"3")[0]


def test_adopting_the_same_robot_keeps_the_client(
    make_server: MakeServer, make_hello: MakeHello, spec: RobotSpec
) -> None:
    server = make_server()
    ask(server, make_hello())
    assert server.adopt(spec) == ([], [])
    assert list(server.peers) == [b"1"]


# -- the client ------------------------------------------------------------------------------------------------------


def welcomed(client: ClientLink, session: int = 1, now: float = 0.0) -> ClientLink:
    client.receive(frames(Welcome(PROTOCOL_VERSION, "server", session)), now)
    return client


def test_a_hello_is_repeated_until_it_is_answered(make_client: MakeClient) -> None:
    client = make_client()
    assert client.due(0.0) == [client.hello]
    assert client.due(HELLO_PERIOD * 0.9) == []
    client.sent_at = HELLO_PERIOD * 0.95  # other messages must not delay the Hello
    assert client.due(HELLO_PERIOD) == [client.hello]
    ((origin, message),) = client.receive(frames(Welcome(PROTOCOL_VERSION, "server", 4)), 0.3)
    assert origin == "policy"
    assert isinstance(message, Welcome)
    assert (client.state, client.session) == ("welcome", 4)
    # The core gets no second Welcome for a repeated Hello.
    assert client.receive(frames(Welcome(PROTOCOL_VERSION, "server", 4)), 0.4) == []
    assert client.due(0.9) == []


def test_a_driver_core_gets_a_heartbeat_that_arrives_before_the_welcome(make_client: MakeClient) -> None:
    """This Heartbeat tells the core that the server checks whether another driver with the same name is alive."""
    assert make_client().receive(frames(Heartbeat(5, 4)), 0.1) == []
    client = make_client(role="driver")
    client.due(0.0)
    ((origin, message),) = client.receive(frames(Heartbeat(5, 4)), 0.1)
    assert (origin, message.NAME) == ("policy", "heartbeat")
    assert client.due(HELLO_PERIOD) == [client.hello]
    welcomed(client)
    assert client.receive(frames(Heartbeat(5, 4)), 0.4) == []


def test_the_client_sends_a_heartbeat_after_a_period_without_messages(make_client: MakeClient) -> None:
    client = make_client()
    client.due(0.0)
    welcomed(client)
    assert client.due(HEARTBEAT_PERIOD * 0.9) == []
    (beat,) = client.due(HEARTBEAT_PERIOD)
    assert isinstance(beat, Heartbeat)
    assert (beat.stamp, beat.session) == (int(HEARTBEAT_PERIOD * 1e9), 1)
    assert client.due(HEARTBEAT_PERIOD + HELLO_PERIOD / 2) == []
    assert client.due(HEARTBEAT_PERIOD + HELLO_PERIOD)  # no answer came, so the client sends another Heartbeat
    client.receive(frames(beat), 2.0)
    client.sent_at = 2.0
    assert client.due(2.9) == []


def test_a_client_that_sends_all_the_time_still_checks_the_server(make_client: MakeClient) -> None:
    client = welcomed(make_client())
    asked = 0
    for tick in range(200):  # 2 s at 100 Hz, and no message from the server
        client.sent_at = tick / 100
        asked += len(client.due(tick / 100))
    assert asked == 4  # one Heartbeat per HELLO_PERIOD, from 1 s on


def test_a_server_restart_is_reported_once(make_client: MakeClient) -> None:
    client = welcomed(make_client(), 1)
    for _ in range(3):  # the new server refuses every message that is in transit
        assert client.receive(frames(Refused("hello", "who?")), 5.0) == []
    assert client.state == "connecting"
    assert client.due(5.0) == [client.hello]
    assert client.receive(frames(Refused("hello", "who?")), 5.0) == []
    assert client.due(5.0) == []
    ((_, message),) = client.receive(frames(Welcome(PROTOCOL_VERSION, "server", 2)), 5.1)
    assert isinstance(message, Welcome)
    assert client.session == 2


def test_the_core_gets_a_welcome_of_another_session(make_client: MakeClient) -> None:
    client = welcomed(make_client(), 1)
    ((_, message),) = client.receive(frames(Welcome(PROTOCOL_VERSION, "server", 2)), 0.0)
    assert isinstance(message, Welcome)


@pytest.mark.parametrize("code", ["protocol", "spec", "agreement", "taken", "name", "a code of later versions"])
def test_a_refusal_raises_an_error(make_client: MakeClient, code: str) -> None:
    client = make_client()
    client.check()
    assert client.receive(frames(Refused(code, "robot is 'A' here, 'B' there")), 0.0) == []
    assert client.due(10.0) == []  # the client does not try again
    with pytest.raises(HandshakeError, match="link policy: refused by the server: robot is 'A' here, 'B' there"):
        client.check()


def test_a_client_counts_the_refusal_of_an_optional_server_and_tries_again(make_client: MakeClient) -> None:
    client = make_client()
    client.essential = False
    assert len(client.due(0.0)) == 1
    client.receive(frames(Refused("spec", "robot is 'A' here, 'B' there")), 0.0)
    client.check()
    assert client.tally.counts == {"refusals": 1}
    assert client.due(0.9) == []
    assert client.due(1.0) == [client.hello]


def test_a_server_with_another_protocol_version_is_an_error(make_client: MakeClient) -> None:
    client = make_client()
    assert client.receive(frames(Welcome(PROTOCOL_VERSION + 1, "server", 1)), 0.0) == []
    with pytest.raises(HandshakeError, match=f"version is {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} there"):
        client.check()


def test_a_client_accepts_only_its_message_kinds(make_client: MakeClient, make_step: Any) -> None:
    client = welcomed(make_client())
    throttle = Throttle("sim-0", 0, 0, 10, 0, 0)
    ((origin, message),) = client.receive(frames(throttle), 0.0)
    assert (origin, message.transitions_allowed) == ("policy", 10)  # type: ignore[attr-defined]
    assert client.receive(frames(make_step()), 0.0) == []
    assert client.receive([b"throttle"], 0.0) == []
    assert client.receive([b"throttle", b"\xc1"], 0.0) == []
    assert client.tally.counts == {"unexpected": 1, "frames": 1, "malformed": 1}
    assert client.state == "welcome"


# -- both ------------------------------------------------------------------------------------------------------------

anything = st.lists(
    st.binary(max_size=80)
    | st.sampled_from([name.encode() for name in MESSAGES])
    | st.dictionaries(st.text(max_size=5), st.integers(-9, 9), max_size=3).map(msgpack.packb),
    max_size=4,
)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(st.lists(anything, max_size=5))
def test_random_frames_do_not_end_a_link(messages: list[list[bytes]]) -> None:
    toy = RobotSpec("Toy", (Channel("o", "m", -1, 1),), (Channel("a", "N", -1, 1),), 0.02)
    server = ServerLink("policy", "server", {"simulator": (Step,), "evaluator": (Evaluation,)}, {}, 1)
    client = ClientLink("policy", hello("simulator", "s", client=1, robots=1, spec=toy), (Throttle,))
    server.receive(b"1", frames(client.hello), 0.0)
    welcomed(client)
    for parts in messages:
        before = sum(server.tally.counts.values()), sum(client.tally.counts.values())
        inputs, replies = server.receive(b"1", parts, 0.0)
        assert inputs == []
        assert [reply.code for _, reply in replies] == ["malformed"] * (parts[:1] == [b"hello"])
        assert client.receive(parts, 0.0) == []
        assert (sum(server.tally.counts.values()), sum(client.tally.counts.values())) == (before[0] + 1, before[1] + 1)
    assert list(server.peers) == [b"1"]
    assert client.state == "welcome"


def test_malformed_input_is_logged_once_per_kind_and_period(
    make_server: MakeServer, make_hello: MakeHello, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    ask(server, make_hello())
    with caplog.at_level(logging.WARNING):
        for tick in range(100):
            server.receive(b"1", [b"step", b"\xc1"], tick * LOG_PERIOD / 40)
            server.receive(b"1", [b"step"], tick * LOG_PERIOD / 40)
    assert server.tally.counts == {"malformed": 100, "frames": 100}
    lines = [record.message for record in caplog.records]
    assert len(lines) == 6  # two kinds, three periods
    assert lines[0].startswith("dropped (malformed, 1 so far): on link policy from sim-0: step: not msgpack: ")
    assert lines[2].startswith("dropped (malformed, 41 so far)")


def test_a_peer_cannot_add_lines_to_the_log(
    make_server: MakeServer, make_hello: MakeHello, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    with caplog.at_level(logging.WARNING):
        ask(server, changed(make_hello(), role="x\nERROR all is lost\x1b[2J"))
    assert "\n" not in caplog.records[0].message
    assert "\x1b" not in caplog.records[0].message


def test_peer_objects_are_distinct_after_a_reconnect(make_server: MakeServer, make_hello: MakeHello) -> None:
    server = make_server()
    ((one, _),), _ = ask(server, make_hello())
    ask(server, Bye(""))
    ((two, _),), _ = ask(server, make_hello())
    assert isinstance(one, Peer)
    assert one != two  # name and connection are equal, but the client joined again
