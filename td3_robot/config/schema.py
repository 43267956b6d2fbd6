"""The configuration of a run: one typed, frozen tree of sections.

The defaults give a correct but untuned TD3 run. A YAML file sets only the keys that differ. An unknown key, a wrong
type, a value out of range or a contradiction gives a one-line error. The docstring of each section documents its keys.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta

from td3_robot import noises
from td3_robot.config.cluster import ClusterConfig
from td3_robot.config.learner import LearnerConfig
from td3_robot.config.randomization import RandomizationConfig
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.config.ros2 import Ros2Config
from td3_robot.config.section import Count, Natural, NonNegative, Positive, Section
from td3_robot.errors import ConfigError
from td3_robot.learner.algorithms import table as algorithms
from td3_robot.safety.limits import SafetyConfig

Width = Annotated[int, Meta(ge=1, le=4096)]
MAX_WEIGHTS = 8_000_000
"""The largest number of weights between hidden layers.

With this limit, a policy fits into one Weights message (up to 64 MiB) if the robot has up to 2,000 channels
(observations and actions together).
"""


class NetworkConfig(Section, frozen=True):
    """The shape of the networks, the same for actor and critics.

    Attributes:
        hidden: widths of the hidden layers.
    """

    hidden: Annotated[tuple[Width, ...], Meta(min_length=1, max_length=8)] = (400, 300)

    def __post_init__(self) -> None:
        weights = sum(before * after for before, after in itertools.pairwise(self.hidden))
        if weights > MAX_WEIGHTS:
            raise ValueError(
                f"network.hidden is {list(self.hidden)}: {weights:,} weights between its layers, above {MAX_WEIGHTS:,}"
            )


class ExplorationConfig(Section, frozen=True):
    """The noise that is added to the actions of the policy.

    In the first ``learner.learning_starts`` steps, actions are uniformly random instead. This does not hold with
    ``learner.start_from`` or ``learner.offline_updates``: there the policy acts from the first step.

    Attributes:
        kind: ``gaussian_v2``, ``ornstein_uhlenbeck_v2``, or a kind of noise from an installed package. ``gaussian`` and
            ``ornstein_uhlenbeck`` draw the same numbers as earlier versions of td3-robot. These two kinds draw robot by
            robot, which is slower.
        noise: standard deviation, as a fraction of half the action range. With ``[low, high]``, the robots of a source
            get values spread over this range, so that some explore more than others.
        theta: parameter of the Ornstein-Uhlenbeck noises. Their value at step t is x(t) = (1 - ``theta``) x(t - 1) +
            noise · N(0, 1). Each reset sets x to 0. Lillicrap et al. 2016 use ``theta`` 0.15 and ``noise`` 0.2.
        parameters: parameters by name, for a kind of noise from an installed package.
    """

    kind: str = "gaussian_v2"
    noise: float | tuple[float, float] = 0.1  # not NonNegative: msgspec 0.22 cannot combine a limit and a tuple
    theta: Annotated[float, Meta(ge=0.01, le=1)] = 0.15
    parameters: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it

    def __post_init__(self) -> None:
        low, high = self.noise if isinstance(self.noise, tuple) else (self.noise, self.noise)
        if not 0 <= low <= high <= 1e12:
            shown = list(self.noise) if isinstance(self.noise, tuple) else self.noise
            raise ValueError(
                f"exploration.noise is {shown}; allowed: a number from 0 to 1e12, or two numbers, the lower one first"
            )
        if self.kind in noises.CHOSEN_BY_THE_LEARNER or self.kind not in noises.NOISES:
            allowed = [name for name in noises.NOISES.names() if name not in noises.CHOSEN_BY_THE_LEARNER]
            raise ValueError(f"exploration.kind is {self.kind!r}; allowed: {', '.join(allowed)}")
        try:
            noises.check(self.kind)
        except ConfigError as error:
            raise ValueError(f"exploration.kind is {self.kind!r}: {error}") from None
        try:
            noises.parameters(self.kind, self.noise_parameters())
        except ConfigError as error:
            raise ValueError(f"exploration.parameters: {error}") from None

    @property
    def is_default(self) -> bool:
        """Whether all values are the defaults. ``kind`` may also be ``gaussian``, the default of earlier versions."""
        return self in (ExplorationConfig(), ExplorationConfig("gaussian"))

    def noise_parameters(self) -> dict[str, float]:
        """Return the configured parameters of the noise, by name."""
        theta = {"theta": self.theta} if "theta" in noises.load(self.kind).PARAMETERS else {}
        return {**theta, **self.parameters}


class EvaluationConfig(Section, frozen=True):
    """Evaluations: episodes without noise in a separate environment.

    Attributes:
        every: environment steps between two evaluations; 0 for no evaluations.
        episodes: episodes of one evaluation during the training. The evaluation of the final policy always has 10
            episodes.
        max_steps: steps after which the evaluation ends an episode, because a task may have no time limit.
        target_return: the run ends successfully when the mean return of an evaluation reaches this value.
    """

    every: Natural = 5_000
    episodes: Count = 10
    max_steps: Count = 100_000
    target_return: Annotated[float, Meta(ge=-1e12, le=1e12)] | None = None

    def __post_init__(self) -> None:
        if self.target_return is not None and not self.every:
            raise ValueError(
                f"evaluation.target_return is {self.target_return} and evaluation.every is 0; "
                "with a target return, evaluation.every must be at least 1"
            )


class CheckpointConfig(Section, frozen=True):
    """Checkpoints. Together with the replay file, if there is one, they contain all that a resumed learner needs.

    Attributes:
        every: environment steps or offline updates between two regular checkpoints; 0 for no regular checkpoints. The
            learner also saves a checkpoint at the end of a run, and, in lock-step, at the start of a new run.
        keep: how many checkpoints stay on disk.
    """

    every: Natural = 10_000
    keep: Count = 2


class PacingConfig(Section, frozen=True):
    """The times at which a simulator steps.

    Attributes:
        mode: ``fast``: the simulator steps as soon as possible. ``realtime``: the simulator steps once every control
            period, and applies the Action for a Step at the next deadline. In real time, the replay ratio slows only
            the learner, because a robot cannot wait.
        fallback: what each robot applies in mode ``realtime`` if no Action arrives before the deadline. ``hold``: the
            robot's last action again; after a reset, the last action is 0 in each channel. ``zero``: 0 in each channel.
            Both actions are clipped to the action limits.
    """

    mode: Literal["fast", "realtime"] = "fast"
    fallback: Literal["hold", "zero"] = "hold"


class A2CConfig(Section, frozen=True):
    """The on-policy baseline, ``learner.algorithm: a2c``.

    Learning rate and discount are in ``learner``. The shape of the networks is in ``network``.

    Attributes:
        episodes: number of episodes after which the training ends, unless ``total_steps`` ends it first. There is one
            update for each episode. If ``learner.learning_rate_end`` is below 1, the learning rate falls.
            ``learner.learning_rate_falls_from`` is then the fraction of these episodes after which the learning rate
            begins to fall.
        entropy: weight of the policy's entropy in the loss.
        gradient_norm: the largest norm of a gradient, for the actor and for the critic.
    """

    episodes: Count = 500
    entropy: NonNegative = 0.0
    gradient_norm: Positive = 0.5


class PolicyConfig(Section, frozen=True):
    """The policy server.

    Attributes:
        autostart: policy server and driver go to the state ``active`` without a command.
        frozen: the server refuses the weights of learners.
        operator_deadline_ms: a robot that an operator has taken over gets the safe action if the operator's newest
            action is older than this time.
    """

    autostart: bool = True
    frozen: bool = False
    operator_deadline_ms: Positive = 200.0


class RecordConfig(Section, frozen=True):
    """Recording into the run folder. ``record: true`` is short for ``record: {enabled: true}``.

    Attributes:
        enabled: record the run.
        split_mb: begin a new file after this many megabytes; 0 for no limit.
        split_s: begin a new file after this many seconds; 0 for no limit.
        ring_s: if above 0, the recorder keeps only the messages of the last ``ring_s`` seconds, in a ring in memory. It
            writes the ring to a file when a node fails, goes to fault or is silent, at an emergency stop, and at the
            signal SIGUSR1. A ring cannot be split.
        ring_mb: the largest size of the ring in megabytes.
        weights_every: record the learner's first policy, and each policy whose version is a multiple of this number.
            With 0, the recorder records no policy of the learner, not even the first. For each policy that is not
            recorded, the recording contains only version and hash. The recorder always records a policy that a person
            loads.
    """

    enabled: bool = False
    split_mb: NonNegative = 0.0
    split_s: NonNegative = 0.0
    ring_s: NonNegative = 0.0
    ring_mb: Positive = 256.0
    weights_every: Natural = 100

    def __post_init__(self) -> None:
        for name in ("split_mb", "split_s"):
            if self.ring_s and getattr(self, name):
                raise ValueError(
                    f"record.ring_s is {self.ring_s:g} and record.{name} is {getattr(self, name):g}: "
                    "a ring cannot be split; one of the two must be 0"
                )


class EndpointsConfig(Section, frozen=True):
    """Addresses of the links, ``ipc://PATH`` or ``tcp://HOST:PORT``; null for a private socket of the run.

    Attributes:
        policy, learner, supervisor, recorder, monitor: the address at which the process of this name listens. Nodes
            find monitors and recorders on the same machine even if ``recorder`` and ``monitor`` are null.
        keys: folder of this machine's keys, see ``td3-robot keys``. With keys, every ``tcp://`` link is encrypted and
            accepts only known keys. Without keys, links cannot connect to other machines.
    """

    policy: str | None = None
    learner: str | None = None
    supervisor: str | None = None
    keys: str | None = None
    recorder: str | None = None
    monitor: str | None = None


class Config(Section, frozen=True):
    """One run.

    Attributes:
        task: name of the environment.
        seed: seed of all random numbers.
        total_steps: environment steps of the run.
        simulators: number of simulator processes.
        robots: number of robots in each simulator.
        timing: ``free``: learner and simulators wait for each other only to keep the replay ratio. ``lockstep``: runs
            with the same seed are bit-identical on the same kind of machine.
        launch: name of the launch description, which lists the processes.
    """

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
    ros2: Ros2Config = Ros2Config()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        self._check_learner()
        if self._consumes == "transitions" and (problem := self.replay_ratio_problem()):
            raise ValueError(problem)
        if self.timing == "lockstep":
            self._check_lockstep()

    @property
    def _consumes(self) -> str | None:
        """What the algorithm consumes: ``transitions`` or ``rollouts``.

        None for an algorithm of another package, because the algorithm's class is not loaded here.
        """
        return algorithms.CONSUMES.get(self.learner.algorithm)

    def _check_learner(self) -> None:
        learner = self.learner
        if not self.task.startswith(tasks := algorithms.TASKS.get(learner.algorithm, "")):
            raise ValueError(
                f"task is {self.task!r} and learner.algorithm is {learner.algorithm!r}, "
                f"which learns only tasks that begin with {tasks!r}"
            )
        if self._consumes == "rollouts" and not self.exploration.is_default:
            raise ValueError(
                f"exploration is set and learner.algorithm is {learner.algorithm!r}, which draws its actions itself; "
                "leave exploration out"
            )
        if learner.learning_starts >= self.total_steps and not learner.offline_updates:
            raise ValueError(
                f"learner.learning_starts is {learner.learning_starts} and total_steps is {self.total_steps}: "
                f"the learner would make no update; allowed: total_steps above {learner.learning_starts}, or a lower "
                "learner.learning_starts"
            )
        if learner.offline_updates and self.pacing.mode == "realtime":
            raise ValueError(
                f"learner.offline_updates is {learner.offline_updates} and pacing.mode is 'realtime': robots would act "
                "at random during these updates; train offline first (total_steps 1), then set learner.start_from"
            )
        if learner.batch_size > learner.buffer_size:
            raise ValueError(
                f"learner.batch_size is {learner.batch_size}, above learner.buffer_size {learner.buffer_size}"
            )
        waiting = learner.n_step * self.robots * self.simulators
        if learner.n_step > 1 and learner.learning_starts < waiting:
            raise ValueError(
                f"learner.learning_starts is {learner.learning_starts}; it must be at least {waiting} with "
                f"{self.simulators} simulators of {self.robots} robots at learner.n_step {learner.n_step}: "
                "otherwise the replay buffer would be empty at the first update"
            )
        if learner.replay_storage == "file" and learner.n_step > 1 and self.timing == "free":
            # Transitions wait in memory until their n-step row is complete. So the file does not match the newest Step,
            # and a learner that is killed and started again would lose or repeat rows.
            raise ValueError(
                f"learner.replay_storage is 'file' and learner.n_step is {learner.n_step}; with 'file', n_step "
                "must be 1, or timing must be lockstep"
            )

    def replay_ratio_problem(self) -> str | None:
        """The reason why the replay ratio does not fit the number of robots; None if it fits.

        Algorithms without a replay buffer have no replay ratio.
        """
        learner = self.learner
        # The band must allow all updates for one step of all robots, and one more update. With a smaller band, learner
        # and simulators would wait for each other for ever (a deadlock).
        needed = (learner.replay_ratio or 0.0) * self.robots * self.simulators + 1
        if learner.replay_ratio is None or learner.replay_ratio_band >= needed:
            return None
        return (
            f"learner.replay_ratio_band is {learner.replay_ratio_band}; it must be at least {needed:g} with "
            f"{self.simulators} simulators of {self.robots} robots at replay_ratio {learner.replay_ratio}"
        )

    def _check_lockstep(self) -> None:
        if self.learner.replay_ratio is None:
            raise ValueError("timing is 'lockstep' and learner.replay_ratio is null; lock-step needs a ratio")
        if self.evaluation.target_return is not None:
            raise ValueError(
                f"evaluation.target_return is {self.evaluation.target_return} and timing is 'lockstep': the moment at "
                "which an evaluation is ready differs from run to run; use timing free"
            )
        if self.pacing.mode == "realtime":
            raise ValueError(
                "pacing.mode is 'realtime' and timing is 'lockstep'; lock-step waits and real time does not: "
                "use pacing.mode fast, or timing free"
            )
        for key in ("observation_deadline_ms", "action_deadline_ms", "frozen_ms"):
            if (value := getattr(self.safety, key)) is not None:
                raise ValueError(
                    f"safety.{key} is {value} and timing is 'lockstep': in lock-step, processes wait without a time "
                    "limit; use timing free"
                )

    def agreement(self) -> dict[str, str]:
        """Return, as text, the values that must be equal in all processes of a run.

        The handshake compares them by key.
        """
        return {
            "task": self.task,
            "timing": self.timing,
            "network.hidden": str(list(self.network.hidden)),
            "seed": str(self.seed),
        }

    def to_yaml(self) -> str:
        """Return the configuration as YAML, with defaults."""
        return yaml.safe_dump(msgspec.to_builtins(self), sort_keys=False)
