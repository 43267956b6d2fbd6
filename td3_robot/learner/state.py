"""What a learner needs to go on after a restart: taken from a core, and put into a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from td3_robot.config import Config
from td3_robot.errors import BundleError
from td3_robot.learner.core import LearnerCore
from td3_robot.specs import RobotSpec

Arrays = dict[str, NDArray[Any]]


def save(core: LearnerCore, now: float) -> tuple[Arrays, dict[str, Any]]:
    """Everything a restarted learner needs: named arrays, and plain JSON values; ``now`` in seconds.

    Raises:
        BundleError: no robot has been seen yet.
    """
    if core.spec is None:
        raise BundleError("the learner has nothing to save yet: no simulator has joined")
    td3_arrays, td3 = core.td3.state()
    replay_arrays, replay = core.replay.state()
    arrays = {f"td3.{name}": array for name, array in td3_arrays.items()}
    arrays |= {f"replay.{name}": array for name, array in replay_arrays.items()}
    return arrays, {
        "spec": core.spec.describe(),
        "td3": td3,
        "replay": replay,
        "env_steps": core.env_steps,
        "version": core.version,
        "learning": core.learning,
        "evaluations": core.evaluations.state(),
        "next_record": core.next_record,
        "meter": core.meter.state(now),
        "counters": dict(core.counters),
        "sources": core.sources.state(),
    }


def restored(
    config: Config, arrays: Arrays, scalars: Mapping[str, Any], provenance: Mapping[str, Any] | None = None
) -> LearnerCore:
    """A learner that goes on where :func:`save` was called; sources join anew.

    Raises:
        BundleError: the state does not fit the configuration.
    """
    try:
        core = LearnerCore(config, spec=RobotSpec.from_description(scalars["spec"]), provenance=provenance)
        core.td3.restore(_part(arrays, "td3."), scalars["td3"])
        core.replay.restore(_part(arrays, "replay."), scalars["replay"])
        core.env_steps = scalars["env_steps"]
        core.version = scalars["version"]
        core.learning = scalars["learning"]
        core.evaluations.restore(scalars["evaluations"])
        core.next_record = scalars["next_record"]
        core.meter.restore(scalars["meter"])
        core.counters.update(scalars["counters"])
        core.sources.restore(scalars["sources"])
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"checkpoint does not fit this configuration: {type(error).__name__} {error}") from None
    core.sent.clear()  # what was published before the state came in is a stranger's
    core.publish()
    return core


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
