"""The configuration of a run: one typed, frozen tree read from YAML.

Every key has a default that makes a correct (if not tuned) TD3 run; a YAML file states what differs. Unknown keys,
wrong types, values out of range and contradictions are refused with one line.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta

from td3_robot import noises
from td3_robot.config.learner import LearnerConfig
from td3_robot.config.randomization import RandomizationConfig
from td3_robot.config.section import Count, Natural, NonNegative, Positive, Section
from td3_robot.errors import ConfigError
from td3_robot.runtime.realtime import RealtimeConfig
from td3_robot.safety.limits import SafetyConfig

Width = Annotated[int, Meta(ge=1, le=4096)]
MAX_WEIGHTS = 8_000_000
"""Between hidden layers: what still travels in one Weights message with the layers around them."""


class NetworkConfig(Section, frozen=True):
    """The shape that actor and critics share."""

    hidden: Annotated[tuple[Width, ...], Meta(min_length=1, max_length=8)] = (400, 300)

    def __post_init__(self) -> None:
        weights = sum(before * after for before, after in itertools.pairwise(self.hidden))
        if weights > MAX_WEIGHTS:
            raise ValueError(
                f"network.hidden is {list(self.hidden)}: {weights:,} weights between its layers, above {MAX_WEIGHTS:,}"
            )


class ExplorationConfig(Section, frozen=True):
    """Action noise, after the uniform actions of the first ``learner.learning_starts`` steps.

    ``kind`` is ``gaussian``, ``ornstein_uhlenbeck`` or the noise of an installed package. ``noise`` is its standard
    deviation as a fraction of half the action range; a range ``[low, high]`` is spread over the robots of a source, so
    that some explore more than others. ``ornstein_uhlenbeck`` is x(t) = (1 - ``theta``) x(t - 1) + noise · N(0, 1),
    from 0 at each reset; Lillicrap et al. 2016 use 0.15 and 0.2. ``parameters`` are those of an installed noise.
    """

    kind: str = "gaussian"
    noise: float | tuple[float, float] = 0.1  # not NonNegative: msgspec 0.22 loses a limit beside a tuple, and crashes
    theta: Annotated[float, Meta(ge=0.01, le=1)] = 0.15
    parameters: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it

    def __post_init__(self) -> None:
        low, high = self.noise if isinstance(self.noise, tuple) else (self.noise, self.noise)
        if not 0 <= low <= high <= 1e12:
            shown = list(self.noise) if isinstance(self.noise, tuple) else self.noise
            raise ValueError(
                f"exploration.noise is {shown}; allowed: a number from 0 to 1e12, or two, the lower one first"
            )
        if self.kind in noises.CHOSEN_BY_THE_LEARNER or self.kind not in noises.NOISES:
            allowed = [name for name in noises.NOISES.names() if name not in noises.CHOSEN_BY_THE_LEARNER]
            raise ValueError(f"exploration.kind is {self.kind!r}; allowed: {', '.join(allowed)}")
        try:
            noises.parameters(self.kind, self.noise_parameters())
        except ConfigError as error:
            raise ValueError(f"exploration.parameters: {error}") from None

    def noise_parameters(self) -> dict[str, float]:
        """What is set for the parameters of the noise; ``theta`` is a key of its own."""
        theta = {"theta": self.theta} if "theta" in noises.NOISES.load(self.kind).PARAMETERS else {}
        return {**theta, **self.parameters}


class EvaluationConfig(Section, frozen=True):
    """Noise-free episodes on an environment of their own, every so many environment steps; ``every: 0`` is never.

    The run ends, and ends well, once an evaluation's mean return is at least ``target_return``. ``max_steps`` ends an
    episode, and thus an evaluation, of a task that sets itself no time limit.
    """

    every: Natural = 5_000
    episodes: Count = 10
    max_steps: Count = 100_000
    target_return: Annotated[float, Meta(ge=-1e12, le=1e12)] | None = None

    def __post_init__(self) -> None:
        if self.target_return is not None and not self.every:
            raise ValueError("evaluation.target_return is set and evaluation.every is 0: it would never be found out")


class CheckpointConfig(Section, frozen=True):
    """How often (environment steps) the learner saves all it knows, how many stay; ``every: 0``: only at the end."""

    every: Natural = 10_000
    keep: Count = 2


class PacingConfig(Section, frozen=True):
    """When a simulator steps: ``fast`` as soon as it may, ``realtime`` by the clock, once every control period.

    In real time the Action for a Step is applied at the next deadline. If it has not come by then, ``fallback`` says
    what is: ``hold`` each robot's last action (zero after a reset), or ``zero``; both within the action's limits. The
    learner's replay ratio then holds back the learner alone: a robot cannot wait.
    """

    mode: Literal["fast", "realtime"] = "fast"
    fallback: Literal["hold", "zero"] = "hold"


class A2CConfig(Section, frozen=True):
    """The on-policy baseline (``launch: a2c``); learning rate, discount and network are those of the learner.

    ``episodes`` ends the training, if ``total_steps`` does not before. ``entropy`` is the weight of the policy's
    entropy in the loss; the gradients of actor and critic are clipped to the norm ``gradient_norm`` each.
    """

    episodes: Count = 500
    entropy: NonNegative = 0.0
    gradient_norm: Positive = 0.5


class PolicyConfig(Section, frozen=True):
    """Whether a policy server or driver goes to ``active`` by itself; whether a server refuses learners' weights."""

    autostart: bool = True
    frozen: bool = False


