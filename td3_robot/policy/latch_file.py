"""Latches in a file, written by a thread of its own: a disk that is slow must not keep a control loop waiting."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from td3_robot.errors import ConfigError
from td3_robot.policy.latches import Latches
from td3_robot.util import files
from td3_robot.util.process_lock import claim

log = logging.getLogger(__name__)

_LARGEST = 1 << 24  # bytes of a file that is read: far above what can be in force
_AGAIN = 1.0  # seconds after which what could not be written is tried once more


class LatchFile:
    """One policy server's latches, as JSON; every change replaces the file atomically, some milliseconds later.

    What cannot be written is tried again until it can.

    Attributes:
        kept: what the file holds.

    Raises:
        ConfigError: the file is damaged, or cannot be read or written.
        UsageError: another process keeps its latches there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refusal = f"state file {str(path)!r} is another policy server's, which runs; name another with --state FILE"
        self._claim = claim(f"latches {path.resolve()}", refusal)
        try:
            self.kept = self._read()
            self._write(self.kept)  # so that a folder that cannot be written is known now, and not at the first stop
        except BaseException:
            self._claim.close()
            raise
        self._changed = threading.Condition()
        self._newest = self._tried = self.kept
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="latches")
        self._thread.start()

    def keep(self, latches: Latches) -> None:
        """Have these in the file soon; asked with the same object again, nothing is done."""
        if latches is self._newest:
            return
        with self._changed:
            self._newest = latches
            self._changed.notify()

    def close(self) -> None:
        """Wait until the newest are in the file."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()
        self._claim.close()

    def _work(self) -> None:
        failed = False
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._over or self._newest is not self._tried, _AGAIN if failed else None
                )
                again = failed and self._newest is self._tried
                self._tried, over = self._newest, self._over
            failed = self._tried != self.kept and not self._kept_now(self._tried, quiet=again)
            if again and not failed:
                log.warning("state file %r is written now", str(self.path))
            if over:
                return

    def _kept_now(self, latches: Latches, *, quiet: bool) -> bool:
        try:
            self._write(latches)
        except ConfigError as error:
            if not quiet:
                log.error("%s; until it is written, a restart would forget what is in force now", error)
            return False
        self.kept = latches
        return True

    def _read(self) -> Latches:
        try:
            with self.path.open("rb") as file:
                content = file.read(_LARGEST)
        except FileNotFoundError:
            return Latches()
        except OSError as error:
            raise ConfigError(f"state file {str(self.path)!r} cannot be read: {error.strerror}") from None
        try:
            return msgspec.json.decode(content, type=Latches)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"state file {str(self.path)!r} is damaged ({str(error)[:200]}): a stop may be in force that it does "
                "not tell; remove it once you know that none is"
            ) from None

    def _write(self, latches: Latches) -> None:
        try:
            files.write_atomically(self.path, msgspec.json.encode(latches) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"state file {str(self.path)!r} cannot be written: {error.strerror}; name another with --state FILE"
            ) from None
