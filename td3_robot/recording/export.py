"""``td3-robot export``: writes a recording as tables, as messages of ROS 2 or Foxglove, or as a Minari dataset."""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.errors import EXIT_GOOD, SessionError, UsageError
from td3_robot.messages import MESSAGES, Message, wire_fields
from td3_robot.recording import viewer_file
from td3_robot.recording.entries import Entry
from td3_robot.recording.poses import read_links
from td3_robot.recording.reader import Session
from td3_robot.recording.values import Names, names_of
from td3_robot.recording.values import rows as by_robot
from td3_robot.runtime.arguments import Parser, make_folder
from td3_robot.runtime.progress import Working
from td3_robot.util import files
from td3_robot.util.text import printable

_BATCH = 5000  # number of rows to write to a Parquet file together
_VIEWERS = ("ros2", "foxglove")  # formats for viewers, see ros2_messages.py and foxglove_messages.py
_EXAMPLES = """examples:
  td3-robot export session.mcap --out tables
  td3-robot export session.mcap --out tables --format parquet --topics step action
  td3-robot export session.mcap --out bag --format ros2          bag/ros2.mcap, for ROS 2 tools
  td3-robot export session.mcap --out viewer --format foxglove   viewer/foxglove.mcap, for Foxglove and Lichtblick
  td3-robot export session.mcap --out ~/.minari/datasets --format minari --dataset walker2d/mine-v0

Each topic becomes a table. A message about several robots has a row for each robot. Each channel is a column.
Maps and lists become JSON text. For a field of bytes, the table holds the number of bytes.
"""

Row = dict[str, Any]


class CsvTable:
    """A CSV file with a header line. ``columns`` maps the name of each column to its type."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        writer = csv.DictWriter(self._file, list(columns))
        writer.writeheader()
        self.add: Callable[[Row], object] = writer.writerow
        self.close = self._file.close


class ParquetTable:
    """A Parquet file, with the methods of :class:`CsvTable`."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._table = pyarrow.Table.from_pylist
        self._schema = pyarrow.schema({name: getattr(pyarrow, kind)() for name, kind in columns.items()})
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._table(self._rows, schema=self._schema))
            self._rows.clear()


_HEAD = {
    "received_s": "float64",
    "published_s": "float64",
    "publisher": "string",
    "publisher_incarnation": "uint64",
    "message": "uint64",
    "row": "uint64",
}
_TYPES = {"u32": "uint32", "u64": "uint64", "i64": "int64", "f64": "float64", "bytes": "uint64"}


def _columns(row: Row, message: Message) -> dict[str, str]:
    """The Arrow type of each column in a message's row. The column of a channel has the name FIELD.NAME."""
    types = dict(_HEAD)
    for name, wire in wire_fields(type(message)).items():
        types[name] = np.dtype(wire.dtype).name if wire.kind == "array" else _TYPES.get(wire.kind, "string")
    return {name: types[name.partition(".")[0]] for name in row}


Table = CsvTable | ParquetTable
FORMATS: dict[str, type[Table]] = {"csv": CsvTable, "parquet": ParquetTable}


def rows(entry: Entry, message: Message, names: Mapping[str, Names]) -> Iterator[Row]:
    """The rows of a message. Each row has the columns of _HEAD.

    The other columns come from :func:`td3_robot.recording.values.rows`. Messages without arrays have no column ``row``.
    """
    head: Row = {
        "received_s": entry.received * 1e-9,
        "published_s": entry.published * 1e-9,
        "publisher": entry.publisher,
        "publisher_incarnation": entry.incarnation,
        "message": entry.sequence,
    }
    wires = wire_fields(type(message))
    arrays = [name for name, wire in wires.items() if wire.kind == "array"]
    for index, values in enumerate(by_robot(message, names.get(getattr(message, "source", ""), {}))):
        row = {**head, "row": index} if arrays else dict(head)
        for name, value in values.items():
            if name in arrays and isinstance(value, dict):
                row |= {f"{name}.{label}": item for label, item in value.items()}
            else:
                row[name] = _plain(value)
        yield row


def _plain(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, default=len)  # bytes become their length
    return len(value) if isinstance(value, bytes) else value


def export(session: Session, folder: Path, form: str, topics: Sequence[str]) -> Counter[str]:
    """Write the tables. Returns the number of rows of each topic. If writing a table fails, no existing file changes.

    Raises:
        SessionError: the recording is damaged, or its robots have different channels.
        OSError: a table cannot be written.
    """
    names = check_one_kind(session, topics)
    counts: Counter[str] = Counter()
    # Close all tables before the first file is replaced: a full disk can make the last writes fail.
    with contextlib.ExitStack() as outputs, contextlib.ExitStack() as opened:
        tables: dict[str, Table] = {}
        for entry, message in session.messages(topics):
            for row in rows(entry, message, names):
                if entry.topic not in tables:
                    path = outputs.enter_context(files.replacing(folder / f"{entry.topic}.{form}"))
                    tables[entry.topic] = FORMATS[form](path, _columns(row, message))
                    opened.callback(tables[entry.topic].close)
                tables[entry.topic].add(row)
                counts[entry.topic] += 1
    return counts


def check_one_kind(session: Session, topics: Sequence[str]) -> dict[str, Names]:
    """Check that each topic's table can hold the rows of all robots. Returns the channel names of each source.

    Args:
        topics: topics of the tables; empty for all topics.

    Raises:
        SessionError: a table has channels as columns, and the robots have different channels.
    """
    names = _names(session)
    if not any(_has_channels(topic) for _, _, topic in session.counts if not topics or topic in topics):
        return names
    for (first, wanted), (source, found) in itertools.pairwise(names.items()):
        for size in wanted:
            for one, other in itertools.zip_longest(wanted[size], found[size]):
                if one != other:
                    raise SessionError(
                        f"{str(session.paths[0])!r} holds two kinds of robots with different columns: "
                        f"at the same index, {first!r} has {_channel(one)} and {source!r} has {_channel(other)}; "
                        "choose other --topics"
                    )
    return names


