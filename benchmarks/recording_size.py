"""Measure size and processor time of a recording with all, some or none of its policies.

    python benchmarks/recording_size.py FILE [--rounds 3] [--json]

The benchmark reads the messages of FILE and gives them to new recorders. It gives them in groups of 0.1 s, because a
node sends its messages to a recorder every 0.1 s. FILE must hold every policy. The processor time does not include the
time to receive messages. To measure the figures in the documents, run:

    td3-robot train pendulum --steps 9000 --out run --set simulators=2 --set record=true \
        --set record.weights_every=1
    python benchmarks/recording_size.py run/session.mcap
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from td3_robot.bench import harness
from td3_robot.config.schema import Config, RecordConfig
from td3_robot.core_types import Input, Peer
from td3_robot.messages import Record
from td3_robot.recording.entries import Entry
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import Recorder
from td3_robot.transport import link as handshake

_SETTINGS = (1, 100, 0)  # values of record.weights_every: every policy, every 100th policy, no policy
_GROUP_NS = 100_000_000  # interval in ns at which a node sends its messages to a recorder


def main() -> int:
    parser = harness.Options(
        "python benchmarks/recording_size.py", "Measure size and cost of recordings.", ("run.mcap",)
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording with every policy")
    parser.number("--rounds", 3, "N", "recordings with each setting")
    options = parser.parse_args()
    session = Session([options.file])
    turns = [inputs(list(group)) for _, group in groupby(session.entries(), lambda it: it.received // _GROUP_NS)]
    count = sum(map(len, turns))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for every in _SETTINGS:
            path = Path(folder) / "again.mcap"
            seconds = statistics.median(record(turns, every, path, session.begin) for _ in range(options.rounds))
            size = path.stat().st_size
            results.append(
                {"weights_every": every, "mb": size / 1e6, "processor_us_per_message": seconds / count * 1e6}
            )
    report = {"machine": harness.describe("mcap", "msgspec", "zstandard"), "messages": count, "results": results}
    return harness.show(report, options.json, _lines)


def inputs(entries: Sequence[Entry]) -> list[Input]:
    """Return the messages in the form in which nodes send them to a recorder."""
    return [
        (
            Peer("recorder", b"k", handshake.hello("node", it.publisher, client=0, incarnation=it.incarnation), {}),
            Record(it.topic, it.link, it.sequence, it.published, it.payload),
        )
        for it in entries
    ]


def record(turns: Sequence[Sequence[Input]], every: int, path: Path, epoch: int) -> float:
    """Record the messages and return the processor time in s."""
    path.unlink(missing_ok=True)
    recorder = Recorder(path, facts_of_this_machine(Config()), RecordConfig(weights_every=every), epoch)
    begin = time.process_time()
    for number, turn in enumerate(turns):
        recorder.step(turn, number / 10)
    recorder.close(len(turns) / 10)
    return time.process_time() - begin


def _lines(report: harness.Report) -> Iterator[str]:
    yield f"{'weights_every':<16}{'MB':>10}{'µs per message':>18}"
    for row in report["results"]:
        yield f"{row['weights_every']:<16}{row['mb']:>10.2f}{row['processor_us_per_message']:>18.1f}"


if __name__ == "__main__":
    harness.run_script(main)
