"""Messages can grow: a later version adds fields with defaults, and old and new versions read each other's bytes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import msgpack
import msgspec
import numpy as np
import pytest
from msgspec.structs import asdict

from td3_robot.errors import ProtocolError
from td3_robot.messages import (
    MESSAGES,
    U64,
    ZEROS,
    ActionOrigin,
    Bye,
    Float32,
    Map,
    Record,
    Shape,
    Step,
    wire,
    wire_fields,
)
from td3_robot.monitor.summary import facts
from td3_robot.recording.decoder import Decoder
from td3_robot.recording.entries import Entry
from td3_robot.recording.reader import Session
from td3_robot.recording.schemas import schema
from td3_robot.transport import codec
from td3_robot.transport.link import ClientLink, ServerLink, hello
from td3_robot.transport.tally import LOG_PERIOD
from tests.test_messages import golden

RECORDINGS = sorted(Path(__file__).parent.glob("**/*.mcap"))


class GrownStep(Step, frozen=True):
    """A Step of a later version."""

    latency: Annotated[U64, "time from observation to action", "ns"] = 7
    torque: Annotated[Float32, Shape("NA"), "measured torque", "N·m"] = ZEROS  # N robots, A actions
    note: Annotated[str, wire("text", max_length=10), "for a person"] = "none"


class GrownBye(Bye, frozen=True):
    """A Bye of a later version."""

    facts: Annotated[Map, "numbers at the end"] = msgspec.field(default_factory=dict)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn this process into a process of the later version."""
    for kind in (GrownStep, GrownBye):
        monkeypatch.setitem(MESSAGES, kind.NAME, kind)
        monkeypatch.setitem(codec._PLANS, kind, codec._Plan(kind))


def later_step(make_step: Any, **fields: Any) -> Step:
    """Return a Step of two robots with two actions each, with the new fields."""
    torque = np.arange(4, dtype=np.float32).reshape(2, 2)
    return GrownStep(**asdict(make_step(3, robots=2)), **{"latency": 5, "torque": torque, "note": "new", **fields})


