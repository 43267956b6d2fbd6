"""``td3-robot``: runs a command, and turns expected errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

# Below, import only modules that load fast: during these imports, Ctrl-C prints a traceback.
# Set this before any import of numpy. Threads would slow down the small matrix products of a control loop.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from td3_robot.cli.bench import BENCHMARKS
from td3_robot.cli.ros2 import NODES
from td3_robot.cli.verbs import COMMANDS, find, listing
from td3_robot.errors import (
    EXIT_CHECK_FAILED,
    EXIT_GOOD,
    EXIT_USAGE,
    ArgumentError,
    Td3RobotError,
    UsageError,
    exit_code_of,
)
from td3_robot.util.extras import COMPLETING, missing
from td3_robot.util.output import discard_output

_WRONG_PATH = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
}  # fmt: skip
"""Errors of the operating system about a path that the user has to correct."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success.

    1: a check, a process or a command failed, or the operating system reported an error. If this error is about a wrong
    path, the code is 2.

    2: any other error. Examples: wrong usage, a wrong path, a wrong configuration, a wrong file, a missing package, a
    diverged training.

    After a signal the code is 128 plus the signal's number: 130 for Ctrl-C, 143 for SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = f"td3-robot {words[0]}" if words and words[0] in COMMANDS else "td3-robot"
    with _stoppable() as signals:
        return _report(name, words, signals)


@contextlib.contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that a command removes its incomplete files.

    Yield a list. Each SIGINT, SIGTERM or SIGHUP adds its number. A second SIGTERM ends the process at once. A second
    SIGHUP does nothing: when a terminal closes, both its shell and the kernel can send one. Nodes and the supervisor of
    a training replace the handlers.
    """
    signals: list[int] = []

    def stop(number: int, frame: Any) -> None:
        del frame
        again = number in signals
        signals.append(number)
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
        if number != signal.SIGHUP or not again:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ours = [number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only in the main thread
        ours.clear()
    for number in ours:
        signal.signal(number, stop)
    try:
        yield signals
    finally:
        for number in ours:
            if signal.getsignal(number) is stop:
                signal.signal(number, before[number])


def _report(name: str, words: Sequence[str], signals: Sequence[int]) -> int:
    """Run a command. Print an expected error as one line, and return the exit code."""
    try:
        return _run(words)
    except SystemExit as stop:  # a parser has printed the help or an error
        return int(stop.code or 0)
    except Td3RobotError as error:
        dashes = "--" if isinstance(error, ArgumentError) else ""
        print(f"{name}: {dashes}{error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        problem = missing(error)
        if problem is None:
            raise
        print(f"{name}: {problem}", file=sys.stderr)
        return EXIT_USAGE
    except ImportError:
        if not signals:
            raise
        return exit_code_of(signals[0])  # C code of an imported package replaced the KeyboardInterrupt
    except BrokenPipeError:  # a subclass of OSError, so it comes first
        discard_output()
        return EXIT_CHECK_FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_USAGE if error.errno in _WRONG_PATH else EXIT_CHECK_FAILED
    except KeyboardInterrupt:
        return exit_code_of(signals[0] if signals else signal.SIGINT)


def _run(words: Sequence[str]) -> int:
    if COMPLETING in os.environ:
        _complete()
    if not words or words[0] in ("-h", "--help"):
        print(usage(), flush=True)
        return EXIT_GOOD if words else EXIT_USAGE
    if words[0] == "--version":
        from td3_robot.util.version import __version__

        print(f"td3-robot {__version__}", flush=True)
        return EXIT_GOOD
    if words[0].startswith("-"):
        raise UsageError(f"the option {words[0]} is not allowed before a command; allowed: --help, --version")
    return find(COMMANDS, words[0], "command").run(words[1:])


def _complete() -> None:
    """Complete the command line of a shell. The command's own parser completes its arguments."""
    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = line.split()[1:] if line[-1:].isspace() else line.split()[1:-1]
    groups = {"bench": BENCHMARKS, "ros2": NODES}
    table, depth = (groups[words[0]], 1) if words and words[0] in groups else (COMMANDS, 0)
    known = len(words) > depth and words[depth] in table
    # argcomplete takes the word with this number, counted from 1, as the program's name.
    os.environ[COMPLETING] = str(depth + 1 + known)
    if known:
        table[words[depth]].run([])
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=table)
    argcomplete.autocomplete(parser)


def usage() -> str:
    """Return what ``td3-robot --help`` prints."""
    return (
        "usage: td3-robot COMMAND [ARGUMENTS]\n\n"
        f"{listing(COMMANDS)}\n\n"
        "examples:\n"
        "  td3-robot eval walker2d --video walker.mp4\n"
        "  td3-robot train walker2d_fast --out runs/walker\n"
        "  td3-robot eval runs/walker\n\n"
        "td3-robot COMMAND --help lists its arguments; td3-robot --version prints the version.\n"
        "To complete commands with the Tab key: pip install argcomplete, then in your shell\n"
        '  eval "$(register-python-argcomplete td3-robot)"'
    )


if __name__ == "__main__":
    sys.exit(main())
