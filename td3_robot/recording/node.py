"""``td3-robot record``: records a run (``--run DIR``) or a deployment (``OUT.mcap --config FILE``)."""

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
from td3_robot.recording.entries import CONFIG, METRICS, ON_THE_WAY_NS, Attachment
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.recorder import Recorder
from td3_robot.runtime.arguments import integer, node_parser, real
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.topics import RECORDER
from td3_robot.transport.link import PEER_TIMEOUT

log = logging.getLogger(__name__)

_PAUSE = 0.1
"""Seconds to sleep after a turn without messages. Messages collect in this time, and the next turn writes all of them.
This saves time, because waking up for each message takes more time than writing it."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_DRAIN = 10.0  # maximum time (s) that a supervised recorder waits at the end for the nodes' last messages
_DRAIN_CALLS = 100
"""Number of calls of ``receive`` after this wait, to take messages that have already arrived. The number is limited,
because without a supervisor the nodes continue to send."""
_SHORT_RING = (
    "the recorder notices a silent node only after %g s; by then, this short ring has dropped the node's last "
    "messages; use a longer ring"
)
_EXAMPLES = """examples:
  td3-robot record walk.mcap --run runs/walker2d
  td3-robot record walk.mcap --run runs/walker2d --split-mb 500
  td3-robot record robot.mcap --config robot.yaml
  td3-robot record walk.mcap --run runs/walker2d --weights-every 1000     (fewer policies, a smaller file)
  td3-robot record fault.mcap --run runs/walker2d --ring-s 30    (a failure, or kill -USR1, writes a file)

A training records itself with --set record=true.
"""
_OPTIONS = {
    "split_mb": "begin a new file after X megabytes; 0 for no limit",
    "split_s": "begin a new file after X seconds; 0 for no limit",
    "ring_s": "keep only the last X seconds; the recorder writes them when a node fails, goes to fault or disappears, "
    "and on SIGUSR1; 0 to record everything; the first file is OUT.mcap, the next OUT_1.mcap, …; not allowed with "
    "--split-mb or --split-s",
    "ring_mb": "maximum size of the ring, in megabytes",
    "weights_every": "record the learner's first policy and every X-th; 1: all; 0: none (default: 100); policies "
    "that a person loads are always recorded",
}
_TYPES = {"weights_every": integer()}


def main(arguments: Sequence[str] | None = None) -> int:
    about = (
        "Record the messages of a run, or of a deployed policy server and its robots. No node waits for the recorder."
    )
    parser = node_parser("td3-robot record", RECORDER, about, deployable=True, epilog=_EXAMPLES)
    words = "file to write (default: session.mcap in the folder of --run)"
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.mcap", help=words)
    words = "put this file into the recording"
    parser.add_argument("--attach", type=Path, action="append", default=[], metavar="FILE", help=words)
    for name, text in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_TYPES.get(name, real()), metavar="X", help=text)
    options = parser.parse_args(arguments)
    if options.config is not None and options.out is None:
        raise UsageError("--config needs OUT.mcap, the file to write")
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
    facts = facts_of_this_machine(node.config, attachments, deployed=node.folder is None)
    epoch = time.time_ns() - time.monotonic_ns()
    node.listen(RECORDER, {"node": (Record,)})
    config = _settings(node.config.record, options)
    recorder = Recorder(path, facts, config, epoch)
    if config.ring_s:
        names = f"{path}, then {path.stem}_1{path.suffix}, …"
        log.info(
            "keeping the last %g s; after a failure, fault, lost node or SIGUSR1, the recorder writes them to %s",
            config.ring_s,
            names,
        )
        if config.ring_s <= PEER_TIMEOUT:
            log.warning(_SHORT_RING, PEER_TIMEOUT)
    else:
        log.info("recording into %s", path)
    metrics: list[Attachment] = []
    try:
        _spin(node, recorder)
        _drain(node, recorder, _DRAIN if node.supervised else ON_THE_WAY_NS * 1e-9)
        if node.supervised:
            with contextlib.suppress(OSError):  # the run may end before its first metrics
                metrics.append(Attachment(METRICS, "application/jsonl", node.run.metrics_file.read_bytes()))
    except BaseException:
        with contextlib.suppress(OSError):  # raise the first error, not this one
            recorder.close(time.monotonic())
        raise
    recorder.close(time.monotonic(), metrics)
    if recorder.files:
        size = sum(file.stat().st_size for file in recorder.files) / 1e6
        names = ", ".join(map(str, recorder.files))
        log.info("recorded %d messages, %.1f MB: %s", recorder.counters["messages"], size, names)


def _spin(node: Node, recorder: Recorder) -> None:
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

    node.spin(recorder, busy=lambda: True, report=report, after=after)


def _keep_memory() -> None:
    """Make glibc keep freed memory, because getting new memory for each copy of a policy takes time."""
    with contextlib.suppress(AttributeError, OSError):  # the C library is not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 26)


def _drain(node: Node, recorder: Recorder, seconds: float) -> None:
    """Record the last messages, until every node has sent Bye, but at most for ``seconds``.

    A supervisor stops the recorder together with the other nodes of its run. Without a supervisor, the nodes continue.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and node.bus.peers(RECORDER):
        recorder.step(node.bus.receive(0.05), time.monotonic())
    for _ in range(_DRAIN_CALLS):  # messages may still wait if this process was paused until the deadline
        recorder.step(node.bus.receive(0.0), time.monotonic())
    if node.supervised and (silent := sorted(peer.name for peer in node.bus.peers(RECORDER))):
        log.warning("no Bye from %s: the last messages may be missing", ", ".join(silent))


def _settings(config: RecordConfig, options: argparse.Namespace) -> RecordConfig:
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    try:
        return convert({**to_builtins(config), **given}, RecordConfig)
    except ValidationError as error:
        raise UsageError(f"recording options {given}: {error}") from None


def _attachments(files: Sequence[Path]) -> list[Attachment]:
    """Read the files. The recorder itself adds the attachments CONFIG and METRICS."""
    taken: dict[str, Path] = {}
    for number, file in enumerate(files):
        if file in files[:number]:
            raise UsageError(f"--attach {str(file)!r} is given twice")
        if file.name in (CONFIG, METRICS):
            raise UsageError(
                f"--attach {str(file)!r}: the recorder itself attaches a file {file.name!r}; rename your file"
            )
        if file.name in taken:
            why = f"the attachment {str(taken[file.name])!r} already has the name {file.name!r}"
            raise UsageError(f"--attach {str(file)!r}: {why}; rename one of the two files")
        taken[file.name] = file
    try:
        return [Attachment(file.name, "application/octet-stream", file.read_bytes()) for file in files]
    except OSError as error:
        raise UsageError(f"--attach {str(error.filename)!r} cannot be read: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
