"""The recorder process of a run (``td3-robot record [OUT.mcap] --run DIR``), or beside a deployed policy server
(``td3-robot record OUT.mcap --config FILE``)."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import ValidationError, convert, to_builtins

from td3_robot.config.schema import RecordConfig
from td3_robot.errors import UsageError
from td3_robot.messages import Record
from td3_robot.recording.entries import CONFIG, METRICS, ON_THE_WAY_NS, Attachment, facts_of_this_machine
from td3_robot.recording.recorder import Recorder
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.topics import RECORDER
from td3_robot.transport.link import PEER_TIMEOUT

log = logging.getLogger(__name__)

_PAUSE = 0.1  # seconds between two looks at what has come: to be woken by each message costs more than to write it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LAST_WORDS = 10.0  # seconds that nodes which stop together with us have for their last messages
_LAST_LOOKS = 100  # of some hundred messages each
_EXAMPLES = """examples:
  td3-robot record walk.mcap --run runs/walker2d
  td3-robot record walk.mcap --run runs/walker2d --split-mb 500
  td3-robot record leg.mcap --config robot.yaml      (endpoints.recorder must be the same for who is to be recorded)
  td3-robot record fault.mcap --run runs/walker2d --ring-s 30    (then: kill -USR1 of it, or a fault, writes a file)

A training records itself with --set record=true.
"""
_OPTIONS = {
    "split_mb": "begin a new file after so many megabytes",
    "split_s": "begin a new file after so many seconds",
    "ring_s": "keep only the last so many seconds; write them on a fault or SIGUSR1 (not beside --split-…)",
    "ring_mb": "memory for that, in megabytes",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = node_parser(
        "record",
        RECORDER,
        "Record what the nodes of a run, or a deployed policy server and its robots, publish; none of them waits.",
        deployable=True,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "out",
        nargs="?",
        type=Path,
        metavar="OUT.mcap",
        help="file to write (default, with --run: session.mcap in there)",
    )
    parser.add_argument(
        "--attach", type=Path, action="append", default=[], metavar="FILE", help="put this file into the recording"
    )
    for name, text in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=text)
    options = parser.parse_args(arguments)
    if options.config is not None and options.out is None:
        raise UsageError("OUT.mcap is needed with --config: where to record to")
    if options.out and options.out.exists():
        raise UsageError(f"{str(options.out)!r} exists already; name another file")
    if options.out and not options.out.parent.is_dir():
        raise UsageError(f"{str(options.out)!r}: the folder {str(options.out.parent)!r} does not exist")
    _settings(RecordConfig(), options)
    attachments = _attachments(options.attach)
    return run_node(RECORDER, options, lambda node: _record(node, options, attachments))


def _record(node: Node, options: argparse.Namespace, attachments: Sequence[Attachment]) -> None:
    _keep_memory()
    path = options.out or node.run.path / "session.mcap"
    facts = facts_of_this_machine(node.config, attachments)
    epoch = time.time_ns() - time.monotonic_ns()
    node.serve(RECORDER, {"node": (Record,)})
    config = _settings(node.config.record, options)
    recorder = Recorder(path, facts, config, epoch)
    if config.ring_s:
        log.info("keeping the last %g s, to be written to %s on a fault or SIGUSR1", config.ring_s, path)
        if config.ring_s <= PEER_TIMEOUT:
            log.warning("that a node is silent is noticed after %g s: its last words are not kept", PEER_TIMEOUT)
    else:
        log.info("recording into %s", path)
    triggered: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: triggered.append(number))

    taken = 0

    def after() -> bool:
        nonlocal taken
        if triggered:
            triggered.clear()
            recorder.trigger("SIGUSR1")
        if taken == recorder.counters["messages"]:
            time.sleep(_PAUSE)
        taken = recorder.counters["messages"]
        return False

    def report() -> Figures:
        return Figures(figures={"files": float(len(recorder.files))}, counters=dict(recorder.counters))

    known_now: list[Attachment] = []
    try:
        node.spin(recorder, busy=lambda: True, report=report, after=after)
        _hear_last_words(node, recorder, _LAST_WORDS if node.supervised else ON_THE_WAY_NS * 1e-9)
        if node.supervised:
            with contextlib.suppress(OSError):  # a run that ends before there is any
                known_now.append(Attachment(METRICS, "application/jsonl", node.run.metrics_file.read_bytes()))
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong first is what is to be said
            recorder.close(time.monotonic())
        raise
    recorder.close(time.monotonic(), known_now)


def _keep_memory() -> None:
    """Let glibc keep what it was given back: else the kernel clears new pages for every copy of a policy, which takes
    as long as to write it down."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 26)


def _hear_last_words(node: Node, recorder: Recorder, seconds: float) -> None:
    """Stay until the last of the others has said Bye, or the time is over.

    Those that are stopped together with us have more to say; of those that go on, this is what they have gathered.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and node.bus.peers(RECORDER):
        recorder.step(node.bus.receive(0.05), time.monotonic())
    for _ in range(_LAST_LOOKS):  # at what has come by now, however long we stood still
        recorder.step(node.bus.receive(0.0), time.monotonic())
    if node.supervised and (silent := sorted(peer.name for peer in node.bus.peers(RECORDER))):
        log.warning("no last word of %s: the end of what was said may be missing", ", ".join(silent))


def _settings(config: RecordConfig, options: argparse.Namespace) -> RecordConfig:
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    try:
        return convert({**to_builtins(config), **given}, RecordConfig)
    except ValidationError as error:
        raise UsageError(f"recording options {given}: {error}") from None


def _attachments(files: Sequence[Path]) -> list[Attachment]:
    """They are told apart by their names, and from what every recording has."""
    taken = {CONFIG: "the recording's own is", METRICS: "the recording's own is"}
    for number, file in enumerate(files):
        if file in files[:number]:
            raise UsageError(f"--attach {str(file)!r} is given twice")
        if file.name in taken:
            raise UsageError(f"--attach {str(file)!r}: {taken[file.name]} called {file.name!r}; give it another name")
        taken[file.name] = f"{str(file)!r} is"
    return [_attachment(file) for file in files]


def _attachment(file: Path) -> Attachment:
    try:
        return Attachment(file.name, "application/octet-stream", file.read_bytes())
    except OSError as error:
        raise UsageError(f"--attach {str(file)!r} cannot be read: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
