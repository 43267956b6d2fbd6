"""Copies a learner's files to a URL and back, so that the learner can continue on another host of a cluster.

The key ``cluster.storage`` is the URL. The package fsspec reads and writes the files at the URL.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from td3_robot.errors import ConfigError, NodeError
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.util import files

PERIOD = 10.0
"""Seconds between two copies."""
PATIENCE = 60.0
"""Seconds for which :func:`retried` repeats an action that fails."""
LONGEST = 600.0
"""Maximum time in seconds that a process waits for its last copy."""
_CHECKPOINTS = "checkpoint/"
_FILES = (
    f"{_CHECKPOINTS}checkpoint-*.safetensors",
    "metrics.jsonl",
    "tensorboard/*",
    "best.safetensors",
    "policy.safetensors",
)
"""Patterns of the copied files."""
_OWNER = "owner"  # file at the URL; it names the learner that may write there
_PART = ".part-"  # file at the URL for an unfinished upload
_COPIED = ".copied"  # file in the learner's folder with the stamps of the files that are at the URL
_RETRY = 1.0  # seconds
_FAILURES = (NodeError, OSError)


class NotOwnerError(NodeError):
    """The storage belongs to another training, or to a later learner of this training."""


class Storage:
    """The folder at a URL. If the storage fails, each method raises NodeError.

    Args:
        url: value of ``cluster.storage``.
        owner: text ``RUN-CLAIM``. RUN is a random name of the run, CLAIM a random name of the newest :meth:`claim`.
    """

    def __init__(self, url: str, owner: str = "") -> None:
        import fsspec  # imported here, because only the extra cluster installs it

        self.url = url
        self.owner = owner
        with self._named():
            self._system, root = fsspec.core.url_to_fs(url)
            self._root = root.rstrip("/")

    def claim(self, run: RunFolder, *, newer: bool) -> None:
        """Make this object the owner of the storage. After this call, processes of earlier owners begin no new copies.

        The call also removes unfinished uploads of earlier owners.

        Args:
            run: the run folder; ``run.json`` remembers the owner.
            newer: whether the storage possibly has newer files than the run folder.
        """
        name = _run_of(str(_facts(run).get("owner", ""))) or secrets.token_hex(4)
        self.owner = f"{name}-{secrets.token_hex(4)}"
        self.remember(run, newer=newer)
        with self._named():
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(self._path(_OWNER), self.owner.encode())
            self._system.invalidate_cache()
            for path in self._system.find(self._root):
                if path.removeprefix(f"{self._root}/").startswith(_PART):
                    self._system.rm_file(path)

    def remember(self, run: RunFolder, *, newer: bool) -> None:
        """Write to ``run.json`` whether the storage possibly has newer files than the run folder."""
        run.write_run(storage={"url": self.url, "owner": self.owner, "newer": newer})

    def push(self, folder: Path, copied: dict[str, str]) -> None:
        """Copy changed files to the storage. From the storage, remove the files that the folder no longer has.

        An unfinished upload has a temporary name. So a file with its final name is always complete.

        Args:
            folder: folder of the learner.
            copied: stamps of the copied files by name, see :func:`stamps`; this method updates them.
        """
        with self._named():
            if (here := stamps(folder)) == copied:
                return
            self._check_owner()
            for name, stamp in here.items():
                if copied.get(name) != stamp:
                    try:
                        self._upload(folder / name, name)
                    except FileNotFoundError:
                        if (folder / name).exists():
                            raise
                        continue  # the learner has removed an old checkpoint
                    copied[name] = stamp
            self._check_owner()
            for name in self._files().keys() - here.keys():
                self._system.rm_file(self._path(name))
            for name in copied.keys() - here.keys():
                del copied[name]

    def pull(self, folder: Path, *, checkpoints: bool = True, copied: dict[str, str] | None = None) -> None:
        """Copy files from the storage.

        If the storage holds a checkpoint, remove the learner's files in ``folder`` that the storage lacks.

        Args:
            folder: the run folder, or the folder of a learner.
            checkpoints: if False, copy no checkpoints, and remove nothing.
            copied: for each copied file, what the storage said about it (size, time, …). This method updates these
                values, and skips files whose value has not changed.
        """
        copied = {} if copied is None else copied
        with self._named():
            if checkpoints:
                self._check_owner()
            there = self._files()
            for name, state in there.items():
                if copied.get(name) != state and (checkpoints or not name.startswith(_CHECKPOINTS)):
                    path = folder / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with files.replacing(path) as temporary:
                        self._system.get_file(self._path(name), str(temporary))
                    copied[name] = state
            if checkpoints and any(name.startswith(_CHECKPOINTS) for name in there):
                for name in stamps(folder).keys() - there.keys():
                    (folder / name).unlink(missing_ok=True)

    def probe(self) -> None:
        """Write and remove a small file."""
        path = self._path(f".probe-{secrets.token_hex(4)}")
        with self._named():
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(path, b"written by td3-robot")
            self._system.rm_file(path)

    def holder(self) -> str:
        """Return the owner that the storage names; empty if the storage names no owner."""
        with self._named(), contextlib.suppress(FileNotFoundError):
            return str(self._system.cat_file(self._path(_OWNER)).decode("utf-8", "replace"))
        return ""

    def holds_files(self) -> bool:
        """Return whether the storage has files of a learner."""
        with self._named():
            return bool(self._files())

    def _upload(self, file: Path, name: str) -> None:
        path, part = self._path(name), self._path(f"{_PART}{self.owner}")
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._system.put_file(str(file), part)
        self._check_owner()  # a later learner may have become the owner in the meantime
        self._system.mv(part, path)

    def _files(self) -> dict[str, str]:
        """Return the state of each learner file in the storage, by name."""
        self._system.invalidate_cache()
        found = {
            path.removeprefix(f"{self._root}/"): str(state)
            for path, state in self._system.find(self._root, detail=True).items()
        }
        return {name: state for name, state in found.items() if _is_copied(name)}

    def _check_owner(self) -> None:
        if self.holder() != self.owner:
            raise NotOwnerError(
                f"cluster.storage is {self.url!r}, which does not belong to this training: another training or a "
                "later learner has taken it, or on this host the URL leads to another folder"
            )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn each error of the block into a NodeError that names the key and the URL."""
        try:
            yield
        except NodeError:
            raise
        except Exception as error:  # each protocol raises its own types
            text = " ".join(str(error).split())[:200] or type(error).__name__
            raise NodeError(f"cluster.storage is {self.url!r}: {text}") from error


