"""``td3-robot recover``: a whole file from a damaged one, and a report of what was lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from td3_robot.errors import EXIT_GOOD, SessionError, UsageError
from td3_robot.node import Parser
from td3_robot.session.entries import METADATA, Attachment, Entry, Facts, printable
from td3_robot.session.info import Contents, by
from td3_robot.session.reader import Metadata, SessionFile
from td3_robot.session.writer import SessionWriter

EXIT_LOST = 3
_EXAMPLES = """examples:
  td3-robot recover session.mcap                     writes session.recovered.mcap
  td3-robot recover session.mcap --out mended.mcap

Exit codes: 0 the file was whole, and nothing was written; 3 it was not, and the report says what is missing.
"""


def recover(source: Path, target: Path) -> dict[str, Any]:
    """Copy what is intact into a new file; what was lost, as plain JSON values. Writes nothing for a whole file.

    Raises:
        SessionError: the source is no session, or nothing in it is intact.
        OSError: the target exists or cannot be written.
    """
    file, contents = SessionFile(source), Contents()
    metadata: dict[str, str] = {}
    for item in file.items():
        if isinstance(item, Entry):
            contents.add(item)
        elif isinstance(item, Metadata) and item.name == METADATA:
            metadata = item.values
    lost = {
        "metadata": {key: value for key, value in metadata.items() if key != "host"},
        "whole": not file.damages,
        "damages": [{"byte": damage.offset, "why": damage.why} for damage in file.damages],
        "bytes_not_read": file.size - file.read,
        "messages_kept": len(contents.seen),
        "missing": {
            f"{publisher}/{topic}": stream.missing
            for (publisher, _, topic), stream in contents.streams.items()
            if stream.missing
        },
        "last_s": {f"{publisher}/{topic}": s.last * 1e-9 for (publisher, _, topic), s in contents.streams.items()},
    }
    if file.damages:
        if not contents.seen:
            raise SessionError(f"{str(source)!r}: no message in it is intact")
        _copy(file, target)
    return lost


def _copy(file: SessionFile, target: Path) -> None:
    writer: SessionWriter | None = None
    metadata: dict[str, str] = {}
    attachments: list[Attachment] = []
    for item in file.items():
        if isinstance(item, Metadata) and item.name == METADATA:
            metadata = item.values
        elif isinstance(item, Attachment):
            attachments.append(item)
        elif isinstance(item, Entry):
            writer = writer or SessionWriter(target, Facts(metadata), 0.0)
            writer.add(item)
    assert writer
    for attachment in attachments:
        writer.attach(attachment, 0)
    writer.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot recover",
        description="Make a whole recording from a damaged one.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the damaged recording; it is not changed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="what to write (default: FILE.recovered.mcap)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    target = options.out or options.file.with_suffix(f".recovered{options.file.suffix}")
    if target.exists():
        raise UsageError(f"{str(target)!r} exists already; name another --out")
    lost = recover(options.file, target)
    print(json.dumps(lost, indent=2) if options.json else text(lost, options.file, target))
    return EXIT_GOOD if lost["whole"] else EXIT_LOST


def text(lost: dict[str, Any], source: Path, target: Path) -> str:
    """The report for a person."""
    if lost["whole"]:
        return f"{source} is whole: nothing to recover, nothing written"
    lines = [f"{target}: {lost['messages_kept']} messages, recorded {by(lost['metadata'])}"]
    lines += [f"damaged at byte {damage['byte']}: {damage['why']}" for damage in lost["damages"]]
    if lost["bytes_not_read"]:
        lines.append(f"lost: {lost['bytes_not_read']} bytes at the end, and whatever came after them")
    lines += [f"lost: {count} messages of {name}" for name, count in lost["missing"].items()]
    return printable("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
