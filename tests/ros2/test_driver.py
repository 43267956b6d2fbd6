"""``td3-robot ros2 driver`` with real ROS 2 nodes in other processes, and a real policy server."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.specs import Channel, RobotSpec
from tests.conftest import poll_until
from tests.ros2.conftest import (
    DRIVER,
    HIP_SECTION,
    HIP_SOURCES,
    ROOT,
    SAFETY,
    STALE_MS,
    Console,
    World,
    acts,
    linear_policy,
    moves,
)

NODE = f"/{DRIVER}"


def configure(world: World, stale_ms: float = STALE_MS, **safety: Any) -> None:
    world.configure(safety={**SAFETY, **safety}, ros2={**HIP_SECTION, "stale_ms": stale_ms})


def all_zero(console: Console, topic: str = "/commands") -> bool:
    """Return whether new commands have come, and all were the safe action."""
    taken = console.take(topic)
    return bool(taken) and all(value == [0.0] for value in taken)


def wait_for_safe(console: Console, topic: str = "/commands") -> None:
    poll_until(lambda: all_zero(console, topic), lambda: f"the last command is {console.newest(topic)}")


def wait_for_state(console: Console, state: str, node: str = NODE) -> None:
    poll_until(lambda: console.state(node) == state, lambda: f"{node} is {console.state(node)}, not {state}")


def wait_for_policy_state(console: Console, words: str) -> None:
    topic = f"{NODE}/policy_state"
    poll_until(lambda: words in (console.newest(topic) or {}).get("message", ""), lambda: str(console.newest(topic)))


def expect_commands(console: Console, topic: str, expected: Any, safe: Any, count: int) -> None:
    """Wait for ``count`` commands equal to ``expected``. Before them, only the safe action ``safe`` may come."""
    taken: list[Any] = []

    def first() -> int:
        return next((place for place, value in enumerate(taken) if value != safe), len(taken))

    poll_until(lambda: taken.extend(console.take(topic)) or len(taken) >= first() + count, lambda: f"{taken[-5:]}")
    assert all(value == expected for value in taken[first() :])


def test_each_channel_gets_its_value_in_any_order_of_the_joints(world: World) -> None:
    """The joints stand still, so all commands must be equal. Only the order of the joints changes between messages."""
    spec = RobotSpec(
        "Leg",
        tuple(Channel(name, "1", -10.0, 10.0) for name in ("hip", "ankle", "pitch_rate", "foot")),
        (Channel("left", "N·m", -1.0, 1.0), Channel("right", "N·m", -1.0, 1.0)),
        0.01,
    )
    gains = np.array([[1.0, 2.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0]], np.float32)
    linear_policy(spec, gains, world.folder / "policy.safetensors")
    world.configure(
        safety=SAFETY,
        ros2={
            "bundle": "policy.safetensors",
            "stale_ms": STALE_MS,
            "observations": [
                {"channel": "foot", "topic": "feet", "index": 1},
                {"channel": "pitch_rate", "imu": "angular_velocity.y", "sign": -1},
                {"channel": "ankle", "joint": "ankle", "scale": 2.0, "offset": -1.0},
                {"channel": "hip", "joint": "hip"},
            ],
            "actions": [{"channel": "right"}, {"channel": "left", "sign": -1, "scale": 10.0, "offset": 3.0}],
        },
    )
    world.robot("--shuffle", "--still")
    console = world.console()
    world.server()
    world.driver()
    moves(console)
    # robot_node.py publishes hip 0.5 rad, ankle 0.125 rad, angular velocity 0.75 rad/s, and foot 0.375.
    # The policy must get hip 0.5, ankle 2 · 0.125 - 1 = -0.75, pitch rate -0.75, and foot 0.375.
    left = math.tanh(0.5 + 2 * -0.75 + 0.5 * 0.375)
    right = math.tanh(-0.75)
    expected = pytest.approx([right, -10 * left + 3], abs=1e-5)
    expect_commands(console, "/commands", expected, safe=[0.0, 3.0], count=200)
    # Three joints have 6 orders. The test polls, because the console may discover the topic late.
    orders: set[tuple[str, ...]] = set()
    poll_until(
        lambda: orders.update(map(tuple, console.take("/joint_states"))) or len(orders) == 6,
        lambda: f"orders: {orders}",
    )


def control(world: World, commands: int) -> float:
    """Let the policy control the robot until it has received ``commands`` commands. Its hip must then be at 0.

    Returns:
        Mean number of commands per period of the robot.
    """
    robot = world.robot()
    console = world.console()
    world.server()
    driver = world.driver()
    moves(console)
    driver.take_lines()
    started = len(driver.lines)  # while the nodes start, late data can cause a fault
    pattern = r"^periods (\d+) commands (\d+)"

    def counts(text: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, text, re.MULTILINE)[-1]]

    robot.take_lines()
    begin = counts(robot.output())
    line = robot.wait_for(pattern, lambda match: int(match[2]) >= commands, timeout=600)
    periods, made = (after - before for before, after in zip(begin, counts(line), strict=True))
    assert acts(console)
    driver.interrupt()
    assert driver.finish() == 128 + signal.SIGINT
    assert abs(float(line.split()[-1])) < 0.02
    assert not re.search(r"-> fault|FAULT", "\n".join(driver.lines[started:]))
    poll_until(lambda: console.newest("/commands") == [0.0], lambda: "the last command is not the safe action")
    return made / periods


def test_the_policy_controls_the_robot_through_ros(hip: World) -> None:
    control(hip, commands=700)


@pytest.mark.slow
def test_the_policy_controls_the_robot_for_a_minute_at_100_hz(hip: World) -> None:
    assert control(hip, commands=6000) > 0.5  # not 1, because a busy test machine delays some commands


def test_a_killed_publisher_leads_to_the_safe_action_until_a_person_activates_the_driver(hip: World) -> None:
    configure(hip, stale_ms=500)
    robot = hip.robot()
    console = hip.console()
    hip.server()
    driver = hip.driver()
    moves(console)
    robot.process.kill()
    driver.wait_for("active -> fault: observe: StaleError: .* has come on 'joint_states' for 500 ms")
    wait_for_safe(console)
    wait_for_state(console, "inactive")
    wait_for_policy_state(console, "fault: observe: StaleError")
    assert console.newest(f"{NODE}/policy_state")["level"] == 2  # ERROR
    console.take("/joint_states")
    hip.robot()
    console.take("/commands")
    came: list[Any] = []
    poll_until(lambda: came.extend(console.take("/joint_states")) or len(came) > 10, lambda: "the robot is silent")
    wait_for_safe(console)
    assert console.state(NODE) == "inactive"
    moves(console)
    assert console.state(NODE) == "active"


def test_a_paused_publisher_leads_to_the_safe_action_and_automatic_recovery(hip: World) -> None:
    configure(hip, stale_ms=500, recovery="automatic", recovery_ms=100)
    robot = hip.robot()
    console = hip.console()
    hip.server()
    driver = hip.driver()
    poll_until(lambda: acts(console), driver.output)
    robot.process.send_signal(signal.SIGSTOP)
    wait_for_state(console, "inactive")
    wait_for_safe(console)
    robot.process.send_signal(signal.SIGCONT)
    wait_for_state(console, "active")
    poll_until(lambda: acts(console), driver.output)


def test_the_policy_state_says_that_the_robot_holds_its_last_action(hip: World) -> None:
    configure(hip, action_deadline_ms=60_000)  # long: the state is published only once per second
    hip.robot()
    console = hip.console()
    server = hip.server()
    hip.driver()
    moves(console)
    server.process.send_signal(signal.SIGSTOP)
    wait_for_policy_state(console, "no Action came in time: the robot holds its last action")
    newest = console.newest(f"{NODE}/policy_state")
    assert (newest["level"], newest["values"]["origin"], newest["values"]["weights_version"]) == (0, "held", "0")


def test_an_emergency_stop_by_service_holds_until_reset_and_activate(hip: World) -> None:
    hip.robot()
    console = hip.console()
    hip.server()
    driver = hip.driver()
    moves(console)
    operator = hip.operator()

    def stopped() -> bool:  # the server learns of the stop only if it answers the driver in time
        assert console.trigger(f"{NODE}/estop") == {"success": True, "message": "done"}
        return bool(operator.state().detail["stopped"] == ["robot"])

    poll_until(stopped, driver.output)
    console.take("/commands")
    wait_for_safe(console)
    assert operator.state(target="robot").detail["stopped"] is True
    wait_for_state(console, "inactive")
    assert console.change(NODE, "activate") is False
    wait_for_safe(console)
    assert console.trigger(f"{NODE}/reset") == {"success": True, "message": "done"}
    assert operator.state(target="robot").state == "inactive"
    assert console.state(NODE) == "inactive"
    assert console.change(NODE, "activate") is True
    poll_until(lambda: acts(console), lambda: str(console.newest(f"{NODE}/policy_state")))
    assert operator.state().detail["stopped"] == []


def test_an_emergency_stop_by_service_holds_without_a_policy_server(hip: World) -> None:
    """A person stops the robot after the death of the server. The stop still holds after another server starts."""
    hip.robot()
    console = hip.console()
    server = hip.server()
    driver = hip.driver(answer_s=2)
    moves(console)
    server.process.kill()
    server.process.wait()
    answer = console.trigger(f"{NODE}/estop")
    assert answer["success"]
    driver.wait_for("the policy server does not know of the emergency stop: no answer from policy server at ")
    wait_for_safe(console)
    assert console.trigger(f"{NODE}/reset")["success"] is False
    hip.server()
    poll_until(lambda: hip.operator().state().detail.get("robots"), driver.output)
    console.change(NODE, "activate")
    wait_for_safe(console)
    assert console.trigger(f"{NODE}/reset")["success"] is True
    moves(console)


def test_lifecycle_transitions_of_ros_reach_the_driver(hip: World) -> None:
    hip.robot()
    console = hip.console()
    hip.server()
    driver = hip.driver("--set", "policy.autostart=false")
    operator = hip.operator()
    topic = f"{NODE}/policy_state"
    poll_until(lambda: (console.newest(topic) or {}).get("level") == 1, driver.output)  # WARN
    assert console.state(NODE) == "unconfigured"
    assert operator.state(target="robot").state == "unconfigured"
    assert console.change(NODE, "configure") is True
    wait_for_state(console, "inactive")
    assert operator.state(target="robot").state == "inactive"
    assert console.change(NODE, "activate") is True
    wait_for_state(console, "active")
    assert operator.state(target="robot").state == "active"
    poll_until(lambda: acts(console), driver.output)
    assert console.change(NODE, "deactivate") is True
    wait_for_state(console, "inactive")
    assert operator.state(target="robot").state == "inactive"
    wait_for_safe(console)
    assert console.change(NODE, "cleanup") is False
    assert console.state(NODE) == "inactive"
    assert console.change(NODE, "shutdown") is True
    assert driver.finish() == 0
    assert "cleanup fails: a driver keeps its configuration" in driver.output()


def test_the_lifecycle_of_the_driver_reaches_ros(hip: World) -> None:
    hip.robot()
    console = hip.console()
    hip.server()
    driver = hip.driver()
    operator = hip.operator()
    moves(console)
    operator.deactivate(target="robot")
    wait_for_state(console, "inactive")
    operator.activate(target="robot")
    wait_for_state(console, "active")
    operator.estop(target="robot")
    wait_for_state(console, "inactive")
    wait_for_policy_state(console, "fault: emergency stop")
    assert console.newest(f"{NODE}/policy_state")["values"]["origin"] == "safe"
    operator.reset(target="robot")
    operator.activate(target="robot")
    wait_for_state(console, "active")
    figures = {"age of joint_states (s)", "transitions", "lag_max_s"}

    def reports_figures() -> bool:  # before the first period, a report has no figures
        newest = console.newest("/diagnostics") or []
        return any(it["name"] == f"{NODE}: data" and figures <= set(it["values"]) for it in newest)

    poll_until(reports_figures, lambda: str(console.newest("/diagnostics")))
    operator.shutdown(target="robot")
    assert driver.finish() == 0


def test_a_shutdown_by_ros_ends_the_driver_without_a_policy_server(hip: World) -> None:
    hip.robot()
    console = hip.console()
    driver = hip.driver()
    poll_until(lambda: all_zero(console), driver.output)  # without a server, the driver sends only the safe action
    assert console.change(NODE, "configure") is False
    assert console.change(NODE, "shutdown") is True
    assert driver.finish() == 128 + signal.SIGTERM
    assert console.newest("/commands") == [0.0]


def test_two_robots_work_in_two_namespaces(hip: World) -> None:
    """The drivers share a policy server. The driver named ``right`` reads a remapped topic, and sends trajectories."""
    right = {
        **HIP_SECTION,
        "actions": [{"channel": "acceleration", "joint": "hip"}],
        "command": {"type": "trajectory", "topic": "joint_trajectory", "field": "effort", "reach_ms": 40},
    }
    hip.configure("right.yaml", safety=SAFETY, ros2=right)
    hip.robot("--still", "--ros-args", "-r", "__ns:=/left")
    hip.robot("--still", "--ros-args", "-r", "__ns:=/elsewhere")
    console = hip.console("/left", "/right")
    hip.server()
    hip.driver("--name", "left", "--ros-args", "-r", "__ns:=/left")
    remap = ("-r", "__ns:=/right", "-r", "joint_states:=/elsewhere/joint_states")
    hip.driver("--name", "right", "--ros-args", *remap, file="right.yaml")
    moves(console, "/left/commands", f"/left/{DRIVER}")
    moves(console, "/right/joint_trajectory", f"/right/{DRIVER}")
    expected_nodes = {f"/{side}/{DRIVER}{part}" for side in ("left", "right") for part in ("", "_sensors")}
    poll_until(lambda: expected_nodes <= set(console.nodes()), lambda: str(console.nodes()))
    action = math.tanh(-2 * 0.5)  # the policy's gain is -2, and the hip stands still at 0.5 rad
    expected = {"joints": ["hip"], "positions": [], "velocities": [], "effort": [pytest.approx(action)], "reach": 0.04}
    topic, safe = "/right/joint_trajectory", {**expected, "effort": [0.0]}
    expect_commands(console, topic, expected, safe, count=1)
    assert console.trigger(f"/left/{DRIVER}/estop")["success"]
    console.take("/left/commands")
    wait_for_safe(console, "/left/commands")
    wait_for_state(console, "inactive", f"/left/{DRIVER}")
    expect_commands(console, topic, expected, safe=None, count=21)
    assert console.state(f"/right/{DRIVER}") == "active"


@pytest.mark.parametrize(
    ("words", "read", "written"),
    [
        ([], "best_effort", "reliable"),
        (
            ["--set", "ros2.qos_in.reliability=reliable", "--set", "ros2.qos_out.reliability=best_effort"],
            "reliable",
            "best_effort",
        ),
    ],
)
def test_the_configuration_sets_the_reliability(hip: World, words: list[str], read: str, written: str) -> None:
    console = hip.console()
    driver = hip.driver(*words)
    for topic, node, reliability in (("/joint_states", f"{DRIVER}_sensors", read), ("/commands", DRIVER, written)):
        poll_until(lambda topic=topic, node=node: console.reliability(topic, node), driver.output)
        assert console.reliability(topic, node) == [reliability]


def test_ros_parameters_replace_the_endpoint_and_supply_the_bundle(hip: World) -> None:
    section = {"stale_ms": STALE_MS, "observations": HIP_SOURCES}
    hip.configure("other.yaml", endpoints={"policy": "ipc:///nowhere/policy"}, safety=SAFETY, ros2=section)
    hip.robot()
    console = hip.console()
    hip.server()
    endpoint = f"endpoints.policy:=ipc://{hip.folder / 'policy.sock'}"
    hip.driver("--ros-args", "-p", "ros2.bundle:=policy.safetensors", "-p", endpoint, file="other.yaml")
    moves(console)


def test_an_unknown_ros_parameter_gives_a_warning(hip: World) -> None:
    words = ("ros2.stale_ms:=5", "use_sim_time:=false", "qos_overrides./commands.publisher.depth:=3")
    driver = hip.driver("--ros-args", *(item for word in words for item in ("-p", word)))
    driver.wait_for("waits for data")
    warnings = [line for line in driver.lines if "ROS parameter" in line]
    known = "endpoints.policy, endpoints.learner, endpoints.recorder, endpoints.monitor, endpoints.keys, ros2.bundle"
    assert warnings == [f"the ROS parameter ros2.stale_ms has no effect; known parameters: {known}"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--ros-args", "-p", "use_sim_time:=true"],
            "td3-robot ros2: use_sim_time is true; allowed: false, because deadlines need the monotonic clock",
        ),
        (["--ros-args", "-r", "x"], "td3-robot ros2: ROS arguments --ros-args -r x: "),
        (
            ["--set", "ros2.bundle=null"],
            "robot: ros2.bundle is not set; allowed: a policy file, a run folder or a",
        ),
        (
            ["--ros-args", "-p", "ros2.bundle:=3"],
            "td3-robot ros2: the ROS parameter ros2.bundle is 3; allowed: text, for example -p 'ros2.bundle:=\"3\"'",
        ),
        (
            ["--set", "ros2.command.topic=a b"],
            "robot: ros2.command.topic is 'a b': topic name must not contain characters other than alphanumerics, ",
        ),
        (
            ["--set", "ros2.observations=[{channel: angle, joint: hip, topic: 1a}, {channel: velocity, joint: hip}]"],
            "robot: ros2.observations of 'angle': the topic is '1a': topic name token must not start with a number; "
            "allowed: the name of a ROS topic, for example leg/joint_states",
        ),
        (["--set", "ros2.bundle=ant"], "robot: ros2.observations: robot 'Ant' has no observation 'velocity'; "),
    ],
)
def test_a_mistake_is_an_error_of_one_line(hip: World, words: list[str], line: str) -> None:
    driver = hip.driver(*words)
    assert driver.finish() == 2
    [error] = [text for text in driver.lines if "[rcl]" not in text]  # ROS itself also logs an error
    assert error.startswith(line)


@pytest.mark.slow
def test_the_benchmark_measures_the_echo_node_and_the_driver(world: World) -> None:
    words = ("benchmarks/ros2_latency.py", "--json", "--seconds", "10", "--rates", "100")
    done = subprocess.run(
        [world.python, *words], cwd=ROOT, env=world.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [rows] = json.loads(done.stdout)["rates"].values()
    assert rows.keys() == {"echo", "driver"}
    assert all(0 < row["p50"] <= row["p99"] and row["answers"] > 0 for row in rows.values())


@pytest.mark.skipif(importlib.util.find_spec("rclpy") is not None, reason="this Python has rclpy")
def test_without_rclpy_the_error_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ros2", "driver", "--config", str(tmp_path / "robot.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("td3-robot ros2: needs rclpy, which is not installed; source the setup file of your ROS 2")
    assert error.count("\n") == 1
