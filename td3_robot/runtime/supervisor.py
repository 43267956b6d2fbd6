"""Starts what a launch description names, watches it, restarts what dies, and stops all of it, whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from td3_robot.config.schema import Config
from td3_robot.core_types import Peer
from td3_robot.errors import EXIT_INTERRUPTED, EXIT_USAGE, NodeError
from td3_robot.messages import Status
from td3_robot.runtime.launch import Process
from td3_robot.runtime.process import LIFELINE, STOP_SIGNALS
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import LINKS
from td3_robot.transport import endpoints
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import AllowList, open_keys
from td3_robot.transport.link import ServerLink

log = logging.getLogger(__name__)

READY_TIMEOUT = 300.0
"""Seconds within which a started process has to report that it is ready. A learner may compile first: 20 s, and a
minute or two on a small or busy machine."""
_GRACE = {signal.SIGINT: 30.0, signal.SIGTERM: 10.0}  # seconds before the next harder signal; the learner saves in them
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED = {0, *(code for number in STOP_SIGNALS for code in (128 + number, -number))}
"""How a process ends that was told to; by the bare signal if that came before it was ready for it."""
_LONGEST_TURN = 1.0  # seconds; of a longer one this process has stood still
_ON_THE_WAY = 0.05  # seconds of silence after which nothing more comes from processes that have ended
_LAST_WORDS = 2.0  # seconds to wait for what one has said last
_STARTS = 1000  # incarnations reserved for one start of the run; restarts within it count on from there


@dataclass
class Child:
    """A process, over its restarts."""

    process: Process
    popen: subprocess.Popen[bytes] | None = None
    incarnation: int = 0
    status: Status | None = None
    started_at: float = 0.0  # seconds that the supervisor was awake for
    died_at: list[float] = field(default_factory=list)
    over: bool = False  # ended for good, as it should

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def ready(self) -> bool:
        return self.over or self.finished or (self.status is not None and self.status.state == "ready")

    @property
    def finished(self) -> bool:
        return self.status is not None and self.status.state == "finished"


Watch = Callable[[dict[str, Status]], None]


class Supervisor:
    """One run's processes. Use as a context manager: leaving it leaves no process and no socket behind.

    Args:
        say: prints one line for the person who started the run.
    """

    def __init__(self, run: RunFolder, config: Config, processes: list[Process], say: Callable[[str], None]) -> None:
        self.run = run
        self.config = config
        self.children = [Child(process) for process in processes]
        self._say = say
        self._interrupts = 0
        self._worst = 0
        self._awake = 0.0  # seconds of supervising, without those that this process was stopped for

    def __enter__(self) -> Supervisor:
        keys = open_keys(self.config.endpoints.keys)
        facts = self.run.read_run()
        # Before there is anything to be removed again. SIGHUP ignored is what nohup asks for.
        caught = [n for n in _STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._signalled) for number in caught}
        try:
            self._open(keys, facts)
        except BaseException:
            self._restore_handlers()
            raise
        return self

    def _open(self, keys: AllowList | None, facts: Mapping[str, Any]) -> None:
        """Make the folder of sockets, name them in the run, and serve our own."""
        # A run in lock-step that was stopped before its first cut begins once more, and is the same run.
        begun = self.config.timing != "lockstep" or self.run.has_checkpoints
        start = int(facts.get("starts", -1)) + 1 if begun else 0
        if facts.get("sockets"):
            _remove_stale(Path(str(facts["sockets"])))
        self._sockets = Path(tempfile.mkdtemp(prefix=endpoints.SOCKETS_PREFIX, dir=endpoints.socket_home()))
        addresses = {link: getattr(self.config.endpoints, link) or f"ipc://{self._sockets}/{link}" for link in LINKS}
        self.run.write_run(endpoints=addresses, sockets=str(self._sockets), starts=start, supervisor_pid=os.getpid())
        for child in self.children:
            child.incarnation = start * _STARTS
        self._lifeline, self._held = os.pipe()
        os.set_inheritable(self._lifeline, True)
        self.bus = Bus(keys=keys)
        try:
            session = ServerLink(
                "supervisor", "supervisor", {"node": (Status,)}, self.config.agreement(), secrets.randbits(63)
            )
            self.bus.serve(addresses["supervisor"], session)
        except BaseException:
            self._clean_up()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._stop_all()
        finally:
            self._clean_up()
            self._restore_handlers()

    def supervise(self, watch: Watch) -> int:
        """Run until a process that ends the run has ended, or an interrupt; the exit code of the run.

        Args:
            watch: called about ten times a second with the newest Status of each process.

        Raises:
            NodeError: a process died too often, or was not ready in time.
        """
        for child in self.children:
            self._start(child)
        everybody_ready = False
        looked_at = time.monotonic()
        while not self._interrupts:
            self._listen(0.1)
            now = time.monotonic()
            self._awake += min(now - looked_at, _LONGEST_TURN)  # what was said while we stood still is not heard yet
            looked_at = now
            self._reap()
            if any(child.over and child.process.row.ends_run for child in self.children):
                break
            late = [c.name for c in self.children if not c.ready and self._awake - c.started_at > READY_TIMEOUT]
            if late:
                raise NodeError(f"{late[0]} was not ready within {READY_TIMEOUT:g} s; see {self._log(late[0])}")
            if not everybody_ready and all(child.ready for child in self.children):
                everybody_ready = True
                self._say(f"ready: {', '.join(child.name for child in self.children)}")
            watch(self.statuses())
        self._stop_all()
        watch(self.statuses())
        return EXIT_INTERRUPTED if self._interrupts else self._worst

    def statuses(self) -> dict[str, Status]:
        """The newest Status of each process that has sent one."""
        return {child.name: child.status for child in self.children if child.status}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process that died was started again."""
        return {child.name: len(child.died_at) for child in self.children if child.died_at}

    # -- processes -----------------------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        row = child.process.row
        command = [sys.executable, "-m", row.module, "--run", str(self.run.path), "--name", child.name]
        with self._log(child.name).open("ab") as output:
            child.popen = subprocess.Popen(
                [*command, "--incarnation", str(child.incarnation)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **row.environment, LIFELINE: str(self._lifeline), "PYTHONUNBUFFERED": "1"},
                pass_fds=(self._lifeline,),
                start_new_session=True,  # Ctrl-C on the terminal reaches us alone; we forward it once
            )
        child.status, child.started_at = None, self._awake

    def _reap(self) -> None:
        for child in self.children:
            if child.popen is None or (code := child.popen.poll()) is None:
                continue
            child.popen = None
            if code == 0 and child.process.row.ends_run:
                self._hear_out(child)
            if code == 0 and child.finished:
                child.over = True
            elif code == EXIT_USAGE and child.process.row.essential:  # it would say the same again
                code = 1 if child.died_at else EXIT_USAGE  # what has run before was called rightly
                raise NodeError(f"{child.name} cannot run: {self._last_words(child.name)}", code)
            elif not self._interrupts:
                self._restart(child, code)

    def _restart(self, child: Child, code: int) -> None:
        rule, now = child.process.row.restart, time.monotonic()
        what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if sum(now - died < rule.window_s for died in child.died_at) >= rule.times:
            if not child.process.row.essential:
                child.over = True
                self._say(f"{child.name} {what} too often; the run goes on without it; see {self._log(child.name)}")
                return
            raise NodeError(
                f"{child.name} {what}, more than {rule.times} times in {rule.window_s:g} s; "
                f"last words: {self._last_words(child.name)}; see {self._log(child.name)}"
            )
        child.died_at.append(now)
        child.incarnation += 1
        words = "" if code in _STOPPED or code < 0 else f" ({self._last_words(child.name)})"
        self._say(f"{child.name} {what}{words}; starting it again")
        self._start(child)

    def _stop_all(self) -> None:
        """SIGINT once, then SIGTERM, then SIGKILL; a further Ctrl-C goes to the next one at once.

        In lock-step what ends the run, the learner, is asked to end before the others: it needs their states.
        """
        begin_interrupts = max(1, self._interrupts)
        first = [(signal.SIGINT, True)] if self.config.timing == "lockstep" else []
        for number, leader in (*first, (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False)):
            alive = [child for child in self.children if child.popen and child.popen.poll() is None]
            alive = [child for child in alive if child.process.row.ends_run] if leader else alive
            for child in alive:
                assert child.popen
                with contextlib.suppress(ProcessLookupError):
                    child.popen.send_signal(number)
            if number != signal.SIGINT and alive:
                self._say(f"{', '.join(child.name for child in alive)}: sent {number.name}")
            deadline = time.monotonic() + _GRACE.get(number, float("inf"))
            while alive and time.monotonic() < deadline:
                self._listen(0.02)
                alive = [child for child in alive if child.popen and child.popen.poll() is None]  # asks each
                if self._interrupts > begin_interrupts and number != signal.SIGKILL:
                    begin_interrupts = self._interrupts
                    break
        deadline = time.monotonic() + _LAST_WORDS
        while self._listen(_ON_THE_WAY) and time.monotonic() < deadline:
            pass  # their last figures
        for child in self.children:
            if child.popen:
                code = child.popen.wait()
                child.popen, child.over = None, True
                if code not in _STOPPED:
                    self._worst = max(self._worst, code if code > 0 else 1)
                    self._say(f"{child.name} ended with exit code {code}; see {self._log(child.name)}")

    # -- links ---------------------------------------------------------------------------------------------------

    def _hear_out(self, child: Child) -> None:
        """Take what a process that has ended well said last: on a busy machine it comes after its exit code."""
        deadline = time.monotonic() + _LAST_WORDS
        while not child.finished and not self._interrupts and time.monotonic() < deadline:
            self._listen(_ON_THE_WAY)

    def _listen(self, timeout: float) -> bool:
        """Take Statuses, waiting up to ``timeout`` seconds for one; whether anything came."""
        inputs = self.bus.receive(timeout)
        for origin, message in inputs:
            if isinstance(message, Status) and isinstance(origin, Peer):
                for child in self.children:
                    if child.name == origin.name and child.incarnation == origin.hello.incarnation:
                        child.status = message
        return bool(inputs)

    def _signalled(self, number: int, frame: Any) -> None:
        del number, frame
        self._interrupts += 1

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # -- files ---------------------------------------------------------------------------------------------------

    def _log(self, name: str) -> Path:
        return self.run.logs / f"{name}.log"

    def _last_words(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = self._log(name).read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix(f"{name}: ")
        return "none"

    def _clean_up(self) -> None:
        self.bus.close()
        with contextlib.suppress(OSError):  # a full disk must not hide why we are here
            self.run.write_run(endpoints={}, sockets=None, supervisor_pid=None)
        for descriptor in (self._lifeline, self._held):
            os.close(descriptor)
        shutil.rmtree(self._sockets, ignore_errors=True)  # made by us, a moment ago


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of a supervisor that was killed: only our own kind of folder, and only if nobody answers.

    The path comes from a file, which may be the copy of a run that is alive, or anything else.
    """
    homes = (endpoints.socket_home(), Path(tempfile.gettempdir()))
    ours = folder.name.startswith(endpoints.SOCKETS_PREFIX) and folder.parent in homes
    if not ours or folder.is_symlink() or any(endpoints.answers(folder / link) for link in LINKS):
        return
    with contextlib.suppress(OSError):
        for link in LINKS:
            (folder / link).unlink(missing_ok=True)
        folder.rmdir()
