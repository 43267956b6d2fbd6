"""The codec decodes each encoded message to an equal message. Invalid bytes raise only documented ProtocolErrors."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from td3_robot.errors import ProtocolError
from td3_robot.messages import (
    LARGEST,
    MESSAGES,
    Action,
    Bye,
    Evaluation,
    FieldType,
    Heartbeat,
    Message,
    Record,
    Step,
    Weights,
    wire_fields,
)
from td3_robot.transport import codec

KINDS = {"unknown-topic", "oversize", "malformed", "fields", "shape", "value"}
LIMITS = {"u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "i64": (-(2**63), 2**63 - 1)}

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
trees = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        numbers | st.text(max_size=8) | st.booleans() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
operated = st.dictionaries(st.just("0"), st.text(max_size=8))
special: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("action", "operated"): operated,
    ("hello", "name"): st.text(min_size=1, max_size=256).filter(str.isprintable),
    ("record", "topic"): st.sampled_from(sorted(set(MESSAGES) - {"record"})),
    ("step", "world"): st.dictionaries(
        st.just("0"),
        st.dictionaries(st.text(max_size=8), numbers.filter(math.isfinite), max_size=4),
    ),
    ("step", "operated"): operated,
    ("teleop", "action"): st.lists(st.floats(-LARGEST, LARGEST), max_size=4),
    ("turn", "inputs"): st.lists(
        st.tuples(st.text(max_size=8), st.sampled_from(sorted(MESSAGES)), trees).map(list), max_size=3
    ),
    ("status", "figures"): st.dictionaries(st.text(max_size=8), numbers, max_size=4),
    ("status", "counters"): st.dictionaries(st.text(max_size=8), numbers, max_size=4),
}


def random_array(rng: np.random.Generator, wire: FieldType, sizes: dict[str, int], top: int | None) -> Any:
    shape = [sizes[size] for size in wire.shape]
    dtype = np.dtype(wire.dtype)
    if dtype.kind == "f":
        return (rng.normal(size=shape) * 10.0 ** rng.integers(-30, 30)).astype(dtype)
    high = np.iinfo(dtype).max if top is None else top
    return rng.integers(0, high, size=shape, dtype=dtype, endpoint=True)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Generate valid messages. Each size of an array is 1 to 5.

    The sizes are N (robots), O (observations), A (actions) and E (episodes).
    """
    kind = draw(st.sampled_from(list(MESSAGES.values())))
    sizes = {size: draw(st.integers(1, 5)) for size in "NOAE"}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    content: dict[str, Any] = {}
    for name, wire in wire_fields(kind).items():
        if (kind.NAME, name) in special:
            content[name] = draw(special[kind.NAME, name])
        elif wire.kind == "array":
            content[name] = random_array(rng, wire, sizes, 3 if name == "phase" else None)
        elif wire.kind == "text":
            content[name] = draw(st.text(max_size=min(wire.limit, 300)))
        elif wire.kind == "bytes":
            content[name] = draw(st.binary(max_size=200))
        elif wire.kind == "map":
            content[name] = draw(trees)
        elif wire.kind == "f64":
            content[name] = draw(st.floats(allow_nan=False, allow_infinity=False))
        else:
            content[name] = draw(st.integers(*LIMITS[wire.kind]))
    return kind(**content)


def sizes_of(message: Message) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, wire in wire_fields(type(message)).items():
        if wire.kind == "array":
            sizes |= dict(zip(wire.shape, getattr(message, name).shape, strict=True))
    return sizes


def assert_documented(error: ProtocolError) -> None:
    assert error.kind in KINDS
    assert len(str(error)) < 8192


def assert_same(one: Message, other: Message) -> None:
    assert type(one) is type(other)
    for name in wire_fields(type(one)):
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            assert (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape), name
            assert theirs.tobytes() == mine.tobytes(), name
        else:
            assert theirs == mine or repr(theirs) == repr(mine), name  # NaN is not equal to itself


@settings(max_examples=150, deadline=None, print_blob=True)
@given(messages())
def test_every_decoded_message_equals_the_encoded_message(message: Message) -> None:
    payload = codec.encode(message)
    assert_same(codec.decode(message.NAME, payload, sizes_of(message)), message)
    if not isinstance(message, Action):  # the size N·A of an Action's only array does not determine N and A
        assert_same(codec.decode(message.NAME, payload), message)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(messages(), st.randoms(use_true_random=False))
