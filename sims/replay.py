"""The simulator's core, driven by the actions that were really applied: the same Steps?"""

from __future__ import annotations

from collections import defaultdict

from sims import tasks
from sims.core import SimulatorCore
from sims.environment import Environment
from sims.fleet import Fleet
from td3_robot.config import Config
from td3_robot.driver.pacing import Fast, RealTime, make_pacing
from td3_robot.messages import Action, ActionOrigin, Hello, Step, Throttle
from td3_robot.session.entries import Entry
from td3_robot.session.outcome import Outcome, Replayed
from td3_robot.session.reader import Session
from td3_robot.specs import Float32

_ANY = 2**63  # transitions allowed: the recording says how far the learner let it go


class Recorded(Fast):
    """Steps when the recording did; what is applied where no Action came is the configured pacing's to say."""

    def __init__(self, pacing: Fast | RealTime) -> None:
        self._pacing = pacing

    def may_go_on(self, now: float, *, ready: bool) -> bool:
        del now, ready
        return True

    def substitute(self, last: Float32) -> tuple[Float32, ActionOrigin]:
        return self._pacing.substitute(last)


def replay(session: Session) -> Outcome:
    """Replay every source of a session that is a simulator and was recorded from its first Step on.

    Raises:
        SessionError: the recording is damaged or holds no configuration.
    """
    config, outcome = session.config(), Outcome()
    recorded: dict[tuple[str, int], list[tuple[Entry, Step]]] = defaultdict(list)
    drivers: set[str] = set()
    for entry, message in session.messages((Hello.NAME, Step.NAME)):
        if isinstance(message, Step):
            recorded[message.source, message.incarnation].append((entry, message))
        elif isinstance(message, Hello) and message.role == "driver":
            drivers.add(message.name)
    expected: list[tuple[Entry | None, Step]] = []
    got: list[Step] = []
    for (source, incarnation), steps in sorted(recorded.items()):
        label = f"{source} ({incarnation})" if incarnation else source
        if source in drivers:
            outcome.notes.append(f"{label} is a real robot")
            continue
        steps.sort(key=lambda item: item[1].sequence)  # parts of a session may overlap
        whole = sum(1 for number, (_, step) in enumerate(steps) if step.sequence == number)
        if whole < len(steps):
            outcome.notes.append(f"{len(steps) - whole} Steps of {label}: Step {whole}, before them, is not recorded")
        if whole:
            expected += steps[:whole]
            got += _steps(config, [step for _, step in steps[:whole]])
    if expected:
        outcome.parts.append(Replayed(Step.NAME, ("numpy", _engine(config)), expected, got))
    elif not outcome.notes:
        outcome.notes.append("there are no Steps in it")
    return outcome


def _engine(config: Config) -> str:
    return "gymnasium" if config.task.startswith("gymnasium:") else "pybullet"


def _steps(config: Config, steps: list[Step]) -> list[Step]:
    """What the core publishes now for the actions that these Steps say were applied."""
    first = steps[0]

    def make(seed: int) -> Environment:
        return tasks.make(config.task, seed, config.randomization)

    fleet = Fleet(make, len(first.phase), config.seed, first.source, first.incarnation)
    pacing = Recorded(make_pacing(config.pacing, fleet.spec))
    lockstep = config.timing == "lockstep"
    core = SimulatorCore(fleet, first.source, first.incarnation, lockstep=lockstep, pacing=pacing)
    got: list[Step] = []
    try:
        for step in steps:
            leave = Throttle(step.source, step.incarnation, step.sequence, _ANY, step.needs_version, 0)
            acted = step.answered != step.sequence or step.origin == ActionOrigin.SAFE
            inputs = [("learner", leave), *([("policy", _applied(step))] if acted else [])]
            outputs = core.step(inputs, _seconds(step.stamp))
            got += [message for to, message in outputs if to == "learner" and isinstance(message, Step)]
    finally:
        fleet.close()
    return got


def _applied(step: Step) -> Action:
    """The Action that must have been applied for this Step to say what it says; a safe one comes without weights."""
    return Action(
        source=step.source,
        incarnation=step.incarnation,
        answers=max(0, step.sequence - 1),
        stamp=0,
        action=step.action,
        weights_version=step.weights_version,
        noise_kind=step.noise_kind,
        noise_seed=step.noise_seed,
    )


def _seconds(stamp: int) -> float:
    """The time in seconds whose stamp, in nanoseconds, is this one to the last of them."""
    return (stamp + 0.5) * 1e-9
