"""``td3-robot play``: sends recorded messages to live nodes, at the recorded pace."""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, UsageError, exit_code_of
from td3_robot.messages import MESSAGES, Step
from td3_robot.recording.entries import Entry
from td3_robot.recording.player import PLAYED_LINKS, Player, playable
from td3_robot.recording.reader import Session
from td3_robot.runtime.arguments import Parser, check_name, real
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import MONITOR
from td3_robot.transport.keys import AllowList, open_keys
from td3_robot.transport.link import PEER_TIMEOUT
from td3_robot.util import signals
from td3_robot.util.text import printable

_WAIT = 10.0  # seconds within which a live node must answer
_SAY = 1.0  # seconds without an answer after which the player says for what it waits
_LOOK = 0.05  # longest wait for messages, in seconds; then the player looks at the keyboard and at signals
_EXAMPLES = """examples:
  td3-robot play walk.mcap --run runs/live --remap sim-0=recorded-0
  td3-robot play walk.mcap --policy ipc:///tmp/policy.sock --rate 2 --loop
  td3-robot play walk.mcap --learner ipc:///tmp/learner.sock --topics weights    acts as the learner
  td3-robot play walk.mcap --monitor ipc:///tmp/monitor.sock       shown by: td3-robot monitor --endpoint …

By default the player acts as the robot and sends Steps. If --monitor is the only target, the player sends every
topic. For topics of a server (action, throttle, weights) the player acts as that server, and serves its endpoint.
SIGUSR1, or Enter on a terminal, pauses and resumes.
"""


def scheduled(
    entries: Iterator[Entry], origin: int, *, rate: float = 1.0, start: float = 0.0, duration: float | None = None
) -> Iterator[tuple[float, Entry]]:
    """Yield each entry with the time to play it, in seconds since playing began.

    Args:
        entries: entries with corrected times, from :meth:`Session.timed`.
        origin: the time at which the recording begins, in ns since 1970.
        rate: factor of the speed.
        start: seconds of the recording to skip.
        duration: seconds of the recording to play; None for all.
    """
    for entry in entries:
        offset = max(0, entry.received - origin) * 1e-9 - start  # a corrected time may be before the origin
        if duration is not None and offset > duration:
            return
        if offset >= 0:
            yield offset / rate, entry


class Pause:
    """A clock. SIGUSR1, or Enter on a terminal, stops it and starts it again."""

    def __init__(self, paused: bool) -> None:
        self.paused = paused
        self._paused_s = 0.0  # total seconds of the earlier pauses
        self._since = time.monotonic()

    def toggle(self) -> None:
        now = time.monotonic()
        if self.paused:
            self._paused_s += now - self._since
        self.paused, self._since = not self.paused, now

    def now(self) -> float:
        """Seconds on a monotonic clock that stands still during pauses."""
        return (self._since if self.paused else time.monotonic()) - self._paused_s

    def look(self) -> None:
        if sys.stdin and sys.stdin.isatty() and select.select([sys.stdin], [], [], 0)[0] and sys.stdin.readline():
            self.toggle()


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="td3-robot play", description="Play a recording to live nodes.", epilog=_EXAMPLES)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a recording, or its parts")
    add("--run", type=Path, metavar="DIR", help="the live run to play to")
    for link in PLAYED_LINKS:
        add(f"--{link}", metavar="ENDPOINT", help=f"endpoint of the {link} link, instead of --run")
    add("--monitor", metavar="ENDPOINT", help="endpoint of a monitor that shows the messages")
    add(
        "--keys",
        metavar="DIR",
        help="folder of this machine's keys (default: the folder in the configuration of --run)",
    )
    add(
        "--topics",
        nargs="+",
        metavar="TOPIC",
        help="topics to play (default: step, or all topics if only --monitor is given)",
    )
    add("--rate", type=real(above=True), default=1.0, metavar="X", help="factor of the speed (default: 1)")
    add("--loop", action="store_true", help="play repeatedly; each time, the robot connects anew")
    add("--remap", action="append", default=[], metavar="OLD=NEW", help="give a publisher (not a topic) a new name")
    add("--start", type=real(unit="s"), default=0.0, metavar="S", help="skip the first S seconds of the recording")
    add("--duration", type=real(above=True, unit="s"), metavar="S", help="play S seconds of the recording")
    add("--paused", action="store_true", help="begin paused")
    add("--json", action="store_true", help="print the numbers of played messages as JSON")
    return _play(parser.parse_args(arguments))


def _play(options: argparse.Namespace) -> int:
    (endpoints, keys), topics = _place(options), _topics(options)
    session, played = Session(options.files), Counter[str]()
    names = _renamed(options.remap, session, topics)

    def schedule() -> Iterator[tuple[float, Entry]]:
        times = {"rate": options.rate, "start": options.start, "duration": options.duration}
        return scheduled(session.timed(topics), session.begin, **times)

    _refuse_empty(options, session, topics, schedule())
    pause, loop = Pause(options.paused), 0
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(signals.noted())
        stack.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: pause.toggle()))
        while not stopped and (loop == 0 or options.loop):
            player = Player(session, topics, endpoints, names, loop, keys)
            try:
                problem = _play_once(player, schedule(), pause, stopped)
            finally:
                played += player.counts()
                player.close()
            if problem:
                print(f"td3-robot play: {problem}", file=sys.stderr)
                return EXIT_CHECK_FAILED
            loop += not stopped
    result = {"loops": loop, "interrupted": bool(stopped), **played}
    print(json.dumps(result) if options.json else ", ".join(f"{count} {name}" for name, count in played.items()))
    return exit_code_of(stopped[0]) if stopped else EXIT_GOOD


