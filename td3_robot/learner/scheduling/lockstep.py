"""Lock-step: rounds with one Step from every source, snapshots between rounds, and rollback to the newest snapshot.

A snapshot is one consistent state of the whole run. To take a snapshot, the learner sends Throttles that ask every
simulator for its state. The learner sends them at the end of a round. Each simulator sends its state before its next
Step. The learner processes the next round only after all states have arrived and are saved. A snapshot needs no state
of the policy server: the server holds only weights, and computes its noise from the seed and the Step. When a simulator
dies, every process returns to the newest snapshot and repeats the same steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from td3_robot.core_types import Output, Peer
from td3_robot.learner.scheduling.base import Scheduler
from td3_robot.learner.sources import Source, throttles
from td3_robot.messages import SimulatorState, Step

if TYPE_CHECKING:
    from td3_robot.learner.core import LearnerCore

log = logging.getLogger(__name__)


class State(Enum):
    """The phase of a round, with its meaning."""

    GATHERING = "the learner waits until enough sources can start the round"
    STEPPING = "the sources make the Step of the round"
    SNAPSHOT = "the sources send their states and make the Step of the round"
    SAVING = "all states have arrived; the snapshot is not yet saved"
    ROLLBACK = "a simulator was lost; the newest snapshot is not yet restored"


TRANSITIONS = {
    State.GATHERING: {State.STEPPING, State.SNAPSHOT, State.ROLLBACK},
    State.STEPPING: {State.GATHERING, State.ROLLBACK},
    State.SNAPSHOT: {State.SAVING, State.STEPPING, State.ROLLBACK},  # STEPPING: a source has left
    State.SAVING: {State.STEPPING, State.ROLLBACK},
    State.ROLLBACK: {State.GATHERING},
}


class LockStep(Scheduler):
    """A round: receive one Step from every source, make the updates that are due, then let every source continue.

    All sources wait until the policy servers use the newest weights. On-policy algorithms rely on this.

    The scheduler takes a snapshot at the beginning of a new run, on request, and at the end of the run.

    Attributes:
        rounds: number of rounds since the newest snapshot.
    """

    saves_weights = True

    def __init__(self, core: LearnerCore) -> None:
        super().__init__(core)
        self.state = State.GATHERING
        self.rounds = 0
        self._sources = core.sources
        self._needed = core.config.simulators
        self._saved: dict[str, bytes] = {}  # simulator states of the newest snapshot; empty before the first snapshot
        self._arriving: dict[str, bytes | None] = {}  # simulator states of the unfinished snapshot; None until received

    def _enter(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    # -- events --------------------------------------------------------------------------------------------------

    def continues(self, source: str) -> bool:
        return source in self._saved

    def source_joined(self, source: Source) -> list[Output]:
        assert source.peer
        same_process, source.client = source.client == source.peer.hello.client, source.peer.hello.client
        outputs: list[Output] = []
        if source.name in self._saved and (not same_process or source.returning):
            if not self.rounds:
                outputs += self._send_back(source)
            elif self.state is not State.ROLLBACK:
                self._arriving = {}
                self._enter(State.ROLLBACK)
        return outputs + self._release([source])

    def source_left(self, source: Source) -> None:
        if source.name in self._arriving:
            self._arriving = {}
            if self.core.done:  # no round follows, so no new snapshot is possible: go back to the newest saved snapshot
                self._enter(State.ROLLBACK)
            else:
                self._snapshot_requested = True  # try again at the end of the current round
                self._enter(State.STEPPING)

    def policy_joined(self, peer: Peer) -> list[Output]:
        outputs: list[Output] = [(peer, weights) for weights in self.core.publisher.sent]
        return outputs + self._release(self._sources.live())

    def step_arrived(self, source: Source, step: Step, now: float) -> None:
        del now
        due = source.answered + len(source.queue)
        if source.returning or (step.sequence > due and source.answered):
            self.counters["set_back"] += 1  # the source sent this Step before the rollback
        elif step.sequence < due:
            # The learner has already processed this Step. If the learner has restarted since then, its assembler has
            # lost this Step. Without this Step, the assembler cannot make a transition to the next Step.
            source.assembler.add(step)
        else:
            source.queue.append(step)

    def state_arrived(self, source: Source, state: SimulatorState) -> list[Output]:
        if not state.payload:  # the simulator has loaded its snapshot state
            returned, source.returning = source.returning, False
            return self._release([source]) if returned else []
        if source.name in self._arriving and state.answers == source.answered:
            self._arriving[source.name] = state.payload
            if self.state is State.SNAPSHOT and None not in self._arriving.values():
                self._enter(State.SAVING)
        return []

    def offline_finished(self) -> list[Output]:
        return self._release(self._sources.live())

    def learn(self, now: float) -> list[Output]:
        """If every source has sent its Step, process the round."""
        live = self._sources.live()
        if not self._round_complete(live):
            return []
        for source in live:
            self.core.insert(source, source.queue.popleft(), now)
        while self.core.learning.update_due:
            self.core.learning.update()
        self.rounds += 1
        if self.state is State.STEPPING:
            self._enter(State.GATHERING)
        outputs = self.core.publisher.publish_if_due()
        if self.core.done:
            self._snapshot_requested = True
        return outputs + self._release(self._sources.live())

    def _round_complete(self, live: Sequence[Source]) -> bool:
        if self.core.done or not self.core.publisher.policies or self.state not in (State.GATHERING, State.STEPPING):
            return False
        return len(live) >= self._needed and all(source.queue for source in live)

    def _release(self, sources: Sequence[Source]) -> list[Output]:
        """If there are enough sources for a round, let ``sources`` make their next Step with the newest weights.

        At the start of a round, all connected sources make a Step, not only ``sources``.
        """
        core, live = self.core, self._sources.live()
        weights_serve = core.spec and core.publisher.policies and not core.learning.offline
        if not weights_serve or self.state is State.ROLLBACK:
            return []
        if len(live) < self._needed or any(source.returning for source in live):
            return []
        if self.state is State.GATHERING:
            sources = live
            if self._snapshot_requested or not self._saved:  # a new run begins with a snapshot
                self._snapshot_requested = False
                self._arriving = dict.fromkeys(source.name for source in live)
                self._enter(State.SNAPSHOT)
            else:
                self._enter(State.STEPPING)
        to_save = {name for name, state in self._arriving.items() if state is None}
        return throttles(sources, core.publisher.version, to_save)

    # -- snapshots -----------------------------------------------------------------------------------------------

    @property
    def snapshot_ready(self) -> bool:
        return self.state is State.SAVING

    def snapshot_saved(self) -> None:
        self._saved, self._arriving = self._arrived(), {}
        self.rounds = 0
        self._enter(State.STEPPING)

    @property
    def unsaved(self) -> bool:
        return self.rounds > 0

    @property
    def must_roll_back(self) -> bool:
        return self.state is State.ROLLBACK

    def rolled_back(self) -> list[Output]:
        self._enter(State.GATHERING)
        self.rounds = 0
        outputs: list[Output] = []
        for source in self._sources.live():
            source.queue.clear()
            outputs += self._send_back(source)
        return outputs

    @property
    def simulator_states(self) -> Mapping[str, bytes]:
        return self._arrived() if self.state is State.SAVING else self._saved

    def restore(self, simulator_states: Mapping[str, bytes]) -> None:
        self._saved = dict(simulator_states)

    def _arrived(self) -> dict[str, bytes]:
        return {name: state for name, state in self._arriving.items() if state is not None}

    def _send_back(self, source: Source) -> list[Output]:
        """Send a simulator its state from the newest snapshot."""
        assert source.peer
        payload = self._saved.get(source.name)
        if payload is None:
            log.warning("%s is not in the newest snapshot, so it cannot roll back; start it again", source.name)
            source.peer = None
            return []
        source.returning = True
        return [(source.peer, SimulatorState(source.name, source.incarnation, source.answered, payload))]
