"""The rows of the replay buffer in a file, and the journal of these rows.

Recorded rows outlive a killed process. The next process refuses a damaged journal, and a file of rows with a wrong
size. It accepts a journal that is truncated after its header, and a journal that ends with zeros. Nothing checks the
content of the rows.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from td3_robot.errors import BundleError
from td3_robot.learner.replay_buffer import storage
from td3_robot.learner.replay_buffer.buffer import ReplayBuffer
from td3_robot.learner.replay_buffer.storage import File, Note, Storage

WIDTH = 10  # numbers in a row: observation (3), action (2), reward, discount, next observation (3)


def note(total: int, source: str = "sim-0") -> Note:
    return Note(total, total, source, {"answered": total}, {"total": total})


def rows(first: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.repeat(np.arange(first, first + count, dtype=np.float32)[:, None], WIDTH, 1)


def test_a_reopened_file_holds_its_rows_and_notes(tmp_path: Path) -> None:
    file = File(tmp_path, 8, WIDTH)
    file.write(2, rows(20, 3))
    file.commit(note(3))
    file.commit(note(5, "sim-1"))
    file.close()
    again = File(tmp_path, 8, WIDTH)
    assert again.rows[:, 0].tolist() == [0, 0, 20, 21, 22, 0, 0, 0]
    assert again.notes == {"sim-0": note(3), "sim-1": note(5, "sim-1")}
    again.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(cut=st.integers(0, 400), flip=st.integers(0, 2000))
def test_a_truncated_journal_is_read_and_a_damaged_journal_is_refused(
    cut: int, flip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated journal gives the complete notes before the cut. A changed bit makes the process refuse the journal.

    There are two exceptions. The changed bit may be in the truncated record, which is lost anyway. Or it makes the
    length field of the last complete record larger. That record then looks like a truncated record, and is lost.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)  # fsync is slow on a busy disk
    for old in tmp_path.iterdir():
        old.unlink()
    file = File(tmp_path, 8, WIDTH)
    sizes = [(tmp_path / "journal").stat().st_size]
    for total in range(1, 6):
        file.commit(note(total))
        sizes.append((tmp_path / "journal").stat().st_size)
    file.close()
    content = bytearray((tmp_path / "journal").read_bytes()[: max(sizes[0], sizes[-1] - cut)])
    place = sizes[0] * 8 + flip
    if place < 8 * len(content):
        content[place // 8] ^= 1 << place % 8
    (tmp_path / "journal").write_bytes(content)
    whole = max(number for number, size in enumerate(sizes) if size <= len(content))
    byte, changed = place // 8, place < 8 * len(content)
    hit = max(number for number, size in enumerate(sizes) if size <= byte)
    try:
        again = File(tmp_path, 8, WIDTH)
    except BundleError as error:
        refusal = str(error)
        assert changed
        assert f"journal' is damaged at byte {sizes[hit]}; restore it" in refusal
        assert (tmp_path / "journal").read_bytes() == content
        return
    if changed:
        assert hit == whole or (hit == whole - 1 and byte < sizes[hit] + 4)
        whole = hit
    assert again.notes == ({"sim-0": note(whole)} if whole else {})
    again.commit(note(9))
    again.close()
    third = File(tmp_path, 8, WIDTH)
    assert third.notes == {"sim-0": note(9)}
    third.close()


@pytest.mark.parametrize("left", [None, 0, 8 * WIDTH * 4 - 100])
def test_missing_rows_are_not_replaced_by_zeros(left: int | None, tmp_path: Path) -> None:
    """A file of 8 rows of 10 numbers of 4 bytes has 320 bytes."""
    file = File(tmp_path, 8, WIDTH)
    file.write(0, rows(1, 3))
    file.commit(note(3))
    file.close()
    path = tmp_path / "rows.float32"
    path.write_bytes(path.read_bytes()[:left]) if left is not None else path.unlink()
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    for _ in range(2):  # the first try must not create a file that the second try accepts
        with pytest.raises(BundleError, match=f"rows.float32' has {left or 0} bytes, and this run needs 320: "):
            File(tmp_path, 8, WIDTH)
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_needed_but_missing_rows_raise_an_error_only_if_recovers_is_true(tmp_path: Path) -> None:
    """If ``recovers`` is True, File raises an error and creates nothing. If it is False, File starts without rows."""
    for _ in range(2):
        with pytest.raises(BundleError, match=r"rows.float32' has 0 bytes, and this run needs 320"):
            File(tmp_path / "replay", 8, WIDTH, needed=True)
        assert list(tmp_path.iterdir()) == []
    File(tmp_path / "replay", 8, WIDTH, recovers=False, needed=True).close()


def test_zeros_at_the_end_of_a_journal_are_ignored(tmp_path: Path) -> None:
    file = File(tmp_path, 8, WIDTH)
    file.commit(note(3))
    file.close()
    with (tmp_path / "journal").open("ab") as journal:
        journal.write(bytes(5000))
    again = File(tmp_path, 8, WIDTH)
    assert again.notes == {"sim-0": note(3)}
    again.close()


def test_without_a_journal_the_buffer_has_the_rows_that_the_checkpoint_counts(
    tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """The file holds 15 rows, and the checkpoint counts the first ten of them. The journal is lost.

    If a journal records fewer rows than the checkpoint counts, the buffer raises an error.
    """

    def opened() -> ReplayBuffer:
        return ReplayBuffer(50, 3, 2, 7, lambda *size: File(tmp_path, *size))

    buffer = opened()
    content = rng.normal(size=(15, 8)).astype(np.float32)

    def add(part: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        buffer.add(part[:, :3], part[:, 3:5], part[:, 5], part[:, 5:], part[:, 0] > 0)

    add(content[:10])
    arrays, scalars = buffer.state()
    drawn = buffer.sample(16).reward.tolist()
    add(content[10:])
    buffer.storage.commit(note(15))
    (tmp_path / "journal").unlink()
    again = opened()
    again.restore(arrays, scalars)
    again.recover()
    assert again.total_added == 10
    assert again.sample(16).reward.tolist() == drawn
    assert "the replay file has no journal; the checkpoint counts 10 transitions" in caplog.text
    again.storage.commit(note(9))
    third = opened()
    with pytest.raises(BundleError, match=r"counts 10 transitions, but the journal .* records 9; to continue"):
        third.restore(arrays, scalars)


def test_an_incomplete_write_of_a_note_raises_an_error_and_keeps_earlier_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk accepts five bytes at a time. It becomes full during the second note."""
    room, real = [10_000], os.pwrite

    def write(descriptor: int, content: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(descriptor, content[: min(5, room[0])], offset)
        room[0] -= taken
        return taken

    file = File(tmp_path, 8, WIDTH)
    monkeypatch.setattr(os, "pwrite", write)
    file.commit(note(1))
    room[0] = 7
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'journal'}'"):
        file.commit(note(2))
    file.close()
    monkeypatch.undo()
    again = File(tmp_path, 8, WIDTH)
    assert again.notes == {"sim-0": note(1)}
    again.close()


