"""What every process of a run shares: arguments, signals, logging, status, and the loop around a core."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import re
import secrets
import shlex
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.core_types import Core, Farewell, Input, Origin, Output, Peer
from td3_robot.errors import (
    EXIT_GOOD,
    EXIT_USAGE,
    ConfigError,
    RunFolderError,
    Td3RobotError,
    UsageError,
)
from td3_robot.messages import Hello, Message, Start, Status, Step, Welcome
from td3_robot.recording.boundary import Observer, RecordedCore
from td3_robot.runtime import logs, realtime
from td3_robot.runtime.realtime import RealtimeConfig
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.systemd import Notifier
from td3_robot.specs import RobotSpec
from td3_robot.topics import LISTENERS, RECORDER
from td3_robot.transport import link as handshake
from td3_robot.transport.bus import Bus
from td3_robot.transport.interface import Transport
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ClientLink, ServerLink
from td3_robot.transport.tap import RECORDED
from td3_robot.util.text import STANDARD_OUTPUT

log = logging.getLogger(__name__)

STATUS_PERIOD = 0.5
_LOOK_PERIOD = 1.0  # seconds between two looks at whether a run joined by hand still goes on
_IDLE = 0.05  # seconds a core without work waits for input
_POLL_ERROR = 0.002  # seconds by which polling may be late: ZeroMQ counts in milliseconds, from a clock that does too
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What ends a process in order."""
LIFELINE = "TD3_ROBOT_LIFELINE"
"""Environment variable: the file descriptor that ends when the supervisor does."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose epilog stands as it was written."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **named})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


@dataclass(frozen=True)
class Figures:
    """What a node reports about itself."""

    state: str = "ready"
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class Node:
    """One process: its place in a run, or that it is deployed without one; its links; whether it was asked to stop."""

    role: str
    name: str
    incarnation: int
    folder: RunFolder | None  # None: deployed, with its configuration alone
    config: Config
    bus: Transport
    patient: bool = True  # False for a robot in real time, which waits for nobody's queue
    stop_signal: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    _client: int = field(default_factory=lambda: secrets.randbits(63))
    _pending: deque[Output] = field(default_factory=deque)
    _supervised: bool = False
    _next_status: float = float("-inf")
    _next_look: float = float("-inf")

    @property
    def run(self) -> RunFolder:
        """The run's folder, which a deployed node has not and never asks for."""
        assert self.folder
        return self.folder

    def endpoint(self, link: str) -> str:
        """Where a link is.

        Raises:
            ConfigError: deployed, and the configuration names none.
            RunFolderError: the run is not being served, and the configuration names none.
        """
        if self.folder:
            return self.folder.endpoint(link, self.config)
        configured: str | None = getattr(self.config.endpoints, link)
        if not configured:
            raise ConfigError(f"endpoints.{link} is not set; allowed: ipc://PATH, tcp://HOST:PORT")
        return configured

    def agreement(self) -> dict[str, str]:
        """What peers must hold alike: what a run is about; deployed, nothing but the robot's specification."""
        return self.config.agreement() if self.folder else {}

    @property
    def supervised(self) -> bool:
        """Whether a supervisor has started us, and will stop us."""
        return self._supervised

    def serve(self, link: str, accepts: dict[str, tuple[type[Message], ...]], spec: RobotSpec | None = None) -> None:
        """Bind the endpoint of a link.

        Raises:
            EndpointError: busy, malformed or not allowed.
        """
        server = ServerLink(link, self.name, accepts, self.agreement(), secrets.randbits(63), spec)
        endpoint = self.endpoint(link)
        bound = self.bus.serve(endpoint, server)
        if bound != endpoint:  # the port was ours to choose
            log.info("link %s is served at %s", link, bound)

    def connect(
        self,
        link: str,
        accepts: tuple[type[Message], ...],
        *,
        spec: RobotSpec | None = None,
        robots: int = 0,
        essential: bool = True,
    ) -> ClientLink:
        """Connect to the server of a link; one that is not ``essential`` may refuse us, and is asked again.

        Raises:
            EndpointError: malformed or not allowed.
        """
        sizes = {"N": robots, "O": spec.observation_size, "A": spec.action_size} if spec and robots else {}
        client = ClientLink(link, self.hello(self.role, spec=spec, robots=robots), accepts, sizes, essential=essential)
        self.bus.connect(self.endpoint(link), client)
        return client

    def hello(self, role: str, *, spec: RobotSpec | None = None, robots: int = 0, weights_version: int = 0) -> Hello:
        """The introduction of this process."""
        return handshake.hello(
            role,
            self.name,
            client=self._client,
            incarnation=self.incarnation,
            robots=robots,
            weights_version=weights_version,
            spec=spec,
            agreement=self.agreement(),
        )

    def recorded(self, core: Core, settings: Mapping[str, Any], observer: Observer | None = None) -> RecordedCore:
        """Record how our core was made; returns the core with its boundary recorded, for :meth:`spin`.

        Args:
            settings: construction arguments beyond the configuration, as plain JSON values.
            observer: finds the facts of a turn that ``core.step`` does not return.
        """
        offers = sorted(kind.NAME for kind in RECORDED)  # replay does not expect topics that this version lacks
        self.bus.send(RECORDER, Start(self.role, self.config.to_yaml(), {**settings, "offers": offers}))
        return RecordedCore(core, self.bus, observer)

    def spin(
        self,
        core: Core,
        *,
        busy: Callable[[], bool],
        report: Callable[[], Figures],
        after: Callable[[], bool],
        deadline: Callable[[], float | None] = lambda: None,
        stops: Callable[[], bool] = lambda: True,
        sift: Callable[[list[Input]], list[Input]] = lambda inputs: inputs,
    ) -> None:
        """Run the core until a signal, or until ``after`` (called once a turn) says it is finished.

        ``deadline`` is the time (s, of ``time.monotonic``) at which the core wants its next turn, input or none.
        ``stops`` is asked once a turn after a signal: False goes on for now. ``sift`` is given what arrived, once a
        turn, and says what the core is told in it.

        Raises:
            HandshakeError: a server refused us.
        """
        finished = False
        notifier = Notifier(os.environ)
        while not finished and not (self.stop_signal and stops()):
            notifier.turn(time.monotonic())
            inputs = sift(self._receive(0.0 if busy() else _IDLE, deadline()))
            self._forget_steps([origin for origin, message in inputs if isinstance(message, Welcome)])
            self._pending.extend(core.step(inputs, time.monotonic()))
            self._flush()
            finished = after() or self._abandoned()
            self.status(report())
        for _, message in self._pending:
            self.bus.send(RECORDER, message)
        self.status(report(), now=True)
        self.bus.flush()

    def _receive(self, timeout: float, deadline: float | None) -> list[Input]:
        """Inputs, waiting up to ``timeout`` seconds for one, but not beyond a deadline.

        Polling stops short of the deadline by its own error; the rest is slept, which is exact to some 0.1 ms and,
        unlike asking the clock in a loop, leaves the processor to others.
        """
        if deadline is None:
            return self.bus.receive(timeout)
        left = deadline - time.monotonic()
        if left > _POLL_ERROR:
            return self.bus.receive(min(timeout, left - _POLL_ERROR))
        if left > 0:
            time.sleep(left)
        return self.bus.receive(0.0)

    def status(self, figures: Figures, *, now: bool = False) -> None:
        """Report to the supervisor, if there is one, at most every STATUS_PERIOD unless ``now``."""
        time_now = time.monotonic()
        if not self._supervised or (time_now < self._next_status and not now):
            return
        self._next_status = time_now + STATUS_PERIOD
        self.bus.send("supervisor", self.described(figures))

    def described(self, figures: Figures) -> Status:
        """The figures as a message, with what was counted beside them."""
        counters = {**self.bus.dropped(), **self.counters, **figures.counters}
        return Status(self.name, figures.state, figures.detail, figures.figures, counters)

    def _abandoned(self) -> bool:
        """Whether we take part in a supervised run by hand, and that run has ended."""
        now = time.monotonic()
        if not self.folder or self._supervised or self.config.endpoints.learner or now < self._next_look:
            return False
        self._next_look = now + _LOOK_PERIOD
        if self.folder.read_run().get("endpoints"):
            return False
        log.info("the run in %s has ended", self.folder.path)
        return True

    def _forget_steps(self, servers: Sequence[Origin]) -> None:
        """Steps that wait for a server which has just welcomed us: the core tells it, in order, what it may lack."""
        if servers:
            waiting = (item for item in self._pending if item[0] not in servers or not isinstance(item[1], Step))
            self._pending = deque(waiting)

    def _flush(self) -> None:
        """Send what waits; a full queue to a client costs the message, one to a server holds everything back.

        Unless the process is not ``patient``: then it costs the message too.
        """
        while self._pending:
            to, message = self._pending[0]
            # A Step that came between a server's Welcome and what the core tells it first would look like a gap to it.
            early = isinstance(message, Step) and not isinstance(to, Peer) and not self.bus.welcome(to)
            if early or not self.bus.send(to, message):
                if self.patient and not isinstance(to, Peer):
                    return
                self.counters["undelivered"] += 1
                self.bus.send(RECORDER, message)  # its core said it, and goes on as if it had arrived
            self._pending.popleft()


