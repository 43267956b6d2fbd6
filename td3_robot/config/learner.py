"""How the learner learns: its part of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from td3_robot.config.section import Count, Fraction, Natural, NonNegative, Positive, Section

IMPLIED: dict[tuple[str, str], dict[str, Any]] = {
    ("algorithm", "ddpg"): {"twin_critics": False, "target_noise": 0.0, "policy_delay": 1},
    ("replay", "lap"): {"critic_loss": "huber"},
}
"""What a choice in ``learner`` means for other keys of it: their defaults, and the only values allowed beside it."""


class LearnerConfig(Section, frozen=True):
    """TD3 (Fujimoto et al. 2018, algorithm 1), options around it, and how its updates are paced.

    ``algorithm: ddpg`` is the update of Lillicrap et al. 2016, which has none of TD3's three additions; each of them
    can be left out alone: ``twin_critics: false``, ``target_noise: 0``, ``policy_delay: 1``.

    Options, all off by default:

    - ``n_step``: targets of up to n rewards, R = r₀ + γ r₁ + … + γⁿ⁻¹ rₙ₋₁ + γⁿ Q(sₙ, aₙ); fewer where an episode or
      what was seen of it ends.
    - ``critic_loss: huber``: δ²/2 up to an error |δ| of 1 and |δ| - 1/2 beyond, in place of δ².
    - ``gradient_clip``: the largest Euclidean norm of the gradient of the actor, and of each critic.
    - ``replay: lap``: loss-adjusted prioritised replay (Fujimoto, Fu and Meger 2020): transitions are drawn in
      proportion to max(|δ|, 1)^``priority_exponent``; it stands on the Huber loss.
    - ``normalise_observations``: networks see (observation - mean) / deviation, both of all observations so far.

    Noise standard deviations and clips are fractions of half the action range of each dimension. With
    ``policy_average`` above 0, what is evaluated and kept is not the actor of the moment but its moving average, which
    moves that fraction of the way at each policy update (Polyak and Juditsky 1992; Izmailov et al. 2018 for why it
    helps): exploring and learning go on with the actor itself. The learning rate
    is held up to ``learning_rate_falls_from`` (a fraction of ``total_steps``) and falls in a straight line from there
    to ``learning_rate_end`` (a fraction of itself) at ``total_steps``. With ``replay_storage: file`` the replay buffer
    is a file in the run folder: a killed learner loses no transition, and checkpoints are small (in lock-step they hold
    it nevertheless, because the file runs ahead of them). ``device`` auto is a CUDA GPU where torch sees one;
    ``precision`` auto is bf16 on a processor that is faster with it, and fp32 elsewhere; a run keeps what both were
    when it began. Random numbers are the same on every device, so that a checkpoint goes on on another one. With
    ``threads_in: critics`` the ``threads`` each take one critic, or half of the policy's batch, and seldom meet; with
    ``operators`` they share every matrix product out, which is faster for a learner that has its cores to itself, and
    may be far slower for one that has not. With ``compile`` the update in fp32 is compiled for the processor, which
    needs a C++ compiler (without one updates are made as they are, with a warning) and, the first time, some 20 s; of
    the ``threads`` only those inside operators then count. On a GPU and in bf16 it has no effect.

    ``recordings`` are files whose transitions the replay buffer begins with; they count as no environment steps.
    ``offline_updates`` are made on them before the first environment step; the policy that is learned then acts in
    place of uniform actions.

    ``start_from`` is a policy bundle whose actor a new run begins with, in place of random weights and of uniform
    actions before ``learning_starts``; how its observations are normalised comes with it. The critics begin anew, so
    the actor stands still for the first ``critics_first`` updates.
    """

    algorithm: Literal["td3", "ddpg"] = "td3"
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
    learning_starts: Natural = 25_000
    replay_ratio: Positive | None = 1.0
    replay_ratio_band: Positive = 64.0
    publish_every: Count = 10
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    threads: Count = 1
    threads_in: Literal["critics", "operators"] = "critics"
    compile: bool = False
    recordings: tuple[str, ...] = ()
    offline_updates: Natural = 0
    start_from: str | None = None
    critics_first: Natural = 0

    def __post_init__(self) -> None:
        if self.start_from is not None and not self.critics_first:
            raise ValueError(
                f"learner.start_from is {self.start_from!r} and learner.critics_first is 0: critics that know nothing "
                "would spoil the policy at once; allowed: 1 or more, for example 5000"
            )
        if self.offline_updates and not self.recordings:
            raise ValueError(
                f"learner.offline_updates is {self.offline_updates} and learner.recordings is empty; "
                "allowed without recordings: 0"
            )
        for (key, choice), implied in IMPLIED.items():
            for other, needed in implied.items():
                if getattr(self, key) == choice and getattr(self, other) != needed:
                    raise ValueError(
                        f"learner.{key} is {choice!r} and learner.{other} is {getattr(self, other)!r}; "
                        f"beside {choice!r} it must be {needed!r}"
                    )

    @property
    def compiles(self) -> bool:
        """Whether updates are to be compiled; ``device`` and ``precision`` are settled."""
        return self.compile and (self.device, self.precision) == ("cpu", "fp32")

    def learning_rate_at(self, fraction: float) -> float:
        """The learning rate when this fraction of the run is made."""
        hold = self.learning_rate_falls_from
        fallen = min(1.0, (fraction - hold) / (1 - hold)) if fraction > hold and hold < 1 else 0.0
        return self.learning_rate * (1 - fallen * (1 - self.learning_rate_end))
