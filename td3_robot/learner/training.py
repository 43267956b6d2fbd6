"""The training of a learner: the algorithm, its experience, and the preparation of transitions for both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from td3_robot.bundle import OBSERVATION_MEAN, OBSERVATION_STD, Bundle
from td3_robot.config.schema import Config
from td3_robot.learner import contract, warm_start
from td3_robot.learner.checkpointing.stateful import Stateful, reading
from td3_robot.learner.divergence import Divergence
from td3_robot.learner.engine import selection
from td3_robot.learner.experience.replayed import Replayed
from td3_robot.learner.experience.rollouts import Rollouts
from td3_robot.learner.experience.transitions import Transitions
from td3_robot.learner.experience.value_check import ValueCheck
from td3_robot.learner.normaliser import Normaliser
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.learner.replay_buffer.storage import Note, Storage
from td3_robot.messages import Step
from td3_robot.specs import Float32, RobotSpec

log = logging.getLogger(__name__)


class Training:
    """Stores transitions, makes updates and exports the policy.

    Args:
        config: configuration of the run, without ``auto`` in ``learner.device`` and ``learner.precision``. The section
            with the algorithm's name, if there is one, contains the algorithm's options.
        storage: creates the storage of the replay buffer from the capacity and the row width.
    """

    def __init__(self, spec: RobotSpec, config: Config, storage: Callable[[int, int], Storage]) -> None:
        device = torch.device(config.learner.device)
        self.config = learner = config.learner
        sizes = (spec.observation_size, spec.action_size)
        seeds = [int(word) for word in np.random.SeedSequence(config.seed).generate_state(2, np.uint32)]
        self.spec, self.hidden = spec, config.network.hidden
        options = getattr(config, learner.algorithm, None)
        self.algorithm = selection.implementation(learner)(*sizes, self.hidden, learner, seeds[0], device, options)
        if not selection.has_engine(learner):
            contract.check(self.algorithm, spec)
        self.experience: Replayed | Rollouts
        if self.on_policy:
            self.experience = Rollouts(learner.discount, *sizes)
        else:
            self.experience = Replayed(learner, *sizes, seeds[1], storage)
        self.storage = self.experience.storage
        self.normaliser = Normaliser(spec.observation_size) if learner.normalise_observations else None
        self.algorithm.prepare()
        self.divergence = Divergence(learner.discount)
        self.value_check = ValueCheck(learner.discount)
        self._half = (spec.action_high - spec.action_low) / np.float32(2)
        self._middle = (spec.action_high + spec.action_low) / np.float32(2)
        log.info("learning for robot %s in %s on %s", spec.name, learner.precision, device.type)

    def begin_with(self, bundle: Bundle) -> None:
        """Start from the actor and the observation normalisation of a policy."""
        warm_start.check(bundle, self.spec, self.hidden, self.config)
        self.algorithm.begin_with(bundle.tensors)
        if self.normaliser:
            mean, std = bundle.tensors[OBSERVATION_MEAN], bundle.tensors[OBSERVATION_STD]
            self.normaliser.begin_with(mean, std, warm_start.observations(bundle))

    @property
    def on_policy(self) -> bool:
        """Whether the algorithm learns from rollouts of the newest policy."""
        return self.algorithm.consumes == "rollouts"

    def store(self, transitions: Transitions, step: Step) -> None:
        """Store the transitions that a Step completed; there is at least one."""
        action = np.clip((transitions.action - self._middle) / self._half, -1, 1)
        transitions = replace(transitions, action=action)
        self.divergence.add(transitions.reward)
        self.value_check.add(step.source, transitions, step)
        if self.normaliser:
            self.normaliser.add(transitions.observation)
        self.experience.add(transitions, step)

    def note(self, env_steps: int, source: str, state: dict[str, Any]) -> None:
        """Record the progress of the learner and of one source in the journal of the replay file."""
        self.storage.commit(Note(self.experience.total_added, env_steps, source, state, self.seen()))

    def seen(self) -> dict[str, Any]:
        """The statistics of all stored transitions, as plain values. Lists replace float64 arrays, without rounding."""
        states = {name: part.state() for name, part in self._gatherers().items()}
        return {
            name: [{key: array.tolist() for key, array in arrays.items()}, scalars]
            for name, (arrays, scalars) in states.items()
        }

    def recover(self, seen: Mapping[str, Any]) -> None:
        """Use the rows that an earlier process stored, and restore the statistics that its :meth:`seen` returned."""
        self.experience.recover()
        with reading("the statistics in the replay journal are damaged"):
            for name, part in self._gatherers().items():
                arrays, scalars = seen[name]
                part.restore({key: np.array(values, np.float64) for key, values in arrays.items()}, scalars)

    def update(self, learning_rate: float) -> None:
        """Make one update on a batch of the experience."""
        self.algorithm.set_learning_rate(learning_rate)
        batch = self._prepared(self.experience.take())
        self.experience.learned(self.algorithm.learn(batch))

    def _prepared(self, batch: Batch) -> Batch:
        """The batch, with normalised observations if the run normalises them."""
        return self.normaliser(batch) if self.normaliser else batch

    def policy_tensors(self, *, averaged: bool) -> dict[str, Float32]:
        """Copies of tensors for a policy bundle: actor or averaged actor, and the normalisation if there is one."""
        tensors = self.algorithm.actor_tensors(averaged=averaged)
        return tensors | self.normaliser.tensors() if self.normaliser else tensors

    def problem(self) -> str | None:
        """The reason why training must stop; None if training has not diverged. Waits for the device."""
        return self.divergence.problem(self.algorithm.metrics(clear=False))

    def metrics(self) -> dict[str, float]:
        """For each metric (docs/reference/metrics.md): its mean since the last call, or its newest value.

        Waits for the device.
        """
        return self.algorithm.metrics() | self.value_check.figures(self.algorithm, self.normaliser)

    def parts(self) -> dict[str, Stateful]:
        """The parts whose state a checkpoint contains, by their names in the checkpoint."""
        parts: dict[str, Stateful] = {self.algorithm.part: self.algorithm, **self.experience.parts()}
        return {**parts, "value_check": self.value_check, **self._gatherers()}

    def _gatherers(self) -> dict[str, Stateful]:
        """The parts that compute statistics of all stored transitions."""
        return {"divergence": self.divergence} | ({"normaliser": self.normaliser} if self.normaliser else {})