@pytest.fixture
def later_bytes(make_step: Any, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes that a process of the later version sends."""
    monkeypatch.setitem(codec._PLANS, GrownStep, codec._Plan(GrownStep))
    return codec.encode(later_step(make_step))


# -- a later reader, old bytes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("grown")
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recordings_are_read_with_defaults(path: Path) -> None:
    session = Session([path])
    for _, message in session.messages():
        if isinstance(message, Step):
            assert isinstance(message, GrownStep)
            assert (message.latency, message.note) == (7, "none")
            assert message.torque.tolist() == np.zeros(message.action.shape).tolist()
        assert not isinstance(message, Bye) or isinstance(message, GrownBye)
    assert not session.decode.unknown_fields


@pytest.mark.usefixtures("grown")
@pytest.mark.parametrize("sizes", [{"N": 2, "O": 3, "A": 1}, None], ids=["handshake", "no sizes"])
def test_golden_bytes_are_read_with_defaults(sizes: Any) -> None:
    step = codec.decode("step", golden("step")[1], sizes)
    assert isinstance(step, GrownStep)
    assert (step.latency, step.torque.tolist(), step.note) == (7, [[0], [0]], "none")
    bye = codec.decode("bye", golden("bye")[1])
    assert isinstance(bye, GrownBye)
    assert bye.facts == {}


@pytest.mark.usefixtures("grown")
def test_new_fields_survive_a_round_trip(make_step: Any) -> None:
    payload = codec.encode(later_step(make_step))
    step = codec.decode("step", payload)
    assert isinstance(step, GrownStep)
    assert (step.latency, step.torque.tolist(), step.note) == (5, [[0, 1], [2, 3]], "new")
    assert codec.extra_fields(GrownStep, payload) == 0


@pytest.mark.usefixtures("grown")
def test_a_sender_may_leave_out_a_new_array(make_step: Any) -> None:
    step = codec.decode("step", codec.encode(GrownStep(**asdict(make_step(robots=2)))))
    assert isinstance(step, GrownStep)
    assert step.torque.tolist() == [[0, 0], [0, 0]]


@pytest.mark.usefixtures("grown")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"latency": -1}, "fields"),
        ({"latency": "5"}, "fields"),
        ({"note": "longer than ten"}, "fields"),
        ({"torque": bytes(12)}, "shape"),
        ({"torque": b"\x00\x00\xc0\x7f" * 4}, "value"),
        ({"torque": None}, "fields"),
    ],
)
def test_new_fields_are_checked_like_others(make_step: Any, change: dict[str, Any], kind: str) -> None:
    content = msgpack.unpackb(codec.encode(later_step(make_step)))
    with pytest.raises(ProtocolError) as caught:
        codec.decode("step", msgpack.packb({**content, **change}))
    assert caught.value.kind == kind


def test_required_fields_stay_required(later_bytes: bytes) -> None:
    content = msgpack.unpackb(later_bytes)
    del content["reward"]
    with pytest.raises(ProtocolError, match="step: Object missing required field `reward`") as caught:
        codec.decode("step", msgpack.packb(content))
    assert caught.value.kind == "fields"


def test_schema_requires_only_the_old_fields() -> None:
    text = schema(GrownBye).decode()
    assert '"required": ["reason"]' in text
    assert '"facts": {' in text
    optional = [name for name, field in wire_fields(GrownStep).items() if field.optional]
    assert optional == ["operated", "latency", "torque", "note"]


# -- an old reader, new bytes ----------------------------------------------------------------------------------------


def test_an_old_reader_ignores_and_counts_new_fields(later_bytes: bytes, make_step: Any) -> None:
    step = codec.decode("step", later_bytes, {"N": 2, "O": 3, "A": 2})
    assert type(step) is Step
    assert codec.encode(step) == codec.encode(make_step(3, robots=2))
    assert codec.extra_fields(Step, later_bytes) == 3


def test_an_old_server_counts_new_fields_and_logs_one_line(
    later_bytes: bytes, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = ServerLink("policy", "policy", {"simulator": (Step,)}, {}, 1)
    greeting = hello("simulator", "sim-0", client=1, robots=2, spec=spec)
    server.receive(b"1", [b"hello", codec.encode(greeting)], 0.0)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            ((_, message),), replies = server.receive(b"1", [b"step", later_bytes], number * LOG_PERIOD / 100)
            assert isinstance(message, Step)
            assert replies == []
    assert server.tally.counts == {"unknown-fields": 10}
    assert [record.message for record in caplog.records] == [
        "ignored (unknown-fields, 1 so far): on link policy from sim-0: step has 3 fields unknown to this version"
    ]


def test_an_old_client_counts_new_fields(later_bytes: bytes) -> None:
    client = ClientLink("policy", hello("simulator", "s", client=1), (Step,))
    ((_, message),) = client.receive([b"step", later_bytes], 0.0)
    assert isinstance(message, Step)
    assert client.tally.counts == {"unknown-fields": 1}


@pytest.mark.parametrize(
    "name",
    [
        b"\xa1\xff",  # text of one byte that is not UTF-8
        b"\x07",  # the number 7
    ],
)
def test_a_field_whose_name_is_not_text_is_counted(name: bytes, spec: Any) -> None:
    """Any peer can send such bytes. They must not end the process."""
    payload = codec.encode(Bye("over"))
    assert payload[0] == 0x81  # a map of one field
    grown = b"\x82" + payload[1:] + name + b"\x01"
    server = ServerLink("policy", "policy", {"simulator": (Step,)}, {}, 1)
    server.receive(b"1", [b"hello", codec.encode(hello("simulator", "sim-0", client=1, robots=2, spec=spec))], 0.0)
    server.receive(b"1", [b"bye", grown], 0.0)
    client = ClientLink("policy", hello("simulator", "s", client=1), (Bye,))
    client.receive([b"bye", grown], 0.0)
    counts = server.tally.counts + client.tally.counts
    assert sum(counts.values()) == 2
    assert set(counts) <= {"unknown-fields", "fields", "malformed"}


def test_an_old_reader_of_a_recording_counts_new_fields(later_bytes: bytes, caplog: pytest.LogCaptureFixture) -> None:
    decode = Decoder("a recording")
    for _ in range(3):
        assert isinstance(decode(Entry("sim-0", 0, "step", "policy", 0, 0, 0, later_bytes)), Step)
    assert decode.unknown_fields == {"step": 3}
    assert len(caplog.records) == 1


def test_records_of_a_later_version_are_read() -> None:
    content = {**asdict(Record("bye", "policy", 0, 17, b"x")), "compression": "none"}
    (one,) = codec.decode_records(msgpack.packb(content))
    (other,) = codec.decode_records(msgpack.packb([content]))
    assert asdict(one) == asdict(other) == asdict(Record("bye", "policy", 0, 17, b"x"))


# -- unknown values --------------------------------------------------------------------------------------------------


def test_unknown_origin_is_kept_and_shown_as_a_number(make_step: Any) -> None:
    step = codec.decode("step", codec.encode(make_step(1, origin=9)))
    assert isinstance(step, Step)
    assert step.origin == 9
    assert facts(step)["action"] == ActionOrigin.name_of(9) == "origin 9"
    assert ActionOrigin.name_of(2) == "held"


def test_unknown_noise_kind_is_kept(make_step: Any) -> None:
    step = codec.decode("step", codec.encode(make_step(1, noise_kind=4_000_000_000)))
    assert isinstance(step, Step)
    assert step.noise_kind == 4_000_000_000