def parser(
    role: str, name: str, description: str, *, deployable: bool = False, epilog: str = ""
) -> argparse.ArgumentParser:
    """The arguments every node takes; one that is ``deployable`` takes a configuration in place of a run."""
    result = Parser(
        prog=f"td3-robot {role}",
        description=description,
        epilog=epilog or f"example:\n  td3-robot {role} --run runs/walker2d",
    )
    result.add_argument(
        "--run", type=Path, required=not deployable, metavar="DIR", help="folder of the run to take part in"
    )
    if deployable:
        result.add_argument("--config", metavar="FILE", help="configuration to be deployed with, without a run")
        result.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key of FILE"
        )
    result.add_argument(
        "--name", default=name, help="name in the run, unique among its processes (default: %(default)s)"
    )
    result.add_argument(
        "--incarnation",
        type=_incarnation,
        default=int(time.time() * 1000),
        metavar="N",
        help="tells the starts of one name apart; must grow (default: the time in ms)",
    )
    return result


def _incarnation(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 64):
        raise argparse.ArgumentTypeError(f"{text!r} is no incarnation; allowed: 0 to {(1 << 64) - 1}")
    return int(text)


def check_name(option: str, name: str) -> None:
    """Whether a process may be called so.

    Raises:
        UsageError: it may not.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise UsageError(f"{option} is {name!r}; allowed: 1 to 64 letters, digits, '_', '-' and '.'")


def place(role: str, arguments: argparse.Namespace) -> tuple[RunFolder | None, Config]:
    """The run that the arguments name and its configuration, or the configuration to be deployed with.

    An ``endpoint`` among the arguments is that of the role's own link, and all there is to be known.

    Raises:
        UsageError: neither, or more than one.
        RunFolderError, ConfigError: it cannot be had.
    """
    config, endpoint = getattr(arguments, "config", None), getattr(arguments, "endpoint", None)
    if endpoint is not None:
        if config is not None or arguments.run is not None or arguments.overrides:
            raise UsageError("--endpoint stands alone, without --run, --config and --set")
        return None, configuration.parse({"endpoints": {role: endpoint, "keys": arguments.keys}})
    if getattr(arguments, "keys", None):
        raise UsageError("--keys goes with --endpoint; a configuration names its own in endpoints.keys")
    if (config is None) == (arguments.run is None):
        raise UsageError("one of --run DIR (take part in a run) and --config FILE (deployed without one) is needed")
    if config is not None:
        return None, configuration.load(config, arguments.overrides)
    if getattr(arguments, "overrides", None):
        raise UsageError("--set needs --config: a run's own configuration is fixed")
    run = RunFolder.open(arguments.run)
    return run, run.config()


def main(role: str, arguments: argparse.Namespace, body: Callable[[Node], None]) -> int:
    """Run a node's body with everything around it; the process's exit code."""
    bus = Bus()
    folder: RunFolder | None = None
    node: Node | None = None
    try:
        check_name("--name", arguments.name)
        folder, config = place(role, arguments)
        bus.keys = open_keys(config.endpoints.keys)
        # Now, because the log and the first socket make threads, which inherit all of it.
        granted = realtime.apply(config.realtime) if role == "policy" else None
        logs.begin(arguments.name)
        if granted:
            _say_of_realtime(config.realtime, granted)
            bus.spin = config.realtime.spin_s
        node = Node(role, arguments.name, arguments.incarnation, folder, config, bus)
        _catch_signals(node)
        _follow_lifeline()
        if LIFELINE in os.environ:
            accepted: tuple[type[Message], ...] = ()
            bus.connect(node.endpoint("supervisor"), ClientLink("supervisor", node.hello("node"), accepted))
            node._supervised = True
        for link in LISTENERS if role not in LISTENERS else ():
            with contextlib.suppress(RunFolderError, ConfigError):  # none, and no endpoint for one
                expected = link == RECORDER and node.config.record.enabled
                bus.record(node.endpoint(link), ClientLink(link, node.hello("node"), ()), expected=expected)
        node.status(Figures("starting"), now=True)
        body(node)
        bus.close(Farewell.STOPPED.value)
        return 128 + node.stop_signal if node.stop_signal else EXIT_GOOD
    except Td3RobotError as error:
        _tell_failure(node, str(error))
        bus.close(str(error)[:200])
        logs.last_words(f"{arguments.name}: {error}")
        return error.exit_code
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"{error.filename or 'system'}: {error.strerror or error}"
        disk = full and error.filename != STANDARD_OUTPUT
        _tell_failure(node, what)
        bus.close("failed")
        logs.last_words(f"{arguments.name}: {what}{_make_room(role, folder) if disk else ''}")
        return 1
    except Exception as error:  # a mistake: what was said until then, a recorder is told, so that it is made again
        _tell_failure(node, f"{type(error).__name__}: {error}")
        bus.close("crashed", in_order=False)
        logs.last_words(traceback.format_exc().rstrip())
        return 1
    except BaseException:
        bus.close("crashed", in_order=False)
        raise


def _tell_failure(node: Node | None, reason: str) -> None:
    """Tell who supervises us, and who records or watches, why this process ends, as far as that can still be told."""
    if node is None:
        return
    with contextlib.suppress(Exception):
        status = node.described(Figures("failed", " ".join(reason.split())[:500]))
        node.bus.send("supervisor" if node.supervised else RECORDER, status)


def _make_room(role: str, folder: RunFolder | None) -> str:
    """What to do about a full disk."""
    if role == RECORDER:
        return "; make room on that disk, then td3-robot record again: who was recorded goes on without it"
    resume = f"td3-robot train --resume {shlex.quote(str(folder.path))}" if folder else ""
    return f"; make room on that disk, then {resume}" if resume else ""


def _say_of_realtime(asked: RealtimeConfig, outcome: realtime.Outcome) -> None:
    spins = [f"looks for messages for {asked.spin_us} µs before it sleeps"] * bool(asked.spin_us)
    if applied := outcome.applied + spins:
        log.info("real time: %s", "; ".join(applied))
    for reason in outcome.refused:
        log.warning("real time, not granted: %s", reason)


def _catch_signals(node: Node) -> None:
    def handle(number: int, frame: Any) -> None:
        del frame
        node.stop_signal = number

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # which is what nohup asks for
            signal.signal(number, handle)


def _follow_lifeline() -> None:
    """Stop when the supervisor is gone, however it went: its end of the pipe closes with it."""
    descriptor = os.environ.get(LIFELINE)
    if descriptor is None:
        return

    def wait(read_end: int) -> None:
        os.read(read_end, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, args=(int(descriptor),), daemon=True, name="lifeline").start()