def test_field_order_and_integer_width_do_not_matter(message: Message, random: Any) -> None:
    content = msgpack.unpackb(codec.encode(message))
    names = list(content)
    random.shuffle(names)
    packer = msgpack.Packer()
    payload = packer.pack_map_header(len(names))
    for name in names:
        value = content[name]
        wide = type(value) is int and value >= 0
        payload += packer.pack(name) + (b"\xcf" + value.to_bytes(8, "big") if wide else packer.pack(value))
    assert_same(codec.decode(message.NAME, payload, sizes_of(message)), message)


@settings(max_examples=250, deadline=None, print_blob=True)
@given(st.sampled_from(sorted(MESSAGES)) | st.text(max_size=70), st.binary(max_size=300))
def test_random_bytes_are_a_protocol_error(name: str, payload: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(name, payload)
    assert_documented(caught.value)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(messages(), st.data())
def test_damaged_messages_raise_only_protocol_errors(message: Message, data: st.DataObject) -> None:
    payload = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(payload) - 1))
        change = data.draw(st.sampled_from(("set", "insert", "delete")))
        if change == "set":
            payload[where] = data.draw(st.integers(0, 255))
        elif change == "insert":
            payload.insert(where, data.draw(st.integers(0, 255)))
        elif len(payload) > 1:
            del payload[where]
    note(f"{message.NAME}: {payload.hex()}")
    try:
        result = codec.decode(message.NAME, bytes(payload), {"N": 2} if data.draw(st.booleans()) else None)
    except ProtocolError as error:
        assert_documented(error)
    else:
        assert_same(codec.decode(message.NAME, codec.encode(result), sizes_of(result)), result)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(messages())