class RecordConfig(Section, frozen=True):
    """Whether and how a run is recorded into its folder; ``record: true`` is short for ``record: {enabled: true}``.

    A new file is begun after ``split_mb`` megabytes or ``split_s`` seconds; 0 is never. With ``ring_s`` above 0 only
    the last so many seconds are kept, in at most ``ring_mb`` megabytes of memory, and written when something happens:
    a fault, an emergency stop, or the signal SIGUSR1; nothing is split then.
    """

    enabled: bool = False
    split_mb: NonNegative = 0.0
    split_s: NonNegative = 0.0
    ring_s: NonNegative = 0.0
    ring_mb: Positive = 256.0

    def __post_init__(self) -> None:
        for name in ("split_mb", "split_s"):
            if self.ring_s and getattr(self, name):
                raise ValueError(
                    f"record.ring_s is {self.ring_s:g} and record.{name} {getattr(self, name):g}: "
                    "a ring is written into files of its own length; one of the two must be 0"
                )


class EndpointsConfig(Section, frozen=True):
    """Where the links are: ``ipc://PATH`` or ``tcp://HOST:PORT``. None: a private socket in the run's own folder.

    ``keys`` is the folder of this machine's keys (see ``td3-robot keys``). With it every ``tcp://`` link is encrypted
    and lets in known keys alone; without it none may go beyond loopback.
    """

    policy: str | None = None
    learner: str | None = None
    supervisor: str | None = None
    keys: str | None = None
    recorder: str | None = None
    monitor: str | None = None


class Config(Section, frozen=True):
    """One run."""

    task: str = "Walker2D"
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    total_steps: Count = 1_000_000
    simulators: Annotated[int, Meta(ge=1, le=64)] = 1
    robots: Annotated[int, Meta(ge=1, le=1024)] = 1
    timing: Literal["free", "lockstep"] = "free"
    launch: str = "train"
    network: NetworkConfig = NetworkConfig()
    exploration: ExplorationConfig = ExplorationConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    pacing: PacingConfig = PacingConfig()
    randomization: RandomizationConfig = RandomizationConfig()
    a2c: A2CConfig = A2CConfig()
    safety: SafetyConfig = SafetyConfig()
    policy: PolicyConfig = PolicyConfig()
    record: RecordConfig = RecordConfig()
    endpoints: EndpointsConfig = EndpointsConfig()
    realtime: RealtimeConfig = RealtimeConfig()

    def __post_init__(self) -> None:
        learner = self.learner
        if learner.learning_starts >= self.total_steps and not learner.offline_updates:
            raise ValueError(
                f"learner.learning_starts is {learner.learning_starts}, not below total_steps {self.total_steps}: "
                "nothing would be learned"
            )
        if learner.offline_updates and self.pacing.mode == "realtime":
            raise ValueError(
                f"learner.offline_updates is {learner.offline_updates} and pacing.mode is 'realtime': robots that "
                "do not wait would act at random meanwhile; make the policy first (--steps 1), then learner.start_from"
            )
        if learner.batch_size > learner.buffer_size:
            raise ValueError(
                f"learner.batch_size is {learner.batch_size}, above learner.buffer_size {learner.buffer_size}"
            )
        waiting = learner.n_step * self.robots * self.simulators
        if learner.n_step > 1 and learner.learning_starts < waiting:
            raise ValueError(
                f"learner.learning_starts is {learner.learning_starts}; with {self.simulators} simulators of "
                f"{self.robots} robots at learner.n_step {learner.n_step} it must be at least {waiting}: "
                "there would be nothing to sample"
            )
        if learner.replay_ratio is not None:
            # One round of all robots, and one update: with less, simulators and learner would wait for each other.
            needed = learner.replay_ratio * self.robots * self.simulators + 1
            if learner.replay_ratio_band < needed:
                raise ValueError(
                    f"learner.replay_ratio_band is {learner.replay_ratio_band}; with {self.simulators} simulators of "
                    f"{self.robots} robots at replay_ratio {learner.replay_ratio} it must be at least {needed:g}"
                )
        elif self.timing == "lockstep":
            raise ValueError("timing is 'lockstep' and learner.replay_ratio is null; lock-step needs a ratio")
        if self.evaluation.target_return is not None and self.timing == "lockstep":
            raise ValueError(
                f"evaluation.target_return is {self.evaluation.target_return} and timing is 'lockstep', which is the "
                "same run each time: when an evaluation is ready is not; use timing free"
            )
        if learner.replay_storage == "file" and learner.n_step > 1 and self.timing == "free":
            # Rows of n steps come later than their Steps: a killed learner would lack some, and make others twice.
            raise ValueError(
                f"learner.replay_storage is 'file' and learner.n_step is {learner.n_step}; beside 'file' it must be 1, "
                "or timing lockstep"
            )
        if self.pacing.mode == "realtime" and self.timing == "lockstep":
            raise ValueError(
                "pacing.mode is 'realtime' and timing is 'lockstep'; lock-step waits and real time does not: "
                "use pacing.mode fast, or timing free"
            )
        for key in ("observation_deadline_ms", "action_deadline_ms", "frozen_ms"):
            if self.timing == "lockstep" and (value := getattr(self.safety, key)) is not None:
                raise ValueError(f"safety.{key} is {value} and timing is 'lockstep', which waits: use timing free")
        if problem := self.randomization.problem():
            raise ValueError(problem)

    def agreement(self) -> dict[str, str]:
        """What every process of one run must hold alike, as text: compared key by key in the handshake."""
        return {
            "task": self.task,
            "timing": self.timing,
            "network.hidden": str(list(self.network.hidden)),
            "seed": str(self.seed),
        }

    def to_yaml(self) -> str:
        return yaml.safe_dump(msgspec.to_builtins(self), sort_keys=False)
