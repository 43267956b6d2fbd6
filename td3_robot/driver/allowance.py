"""Tracks how many steps the learner allows, and keeps the Steps that the learner has not processed."""

from __future__ import annotations

from collections import deque

from td3_robot.messages import Step, Throttle
from td3_robot.topics import QUEUE_LENGTH


class Allowance:
    """The steps that the learner allows.

    Args:
        waits: allow no Step before the learner's first Throttle, so that no Step is lost while processes start.
        lockstep: allow the next Step only after the learner has answered the newest Step.

    Attributes:
        begun: False from a rewind until the next Throttle. If ``waits`` is set, ``begun`` is also False from the start
            until the first Throttle.
        needs_version: version of the weights that must compute the Action for the next Step; 0: any version.
        kept: the Steps that the learner has not processed, and before them the last Step that it has processed.
    """

    def __init__(self, *, waits: bool, lockstep: bool) -> None:
        self.begun = not waits
        self.needs_version = 0
        self.kept: deque[Step] = deque()
        self._answered = 0  # number of Steps that the learner has processed
        self._transitions = 0
        self._lockstep = lockstep

    def permits(self, transitions: int, newest: Step | None) -> bool:
        """Whether the learner allows the Step after ``newest``.

        ``transitions`` is the number of transitions that the source has made so far.
        """
        answered = not self._lockstep or newest is None or self._answered > newest.sequence
        return answered and transitions < self._transitions and len(self.kept) <= QUEUE_LENGTH

    def throttle(self, throttle: Throttle) -> None:
        """Process a Throttle of the learner."""
        self.begun = True
        self._transitions = max(self._transitions, throttle.transitions_allowed)
        if throttle.answers >= self._answered:
            self._answered = throttle.answers
            if self._lockstep:  # in a free-running training, weights of any version may compute the Action
                self.needs_version = throttle.weights_version
        while self.kept and self.kept[0].sequence < throttle.answers - 1:
            self.kept.popleft()

    def keep(self, step: Step) -> bool:
        """Keep a published Step until the learner has processed it. Return whether an older Step is dropped.

        A robot that runs in real time continues even if no learner is connected, so ``kept`` can become full.
        """
        self.kept.append(step)
        full = len(self.kept) > QUEUE_LENGTH + 1
        if full:
            self.kept.popleft()
        return full

    def void(self) -> None:
        """Forget the allowance of the last connection to a learner."""
        self._transitions = 0

    def rewind(self, step: Step | None) -> None:
        """Continue after this Step. The next Throttle allows the next Step."""
        self.begun = False
        self.kept = deque([step] if step else [])
        self._answered = self._transitions = 0