def test_a_truncated_or_extended_message_is_malformed(message: Message) -> None:
    payload = codec.encode(message)
    for end in range(0, len(payload), max(1, len(payload) // 50)):
        with pytest.raises(ProtocolError) as caught:
            codec.decode(message.NAME, payload[:end])
        assert caught.value.kind == "malformed"
    with pytest.raises(ProtocolError, match="not msgpack"):
        codec.decode(message.NAME, payload + b"\x00")


@settings(max_examples=200, deadline=None, print_blob=True)
@given(messages(), st.data())
def test_valid_msgpack_with_a_wrong_value_raises_only_protocol_errors(message: Message, data: st.DataObject) -> None:
    content = msgpack.unpackb(codec.encode(message))
    name = data.draw(st.sampled_from(sorted(content)))
    content[name] = data.draw(st.binary(max_size=64) | st.lists(numbers, max_size=3) | trees | numbers | st.none())
    note(f"{message.NAME}.{name} = {content[name]!r}")
    try:
        codec.decode(message.NAME, msgpack.packb(content))
    except ProtocolError as error:
        assert_documented(error)


def heartbeat(**change: Any) -> bytes:
    packed: bytes = msgpack.packb({"stamp": 1, "session": 2, **change})
    return packed


def hello(**change: Any) -> bytes:
    content = {
        "protocol": 1,
        "role": "policy",
        "name": "p",
        "incarnation": 0,
        "client": 1,
        "robots": 0,
        "weights_version": 0,
        "spec": {},
        "agreement": {},
    }
    packed: bytes = msgpack.packb({**content, **change})
    return packed


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = {"k": tree}
    return tree


def action(**change: Any) -> bytes:
    content = {
        "source": "s",
        "incarnation": 0,
        "answers": 0,
        "stamp": 0,
        "action": bytes(16),
        "weights_version": 1,
        "noise_kind": 0,
        "noise_seed": 0,
    }
    packed: bytes = msgpack.packb({**content, **change})
    return packed


@pytest.mark.parametrize(
    ("kind", "text", "name", "payload"),
    [
        ("unknown-topic", "topic 'joystick' is not one of", "joystick", heartbeat()),
        ("unknown-topic", "topic '' is not one of", "", heartbeat()),
        ("oversize", "heartbeat: 16385 bytes, above the limit of 16384", "heartbeat", bytes(16385)),
        ("malformed", "not msgpack", "heartbeat", b""),
        ("malformed", "not msgpack", "heartbeat", b"\xc1"),
        ("malformed", "not msgpack", "heartbeat", heartbeat() + heartbeat()),
        ("malformed", "not msgpack", "bye", b"\x81\xa6reason\xa2\xff\xfe"),
        ("fields", "weights: Expected `object`, got `array`", "weights", b"\xdd\x00\x10\x00\x00" + bytes(2**20)),
        ("fields", "Expected `object`, got `array`", "hello", b"\x91" * 5000),
        ("malformed", "not msgpack", "hello", hello().replace(b"\xa4spec\x80", b"\xa4spec\x81\xa1k" + b"\x91" * 5000)),
        ("fields", "Expected `object`, got `array`", "heartbeat", msgpack.packb([1, 2])),
        ("fields", "Expected `str`", "heartbeat", msgpack.packb({1: 2})),
        ("fields", "missing required field `session`", "heartbeat", msgpack.packb({"stamp": 1})),
        ("fields", "Expected `int`, got `str` - at `$.stamp`", "heartbeat", heartbeat(stamp="1")),
        ("fields", "Expected `int`, got `float` - at `$.stamp`", "heartbeat", heartbeat(stamp=1.0)),
        ("fields", "Expected `int`, got `bool` - at `$.session`", "heartbeat", heartbeat(session=True)),
        ("fields", "Expected `int`, got `ext` - at `$.stamp`", "heartbeat", heartbeat(stamp=msgpack.ExtType(4, b"x"))),
        ("fields", "Expected `int`, got `ext` - at `$.stamp`", "heartbeat", heartbeat(stamp=msgpack.Timestamp(1))),
        ("fields", "hello.spec: holds Ext", "hello", hello(spec={"a": msgpack.ExtType(4, b"x")})),
        ("fields", "hello.spec: holds datetime", "hello", hello(spec={"a": msgpack.Timestamp(1)})),
        ("fields", "Expected `str`, got `bytes` - at `$.reason`", "bye", msgpack.packb({"reason": b"x"})),
        ("fields", "Expected `object`, got `array` - at `$.spec`", "hello", hello(spec=[])),
        ("fields", "Expected `object`, got `array` - at `$.agreement`", "hello", hello(agreement=[])),
        ("fields", "hello.spec: holds bytes", "hello", hello(spec={"a": [b"x"]})),
        ("fields", "Expected `str`, got `bytes`", "hello", hello(spec={b"a": 1})),
        ("fields", "Expected `bytes`, got `str` - at `$.action`", "action", action(action="x")),
        ("fields", "Expected `bytes`, got `array` - at `$.action`", "action", action(action=[0.0, 0.0])),
        ("fields", "Expected `bytes`, got `str` - at `$.payload`", "weights", msgpack.packb({"payload": "text"})),
        ("fields", "Expected `int` >= 0 - at `$.session`", "heartbeat", heartbeat(session=-1)),
        ("fields", "Expected `int` <= 9223372036854775807 - at `$.stamp`", "heartbeat", heartbeat(stamp=2**64 - 1)),
        ("fields", "Expected `int` <= 4294967295 - at `$.robots`", "hello", hello(robots=2**32)),
        ("fields", "Expected `str` of length <= 2048 - at `$.reason`", "bye", msgpack.packb({"reason": "é" * 2049})),
        ("fields", "hello.spec: is nested deeper than 8 levels", "hello", hello(spec=nested(9))),
        (
            "fields",
            "hello.spec: a map or list has 65537 elements; allowed: 65536",
            "hello",
            hello(spec={"a": [1] * 65537}),
        ),
        (
            "fields",
            "hello.spec: holds at least 4097 maps and lists; allowed: 4096",
            "hello",
            hello(spec={"a": [[]] * 4095}),
        ),
        ("fields", "hello.agreement: holds at least 65002 maps", "hello", hello(agreement={"a": [[]] * 65000})),
        ("shape", "action.action: 15 bytes do not hold a float32 array of", "action", action(action=bytes(15))),
        ("shape", "action.action: 0 bytes do not hold a float32 array of", "action", action(action=b"")),
        (
            "shape",
            "action.action: 24 bytes do not hold a float32 array of N=2 × A=2",
            "action",
            action(action=bytes(24)),
        ),
        ("value", "action is not finite", "action", action(action=b"\x00\x00\xc0\x7f" * 4)),
        ("value", "name '' is empty", "hello", hello(name="")),
        ("value", "name 'a\\nb' is empty or not printable", "hello", hello(name="a\nb")),
    ],
)
def test_each_kind_of_error_explains_what_is_wrong(kind: str, text: str, name: str, payload: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(name, payload, {"N": 2, "A": 2})
    assert caught.value.kind == kind
    assert text in str(caught.value)


def test_limits_are_inclusive() -> None:
    assert codec.decode("heartbeat", heartbeat(stamp=-(2**63), session=2**64 - 1)) is not None
    assert codec.decode("hello", hello(robots=2**32 - 1, spec=nested(8), name="x" * 256)) is not None
    # One map, one list and 4094 inner lists: 4096 in all.
    assert codec.decode("hello", hello(spec={"a": [[]] * 4094})) is not None
    assert codec.decode("bye", msgpack.packb({"reason": "é" * 2048})) is not None
    full = Weights.MAX_BYTES
    limit = wire_fields(Weights)["payload"].limit
    assert len(codec.encode(Weights(2**64 - 1, 2**64 - 1, 2**64 - 1, "f" * 64, bytes(limit)))) <= full


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("phase", np.array([0, 4], np.uint8), "phase 4 is not one of 0 to 3"),
        ("world", {"2": {}}, "world: '2' is not the index of a robot, 0 to 1"),
        ("world", {"²": {}}, "world: '²' is not the index of a robot, 0 to 1"),
        ("world", {"1": {"mass": float("inf")}}, "world: a value of robot '1' is not finite"),
        ("operated", {"2": "anna"}, "operated: '2' is not the index of a robot, 0 to 1"),
        ("observation", np.full((2, 3), np.nan, np.float32), "observation is not finite"),
        ("reward", np.array([0, np.inf], np.float32), "reward is not finite"),
        ("action", np.full((2, 2), -np.inf, np.float32), "action is not finite"),
    ],
)
def test_a_step_with_an_invalid_value_is_refused(make_step: Any, field: str, value: Any, text: str) -> None:
    payload = codec.encode(make_step(robots=2, **{field: value}))
    with pytest.raises(ProtocolError, match=text) as caught:
        codec.decode("step", payload)
    assert caught.value.kind == "value"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("world", {"0": 1}, r"Expected `object`, got `int` - at `\$\.world\[\.\.\.\]`"),
        ("world", {"1": {"mass": "heavy"}}, r"Expected `int \| float`, got `str` - at `\$\.world\[\.\.\.\]"),
        ("world", {"1": {"mass": True}}, r"Expected `int \| float`, got `bool` - at `\$\.world\[\.\.\.\]"),
        ("operated", {"1": 7}, r"Expected `str`, got `int` - at `\$\.operated\[\.\.\.\]`"),
    ],
)
def test_a_step_with_a_wrong_type_in_a_map_is_refused(make_step: Any, field: str, value: Any, text: str) -> None:
    payload = codec.encode(make_step(robots=2, **{field: value}))
    with pytest.raises(ProtocolError, match=text) as caught:
        codec.decode("step", payload)
    assert caught.value.kind == "fields"


