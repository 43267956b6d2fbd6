"""The recorder drops repeated messages, splits a recording into files, and keeps the last seconds in a ring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.cli.main import main
from td3_robot.messages import Bye, Status, Weights
from td3_robot.recording.info import examine
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import free_name
from tests.sessions import BEGIN, Publisher

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Publisher]:
    return lambda **config: Publisher(tmp_path / "a.mcap", **config)


def weights(version: int) -> Weights:
    return Weights(version, 0, 0, "", b"")


def test_each_file_starts_with_the_newest_weights_if_a_recording_is_split_by_time(make: Make, make_step: Make) -> None:
    """Message n comes at n · 0.1 s. The first file ends with message 10, the first message after 0.95 s."""
    it = make(split_s=0.95)
    it.publish(weights(1), weights(2), weights(3), *(make_step(n) for n in range(12)))
    it.recorder.close(it.now)
    assert [path.name for path in it.recorder.files] == ["a.mcap", "a_1.mcap"]
    assert it.sequences("weights") == [[0, 1, 2], [1, 2]]
    assert it.sequences() == [list(range(8)), list(range(8, 12))]  # message 3 is Step 0
    assert it.recorder.counters["messages"] == 15
    assert len(list(Session(it.recorder.files).entries())) == 15
    # The second file begins at 1.0 s and ends with the last Step at 1.4 s. It repeats the two newest Weights. The
    # repeated Weights have the time 1.0 s in this file.
    first_file, second_file = (Session([path]) for path in it.recorder.files)
    assert first_file.begin == BEGIN
    assert first_file.end <= second_file.begin
    assert examine(second_file.paths[0])["duration_s"] == pytest.approx((second_file.end - second_file.begin) * 1e-9)
    assert examine(second_file.paths[0])["duration_s"] == pytest.approx(0.4, abs=1e-3)


def test_a_recording_is_split_by_size(make: Make, make_step: Make, rng: Any) -> None:
    it = make(split_mb=0.02)
    for number in range(60):
        it.publish(make_step(number, 40, observation=rng.normal(size=(40, 3)).astype("f4")))
    it.recorder.close(it.now)
    assert len(it.recorder.files) >= 2
    assert [number for file in it.sequences() for number in file] == list(range(60))
    # A file can exceed the limit of 20 kB by its last message (1.7 kB) and its index.
    assert all(path.stat().st_size < 25_000 for path in it.recorder.files)


def test_the_ring_writes_the_last_seconds_on_request(make: Make, make_step: Make) -> None:
    """The test requests a file at 4.0 s. The file holds the Steps since 3.0 s, and the newest Weights before them.

    It also holds the messages of the 0.5 s after the request, because a message can arrive up to 0.5 s late.
    Step n comes at 0.1 · (n + 1) s: Step 29 at 3.0 s, and Step 44 at 4.5 s.
    """
    it = make(ring_s=1.0)
    it.publish(weights(1), *(make_step(n) for n in range(40)))
    assert it.recorder.files == []
    it.recorder.trigger("asked")
    it.recorder.step([], it.now)
    assert it.recorder.files == []
    it.publish(*(make_step(n) for n in range(40, 50)))
    (steps,) = it.sequences()
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert 44 <= steps[-1] <= 45
    assert 29 <= steps[0] <= 30
    assert it.sequences("weights") == [[0]]
    assert 1.4 < examine(it.recorder.files[0])["duration_s"] < 1.7  # the older weights do not extend the time range
    it.recorder.close(it.now)
    assert len(it.recorder.files) == 1


@pytest.mark.parametrize(
    ("reason", "files"),
    [("stopped", 0), ("connected anew", 0), ("silent for 2.0 s", 1), ("replaced by a later incarnation", 1)],
)
def test_the_ring_writes_a_file_if_a_node_is_lost_but_not_if_it_stops_or_reconnects(
    make: Make, make_step: Make, reason: str, files: int
) -> None:
    """If a node disappears, the link makes a Bye with the reason."""
    it = make(ring_s=1.0)
    it.publish(*(make_step(n) for n in range(20)))
    it.recorder.step([(it.peer, Bye(reason))], it.now)
    it.publish(*(make_step(n) for n in range(20, 30)))
    assert len(it.recorder.files) == files


def test_a_ring_without_an_event_logs_that_nothing_was_written(
    make: Make, make_step: Make, caplog: Any, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    it = make(ring_s=1.0)
    it.publish(make_step(0))
    it.recorder.close(it.now)
    path = tmp_path / "a.mcap"
    assert caplog.messages == [f"nothing was written to {path}: there was no failure, fault, lost node or SIGUSR1"]
    assert not path.exists()


def test_sigusr1_without_a_ring_logs_that_it_has_no_effect(make: Make, caplog: Any) -> None:
    caplog.set_level("INFO")
    it = make()
    it.recorder.trigger("SIGUSR1")
    it.recorder.close(it.now)
    assert caplog.messages == [
        "ignored the trigger (SIGUSR1): without --ring-s, the recorder writes each message immediately"
    ]


def test_the_ring_writes_one_file_for_a_fault_and_one_for_a_later_fault(make: Make, make_step: Make) -> None:
    it = make(ring_s=1.0)
    failed = Status("sim-0", "failed", "it fell", {}, {})
    it.publish(*(make_step(n) for n in range(20)), failed, failed, *(make_step(n) for n in range(20, 26)))
    assert len(it.recorder.files) == 1  # the second fault arrives before the first file is written
    it.publish(failed, *(make_step(n) for n in range(26, 30)))
    assert len(it.recorder.files) == 1  # the recorder writes at most one file per second (ring_s)
    it.publish(*(make_step(n) for n in range(30, 50)))
    assert len(it.recorder.files) == 2  # the second file contains the third fault
    it.recorder.close(it.now)
    assert len(it.recorder.files) == 2
    assert [examine(file)["metadata"]["written_because"] for file in it.recorder.files] == ["sim-0 failed: it fell"] * 2
    first, second = it.sequences()
    assert first[-1] >= second[0]  # the files overlap, but a Session of both files gives each message once
    steps = [message.sequence for _, message in Session(it.recorder.files).messages(("step",))]
    assert steps == list(range(first[0], second[-1] + 1))
    assert sum(Session(it.recorder.files).counts.values()) == len(list(Session(it.recorder.files).entries()))


def test_a_reason_with_a_newline_stays_on_one_line(make: Make, make_step: Make, caplog: Any, capsys: Any) -> None:
    caplog.set_level("INFO")
    it = make(ring_s=1.0)
    it.publish(*(make_step(n) for n in range(3)), Status("sim-0", "failed", "a\nb", {}, {}), make_step(3))
    it.recorder.close(it.now)
    (path,) = it.recorder.files
    assert caplog.messages == [f"wrote the last 1 s to {path}: 'sim-0 failed: a\\nb'"]
    assert examine(path)["metadata"]["written_because"] == "sim-0 failed: a\nb"
    assert main(["info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "written because of 'sim-0 failed: a\\nb'" in lines
    assert any(line.endswith("once: 'sim-0 failed: a\\nb'") for line in lines)
    without_ring = Publisher(path.with_name("b.mcap"))
    without_ring.recorder.trigger("a\nb")
    assert "ignored the trigger ('a\\nb')" in caplog.messages[-1]
    without_ring.recorder.close(0.0)


def test_closing_the_recorder_writes_the_ring_if_a_trigger_is_pending(make: Make, make_step: Make) -> None:
    """The first fault, at 0.1 s, causes a file at 0.6 s. The next file can come only 10 s later.

    So the trigger of the second fault, at 0.8 s, is pending when the recorder closes.
    """
    it = make(ring_s=10.0)
    failed = Status("sim-0", "failed", "", {}, {})
    it.publish(make_step(0), failed, *(make_step(n) for n in range(1, 7)), failed, make_step(7))
    it.recorder.close(it.now)
    first, second = it.sequences()
    assert first in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
    assert second == list(range(8))


def test_the_ring_has_a_memory_limit(make: Make, make_step: Make) -> None:
    it = make(ring_s=100.0, ring_mb=0.01)
    it.publish(*(make_step(n) for n in range(100)))
    assert it.recorder.counters["ring_too_small"] > 0
    assert it.recorder._ring_bytes <= 0.01e6


def test_repeated_and_missing_messages_are_counted(make: Make, make_step: Make) -> None:
    it = make()
    it.publish(make_step(0), make_step(1))
    it.sequence["step"] = 0
    it.publish(make_step(1))  # repeats Step 1
    it.sequence["step"] = 4
    it.publish(make_step(5))  # Steps 2 to 4 are missing
    it.recorder.close(it.now)
    assert it.sequences() == [[0, 1, 5]]
    assert (it.recorder.counters["repeated"], it.recorder.counters["missed"]) == (1, 3)


def test_the_recorder_overwrites_no_file(tmp_path: Path, make: Make) -> None:
    (tmp_path / "a.mcap").write_text("precious")
    (tmp_path / "a_1.mcap").write_text("too")
    assert free_name(tmp_path / "a.mcap").name == "a_2.mcap"
    make().recorder.close(0.0)
    assert (tmp_path / "a.mcap").read_text() == "precious"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["run/config.yaml"],
            "the recorder itself attaches a file 'config.yaml'; rename your file",
        ),
        (
            ["run/metrics.jsonl"],
            "the recorder itself attaches a file 'metrics.jsonl'; rename your file",
        ),
        (
            ["a/notes", "b/other", "b/notes"],
            "the attachment 'a/notes' already has the name 'notes'; rename one of the two files",
        ),
    ],
)
def test_attachments_need_unique_names(names: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    attach = [word for name in names for word in ("--attach", name)]
    assert main(["record", "a.mcap", "--run", "none", *attach]) == 2
    assert capsys.readouterr().err == f"td3-robot record: --attach {names[-1]!r}: {words}\n"


def test_a_file_cannot_be_attached_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "a.mcap", "--run", "none", "--attach", "b/notes", "--attach", "b/notes"]) == 2
    assert capsys.readouterr().err == "td3-robot record: --attach 'b/notes' is given twice\n"
