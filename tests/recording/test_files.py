"""``td3_robot`` and other MCAP readers can read session files. ``td3_robot`` reports damage."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcap.reader import make_reader
from mcap.records import ChunkIndex
from mcap.writer import Writer

from td3_robot.cli.main import main
from td3_robot.config.schema import Config
from td3_robot.errors import SessionError
from td3_robot.messages import MESSAGES, PROTOCOL_VERSION, Action, Start, Step, Weights, wire_fields
from td3_robot.recording import schemas
from td3_robot.recording.entries import Attachment, Entry, Facts
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.info import examine
from td3_robot.recording.reader import Session
from td3_robot.recording.recover import recover
from td3_robot.recording.session_file import SessionFile
from td3_robot.recording.writer import CHUNK_S, SessionWriter, write
from tests.sessions import BEGIN, SECOND, Publisher, entries_of

Make = Callable[..., Any]
DATA_END = b"\x0f" + (4).to_bytes(8, "little")
"""Opcode and length of the record at the end of the data. The index comes after this record."""


def test_written_entries_are_read_back(acted: Make, save: Make) -> None:
    entries = entries_of(acted())
    session = Session([save("a.mcap", entries)])
    assert list(session.entries()) == entries
    assert session.config() == Config()
    assert session.decode.sizes == {"sim-0": {"N": 2, "O": 3, "A": 2}}
    actions = [message for _, message in session.messages((Action.NAME,))]
    assert [message.action.shape for message in actions if isinstance(message, Action)] == [(2, 2)] * 30


def test_a_failed_write_leaves_no_file(acted: Make, tmp_path: Path) -> None:
    path, entries = tmp_path / "a.mcap", entries_of(acted(3))

    def interrupted() -> Iterator[Entry]:
        yield from entries
        raise SessionError("damaged")

    facts = facts_of_this_machine(Config())
    with pytest.raises(SessionError, match="damaged"):
        write(path, facts, interrupted())
    assert not path.exists()
    write(path, facts, entries)
    with pytest.raises(FileExistsError):
        write(path, facts, entries)
    assert list(Session([path]).entries()) == entries


def test_other_readers_see_topics_schemas_and_times(acted: Make, save: Make) -> None:
    path = save("a.mcap", entries_of(acted(3)))
    with path.open("rb") as file:
        rows = list(make_reader(file, validate_crcs=True).iter_messages(topics=["sim-0/step"]))
    schema, channel, message = rows[2]
    assert schema is not None
    assert (channel.message_encoding, schema.encoding, schema.name) == ("msgpack", "jsonschema", "step")
    assert (message.sequence, message.log_time - message.publish_time) == (2, 1000)
    properties = json.loads(schema.data)["properties"]
    assert properties["observation"]["shape"] == ["N", "O"]


@pytest.mark.parametrize("name", MESSAGES)
def test_schema_names_every_field(name: str) -> None:
    described = json.loads(schemas.schema(MESSAGES[name]))
    fields = wire_fields(MESSAGES[name])
    assert list(described["properties"]) == list(fields)
    assert described["required"] == [key for key, field in fields.items() if not field.optional]


def test_a_killed_recorder_loses_only_the_unfinished_chunk(acted: Make, save: Make) -> None:
    """The writer gets 60 messages per second. A chunk covers at most CHUNK_S (0.5 s), so it has at most 31 messages."""
    entries = entries_of(acted(44))  # 2 Weights, 44 Steps and 44 Actions
    assert len(entries) == 90
    path = save("killed.mcap", entries, close=False)
    with pytest.raises(SessionError, match=r"without its index; mend it with td3-robot recover"):
        Session([path])
    lost = recover(path, path.with_name("mended.mcap"))
    kept = list(Session([path.with_name("mended.mcap")]).entries())
    assert kept == entries[: len(kept)]
    assert len(kept) >= 90 - CHUNK_S * 60 - 1
    assert (lost["whole"], lost["messages_kept"]) == (False, len(kept))


def test_a_file_that_is_being_written_is_not_called_damaged(
    acted: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the writer lives, ``info --check`` succeeds. Session raises an error: a recorder is writing this file."""
    path = tmp_path / "a.mcap"
    writer = SessionWriter(path, facts_of_this_machine(Config()), 0.0)
    for number, entry in enumerate(entries_of(acted(44))):
        writer.add(entry)
        writer.turn(number / 60)
    assert main(["info", str(path), "--check"]) == 0
    output = capsys.readouterr().out
    assert "a recorder is writing this file" in output
    assert "DAMAGED" not in output
    with pytest.raises(SessionError, match=r"a recorder is writing .*a\.mcap': wait until it ends, or copy"):
        Session([path])
    writer._file.close()  # like SIGKILL
    assert main(["info", str(path), "--check"]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    writer.close()


def test_a_damaged_chunk_is_reported_while_its_file_is_being_written(acted: Make, tmp_path: Path) -> None:
    writer = SessionWriter(tmp_path / "a.mcap", facts_of_this_machine(Config()), 0.0)
    for number, entry in enumerate(entries_of(acted(44))):
        writer.add(entry)
        writer.turn(number / 60)
    octets = bytearray((tmp_path / "a.mcap").read_bytes())
    octets[len(octets) // 2] ^= 0xFF  # in the first chunk
    (tmp_path / "a.mcap").write_bytes(octets)
    report = examine(tmp_path / "a.mcap")
    assert report["being_written"]
    assert "chunk record" in report["damages"][0]
    writer.close()


def test_the_index_of_a_growing_file_takes_no_memory(acted: Make, tmp_path: Path) -> None:
    """2,000 chunks are 17 minutes of recording. A list of their index entries would take more than 1 MB."""
    writer = SessionWriter(tmp_path / "a.mcap", facts_of_this_machine(Config()), 0.0)
    entries = entries_of(acted(44))

    def record(first: int, last: int) -> None:
        for number in range(first, last):
            writer.add(entries[number % len(entries)])
            writer.turn(number * CHUNK_S)

    record(0, 200)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        record(200, 2200)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    writer.close()
    assert grown < 200_000
    with (tmp_path / "a.mcap").open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary
    assert len(summary.chunk_indexes) == 2199  # 2,200 messages: two in the first chunk, one in each other chunk
    assert examine(tmp_path / "a.mcap")["damages"] == []


def damage_chunk(path: Path, number: int) -> ChunkIndex:
    """Invert the byte in the middle of a chunk, and return the chunk's entry in the index."""
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    assert len(summary.chunk_indexes) >= 3
    chunk = summary.chunk_indexes[number]
    octets = bytearray(path.read_bytes())
    octets[chunk.chunk_start_offset + chunk.chunk_length // 2] ^= 0xFF
    path.write_bytes(octets)
    return chunk


@pytest.mark.parametrize("number", [0, 1, -1])
def test_recover_reports_what_is_missing(acted: Make, save: Make, number: int) -> None:
    """Only the messages of the damaged chunk are lost.

    This is also true for the first chunk, which holds the names of all channels.
    """
    entries = entries_of(acted(60))
    path = save("a.mcap", entries)
    whole = examine(path)
    chunk = damage_chunk(path, number)
    mended = path.with_name("mended.mcap")
    lost = recover(path, mended)
    assert [damage["byte"] for damage in lost["damages"]] == [chunk.chunk_start_offset]
    kept = examine(mended)
    assert kept["damages"] == []
    assert kept["messages"] > 0
    counts = {name: stream["count"] for name, stream in whole["topics"].items()}
    left = {name: stream["count"] for name, stream in kept["topics"].items()}
    assert lost["missing"] == {name: gone for name in counts if (gone := counts[name] - left.get(name, 0))}
    inside = [entry for entry in entries if chunk.message_start_time <= entry.received <= chunk.message_end_time]
    assert sum(lost["missing"].values()) == len(inside) > 0


def chunks_of(path: Path) -> list[ChunkIndex]:
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    return sorted(summary.chunk_indexes, key=lambda chunk: chunk.chunk_start_offset)


def flipped(old: bytes) -> bytes:
    return bytes(octet ^ 0xFF for octet in old)


def zeroed(old: bytes) -> bytes:
    return bytes(len(old))


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize(
    ("begin", "size", "damage"),
    [
        (0, 1, flipped),  # the opcode
        (1, 1, flipped),  # the lowest byte of the length
        (2, 1, flipped),
        (7, 1, flipped),  # now the length is more than 2^55 bytes
        (-3, 512, flipped),
        (-100, 512, zeroed),
        (-2000, 4096, zeroed),
    ],
)
def test_recover_continues_after_a_damaged_chunk_head(
    acted: Make, save: Make, number: int, begin: int, size: int, damage: Callable[[bytes], bytes]
) -> None:
    """The damage begins ``begin`` bytes after the head of a chunk. Only chunks with damaged bytes are lost."""
    entries = entries_of(acted(150))
    path = save("a.mcap", entries)
    chunks = chunks_of(path)
    octets = bytearray(path.read_bytes())
    first = chunks[number].chunk_start_offset + begin
    last = min(first + size, octets.index(DATA_END))
    octets[first:last] = damage(octets[first:last])
    path.write_bytes(octets)
    ends = [chunk.chunk_start_offset + chunk.chunk_length for chunk in chunks]
    hit = [c for c, end in zip(chunks, ends, strict=True) if first < end and c.chunk_start_offset < last]
    gone = [e for e in entries if any(c.message_start_time <= e.received <= c.message_end_time for c in hit)]
    lost = recover(path, path.with_name("mended.mcap"))
    assert list(SessionFile(path.with_name("mended.mcap")).entries()) == [e for e in entries if e not in gone]
    assert (lost["lost"], lost["index_known"], lost["bytes_not_read"]) == (True, True, 0)
    assert sum(lost["missing"].values()) == len(gone) > 0
    if begin >= 0:
        assert [item["byte"] for item in lost["damages"]] == [chunks[number].chunk_start_offset]
    assert main(["recover", str(path), "--out", str(path.with_name("again.mcap"))]) == 3


@pytest.mark.parametrize("new", [bytes(2000), b"\xff" * 2000, b"\x01\x02\x03\x04" * 500])
def test_recover_begins_at_the_first_intact_chunk_that_the_index_names(acted: Make, save: Make, new: bytes) -> None:
    """The damage follows the magic bytes. It covers the header, the metadata and the configuration."""
    entries = entries_of(acted(60))
    path = save("a.mcap", entries)
    hit = [chunk for chunk in chunks_of(path) if chunk.chunk_start_offset < 8 + len(new)]
    begin = max((chunk.message_end_time for chunk in hit), default=0)
    octets = bytearray(path.read_bytes())
    octets[8 : 8 + len(new)] = new
    path.write_bytes(octets)
    lost = recover(path, path.with_name("mended.mcap"))
    kept = [entry for entry in entries if entry.received > begin]
    assert list(Session([path.with_name("mended.mcap")]).entries()) == kept
    assert (lost["lost"], sum(lost["missing"].values())) == (True, len(entries) - len(kept))


def test_recover_of_a_file_with_a_damaged_end_of_the_data_loses_nothing(acted: Make, save: Make) -> None:
    entries = entries_of(acted(10))
    path = save("a.mcap", entries)
    octets = path.read_bytes()
    for where in range(octets.index(DATA_END), octets.index(DATA_END) + 13):
        path.write_bytes(octets[:where] + bytes([octets[where] ^ 0xFF]) + octets[where + 1 :])
        lost = recover(path, path.with_name(f"{where}.mcap"))
        assert list(Session([path.with_name(f"{where}.mcap")]).entries()) == entries
        assert (lost["lost"], lost["missing"], lost["bytes_not_read"], lost["index_known"]) == (True, {}, 0, True)


def test_recover_without_an_index_stops_at_a_damaged_length(acted: Make, save: Make) -> None:
    """Without the index, nothing says where the next chunk begins."""
    path = save("a.mcap", entries_of(acted(60)))
    second = chunks_of(path)[1].chunk_start_offset
    octets = bytearray(path.read_bytes()[:-20])
    octets[second : second + 512] = bytes(512)
    path.write_bytes(octets)
    lost = recover(path, path.with_name("mended.mcap"))
    assert (lost["index_known"], lost["bytes_not_read"]) == (False, len(octets) - second)
    assert lost["damages"] == [{"byte": second, "why": "no record begins here"}]


def test_recover_without_an_index_warns_that_more_may_be_missing(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of the Steps' channel was only in the damaged chunk and the lost index. So only Actions can be read."""
    steps, actions = (
        [entry for entry in entries_of(acted(60)) if entry.topic == topic] for topic in ("step", "action")
    )
    path = save("a.mcap", sorted([*steps, *actions[40:]], key=lambda entry: entry.received))
    damage_chunk(path, 0)
    octets = path.read_bytes()
    path.write_bytes(octets[: octets.index(DATA_END)])
    assert main(["recover", str(path)]) == 3
    output = capsys.readouterr().out
    assert "messages of unknown channels, because a damaged record held the channels' names" in output
    assert "the index is lost, so the last messages of each topic may be missing, too" in output
    kept = list(Session([path.with_name("a.recovered.mcap")]).entries())
    assert {entry.topic for entry in kept} == {"action"}
    assert kept == actions[-len(kept) :]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_raises_session_error_or_is_found_by_check(acted: Make, tmp_path_factory: Any, data: Any) -> None:
    """Change, cut off or insert bytes anywhere. Reading must not hang. The only allowed exception is SessionError."""
    folder = tmp_path_factory.mktemp("damage")
    writer = SessionWriter(folder / "a.mcap", facts_of_this_machine(Config()), 0.0)
    for number, entry in enumerate(entries_of(acted(6))):
        writer.add(entry)
        writer.turn(number / 10)
    writer.close()
    octets = bytearray((folder / "a.mcap").read_bytes())
    index = octets.index(DATA_END)
    where = data.draw(st.integers(0, 99_999)) * len(octets) // 100_000  # a fraction, because the file's length varies
    kind = data.draw(st.sampled_from(("set", "cut", "insert")))
    if kind == "cut":
        del octets[where:]
    elif kind == "insert":
        octets[where:where] = data.draw(st.binary(min_size=1, max_size=20))
    else:
        octets[where] ^= data.draw(st.integers(1, 255))
    (folder / "b.mcap").write_bytes(octets)
    for read in (examine, lambda path: Session([path]).config(), lambda path: list(Session([path]).messages())):
        with contextlib.suppress(SessionError):
            read(folder / "b.mcap")
    if where < index:
        with pytest.raises(SessionError):
            list(Session([folder / "b.mcap"]).entries())
    assert damaged(folder / "b.mcap")


def damaged(path: Path) -> bool:
    """Return whether ``info --check`` rejects a file."""
    try:
        return bool(examine(path)["damages"])
    except SessionError:
        return True


def test_damage_to_the_index_is_found_and_loses_nothing(acted: Make, save: Make, rng: np.random.Generator) -> None:
    """Change one byte that comes after the data, or cut the file at this byte.

    A reader that starts at the beginning finds all entries.

    The data ends with a record of 13 bytes: opcode and length (9) and content (4). The file ends with the footer record
    (29 bytes) and MCAP's magic bytes (8).
    """
    entries = entries_of(acted(2))
    path = save("a.mcap", entries)
    octets = path.read_bytes()
    index = octets.index(DATA_END) + 13
    for where in (*rng.integers(index, len(octets), 150).tolist(), *range(len(octets) - 37, len(octets))):
        changed = bytearray(octets)
        changed[where] ^= int(rng.integers(1, 256))
        for content in (changed, octets[:where]):
            path.write_bytes(content)
            file = SessionFile(path)
            assert list(file.entries()) == entries
            assert not file.damages
            assert file.index, where
            assert file.index.offset == index
    assert damaged(path)
    assert list(Session([path]).entries()) == entries


def test_every_truncated_file_is_reported_as_damaged(acted: Make, save: Make, tmp_path: Path) -> None:
    octets = save("a.mcap", entries_of(acted(4))).read_bytes()
    for size in range(8, len(octets), 997):
        (tmp_path / "cut.mcap").write_bytes(octets[:size])
        assert examine(tmp_path / "cut.mcap")["damages"], size


def test_a_file_that_is_not_a_session_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, foreign = tmp_path / "a.txt", tmp_path / "foreign.mcap"
    text.write_text("hello")
    with foreign.open("wb") as file:
        writer = Writer(file)
        writer.start("ros2")
        writer.finish()
    for path, words in (
        (text, "not an MCAP file"),
        (foreign, "not a recording of td3-robot"),
        (tmp_path, "read"),
        (tmp_path / "none", "No such file"),
    ):
        assert main(["info", str(path)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


@pytest.fixture
def old(acted: Make, save: Make) -> Path:
    """A recording with protocol version 0, in which Steps have other fields."""
    entries = []
    for entry in entries_of(acted(6)):
        content = msgpack.unpackb(entry.payload)
        if entry.topic == Step.NAME:
            content["done"] = content.pop("phase")
        entries.append(dataclasses.replace(entry, payload=msgpack.packb(content)))
    today = facts_of_this_machine(Config())
    path: Path = save("old.mcap", entries, Facts({**today.metadata, "protocol": "0"}, today.attachments))
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["replay"],
        ["replay", "--update"],
        ["export", "--out", "tables"],
        ["export", "--out", "bag", "--format", "ros2"],
        ["play", "--policy", "ipc://policy"],
        ["play", "--monitor", "ipc://monitor"],
        ["train", "walker2d", "--out", "run", "--from"],
    ],
    ids=" ".join,
)
def test_another_protocol_version_is_refused_and_the_error_names_it(
    command: list[str], old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    before = old.read_bytes()
    assert main([*command, str(old)]) == 2
    words = f"recorded with protocol version 0; this version of td3-robot reads {PROTOCOL_VERSION}"
    assert words in capsys.readouterr().err
    assert old.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["old.mcap"]  # no partial output


def test_info_shows_another_protocol_version_and_counts_messages(old: Path, capsys: Any) -> None:
    report = examine(old)
    assert report["topics"]["sim-0/step"]["count"] == 6
    problem = f"recorded with protocol version 0; this version of td3-robot reads {PROTOCOL_VERSION}"
    assert report["damages"] == [f"the messages of the file were not checked: {problem}"]
    assert main(["info", str(old)]) == 0
    assert main(["info", str(old), "--check"]) == 1
    assert problem in capsys.readouterr().out


def test_a_huge_chunk_is_not_unpacked(acted: Make, save: Make) -> None:
    """The size in the chunk's header is set to 2^60."""
    path = save("a.mcap", entries_of(acted(4)))
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    octets = bytearray(path.read_bytes())
    at = summary.chunk_indexes[0].chunk_start_offset + 9 + 16  # after opcode and length (9), begin and end (16)
    octets[at : at + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(octets)
    file_ = SessionFile(path)
    list(file_.items())
    assert "it declares 1152921504606846976 bytes" in file_.damages[0].why


def test_info_reports_counts_rates_gaps_and_versions(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recording holds Steps 0 to 39 without Steps 10 and 11."""
    # entries_of gives message n the time n/60 s. Message 0 is Weights. Then 40 Steps and 40 Actions alternate, with
    # another Weights before Step 20. So Step 0 is message 1, Step 39 is message 80, and message 81 is the last one.
    entries = [e for e in entries_of(acted(40)) if not (e.topic == Step.NAME and e.sequence in (10, 11))]
    path = save("a.mcap", entries)
    assert main(["info", str(path), "--json", "--check"]) == 0
    report = json.loads(capsys.readouterr().out)
    steps = report["topics"]["sim-0/step"]
    assert (steps["count"], steps["gaps"], steps["missing"], steps["begins_at"]) == (38, 1, 2, 0)
    assert steps["rate_hz"] == pytest.approx(37 / (79 / 60), abs=1e-3)  # Steps 0 and 39 are messages 1 and 80
    assert report["robot_steps"] == {"first": 2, "mid": 74, "terminated": 0, "truncated": 0}  # two robots
    assert report["policy_versions"] == {"recorded": [1, 2], "count": 2, "left_out": 0, "acting": [1, 2]}
    assert report["duration_s"] == pytest.approx(81 / 60, abs=1e-3)
    assert report["begin"].startswith("2023-11-14T22:13:20")  # BEGIN
    assert main(["info", str(path)]) == 0
    assert "sim-0/step" in capsys.readouterr().out


def test_info_check_finds_an_invalid_message(acted: Make, save: Make, capsys: pytest.CaptureFixture[str]) -> None:
    bad = Entry("sim-0", 0, "step", "policy", 99, BEGIN, BEGIN, b"\x81\xa1x\x01")
    path = save("a.mcap", [*entries_of(acted(2)), bad])
    assert main(["info", str(path)]) == 0
    assert main(["info", str(path), "--check"]) == 1
    assert "sim-0/step 99: step: Object missing required field" in capsys.readouterr().out


def test_a_task_is_shown_only_if_a_simulator_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """Older recorders stored the default task also for a deployed robot. ``info`` must not show this task."""
    sessions = Path(__file__).parents[1] / "replay" / "sessions"
    for name, task in (("pendulum", ", task gymnasium:Pendulum-v1\n"), ("deployed", "protocol 1\n")):
        assert main(["info", str(sessions / f"{name}.mcap")]) == 0
        assert task in capsys.readouterr().out
    assert "task" not in facts_of_this_machine(Config(), deployed=True).metadata


def test_text_from_a_file_cannot_control_the_terminal(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [dataclasses.replace(entry, publisher="\x1b[2Jevil") for entry in entries_of(acted(2))]
    path = str(save("a.mcap", entries))
    assert main(["info", path]) == 0
    assert main(["play", path, "--policy", "ipc:///nobody", "--remap", "x=y"]) == 2
    output = capsys.readouterr()
    assert "evil" in output.out
    assert "evil" in output.err
    assert "\x1b" not in output.out + output.err


def test_the_recover_command_mends_a_cut_file_and_writes_nothing_for_a_whole_file(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = save("a.mcap", entries_of(acted(4)))
    assert main(["recover", str(whole)]) == 0
    assert "nothing to recover" in capsys.readouterr().out
    assert not whole.with_name("a.recovered.mcap").exists()
    attached = Facts(facts_of_this_machine(Config()).metadata, [Attachment("x", "text/plain", b"y")])
    cut = save("b.mcap", entries_of(acted(40)), attached, close=False)
    assert main(["recover", str(cut)]) == 3
    output = capsys.readouterr().out
    assert "damaged at byte" in output
    assert f"recorded by td3-robot {attached.metadata['td3-robot']}, protocol {PROTOCOL_VERSION}, task" in output
    assert Session([cut.with_name("b.recovered.mcap")]).attachments["x"].data == b"y"
    assert main(["recover", str(cut)]) == 2  # an existing file is never overwritten
    assert "exists already" in capsys.readouterr().err


def test_recover_of_a_damaged_index_loses_nothing(acted: Make, save: Make, capsys: pytest.CaptureFixture[str]) -> None:
    path = save("a.mcap", entries_of(acted(4)), Facts(facts_of_this_machine(Config()).metadata, TEXTS))
    octets = bytearray(path.read_bytes())
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    where = octets.rindex(summary.chunk_indexes[0].chunk_start_offset.to_bytes(8, "little"))
    octets[where] ^= 0xFF
    path.write_bytes(octets)
    assert main(["info", str(path), "--check"]) == 1
    assert "the checksum of the index, which begins here, does not match" in capsys.readouterr().out
    assert main(["recover", str(path)]) == 0
    assert "nothing is lost: only the index was damaged, and the new file has a new index" in capsys.readouterr().out
    mended = path.with_name("a.recovered.mcap")
    assert examine(mended)["damages"] == []
    assert list(Session([mended]).entries()) == list(Session([path]).entries())
    assert [item for item in SessionFile(mended).items() if isinstance(item, Attachment)] == TEXTS
    with mended.open("rb") as file:
        assert len(list(make_reader(file, validate_crcs=True).iter_messages())) == 10


@pytest.mark.parametrize("whole_index", [True, False])
def test_recover_reports_the_bytes_after_the_end_of_the_recording(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str], whole_index: bool
) -> None:
    """Somebody has joined the files of two recordings with ``cat``."""
    entries = entries_of(acted(4))
    first, second = (save(name, entries).read_bytes() for name in ("a.mcap", "b.mcap"))
    if not whole_index:
        at = first.index(DATA_END) + 40
        first = first[:at] + bytes([first[at] ^ 0xFF]) + first[at + 1 :]
    path = save("c.mcap", [])
    for more, words in (
        (second, f"; another recording begins here; to copy it: tail -c {len(second)} FILE > OTHER.mcap"),
        (bytes(100), ""),
    ):
        path.write_bytes(first + more)
        target = path.with_name(f"{len(more)}.mcap")
        assert main(["recover", str(path), "--out", str(target)]) == 3
        lines = capsys.readouterr().out.splitlines()
        ends = f"damaged at byte {len(first)}: the recording ends here, but {len(more)} more bytes follow{words}"
        assert ends in lines
        unwritten = "" if whole_index else ", and all data that the recorder has not written to the file"
        assert f"lost: the last {len(more)} bytes of the file{unwritten}" in lines
        assert ("the index is lost, so the last messages of each topic may be missing, too" in lines) != whole_index
        assert list(Session([target]).entries()) == entries
        with pytest.raises(SessionError, match=f"{len(more)} more bytes follow"):
            Session([path])


TEXTS = [Attachment("x", "text/plain", b"y"), Attachment("x", "text/plain", b"z")]


def without_metadata(path: Path) -> None:
    """Damage the length field inside the file's metadata record."""
    octets = bytearray(path.read_bytes())
    at = octets.index(b"td3_robot")  # the record's name
    octets[at + len(b"td3_robot") + 3] = 0xFF
    path.write_bytes(octets)


def test_recover_without_metadata_assumes_this_protocol_version_if_all_messages_fit(
    acted: Make, save: Make, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save("a.mcap", entries_of(acted(4)))
    without_metadata(path)
    assert main(["recover", str(path), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["protocol_assumed"]
    assert report["metadata"] == {"protocol": str(PROTOCOL_VERSION)}
    assert list(Session([path.with_name("a.recovered.mcap")]).entries()) == entries_of(acted(4))
    path.with_name("a.recovered.mcap").unlink()
    assert main(["recover", str(path)]) == 3
    assert (
        f"version {PROTOCOL_VERSION} is assumed, because all messages fit version {PROTOCOL_VERSION}"
        in capsys.readouterr().out
    )
    without_metadata(old)
    assert main(["recover", str(old)]) == 2
    error = capsys.readouterr().err
    assert (
        f"the protocol version of the recording was lost, and not all messages fit version {PROTOCOL_VERSION}" in error
    )
    assert error.count("\n") == 1
    assert not old.with_name("old.recovered.mcap").exists()


def test_recover_keeps_the_attachments_of_a_file_without_messages(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    attached = Facts(facts_of_this_machine(Config()).metadata, TEXTS)
    path = save("a.mcap", [], attached, close=False)
    assert main(["recover", str(path)]) == 3
    assert "0 messages, 2 attachments" in capsys.readouterr().out
    mended = path.with_name("a.recovered.mcap")
    assert examine(mended)["damages"] == []
    assert [item for item in SessionFile(mended).items() if isinstance(item, Attachment)] == TEXTS
    path = save("b.mcap", entries_of(acted(2)))
    path.write_bytes(path.read_bytes()[:100])
    assert main(["recover", str(path)]) == 2
    assert "has no intact message and no intact attachment" in capsys.readouterr().err


def test_recover_copies_a_topic_that_this_version_does_not_know(acted: Make, save: Make) -> None:
    """A later version may add a topic to the protocol. In the copy, the channel of this topic has no schema."""
    entries = entries_of(acted(3))
    entries += [dataclasses.replace(entries[-1], topic="later", sequence=number) for number in range(3)]
    path = save("a.mcap", entries)
    path.write_bytes(path.read_bytes()[:-20])
    target = path.with_name("b.mcap")
    assert not recover(path, target)["lost"]
    assert list(SessionFile(target).entries()) == entries
    assert examine(target)["topics"]["policy/later"]["count"] == 3
    with target.open("rb") as file:
        assert [schema for schema, _, _ in make_reader(file).iter_messages(topics=["policy/later"])] == [None] * 3


def test_a_recovered_file_has_chunks_of_at_most_half_a_second(acted: Make, save: Make) -> None:
    """30 Steps, 30 Actions and 2 Weights, 1/60 s apart, take 1.02 s. That makes 3 chunks of at most CHUNK_S."""
    path = save("a.mcap", entries_of(acted(30)))
    path.write_bytes(path.read_bytes()[:-1])
    mended = path.with_name("mended.mcap")
    recover(path, mended)
    with mended.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    spans = [chunk.message_end_time - chunk.message_start_time for chunk in summary.chunk_indexes]
    assert len(spans) == 3
    assert max(spans) <= CHUNK_S * 1e9


@pytest.mark.parametrize("name", [".", "/", "folder"])
def test_recover_of_a_folder_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(["recover", name]) == 2
    assert (
        capsys.readouterr().err == f"td3-robot recover: {name!r} is a folder; allowed: a file, such as session.mcap\n"
    )


def test_parts_form_one_session_and_repeated_messages_count_once(acted: Make, save: Make) -> None:
    entries = entries_of(acted(10))
    parts = [save("a.mcap", entries[:12]), save("a_1.mcap", [entries[0], *entries[12:]])]
    assert list(Session(parts).entries()) == entries


def test_parts_may_be_given_in_any_order(make_step: Make, tmp_path: Path, rng: Any) -> None:
    """A shell sorts part 11 before part 3. Each part repeats the weights, but the weights must count once."""
    whole, split = Publisher(tmp_path / "whole.mcap"), Publisher(tmp_path / "a.mcap", split_s=0.45)
    for it in (whole, split):
        for number in range(12):
            it.publish(Weights(number + 1, 0, 0, "", b""), *(make_step(4 * number + n) for n in range(4)))
        it.recorder.close(it.now)
    parts = split.recorder.files
    assert len(parts) >= 12
    session, expected = Session([parts[n] for n in rng.permutation(len(parts))]), Session(whole.recorder.files)
    assert list(session.paths) == parts
    assert list(session.entries()) == list(expected.entries())
    assert (session.counts, session.begin, session.end) == (expected.counts, expected.begin, expected.end)


@pytest.mark.parametrize("reversed_order", [False, True])
def test_files_of_different_recordings_are_refused_as_parts(
    make_step: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], reversed_order: bool
) -> None:
    """Each run numbers its messages from 0, so the second file would look like a repetition of the first."""
    paths = []
    for number in range(2):
        it = Publisher(tmp_path / f"{number}.mcap", begin=BEGIN + number * 100 * SECOND)
        it.publish(Start("simulator", "", {}), *(make_step(n) for n in range(8)))
        it.recorder.close(it.now)
        paths.append(str(it.recorder.path))
    given = paths[::-1] if reversed_order else paths
    words = (
        f"{paths[0]!r} and {paths[1]!r} come from different recordings: the times of their messages sim-0/start 0 "
        "differ; give the parts of only one recording\n"
    )
    for command in (["replay", "--parts"], ["export", "--out", str(tmp_path / "out")], ["play", "--policy", "ipc://p"]):
        assert main([*command, *given]) == 2
        error = capsys.readouterr().err
        assert error == f"td3-robot {command[0]}: {words}"
    assert not (tmp_path / "out").exists()


def test_a_late_recorder_does_not_hide_that_files_come_from_different_recordings(acted: Make, save: Make) -> None:
    """The streams of both files begin with message 3 or later. Each file repeats only the Start of the simulator."""
    start = entries_of([("sim-0", Start("simulator", "", {}))])
    late = [start[0], *entries_of(acted(10))[9:]]
    other = [dataclasses.replace(entry, published=entry.published + SECOND) for entry in late]
    with pytest.raises(SessionError, match=r"sim-0/start 0 differ"):
        Session([save("a.mcap", late), save("b.mcap", other)])


def test_a_file_that_a_second_recorder_writes_is_a_part_of_the_same_recording(acted: Make, save: Make) -> None:
    """The nodes send their Start and the messages of the last 2 s to the second recorder again."""
    entries = entries_of([("sim-0", Start("simulator", "", {})), *acted(10)])
    again = [dataclasses.replace(entry, received=entries[8].received + 5) for entry in (entries[0], *entries[9:12])]
    parts = [save("a.mcap", entries[:12]), save("a_1.mcap", [*again, *entries[12:]])]
    assert list(Session(parts).entries()) == entries


def test_the_files_of_a_resumed_run_form_one_session(acted: Make, save: Make) -> None:
    """The resumed run has other incarnations, so its messages have new numbers."""
    entries = entries_of(acted(6))
    resumed = [
        dataclasses.replace(
            entry, incarnation=1000, published=entry.published + SECOND, received=entry.received + SECOND
        )
        for entry in entries
    ]
    assert list(Session([save("a.mcap", entries), save("a_1.mcap", resumed)]).entries()) == [*entries, *resumed]