def _play_once(
    player: Player, schedule: Iterator[tuple[float, Entry]], pause: Pause, stopped: Sequence[int]
) -> str | None:
    """Play all messages once. Returns the reason of a failure; None without a failure."""
    if missing := _meet(player, stopped):
        return f"no node answers on link {', '.join(missing)} within {_WAIT:g} s"
    player.introduce()
    if silent := _run(player, schedule, pause, stopped):
        return f"{silent} has been silent for {PEER_TIMEOUT:g} s, and did not receive the messages played in this time"
    return None


def _meet(player: Player, stopped: Sequence[int]) -> list[str]:
    """Wait for the live nodes. Returns the links on which no node answered."""
    begin, said = time.monotonic(), False
    while (missing := player.missing()) and time.monotonic() < begin + _WAIT and not stopped:
        if not said and time.monotonic() >= begin + _SAY:
            said = True
            places = ", ".join(f"link {link} ({player.endpoints[link]})" for link in missing)
            print(f"td3-robot play: waits at most {_WAIT:g} s for a node on {places}", file=sys.stderr)
        player.turn(_LOOK)
    return [] if stopped else missing


def _run(player: Player, schedule: Iterator[tuple[float, Entry]], pause: Pause, stopped: Sequence[int]) -> str:
    """Send all scheduled messages, or stop at a signal. Returns the name of a silent server, or an empty text."""
    begin = pause.now()
    for offset, entry in schedule:
        while (wait := begin + offset - pause.now()) > 0 or pause.paused:
            player.turn(_LOOK if pause.paused else min(wait, _LOOK))
            pause.look()
            if stopped:
                return ""
            if silent := player.silent_since(time.monotonic() - PEER_TIMEOUT):
                return silent
        player.play(entry)
    end = time.monotonic()
    while (silent := player.silent_since(end)) and time.monotonic() < end + PEER_TIMEOUT and not stopped:
        player.turn(_LOOK)
    return "" if stopped else silent


def _refuse_empty(
    options: argparse.Namespace, session: Session, topics: Sequence[str], schedule: Iterator[tuple[float, Entry]]
) -> None:
    everything = len(topics) == len(MESSAGES)
    session.require(() if everything else topics)
    if next(schedule, None) is None:
        until = "on" if options.duration is None else f"to {options.start + options.duration:g} s"
        raise UsageError(
            f"{str(session.paths[0])!r} holds no {'message' if everything else ' or '.join(topics)} "
            f"from {options.start:g} s {until}; it is {(session.end - session.begin) * 1e-9:.3f} s long"
        )


def _renamed(remap: Sequence[str], session: Session, topics: Sequence[str]) -> dict[str, str]:
    """The new names of publishers, by recorded name. All played publishers must have different names."""
    publishers = sorted({publisher for publisher, _, _ in session.counts})
    names: dict[str, str] = {}
    for item in remap:
        old, _, new = item.partition("=")
        if not old or not new:
            raise UsageError(f"--remap is {item!r}; it must be OLD=NEW")
        if old not in publishers:
            known = printable(", ".join(publishers))
            raise UsageError(f"--remap {item}: the recording has no publisher {old!r}; its publishers: {known}")
        check_name(f"--remap {item}: NEW", new)
        if old in names:
            raise UsageError(f"--remap {item}: {old!r} has the new name {names[old]!r} already")
        names[old] = new
    played = sorted({publisher for publisher, _, topic in session.counts if topic in topics})
    later = Counter(names.get(publisher, publisher) for publisher in played)
    if alike := [name for name, count in later.items() if count > 1]:
        same = [publisher for publisher in played if names.get(publisher, publisher) == alike[0]]
        raise UsageError(f"--remap: {printable(' and '.join(same))} would both be {alike[0]!r}; names must differ")
    return names


def _topics(options: argparse.Namespace) -> list[str]:
    alone = options.monitor and not (options.run or options.policy or options.learner)
    allowed = MESSAGES if alone else playable()
    if options.topics is None:
        return list(MESSAGES) if alone else [Step.NAME]
    if unknown := sorted(set(options.topics) - allowed.keys()):
        raise UsageError(f"--topics: {unknown[0]!r} cannot be played; allowed: {', '.join(allowed)}")
    return list(options.topics)


def _place(options: argparse.Namespace) -> tuple[dict[str, str], AllowList | None]:
    given = {link: getattr(options, link) for link in (*PLAYED_LINKS, MONITOR) if getattr(options, link)}
    if options.run:
        run = RunFolder.open(options.run)
        config = run.config()
        found = {link: run.endpoint(link, config) for link in PLAYED_LINKS}
        return found | given, open_keys(options.keys or config.endpoints.keys)
    if not given:
        raise UsageError("no live node is given; give --run DIR, or --policy, --learner or --monitor with an ENDPOINT")
    return given, open_keys(options.keys)
