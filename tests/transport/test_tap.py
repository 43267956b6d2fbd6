"""A node's tap copies each sent message once to a recorder, never waits, and counts lost messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from td3_robot.core_types import Peer
from td3_robot.messages import Bye, Command, Heartbeat, Hello, LifecycleChange, Record, Status, Step, Weights
from td3_robot.transport import codec
from td3_robot.transport.link import LONG_SILENCE, PEER_TIMEOUT, ClientLink, ServerLink, hello
from td3_robot.transport.tap import GATHERED_S, Copies

pytestmark = pytest.mark.usefixtures("nobody_expires")

Make = Callable[..., Any]
STATUS = Status("sim-0", "ready", "", {}, {})


class Recorder:
    """A recorder in memory: its link to the tap, and the records that it received."""

    def __init__(self, client: ClientLink, wall: Callable[[], int] = lambda: 17, **options: Any) -> None:
        self.server = ServerLink("recorder", "recorder", {"simulator": (Record,)}, {}, 1)
        self.got: list[Record] = []
        self.room = True
        self.there = True
        self.now = 0.0
        self.copies = Copies(wall)
        self.tap = self.copies.tap(client, self._take, **options)

    def _take(self, name: str, payload: bytes) -> bool:
        if not (self.room and self.there):
            return False
        inputs, replies = self.server.receive(b"k", [name.encode(), payload], self.now)
        self.got += [message for _, message in inputs if isinstance(message, Record)]
        for _, message in replies:
            self.tap.receive([message.NAME.encode(), codec.encode(message)], self.now)
        return True

    def offer(self, *messages: Any, link: str = "learner") -> None:
        """Offer messages in one turn, and advance the clock until the batch is due."""
        for message in messages:
            self.copies.offer(link, message, codec.encode(message))
        self.now += GATHERED_S
        self.tap.flush(self.now)

    def topics(self) -> list[tuple[str, int]]:
        return [(record.topic, record.sequence) for record in self.got]


@pytest.fixture
def recorder(make_client: Make) -> Recorder:
    """A recorder that has welcomed the tap."""
    result = Recorder(make_client(link="recorder"))
    result.tap.turn(0.0)
    return result


def test_a_message_to_two_links_is_recorded_once_with_its_bytes(recorder: Recorder, make_step: Make) -> None:
    first, second = make_step(0), make_step(1)
    recorder.offer(first, link="policy")
    recorder.offer(first, second, link="learner")
    recorder.offer(first, link="learner")  # the node repeats the message to a restarted server
    assert [(r.topic, r.link, r.sequence, r.stamp) for r in recorder.got] == [
        ("step", "policy", 0, 17),
        ("step", "learner", 1, 17),
    ]
    assert recorder.got[1].payload == codec.encode(second)
    assert recorder.tap.counts() == {}


def test_a_repeated_step_is_recorded_once(recorder: Recorder, make_step: Make) -> None:
    """A restarted learner gets the same Step again. A Step 0 of a later incarnation is a new Step."""
    recorder.offer(make_step(0), make_step(2), make_step(1), *(make_step(sequence) for sequence in range(4)))
    recorder.offer(make_step(0, incarnation=1))
    steps = [codec.decode("step", record.payload) for record in recorder.got]
    assert [(step.incarnation, step.sequence) for step in steps] == [(0, 0), (0, 2), (0, 1), (0, 3), (1, 0)]
    assert [record.sequence for record in recorder.got] == [0, 1, 2, 3, 4]


def test_heartbeats_and_records_are_not_recorded(recorder: Recorder) -> None:
    recorder.offer(Heartbeat(0, 0), Record("bye", "learner", 0, 0, b""), STATUS)
    assert recorder.topics() == [("status", 0)]


def test_messages_are_dropped_and_counted_if_a_recorder_has_no_room(recorder: Recorder, make_step: Make) -> None:
    recorder.offer(make_step(0))
    recorder.room = False
    recorder.offer(make_step(1), make_step(2))
    recorder.room = True
    recorder.offer(make_step(3))
    assert recorder.topics() == [("step", 0), ("step", 3)]
    assert recorder.tap.counts() == {"not_recorded": 2}


def test_messages_before_the_first_recorder_count_as_lost_only_if_a_recorder_is_expected(
    make_client: Make, make_step: Make
) -> None:
    for expected, counted in ((False, {}), (True, {"not_recorded": 2})):
        alone = Recorder(make_client(link="recorder"), expected=expected)
        alone.there = False
        alone.tap.turn(0.0)
        alone.offer(make_step(0), make_step(1))
        assert alone.got == []
        assert alone.tap.counts() == counted


def test_a_late_recorder_gets_the_hello_and_the_newest_weights(
    make_client: Make, make_hello: Make, make_step: Make
) -> None:
    late = Recorder(make_client(link="recorder"))
    late.there = False
    weights = [Weights(version, 0, 0, "", b"") for version in (1, 2, 3)]
    late.offer(make_hello(), make_step(0), *weights)
    late.there = True
    late.tap.turn(1.0)
    assert late.topics() == [("hello", 0), ("weights", 1), ("weights", 2)]  # the newest two Weights
    late.offer(make_step(1))
    assert late.topics()[3:] == [("step", 1)]


def test_a_late_monitor_gets_the_states_but_its_missed_messages_are_not_counted(
    make_client: Make, make_step: Make
) -> None:
    late = Recorder(make_client(link="monitor"))
    late.there = False
    changes = [LifecycleChange("sim-0", "", state, "", number) for number, state in enumerate(("inactive", "active"))]
    late.offer(make_step(0), *changes)
    late.there = True
    late.tap.turn(1.0)
    assert late.topics() == [("lifecycle", 0), ("lifecycle", 1)]
    late.room = False
    late.offer(make_step(1))
    late.room = True
    late.offer(make_step(2))
    assert late.topics()[2:] == [("step", 2)]
    assert late.tap.counts() == {}


@pytest.mark.parametrize(("link", "topics"), [("recorder", ["turn", "command"]), ("monitor", ["command"])])
def test_commands_are_recorded_by_the_node_that_receives_them(make_client: Make, link: str, topics: list[str]) -> None:
    """Only a recorder gets the Turns, because only a replay needs them."""
    listener = Recorder(make_client(link=link))
    listener.tap.turn(0.0)
    operator = Peer("policy", b"o", hello("operator", "operator", client=7), {})
    listener.copies.record_turn(0.0, [(operator, Command(1, "", "estop", "enough", 0, "", b""))])
    listener.tap.flush(0.0)
    assert [record.topic for record in listener.got] == topics


def test_a_lost_command_and_its_turn_are_counted(make_client: Make) -> None:
    """The sequence numbers of the later Records show the gap."""
    full = Recorder(make_client(link="recorder"))
    full.tap.turn(0.0)
    full.tap._gathered_bytes = 1 << 25  # no room
    operator = Peer("policy", b"o", hello("operator", "operator", client=7), {})
    full.copies.record_turn(0.0, [(operator, Command(1, "", "estop", "enough", 0, "", b""))])
    assert full.tap.counts() == {"not_recorded": 2}
    full.tap._gathered_bytes = 0
    full.copies.record_turn(1.0, [(operator, Command(2, "", "reset", "enough", 0, "", b""))])
    full.tap.flush(1.0)
    assert full.topics() == [("turn", 1), ("command", 1)]


def test_messages_are_sent_in_batches(recorder: Recorder, make_step: Make) -> None:
    posted = []
    recorder.tap._post = lambda name, payload: bool(posted.append((name, payload)) or True)
    # The tap sends the first message immediately, and then a batch every 0.1 s.
    for number, now in enumerate((1.0, 1.04, 1.08, 1.12)):
        recorder.copies.offer("policy", make_step(number), codec.encode(make_step(number)))
        recorder.tap.flush(now)
    batches = [codec.decode_records(payload) for _, payload in posted]
    assert [[record.sequence for record in records] for records in batches] == [[0], [1, 2, 3]]
    assert {name for name, _ in posted} == {"record"}


def test_a_batch_has_a_maximum_number_of_records_and_a_long_record_is_sent_alone(
    recorder: Recorder, make_step: Make
) -> None:
    """300 short Records become batches of 256 and 44. The limit of a batch is 65,536 bytes; one Record has 70,000."""
    sizes = []
    recorder.tap._post = lambda _, payload: bool(sizes.append(len(codec.decode_records(payload))) or True)
    recorder.offer(*(make_step(number) for number in range(300)), Weights(1, 0, 0, "", bytes(70_000)), STATUS)
    assert sizes == [256, 44, 1, 1]
    recorder.copies.offer("learner", weights := Weights(2, 0, 0, "", bytes(70_000)), codec.encode(weights))
    recorder.tap.flush(0.0)  # the batch is not due yet, but the tap sends it because it is large
    assert sizes == [256, 44, 1, 1, 1]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_paused_node_is_recorded_without_a_gap(
    recorder: Recorder, make_step: Make, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """During the pause, the recorder removes the node. So the tap must send a Hello after the pause."""
    for name, value in (("PEER_TIMEOUT", PEER_TIMEOUT), ("LONG_SILENCE", LONG_SILENCE)):  # undo nobody_expires
        monkeypatch.setattr(f"td3_robot.transport.link.{name}", value)
    recorder.offer(make_step(0))
    recorder.now += PEER_TIMEOUT + 1
    assert [bye.NAME for _, bye in recorder.server.expire(recorder.now)] == ["bye"]
    recorder.offer(make_step(1))  # the tap sends a Hello before the Step
    recorder.offer(make_step(2))
    assert recorder.server.tally.counts == {}
    assert recorder.topics() == [("step", 0), ("step", 1), ("step", 2)]
    recorder.now += PEER_TIMEOUT + 1
    recorder.server.expire(recorder.now)
    recorder.copies.offer("learner", make_step(3), codec.encode(make_step(3)))
    if flushed:  # a node flushes its tap before it ends
        recorder.tap.flush(recorder.now, at_once=True)
    recorder.tap.leave("stopped", recorder.now)
    assert recorder.topics()[3:] == [("step", 3)]
    assert recorder.tap.counts() == {}
    assert recorder.server.tally.counts == {}
    assert not recorder.server.peers


def test_a_restarted_recorder_gets_recently_sent_messages_again(recorder: Recorder, make_step: Make) -> None:
    """Perhaps the old recorder has not written these messages. The tap notices the restart when it gets a Refused."""
    recorder.offer(make_step(0))
    recorder.now = 3.0
    recorder.tap.turn(recorder.now)
    recorder.offer(make_step(1))
    recorder.server = ServerLink("recorder", "recorder", {"simulator": (Record,)}, {}, 2)
    recorder.got.clear()
    recorder.offer(make_step(2))  # the new recorder refuses the Step, because it has received no Hello
    assert recorder.topics() == []
    recorder.copies.offer("learner", make_step(3), codec.encode(make_step(3)))
    recorder.now += 0.3
    recorder.tap.turn(recorder.now)
    assert recorder.topics() == [("step", 1), ("step", 2), ("step", 3)]  # Step 0 is older than 2 s
    assert recorder.tap.counts() == {}


def test_messages_wait_two_seconds_for_an_absent_recorder(recorder: Recorder, make_step: Make) -> None:
    """There is a Step every 0.1 s. No recorder runs from 1.1 s to 3.0 s, and the tap keeps each Step for only 2 s."""
    for number in range(31):
        if number == 11:
            recorder.there = False
            recorder.server = ServerLink("recorder", "recorder", {"simulator": (Record,)}, {}, 2)
            assert [sequence for _, sequence in recorder.topics()] == list(range(11))
            recorder.got.clear()
        if number == 30:
            assert recorder.tap.counts() == {"not_recorded": 19}
            recorder.there = True
        recorder.offer(make_step(number))
    recorder.now += 0.3
    recorder.tap.turn(recorder.now)
    sequences = [sequence for _, sequence in recorder.topics()]
    assert sequences == list(range(sequences[0], 31))
    assert 11 <= sequences[0] <= 16  # the tap drops Steps older than 2 s
    assert recorder.tap.counts().get("not_recorded", 0) == sequences[0] - 11


def test_messages_are_dropped_if_the_tap_cannot_reconnect_in_time(recorder: Recorder, make_step: Make) -> None:
    recorder.offer(make_step(0))
    recorder.server = ServerLink("recorder", "recorder", {"simulator": (Record,)}, {}, 2)
    recorder.offer(make_step(1))  # the recorder refuses the Step, so the tap must connect again
    recorder.there = False
    recorder.offer(make_step(2), make_step(3))
    recorder.now += 3.0
    recorder.tap.turn(recorder.now)
    recorder.offer(make_step(4))
    assert recorder.tap.counts() == {"not_recorded": 3}


def test_a_monitor_gets_each_message_immediately(make_client: Make, make_step: Make) -> None:
    monitor = Recorder(make_client(link="monitor"))
    monitor.tap.turn(0.0)
    for number in range(3):
        monitor.copies.offer("policy", make_step(number), codec.encode(make_step(number)))
        monitor.tap.flush(1.0)
        assert len(monitor.got) == number + 1


def test_a_suspended_monitor_takes_no_memory_and_later_gets_the_states(make_client: Make, make_step: Make) -> None:
    monitor = Recorder(make_client(link="monitor"))
    monitor.tap.turn(0.0)
    monitor.offer(make_step(0))
    monitor.room, monitor.now = False, 10.0
    monitor.tap.turn(monitor.now)  # no Heartbeat has been answered for 10 s
    state = LifecycleChange("policy", "active", "fault", "", 1)
    for message in (make_step(1), state, make_step(2)):
        monitor.copies.offer("policy", message, codec.encode(message))
    assert monitor.tap._gathered == []
    monitor.room = True
    monitor.tap.receive([Heartbeat.NAME.encode(), codec.encode(Heartbeat(1, 1))], monitor.now)
    monitor.offer(make_step(3))
    assert monitor.topics() == [("step", 0), ("lifecycle", 0), ("step", 3)]


def test_messages_kept_for_a_suspended_monitor_count_toward_the_memory_limit(
    make_client: Make, make_step: Make
) -> None:
    """The limit is 32 MiB. After the suspension, the two kept Weights have 32 MiB, so the tap drops the next Step."""
    monitor = Recorder(make_client(link="monitor"))
    monitor.tap.turn(0.0)
    monitor.room, monitor.now = False, 10.0
    monitor.tap.turn(monitor.now)
    for version in (1, 2):
        monitor.copies.offer("learner", Weights(version, 0, 0, "", b""), bytes(1 << 24))
    monitor.room = True
    monitor.tap.receive([Heartbeat.NAME.encode(), codec.encode(Heartbeat(1, 1))], monitor.now)
    monitor.offer(make_step(0))
    monitor.offer(make_step(1))
    assert monitor.topics() == [("weights", 0), ("weights", 1), ("step", 1)]


def test_a_tap_for_a_second_listener_continues_the_sequence_numbers(make_client: Make, make_step: Make) -> None:
    first = Recorder(make_client(link="recorder"))
    first.offer(Weights(1, 0, 0, "", b"w"), make_step(0), make_step(1))
    second = Recorder(make_client(link="recorder"))
    second.copies = first.copies
    second.tap = first.copies.tap(second.tap._session, second._take)
    second.tap.turn(0.0)
    second.offer(make_step(1), make_step(2))
    assert second.topics() == [("weights", 0), ("step", 2)]


def test_pending_messages_are_sent_before_the_bye(recorder: Recorder, make_step: Make) -> None:
    recorder.offer(make_step(0))
    recorder.copies.offer("policy", make_step(1), codec.encode(make_step(1)))
    recorder.tap.leave("stopped", recorder.now)
    assert recorder.topics() == [("step", 0), ("step", 1)]
    assert not recorder.server.peers


def test_recorder_and_monitor_get_the_same_messages(
    make_bus: Make,
    make_server: Make,
    make_client: Make,
    make_step: Make,
    pump: Make,
    of: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("td3_robot.transport.tap._DEAF_S", 1e9)  # a busy machine may pause the test
    server, client = make_bus(), make_bus()
    server.serve(f"ipc://{tmp_path}/learner", make_server(2, "learner"))
    listeners = {link: make_bus() for link in ("recorder", "monitor")}
    for number, (link, bus) in enumerate(listeners.items()):
        bus.serve(f"ipc://{tmp_path}/{link}", ServerLink(link, link, {"simulator": (Record,)}, {}, 3 + number))
        client.record(f"ipc://{tmp_path}/{link}", make_client(link=link))
    pump(lambda got: all(any(of(items, Hello)) for items in got[1:3]), client, *listeners.values())
    client.connect(f"ipc://{tmp_path}/learner", make_client(link="learner"))
    pump(lambda _: client.welcome("learner"), client, server)
    for sequence in range(3):
        client.send("learner", make_step(sequence))
    got = pump(lambda got: all(len(of(items, Record)) >= 4 for items in got[2:4]), client, server, *listeners.values())
    received = [[(r.topic, r.sequence, r.payload) for r in of(items, Record)] for items in got[2:4]]
    assert received[0] == received[1]
    assert [topic for topic, _, _ in received[0]] == ["hello", "step", "step", "step"]


def test_an_expected_recorder_gets_the_messages_from_the_beginning(make_client: Make, make_step: Make) -> None:
    late = Recorder(make_client(link="recorder"), expected=True)
    late.there = False
    late.offer(make_step(0), STATUS, make_step(1))
    assert late.tap.counts() == {"not_recorded": 3}
    late.there = True
    late.tap.turn(1.0)
    assert late.topics() == [("step", 0), ("status", 0), ("step", 1)]
    assert late.tap.counts() == {}
    many = Recorder(make_client(link="recorder"), expected=True)
    many.there = False
    many.offer(*(make_step(number) for number in range(4150)))
    many.there = True
    many.tap.turn(1.0)
    assert [number for _, number in many.topics()] == list(range(4096))  # later messages are lost and counted
    assert many.tap.counts() == {"not_recorded": 54}


def test_setting_the_clock_back_does_not_change_the_order(make_client: Make, make_step: Make) -> None:
    """A computer may correct its clock at any time. The tap must still send the first Step first."""
    late = Recorder(make_client(link="recorder"), wall=iter([9, 8, 2, 1]).__next__, expected=True)
    late.there = False
    late.offer(make_step(0), Weights(1, 0, 0, "0" * 64, b"x"), make_step(1), Weights(2, 0, 0, "0" * 64, b"y"))
    late.there = True
    late.tap.turn(1.0)
    assert late.topics() == [("step", 0), ("weights", 0), ("step", 1), ("weights", 1)]
    assert [record.stamp for record in late.got] == [9, 8, 2, 1]


def test_the_memory_for_an_absent_recorder_is_bounded(make_client: Make) -> None:
    """The tap takes a message while the waiting messages have less than 32 MiB.

    Eight messages of 4 MB have less than 32 MiB, so the tap takes the ninth. Nine messages have more, so the tap drops
    and counts the tenth.
    """
    waiting = Recorder(make_client(link="recorder"), expected=True)
    policies = [Command(number, "", "load", "", 0, "", bytes(4_000_000)) for number in range(10)]
    waiting.offer(*policies, link="policy")
    assert waiting.tap.counts()["not_recorded"] == 10
    waiting.tap.turn(0.0)
    assert [record.sequence for record in waiting.got] == list(range(9))
    assert waiting.tap.counts()["not_recorded"] == 1


def test_a_refusal_by_the_recorder_stops_only_the_recording(
    make_client: Make, make_step: Make, caplog: pytest.LogCaptureFixture
) -> None:
    refused = Recorder(make_client(link="recorder", essential=False))
    refused.server.agreement = {"task": "another"}
    refused.tap.turn(0.0)
    refused.offer(make_step(0))
    refused.tap.turn(5.0)
    assert refused.got == []
    assert "refused (refusals, 1 so far): link recorder: configuration differs: task is " in caplog.text


def test_a_refused_node_asks_again_and_sends_its_first_messages_then(make_client: Make, make_step: Make) -> None:
    """Somebody has set the clock back, so the recorder still knows a killed process with a later start time."""
    recorder = Recorder(make_client(link="recorder", essential=False), expected=True)
    killed = make_client(link="recorder", client=8, incarnation=2).hello
    recorder.server.receive(b"killed", [b"hello", codec.encode(killed)], 0.0)
    recorder.tap.turn(0.0)
    recorder.offer(make_step(0))
    recorder.server.forget(b"killed", "silent")
    recorder.tap.turn(0.9)
    assert recorder.topics() == []
    recorder.tap.turn(1.0)  # ASK_AGAIN seconds after the first Hello
    assert recorder.topics() == [("step", 0)]
    assert recorder.tap.counts() == {"refusals": 1}


def test_the_bus_records_what_it_sends_and_never_waits(
    make_bus: Make, make_server: Make, make_client: Make, make_step: Make, pump: Make, of: Make, tmp_path: Path
) -> None:
    """The test uses real sockets and the real handshake. After the end of the recorder, the bus continues to send."""
    endpoints = {link: f"ipc://{tmp_path}/{link}" for link in ("policy", "learner", "recorder")}
    server, client = make_bus(), make_bus()
    server.serve(endpoints["policy"], make_server(1, "policy"))
    server.serve(endpoints["learner"], make_server(2, "learner"))
    recording = make_bus()
    recording.serve(endpoints["recorder"], ServerLink("recorder", "recorder", {"simulator": (Record,)}, {}, 3))
    client.record(endpoints["recorder"], make_client(link="recorder"))
    pump(lambda got: any(of(got[1], Hello)), client, recording)
    for link in ("policy", "learner"):
        client.connect(endpoints[link], make_client(link=link))
    pump(lambda _: client.welcome("policy") and client.welcome("learner"), client, server)
    steps = [make_step(sequence) for sequence in range(3)]
    for step in steps:
        assert client.send("policy", step)
        assert client.send("learner", step)
    got = pump(lambda got: len(of(got[2], Record)) >= 5, client, server, recording)
    records = of(got[2], Record)
    assert [r.topic for r in records] == ["hello", "hello", "step", "step", "step"]
    assert {r.link for r in records if r.topic == "hello"} == {"policy", "learner"}
    step = codec.decode("step", records[3].payload)
    assert isinstance(step, Step)
    assert step.sequence == 1
    recording.close()
    for sequence in range(3, 6000):  # more than any queue holds
        step = replace(steps[0], sequence=sequence)
        while not client.send("learner", step):
            server.receive(0.0)
    assert client.dropped()["not_recorded"] > 0
    client.close("stopped")


@pytest.mark.usefixtures("time_to_leave")
def test_the_last_messages_are_recorded(
    make_bus: Make, make_server: Make, make_client: Make, pump: Make, of: Make, tmp_path: Path
) -> None:
    server, client, recording = make_bus(), make_bus(), make_bus()
    server.serve(f"ipc://{tmp_path}/policy", make_server())
    recording.serve(f"ipc://{tmp_path}/r", ServerLink("recorder", "recorder", {"simulator": (Record,)}, {}, 3))
    client.record(f"ipc://{tmp_path}/r", make_client(link="recorder"))
    client.connect(f"ipc://{tmp_path}/policy", make_client())
    pump(lambda got: client.welcome("policy") and any(of(got[2], Record)), client, server, recording)
    client.close("stopped")
    got = pump(lambda got: any(of(got[1], Bye)), server, recording)
    assert [r.topic for r in of(got[1], Record)][-1] == "bye"
