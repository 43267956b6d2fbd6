"""Saves and restores the state that a learner needs after a restart.

In lock-step, this state covers the whole run. It includes the states of the simulators, and the weights that a
restarted policy server may need (see :mod:`td3_robot.learner.scheduling.lockstep`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.bundle import sha256
from td3_robot.errors import BundleError
from td3_robot.learner.checkpointing.stateful import reading
from td3_robot.learner.core import LearnerCore
from td3_robot.messages import Weights
from td3_robot.specs import RobotSpec

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]

_SIMULATOR, _SENT, _PENDING = "simulator.", "sent.", "pending."  # prefixes of array names


def save(core: LearnerCore, now: float) -> tuple[Arrays, dict[str, Any]]:
    """Everything that a restarted learner needs: named arrays, and plain JSON values.

    Arrays can be views of arrays in the core. Write them to a file or copy them before the core continues.

    Raises:
        BundleError: no simulator or driver has joined.
        DivergenceError: training has diverged.
    """
    if core.spec is None:
        raise BundleError("the learner has nothing to save yet: no simulator or driver has joined")
    core.learning.check()
    arrays: Arrays = {}
    parts: dict[str, Any] = {}
    for name, part in core.training.parts().items():
        part_arrays, parts[name] = part.state()
        arrays |= {f"{name}.{key}": array for key, array in part_arrays.items()}
    arrays |= {f"{_SIMULATOR}{name}": _array(payload) for name, payload in core.scheduler.simulator_states.items()}
    publisher = core.publisher
    pending, sent = publisher.pending(), list(publisher.sent) if core.scheduler.saves_weights else []
    arrays |= {f"{_PENDING}{item.version}": _array(item.payload) for item in pending}
    arrays |= {f"{_SENT}{item.version}": _array(item.payload) for item in sent}
    return arrays, {
        "spec": core.spec.describe(),
        "parts": parts,
        "precision": core.config.learner.precision,
        "compiled": core.training.algorithm.compiled,
        "env_steps": core.env_steps,
        "version": publisher.version,
        "published_at": publisher.published_at,
        "sent": [[item.version, item.updates, item.env_steps] for item in sent],
        "pending": [[item.version, item.updates, item.env_steps] for item in pending],
        "learning": publisher.explores,
        "evaluations": publisher.evaluations.state(),
        "next_record": core.reports.next_record,
        "meter": core.gauges.state(now),
        "counters": dict(core.counters),
        "sources": core.sources.state(),
    }


def resume(core: LearnerCore, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
    """Let a new core continue from the state of :func:`save`. All sources must join again."""
    restore(core, arrays, scalars)
    now = core.config.learner.precision
    if (before := scalars.get("precision", now)) != now:
        log.warning("the checkpoint has precision %s; the learner continues with %s, as configured", before, now)
    if not core.scheduler.saves_weights:
        core.publisher.publish()


def restore(core: LearnerCore, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
    """Replace the state of a core with a saved state. The peers of the core stay connected.

    Raises:
        BundleError: the state does not fit the configuration. The core is then unusable.
    """
    what = "checkpoint does not fit this configuration"
    with reading(what):
        spec = RobotSpec.from_description(scalars["spec"])
    if core.spec is None:
        core.learning.begin(spec)
    elif difference := core.spec.difference(spec):
        raise BundleError(f"checkpoint of another robot: {difference}")
    with reading(what):
        if (was := scalars["compiled"]) != (now := core.training.algorithm.compiled):
            log.warning(
                "before the checkpoint, updates were %s; now they are %s, so they round differently",
                compiled_how(was),
                compiled_how(now),
            )
        for name, part in core.training.parts().items():
            part.restore(_part(arrays, f"{name}."), scalars["parts"][name])
        _restore_progress(core, arrays, scalars)
    core.recover()


def _restore_progress(core: LearnerCore, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
    publisher, evaluations = core.publisher, core.publisher.evaluations
    core.learning.env_steps = scalars["env_steps"]
    publisher.version = scalars["version"]
    publisher.published_at = scalars["published_at"]
    publisher.explores = scalars["learning"]
    publisher.sent.clear()
    publisher.sent.extend(_weights(arrays, _SENT, scalars["sent"]))
    evaluations.restore(scalars["evaluations"], core.env_steps)
    evaluations.pending = {item.version: item for item in _weights(arrays, _PENDING, scalars["pending"])}
    core.reports.next_record = scalars["next_record"]
    core.gauges.restore(scalars["meter"])
    core.counters.clear()
    core.counters.update(scalars["counters"])
    core.sources.restore(scalars["sources"])
    core.scheduler.restore({name: array.tobytes() for name, array in _part(arrays, _SIMULATOR).items()})


def _weights(arrays: Arrays, prefix: str, rows: Sequence[Sequence[int]]) -> list[Weights]:
    found: list[Weights] = []
    for version, updates, env_steps in rows:
        payload = arrays[f"{prefix}{version}"].tobytes()
        found.append(Weights(version, updates, env_steps, sha256(payload), payload))
    return found


def _array(payload: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(payload, np.uint8)


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def compiled_how(value: object) -> str:
    """Return in words how updates were compiled.

    ``value`` is ``Algorithm.compiled``. In checkpoints of earlier versions of td3-robot, it is True instead of ``C++``.
    """
    return {"C++": "compiled", "True": "compiled by an earlier version"}.get(str(value), "not compiled")
