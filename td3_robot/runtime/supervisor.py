"""The supervisor of a run: it starts the processes of a launch description, restarts crashed ones, and stops them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from td3_robot.config.schema import Config
from td3_robot.core_types import Peer
from td3_robot.errors import EXIT_USAGE, NodeError, exit_code_of
from td3_robot.messages import Status
from td3_robot.runtime.child import STOPPED_CODES, Child, ChildState
from td3_robot.runtime.hosts import Hosts, NoRoomError
from td3_robot.runtime.launch import Process
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import LINKS
from td3_robot.transport import attach, endpoints
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ServerLink
from td3_robot.util import signals

READY_TIMEOUT = 300.0
"""Seconds within which a started process must report that it is ready.

A learner may compile its updates first. Compiling takes about 10 s, or some minutes on a small or busy machine.
"""
_SILENCE = 30.0
"""Seconds without a report after which the supervisor tells the user. A process reports twice a second."""
_STOP_STEPS = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, float("inf")))
"""Signals for a process that must stop, in the order of sending.

Each signal comes with the maximum time in seconds that the supervisor then waits for the end of the process.

After SIGINT the learner saves a checkpoint, which takes time.
"""
_LONGEST_TURN = 1.0  # seconds; one turn of supervise() advances the supervisor's clock by at most this
_LISTEN = 0.05  # maximum seconds of one wait for messages
_LAST_REPORT = 2.0  # seconds to wait for the last report of an ended process
_STARTS = 1000  # each start of the run reserves this many incarnation numbers; each restart of a process uses one

Watch = Callable[[dict[str, Status]], bool | None]
"""Callback that gets a map from the name of each process to the newest Status of this process.

