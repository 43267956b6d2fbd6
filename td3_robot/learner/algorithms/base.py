"""The base class of learning algorithms: the methods that the learner calls, and helpers for a new algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner import compute
from td3_robot.learner.algorithms import state
from td3_robot.learner.algorithms.metrics import Metrics, RunningMetrics
from td3_robot.learner.algorithms.metrics import problem as metrics_problem
from td3_robot.learner.algorithms.networks import initialise
from td3_robot.learner.algorithms.table import broken_rule
from td3_robot.learner.checkpointing.stateful import Arrays, reading
from td3_robot.learner.replay_buffer.buffer import Batch

Module = TypeVar("Module", bound=nn.Module)


class Algorithm:
    """A learning algorithm: its networks, its optimisers and its update.

    To write one, subclass this class, create networks and optimisers in :meth:`build`, and write :meth:`update` in
    plain PyTorch with autograd. Then add a row to :data:`td3_robot.learner.algorithms.table.ALGORITHMS`, or an entry
    point in the group ``td3_robot.algorithms`` of a package. ``td3.py`` in this folder is the example.

    The class attribute ``consumes`` sets the input of :meth:`update`:

    - ``"transitions"`` is for off-policy algorithms. The learner keeps a replay buffer. After the warm-up, it calls
      :meth:`update` ``learner.replay_ratio`` times for each environment step, with a :class:`Batch` of random
      transitions.
    - ``"rollouts"`` is for on-policy algorithms. The learner keeps no replay buffer. It calls :meth:`update` once for
      each episode, with a :class:`Batch` of the episode's T transitions, oldest first. It then publishes the policy.
      It skips an episode with a missing transition or an operator's action. In lock-step, all sources make one Step,
      then the learner makes the updates for all episodes that ended, and publishes the policy once. ``a2c.py`` is the
      example.

    In a rollout, ``discount`` of the last transition is 0 if the episode terminated, and γ if it was truncated. If an
    episode has more than 100,000 steps, the learner divides the episode into several batches: it truncates the episode
    after each 100,000 steps. In lock-step with one robot, the newest policy chose all actions of the episode.
    Otherwise, older policies may have chosen some of them.

    For discrete actions, the policy has one score for each action. The environment takes the action with the highest
    score.

    The base class saves and restores every attribute that is an ``nn.Module``, a ``torch.optim.Optimizer`` or a
    ``Tensor``. It also saves modules, optimisers and parameters inside lists, tuples and dictionaries, and ``random``,
    ``updates`` and the metrics. It saves nothing else, so :meth:`build` must set all other attributes again after a
    restart.

    Args:
        observation_size: number of observation channels; O in the shapes of arrays.
        action_size: number of action channels; A in the shapes of arrays.
        hidden: sizes of the hidden layers.
        config: the ``learner`` section; ``device`` and ``precision`` are not ``auto``.
        seed: seed of all random numbers and initial parameters. The algorithm does not use torch's global generator.
        device: the device of the networks. Batches may be on another device.
        options: the configuration section that has the algorithm's name; None if there is no such section.

    Attributes:
        updates: number of updates made, including the current one.
        random: the generator of all random numbers. It is on the CPU, so that the numbers are the same on every device.
        td_errors: the errors δ = Q(s, a) - y of the newest update, where y is the target of the critics. Each critic
            has an array float32[B, 1], for the B transitions of the batch. Prioritised replay reads the errors.
            ``td_errors`` is empty if the algorithm computes no such errors.
        compiled: ``C++`` if compiled code makes the updates (see :mod:`td3_robot.learner.engine.compiled`), else False.
    """

    consumes: ClassVar[Literal["transitions", "rollouts"]] = "transitions"
    exploration: ClassVar[tuple[str, float] | None] = None
    """Kind and scale of the exploration noise if the algorithm sets them; None if the configuration sets them."""
    part: ClassVar[str] = "algorithm"
    """The name of the algorithm's part in a checkpoint."""
    means: ClassVar[tuple[str, ...]] = ()
    """Metrics that are reported as means over the updates since the last report. A mean is 0 if no update
    gave a value."""
    gauges: ClassVar[tuple[str, ...]] = ()
    """Metrics that are reported as their newest value.

    An algorithm with critics can report the metric ``q_target_size``: the mean of |y|, where y is the target of the
    critics. The learner stops if this metric is far larger than any possible return.
    """

    actor: Any  # created by build()

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        hidden: Sequence[int],
        config: LearnerConfig,
        seed: int,
        device: str | torch.device = "cpu",
        options: Any = None,
    ) -> None:
        self.observation_size, self.action_size, self.hidden = observation_size, action_size, tuple(hidden)
        self.config, self.options = config, options
        self.device = torch.device(device)
        self.random = torch.Generator().manual_seed(seed)
        self.updates = 0
        self.td_errors: Sequence[Tensor] = ()
        self.compiled: Literal["C++", False] = False
        self.measured = RunningMetrics(self.means, self.gauges)
        self.build()

    # -- an algorithm overrides these ----------------------------------------------------------------------------

    def build(self) -> None:
        """Create networks and optimisers as attributes; ``self.actor`` is the network that :meth:`policy` returns."""
        raise NotImplementedError

    def update(self, batch: Any) -> Metrics:
        """Make one update.

        Args:
            batch: see ``consumes``. Tensors are on the algorithm's device.

        Returns:
            Metrics by name. Each metric is a tensor with one number, or a number.
        """
        raise NotImplementedError

    def policy(self, *, averaged: bool) -> nn.Module:
        """The network that chooses the robots' actions.

        If ``averaged`` is True: the network for evaluations and policy files.

        Both networks are perceptrons with the hidden layers ``self.hidden``, ReLU after each hidden layer, and tanh
        after the output layer. The policy server computes this function from the weights alone.
        """
        del averaged
        actor: nn.Module = self.actor
        return actor

    def values(self, observation: Tensor, action: Tensor | None = None) -> Tensor | None:
        """Expected returns Q(s, a), or Q(s, π(s)) without ``action``; None if the algorithm has no such value.

        Args:
            observation: float32[B, O], a batch of B observations.
            action: float32[B, A], normalised.

        Returns:
            float32[B, 1] on the device.
        """
        del observation, action
        return None

    @property
    def progress(self) -> float | None:
        """The finished fraction of the training, 0 to 1. At 1, the run and the decay of the learning rate end.

        The default is None: the number of environment steps determines the progress of the run.
        """
        return None

    # -- helpers for an algorithm --------------------------------------------------------------------------------

    def network(self, module: Module) -> Module:
        """Draw the initial parameters of a network from ``random``, and move the network to the device."""
        initialise(module, self.random)
        return module.to(self.device)

    def adam(self, *modules: nn.Module) -> torch.optim.Adam:
        """Adam at the configured learning rate; :meth:`minimise` clips the gradient of each module separately."""
        groups = [{"params": list(module.parameters())} for module in modules]
        return torch.optim.Adam(groups, lr=self.config.learning_rate, fused=True)

    def minimise(self, loss: Tensor, optimiser: torch.optim.Optimizer, clip: float | None = None) -> Tensor:
        """Make one step down the gradient of ``loss``.

        Args:
            clip: the largest allowed norm of each module's gradient. None means ``learner.gradient_clip``.

        Returns:
            float32[]: the Euclidean norm of the whole gradient before clipping.
        """
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        limit = clip or self.config.gradient_clip or math.inf
        norms = [nn.utils.clip_grad_norm_(group["params"], limit) for group in optimiser.param_groups]
        optimiser.step()
        norm: Tensor = torch.stack(norms).norm()
        return norm

    def randn_like(self, tensor: Tensor) -> Tensor:
        """Standard normal numbers of the shape, type and device of ``tensor``."""
        return torch.randn(tensor.shape, generator=self.random).to(tensor)

    def due(self, every: int) -> bool:
        """Whether ``updates`` is a multiple of ``every``."""
        return self.updates % every == 0

    # -- for the learner -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Called once, before the first update. On a GPU, an engine prepares CUDA graphs here."""

    def learn(self, batch: Batch) -> Sequence[Tensor]:
        """Make one update and record its metrics. Returns ``td_errors``."""
        self.updates += 1
        batch = Batch(*(tensor.to(self.device) for tensor in batch))
        low_precision = torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16", cache_enabled=False
        )
        with compute.flush_denormals(), low_precision:
            metrics = self.update(batch)
        if wrong := metrics_problem(metrics) or self._errors_problem(len(batch.action)):
            raise broken_rule(self.config.algorithm, wrong)
        self.measured.add(metrics)
        return self.td_errors

    def _errors_problem(self, rows: int) -> str | None:
        """What is wrong with ``td_errors`` for prioritised replay; None if nothing is."""
        if self.config.replay == "lap":
            for error in self.td_errors:
                if error.shape != (rows, 1):
                    return f"td_errors has an array of shape {list(error.shape)}; needed for 'lap': [{rows}, 1]"
        return None

    def set_learning_rate(self, rate: float) -> None:
        """Use this learning rate from the next update on. The learning rate is not part of :meth:`state`.

        If :meth:`build` gave a group of an optimiser another rate than ``learner.learning_rate``, the group's rate
        changes by the same factor.
        """
        for optimiser in state.optimisers(self).values():
            for group in optimiser.param_groups:
                first = group.setdefault("initial_lr", group["lr"])  # torch's schedulers use this name, too
                group["lr"] = first / self.config.learning_rate * rate

    def metrics(self, *, clear: bool = True) -> dict[str, float]:
        """Means over the updates since the last call with ``clear``, and the newest gauges. Waits for the device."""
        found = self.measured.read()
        if clear:
            self.measured.clear()
        return found

    def actor_tensors(self, *, averaged: bool = False) -> dict[str, NDArray[np.float32]]:
        """A copy of the policy for a bundle: ``actor.0.weight`` [out, in], ``actor.0.bias`` [out], … in float32.

        The policy server applies ReLU after each hidden layer, and tanh after the output layer.
        """
        tensors = actor_parameters(self.policy(averaged=averaged))
        return {name: state.to_numpy(tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def begin_with(self, actor: Mapping[str, NDArray[np.float32]]) -> None:
        """Start from this policy. ``actor`` has the names and shapes of :meth:`actor_tensors`."""
        for name, tensor in actor_parameters(self.policy(averaged=False)).items():
            tensor.copy_(torch.from_numpy(actor[name]))

    def sizes(self) -> tuple[int, int]:
        """The number of parameters in all networks, and the number of parameters that an optimiser changes."""
        groups = [group for optimiser in state.optimisers(self).values() for group in optimiser.param_groups]
        trained = sum(parameter.numel() for group in groups for parameter in group["params"])
        return sum(tensor.numel() for tensor in state.tensors(self).values()), trained

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name, without the tensors of optimisers."""
        return state.tensors(self)

    def restored(self) -> None:
        """A hook. :meth:`restore` calls this method at its end, when all tensors have their saved values."""

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """A copy of everything that :meth:`restore` needs: named arrays, and plain JSON values."""
        tensors = self.tensors() | state.optimiser_tensors(self)
        arrays: dict[str, NDArray[Any]] = {name: state.to_numpy(tensor) for name, tensor in tensors.items()}
        arrays["generator"] = self.random.get_state().numpy().copy()
        scalars: dict[str, Any] = {"updates": self.updates, **self.measured.state()}
        if partly := state.partly_stepped(self):
            scalars["partly_stepped"] = partly
        return arrays, scalars

    @torch.no_grad()
    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`. Later updates are bit for bit the same as in a run without a restart.

        Raises:
            BundleError: the state does not fit the networks. The algorithm is then unchanged.
        """
        tensors, random = self.tensors(), torch.Generator()
        with reading(f"{self.part} state"):
            saved = {name: torch.tensor(arrays[name]) for name in tensors}
            for name, tensor in tensors.items():
                if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
                    raise ValueError(
                        f"{name} is {saved[name].dtype}{list(saved[name].shape)}, which does not fit the networks"
                    )
            updates = int(scalars["updates"])
            random.set_state(torch.tensor(arrays["generator"], dtype=torch.uint8))
            optimisers = state.read_optimisers(self, arrays, scalars.get("partly_stepped", {}))
            self.measured.restore(scalars)
        self.updates, self.random = updates, random
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
        for optimiser, kept in optimisers:
            optimiser.load_state_dict(kept)
        self.restored()


def actor_parameters(policy: nn.Module) -> dict[str, Tensor]:
    """The weights and biases of a policy's linear layers, with the names that a bundle uses."""
    linear = [module for module in policy.modules() if isinstance(module, nn.Linear)]
    return {
        f"actor.{index}.{kind}": getattr(layer, kind)
        for index, layer in enumerate(linear)
        for kind in ("weight", "bias")
    }


@torch.no_grad()
def polyak_update(target: nn.Module, network: nn.Module, fraction: float) -> None:
    """θ' ← θ' + fraction (θ - θ'), for every parameter."""
    for parameter, newest in zip(target.parameters(), network.parameters(), strict=True):
        parameter.lerp_(newest, fraction)
