"""The learner without I/O: Steps in; updates inside; Weights and Throttles out."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES, Input, Output, Peer
from td3_robot.errors import BundleError, DivergenceError
from td3_robot.learner.evaluations import Evaluations, next_multiple
from td3_robot.learner.meter import Meter
from td3_robot.learner.rate_limiter import RateLimiter
from td3_robot.learner.rounds import Rounds
from td3_robot.learner.sources import Source, Sources
from td3_robot.learner.transitions import Transitions
from td3_robot.messages import MAX_PAYLOAD, Bye, Evaluation, Hello, Message, SimulatorState, Step, Weights
from td3_robot.safety import limits as safety
from td3_robot.specs import RobotSpec

if TYPE_CHECKING:  # it imports torch, starts compilers and touches files; the node makes it
    from td3_robot.learner.training import Training

log = logging.getLogger(__name__)

_RECORD_EVERY = 1000  # environment steps (or updates, before the first of them) between two lines of training metrics
_SENT_AT_JOIN = 2  # in lock-step a restarted policy server may be asked for the version before the newest

Record = dict[str, Any]


class LearnerCore:
    """Learns from the transitions of any number of sources, in the order they come (or, in lock-step, in rounds).

    One call of :meth:`step` makes at most one update (in lock-step: all that one round owes), so that input is looked
    at between updates. ``records`` collects metrics for whoever writes them; take them with :meth:`take_records`.
    """

    def __init__(
        self,
        config: Config,
        make_training: Callable[[RobotSpec], Training],
        *,
        spec: RobotSpec | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._make_training = make_training
        self.provenance = dict(provenance or {})
        learner = config.learner
        self.limiter = RateLimiter(
            learner.replay_ratio,
            learner.replay_ratio_band,
            learner.learning_starts,
            config.total_steps,
            learner.offline_updates,
        )
        self.spec: RobotSpec | None = None
        self.env_steps = 0
        self.version = 0
        self.good: bytes | None = None  # bundle of the newest moment at which training was known to be sound
        self.records: list[Record] = []
        self.sources = Sources()
        self.rounds = Rounds(self.sources, config.simulators)
        self.counters: Counter[str] = Counter()
        self.meter = Meter()
        self._peers: dict[str, set[Peer]] = {"policy": set(), "evaluator": set()}
        self.sent: deque[Weights] = deque(maxlen=_SENT_AT_JOIN)
        self.evaluations = Evaluations(config.evaluation)
        self.next_record = _RECORD_EVERY
        self.learning = False
        self.published_at = 0
        self._good_at = 0
        self._outbox: list[Output] = []
        if spec:
            self.begin(spec)
            self.publish()

    @property
    def lockstep(self) -> bool:
        return self.config.timing == "lockstep"

    @property
    def updates(self) -> int:
        return self.training.updates if self.spec else 0

    @property
    def learning_rate(self) -> float:
        """The learning rate at this point of the run."""
        return self.config.learner.learning_rate_at(self.env_steps / self.config.total_steps)

    @property
    def done(self) -> bool:
        """Whether the run's steps and updates are all made, or an evaluation reached its target."""
        return self.evaluations.reached or self.limiter.done(self.env_steps, self.updates)

    @property
    def offline(self) -> bool:
        """Whether updates are still to be made before the first environment step."""
        return self.spec is not None and self.updates < self.limiter.offline

    @property
    def update_due(self) -> bool:
        """Whether a call of :meth:`step` has work to do even without input."""
        return self.offline or (not self.lockstep and not self.done and self._owed)

    @property
    def _owed(self) -> bool:
        """Whether there is an update to make, and something to sample: rows of n steps come late."""
        return self.limiter.updates_due(self.env_steps, self.updates) and self.training.ready

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived, do a bounded piece of learning, say what is to be sent; ``now`` in seconds."""
        self.meter.start(now)
        outputs, self._outbox = self._outbox, []
        for origin, message in inputs:
            if isinstance(origin, Peer):
                outputs += self._take(origin, message, now)
        if self.offline:
            outputs += self._learn_offline(now)
        elif self.lockstep:
            outputs += self._round(now)
        else:
            if self.update_due:
                self.training.update(self.learning_rate)
            outputs += self._publish_if_due()
        if not self.lockstep:
            outputs += self.sources.grant(self.limiter, self.env_steps, self.updates, now)
        return outputs

    def begin_with(self, bundle: Bundle) -> None:
        """Begin to learn from this policy; call it before anything else is learned or joins.

        Raises:
            BundleError: it does not fit the configuration.
        """
        self.begin(bundle.spec, bundle)
        self.publish()

    def bundle(self, *, averaged: bool = False) -> Bundle:
        """The policy as it acts now, or as it is evaluated and kept (the same without ``policy_average``).

        Raises:
            BundleError: no robot has been seen yet.
            DivergenceError: its weights are not finite.
        """
        if self.spec is None:
            raise BundleError("the learner has no policy yet: no simulator has joined")
        tensors = self.training.policy_tensors(averaged=averaged)
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            raise self._diverged("the policy's weights are no longer finite")
        learner, asked = self.config.learner, self.config.exploration
        explores = self.learning or learner.start_from is not None or learner.offline_updates > 0
        return Bundle(
            self.spec,
            self.config.network.hidden,
            tensors,
            Exploration(asked.kind, asked.noise, asked.noise_parameters()) if explores else Exploration("uniform"),
            {
                **self.provenance,
                "precision": self.config.learner.precision,
                **({"compiled": self.training.compiled} if self.config.learner.compiles else {}),
                "version": self.version,
                "updates": self.updates,
                "env_steps": self.env_steps,
            },
            self.config.safety,
        )

    def check(self) -> None:
        """Waits for the device: for where metrics are read or a checkpoint is made.

        Raises:
            DivergenceError: training has diverged.
        """
        if self.spec and (problem := self.training.problem()):
            raise self._diverged(problem)

    def _diverged(self, problem: str) -> DivergenceError:
        kept = f"the policy of {self._good_at} steps and " if self.good else ""
        return DivergenceError(
            f"training diverged: {problem} (after {self.env_steps} steps and {self.updates} updates); kept: {kept}the "
            "checkpoints from before; try a lower learner.learning_rate, learner.gradient_clip, learner.layer_norm or "
            "learner.normalise_observations"
        )

    def final_bundle(self) -> Bundle:
        """The policy to keep at the end, under a version of its own unless it is the last one published."""
        if self.spec and (self.updates > self.published_at or self.config.learner.policy_average):
            self.version += 1
        return self.bundle(averaged=True)

    def take_records(self) -> list[Record]:
        """The metrics since the last call."""
        taken, self.records = self.records, []
        return taken

    def figures(self, now: float) -> dict[str, float]:
        """Gauges for the supervisor and for people."""
        return self.meter.figures(now) | {
            "env_steps": float(self.env_steps),
            "updates": float(self.updates),
            "replay_ratio": self.replay_ratio(),
            "weights_version": float(self.version),
            "lead_min": self.meter.lead_min,
            "lead_max": self.meter.lead_max,
            "target_reached": float(self.evaluations.reached),
        }

    def counts(self) -> dict[str, int]:
        """Counters since the start (of this process, for the sources' ones)."""
        total = Counter(self.counters)
        total.update(self.sources.counters())
        total.update(self.rounds.counters)
        total.update(self.evaluations.counters())
        return dict(total)

    # -- input ---------------------------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: Message, now: float) -> list[Output]:
        if isinstance(message, Hello):
            return self._join(peer, message, now)
        if isinstance(message, Bye):
            self._leave(peer, message)
        elif isinstance(message, Evaluation):
            self.records.append(self.evaluations.take(message, self.meter.wall(now)))
        elif isinstance(message, (Step, SimulatorState)):
            source = self.sources.of(peer, message.source)
            if source is None:
                self.counters["misnamed"] += 1
            elif isinstance(message, SimulatorState):
                if self.rounds.take_state(source, message):
                    return self._let_go([source])
            elif self.lockstep:
                self.rounds.take(source, message)
            else:
                self._insert(source, message, now)
        return []

    def _join(self, peer: Peer, hello: Hello, now: float) -> list[Output]:
        if peer.role in ROBOT_ROLES:
            outputs: list[Output] = []
            if self.spec is None:
                self.begin(RobotSpec.from_description(hello.spec))
                outputs += self.publish()
            saved = self.lockstep and peer.name in self.rounds.states
            source = self.sources.join(peer, now, goes_on=saved)
            return outputs + self.rounds.enter(source) + self._let_go([source])
        if peer.role not in self._peers:
            return []
        self._peers[peer.role].add(peer)
        log.info("%s %s joined", peer.role, peer.name)
        if peer.role == "evaluator":
            return [(peer, weights) for weights in self.evaluations.pending.values()]
        sent: list[Output] = [(peer, weights) for weights in self.sent]
        # A server that holds newer weights got them from a learner we are the restart of. Lock-step goes back with it;
        # else never go back behind them.
        if not self.lockstep and hello.weights_version >= max(1, self.version):
            if not self.env_steps and self.config.learner.start_from is None:
                log.warning(
                    "policy server %s: version %d is replaced by weights that have learned nothing yet; "
                    "learner.start_from begins with a policy",
                    peer.name,
                    hello.weights_version,
                )
            self.version = hello.weights_version
            sent = self.publish() if self.spec else []
        return sent + self._let_go(self.sources.live())

    def _let_go(self, sources: Sequence[Source]) -> list[Output]:
        """Lock-step: tell sources the weights to name, once there is a policy server that holds those."""
        ready = self.lockstep and self.spec and self._peers["policy"] and not self.offline
        return self.rounds.let_go(self.version, sources) if ready else []

    def went_back(self) -> None:
        """Lock-step: a saved state has been put into this core while peers are connected; they are told to go back."""
        self._outbox = [(peer, weights) for peer in self._peers["policy"] for weights in self.sent]
        for weights in self.evaluations.pending.values():
            self._outbox += [(peer, weights) for peer in self._peers["evaluator"]]
        self._outbox += self.rounds.go_back()

    def _leave(self, peer: Peer, bye: Bye) -> None:
        log.info("%s %s left: %s", peer.role, peer.name, bye.reason)
        for peers in self._peers.values():
            peers.discard(peer)
        self.rounds.leave(self.sources.leave(peer))

    def _insert(self, source: Source, step: Step, now: float) -> None:
        gaps = source.assembler.counters["gaps"]
        transitions = source.assembler.add(step)
        if transitions is None:
            return
        source.answered, source.seen, source.heard = step.sequence + 1, step.transitions, now
        if source.assembler.counters["gaps"] > gaps:
            log.warning("%s: a gap before Step %d; nothing is joined over it", source.name, step.sequence)
        self._store(transitions, step)
        if self.training.durable:
            self.note(source.name, source.state())
        self.meter.acted(step.weights_version, self.updates)
        if self.env_steps >= self.next_record:
            self.next_record = next_multiple(self.env_steps, _RECORD_EVERY)
            self._record(now)

    def _store(self, transitions: Transitions, step: Step) -> None:
        if self.config.pacing.mode == "realtime" and self.env_steps >= self.config.total_steps:
            # Robots that do not wait go on while the last updates are made; stored, they would ask for ever more.
            self.counters["beyond_total"] += len(transitions)
            return
        if len(transitions):
            self.training.store(transitions, step)
            self.env_steps += len(transitions)
            if self.env_steps > self.limiter.start and self.limiter.ratio is not None:
                self.meter.lead(self.limiter.lead(self.env_steps, self.updates))
        self.meter.ended(transitions.ended)

    # -- learning ------------------------------------------------------------------------------------------------

    def begin(self, spec: RobotSpec, bundle: Bundle | None = None) -> None:
        """Know the robot, and begin to learn for it, with the policy of a bundle if there is one."""
        safety.joined(self.config.safety, safety.SafetyConfig(), spec)  # or say now what does not fit this robot
        self.training = self._make_training(spec)
        if bundle:
            self.training.begin_with(bundle)
        self.spec = spec
        self.learning = self.config.learner.learning_starts == 0
        self.recover()

    def recover(self) -> None:
        """Take up what the replay buffer's storage was told after the last checkpoint, or before there was one."""
        notes = self.training.notes
        if notes:
            newest = max(notes.values(), key=lambda note: (note.total_added, note.env_steps))
            self.training.recover(newest.seen)
            self.env_steps = max(self.env_steps, newest.env_steps)
            states = {name: note.state for name, note in notes.items() if name}
            self.sources.restore(self.sources.state() | states)
            log.info("the replay file holds the transitions up to step %d", self.env_steps)

    def note(self, source: str, state: dict[str, Any]) -> None:
        """Have the replay buffer's storage, if it outlives the process, keep how far all has come."""
        self.training.note(self.env_steps, source, state)

    def _learn_offline(self, now: float) -> list[Output]:
        """One update on what recordings hold; after the last one everybody is told its policy, and may go on."""
        self.training.update(self.learning_rate)
        if self.offline and self.updates % _RECORD_EVERY:
            return []
        self._record(now, "offline")
        return [] if self.offline else self.publish() + self._let_go(self.sources.live())

    def _round(self, now: float) -> list[Output]:
        """Lock-step: one Step of every source is a round; then the updates it owes, then everybody may go on."""
        ready = self.rounds.complete() if self._peers["policy"] and not self.done else []
        if not ready:
            return []
        for source in ready:
            self._insert(source, source.queue.popleft(), now)
        while self._owed:
            self.training.update(self.learning_rate)
        return self._publish_if_due() + self.rounds.end(self.version, done=self.done)

    # -- output --------------------------------------------------------------------------------------------------

    def _publish_if_due(self) -> list[Output]:
        if self.spec is None:
            return []
        outputs: list[Output] = []
        evaluate = self.evaluations.due(self.env_steps)
        starts = not self.learning and self.env_steps >= self.limiter.start
        self.learning = self.learning or starts
        if evaluate and not self.evaluations.ask(self.env_steps):
            self.version += 1  # so that versions do not depend on how fast the evaluator is
        elif evaluate:
            weights = self._weights(averaged=True)
            self.evaluations.pending[weights.version] = weights
            outputs += [(peer, weights) for peer in self._peers["evaluator"]]
        if starts or evaluate or self.updates - self.published_at >= self.config.learner.publish_every:
            outputs += self.publish()
        return outputs

    def publish(self) -> list[Output]:
        """A new version of the weights, for every policy server."""
        weights = self._weights(averaged=False)
        self.published_at = self.updates
        self.meter.published(weights.version, self.updates)
        self.sent.append(weights)
        return [(peer, weights) for peer in self._peers["policy"]]

    def _weights(self, *, averaged: bool) -> Weights:
        self.version += 1
        payload = self.bundle(averaged=averaged).encode()
        if len(payload) > MAX_PAYLOAD:
            raise BundleError(
                f"the policy takes {len(payload):,} bytes, above the {MAX_PAYLOAD:,} that Weights may hold; "
                "use a smaller network.hidden"
            )
        return Weights(self.version, self.updates, self.env_steps, sha256(payload), payload)

    # -- metrics -------------------------------------------------------------------------------------------------

    def _record(self, now: float, kind: str = "train") -> None:
        self.check()
        self.good, self._good_at = self.bundle(averaged=True).encode(), self.env_steps
        stream = self.sources.counters()
        record: Record = {
            "kind": kind,
            "env_steps": self.env_steps,
            "updates": self.updates,
            "replay_ratio": self.replay_ratio(),
            "learning_rate": self.learning_rate,
            "episodes": stream["episodes"],
            "steps_lost": stream["missed"],
        }
        record |= self.meter.figures(now) | self.meter.rates(self.env_steps, self.updates, now)
        self.records.append(record | self.training.metrics())

    def replay_ratio(self) -> float:
        """Updates made for each environment step since learning started; 0 before."""
        after = self.env_steps - self.limiter.start
        return (self.updates - self.limiter.offline) / after if after > 0 else 0.0
