"""The learner's core: it gets messages, makes updates, and returns messages to send."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from td3_robot.bundle import Bundle
from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES, Input, Output, Peer
from td3_robot.learner.gauges import Gauges
from td3_robot.learner.learning import Learning
from td3_robot.learner.publisher import Publisher
from td3_robot.learner.reports import EVERY, Reports
from td3_robot.learner.scheduling.base import Scheduler
from td3_robot.learner.scheduling.free import FreeRunning
from td3_robot.learner.scheduling.lockstep import LockStep
from td3_robot.learner.sources import Source, Sources
from td3_robot.messages import Bye, Evaluation, Hello, Message, SimulatorState, Step
from td3_robot.specs import RobotSpec

if TYPE_CHECKING:  # the import loads torch
    from td3_robot.learner.training import Training

log = logging.getLogger(__name__)

SCHEDULERS: dict[str, type[Scheduler]] = {"free": FreeRunning, "lockstep": LockStep}
"""Maps each value of ``timing`` to its scheduler."""


class LearnerCore:
    """Learns from the Steps of any number of sources. Its scheduler sets the order of the work.

    Use :func:`td3_robot.learner.factory.make_core` to create a core. Each call of :meth:`step` does a bounded amount of
    work, so that the learner reads its input often.

    Args:
        config: configuration without ``auto`` in ``learner.device`` and ``learner.precision``.
        make_training: creates the ``Training`` object; called when the specification of the robot is known.
        provenance: origin of the policies; every policy bundle contains it.
    """

    def __init__(
        self, config: Config, make_training: Callable[[RobotSpec], Training], provenance: Mapping[str, Any]
    ) -> None:
        self.config = config
        self.sources = Sources()
        self.counters: Counter[str] = Counter()
        self.gauges = Gauges()
        self.learning = Learning(config, make_training)
        self.publisher = Publisher(config, self.learning, self.gauges, provenance)
        self.reports = Reports(self.learning, self.publisher, self.sources, self.gauges)
        self.scheduler = SCHEDULERS[config.timing](self)
        self._outbox: list[Output] = []

    @property
    def spec(self) -> RobotSpec | None:
        """The specification of the robot; None before a simulator or driver has joined."""
        return self.learning.spec

    @property
    def training(self) -> Training:
        return self.learning.training

    @property
    def env_steps(self) -> int:
        return self.learning.env_steps

    @property
    def updates(self) -> int:
        return self.learning.updates

    @property
    def done(self) -> bool:
        """Whether :attr:`Learning.done` is true, or an evaluation has reached the target return."""
        return self.publisher.evaluations.reached or self.learning.done

    @property
    def busy(self) -> bool:
        """Whether a call of :meth:`step` has work to do even without input."""
        return self.learning.offline or self.scheduler.busy

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Process the inputs, do a bounded amount of work, and return the messages to send.

        Raises:
            DivergenceError: training has diverged.
        """
        self.gauges.start(now)
        outputs, self._outbox = self._outbox, []
        for origin, message in inputs:
            if isinstance(origin, Peer):
                outputs += self._take(origin, message, now)
        outputs += self._learn_offline(now) if self.learning.offline else self.scheduler.learn(now)
        return outputs + self.scheduler.grant(now)

    def start(self, spec: RobotSpec, bundle: Bundle | None = None) -> list[Output]:
        """Start the training for a robot, and publish the first weights. See :meth:`Learning.begin`."""
        self.learning.begin(spec, bundle)
        self.recover()
        return self.publisher.publish()

    def recover(self) -> None:
        """Use the transitions that the replay file received after the checkpoint was saved."""
        notes = self.training.storage.notes
        if notes:
            newest = max(notes.values(), key=lambda note: (note.total_added, note.env_steps))
            self.training.recover(newest.seen)
            self.learning.env_steps = max(self.env_steps, newest.env_steps)
            states = {name: note.state for name, note in notes.items() if name}
            self.sources.restore(self.sources.state() | states)
            log.info("the replay file holds the transitions up to step %d", self.env_steps)

    def rolled_back(self) -> None:
        """Prepare messages that set connected peers back to the newest snapshot. The next :meth:`step` returns them."""
        self._outbox = self.publisher.resend() + self.scheduler.rolled_back()

    def insert(self, source: Source, step: Step, now: float) -> None:
        """Store the transitions that a Step completes. Only the scheduler calls this."""
        gaps = source.assembler.counters["gaps"]
        transitions = source.assembler.add(step)
        if transitions is None:
            return
        source.answered, source.seen, source.active_at = step.sequence + 1, step.transitions, now
        if source.assembler.counters["gaps"] > gaps:
            log.warning(
                "%s: Steps are missing before Step %d; the learner skips the transitions across this gap",
                source.name,
                step.sequence,
            )
        if self.config.pacing.mode == "realtime" and self.env_steps >= self.config.total_steps:
            # Real-time robots continue to step during the last updates. If the learner stored these steps, more updates
            # would become due, and the run would never end.
            self.counters["beyond_total"] += len(transitions)
        else:
            self.learning.store(transitions, step)
            self.gauges.ended(transitions.ended)
            if transitions:
                self.gauges.lead(self.learning.lead)
        if self.training.storage.durable:
            self.training.note(self.env_steps, source.name, source.state())
        self.gauges.acted(step.weights_version, self.updates)
        self.reports.record_if_due(now)

    def counts(self) -> dict[str, int]:
        """The counters of the learner, its sources, its scheduler and its evaluations."""
        total = Counter(self.counters)
        for part in (self.sources.counters(), self.scheduler.counters, self.publisher.evaluations.counters()):
            total.update(part)
        return dict(total)

    def _take(self, peer: Peer, message: Message, now: float) -> list[Output]:
        if isinstance(message, Hello):
            return self._join(peer, message, now)
        if isinstance(message, Bye):
            self._leave(peer, message)
        elif isinstance(message, Evaluation):
            record = self.publisher.evaluations.take(message, self.gauges.wall(now))
            self.reports.records.append(record)
        elif isinstance(message, (Step, SimulatorState)):
            source = self.sources.of(peer, message.source)
            if source is None:
                self.counters["misnamed"] += 1
            elif isinstance(message, SimulatorState):
                return self.scheduler.state_arrived(source, message)
            else:
                self.scheduler.step_arrived(source, message, now)
        return []

    def _join(self, peer: Peer, hello: Hello, now: float) -> list[Output]:
        if peer.role in ROBOT_ROLES:
            outputs: list[Output] = []
            if self.spec is None:
                outputs += self.start(RobotSpec.from_description(hello.spec))
            source = self.sources.join(peer, now, continues=self.scheduler.continues(peer.name))
            return outputs + self.scheduler.source_joined(source)
        log.info("%s %s joined", peer.role, peer.name)
        if peer.role == "evaluator":
            self.publisher.evaluators.add(peer)
            return [(peer, weights) for weights in self.publisher.pending()]
        self.publisher.policies.add(peer)
        return self.scheduler.policy_joined(peer)

    def _leave(self, peer: Peer, bye: Bye) -> None:
        log.info("%s %s left: %s", peer.role, peer.name, bye.reason)
        self.publisher.leave(peer)
        if source := self.sources.leave(peer):
            self.scheduler.source_left(source)

    def _learn_offline(self, now: float) -> list[Output]:
        """Make one update on recorded transitions. After the last update, publish the policy and let sources start."""
        self.learning.update()
        finished = not self.learning.offline
        if finished or self.updates % EVERY == 0:
            self.reports.record(now, "offline")
        return self.publisher.publish() + self.scheduler.offline_finished() if finished else []