@pytest.mark.parametrize("field", ["phase", "episode", "episode_step", "observation", "reward", "action"])
def test_step_arrays_must_match_each_other_and_the_handshake(make_step: Any, field: str) -> None:
    content = msgpack.unpackb(codec.encode(make_step(robots=2)))
    content[field] += content[field]  # twice as many robots in this array only
    with pytest.raises(ProtocolError) as caught:
        codec.decode("step", msgpack.packb(content), {"O": 3, "A": 2})
    assert caught.value.kind == "shape"
    good = codec.encode(make_step(robots=2))
    for dims in ({"N": 1}, {"N": 4}, {"O": 2}, {"A": 3}, {"N": 2, "O": 3, "A": 1}):
        with pytest.raises(ProtocolError) as caught:
            codec.decode("step", good, dims)
        assert caught.value.kind == "shape"
    assert codec.decode("step", good, {"N": 2, "O": 3, "A": 2}) is not None


def test_array_sizes_must_be_at_least_1_and_at_most_max_size(make_step: Any) -> None:
    content = msgpack.unpackb(codec.encode(make_step()))
    content["phase"] = bytes(codec.MAX_SIZE + 1)
    with pytest.raises(ProtocolError, match="65537 bytes do not hold a uint8 array of N=65537"):
        codec.decode("step", msgpack.packb(content))
    evaluation = Evaluation(1, 0, 0, np.zeros(0), np.zeros(0, np.uint32))
    with pytest.raises(ProtocolError, match="E=0"):
        codec.decode("evaluation", codec.encode(evaluation))


def test_decoded_arrays_are_read_only(make_step: Any) -> None:
    step = codec.decode("step", codec.encode(make_step()))
    assert isinstance(step, Step)
    assert not step.observation.flags.writeable


