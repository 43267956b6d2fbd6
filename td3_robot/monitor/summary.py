"""Selects the few facts of a message that a monitor shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from td3_robot import noises
from td3_robot.messages import (
    Action,
    ActionOrigin,
    Bye,
    Command,
    Evaluation,
    Hello,
    LifecycleChange,
    Message,
    Phase,
    Refused,
    Reply,
    Status,
    Step,
    Teleop,
    Throttle,
    Weights,
)

Facts = dict[str, Any]


def facts(message: Message) -> Facts:
    """Return numbers and texts by name. The result is empty if the monitor shows no facts of this type of message."""
    known = _FACTS.get(type(message))
    return known(message) if known else {}


def _step(step: Step) -> Facts:
    phases = Counter(Phase(phase).name.lower() for phase in step.phase.tolist())
    return {
        "phase": next(iter(phases)) if len(step.phase) == 1 else ", ".join(f"{n} {p}" for p, n in phases.items()),
        "reward": _mean(step.reward),
        "episode_step": int(step.episode_step.max(initial=0)),
        "action": ActionOrigin.name_of(step.origin),
        "weights": step.weights_version,
    }


def _mean(values: Any) -> float | None:
    return round(float(values.mean()), 3) if len(values) else None


def _action(action: Action) -> Facts:
    noise = noises.name_of(action.noise_kind)
    return {"source": action.source, "weights": action.weights_version, "noise": noise}


def _status(status: Status) -> Facts:
    detail = {"detail": status.detail} if status.detail else {}
    return {"state": status.state, **detail, **{name: round(value, 4) for name, value in status.figures.items()}}


_FACTS: dict[type[Message], Callable[[Any], Facts]] = {
    Hello: lambda m: {"role": m.role, "robots": m.robots},
    Refused: lambda m: {"code": m.code, "reason": m.reason},
    Bye: lambda m: {"reason": m.reason},
    Step: _step,
    Action: _action,
    Throttle: lambda m: {"source": m.source, "allowed": m.transitions_allowed},
    Weights: lambda m: {"version": m.version, "updates": m.updates, "bytes": len(m.payload)},
    Evaluation: lambda m: {"version": m.version, "episodes": len(m.returns), "return": _mean(m.returns)},
    Status: _status,
    Command: lambda m: {"verb": m.verb, "target": m.target, "reason": m.reason},
    Teleop: lambda m: {"source": m.source, "robot": m.robot, "sequence": m.sequence},
    Reply: lambda m: {"node": m.node, "state": m.state, "error": m.error},
    LifecycleChange: lambda m: {"node": m.node, "state": m.state, "reason": m.reason},
}
