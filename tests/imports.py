"""The modules that a robot with only the base installation can import."""

from __future__ import annotations

_OPTIONAL = (
    *("td3_robot.bench.learner", "td3_robot.bench.record", "td3_robot.bench.train"),
    *("td3_robot.cluster.connection", "td3_robot.cluster.host", "td3_robot.cluster.learner_files"),
    *("td3_robot.cluster.members", "td3_robot.cluster.question", "td3_robot.cluster.sweep_hosts"),
    *("td3_robot.cluster.training", "td3_robot.convert", "td3_robot.dashboard.compare", "td3_robot.dashboard.ending"),
    *("td3_robot.dashboard.guard", "td3_robot.dashboard.recordings", "td3_robot.dashboard.server"),
    *("td3_robot.learner", "td3_robot.monitor.foxglove", "td3_robot.recording.", "td3_robot.replay"),
    *("td3_robot.ros2.lifecycle", "td3_robot.ros2.monitor", "td3_robot.runtime.learning_curve"),
)
"""The modules that need a package extra: those whose names begin with one of these words."""

IMPORT_ROBOT_SIDE = f"""
import importlib, pkgutil, sys, td3_robot
for module in pkgutil.walk_packages(td3_robot.__path__, "td3_robot."):
    if not module.name.startswith({_OPTIONAL!r}):
        importlib.import_module(module.name)
print(*sorted({{"torch", "gymnasium", "pybullet", "td3_robot_sims"}} & set(sys.modules)))
"""
"""Python code that imports all other modules. It prints which packages of the training side these modules load."""
