"""Makes records for ``metrics.jsonl``, makes gauges for the learner's Status, and keeps the newest good policy."""

from __future__ import annotations

from typing import Any

from td3_robot.learner.algorithms.table import broken_rule
from td3_robot.learner.evaluations import next_multiple
from td3_robot.learner.gauges import Gauges
from td3_robot.learner.learning import Learning
from td3_robot.learner.publisher import Publisher
from td3_robot.learner.sources import Sources
from td3_robot.util.rate import RateMeter

Record = dict[str, Any]

EVERY = 1000  # environment steps (offline: updates) between two records of training
_PERIODS = 16  # minimum number of control periods between two records, because making a record takes 2 ms

_LATE = ("length_mean", "return_mean")  # metrics of the learner that the first records lack


class Reports:
    """Collects records until the node writes them.

    Attributes:
        next_record: number of environment steps at which the next record of training is due.
        sound: the policy bundle at the newest record; None before the first record. The learner makes no
            record after a divergence, so this policy is a good one.
    """

    def __init__(self, learning: Learning, publisher: Publisher, sources: Sources, gauges: Gauges) -> None:
        self.records: list[Record] = []
        self.next_record = EVERY
        self.sound: bytes | None = None
        self._rates = RateMeter()
        self._learning, self._publisher, self._sources, self._gauges = learning, publisher, sources, gauges

    def take(self) -> list[Record]:
        """The records since the last call."""
        taken, self.records = self.records, []
        return taken

    def record_if_due(self, now: float) -> None:
        """Make a record every 1,000 environment steps.

        With more than 62 robots, make a record when the robots have made 16 more steps each, on average.
        """
        if self._learning.env_steps >= self.next_record:
            robots = sum(source.robots for source in self._sources.live())
            self.next_record = next_multiple(self._learning.env_steps, max(EVERY, _PERIODS * robots))
            self.record(now)

    def record(self, now: float, kind: str = "train") -> None:
        """Make a record of the training, and keep the learner's present policy in ``sound``."""
        learning = self._learning
        learning.check()
        self.sound = self._publisher.bundle(averaged=True).encode()
        learning.sound_at = learning.env_steps
        stream = self._sources.counters()
        record: Record = {
            "kind": kind,
            "env_steps": learning.env_steps,
            "updates": learning.updates,
            "replay_ratio": learning.replay_ratio,
            "learning_rate": learning.learning_rate,
            "episodes": stream["episodes"],
            "steps_lost": stream["missed"],
        }
        if self._gauges.length_mean is not None:
            record["length_mean"] = self._gauges.length_mean
        rates = self._rates(now, steps_per_s=learning.env_steps, updates_per_s=learning.updates)
        record |= self._gauges.figures(now) | rates
        metrics = learning.training.metrics()
        if taken := {*record, *_LATE} & metrics.keys():
            problem = f"update returned the metric {min(taken)!r}, which is the name of a metric of the learner"
            raise broken_rule(learning.config.learner.algorithm, f"{problem}; allowed: another name")
        self.records.append(record | metrics)

    def figures(self, now: float) -> dict[str, float]:
        """Gauges for the learner's Status."""
        return self._gauges.figures(now) | {
            "env_steps": float(self._learning.env_steps),
            "updates": float(self._learning.updates),
            "replay_ratio": self._learning.replay_ratio,
            "weights_version": float(self._publisher.version),
            "lead_min": self._gauges.lead_min,
            "lead_max": self._gauges.lead_max,
            "target_reached": float(self._publisher.evaluations.reached),
        }