def test_the_journal_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_COMPACT", 1000)
    file = File(tmp_path, 8, WIDTH)
    for total in range(1, 500):
        file.commit(note(total, f"sim-{total % 3}"))
        assert (tmp_path / "journal").stat().st_size <= 1000
    file.close()
    again = File(tmp_path, 8, WIDTH)
    assert sorted(item.total_added for item in again.notes.values()) == [497, 498, 499]
    again.close()


def test_another_shape_or_an_empty_journal_is_refused(tmp_path: Path) -> None:
    File(tmp_path, 8, WIDTH).close()
    for shape in ((9, WIDTH), (8, WIDTH + 1)):
        with pytest.raises(BundleError, match="capacity"):
            File(tmp_path, *shape)
    (tmp_path / "journal").write_bytes(b"")
    with pytest.raises(BundleError, match=r"has the header \{\}; this run needs"):
        File(tmp_path, 8, WIDTH)


def test_buffers_in_memory_and_in_a_file_give_equal_batches(tmp_path: Path, rng: np.random.Generator) -> None:
    """The test adds 131 rows to each of two buffers. Both have room for 50 rows, so they overwrite old rows.

    All batches are equal bit for bit. A new buffer opens the same file and restores the state of the earlier buffer. It
    also gives the same batch.
    """
    buffers = [ReplayBuffer(50, 3, 2, 7), ReplayBuffer(50, 3, 2, 7, lambda *size: File(tmp_path / "a", *size))]
    for count in (1, 30, 30, 70):
        content = rng.normal(size=(count, 8)).astype(np.float32)
        for buffer in buffers:
            buffer.add(content[:, :3], content[:, 3:5], content[:, 5], content[:, 5:], content[:, 0] > 0)
        batches = [[tensor.numpy().tobytes() for tensor in buffer.sample(16)] for buffer in buffers]
        assert batches[0] == batches[1]
    arrays, scalars = buffers[1].state()
    assert arrays == {}
    with pytest.raises(BundleError, match="counts 131 transitions, but the journal of the replay file records 0"):
        ReplayBuffer(50, 3, 2, 0, lambda *size: File(tmp_path / "b", *size)).restore(arrays, scalars)
    buffers[1].storage.commit(note(131))
    again = ReplayBuffer(50, 3, 2, 0, lambda *size: File(tmp_path / "a", *size))
    again.restore(arrays, scalars)
    assert again.sample(16).reward.tolist() == buffers[0].sample(16).reward.tolist()


CHILD = """
import sys
from pathlib import Path
import numpy as np
from td3_robot.learner.replay_buffer.storage import File, Note
file = File(Path(sys.argv[1]), 1000, 10)
for total in range(1, 10**9):
    file.write((total - 1) % 1000, np.full((1, 10), total, np.float32))
    file.commit(Note(total, total, "sim-0", {}, {}))
    if total == 3000:
        print("ready", flush=True)
"""


def test_a_killed_process_loses_no_recorded_row(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout
    assert child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    file = File(tmp_path, 1000, WIDTH)
    total = file.notes["sim-0"].total_added
    assert total >= 3000
    for back in range(1, 1000):  # the oldest of the 1,000 rows may be half overwritten
        assert (file.rows[(total - back) % 1000] == total - back + 1).all()
    file.close()


def test_storage_in_memory_is_not_durable() -> None:
    assert not Storage(4, WIDTH).durable
    assert Storage(4, WIDTH).rows.nbytes == 160
