"""The learner without I/O: Steps in; updates inside; Weights and Throttles out."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from td3_robot import records
from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.config import Config
from td3_robot.errors import BundleError
from td3_robot.learner import compute
from td3_robot.learner.meter import Meter
from td3_robot.learner.rate_limiter import RateLimiter
from td3_robot.learner.replay import ReplayBuffer
from td3_robot.learner.sources import Source, Sources, throttles
from td3_robot.learner.td3 import TD3
from td3_robot.learner.transitions import Assembler, Transitions
from td3_robot.messages import MAX_PAYLOAD, Bye, Evaluation, Hello, Message, Step, Weights
from td3_robot.specs import RobotSpec
from td3_robot.transport.session import ROBOT_ROLES, Input, Output, Peer

log = logging.getLogger(__name__)

_RECORD_EVERY = 1000  # environment steps between two lines of training metrics
_SENT_AT_JOIN = 2  # in lock-step a restarted policy server may be asked for the version before the newest
_WAITING_EVALUATIONS = 4  # payloads kept for an evaluator that is behind

Record = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


class LearnerCore:
    """TD3 on the transitions of any number of sources, in the order they come (or, in lock-step, in rounds).

    One call of :meth:`step` makes at most one update (in lock-step: all that one round owes), so that input is looked
    at between updates. ``records`` collects metrics for whoever writes them; take them with :meth:`take_records`.
    """

    def __init__(self, config: Config, *, spec: RobotSpec | None = None, provenance: Mapping[str, Any] | None = None):
        self.config = config
        self.provenance = dict(provenance or {})
        learner = config.learner
        self.limiter = RateLimiter(
            learner.replay_ratio, learner.replay_ratio_band, learner.learning_starts, config.total_steps
        )
        self.spec: RobotSpec | None = None
        self.env_steps = 0
        self.version = 0
        self.best_return = float("-inf")
        self.best: bytes | None = None  # bundle to be written as the best one, until taken
        self.records: list[Record] = []
        self.sources = Sources()
        self.counters: Counter[str] = Counter()
        self.meter = Meter()
        self._peers: dict[str, set[Peer]] = {"policy": set(), "evaluator": set()}
        self._sent: deque[Weights] = deque(maxlen=_SENT_AT_JOIN)
        self._to_evaluate: dict[int, Weights] = {}
        self._next_evaluation = config.evaluation.every
        self._next_record = _RECORD_EVERY
        self._learning = False
        self._published_at = 0
        if spec:
            self._begin(spec)
            self._publish()

    @property
    def lockstep(self) -> bool:
        return self.config.timing == "lockstep"

    @property
    def updates(self) -> int:
        return self.td3.updates if self.spec else 0

    @property
    def learning_rate(self) -> float:
        """The learning rate at this point of the run."""
        learner, hold = self.config.learner, self.config.learner.learning_rate_falls_from
        beyond = self.env_steps / self.config.total_steps - hold
        fallen = min(1.0, beyond / (1 - hold)) if beyond > 0 and hold < 1 else 0.0
        return learner.learning_rate * (1 - fallen * (1 - learner.learning_rate_end))

    @property
    def done(self) -> bool:
        """Whether the run's steps and updates are all made."""
        return self.limiter.done(self.env_steps, self.updates)

    @property
    def update_due(self) -> bool:
        """Whether a call of :meth:`step` has work to do even without input."""
        return not self.lockstep and not self.done and self.limiter.updates_due(self.env_steps, self.updates)

    def step(self, inputs: Sequence[Input], now: float) -> list[Output]:
        """Take in what arrived, do a bounded piece of learning, say what is to be sent; ``now`` in seconds."""
        self.meter.start(now)
        outputs: list[Output] = []
        for origin, message in inputs:
            if isinstance(origin, Peer):
                outputs += self._take(origin, message, now)
        if self.lockstep:
            outputs += self._rounds(now)
        else:
            if self.update_due:
                self._update()
            outputs += self._publish_if_due()
            outputs += self.sources.grant(self.limiter, self.env_steps, self.updates, now)
        return outputs

    def prefill(self, spec: RobotSpec, steps: Iterable[Step]) -> int:
        """Store the transitions that these Steps of one recording make, as if they had come from sources of now.

        They count as no environment steps, and no gap between them and what comes later is one.

        Returns:
            How many they were.

        Raises:
            BundleError: they are another robot's.
        """
        if self.spec is None:
            self._begin(spec)
            self._publish()
        elif difference := self.spec.difference(spec):
            raise BundleError(f"recorded Steps are another robot's: {difference}")
        assemblers: dict[str, Assembler] = {}
        before = self.replay.total_added
        for step in steps:
            transitions = assemblers.setdefault(step.source, Assembler()).add(step)
            if transitions is not None and len(transitions):
                self._remember(transitions)
        return self.replay.total_added - before

    def bundle(self, *, averaged: bool = False) -> Bundle:
        """The policy as it acts now, or as it is evaluated and kept (the same without ``policy_average``).

        Raises:
            BundleError: no robot has been seen yet, or training has diverged.
        """
        if self.spec is None:
            raise BundleError("the learner has no policy yet: no simulator has joined")
        tensors = self.td3.actor_tensors(averaged=averaged)
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            raise BundleError(
                f"training diverged: the policy's weights are no longer finite after {self.updates} updates; "
                "the last checkpoint is kept; try a lower learner.learning_rate"
            )
        noise = self.config.exploration.noise
        return Bundle(
            self.spec,
            self.config.network.hidden,
            tensors,
            Exploration("gaussian", noise) if self._learning else Exploration("uniform"),
            {**self.provenance, "version": self.version, "updates": self.updates, "env_steps": self.env_steps},
        )

    def final_bundle(self) -> Bundle:
        """The policy to keep at the end, under a version of its own unless it is the last one published."""
        if self.spec and (self.updates > self._published_at or self.config.learner.policy_average):
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
        }

    def counts(self) -> dict[str, int]:
        """Counters since the start (of this process, for the sources' ones)."""
        total = Counter(self.counters)
        total.update(self.sources.counters())
        total["evaluations_pending"] = len(self._to_evaluate)
        return dict(total)

    # -- input ---------------------------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: Message, now: float) -> list[Output]:
        if isinstance(message, Hello):
            return self._join(peer, message, now)
        if isinstance(message, Bye):
            self._leave(peer, message)
        elif isinstance(message, Evaluation):
            self._evaluated(message, now)
        elif isinstance(message, Step):
            source = self.sources.of(peer, message.source)
            if source is None:
                self.counters["misnamed"] += 1
            elif self.lockstep:
                source.queue.append(message)
            else:
                self._insert(source, message, now)
        return []

    def _join(self, peer: Peer, hello: Hello, now: float) -> list[Output]:
        if peer.role in ROBOT_ROLES:
            outputs: list[Output] = []
            if self.spec is None:
                self._begin(RobotSpec.from_description(hello.spec))
                outputs += self._publish()
            return outputs + self._start_round([self.sources.join(peer, now)])
        if peer.role not in self._peers:
            return []
        self._peers[peer.role].add(peer)
        log.info("%s %s joined", peer.role, peer.name)
        if peer.role == "evaluator":
            return [(peer, weights) for weights in self._to_evaluate.values()]
        # A server that holds newer weights got them from a learner we are the restart of: never go back behind them.
        newer = hello.weights_version >= max(1, self.version)
        self.version = max(self.version, hello.weights_version)
        sent = self._publish() if newer and self.spec else [(peer, weights) for weights in self._sent]
        return sent + self._start_round(self.sources.live())

    def _start_round(self, sources: Sequence[Source]) -> list[Output]:
        """Lock-step: tell sources the weights to name, once there is a policy server that holds those."""
        return throttles(sources, self.version) if self.lockstep and self.spec and self._peers["policy"] else []

    def _leave(self, peer: Peer, bye: Bye) -> None:
        log.info("%s %s left: %s", peer.role, peer.name, bye.reason)
        for peers in self._peers.values():
            peers.discard(peer)
        self.sources.leave(peer)

    def _insert(self, source: Source, step: Step, now: float) -> None:
        gaps = source.assembler.counters["gaps"]
        transitions = source.assembler.add(step)
        if transitions is None:
            return
        source.answered, source.seen, source.heard = step.sequence + 1, step.transitions, now
        if source.assembler.counters["gaps"] > gaps:
            log.warning("%s: a gap before Step %d; nothing is joined over it", source.name, step.sequence)
        self._store(transitions)
        self.meter.acted(step.weights_version, self.updates)
        if self.env_steps >= self._next_record:
            self._next_record = _next_multiple(self.env_steps, _RECORD_EVERY)
            self._record(now)

    def _store(self, transitions: Transitions) -> None:
        if self.config.pacing.mode == "realtime" and self.env_steps >= self.config.total_steps:
            # Robots that do not wait go on while the last updates are made; stored, they would ask for ever more.
            self.counters["beyond_total"] += len(transitions)
            return
        if len(transitions):
            self._remember(transitions)
            self.env_steps += len(transitions)
            if self.env_steps > self.limiter.start and self.limiter.ratio is not None:
                self.meter.lead(self.limiter.lead(self.env_steps, self.updates))
        self.meter.ended(transitions.ended)
        self.counters["episodes"] += len(transitions.ended)

    def _remember(self, transitions: Transitions) -> None:
        action = np.clip((transitions.action - self._middle) / self._half, -1, 1)
        self.replay.add(
            transitions.observation,
            action,
            transitions.reward,
            transitions.next_observation,
            transitions.terminated,
        )

    # -- learning ------------------------------------------------------------------------------------------------

    def _begin(self, spec: RobotSpec) -> None:
        self.spec = spec
        learner = replace(self.config.learner, precision=compute.precision(self.config.learner.precision))
        seeds = np.random.SeedSequence(self.config.seed).generate_state(2, np.uint32)
        sizes = spec.observation_size, spec.action_size
        self.td3 = TD3(*sizes, self.config.network.hidden, learner, int(seeds[0]))
        self.replay = ReplayBuffer(learner.buffer_size, *sizes, int(seeds[1]))
        self._half = (spec.action_high - spec.action_low) / np.float32(2)
        self._middle = (spec.action_high + spec.action_low) / np.float32(2)
        self._learning = learner.learning_starts == 0
        log.info("learning for robot %s in %s", spec.name, learner.precision)

    def _update(self) -> None:
        self.td3.set_learning_rate(self.learning_rate)
        self.td3.update(self.replay.sample(self.config.learner.batch_size))

    def _rounds(self, now: float) -> list[Output]:
        """Lock-step: one Step of every source is a round; then the updates it owes, then everybody may go on."""
        outputs: list[Output] = []
        ready = self.sources.live()
        complete = len(ready) >= self.config.simulators and all(source.queue for source in ready)
        if not complete or not self._peers["policy"]:
            return outputs
        for source in ready:
            self._insert(source, source.queue.popleft(), now)
        while self.limiter.updates_due(self.env_steps, self.updates):
            self._update()
        outputs += self._publish_if_due()
        return outputs if self.done else outputs + throttles(ready, self.version)

    # -- output --------------------------------------------------------------------------------------------------

    def _publish_if_due(self) -> list[Output]:
        if self.spec is None:
            return []
        outputs: list[Output] = []
        evaluate = self.config.evaluation.every > 0 and self.env_steps >= self._next_evaluation
        starts = not self._learning and self.env_steps >= self.limiter.start
        self._learning = self._learning or starts
        waits = len(self._to_evaluate) >= _WAITING_EVALUATIONS
        if evaluate:
            self._next_evaluation = _next_multiple(self.env_steps, self.config.evaluation.every)
            self.counters["evaluations_skipped"] += waits
        if evaluate and not waits:
            weights = self._weights(averaged=True)
            self._to_evaluate[weights.version] = weights
            outputs += [(peer, weights) for peer in self._peers["evaluator"]]
        if starts or evaluate or self.updates - self._published_at >= self.config.learner.publish_every:
            outputs += self._publish()
        return outputs

    def _publish(self) -> list[Output]:
        weights = self._weights(averaged=False)
        self._published_at = self.updates
        self.meter.published(weights.version, self.updates)
        self._sent.append(weights)
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

    def _record(self, now: float) -> None:
        record: Record = {
            "kind": "train",
            "env_steps": self.env_steps,
            "updates": self.updates,
            "replay_ratio": self.replay_ratio(),
            "learning_rate": self.learning_rate,
            "episodes": self.counters["episodes"],
            "steps_lost": self.sources.counters()["missed"],
        }
        self.records.append(record | self.meter.figures(now) | self.td3.metrics())

    def replay_ratio(self) -> float:
        """Updates made for each environment step since learning started; 0 before."""
        after = self.env_steps - self.limiter.start
        return self.updates / after if after > 0 else 0.0

    def _evaluated(self, message: Evaluation, now: float) -> None:
        weights = self._to_evaluate.pop(message.version, None)
        record = records.evaluation(
            env_steps=message.env_steps,
            updates=message.updates,
            wall_s=self.meter.wall(now),
            weights_version=message.version,
            returns=message.returns.tolist(),
            lengths=message.lengths.tolist(),
        )
        self.records.append(record)
        mean = record["eval_return_mean"]
        if weights and mean > self.best_return:
            self.best_return, self.best = mean, weights.payload

    # -- checkpoint ----------------------------------------------------------------------------------------------

    def state(self, now: float) -> tuple[Arrays, dict[str, Any]]:
        """Everything a restarted learner needs: named arrays, and plain JSON values.

        Raises:
            BundleError: no robot has been seen yet.
        """
        if self.spec is None:
            raise BundleError("the learner has nothing to save yet: no simulator has joined")
        td3_arrays, td3 = self.td3.state()
        replay_arrays, replay = self.replay.state()
        arrays = {f"td3.{name}": array for name, array in td3_arrays.items()}
        arrays |= {f"replay.{name}": array for name, array in replay_arrays.items()}
        return arrays, {
            "spec": self.spec.describe(),
            "td3": td3,
            "replay": replay,
            "env_steps": self.env_steps,
            "version": self.version,
            "learning": self._learning,
            "best_return": self.best_return if np.isfinite(self.best_return) else None,
            "next_evaluation": self._next_evaluation,
            "next_record": self._next_record,
            "meter": self.meter.state(now),
            "counters": dict(self.counters),
            "sources": self.sources.state(),
        }

    @classmethod
    def restored(
        cls, config: Config, arrays: Arrays, scalars: Mapping[str, Any], provenance: Mapping[str, Any] | None = None
    ) -> LearnerCore:
        """A learner that goes on where :meth:`state` was taken; sources join anew.

        Raises:
            BundleError: the state does not fit the configuration.
        """
        try:
            core = cls(config, spec=RobotSpec.from_description(scalars["spec"]), provenance=provenance)
            core.td3.restore(_part(arrays, "td3."), scalars["td3"])
            core.replay.restore(_part(arrays, "replay."), scalars["replay"])
            core.env_steps = scalars["env_steps"]
            core.version = scalars["version"]
            core.best_return = scalars["best_return"] if scalars["best_return"] is not None else float("-inf")
            core._learning = scalars["learning"]
            core._next_evaluation = scalars["next_evaluation"]
            core._next_record = scalars["next_record"]
            core.meter.restore(scalars["meter"])
            core.counters.update(scalars["counters"])
            core.sources.restore(scalars["sources"])
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"checkpoint does not fit this configuration: {type(error).__name__} {error}") from None
        core._sent.clear()  # what was published before the state came in is a stranger's
        core._publish()
        return core


def _next_multiple(value: int, step: int) -> int:
    return (value // step + 1) * step


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
