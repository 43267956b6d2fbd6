"""The rules for the Steps of a driver, and the Actions with which the conformance kit tests the driver."""

from __future__ import annotations

from typing import Any

import numpy as np

from td3_robot.bench.conformance import Checks
from td3_robot.messages import Action, ActionOrigin, Hello, Phase, Step
from td3_robot.specs import Float32, RobotSpec

NORMAL, BEYOND, NOTHING, SAFE, FOREIGN, GROWN = range(6)
"""The six cases. The case of a Step decides what the kit sends for it. Step n has the case n % 6.

NORMAL: an Action. BEYOND: an Action beyond the limits. NOTHING: no Action. SAFE: the safe action. FOREIGN: Actions for
other Steps. GROWN: an Action with a field that the driver does not know.
"""
_FOR_THE_DRIVER = (NORMAL, BEYOND, GROWN)


class StepRules:
    """Checks each Step of one driver, and knows the kit's Actions.

    Attributes:
        spec: the robot.
        newest: the newest Step; None before the first.
        count: number of received Steps, without repetitions.
        stamps: the stamps of these Steps.
        origins: the origins of these Steps.
        used: cases whose Actions the driver has applied.
    """

    def __init__(self, checks: Checks, hello: Hello, spec: RobotSpec) -> None:
        self._expect = checks.expect
        self._hello, self.spec = hello, spec
        self._sent: dict[int, Action] = {}
        self.newest: Step | None = None
        self.stamps: list[int] = []
        self.origins: list[int] = []
        self.used: set[int] = set()

    @property
    def count(self) -> int:
        return len(self.stamps)

    def take(self, step: Step, refused: bool) -> None:
        """Check a Step. If the kit refuses the driver's Steps now (``refused``), the sequence may jump."""
        before, expect, number = self.newest, self._expect, step.sequence
        named = (step.source, step.incarnation)
        expect(
            "identity",
            named == (self._hello.name, self._hello.incarnation),
            f"step {number} has source and incarnation {named}",
        )
        if before and number == before.sequence:
            same = step.stamp == before.stamp and step.observation.tobytes() == before.observation.tobytes()
            expect("sequence", same, f"step {number} comes again with other content")
            return
        wanted = before.sequence + 1 if before else 0
        good = number == wanted or (refused and number > wanted)
        expect("sequence", good, f"step {number} comes in place of step {wanted}")
        if number == wanted:
            self._check_episodes(before, step)
        self._check_origin(before, step)
        self.newest = step
        self.stamps.append(step.stamp)
        self.origins.append(step.origin)

    def answers(self, step: Step) -> list[tuple[Action, dict[str, Any]]]:
        """The Actions that the kit sends for a Step, and the fields to change in each."""
        case, action = step.sequence % 6, self.action(step)
        if case in _FOR_THE_DRIVER:
            self._sent[step.sequence] = action
        changes: dict[int, list[dict[str, Any]]] = {
            NORMAL: [{}],
            BEYOND: [{}],
            NOTHING: [],
            SAFE: [{"weights_version": 0, "noise_kind": 0, "noise_seed": 0}],
            # Never name the next Step in ``answers``: the driver may have sent it already.
            FOREIGN: [{"answers": step.sequence - 1}, {"incarnation": step.incarnation + 1}],
            GROWN: [{"later": [1, {"new": True}]}],
        }
        return [(action, change) for change in changes[case]]

    def action(self, step: Step) -> Action:
        """The Action of the kit's policy."""
        actions = np.tile(self._value(step.sequence % 6), (len(step.action), 1))
        return Action(step.source, step.incarnation, step.sequence, step.stamp, actions, 9, 1, 42)

    def _value(self, case: int) -> Float32:
        """The action of the kit's policy for one robot in one of the six cases: one number for each channel."""
        low, high = self.spec.action_low, self.spec.action_high
        share = np.float32(10.0 if case == BEYOND else 0.05)
        value: Float32 = ((low + high) / 2 + (high - low) / 2 * share).astype(np.float32)
        return value

    # -- rules ---------------------------------------------------------------------------------------------------

    def _check_episodes(self, before: Step | None, step: Step) -> None:
        """Check a Step that follows ``before`` without a gap. For the first Step, ``before`` is None."""
        first = step.phase == Phase.FIRST
        made = step.transitions - (before.transitions if before else 0)
        self._expect("transitions", made == int((~first).sum()), f"step {step.sequence}: transitions grows by {made}")
        good = (step.episode_step[first] == 0).all() and not step.reward[first].any()
        if before is None:
            follows = first
        else:
            continued = (step.episode == before.episode) & (step.episode_step == before.episode_step + np.uint32(1))
            begun = step.episode == before.episode + np.uint64(1)
            follows = np.where(before.phase >= Phase.TERMINATED, first & begun, ~first & continued)
        found = f"step {step.sequence}: the Step before has {_episode(before)}; this Step has {_episode(step)}"
        self._expect("episodes", bool(good and follows.all()), found)

    def _check_origin(self, before: Step | None, step: Step) -> None:
        moving = step.phase != Phase.FIRST
        allowed = (1, 2, 3, 4) if moving.any() else (ActionOrigin.NONE,)
        found = f"step {step.sequence}: origin {step.origin}; phases {step.phase.tolist()}"
        if not self._expect("origin", step.origin in allowed, found) or not moving.any():
            return
        if step.origin == ActionOrigin.POLICY:
            self._check_applied(step, moving)
            return
        repeated = (step.answered, step.weights_version, step.noise_kind, step.noise_seed)
        found = f"step {step.sequence}: origin {step.origin}, but `answered`, version and noise are {repeated}"
        self._expect("answered", repeated == (step.sequence, 0, 0, 0), found)
        if step.origin == ActionOrigin.HELD and before and before.origin and before.sequence + 1 == step.sequence:
            held = np.array_equal(step.action[moving], before.action[moving])
            self._expect(
                "action", held, f"step {step.sequence}: origin 2, but the action differs from the previous action"
            )

    def _check_applied(self, step: Step, moving: Any) -> None:
        """Check a Step that reports an Action of the policy."""
        action = self._sent.get(step.answered) if step.answered == step.sequence - 1 else None
        named = f"step {step.sequence}: origin 1 and `answered` {step.answered}"
        found = f"{named}, but the kit sent no such Action for the previous Step"
        if not self._expect("answered", action is not None, found):
            return
        assert action
        theirs = (step.weights_version, step.noise_kind, step.noise_seed)
        ours = (action.weights_version, action.noise_kind, action.noise_seed)
        self._expect(
            "answered", theirs == ours, f"step {step.sequence}: version and noise are {theirs}; the Action has {ours}"
        )
        low, high, case = self.spec.action_low, self.spec.action_high, step.answered % 6
        applied, sent = step.action[moving], action.action[moving]
        within = (low <= applied) & (applied <= high)
        if case == BEYOND:  # a driver may have tighter limits, but they must allow the action of NORMAL
            normal = self._value(NORMAL)
            fits = bool((applied > normal - 1e-5 * (1 + abs(normal))).all())
        else:
            fits = np.allclose(applied, sent, rtol=1e-5, atol=1e-6)
        found = f"step {step.sequence} applies {applied.tolist()}; the Action is {sent.tolist()}"
        self._expect("action", bool(within.all()) and fits, found)
        self.used.add(case)


def _episode(step: Step | None) -> str:
    if step is None:
        return "nothing"
    fields = ("phase", "episode", "episode_step", "reward")
    return ", ".join(f"{name} {getattr(step, name).tolist()}" for name in fields)
