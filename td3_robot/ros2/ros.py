"""Starts and stops rclpy, and runs callbacks of nodes in threads. The functions import ROS packages when they run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from td3_robot.config.ros2 import QosConfig
from td3_robot.errors import ConfigError, UsageError

log = logging.getLogger(__name__)

_OF_ROS = ("use_sim_time", "start_type_description_service")
"""Parameters that each ROS node has."""
_JOIN = 3.0  # maximum seconds to wait for the end of a running callback


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the arguments of td3-robot and the arguments of ROS.

    The arguments of ROS begin with ``--ros-args`` and end with ``--`` or at the end of the line.
    """
    ours: list[str] = []
    ros: list[str] = []
    inside = False
    for word in words:
        inside = inside or word == "--ros-args"
        (ros if inside else ours).append(word)
        inside = inside and word != "--"
    return ours, ros


@contextmanager
def running(words: Sequence[str]) -> Iterator[None]:
    """Initialise rclpy, and shut it down after the block. The process keeps its own signal handlers.

    ``words`` are the arguments of ROS, from ``--ros-args`` on.

    Raises:
        ModuleNotFoundError: rclpy is missing.
        UsageError: rclpy cannot be imported, or an argument is wrong.
    """
    try:
        import rclpy
        from rclpy.signals import SignalHandlerOptions
    except ModuleNotFoundError:
        raise
    except ImportError as error:  # rclpy exists, but its libraries are not on the library path
        first = str(error).splitlines()[0]
        advice = "source the setup file of your ROS 2 installation"
        raise UsageError(f"rclpy cannot be imported: {first}; {advice}") from None
    try:
        rclpy.init(args=["td3-robot", *words], signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:  # rclpy has a private type for each kind of wrong argument
        raise UsageError(f"ROS arguments {' '.join(words)}: {' '.join(str(error).split())}") from None
    try:
        yield
    finally:
        rclpy.try_shutdown()


@contextmanager
def spinning(node: Any) -> Iterator[None]:
    """Run the callbacks of a node in a thread during the block. Then destroy the node, unless a callback hangs."""
    from rclpy.executors import SingleThreadedExecutor

    executor = SingleThreadedExecutor()
    executor.add_node(node)
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            try:
                executor.spin_once()
            except Exception:  # a failed callback must not end the thread
                log.exception("a callback of the ROS node %s failed", node.get_name())

    thread = threading.Thread(target=spin, daemon=True, name=f"ros-{node.get_name()}")
    thread.start()
    try:
        yield
    finally:
        executor.create_task(ended.set)
        thread.join(_JOIN)
        if not thread.is_alive():
            executor.shutdown()
            node.destroy_node()


def refuse_simulated_time(node: Any) -> None:
    """Raise UsageError if ``use_sim_time`` is true. While the node runs, refuse requests that set it to true."""
    from rcl_interfaces.msg import SetParametersResult

    def problem(value: Any) -> str:
        allowed = "allowed: false, because deadlines need the monotonic clock of the machine"
        return f"use_sim_time is {str(value).lower()}; {allowed}" if value else ""

    if reason := problem(node.get_parameter("use_sim_time").value):
        raise UsageError(reason)

    def check(parameters: Sequence[Any]) -> Any:
        reason = "".join(problem(parameter.value) for parameter in parameters if parameter.name == "use_sim_time")
        return SetParametersResult(successful=not reason, reason=reason)

    node.add_on_set_parameters_callback(check)


def text_parameters(node: Any, names: Sequence[str]) -> dict[str, str]:
    """Declare read-only text parameters. Return the values of those that the command line or a launch file sets.

    Args:
        node: a node with ``automatically_declare_parameters_from_overrides``.
        names: the names of the parameters. For any other parameter, log a warning. It is no error, because a file of
            parameters may be for several nodes.

    Raises:
        UsageError: a value is not text.
    """
    from rcl_interfaces.msg import ParameterDescriptor

    given = {name: parameter.value for name, parameter in node.get_parameters_by_prefix("").items()}
    for name in names:
        if not isinstance(value := given.get(name, ""), str):
            raise UsageError(f"the ROS parameter {name} is {value!r}; allowed: text, for example -p '{name}:=\"3\"'")
        if name in given:
            node.undeclare_parameter(name)
        node.declare_parameter(name, "", ParameterDescriptor(read_only=True))
    for name in given:
        if name not in (*names, *_OF_ROS) and not name.startswith("qos_overrides."):
            log.warning("the ROS parameter %s has no effect; known parameters: %s", name, ", ".join(names))
    return {name: given[name] for name in names if given.get(name)}


def check_topic(node: Any, key: str, topic: str) -> None:
    """Raise ConfigError if the value of a configuration key is not a topic name."""
    try:
        node.resolve_topic_name(topic)
    except Exception as error:  # rclpy has private types for its errors
        reason = str(error).removeprefix("failed to resolve name: ").partition(", at ")[0]
        allowed = "allowed: the name of a ROS topic, for example leg/joint_states"
        raise ConfigError(f"{key} is {topic!r}: {reason}; {allowed}") from None


def profile(qos: QosConfig) -> Any:
    """Return the configured quality of service as a QoSProfile."""
    from rclpy.qos import QoSProfile, ReliabilityPolicy

    return QoSProfile(depth=qos.depth, reliability=ReliabilityPolicy[qos.reliability.upper()])
