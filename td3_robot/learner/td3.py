"""TD3: twin delayed deep deterministic policy gradient (Fujimoto, van Hoof and Meger 2018, algorithm 1).

Without its three additions it is DDPG (Lillicrap et al. 2016, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner import compute, td3_state
from td3_robot.learner.losses import LOSSES
from td3_robot.learner.networks import Adam, Gradient, Layer, Network, joined
from td3_robot.learner.replay import Batch
from td3_robot.learner.td3_metrics import TD3Metrics

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Result = TypeVar("Result")


class TD3:
    """An actor and two critics (one without ``twin_critics``), their targets and their optimisers.

    Actions are normalised: -1 and 1 are the limits of each dimension.

    Args:
        observation_size, action_size: O and A.
        hidden: the sizes of the hidden layers, of actor and critics alike.
        config: TD3's parameters, ``precision``, ``threads``, ``threads_in``, ``critic_loss``, ``gradient_clip``,
            ``critics_first`` and ``layer_norm`` (in the critics only); no other key plays a part. The discount comes
            with each transition.
        seed: of the initial parameters and the target noise; torch's global generator is not touched.
        device: where the networks live. Batches may lie elsewhere. All random numbers are drawn on the CPU: they are
            the same for every device.

    Attributes:
        updates: critic updates made so far.
        second: a thread for the other critic, and for the other half of a batch; None without.
        critics_slopes, actor_slopes: make the gradients, from inputs and parameters alone; each can be replaced by
            something quicker that gives the same, see :mod:`td3_robot.learner.compiled`.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        hidden: Sequence[int],
        config: LearnerConfig,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self.config = config
        self.updates = 0
        self._device = torch.device(device)
        self.random = torch.Generator().manual_seed(seed)
        self._action_columns = slice(observation_size, observation_size + action_size)

        def actor() -> Network:
            sizes = [observation_size, *hidden, action_size]
            return Network(["actor"], sizes, dtype=DTYPES[config.precision], device=device)

        def critics() -> Network:
            sizes = [observation_size + action_size, *hidden, 1]
            names, dtype = ["critic1", "critic2"][: 1 + config.twin_critics], DTYPES[config.precision]
            return Network(names, sizes, layer_norm=config.layer_norm, dtype=dtype, device=device)

        self.actor, self.actor_target = actor(), actor()
        self.critics, self.critics_target = critics(), critics()
        for network, target in ((self.actor, self.actor_target), (self.critics, self.critics_target)):
            network.initialise(self.random)
            target.track(network, 1.0)
        self.actor_average = actor() if config.policy_average else self.actor
        rate: float | Tensor = config.learning_rate
        if self._device.type == "cuda":  # a number would be fixed where the update is captured
            rate = torch.tensor(rate, device=self._device)
        self.actor_adam = Adam(self.actor, rate, config.gradient_clip)
        self.critics_adam = Adam(self.critics, rate, config.gradient_clip)
        self.measured = TD3Metrics(self.critics_adam, self.actor_adam, config.policy_delay, config.critics_first)
        self._loss = LOSSES[config.critic_loss]
        self.second = compute.second_thread(config.threads, config.threads_in) if self._device.type == "cpu" else None
        self.critics_slopes, self.actor_slopes = self._critics_slopes, self._actor_slopes

    @property
    def compiled(self) -> bool:
        """Whether something quicker makes the gradients."""
        return self.critics_slopes != self._critics_slopes

    def set_learning_rate(self, rate: float) -> None:
        """Use this learning rate from the next update on; it is no part of :meth:`state`."""
        if isinstance(self.critics_adam.learning_rate, Tensor):
            self.critics_adam.learning_rate.fill_(rate)  # both optimisers'
        else:
            self.actor_adam.learning_rate = self.critics_adam.learning_rate = rate

    def update(self, batch: Batch) -> list[Tensor]:
        """Improve the critics, and every ``policy_delay``-th time the actor and all targets, by one step.

        Args:
            batch: B transitions; see :class:`Batch` for shapes and ranges.

        Returns:
            The errors Q(s, a) - y that each critic had: float32[B, 1], on the device.
        """
        return self.improve(batch, self.draw_noise(len(batch.action)))

    def draw_noise(self, batch_size: int) -> Tensor:
        """The standard normal numbers float32[B, A] of the next update, on the device."""
        columns = self._action_columns
        noise = torch.randn((batch_size, columns.stop - columns.start), generator=self.random)
        return compute.upload(noise.numpy(), self._device)

    @torch.inference_mode()  # the gradients are our own: without autograd's bookkeeping each operator costs less
    @compute.vanishing_is_zero()
    def improve(self, batch: Batch, noise: Tensor) -> list[Tensor]:
        """:meth:`update` with these numbers from :meth:`draw_noise`. Waits for no device, and can be captured."""
        config = self.config
        s, a, r, s2, discount = (tensor.to(self._device) for tensor in batch)
        errors, y, means, gradient = self.critics_slopes(s, a, r, s2, discount, noise)
        self.critics_adam.step(gradient)
        self.updates += 1
        self.measured.of_critics += means
        self.measured.keep(targets=y)

        if self.updates % config.policy_delay == 0:  # delayed policy, and targets
            if self.updates > config.critics_first:
                pi, loss, gradient = self.actor_slopes(s)
                self.actor_adam.step(gradient)
                self.measured.of_actor += loss
                self.measured.keep(policy=pi)

            self.critics_target.track(self.critics, config.polyak)
            self.actor_target.track(self.actor, config.polyak)
            if config.policy_average:  # a plain mean at first, so that it does not drag the initial weights along
                made = self.updates // config.policy_delay
                self.actor_average.track(self.actor, max(config.policy_average, 1 / made))
        return errors

    def _critics_slopes(
        self, s: Tensor, a: Tensor, r: Tensor, s2: Tensor, discount: Tensor, noise: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor, Gradient]:
        """Each critic's errors Q(s, a) - y, the targets y, means of loss, Q1 and y, and the loss's gradient."""
        config = self.config
        # Target policy smoothing, and the smaller of two values: y = r + γ min Q'(s', π'(s') + ε)
        a2 = _together(self._each_half(lambda s2: self.actor_target.forward(s2)[0], s2)).tanh()
        if config.target_noise:
            noise = (noise * config.target_noise).clamp(-config.target_noise_clip, config.target_noise_clip)
            a2 = (a2 + noise).clamp(-1.0, 1.0)
        s2a2, sa = torch.cat((s2, a2), 1), torch.cat((s, a), 1)
        next_q = self._each_critic(lambda head: self.critics_target.forward(s2a2, head)[0])
        y = r + discount * reduce(torch.minimum, next_q)

        # Critics: minimise the sum over both of the batch's mean loss of Q(s, a) - y
        loss, slope = self._loss

        def fit(head: int) -> tuple[Tensor, Tensor, list[Layer]]:
            q, trace = self.critics.forward(sa, head)
            error = q - y
            return q, error, self.critics.backward(trace, slope(error) / len(y))

        each = self._each_critic(fit)
        errors, slopes = [error for _, error, _ in each], [gradient for _, _, gradient in each]
        means = torch.stack((reduce(torch.add, map(loss, errors)).mean(), each[0][0].mean(), y.mean()))
        return errors, y, means, joined([slopes])

    def _actor_slopes(self, s: Tensor) -> tuple[Tensor, Tensor, Gradient]:
        """π(s), the policy's loss, which is the batch's mean -Q1(s, π(s)), and its gradient."""

        def half(rows: Tensor) -> tuple[Tensor, Tensor, list[Layer]]:
            output, actor_trace = self.actor.forward(rows)
            pi = output.tanh()
            q, trace = self.critics.forward(torch.cat((rows, pi), 1), 0)
            d_pi = self.critics.input_gradient(trace, torch.full_like(q, -1 / len(s)), self._action_columns)
            return q, pi, self.actor.backward(actor_trace, d_pi * (1 - pi.square()))  # the derivative of tanh

        halves = self._each_half(half, s)
        pi, loss = _together([pi for _, pi, _ in halves]), -_together([q for q, _, _ in halves]).mean()
        return pi, loss, joined([[slopes] for _, _, slopes in halves])

    def _each_critic(self, work: Callable[[int], Result]) -> list[Result]:
        """``work`` of critic 0, 1: with two threads at the same time, and always with the same result."""
        if self.second is None or not self.config.twin_critics:
            return [work(head) for head in range(len(self.critics.heads))]
        other = self.second.submit(work, 1)
        return [work(0), other.result()]

    def _each_half(self, work: Callable[[Tensor], Result], rows: Tensor) -> list[Result]:
        """``work`` of both halves of the rows, at the same time; with one thread, of all rows.

        A sum over the rows may round otherwise in halves than in one piece.
        """
        if self.second is None or len(rows) < 2:
            return [work(rows)]
        first, second = rows.chunk(2)
        other = self.second.submit(work, second)
        return [work(first), other.result()]

    def actor_tensors(self, *, averaged: bool = False) -> dict[str, NDArray[np.float32]]:
        """A copy of the actor or its average: ``actor.0.weight`` [out, in], ``actor.0.bias`` [out], … in float32.

        Hidden layers are followed by ReLU, the last by tanh.
        """
        source = self.actor_average if averaged and self.updates >= self.config.policy_delay else self.actor
        return {name: td3_state.array(tensor) for name, tensor in source.named.items()}

    def begin_with(self, actor: Mapping[str, NDArray[np.float32]]) -> None:
        """Put these weights, named and shaped as those of :meth:`actor_tensors`, into the actor and its target."""
        for name, tensor in self.actor.named.items():
            tensor.copy_(torch.tensor(actor[name]))
        self.actor.refresh()
        self.actor_target.track(self.actor, 1.0)

    def values(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        """Q1(s, a), or Q1(s, π(s)): float32[B, 1] on the device, of float32[B, O] and float32[B, A]."""
        s = observation.to(self._device)
        a = self.actor.forward(s)[0].tanh_() if action is None else action.to(self._device)
        return self.critics.forward(torch.cat((s, a), 1), 0)[0]

    def metrics(self, *, clear: bool = True) -> dict[str, float]:
        """Means over the updates since the last call, and gauges of the newest update; 0 where there was none.

        Means: ``critic_loss``, the sum over the critics; ``q_mean``, the first critic's value of the batch, and
        ``q_target_mean``, the value it should have had; ``actor_loss``, over the updates that had one. Gauges:
        ``q_target_size``, the mean size of y; ``action_saturation``, the fraction of π(s) within 1 % of a limit;
        ``critic_gradient_norm`` (all critics) and ``actor_gradient_norm``, before clipping. Only here does the device's
        work come back to Python. Without ``clear`` the means go on.
        """
        metrics = self.measured.means(self.updates) | self.measured.read_gauges(self.updates)
        if clear:
            self.measured.clear(self.updates)
        return metrics

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """A copy of everything :meth:`restore` needs: float32 arrays (the generator's is uint8) and JSON scalars."""
        return td3_state.state(self)

    def restore(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
        """Become the TD3 whose :meth:`state` this is: updates go on bit for bit as if it had never stopped.

        Raises:
            BundleError: the state is incomplete, damaged or of other networks; nothing has changed then.
        """
        td3_state.restore(self, arrays, scalars)


def _together(parts: list[Tensor]) -> Tensor:
    """The rows of all parts."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
