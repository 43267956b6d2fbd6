"""The order of lock-step: rounds of one Step of every source, and cuts between two of them.

A cut is one consistent state of the whole run. The learner takes it between two rounds: the Throttles that end a round
ask every simulator for its state, which each sends before its next step; until all are there, and whoever writes them
has taken them, no further round is made. The policy server needs no part in it: it holds nothing but weights, and its
noise is a function of what a Step says. Whoever dies, everybody goes back to the cut and does the same again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from td3_robot.core_types import Output
from td3_robot.learner.sources import Source, Sources, throttles
from td3_robot.messages import SimulatorState, Step

log = logging.getLogger(__name__)


class Rounds:
    """Who has to be waited for, who may go on, and who has to go back.

    Args:
        sources: of the learner.
        simulators: how many sources a round needs at least.

    Attributes:
        states: what each simulator sent for the newest cut, by source; empty before the first.
        kept: somebody writes cuts: one is then asked for at the beginning and at the end of the run.
        wanted: the end of this round is to be a cut.
        setback: a simulator has been lost since the cut; its state is that of the cut, so all have to go back there.
        moved: a round was made since the cut.
    """

    def __init__(self, sources: Sources, simulators: int) -> None:
        self.states: dict[str, bytes] = {}
        self.kept = self.wanted = self.setback = self.moved = False
        self.counters: Counter[str] = Counter()
        self._sources = sources
        self._simulators = simulators
        self._asked: set[str] = set()  # whose states make the cut that is being taken
        self._arrived: dict[str, bytes] = {}
        self._let_go = False

    @property
    def cut_complete(self) -> bool:
        """Whether all of a cut is there, to be written now and then :meth:`taken`."""
        return bool(self._asked) and self._asked == self._arrived.keys()

    def keep(self) -> None:
        """Somebody will write cuts from now on."""
        self.kept, self.wanted = True, not self.states

    def taken(self) -> None:
        """The cut was written: it is what everybody goes back to from now on."""
        self.states, self._asked, self._arrived, self.moved = self._arrived, set(), {}, False

    @property
    def newest(self) -> dict[str, bytes]:
        """The states that belong to the learner's of this moment: those of the cut being taken, else of the last."""
        return self._arrived if self.cut_complete else self.states

    def enter(self, source: Source) -> list[Output]:
        """A source has joined, with a process that was here before or a new one."""
        assert source.peer
        other, source.client = source.client != source.peer.hello.client, source.peer.hello.client
        if source.name not in self.states or not (other or source.awaited):
            return []
        if self.moved:
            self.setback = True
            return []
        return self._put_back(source)

    def leave(self, source: Source | None) -> None:
        """A source has left: without it there is no cut; the next one is tried at the end of the next round."""
        if source and source.name in self._asked:
            self._asked, self._arrived, self.wanted = set(), {}, True

    def go_back(self) -> list[Output]:
        """The learner is at the cut again; everybody who is connected has to be, too."""
        self.setback = self.moved = self._let_go = False
        self._asked, self._arrived = set(), {}
        outputs: list[Output] = []
        for source in self._sources.live():
            source.queue.clear()
            outputs += self._put_back(source)
        return outputs

    def take(self, source: Source, step: Step) -> None:
        """A Step came: for the next round, or once more, or from before a setback."""
        due = source.answered + len(source.queue)
        if source.awaited or (step.sequence > due and source.answered):
            self.counters["set_back"] += 1
        elif step.sequence < due:
            source.assembler.add(step)  # dealt with before; after a restart it is what the next one follows
        else:
            source.queue.append(step)

    def take_state(self, source: Source, state: SimulatorState) -> bool:
        """A simulator's state for the cut; or, without a payload, word that it is back at the last one (then True)."""
        if not state.payload:
            back, source.awaited = source.awaited, False
            return back
        if source.name in self._asked and state.answers == source.answered:
            self._arrived[source.name] = state.payload
        return False

    def complete(self) -> list[Source]:
        """The sources of the round that can be made now, in the order of their names; none if something is missing."""
        live = self._sources.live()
        everybody = len(live) >= self._simulators and all(source.queue for source in live)
        return live if everybody and not self._asked and not self.setback else []

    def end(self, version: int, *, done: bool) -> list[Output]:
        """A round was made: let everybody go on, unless it was the last; ask for the cut that is wanted."""
        self.moved, self._let_go = True, False
        if done and not self.kept:
            return []
        self.wanted = self.wanted or done
        return self.let_go(version, self._sources.live())

    def let_go(self, version: int, sources: Sequence[Source]) -> list[Output]:
        """Tell sources the weights to name next, once as many as a round needs are where they have to be."""
        live = self._sources.live()
        if len(live) < self._simulators or any(source.awaited for source in live) or self.setback:
            return []
        if not self._let_go:
            self._let_go, sources = True, live
            if self.wanted:
                self.wanted, self._asked, self._arrived = False, {source.name for source in live}, {}
        return throttles(sources, version, self._asked - self._arrived.keys())

    def _put_back(self, source: Source) -> list[Output]:
        assert source.peer
        payload = self.states.get(source.name)
        if payload is None:
            log.warning("%s joined after the last cut and cannot go back to it; start it again", source.name)
            source.peer = None
            return []
        source.awaited = True
        return [(source.peer, SimulatorState(source.name, source.incarnation, source.answered, payload))]
