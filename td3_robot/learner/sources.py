"""The simulators and robots a learner hears from: who they are, how far they got, how far they may go."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from td3_robot.core_types import Output, Peer
from td3_robot.learner.rate_limiter import RateLimiter
from td3_robot.learner.transitions import Assembler
from td3_robot.messages import Step, Throttle

log = logging.getLogger(__name__)

_WITHOUT_LIMIT = 2**63
_STALLED = 5.0  # seconds without a Step after which what a source was granted is shared among the others
_WORTH_A_MESSAGE = 0.25  # of the band: what has to come free before a source that has enough is told

_ACKNOWLEDGE = 100  # Steps dealt with after which a source is told even if nothing else is to be said


@dataclass
class Source:
    """A simulator process or robot, as the learner knows it by name; it outlives connections.

    Attributes:
        answered: sequence of the newest Step dealt with, plus one.
        seen, granted: transitions it has published by its own count, and may publish.
        heard: when its newest Step came, in seconds.
        told: what it was last told of ``answered``.
        queue: in lock-step, Steps waiting for their round.
        client: of the process behind it, see Hello; 0 before it has joined.
        awaited: in lock-step, told to go back to its saved state, and not there yet.
    """

    name: str
    peer: Peer | None = None
    assembler: Assembler = field(default_factory=Assembler)
    incarnation: int = 0
    robots: int = 1
    answered: int = 0
    seen: int = 0
    granted: int = 0
    heard: float = 0.0
    told: int = 0
    queue: deque[Step] = field(default_factory=deque)
    client: int = 0
    awaited: bool = False

    @property
    def unacknowledged(self) -> bool:
        """Whether it keeps more Steps that were dealt with than it needs to."""
        return self.answered - self.told >= _ACKNOWLEDGE

    @property
    def outstanding(self) -> int:
        return max(0, self.granted - self.seen)

    def state(self) -> dict[str, Any]:
        """How far it got, as plain values."""
        return {"answered": self.answered, "seen": self.seen, "assembler": self.assembler.state()}

    def stalled(self, now: float) -> bool:
        """Whether it may go on, and does not."""
        return self.outstanding > 0 and now - self.heard > _STALLED


class Sources:
    """All sources by name."""

    def __init__(self) -> None:
        self._all: dict[str, Source] = {}

    def join(self, peer: Peer, now: float, *, goes_on: bool = False) -> Source:
        """A source connected, for the first time or again; with ``goes_on`` it takes up its Steps where they were."""
        hello = peer.hello
        source = self._all.setdefault(peer.name, Source(peer.name))
        source.peer, source.robots, source.granted, source.heard = peer, hello.robots, 0, now
        source.queue.clear()
        if source.incarnation != hello.incarnation and not goes_on:
            source.incarnation, source.answered, source.seen, source.told = hello.incarnation, 0, 0, 0
        log.info("%s %s joined with %d robots (incarnation %d)", peer.role, peer.name, hello.robots, hello.incarnation)
        return source

    def leave(self, peer: Peer) -> Source | None:
        """A connection ended; what it was granted and did not use is free again. Its source, None if there is none."""
        source = self._all.get(peer.name)
        if source is None or source.peer is not peer:
            return None
        source.peer, source.granted = None, source.seen
        return source

    def of(self, peer: Peer, name: str) -> Source | None:
        """The source behind a connection, if it speaks in its own name."""
        source = self._all.get(peer.name)
        return source if source and source.peer is peer and source.name == name else None

    def live(self) -> list[Source]:
        """Those that are connected, in the order of their names."""
        return [source for _, source in sorted(self._all.items()) if source.peer]

    def counters(self) -> Counter[str]:
        """The sum of their assemblers' counters."""
        total: Counter[str] = Counter()
        for source in self._all.values():
            total.update(source.assembler.counters)
        return total

    def grant(self, limiter: RateLimiter, env_steps: int, updates: int, now: float) -> list[Output]:
        """Share what the replay ratio allows among the live ones, those with the least left first.

        Whoever gets nothing is told from time to time what was dealt with: until then it keeps its Steps.
        """
        live = [source for source in self.live() if not source.stalled(now)]
        if limiter.ratio is None and updates >= limiter.offline:  # everybody may run to the end
            told = [source for source in live if source.granted < _WITHOUT_LIMIT or source.unacknowledged]
            for source in told:
                source.granted = _WITHOUT_LIMIT
            return throttles(told)
        overshoot = sum(source.robots - 1 for source in live)
        allowed = limiter.steps_allowed(updates, overshoot) - env_steps
        free = allowed - sum(source.outstanding for source in live)
        given: list[Source] = []
        for before, source in enumerate(sorted(live, key=lambda item: item.outstanding)):
            share = -(-free // (len(live) - before)) if free > 0 else 0
            running_dry = source.outstanding <= source.robots
            if share > 0 and (running_dry or share >= limiter.band * _WORTH_A_MESSAGE):
                if not source.outstanding:
                    source.heard = now  # it could not go on before
                source.granted = max(source.granted, source.seen) + share
                free -= share
                given.append(source)
        return throttles(given + [source for source in live if source.unacknowledged and source not in given])

    def state(self) -> dict[str, Any]:
        """How far each got, as plain JSON values."""
        return {name: source.state() for name, source in self._all.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Expect sources to go on from where :meth:`state` says; those that are connected stay so."""
        before = self._all
        self._all = {}
        for name, item in state.items():
            assembler = Assembler.restored(item["assembler"])
            source = Source(name, None, assembler, assembler.incarnation, 1, int(item["answered"]), int(item["seen"]))
            if name in before:
                known = before[name]
                source.peer, source.robots, source.client = known.peer, known.robots, known.client
            self._all[name] = source


def throttles(
    sources: Sequence[Source], lockstep_version: int = 0, to_save: Collection[str] = frozenset()
) -> list[Output]:
    """What the sources are told: how far they may go; in lock-step, the weights to name next, and who is to save."""
    outputs: list[Output] = []
    for source in sources:
        if source.peer:
            allowed = _WITHOUT_LIMIT if lockstep_version else source.granted
            save, source.told = int(source.name in to_save), source.answered
            throttle = Throttle(source.name, source.incarnation, source.answered, allowed, lockstep_version, save)
            outputs.append((source.peer, throttle))
    return outputs
