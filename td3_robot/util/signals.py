"""The signals that stop a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def not_ignored(numbers: Iterable[signal.Signals] = STOPPING) -> list[signal.Signals]:
    """Return these signals, but without SIGHUP if this process ignores it, as under nohup."""
    return [item for item in numbers if item != signal.SIGHUP or signal.getsignal(item) is not signal.SIG_IGN]


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Inside the block, only note the signals that stop a command. Yield the list of their numbers, oldest first."""
    caught: list[int] = []
    with contextlib.ExitStack() as stack:
        for number in not_ignored():
            stack.callback(signal.signal, number, signal.signal(number, lambda number, _: caught.append(number)))
        yield caught
