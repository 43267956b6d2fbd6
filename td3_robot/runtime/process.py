"""Runs a node as a process: sets it up from its arguments, and turns its end or its error into an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import shlex
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from td3_robot.config.realtime import RealtimeConfig
from td3_robot.config.schema import Config
from td3_robot.core_types import Farewell
from td3_robot.errors import EXIT_GOOD, EXIT_USAGE, USER_CODE, ConfigError, RunFolderError, Td3RobotError, exit_code_of
from td3_robot.runtime import logs, realtime
from td3_robot.runtime.arguments import check_name, run_or_config
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import LISTENERS, RECORDER
from td3_robot.transport.attach import Search
from td3_robot.transport.bus import Bus
from td3_robot.transport.endpoints import is_tcp
from td3_robot.transport.keys import open_keys
from td3_robot.transport.link import ClientLink
from td3_robot.util import signals
from td3_robot.util.extras import missing
from td3_robot.util.output import STANDARD_OUTPUT
from td3_robot.util.text import exception_line

log = logging.getLogger(__name__)

STOP_SIGNALS = (*signals.STOPPING, signal.SIGQUIT)
"""Signals that stop a process cleanly."""
LIFELINE = "TD3_ROBOT_LIFELINE"
"""Environment variable with the file descriptor of a pipe.

When the process that created the pipe ends, the pipe closes.
"""


def run_node(role: str, arguments: argparse.Namespace, body: Callable[[Node], None]) -> int:
    """Set up a node, run its body until the node stops, and report a failure. Return the exit code of the process."""
    bus = Bus()
    folder: RunFolder | None = None
    node: Node | None = None
    by_hand = LIFELINE not in os.environ and role != "driver"  # a driver's errors always begin with its name
    who = getattr(arguments, "prog", arguments.name) if by_hand else arguments.name
    try:
        check_name("--name", arguments.name)
        folder, config = run_or_config(role, arguments)
        _apply_settings(role, arguments.name, config, bus)
        node = Node(role, arguments.name, arguments.incarnation, folder, config, bus)
        _catch_signals(node)
        follow_lifeline()
        _connect_listeners(node, bus)
        node.status(Figures("starting"))
        body(node)
        bus.close(Farewell.STOPPED.value)
        return exit_code_of(node.stop_signal) if node.stop_signal else EXIT_GOOD
    except Td3RobotError as error:
        _report_failure(node, str(error))
        bus.close(str(error)[:200])
        logs.last_words(f"{who}: {error}")
        return error.exit_code
    except OSError as error:
        what = f"{error.filename or 'system'}: {error.strerror or error}"
        _report_failure(node, what)
        bus.close("failed")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename != STANDARD_OUTPUT
        logs.last_words(f"{who}: {what}{_advice_for_full_disk(who, role, folder) if full else ''}")
        return 1
    except USER_CODE as error:
        if isinstance(error, SystemExit) and role == "driver":  # the program of a driver may end itself in this way
            bus.close("crashed", in_order=False)
            raise
        if isinstance(error, ModuleNotFoundError) and (advice := missing(error)):
            _report_failure(node, advice)
            bus.close(advice)
            logs.last_words(f"{who}: {advice}")
            return EXIT_USAGE
        summary = exception_line(error)
        _report_failure(node, summary)
        bus.close("crashed", in_order=False)  # a bug: the recorder gets all messages, so that a replay reproduces it
        words = traceback.format_exc().rstrip()
        if "\n" in str(error):  # the supervisor shows the last line of the log
            words += f"\n{summary}"
        logs.last_words(words)
        return 1
    except BaseException:
        bus.close("crashed", in_order=False)
        raise


def _apply_settings(role: str, name: str, config: Config, bus: Bus) -> None:
    """Load the keys. In a policy server, apply the real-time settings. Then start the log.

    The thread of the log inherits the real-time settings.
    """
    bus.keys = open_keys(config.endpoints.keys)
    outcome = realtime.apply(config.realtime) if role == "policy" else None
    logs.begin(name)
    if outcome:
        log_realtime(config.realtime, outcome)
        bus.spin = config.realtime.spin_s


def _connect_listeners(node: Node, bus: Bus) -> None:
    """Connect the node to the supervisor, if the supervisor started this process.

    Connect the node also to the recorders and monitors of the node's run or robot.
    """
    if LIFELINE in os.environ:
        bus.connect(node.endpoint("supervisor"), ClientLink("supervisor", node.hello("node"), ()))
        node.supervised = True
    for link in LISTENERS if node.role not in LISTENERS else ():
        client = partial(ClientLink, link, node.hello("node"), (), essential=False)
        named = False
        with contextlib.suppress(RunFolderError, ConfigError):  # raised if the listener has no endpoint
            endpoint, expected = node.endpoint(link), link == RECORDER and node.config.record.enabled
            bus.record(endpoint, client(), expected=expected)
            named = not is_tcp(endpoint)
        if place := node.listeners(link):
            bus.attach(Search(place, client, skip=named))


def _report_failure(node: Node | None, reason: str) -> None:
    """Tell the supervisor why this process ends. Without a supervisor, tell recorder and monitor."""
    if node is None:
        return
    with contextlib.suppress(Exception):
        status = node.status_message(Figures("failed", " ".join(reason.split())[:500]))
        node.bus.send("supervisor" if node.supervised else RECORDER, status)


def _advice_for_full_disk(command: str, role: str, folder: RunFolder | None) -> str:
    """Return what to do after a write to a full disk. ``command`` is the command that a person used."""
    if role == RECORDER:
        return "; make room on that disk, then start td3-robot record again: the recorded nodes keep running"
    if folder is None:
        return ""
    if role == "driver":
        return "; make room on that disk, then start the driver again"
    again = "td3-robot train --resume" if LIFELINE in os.environ else f"{command} --run"
    return f"; make room on that disk, then run {again} {shlex.quote(str(folder.path))}"


def log_realtime(config: RealtimeConfig, outcome: realtime.Outcome) -> None:
    """Log which real-time settings the operating system granted and refused."""
    spins = [f"polls for messages for {config.spin_us} µs before it sleeps"] if config.spin_us else []
    if applied := outcome.applied + spins:
        log.info("real time: %s", "; ".join(applied))
    for reason in outcome.refused:
        log.warning("refused real-time setting: %s", reason)


def _catch_signals(node: Node) -> None:
    def handle(number: int, frame: Any) -> None:
        del frame
        node.stop_signal = number

    for number in signals.not_ignored(STOP_SIGNALS):
        signal.signal(number, handle)
    unblock_signals()


def unblock_signals() -> None:
    """Let stop signals reach this process. Ray blocks SIGINT in its processes and their children."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def follow_lifeline() -> None:
    """Stop this process when the pipe of :data:`LIFELINE` closes.

    When the process that created the pipe ends, the kernel closes the pipe. Then the read in the thread returns.
    """
    descriptor = os.environ.get(LIFELINE)
    if descriptor is None:
        return

    def wait(read_end: int) -> None:
        os.read(read_end, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, args=(int(descriptor),), daemon=True, name="lifeline").start()
