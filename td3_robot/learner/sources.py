"""The simulators and robots that send Steps to a learner: their identities and their progress."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from td3_robot.core_types import Output, Peer
from td3_robot.learner.experience.transitions import Assembler
from td3_robot.messages import Step, Throttle

log = logging.getLogger(__name__)

UNLIMITED = 2**63
_STALLED = 5.0  # seconds; if a source sends no Step for so long, other sources get its unused steps
_ACKNOWLEDGE = 100  # after this number of processed Steps, a source gets a Throttle, even if this grants no new steps


@dataclass(eq=False)
class Source:
    """A simulator process or robot, identified by its name. The object remains when the connection ends."""

    name: str
    peer: Peer | None = None
    assembler: Assembler = field(default_factory=Assembler)
    incarnation: int = 0
    robots: int = 1
    answered: int = 0  # sequence of the newest processed Step, plus one
    seen: int = 0  # number of transitions that the source has published, as its newest processed Step reports
    granted: int = 0  # total number of transitions that the source may publish
    share: int = 0  # sum of all grants, to compare sources; a source that joins later starts with the lowest share
    active_at: float = 0.0  # time (s) of the newest event: a Step, a join, or a grant that ended a wait
    acknowledged: int = 0  # value of ``answered`` in the newest Throttle to the source
    queue: deque[Step] = field(default_factory=deque)  # in lock-step, Steps waiting for their round
    client: int = 0  # in lock-step, Hello.client of the process that has the source's state; 0 if no process has it
    returning: bool = False  # in lock-step, whether the source is loading its state from the newest snapshot

    @property
    def unacknowledged(self) -> bool:
        """Whether the source still keeps many Steps that the learner has processed."""
        return self.answered - self.acknowledged >= _ACKNOWLEDGE

    @property
    def outstanding(self) -> int:
        """Number of transitions that the source may still publish."""
        return max(0, self.granted - self.seen)

    def stalled(self, now: float) -> bool:
        """Whether the source may make steps, but has sent no Step for some seconds."""
        return self.outstanding > 0 and now - self.active_at > _STALLED

    def grant(self, transitions: int, now: float) -> None:
        """Let the source publish ``transitions`` more transitions."""
        if not self.outstanding:
            self.active_at = now  # the source could not step before this grant
        before, self.granted = self.granted, max(self.granted, self.seen) + transitions
        self.share += self.granted - before

    def state(self) -> dict[str, Any]:
        """The progress of the source, for a restart."""
        return {"answered": self.answered, "seen": self.seen, "assembler": self.assembler.state()}


class Sources:
    """All sources by name."""

    def __init__(self) -> None:
        self._all: dict[str, Source] = {}

    def join(self, peer: Peer, now: float, *, continues: bool = False) -> Source:
        """Connect a source. With ``continues``, a new process continues the Step sequence of the earlier process."""
        hello = peer.hello
        source = self._all.setdefault(peer.name, Source(peer.name))
        source.peer, source.robots, source.active_at = peer, hello.robots, now
        source.queue.clear()
        if source.incarnation != hello.incarnation and not continues:
            source.incarnation, source.answered, source.seen, source.acknowledged = hello.incarnation, 0, 0, 0
        source.granted = source.seen
        log.info("%s %s joined with %d robots (incarnation %d)", peer.role, peer.name, hello.robots, hello.incarnation)
        return source

    def leave(self, peer: Peer) -> Source | None:
        """End the connection of a source and withdraw the source's grant.

        Returns the source; None if the peer is not the current connection of a source.
        """
        source = self._all.get(peer.name)
        if source is None or source.peer is not peer:
            return None
        source.peer, source.granted = None, source.seen
        return source

    def of(self, peer: Peer, name: str) -> Source | None:
        """The source ``name``; None if this peer is not the current connection of this source."""
        source = self._all.get(peer.name)
        return source if source and source.peer is peer and source.name == name else None

    def live(self) -> list[Source]:
        """The connected sources, in the order of their names."""
        return [source for _, source in sorted(self._all.items()) if source.peer]

    def counters(self) -> Counter[str]:
        """The counters of all sources. Counters with the same name are added up."""
        total: Counter[str] = Counter()
        for source in self._all.values():
            total.update(source.assembler.counters)
        return total

    def state(self) -> dict[str, Any]:
        return {name: source.state() for name, source in self._all.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the progress of each source. A connected source stays connected if ``state`` contains it."""
        before = self._all
        self._all = {}
        for name, item in state.items():
            assembler = Assembler.restored(item["assembler"])
            source = Source(name, None, assembler, assembler.incarnation, 1, int(item["answered"]), int(item["seen"]))
            known = before.get(name)
            # A process that is absent now misses the rollback. The ``client`` of its source is 0 from now on, so the
            # process gets the source's state when it joins again.
            if known and known.peer:
                source.peer, source.robots, source.client = known.peer, known.robots, known.client
            self._all[name] = source


def throttles(
    sources: Sequence[Source], lockstep_version: int = 0, to_save: Collection[str] = frozenset()
) -> list[Output]:
    """The Throttles for sources.

    Args:
        lockstep_version: in lock-step, the version of the weights that must choose the next actions; otherwise 0.
        to_save: names of the simulators that must send their state.
    """
    outputs: list[Output] = []
    for source in sources:
        if source.peer:
            allowed = UNLIMITED if lockstep_version else source.granted
            save, source.acknowledged = int(source.name in to_save), source.answered
            throttle = Throttle(source.name, source.incarnation, source.answered, allowed, lockstep_version, save)
            outputs.append((source.peer, throttle))
    return outputs
