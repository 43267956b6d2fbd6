"""What a scheduler decides: who may continue, when updates are made, and when weights go out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from td3_robot.core_types import Output, Peer
from td3_robot.learner.sources import Source
from td3_robot.messages import SimulatorState, Step, Weights

if TYPE_CHECKING:
    from td3_robot.learner.core import LearnerCore


class Scheduler(ABC):
    """The order of a run. The learner's core reports events to it and sends what it returns.

    | event | method |
    | --- | --- |
    | a simulator or robot joins, leaves | :meth:`source_joined`, :meth:`source_left` |
    | a policy server joins | :meth:`policy_joined` |
    | a Step, a simulator's state arrives | :meth:`step_arrived`, :meth:`state_arrived` |
    | the inputs of a turn are dealt with | :meth:`learn`, :meth:`grant` |
    | the offline updates are made | :meth:`grant`, :meth:`offline_finished` |

    An update is due when ``core.learning.update_due``: the replay ratio asks for it *and* the training is ready. So an
    off-policy algorithm updates after each Step, and an on-policy one after each rollout. The on-policy one needs
    lock-step: there, all sources wait until the weights of the update serve.

    A snapshot is a state of the learner that a run can continue from. By default the learner's state at any moment is
    one, and nothing ever rolls back. A scheduler that also restores the simulators overrides the methods about
    snapshots. Whoever writes checkpoints calls :meth:`keep_snapshots` first, then :meth:`request_snapshot`, and
    :meth:`snapshot_saved` as soon as :attr:`snapshot_ready`.

    Attributes:
        counters: what the scheduler dropped.
    """

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
        """A Step has arrived; store it with ``core.insert`` now or later."""

    def state_arrived(self, source: Source, state: SimulatorState) -> list[Output]:
        """A simulator has sent its state."""
        del source, state
        return []

    @abstractmethod
    def learn(self, now: float) -> list[Output]:
        """Make a bounded number of updates and publish weights; offline updates are not meant."""

    def grant(self, now: float) -> list[Output]:
        """Tell the sources how far they may go."""
        del now
        return []

    def offline_finished(self) -> list[Output]:
        """The updates before the first environment step are made."""
        return []

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether :meth:`learn` has work to do even without input."""
        return False

    def continues(self, source: str) -> bool:
        """Whether a source that joins continues its stream of Steps, even in another process."""
        del source
        return False

    # -- snapshots -----------------------------------------------------------------------------------------------

    def keep_snapshots(self) -> None:
        """Expect somebody to write snapshots from now on."""
        return

    def request_snapshot(self) -> None:
        """Take a snapshot as soon as possible."""
        self._snapshot_requested = True

    @property
    def snapshot_ready(self) -> bool:
        """Whether the state of the core is the requested snapshot."""
        return self._snapshot_requested

    def snapshot_saved(self) -> None:
        """The snapshot is written, or could not be; the run continues."""
        self._snapshot_requested = False

    @property
    def unsaved(self) -> bool:
        """Whether the run is ahead of its newest snapshot, so that a stop has to wait for another one."""
        return False

    @property
    def must_roll_back(self) -> bool:
        """Whether the newest snapshot must be restored, followed by :meth:`rolled_back`."""
        return False

    def rolled_back(self) -> list[Output]:
        """The core has the state of the newest snapshot again."""
        return []

    @property
    def simulator_states(self) -> Mapping[str, bytes]:
        """The states of simulators, by name, that belong to the core's state."""
        return {}

    @property
    def resent(self) -> Iterable[Weights]:
        """Weights that a policy server may need again after a restart."""
        return ()

    def restore(self, simulator_states: Mapping[str, bytes]) -> None:
        """Continue from a saved state with these states of simulators."""
        del simulator_states

    def restarted(self) -> None:
        """The core has been restored in a new process."""
        return