The supervisor calls it about ten times a second or more often. The callback returns False to stop the run.
"""


class Supervisor:
    """Starts, watches and stops the processes of one run. ``say`` prints one line for the user.

    Use it as a context manager: at exit it stops all processes and removes all sockets.

    Attributes:
        signal: number of the newest signal that asked to stop; 0 without a signal.
    """

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        processes: list[Process],
        say: Callable[[str], None],
        hosts: Hosts | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.children: list[Child] = []
        self._processes = processes
        self._hosts = hosts or Hosts(run.path)
        self._say = say
        self.signal = 0
        self._interrupts = 0
        self._exit_code = 0  # the highest unexpected exit code of a stopped process; a death by a signal counts as 1
        self._clock = 0.0  # seconds that the supervisor has run, without the time of suspensions

    def __enter__(self) -> Supervisor:
        facts = self.run.read_run()
        self._hosts.stopped = lambda: self.signal
        with contextlib.ExitStack() as resources:
            # Install the signal handlers first. Without a handler, a signal could end this process before the process
            # cleans up the other resources. Python allows handlers only in the main thread.
            for number in signals.not_ignored() if threading.current_thread() is threading.main_thread() else ():
                resources.callback(signal.signal, number, signal.signal(number, self._signalled))
            self._open(resources, facts)
            self._resources = resources.pop_all()
        return self

    def _open(self, resources: contextlib.ExitStack, facts: Mapping[str, Any]) -> None:
        """Make the folder for sockets, publish the endpoints in the run folder, and serve the supervisor's link."""
        # A lock-step run without a checkpoint starts from the beginning again, with the same incarnation numbers.
        begun = self.config.timing != "lockstep" or self.run.has_checkpoints
        start = int(facts.get("starts", -1)) + 1 if begun else 0
        if facts.get("sockets"):
            _remove_stale(Path(str(facts["sockets"])))
        sockets = Path(tempfile.mkdtemp(prefix=endpoints.SOCKETS_PREFIX, dir=endpoints.socket_home()))
        resources.callback(shutil.rmtree, sockets, ignore_errors=True)
        resources.enter_context(self._hosts)
        addresses = {link: getattr(self.config.endpoints, link) or f"ipc://{sockets}/{link}" for link in LINKS}
        addresses |= self._hosts.endpoints()
        resources.callback(self._withdraw_endpoints)
        self.run.write_run(endpoints=addresses, sockets=str(sockets), starts=start, supervisor_pid=os.getpid())
        self.children = [Child(process, self.run, self._hosts) for process in self._hosts.place(self._processes)]
        self._first = start * _STARTS
        for child in self.children:
            child.incarnation = self._first
        self.bus = Bus(keys=open_keys(self.run.config().endpoints.keys))
        resources.callback(self.bus.close)
        accepts = {"node": (Status,)}
        link = ServerLink("supervisor", "supervisor", accepts, self.config.agreement(), secrets.randbits(63))
        (endpoint,) = self.run.to_bind("supervisor", self.config)
        self.bus.serve(endpoint, link)

    def _withdraw_endpoints(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the original error
            self.run.write_run(endpoints={}, sockets=None, supervisor_pid=None)

    def __exit__(self, *_: object) -> None:
        with self._resources:
            self._stop_all()

    def supervise(self, watch: Watch) -> int:
        """Run until a process with ``ends_run`` has finished, or until a signal or ``watch`` stops the run.

        Returns:
            the exit code of the run.

        Raises:
            NodeError: a process cannot run, died too often, or was not ready in time.
        """
        for child in self.children:
            self._start(child)
        announced = False
        last = time.monotonic()
        while not self._interrupts:
            self._listen(0.1)
            now = time.monotonic()
            # After a suspension (Ctrl-Z), the reports from the time of the suspension are still unread. So one turn
            # advances the clock by at most _LONGEST_TURN. Otherwise a process that was ready in time would seem late.
            self._clock += min(now - last, _LONGEST_TURN)
            last = now
            self._reap()
            self._add_joined()
            if any(child.state is ChildState.OVER and child.row.ends_run for child in self.children):
                break
            for child in self.children:
                if not child.ready and self._clock - child.started_at > READY_TIMEOUT:
                    raise NodeError(f"{child.name} was not ready within {READY_TIMEOUT:g} s; see {child.log}")
            self._look_for_silence()
            if not announced and all(child.ready for child in self.children):
                announced = True
                self._say(f"ready: {_names(self.children)}")
            if watch(self.statuses()) is False:
                self._interrupts += 1
        self._stop_all()
        self._await_last_reports()
        watch(self.statuses())
        return exit_code_of(self.signal or signal.SIGINT) if self._interrupts else self._exit_code

    def statuses(self) -> dict[str, Status]:
        """Return the newest Status of each process that has sent one."""
        return {child.name: child.status for child in self.children if child.status}

    @property
    def restarts(self) -> dict[str, int]:
        """Maps the name of each restarted process to its number of restarts."""
        return {child.name: len(child.deaths) for child in self.children if child.deaths}

    @property
    def clean(self) -> bool:
        """Whether every process that the supervisor stopped has ended without an error."""
        return not self._exit_code

    def _add_joined(self) -> None:
        """Start the processes for hosts that have joined."""
        children = {child.name: child for child in self.children}
        for process in self._hosts.joined():
            child = children.get(process.name)
            if child is None:
                child = Child(process, self.run, self._hosts)
                child.incarnation = self._first
                self.children.append(child)
            self._start(child)  # for a known child, _restart has counted the death and raised the incarnation

    def _start(self, child: Child) -> None:
        """Start a process.

        If no host has room for a process that the run does not need, the run continues without this process.
        """
        try:
            child.start(self._clock)
        except NoRoomError:
            child.state = ChildState.OVER
            self._say(f"no host has room for {child.name}; the run continues without it")

    def _reap(self) -> None:
        """Handle the processes that have ended."""
        for child in self.children:
            if child.process is None or (code := child.process.poll()) is None:
                continue
            if code == 0 and child.row.ends_run:
                self._await_last_report(child)
            if self._interrupts:
                return  # _stop_all() handles this process and the others
            child.process = None
            if code == 0 and child.state is ChildState.FINISHED:
                child.state = ChildState.OVER
            elif code == EXIT_USAGE and child.row.essential:  # a restart would fail in the same way
                code = 1 if child.deaths else EXIT_USAGE  # after a restart, the cause is not a wrong argument
                raise NodeError(f"{child.name} cannot run: {child.last_log_line()}", code)
            else:
                self._restart(child, code)

    def _look_for_silence(self) -> None:
        """Tell the user if a ready process sends no reports, and when it reports again.

        The process may hang in the user's code. It may also be busy, so the supervisor does not end it.
        """
        for child in self.children:
            silent = child.state is ChildState.READY and self._clock - child.reported_at > _SILENCE
            if silent and not child.silent:
                why = "it hangs, or is in a long call"
                self._say(f"{child.name} has sent no report for {_SILENCE:g} s: {why}; see {child.log}")
            elif child.silent and child.state is ChildState.READY and not silent:
                self._say(f"{child.name} reports again")
            child.silent = silent

    def _restart(self, child: Child, code: int) -> None:
        """Restart a process that died.

        If the process died too often, do not restart it. Then raise NodeError if the process is essential. If the
        process is not essential, the run continues without it.
        """
        what = _end(code)
        if not child.died_too_often():
            reason = "" if code in STOPPED_CODES or code < 0 else f" ({child.last_log_line()})"
            self._say(f"{child.name} {what}{reason}; starting it again")
            child.prepare_restart()
            self._start(child)
        elif child.row.essential:
            rule = child.row.restart
            raise NodeError(
                f"{child.name} {what}, more than {rule.times} times in {rule.window_s:g} s; "
                f"its last log line: {child.last_log_line()}; see {child.log}"
            )
        else:
            child.state = ChildState.OVER
            self._say(f"{child.name} {what} too often; the run continues without it; see {child.log}")

    def _stop_all(self) -> None:
        """Send SIGINT, then SIGTERM, then SIGKILL to the processes that still run."""
        if self.config.timing == "lockstep":  # stop the learner first: it saves the states of processes that still run
            self._stop([child for child in self.children if child.row.ends_run], *_STOP_STEPS[0])
        for number, timeout in _STOP_STEPS:
            self._stop(self.children, number, timeout)
        for child in self.children:
            self._collect(child)

    def _stop(self, children: Iterable[Child], number: signal.Signals, timeout: float) -> None:
        """Send a signal, then wait until the processes end, the timeout passes, or a second request to stop comes.

        After SIGKILL, requests to stop do not end the wait.
        """
        alive = [child for child in children if child.running]
        for child in alive:
            child.send_signal(number)
        if alive and number != signal.SIGINT:
            self._say(f"{_names(alive)}: sent {number.name}")
        interrupts, deadline = self._interrupts, time.monotonic() + timeout
        while alive and time.monotonic() < deadline:
            self._listen(0.02)
            alive = [child for child in alive if child.running]
            if self._interrupts > max(1, interrupts) and number != signal.SIGKILL:
                break

    def _collect(self, child: Child) -> None:
        """Read the exit code of a stopped process. If it is unexpected, tell the user."""
        if child.process is None:
            return
        code = child.process.wait()
        child.process = None
        child.state = ChildState.OVER
        if code not in STOPPED_CODES:
            self._exit_code = max(self._exit_code, code if code > 0 else 1)
            self._say(f"{child.name} {_end(code)}; see {child.log}")

    def _await_last_report(self, child: Child) -> None:
        """Wait for the last report of a process that ended with code 0. It may arrive after the process has ended."""
        self._listen_until(lambda: child.state is ChildState.FINISHED or self._interrupts > 0)

    def _await_last_reports(self) -> None:
        """Wait until each process that has reported has also sent its Bye, which comes after its last report.

        A killed or crashed process sends no Bye. So the wait has a limit, and another request to stop ends it.
        """
        reported = {(child.name, child.incarnation) for child in self.children if child.status}
        interrupts = self._interrupts

        def ended() -> bool:
            connected = {(peer.name, peer.hello.incarnation) for peer in self.bus.peers("supervisor")}
            return reported.isdisjoint(connected) or self._interrupts > interrupts

        self._listen(_LISTEN)  # the supervisor forgets a process after a long silence; its last Hello may be waiting
        self._listen_until(ended)

    def _listen_until(self, ended: Callable[[], bool]) -> None:
        """Listen until ``ended`` returns True, but at most for _LAST_REPORT seconds."""
        deadline = time.monotonic() + _LAST_REPORT
        while not ended() and time.monotonic() < deadline:
            self._listen(_LISTEN)

    def _listen(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for messages, and store the reports."""
        for origin, message in self.bus.receive(timeout):
            if isinstance(message, Status) and isinstance(origin, Peer):
                for child in self.children:
                    if child.name == origin.name and child.incarnation == origin.hello.incarnation:
                        child.report(message, self._clock)

    def _signalled(self, number: int, frame: Any) -> None:
        del frame
        self.signal = number
        self._interrupts += 1


def _end(code: int) -> str:
    """Return in words how a process ended. A code below 0 is minus the number of the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in set(signal.Signals)  # most real-time signals have no name
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _names(children: Iterable[Child]) -> str:
    return ", ".join(child.name for child in children)


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of a killed supervisor.

    The path comes from a file. It may be wrong, or another run may use the folder now. So the function removes the
    folder only if its name has the prefix of td3-robot and no socket in it answers.
    """
    homes = (endpoints.socket_home(), Path(tempfile.gettempdir()))
    ours = folder.name.startswith(endpoints.SOCKETS_PREFIX) and folder.parent in homes
    sockets = [Path(place) for link in LINKS for place in attach.places(str(folder / link))]
    if not ours or folder.is_symlink() or any(endpoints.answers(path) for path in sockets):
        return
    with contextlib.suppress(OSError):
        for path in sockets:
            path.unlink(missing_ok=True)
        folder.rmdir()
