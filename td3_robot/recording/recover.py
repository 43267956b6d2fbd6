"""``td3-robot recover``: copies the intact data of a damaged recording to a new file, and reports the loss."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from td3_robot.errors import EXIT_GOOD, SessionError, UsageError
from td3_robot.messages import PROTOCOL_VERSION
from td3_robot.recording.decoder import Decoder
from td3_robot.recording.entries import Facts
from td3_robot.recording.info import Contents, by
from td3_robot.recording.session_file import SessionFile
from td3_robot.recording.writer import write
from td3_robot.runtime.arguments import Parser
from td3_robot.util.text import printable

EXIT_LOST = 3
_EXAMPLES = """examples:
  td3-robot recover session.mcap                     writes session.recovered.mcap
  td3-robot recover session.mcap --out mended.mcap

Exit codes:
  0  no message was lost. If FILE is whole, no new file is written. If only its index was damaged, the new file has
     a new index
  3  data may be lost, and the report lists the possible losses
"""


def recover(source: Path, target: Path) -> dict[str, Any]:
    """Copy the intact data of a damaged file to a new file, and report the loss as plain JSON values.

    If the file is not damaged, this function copies nothing.

    Raises:
        SessionError: the source cannot be read, is not a recording, has no intact data, or its protocol version cannot
            be found.
        OSError: the target exists or cannot be written.
    """
    file = SessionFile(source)
    contents = Contents(file)
    metadata, attachments, damages = contents.metadata, contents.attachments, file.all_damages
    kept = Counter({key: stream.count for key, stream in contents.streams.items()})
    gaps = Counter({key: stream.missing for key, stream in contents.streams.items()})
    missing: Counter[str] = Counter()
    for (publisher, _, topic), count in (gaps if file.counts is None else file.counts - kept).items():
        missing[f"{publisher}/{topic}"] += count
    assumed = bool(damages) and "protocol" not in metadata
    if damages:
        if not contents.messages and not attachments:
            raise SessionError(f"{str(source)!r} has no intact message and no intact attachment")
        if assumed:
            metadata = {**metadata, "protocol": _protocol(source)}
        write(target, Facts(metadata, attachments), file.entries())
    return {
        "metadata": {key: value for key, value in metadata.items() if key != "host"},
        "protocol_assumed": assumed,
        "whole": not damages,
        "lost": bool(file.damages),
        "damages": [{"byte": damage.offset, "why": damage.why} for damage in damages],
        "bytes_not_read": file.size - file.read,
        "messages_kept": contents.messages,
        "attachments_kept": [attachment.name for attachment in attachments],
        "index_known": file.counts is not None,
        "missing": dict(+missing),
        "last_s": {f"{publisher}/{topic}": s.last * 1e-9 for (publisher, _, topic), s in contents.streams.items()},
    }


def _protocol(source: Path) -> str:
    """Return the protocol version of this td3-robot if all messages fit it. Otherwise raise a SessionError."""
    if problems := Contents(SessionFile(source), Decoder(repr(str(source)))).problems:
        words = f"the protocol version of the recording was lost, and not all messages fit version {PROTOCOL_VERSION}"
        raise SessionError(f"{problems[0]}; {words}")
    return str(PROTOCOL_VERSION)


def main(arguments: Sequence[str]) -> int:
    about = "Make a whole recording from a damaged one."
    parser = Parser(prog="td3-robot recover", description=about, epilog=_EXAMPLES)
    parser.add_argument("file", type=Path, metavar="FILE", help="the damaged recording; it is not changed")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: NAME.recovered.mcap for NAME.mcap)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.file.is_dir():
        raise UsageError(f"{str(options.file)!r} is a folder; allowed: a file, such as session.mcap")
    target = options.out or options.file.with_suffix(f".recovered{options.file.suffix}")
    if target.exists():
        raise UsageError(f"{str(target)!r} exists already; name another --out")
    report = recover(options.file, target)
    print(json.dumps(report, indent=2) if options.json else text(report, options.file, target))
    return EXIT_LOST if report["lost"] else EXIT_GOOD


def text(report: dict[str, Any], source: Path, target: Path) -> str:
    if report["whole"]:
        return f"{source} is whole: nothing to recover, nothing written"
    kept = f"{report['messages_kept']} messages, {len(report['attachments_kept'])} attachments"
    lines = [f"{target}: {kept}, recorded {by(report['metadata'])}"]
    lines += [f"damaged at byte {damage['byte']}: {damage['why']}" for damage in report["damages"]]
    if report["protocol_assumed"]:
        protocol = report["metadata"]["protocol"]
        lines.append(
            f"the protocol version of the recording was lost; version {protocol} is assumed, because all messages fit "
            f"version {protocol}"
        )
    if not report["lost"]:
        lines.append("nothing is lost: only the index was damaged, and the new file has a new index")
        return "\n".join(map(printable, lines))
    if report["bytes_not_read"]:
        unwritten = ", and all data that the recorder has not written to the file" * (not report["index_known"])
        lines.append(f"lost: the last {report['bytes_not_read']} bytes of the file{unwritten}")
    lines += [f"lost: {count} messages of {name}" for name, count in report["missing"].items()]
    if not report["index_known"]:
        lines.append("the index is lost, so the last messages of each topic may be missing, too")
    return "\n".join(map(printable, lines))
