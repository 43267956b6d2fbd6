"""The fast engine of TD3 and DDPG: the update of ``algorithms/td3.py`` with hand-written gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.learner import compute
from td3_robot.learner.algorithms import state
from td3_robot.learner.algorithms.base import Algorithm
from td3_robot.learner.algorithms.td3 import LOSSES, TD3
from td3_robot.learner.engine.graph import CapturedUpdate
from td3_robot.learner.engine.metrics import EngineMetrics
from td3_robot.learner.engine.networks import Adam, Layer, Network, joined
from td3_robot.learner.engine.threads import has_second_thread, prepare_thread
from td3_robot.learner.replay_buffer.buffer import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Result = TypeVar("Result")


DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda error: 2 * error,
    "huber": lambda error: error.clamp(-1.0, 1.0),
}
"""Maps ``learner.critic_loss`` to the derivative of the loss, as a function of the error Q(s, a) - y."""


class FastTD3(Algorithm):
    """Makes the updates of :class:`TD3`, but faster. To understand the algorithm, read that class.

    Attributes:
        second: runs a second thread, which computes the second critic and half of each batch for the actor. None if
            there is no such thread: on a GPU, with one thread, or with ``threads_in: operators``.
    """

    optimiser: type[Adam] = Adam
    part, means, gauges = TD3.part, TD3.means, TD3.gauges
    measured: EngineMetrics

    def build(self) -> None:
        config = self.config
        self._action_columns = slice(self.observation_size, self.observation_size + self.action_size)
        dtype, device = DTYPES[config.precision], self.device

        def actor() -> Network:
            sizes = [self.observation_size, *self.hidden, self.action_size]
            return Network(["actor"], sizes, dtype=dtype, device=device)

        def critics() -> Network:
            sizes = [self._action_columns.stop, *self.hidden, 1]
            names = ["critic1", "critic2"][: 1 + config.twin_critics]
            return Network(names, sizes, layer_norm=config.layer_norm, dtype=dtype, device=device)

        self.actor, self.actor_target = actor(), actor()
        self.critics, self.critics_target = critics(), critics()
        for network, target in ((self.actor, self.actor_target), (self.critics, self.critics_target)):
            network.initialise(self.random)
            target.polyak_update(network, 1.0)
        self.actor_average = actor() if config.policy_average else self.actor
        rate: float | Tensor = config.learning_rate
        if device.type == "cuda":  # a captured update would ignore later changes of a Python number
            rate = torch.tensor(rate, device=device)
        self.actor_adam = self.optimiser(self.actor, rate, config.gradient_clip)
        self.critics_adam = self.optimiser(self.critics, rate, config.gradient_clip)
        self.measured = EngineMetrics(self)
        self.second: ThreadPoolExecutor | None = None
        if device.type == "cpu" and has_second_thread(config.thread_count, config.threads_in):
            self.second = ThreadPoolExecutor(1, "learner", prepare_thread, (torch.get_num_threads(),))
        self._captured: CapturedUpdate | None = None

    def prepare(self) -> None:
        """On a GPU with uniform replay, use CUDA graphs."""
        # With replay "lap", the replay buffer needs TD errors, and a graph returns no TD errors.
        if self.device.type == "cuda" and self.config.replay == "uniform":
            self._captured = CapturedUpdate(self)

    def learn(self, batch: Batch) -> Sequence[Tensor]:
        """Make one update.

        If :meth:`prepare` has chosen CUDA graphs, the result is always empty. This also holds for updates that run
        without a graph.
        """
        if self._captured:
            return self._captured(batch)
        return self.improve(batch, self.draw_noise(len(batch.action)))

    def set_learning_rate(self, rate: float) -> None:
        if isinstance(self.critics_adam.learning_rate, Tensor):
            self.critics_adam.learning_rate.fill_(rate)  # both optimisers share this tensor
        else:
            self.actor_adam.learning_rate = self.critics_adam.learning_rate = rate

    def draw_noise(self, batch_size: int) -> Tensor:
        """Draw the standard normal numbers of the next update: float32[B, A] on the device."""
        noise = torch.randn((batch_size, self.action_size), generator=self.random)
        return compute.upload(noise.numpy(), self.device)

    @torch.inference_mode()  # without autograd, each operator is faster
    @compute.flush_denormals()
    def improve(self, batch: Batch, noise: Tensor) -> list[Tensor]:
        """Make one update with ``noise`` from :meth:`draw_noise`. Never waits for the device.

        Returns:
            The TD errors of each critic.
        """
        config = self.config
        batch = Batch(*(tensor.to(self.device) for tensor in batch))
        errors, y, means = self.update_critics(batch, noise)
        self.updates += 1
        self.measured.of_critics += means
        self.measured.keep(targets=y)

        if self.due(config.policy_delay):
            if self.updates > config.critics_first:
                pi, loss = self.update_actor(batch)
                self.measured.of_actor += loss
                self.measured.keep(policy=pi)
            self.critics_target.polyak_update(self.critics, config.polyak)
            self.actor_target.polyak_update(self.actor, config.polyak)
            if config.policy_average:
                made = self.updates // config.policy_delay
                self.actor_average.polyak_update(self.actor, max(config.policy_average, 1 / made))
        return errors

    def update_critics(self, batch: Batch, noise: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Update the critics.

        Returns:
            Three values. First: a list with the errors Q(s, a) - y of each critic. Second: y. Third: one tensor with
            the means of loss, Q1 and y.
        """
        config = self.config
        s, a, r, s2, discount = batch
        a2 = _rows(self._each_half(lambda s2: self.actor_target.forward(s2)[0], s2)).tanh()
        if config.target_noise:
            noise = (noise * config.target_noise).clamp(-config.target_noise_clip, config.target_noise_clip)
            a2 = (a2 + noise).clamp(-1.0, 1.0)
        s2a2, sa = torch.cat((s2, a2), 1), torch.cat((s, a), 1)
        next_q = self._each_critic(lambda head: self.critics_target.forward(s2a2, head)[0])
        y = r + discount * reduce(torch.minimum, next_q)
        loss, derivative = LOSSES[config.critic_loss], DERIVATIVES[config.critic_loss]

        def fit(head: int) -> tuple[Tensor, Tensor, list[Layer]]:
            q, trace = self.critics.forward(sa, head)
            error = q - y
            return q, error, self.critics.backward(trace, derivative(error) / len(y))

        each = self._each_critic(fit)
        losses = reduce(torch.add, [loss(q, y, reduction="none") for q, _, _ in each])
        means = torch.stack((losses.mean(), each[0][0].mean(), y.mean()))
        self.critics_adam.step(joined([[gradient for _, _, gradient in each]]))
        return [error for _, error, _ in each], y, means

    def update_actor(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Update the actor. Returns π(s) and the actor's loss, which is the mean of -Q1(s, π(s))."""
        s = batch.observation

        def half(rows: Tensor) -> tuple[Tensor, Tensor, list[Layer]]:
            output, actor_trace = self.actor.forward(rows)
            pi = output.tanh()
            q, trace = self.critics.forward(torch.cat((rows, pi), 1), 0)
            d_pi = self.critics.input_gradient(trace, torch.full_like(q, -1 / len(s)), self._action_columns)
            return q, pi, self.actor.backward(actor_trace, d_pi * (1 - pi.square()))  # the derivative of tanh

        halves = self._each_half(half, s)
        pi, loss = _rows([pi for _, pi, _ in halves]), -_rows([q for q, _, _ in halves]).mean()
        self.actor_adam.step(joined([[gradient] for _, _, gradient in halves]))
        return pi, loss

    def _each_critic(self, work: Callable[[int], Result]) -> list[Result]:
        """The results of ``work`` for every critic. With a second thread, both critics run in parallel."""
        if self.second is None or not self.config.twin_critics:
            return [work(head) for head in range(len(self.critics.heads))]
        other = self.second.submit(_without_autograd, work, 1)
        return [work(0), other.result()]

    def _each_half(self, work: Callable[[Tensor], Result], rows: Tensor) -> list[Result]:
        """The result of ``work`` for all rows, in a list.

        With a second thread, the two halves of the rows run in parallel, and the list has one result for each half.
        A sum over two halves may round differently from a sum over all rows.
        """
        if self.second is None or len(rows) < 2:
            return [work(rows)]
        first, second = rows.chunk(2)
        other = self.second.submit(_without_autograd, work, second)
        return [work(first), other.result()]

    def actor_tensors(self, *, averaged: bool = False) -> dict[str, NDArray[np.float32]]:
        source = self.actor_average if averaged and self.updates >= self.config.policy_delay else self.actor
        return {name: state.to_numpy(tensor) for name, tensor in source.named.items()}

    def begin_with(self, actor: Mapping[str, NDArray[np.float32]]) -> None:
        for name, tensor in self.actor.named.items():
            tensor.copy_(torch.tensor(actor[name]))
        self.actor.refresh()
        self.actor_target.polyak_update(self.actor, 1.0)

    def values(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        """Q1(s, a), or Q1(s, π(s)) without ``action``: float32[B, 1]."""
        s = observation.to(self.device)
        a = self.actor.forward(s)[0].tanh_() if action is None else action.to(self.device)
        return self.critics.forward(torch.cat((s, a), 1), 0)[0]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state. Most names have the form ``ROLE/HEAD.LAYER.KIND``: ``target/critic1.0.weight``."""
        tensors = {"metrics": self.measured.sums}
        for network, target, optimiser in (
            (self.actor, self.actor_target, self.actor_adam),
            (self.critics, self.critics_target, self.critics_adam),
        ):
            for role, vector in (
                ("online", network.flat),
                ("target", target.flat),
                ("adam_mean", optimiser.mean),
                ("adam_square", optimiser.square),
            ):
                tensors |= {f"{role}/{name}": view for name, view in network.layout.views(vector).items()}
        if self.config.policy_average:
            average = self.actor.layout.views(self.actor_average.flat)
            tensors |= {f"average/{name}": view for name, view in average.items()}
        tensors["adam_count/actor"] = self.actor_adam.count
        tensors["adam_count/critics"] = self.critics_adam.count
        return tensors

    def restored(self) -> None:
        """Bring the low-precision copies up to date."""
        for network in (self.actor, self.actor_target, self.critics, self.critics_target):
            network.refresh()


@torch.inference_mode()  # the second thread does not inherit the mode of the calling thread
def _without_autograd(work: Callable[[Any], Result], item: Any) -> Result:
    return work(item)


def _rows(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
