"""The safety state in a file. A thread writes the file, so that a slow disk does not delay the control loop."""

from __future__ import annotations

import hashlib
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec

from td3_robot.errors import ConfigError
from td3_robot.safety import state as safety_state
from td3_robot.safety.state import SafetyState
from td3_robot.util import files
from td3_robot.util.process_lock import claim

log = logging.getLogger(__name__)

_LARGEST = 1 << 24  # bytes of the largest file to read: far above any real state
_RETRY = 1.0  # seconds between two attempts to write


def default_path(bundle: Path, owner: str) -> Path:
    """Return the path of a server's state file, in the folder of its policy.

    ``BUNDLE.state`` belongs to the first server of this policy. A server with another name or configuration file has
    its own state file. The name of this file contains a hash of ``owner``. So the stops of one server do not hold for
    another server.

    Raises:
        ConfigError: ``BUNDLE.state`` is damaged, or cannot be read.
    """
    first = Path(f"{bundle}.state")
    own = Path(f"{bundle}.{hashlib.sha256(owner.encode()).hexdigest()[:8]}.state")
    if not own.exists() and (found := _read(first)[1]) in ("", owner):
        return first
    if not own.exists():
        log.warning(
            "%s belongs to policy server %s; this server keeps its own state in %s. To share the stops of that "
            "server, start with --state %s",
            *(first, found, own, first),
        )
    return own


class StateFile:
    """The safety state of one policy server, as JSON.

    Each change replaces the file atomically, some milliseconds later. After a failed write, the thread tries again
    until it succeeds or :meth:`close` is called.

    Args:
        path: path of the file. A missing file means an empty state.
        owner: name and configuration file of the server. A file that names another owner keeps that owner.

    Raises:
        ConfigError: the file is damaged, or cannot be read or written.
        UsageError: another process uses the file.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path = path
        refusal = f"state file {str(path)!r} belongs to another running policy server; name another file with --state"
        self._claim = claim(f"latches {path.resolve()}", refusal)
        try:
            self.kept, kept_owner = _read(path)
            self._owner = kept_owner or owner
            # If the folder has no write access, report this now, and not at the first stop.
            self._write(self.kept)
        except BaseException:
            self._claim.close()
            raise
        self._changed = threading.Condition()
        self._newest = self._tried = self.kept
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="state file")
        self._thread.start()

    def keep(self, state: SafetyState) -> None:
        """Let the thread write this state. A repeated call with the same object costs nothing."""
        if state is self._newest:
            return
        with self._changed:
            self._newest = state
            self._changed.notify()

    def close(self) -> None:
        """End the thread. If the newest state is not in the file, the thread first tries once to write it."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()
        self._claim.close()

    def _work(self) -> None:
        over = False
        while not over:
            with self._changed:
                failed = self._tried != self.kept
                timeout = _RETRY if failed else None
                self._changed.wait_for(lambda: self._over or self._newest is not self._tried, timeout)
                changed = self._newest is not self._tried
                self._tried, over = self._newest, self._over
            written = self._tried == self.kept or self._attempt(self._tried, quiet=not changed)
            if failed and written:
                log.warning("state file %r is up to date again", str(self.path))

    def _attempt(self, state: SafetyState, *, quiet: bool) -> bool:
        """Try to write a state. Return whether this succeeded. ``quiet``: do not log a failure."""
        try:
            self._write(state)
        except ConfigError as error:
            if not quiet:
                log.error("%s; until the file is written, a restart forgets the newest stops and faults", error)
            return False
        self.kept = state
        return True

    def _write(self, state: SafetyState) -> None:
        values = {**state.stored(), "owner": self._owner} if self._owner else state.stored()
        try:
            files.write_atomically(self.path, msgspec.json.encode(values) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"state file {str(self.path)!r} cannot be written: {error.strerror}; name another file with --state"
            ) from None


def _read(path: Path) -> tuple[SafetyState, str]:
    """Read the state and the owner of a file. The owner is empty if the file is missing or names no owner."""
    try:
        content = files.read(path, _LARGEST)
    except FileNotFoundError:
        return SafetyState(), ""
    except OSError as error:
        raise ConfigError(
            f"state file {str(path)!r} cannot be read: {error.strerror}; it may contain an emergency stop"
        ) from None
    try:
        values: dict[str, Any] = msgspec.json.decode(content, type=dict)
        owner = msgspec.convert(values.pop("owner", ""), str)
        return safety_state.read(values), owner
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"state file {str(path)!r} is damaged ({reason}) and may contain an emergency stop; check the robots, "
            "then remove the file"
        ) from None
