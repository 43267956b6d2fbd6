"""The base class of schedulers. A scheduler decides when sources continue, and when to update and publish."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from td3_robot.core_types import Output, Peer
from td3_robot.learner.sources import Source
from td3_robot.messages import SimulatorState, Step

if TYPE_CHECKING:
    from td3_robot.learner.core import LearnerCore


class Scheduler(ABC):
    """Decides the order of events in a run.

    The learner's core reports events to the scheduler, and sends the messages that the scheduler returns.

    A snapshot is a state of the learner from which a run can continue. By default the state at any moment is a
    snapshot, and the learner never rolls back. A scheduler that also restores simulators overrides the snapshot
    methods. For each checkpoint, the code that writes checkpoints calls :meth:`request_snapshot`, waits until
    :attr:`snapshot_ready` is true, and saves. If the run continues, the code then calls :meth:`snapshot_saved`.

    Attributes:
        counters: numbers of dropped messages.
    """

    saves_weights: ClassVar[bool] = False
    """Whether a snapshot contains the newest Weights. Otherwise, a restarted learner publishes new Weights."""

    def __init__(self, core: LearnerCore) -> None:
        self.core = core
        self.counters: Counter[str] = Counter()
        self._snapshot_requested = False

    # -- events --------------------------------------------------------------------------------------------------

    def source_joined(self, source: Source) -> list[Output]:
        """A source has joined, for the first time or again."""
        del source
        return []

    def source_left(self, source: Source) -> None:
        """A source has left."""
        del source

    @abstractmethod
    def policy_joined(self, peer: Peer) -> list[Output]:
        """A policy server has joined."""

    @abstractmethod
    def step_arrived(self, source: Source, step: Step, now: float) -> None:
        """A Step has arrived. The scheduler stores it with ``core.insert``, now or later, or drops an obsolete Step."""

    def state_arrived(self, source: Source, state: SimulatorState) -> list[Output]:
        """A simulator has sent its state."""
        del source, state
        return []

    @abstractmethod
    def learn(self, now: float) -> list[Output]:
        """Make a bounded number of updates, and publish Weights if they are due.

        The core calls this method after it has processed the inputs of a turn, but not during offline updates.
        """

    def grant(self, now: float) -> list[Output]:
        """Tell the sources how many more steps they may make. The core calls this method at the end of a turn."""
        del now
        return []

    def offline_finished(self) -> list[Output]:
        """The learner has made all its offline updates."""
        return []

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether :meth:`learn` has work to do even without input."""
        return False

    def continues(self, source: str) -> bool:
        """Whether a source that joins with a new process continues the Step numbers of its old process."""
        del source
        return False

    # -- snapshots -----------------------------------------------------------------------------------------------

    def request_snapshot(self) -> None:
        """Take a snapshot as soon as possible."""
        self._snapshot_requested = True

    @property
    def snapshot_ready(self) -> bool:
        """Whether the requested snapshot is complete. If so, the current state of the core is the snapshot."""
        return self._snapshot_requested

    def snapshot_saved(self) -> None:
        """The caller has saved the snapshot, or failed to save it. The run continues."""
        self._snapshot_requested = False

    @property
    def unsaved(self) -> bool:
        """Whether the run is ahead of its newest snapshot, so that a stop must wait for a new snapshot."""
        return False

    @property
    def must_roll_back(self) -> bool:
        """Whether the caller must restore the newest snapshot and then call :meth:`rolled_back`."""
        return False

    def rolled_back(self) -> list[Output]:
        """The caller has restored the newest snapshot in the core."""
        return []

    @property
    def simulator_states(self) -> Mapping[str, bytes]:
        """The states of the simulators in the snapshot, by simulator name."""
        return {}

    def restore(self, simulator_states: Mapping[str, bytes]) -> None:
        """Continue from a saved snapshot with these simulator states."""
        del simulator_states