class Keeper:
    """Copies a learner's files to the storage. The file ``run.json`` in the learner's folder holds the URL.

    Args:
        folder: folder of the learner. If it is new, its files come from the storage first.
    """

    def __init__(self, folder: Path) -> None:
        facts = _facts(RunFolder(folder))
        self._storage = Storage(facts["url"], facts["owner"])
        self._folder = folder
        self._file = folder / _COPIED
        if not self._file.exists():
            retried(lambda: self._storage.pull(folder))
            self._write(stamps(folder))
        self._copied: dict[str, str] = json.loads(self._file.read_text())

    def copy(self) -> None:
        """Copy what has changed. Raise NodeError if the storage fails."""
        before = dict(self._copied)
        try:
            self._storage.push(self._folder, self._copied)
        finally:
            if self._copied != before:
                self._write(self._copied)

    def _write(self, copied: dict[str, str]) -> None:
        files.write_atomically(self._file, json.dumps(copied).encode())


@contextlib.contextmanager
def repeated(action: Callable[[], None], last: Callable[[], None], report: Callable[[str], None]) -> Iterator[None]:
    """Call ``action`` every :data:`PERIOD` seconds in a thread, and ``last`` at the end of the block.

    At the end, the block waits for ``last`` for at most :data:`LONGEST` seconds.

    Args:
        action: function that copies files. If it fails, the thread calls it again after the next period.
        last: function that makes the last copy. The thread repeats it as :func:`retried` does.
        report: gets one line when ``action`` begins to fail, one when it works again, and one if ``last`` fails.
    """
    stop = threading.Event()

    def work() -> None:
        failures = 0
        while not stop.wait(PERIOD):
            try:
                action()
            except _FAILURES as error:
                failures += 1
                if failures == 1:
                    report(f"{error}; the training continues, and tries to copy every {PERIOD:g} s")
            else:
                if failures:
                    report(f"cluster.storage works again after {failures} failures")
                failures = 0
        try:
            retried(last)
        except _FAILURES as error:
            report(f"{error}; the copy at the end failed, after {failures} earlier failures")

    thread = threading.Thread(target=work, daemon=True, name="storage")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LONGEST)


def retried(action: Callable[[], None]) -> None:
    """Call a function until it succeeds. Raise its error after :data:`PATIENCE`; raise a NotOwnerError at once."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return action()
        except _FAILURES as error:
            if isinstance(error, NotOwnerError) or time.monotonic() > end:
                raise
        time.sleep(_RETRY)


def check(url: str, run: RunFolder | None) -> None:
    """Check that a run may use a storage. ``run`` is a run to resume; None for a new run.

    Raises:
        ConfigError: the storage is not writable, or it holds another run.
    """
    try:
        storage = Storage(url)
        storage.probe()
        holder, used = storage.holder(), storage.holds_files()
    except NodeError as error:
        raise ConfigError(f"{error}; allowed: a folder in which this program can write and remove files") from None
    mine = _run_of(str(_facts(run).get("owner", ""))) if run else ""
    if (holder or used) and not (mine and _run_of(holder) == mine):
        raise ConfigError(f"cluster.storage is {url!r}, which holds another run; allowed: an empty folder")


def fetch(run: RunFolder) -> None:
    """If the storage possibly has newer files of an interrupted training, copy them into the run folder."""
    facts = _facts(run)
    if facts.get("newer"):
        storage = Storage(facts["url"], facts["owner"])
        if _run_of(holder := storage.holder()) == _run_of(storage.owner):
            storage.owner = holder  # a failed claim may have changed run.json, but not the storage
        with run.locked():
            storage.pull(run.path)
            storage.remember(run, newer=False)


def stamps(folder: Path) -> dict[str, str]:
    """Return the stamp of each file of a learner, by name. A stamp is a text that changes when the file changes."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if _is_copied(name) and path.is_file():
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                found[name] = f"{state.st_mtime_ns} {state.st_size}"
    return found


def _is_copied(name: str) -> bool:
    return ".." not in name.split("/") and any(fnmatch.fnmatchcase(name, pattern) for pattern in _FILES)


def _facts(run: RunFolder) -> dict[str, Any]:
    return dict(run.read_run().get("storage") or {})


def _run_of(owner: str) -> str:
    return owner.partition("-")[0]
