"""TD3: twin delayed deep deterministic policy gradient (Fujimoto, van Hoof and Meger 2018, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.config import LearnerConfig
from td3_robot.errors import BundleError
from td3_robot.learner import compute
from td3_robot.learner.networks import Adam, Network
from td3_robot.learner.replay import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Result = TypeVar("Result")
METRICS = ("critic_loss", "q_mean", "q_target_mean", "actor_loss")


class TD3:
    """An actor and two critics, their targets and their optimisers.

    Actions are normalised: -1 and 1 are the limits of each dimension.

    Args:
        observation_size, action_size: O and A.
        hidden: the sizes of the hidden layers, of actor and critics alike.
        config: TD3's parameters, ``precision``, ``threads``, and ``layer_norm`` (in the critics only); no other key
            plays a part.
        seed: of the initial parameters and the target noise; torch's global generator is not touched.
        device: where the networks live. Batches may lie elsewhere. All random numbers are drawn on the CPU: they are
            the same for every device.

    Attributes:
        updates: critic updates made so far.
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
        self._random = torch.Generator().manual_seed(seed)
        self._action_columns = slice(observation_size, observation_size + action_size)

        def actor() -> Network:
            sizes = [observation_size, *hidden, action_size]
            return Network(["actor"], sizes, dtype=DTYPES[config.precision], device=device)

        def critics() -> Network:
            sizes = [observation_size + action_size, *hidden, 1]
            names, dtype = ["critic1", "critic2"], DTYPES[config.precision]
            return Network(names, sizes, layer_norm=config.layer_norm, dtype=dtype, device=device)

        self.actor, self.actor_target = actor(), actor()
        self.critics, self.critics_target = critics(), critics()
        for network, target in ((self.actor, self.actor_target), (self.critics, self.critics_target)):
            network.initialise(self._random)
            target.track(network, 1.0)
        self.actor_average = actor() if config.policy_average else self.actor
        rate: float | Tensor = config.learning_rate
        if self._device.type == "cuda":  # a number would be fixed where the update is captured
            rate = torch.tensor(rate, device=self._device)
        self._actor_adam, self._critics_adam = Adam(self.actor, rate), Adam(self.critics, rate)
        self._sums = torch.zeros(len(METRICS), device=self._device)
        self._sums_since = 0  # the value of ``updates`` when the sums were last cleared
        self._second = compute.second_thread(config.threads) if self._device.type == "cpu" else None

    def set_learning_rate(self, rate: float) -> None:
        """Use this learning rate from the next update on; it is no part of :meth:`state`."""
        if isinstance(self._critics_adam.learning_rate, Tensor):
            self._critics_adam.learning_rate.fill_(rate)  # both optimisers'
        else:
            self._actor_adam.learning_rate = self._critics_adam.learning_rate = rate

    def update(self, batch: Batch) -> None:
        """Improve the critics, and every ``policy_delay``-th time the actor and all targets, by one step.

        Args:
            batch: B transitions; see :class:`Batch` for shapes and ranges.
        """
        self.improve(batch, self.draw_noise(len(batch.action)))

    def draw_noise(self, batch_size: int) -> Tensor:
        """The standard normal numbers float32[B, A] of the next update, on the device."""
        columns = self._action_columns
        noise = torch.randn((batch_size, columns.stop - columns.start), generator=self._random)
        return compute.upload(noise.numpy(), self._device)

    @torch.inference_mode()  # the gradients are our own: without autograd's bookkeeping each operator costs less
    def improve(self, batch: Batch, noise: Tensor) -> None:
        """:meth:`update` with these numbers from :meth:`draw_noise`. Waits for no device, and can be captured."""
        config = self.config
        s, a, r, s2, not_terminated = (tensor.to(self._device) for tensor in batch)

        # Target policy smoothing, and the smaller of two values: y = r + γ min Q'(s', π'(s') + ε)
        noise = (noise * config.target_noise).clamp_(-config.target_noise_clip, config.target_noise_clip)
        (a2,) = self._each_half(lambda _, s2: self.actor_target.forward(s2)[:1], s2)
        a2.tanh_().add_(noise).clamp_(-1.0, 1.0)
        s2a2, sa = torch.cat((s2, a2), 1), torch.cat((s, a), 1)
        (next1, (q1, trace1)), (next2, (q2, trace2)) = self._each_critic(
            lambda head: (self.critics_target.forward(s2a2, head)[0], self.critics.forward(sa, head))
        )
        y = r + config.discount * not_terminated * torch.minimum(next1, next2)

        # Critics: minimise the sum over both of the batch's mean (Q(s, a) - y)²
        traces, errors = (trace1, trace2), (q1 - y, q2 - y)
        self._each_critic(lambda head: self.critics.backward(traces[head], errors[head] * (2 / len(y))))
        self._critics_adam.step()
        self.updates += 1
        loss = (errors[0].square() + errors[1].square()).mean()
        self._count(critic_loss=loss, q_mean=q1.mean(), q_target_mean=y.mean())

        if self.updates % config.policy_delay == 0:
            # Delayed policy: minimise the batch's mean -Q1(s, π(s))
            def improve(part: int, rows: Tensor) -> tuple[Tensor, ...]:
                output, actor_trace = self.actor.forward(rows)
                pi = output.tanh_()
                q, trace = self.critics.forward(torch.cat((rows, pi), 1), 0)
                d_pi = self.critics.input_gradient(trace, torch.full_like(q, -1 / len(s)), self._action_columns)
                self.actor.backward(actor_trace, d_pi * (1 - pi.square()), part)  # the derivative of tanh
                return (q,)

            (q,) = self._each_half(improve, s)
            self._actor_adam.step()
            self._count(actor_loss=-q.mean())

            self.critics_target.track(self.critics, config.polyak)
            self.actor_target.track(self.actor, config.polyak)
            if config.policy_average:  # a plain mean at first, so that it does not drag the initial weights along
                made = self.updates // config.policy_delay
                self.actor_average.track(self.actor, max(config.policy_average, 1 / made))

    def _each_critic(self, work: Callable[[int], Result]) -> tuple[Result, Result]:
        """``work`` of critic 0 and of critic 1: with two threads at the same time, and always with the same result."""
        if self._second is None:
            return work(0), work(1)
        other = self._second.submit(work, 1)
        return work(0), other.result()

    def _each_half(self, work: Callable[[int, Tensor], tuple[Tensor, ...]], rows: Tensor) -> tuple[Tensor, ...]:
        """``work(part, rows)`` of both halves of the rows, at the same time, and its outputs' rows put together again.

        With one thread, of part 0 and all rows. A sum over the rows may round otherwise in halves than in one piece.
        """
        if self._second is None or len(rows) < 2:
            return work(0, rows)
        first, second = rows.chunk(2)
        other = self._second.submit(work, 1, second)
        return tuple(torch.cat(halves) for halves in zip(work(0, first), other.result(), strict=True))

    def actor_tensors(self, *, averaged: bool = False) -> dict[str, NDArray[np.float32]]:
        """A copy of the actor or its average: ``actor.0.weight`` [out, in], ``actor.0.bias`` [out], … in float32.

        Hidden layers are followed by ReLU, the last by tanh.
        """
        source = self.actor_average if averaged and self.updates >= self.config.policy_delay else self.actor
        return {name: _array(tensor) for name, tensor in source.named.items()}

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call; ``actor_loss`` over those that had one. 0 where there was none.

        ``critic_loss`` is the sum of both critics' mean squared errors, ``q_mean`` the first critic's value of the
        batch, ``q_target_mean`` the value it should have had. Only here does the device's work come back to Python.
        """
        updates = self.updates - self._sums_since
        delay = self.config.policy_delay
        actor_updates = self.updates // delay - self._sums_since // delay
        counts = [max(1, actor_updates if name == "actor_loss" else updates) for name in METRICS]
        means = {name: total / count for name, total, count in zip(METRICS, self._sums.tolist(), counts, strict=True)}
        self._sums.zero_()
        self._sums_since = self.updates
        return means

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """A copy of everything :meth:`restore` needs: float32 arrays (the generator's is uint8) and JSON scalars."""
        arrays: dict[str, NDArray[Any]] = {name: _array(tensor) for name, tensor in self._tensors().items()}
        arrays["generator"] = self._random.get_state().numpy().copy()
        return arrays, {"updates": self.updates, "sums_since": self._sums_since}

    def restore(self, arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, Any]) -> None:
        """Become the TD3 whose :meth:`state` this is: updates go on bit for bit as if it had never stopped.

        Raises:
            BundleError: the state is incomplete, damaged or of other networks; nothing has changed then.
        """
        tensors = self._tensors()
        for name, tensor in tensors.items():
            array = arrays.get(name)
            if array is None or array.shape != tensor.shape or array.dtype != np.float32:
                found = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
                raise BundleError(f"TD3 state: {name!r} is {found}; float32{list(tensor.shape)} belongs there")
        try:
            updates, sums_since = int(scalars["updates"]), int(scalars["sums_since"])
            self._random.set_state(torch.tensor(arrays["generator"], dtype=torch.uint8))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BundleError(f"TD3 state: {type(error).__name__} {error}") from None
        for name, tensor in tensors.items():
            tensor.copy_(torch.tensor(arrays[name]))
        for network in (self.actor, self.actor_target, self.critics, self.critics_target):
            network.refresh()
        self.updates, self._sums_since = updates, sums_since

    def _tensors(self) -> dict[str, Tensor]:
        """Every float32 tensor of the state, by a name of the form ``ROLE/HEAD.LAYER.weight``."""
        tensors = {"metrics": self._sums}
        for network, target, optimiser in (
            (self.actor, self.actor_target, self._actor_adam),
            (self.critics, self.critics_target, self._critics_adam),
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
        tensors["adam_count/actor"] = self._actor_adam.count
        tensors["adam_count/critics"] = self._critics_adam.count
        return tensors

    def _count(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[METRICS.index(name)] += value


def _array(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().cpu().numpy().copy()
    return array
