"""The section ``learner`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from td3_robot.config.section import Count, Fraction, Natural, NonNegative, Positive, Section
from td3_robot.learner.algorithms import table as algorithms

IMPLIED: dict[tuple[str, str], dict[str, Any]] = {
    **{("algorithm", name): implied for name, implied in algorithms.IMPLIED.items()},
    ("replay", "lap"): {"critic_loss": "huber"},
}
"""Maps a ``learner`` key and one of its values to a map of other keys.

If the key has this value, each of the other keys must have the value in the inner map.
"""


class LearnerConfig(Section, frozen=True):
    """The algorithm, its options, and the pace of its updates. The defaults are those of plain TD3.

    ``target_noise`` and ``target_noise_clip`` are fractions: 1 is half the action range of each dimension.

    A checkpoint from one device can be used on any other device. The random numbers stay the same.

    Attributes:
        algorithm: ``td3`` (Fujimoto et al. 2018, algorithm 1), ``ddpg``, ``a2c``, or an algorithm of an installed
            package. ``ddpg`` (Lillicrap et al. 2016) has none of TD3's three additions. To switch off one of them
            alone, set ``twin_critics: false``, ``target_noise: 0`` or ``policy_delay: 1``. ``a2c`` (Mnih et al. 2016)
            is on-policy: it has no replay buffer and no replay ratio. Its other options are in the section ``a2c``.
        twin_critics: train two critics. Targets use the smaller of their two values.
        batch_size: transitions in one update.
        discount: γ.
        polyak: τ of the target networks.
        target_noise: standard deviation of the target policy's noise.
        target_noise_clip: the largest absolute value of the target policy's noise.
        policy_delay: critic updates for each actor update.
        learning_rate: step size of Adam at the start.
        learning_rate_falls_from: fraction of ``total_steps`` after which the learning rate falls linearly to
            ``learning_rate_end``. With ``a2c``, this key is a fraction of ``a2c.episodes``.
        learning_rate_end: the learning rate at the end of the training, as a fraction of ``learning_rate``.
        policy_average: if above 0, evaluations and policy files use a moving average of the actor's weights. At
            actor update n, the average moves towards the actor by this fraction, or by 1/n if that is larger (Polyak
            and Juditsky 1992; Izmailov et al. 2018). Exploration and learning use the actor itself.
        layer_norm: layer normalisation in the hidden layers of the critics.
        n_step: number of rewards in a target, R = r₀ + γ r₁ + … + γⁿ⁻¹ rₙ₋₁ + γⁿ Q(sₙ, aₙ). A target has fewer rewards
            at the end of an episode and before a gap.
        critic_loss: ``mse`` is δ²; ``huber`` is δ²/2 for errors |δ| up to 1, and |δ| - 1/2 for larger errors.
        gradient_clip: the largest Euclidean norm of a gradient, for the actor and for each critic.
        normalise_observations: networks get (observation - mean) / deviation, clipped to [-10, 10]. Mean and deviation
            are those of all observations so far.
        replay: ``uniform``, or ``lap`` for loss-adjusted prioritised replay (Fujimoto, Meger and Precup 2020). ``lap``
            draws transitions in proportion to max(|δ|, 1)^``priority_exponent`` and needs the Huber loss.
        priority_exponent: exponent of a transition's priority, see ``replay``.
        buffer_size: transitions that the buffer holds.
        replay_storage: ``memory``: the buffer is in memory. ``file``: the buffer is in a file in the run folder. With a
            file, a killed learner loses no transition, and checkpoints are small. The exception is lock-step: a resumed
            run needs the buffer as it was at the checkpoint, but the file can hold newer transitions. So checkpoints
            hold the buffer, too.
        recordings: files whose transitions fill the buffer at the start. These transitions are not environment steps.
        learn_from_operator: learn also from transitions in which an operator chose the action. ``a2c`` never learns
            from them.
        operator_share: if above 0, the learner keeps the operator's transitions in a separate buffer: the newest
            100,000, or ``buffer_size`` if that is smaller. This share of each batch comes from that buffer. If 0, the
            replay buffer holds these transitions.
            Even with ``replay_storage: file``, a killed learner loses the transitions of the separate buffer that
            are newer than the newest checkpoint.
        learning_starts: environment steps before the first update that is not an offline update. In these steps,
            actions are uniformly random, except with ``start_from`` or ``offline_updates``.
        replay_ratio: updates for each environment step; null for no limit.
        replay_ratio_band: the simulators wait when the learner is this many updates behind the replay ratio.
        publish_every: updates between two published policies.
        offline_updates: updates on ``recordings`` before the first environment step. The learned policy then acts from
            the first step, and there are no uniform actions.
        start_from: a policy file, a run folder or the name of a shipped policy. A new run begins with the actor and
            the observation normalisation of this policy, instead of random weights and uniform actions.
        critics_first: number of updates at the start that train only the critics. Untrained critics would spoil the
            actor of ``start_from``.
        device: ``auto`` is a CUDA GPU if torch finds one, else the CPU. A resumed run keeps the values that ``auto``
            has chosen for ``device``, ``precision`` and ``threads``. On a cluster, the run keeps them only if
            ``device`` is ``cpu``. Otherwise, ``auto`` chooses again at each start of the learner.
        precision: ``auto`` is the faster precision on a CPU, and fp32 on a GPU.
        threads: threads of the learner. ``auto`` measures which number makes the fastest updates. ``auto`` is 1
            on a GPU, in lock-step, and for algorithms without a fast engine. On a cluster, ``auto`` is 1 unless
            ``device`` is ``cpu``.
        threads_in: ``critics``: two parallel threads each compute one critic, or half of the actor's batch. If
            ``threads`` is above 2, the other threads help these two threads with their matrix products.
            ``operators``: all threads share every matrix product. The value ``operators`` is faster if no other process
            uses the learner's processor cores. Otherwise it may be far slower.
        compile: compile the update for the processor. This needs a C++20 compiler, and takes about 10 s the first time.
            If it fails, the learner logs a warning and continues without compiled updates. ``compile`` has no effect on
            a GPU, and for algorithms without a fast engine.
    """

    algorithm: str = "td3"
    twin_critics: bool = True
    batch_size: Count = 256
    learning_rate: Positive = 3e-4
    learning_rate_end: Fraction = 1.0
    learning_rate_falls_from: Fraction = 0.0
    discount: Fraction = 0.99
    polyak: Fraction = 0.005
    target_noise: NonNegative = 0.2
    target_noise_clip: NonNegative = 0.5
    policy_delay: Count = 2
    policy_average: Fraction = 0.0
    layer_norm: bool = False
    n_step: Annotated[int, Meta(ge=1, le=100)] = 1
    critic_loss: Literal["mse", "huber"] = "mse"
    gradient_clip: Positive | None = None
    replay: Literal["uniform", "lap"] = "uniform"
    priority_exponent: Fraction = 0.4
    normalise_observations: bool = False
    buffer_size: Count = 1_000_000
    replay_storage: Literal["memory", "file"] = "memory"
    learn_from_operator: bool = True
    operator_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    learning_starts: Natural = 25_000
    replay_ratio: Positive | None = 1.0
    replay_ratio_band: Positive = 64.0
    publish_every: Count = 10
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    threads: Count | Literal["auto"] = 1
    threads_in: Literal["critics", "operators"] = "critics"
    compile: bool = False
    recordings: tuple[str, ...] = ()
    offline_updates: Natural = 0
    start_from: str | None = None
    critics_first: Natural = 0

    def __post_init__(self) -> None:
        if self.start_from is not None and not self.critics_first:
            raise ValueError(
                f"learner.start_from is {self.start_from!r} and learner.critics_first is 0: untrained critics "
                "would spoil the policy at once; allowed for critics_first: 1 or more, for example 5000"
            )
        if self.operator_share and not self.learn_from_operator:
            raise ValueError(
                f"learner.operator_share is {self.operator_share} and learner.learn_from_operator is false; "
                "allowed for operator_share: 0"
            )
        if self.offline_updates and not self.recordings:
            raise ValueError(
                f"learner.offline_updates is {self.offline_updates} and learner.recordings is empty; "
                "name recordings with learner.recordings (--from), or set offline_updates to 0"
            )
        for (key, choice), implied in IMPLIED.items():
            for other, needed in implied.items():
                if getattr(self, key) == choice and getattr(self, other) != needed:
                    raise ValueError(
                        f"learner.{key} is {choice!r} and learner.{other} is {getattr(self, other)!r}; "
                        f"with {choice!r}, {other} must be {needed!r}"
                    )
        fields = msgspec.structs.fields(self)
        used = algorithms.USES.get(self.algorithm, [field.name for field in fields])
        for field in fields:
            value = getattr(self, field.name)
            if field.name not in used and value != field.default:
                raise ValueError(
                    f"learner.{field.name} is {value!r}; {self.algorithm!r} does not use it, "
                    f"so it must be {field.default!r}"
                )

    @property
    def thread_count(self) -> int:
        """The number of threads; 1 for ``auto``.

        When a run is prepared, a number replaces ``auto``. The exception: on a cluster, if ``device`` is not ``cpu``,
        ``auto`` remains.
        """
        return 1 if self.threads == "auto" else self.threads

    @property
    def compiles(self) -> bool:
        """Whether to compile updates. The result is valid only if ``device`` is not ``auto``."""
        return self.compile and self.device == "cpu"

    def learning_rate_at(self, fraction: float) -> float:
        """Return the learning rate after this fraction (0 to 1) of the run."""
        hold = self.learning_rate_falls_from
        fall = min(1.0, (fraction - hold) / (1 - hold)) if fraction > hold and hold < 1 else 0.0
        return self.learning_rate * (1 - fall * (1 - self.learning_rate_end))