def test_strided_arrays_are_sent_in_c_order(make_step: Any) -> None:
    turned = np.arange(6, dtype=np.float32).reshape(3, 2).T
    step = codec.decode("step", codec.encode(make_step(robots=2, observation=turned)))
    assert isinstance(step, Step)
    assert step.observation.tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("observation", [np.zeros((1, 3)), np.zeros(3, np.float32), np.zeros((1, 3), ">f4")])
def test_encoding_a_wrong_array_is_a_value_error(make_step: Any, observation: Any) -> None:
    with pytest.raises(ValueError, match=r"step\.observation"):
        codec.encode(make_step(observation=observation))


@pytest.mark.parametrize("place", ["a field", "a map", "an unknown field"])
def test_decoding_a_list_with_a_false_length_uses_little_memory(place: str) -> None:
    """The header of a list states its length. The decoder must not allocate memory for a false length of 2^31 - 1."""
    endless = msgpack.ExtType(1, b"")  # a placeholder; below, a list with a false length replaces the placeholder
    fields: dict[str, Any] = {"protocol": 1, "role": "node", "name": "x", "incarnation": 0, "client": 0, "robots": 0}
    fields |= {"weights_version": 0, "spec": {}, "agreement": {}}
    fields |= {"a field": {"name": endless}, "a map": {"spec": {"x": endless}}, "an unknown field": {"y": endless}}[
        place
    ]
    packed = msgpack.packb(fields)
    assert packed.count(msgpack.packb(endless)) == 1
    payload = packed.replace(msgpack.packb(endless), b"\xdd\x7f\xff\xff\xff" + b"\x01" * 100)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            codec.decode("hello", payload)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20  # a list of 2^31 - 1 pointers would take 17 GB


def test_a_missing_field_is_an_error_even_if_another_field_comes_twice() -> None:
    payload = b"\x82" + msgpack.packb("stamp") + b"\x01" + msgpack.packb("stamp") + b"\x02"
    with pytest.raises(ProtocolError) as caught:
        codec.decode("heartbeat", payload)
    assert caught.value.kind == "fields"


@pytest.mark.parametrize(
    ("name", "payload", "limit"),
    [
        ("k" * 4000, b"", 300),
        ("heartbeat", msgpack.packb({"k" * 4000: 1}), 200),
        ("hello", hello(name="\n" * 256), 600),  # the name itself is limited to 256 characters
        ("turn", msgpack.packb({"now": 0.0, "inputs": ["x" * 4000]}), 200),
        ("turn", msgpack.packb({"now": 0.0, "inputs": [["policy", "x" * 4000, {}]]}), 300),
    ],
    ids=["topic", "unknown field", "name", "input", "topic of an input"],
)
def test_a_long_text_in_a_message_does_not_make_the_error_long(name: str, payload: bytes, limit: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(name, payload)
    assert len(str(caught.value)) < limit


@settings(max_examples=50, deadline=None, print_blob=True)
@given(st.text(max_size=2048), st.integers(0, 2**64 - 1))
def test_a_message_with_the_fields_of_another_topic_is_refused(reason: str, session: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode("bye", codec.encode(Heartbeat(0, session)))
    assert caught.value.kind == "fields"
    with pytest.raises(ProtocolError):
        codec.decode("heartbeat", codec.encode(Bye(reason)))


def test_several_records_share_one_payload() -> None:
    records = [Record("step", "policy", n, 17, bytes(n)) for n in range(3)]
    several = codec.decode_records(codec.encode_records(records))
    assert [asdict(record) for record in several] == [asdict(record) for record in records]
    (one,) = codec.decode_records(memoryview(codec.encode(records[2])))
    assert asdict(one) == asdict(records[2])


def test_a_record_with_a_payload_above_the_limit_of_the_topic_is_refused() -> None:
    size = Bye.MAX_BYTES + 1
    with pytest.raises(ProtocolError, match=f"payload has {size} bytes; allowed: at most {size - 1}"):
        codec.decode("record", codec.encode(Record("bye", "policy", 0, 17, bytes(size))))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        codec.encode_records([Record("bye", "policy", n, 17, b"") for n in range(257)]),
        codec.encode_records([Record("bye", "policy", 0, 17, b""), Record("none", "policy", 1, 17, b"")]),
        codec.encode_records([Record("bye", "policy", 0, 17, b"")])[:-1],
        msgpack.packb([1, 2]),
        b"\x91" * 2000,
    ],
    ids=[
        "nothing",
        "too many",
        "an unknown topic",
        "truncated",
        "numbers instead of records",
        "nested deeper than the stack",
    ],
)
def test_invalid_record_payloads_are_refused_as_a_whole(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_records(payload)