def _channel(name: str | None) -> str:
    return "no channel" if name is None else f"channel {name!r}"


def _names(session: Session) -> dict[str, Names]:
    """The channel names of each source.

    A source without a recorded Hello gets the names of another source with the same number of channels. If there is no
    such source, the names are numbers.
    """
    recorded = {entry.publisher: names for entry, hello in session.robots() if (names := names_of(hello)) is not None}

    def of(source: str, size: str, count: int) -> Sequence[str]:
        known = (names.get(size, ()) for names in (recorded.get(source, {}), *recorded.values()))
        return next((names for names in known if len(names) == count), [str(channel) for channel in range(count)])

    return {
        source: {size: of(source, size, sizes[size]) for size in ("O", "A")}
        for source, sizes in session.decode.sizes.items()
    }


def _has_channels(topic: str) -> bool:
    wires = wire_fields(MESSAGES[topic]).values() if topic in MESSAGES else ()
    return any(wire.kind == "array" and len(wire.shape) > 1 for wire in wires)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    minari: Any = None
    if options.format == "minari":
        # This module needs an extra. Also, td3_robot never imports td3_robot_sims statically.
        minari = importlib.import_module("td3_robot_sims.minari_export")
    with Working(text := f"export {options.files[0]}") as working:
        session = Session(options.files)
        working.show(text, lambda: session.read_share)
        counts, lines = _export(session, options, minari)
    print(json.dumps(counts) if options.json else "\n".join(lines))
    return EXIT_GOOD


def _export(session: Session, options: argparse.Namespace, minari: Any) -> tuple[Counter[str], list[str]]:
    """Write the files. Returns the counts, and the lines of the report."""
    session.require(options.topics)
    out: Path = options.out
    if minari:
        name = options.dataset or minari.name_of(session.paths[0])
        minari.check_name(name)
        _prepare_folder([out / name], options)
        counts = minari.export(session, out, name)
        lines = [f"{out / name}: {minari.summary(counts)}"]
    elif options.format in _VIEWERS:
        module = importlib.import_module(f"td3_robot.recording.{options.format}_messages")  # needs an extra
        converter = module.Converter()
        path = out / f"{options.format}.mcap"
        layout = out / f"{options.format}_layout.json"
        _prepare_folder([path, layout], options)
        counts, remarks = viewer_file.export(session, path, converter)
        if content := converter.layout():
            files.write_atomically(layout, content)
        lines = viewer_file.summary(counts)
        for remark in remarks:
            print(printable(remark), file=sys.stderr)
    else:
        topics = options.topics or {topic for _, _, topic in session.counts}
        if unknown := sorted(set(topics) - MESSAGES.keys()):  # a hostile topic could name a file outside the folder
            what = f"holds the topic {unknown[0]!r}, which this version does not know"
            raise SessionError(f"{str(session.paths[0])!r} {what}; select others with --topics")
        _prepare_folder([out / f"{topic}.{options.format}" for topic in topics], options)
        counts = export(session, out, options.format, options.topics)
        lines = [f"{out / topic}.{options.format}: {count} rows" for topic, count in counts.items()]
    return counts, lines


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    about = "Write a recording as tables, as messages of ROS 2 or Foxglove, or as a Minari dataset."
    parser = Parser(prog="td3-robot export", description=about, epilog=_EXAMPLES)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a recording, or its parts")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files, made if missing")
    parser.add_argument("--format", default="csv", choices=[*FORMATS, *_VIEWERS, "minari"], help="(default: csv)")
    parser.add_argument("--dataset", metavar="NAME-vN", help="name for --format minari (default: FILE-v0)")
    parser.add_argument(
        "--links",
        metavar="FILE",
        help="for --format foxglove: file that describes the links (rigid parts) of your robot",
    )
    parser.add_argument("--topics", nargs="+", default=[], metavar="TOPIC", help="(default: all)")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    words = "print the numbers of rows, messages or episodes as one JSON object"
    parser.add_argument("--json", action="store_true", help=words)
    options = parser.parse_args(arguments)
    if options.links and options.format != "foxglove":
        raise UsageError(f"--links draws a robot; it needs --format foxglove, not {options.format}")
    if options.links:
        read_links(options.links)
    if unknown := sorted(set(options.topics) - MESSAGES.keys()):
        raise UsageError(f"--topics: {unknown[0]!r} is not a topic; allowed: {', '.join(MESSAGES)}")
    if options.topics and options.format not in FORMATS:
        raise UsageError(f"--topics selects tables; --format {options.format} writes no tables")
    if options.dataset and options.format != "minari":
        raise UsageError(f"--dataset names a Minari dataset; it needs --format minari, not {options.format}")
    return options


def _prepare_folder(targets: Sequence[Path], options: argparse.Namespace) -> None:
    """Check the targets, and make the folder of ``--out``.

    Raises:
        UsageError: a target is a recording to export, or contains one; or a target exists and ``--force`` is not given;
            or the folder cannot be made.
    """
    existing = sorted(target for target in targets if target.exists())
    recordings = [place for path in options.files for place in (path.resolve(), *path.resolve().parents)]
    if own := [target for target in existing if target.resolve() in recordings]:
        raise UsageError(f"{str(own[0])!r} is a recording to export, or contains one; name another --out")
    if existing and not options.force:
        raise UsageError(f"{str(existing[0])!r} exists already; to replace it, add --force; or name another --out")
    make_folder("--out", options.out)
