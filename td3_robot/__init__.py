"""td3-robot trains walking robots, serves their policies, and records and replays what happened.

    import td3_robot as tr

    policy = tr.load_policy("walker2d")
    run = tr.train("walker2d_fast", total_steps=20_000, seed=1)
    result = tr.evaluate(run.best_policy, task="Walker2D", episodes=10)
    steps = tr.open_recording("session.mcap").to_pandas("step")
    tr.connect("tcp://127.0.0.1:5601").estop("smoke")

The names are imported on first use, so ``import td3_robot`` is fast and needs only the base install.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from td3_robot_sims.evaluate import Evaluation, evaluate

    from td3_robot.errors import CommandError, Td3RobotError
    from td3_robot.operators import Operator, Takeover, connect
    from td3_robot.policies import Policy, load_policy, shipped_policies
    from td3_robot.recordings import Recording, Transitions, open_recording
    from td3_robot.runs import Run, TrainingProgress, open_run, train
    from td3_robot.specs import Channel, RobotSpec

    __version__: str

__all__ = [
    "Channel",
    "CommandError",
    "Evaluation",
    "Operator",
    "Policy",
    "Recording",
    "RobotSpec",
    "Run",
    "Takeover",
    "Td3RobotError",
    "TrainingProgress",
    "Transitions",
    "__version__",
    "connect",
    "evaluate",
    "load_policy",
    "open_recording",
    "open_run",
    "shipped_policies",
    "train",
]

_MODULES = {
    "td3_robot.errors": ("CommandError", "Td3RobotError"),
    "td3_robot.operators": ("Operator", "Takeover", "connect"),
    "td3_robot.policies": ("Policy", "load_policy", "shipped_policies"),
    "td3_robot.recordings": ("Recording", "Transitions", "open_recording"),
    "td3_robot.runs": ("Run", "TrainingProgress", "open_run", "train"),
    "td3_robot.specs": ("Channel", "RobotSpec"),
    "td3_robot.util.version": ("__version__",),
    "td3_robot_sims.evaluate": ("Evaluation", "evaluate"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'td3_robot' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
