"""A complete driver for one robot in one file, with pyzmq and msgpack only. It imports nothing from td3_robot.

It follows docs/reference/protocol.md; "section 3" below means the section of that page. Start here for a driver in
another language. In Python, `td3_robot.driver` does the same and more; see docs/how-to/write_a_driver.md.

    pip install pyzmq msgpack
    td3-robot policy --bundle policy.safetensors --config robot.yaml
    python examples/minimal_driver.py ipc:///run/leg/policy --name leg --autostart
"""

from __future__ import annotations

import argparse
import math
import secrets
import signal
import struct
import sys
import time

import msgpack
import zmq

# From the table of constants in section 1.
PROTOCOL_VERSION, HELLO_PERIOD, HEARTBEAT_PERIOD, LONG_SILENCE = 1, 0.25, 1.0, 4.0
QUEUE_LENGTH, MAX_FRAME = 1000, 67110912
FIRST, MID = 0, 1  # phases
NONE, ACTION, HELD, SAFE = 0, 1, 2, 4  # origins of an applied action

MALFORMED = (ValueError, KeyError, IndexError, TypeError, struct.error, msgpack.UnpackException)
"""Errors of a malformed message. The driver drops and counts such messages."""

PERIOD = 0.02  # seconds
SAFE_TORQUE, LOW, HIGH = 0.0, -1.0, 1.0  # N·m
SPEC = {
    "name": "Pendulum",
    "observations": [
        {"name": "angle.sin", "unit": "1", "low": -1.0, "high": 1.0},
        {"name": "angle.cos", "unit": "1", "low": -1.0, "high": 1.0},
        {"name": "velocity", "unit": "rad/s", "low": -30.0, "high": 30.0},
    ],
    "actions": [{"name": "torque", "unit": "N·m", "low": LOW, "high": HIGH}],
    "control_period": PERIOD,
}
COMMANDS: dict[str, dict[str, str]] = {  # for each verb except estop and reset: state before -> after
    "configure": {"unconfigured": "inactive", "inactive": "inactive"},
    "activate": {"inactive": "active", "fault": "active", "active": "active"},
    "deactivate": {"active": "inactive", "fault": "inactive", "inactive": "inactive"},
    "shutdown": dict.fromkeys(("unconfigured", "inactive", "active", "fault"), "finalized"),
    "state": {},
}


class Pendulum:
    """The robot: replace this class. A simulated pendulum of 0.5 kg at 0.4 m, which hangs down at angle 0."""

    def __init__(self) -> None:
        self.angle, self.velocity, self.torque, self.now = 0.3, 0.0, SAFE_TORQUE, time.monotonic()

    def observe(self) -> list[float]:
        self.advance()
        return [math.sin(self.angle), math.cos(self.angle), max(-30.0, min(30.0, self.velocity))]

    def apply(self, torque: float) -> None:
        self.advance()
        self.torque = torque

    def reward(self, observation: list[float], torque: float) -> float:
        return -observation[1] - 0.01 * torque**2

    def advance(self) -> None:
        """Simulate the physics up to now. A real robot needs no such method."""
        self.now = max(self.now, time.monotonic() - 1)  # after a pause, simulate one second at most
        while time.monotonic() - self.now >= 0.001:
            self.velocity += 0.001 * (-9.81 / 0.4 * math.sin(self.angle) + self.torque / 0.08 - 0.5 * self.velocity)
            self.angle += 0.001 * self.velocity
            self.now += 0.001


class Link:
    """The link to a policy server: handshake and heartbeats, sections 1 to 3."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self.socket.setsockopt(option, QUEUE_LENGTH)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.TCP_MAXRT, 5000)  # ms without an answer until the kernel ends a TCP connection
        self.socket.connect(endpoint)
        self.hello = {
            "protocol": PROTOCOL_VERSION,
            "role": "driver",
            "name": name,
            "incarnation": time.time_ns() // 1_000_000,  # grows with each start
            "client": secrets.randbits(63),
            "robots": 1,
            "weights_version": 0,
            "spec": SPEC,
            "agreement": {},
        }
        self.welcome = False  # True if the server knows this client
        self.may_move = False  # True if no other driver of this name can be alive
        self.session = 0
        self.sent_at = self.received_at = self.asked_at = -math.inf
        self.unsent = self.malformed = 0

    def send(self, topic: str, message: dict) -> None:
        try:
            self.socket.send_multipart([topic.encode(), msgpack.packb(message)], zmq.DONTWAIT)
            self.sent_at = time.monotonic()
        except zmq.Again:  # the queue is full
            self.unsent += 1

    def keep_alive(self) -> None:
        """Send Hello or Heartbeat if one is due."""
        now = time.monotonic()
        if self.welcome and now - self.sent_at > LONG_SILENCE:
            self.welcome = False  # this process was suspended, and the server may have removed this client
        silent = now - self.received_at > HEARTBEAT_PERIOD or now - self.sent_at > HEARTBEAT_PERIOD
        if now - self.asked_at < HELLO_PERIOD or (self.welcome and not silent):
            return
        self.asked_at = now
        if self.welcome:
            self.send("heartbeat", {"stamp": time.monotonic_ns(), "session": self.session})
        else:
            self.send("hello", self.hello)

    def receive(self, seconds: float) -> list[tuple[str, dict]]:
        """Wait up to ``seconds``, and return the messages for the robot.

        This method handles Welcome, Refused and Heartbeat itself. It also returns a Welcome from a new server, because
        the new server does not know the robot's newest Step.
        """
        self.keep_alive()
        messages = []
        wait = min(max(seconds, 0.0), HELLO_PERIOD)
        while self.socket.poll(math.ceil(wait * 1000)):
            wait = 0.0
            frames = self.socket.recv_multipart()
            try:
                topic, message = frames[0].decode(), msgpack.unpackb(frames[1])
                if len(frames) == 2 and self.take(topic, message):
                    messages.append((topic, message))
            except MALFORMED:
                self.malformed += 1
        return messages

    def take(self, topic: str, message: dict) -> bool:
        """Handle the message if it belongs to the handshake. Return whether the driver must also handle the message."""
        self.received_at = time.monotonic()
        if topic == "welcome":
            if message["protocol"] != PROTOCOL_VERSION:
                raise SystemExit(f"the server has protocol version {message['protocol']}")
            is_new = message["session"] != self.session
            self.session, self.welcome, self.may_move = message["session"], True, True
            return is_new
        if topic == "refused":
            if message["code"] != "hello":
                raise RefusedError(message["code"], message["reason"])
            if self.welcome:
                self.asked_at = -math.inf  # send Hello at once, and then every HELLO_PERIOD
            self.welcome = False
            return False
        if topic == "heartbeat":
            if not self.welcome:  # in answer to Hello: another driver of this name is possibly alive
                self.may_move = False
            return False
        return self.welcome

    def close(self, reason: str) -> None:
        if self.welcome:
            self.send("bye", {"reason": reason})
        self.socket.close(linger=200)


class RefusedError(Exception):
    """The server refuses this driver permanently."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"refused ({code}): {reason}")
        self.code = code


class Driver:
    """One robot in real time: sections 5 and 8."""

    def __init__(self, link: Link, robot: Pendulum, autostart: bool, action_deadline: float) -> None:
        self.link, self.robot, self.action_deadline = link, robot, action_deadline
        self.name, self.incarnation = link.hello["name"], link.hello["incarnation"]
        self.state = "active" if autostart else "inactive"
        self.stopped = False  # True during an emergency stop: only `reset` ends it
        self.answered_at: float | None = None  # time of the newest Action applied in this state; None if there is none
        self.sequence = -1
        self.step: dict = {}
        self.choose_fallback()
        self.end = ""

    def run(self) -> None:
        signal.signal(signal.SIGINT, self.stop_process)
        signal.signal(signal.SIGTERM, self.stop_process)
        deadline = time.monotonic()
        while not self.end:
            for topic, message in self.link.receive(deadline - time.monotonic()):
                try:
                    self.take(topic, message)
                except MALFORMED:
                    self.link.malformed += 1
            now = time.monotonic()
            if self.link.session:  # a server has welcomed this driver
                self.watch(now)
            if now < deadline:
                continue
            deadline += PERIOD * max(1, math.ceil((now - deadline) / PERIOD))  # skip the periods that have passed
            if self.link.session and self.link.may_move:
                self.control()

    def stop_process(self, number: int, *_: object) -> None:
        self.end = f"signal {number}"

    def control(self) -> None:
        """Observe, publish the next Step, and apply a fallback until the Action for this Step comes."""
        observation = self.robot.observe()
        if not all(map(math.isfinite, observation)):
            self.change("fault", f"the observation is {observation}")
            self.choose_fallback()
            self.robot.apply(self.torque)
            return
        first = self.sequence < 0
        self.sequence += 1
        reward = 0.0 if first else self.robot.reward(observation, self.torque)
        self.step = {
            "source": self.name,
            "incarnation": self.incarnation,
            "sequence": self.sequence,
            "transitions": self.sequence,
            "stamp": time.monotonic_ns(),
            "phase": struct.pack("<B", FIRST if first else MID),
            "episode": struct.pack("<Q", 0),
            "episode_step": struct.pack("<I", self.sequence),
            "observation": struct.pack("<3f", *observation),
            "reward": struct.pack("<f", reward),
            "action": struct.pack("<f", self.torque),
            "origin": NONE if first else self.origin,
            "answered": self.sequence,
            "weights_version": 0,
            "noise_kind": 0,
            "noise_seed": 0,
            "needs_version": 0,
            "world": {},
        }
        if not first:
            self.step.update(self.applied)
        self.link.send("step", self.step)
        self.choose_fallback()
        self.robot.apply(self.torque)

    def choose_fallback(self) -> None:
        """Choose the action to apply until an Action comes: the last action again, or the safe action."""
        held = self.state == "active" and self.answered_at is not None
        self.torque, self.origin = (self.torque, HELD) if held else (SAFE_TORQUE, SAFE)
        self.applied: dict = {}  # fields of the next Step that describe the applied Action

    def take(self, topic: str, message: dict) -> None:
        """Handle a message of the server."""
        if topic == "action":
            self.take_action(message)
        elif topic == "command":
            self.take_command(message)
        elif topic == "welcome" and self.step and not self.applied:
            self.link.send("step", self.step)  # the new server does not know the Step that waits for an Action

    def take_action(self, message: dict) -> None:
        """Apply the Action for the newest Step at once if the state is active. Ignore every other Action."""
        newest = (message["incarnation"], message["answers"]) == (self.incarnation, self.sequence)
        (torque,) = struct.unpack("<f", message["action"])
        if not newest or self.state != "active" or not self.link.may_move or not math.isfinite(torque):
            return
        self.answered_at = time.monotonic()
        self.torque = max(LOW, min(HIGH, torque))
        # Version 0 means the server's safe action or an operator's action. This example reports both as SAFE.
        is_policy = message["weights_version"] > 0
        self.origin = ACTION if is_policy else SAFE
        names = ("weights_version", "noise_kind", "noise_seed")
        self.applied = {name: message[name] for name in names} | {"answered": self.sequence} if is_policy else {}
        self.robot.apply(self.torque)

    def watch(self, now: float) -> None:
        """Go to fault if no Action has come for too long."""
        if self.state == "active" and self.answered_at is not None and now - self.answered_at > self.action_deadline:
            self.change("fault", f"no Action for {self.action_deadline:g} s")

    def take_command(self, message: dict) -> None:
        verb, reason, error = message["verb"], message["reason"], ""
        if verb == "estop":
            self.stopped = True
            self.change("fault", f"emergency stop: {reason}")
        elif verb == "reset":
            self.stopped = False
            self.change("inactive" if self.state == "fault" else self.state, "reset")
        elif verb not in COMMANDS:
            error = f"no verb {verb[:40]!r}; allowed: estop, reset, {', '.join(COMMANDS)}"
        elif verb != "state" and (self.state not in COMMANDS[verb] or (self.stopped and verb != "shutdown")):
            error = f"{verb} from {self.state}" + (" during an emergency stop" if self.stopped else "")
        elif verb != "state":
            self.change(COMMANDS[verb][self.state], f"{verb} {reason}")
            if verb == "shutdown":
                self.end = "shutdown"
        detail = {"stopped": self.stopped}
        reply = {"id": message["id"], "node": self.name, "error": error, "state": self.state, "detail": detail}
        self.link.send("reply", reply)

    def change(self, state: str, reason: str) -> None:
        """Change the state, tell the server, and apply the safe action."""
        if state == self.state:
            return
        change = {"node": self.name, "previous": self.state, "state": state, "reason": reason[:2048]}
        self.link.send("lifecycle", {**change, "stamp": time.monotonic_ns()})
        print(f"{self.state} -> {state}: {reason}", flush=True)
        self.state = state
        self.answered_at = None
        if self.link.may_move:
            self.choose_fallback()
            self.robot.apply(self.torque)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drive a simulated pendulum with a policy server.")
    parser.add_argument("endpoint", help="ipc://PATH or tcp://127.0.0.1:PORT of the policy server")
    parser.add_argument("--name", default="leg", help="unique name of the robot (default: %(default)s)")
    parser.add_argument(
        "--autostart", action="store_true", help="start in the state active, without an operator's command"
    )
    parser.add_argument(
        "--action-deadline",
        type=float,
        default=0.1,
        metavar="S",
        help="seconds without an Action before fault (default: 0.1)",
    )
    options = parser.parse_args()
    robot = Pendulum()
    link = Link(options.endpoint, options.name)
    driver = Driver(link, robot, options.autostart, options.action_deadline)
    try:
        driver.run()
    except RefusedError as error:
        print(error, file=sys.stderr, flush=True)
        link.may_move = error.code != "name"  # code "name": another driver moves the robot
        driver.end = str(error)
    finally:
        if link.may_move:
            robot.apply(SAFE_TORQUE)  # the driver ends with the safe action, also after an error
        link.close(driver.end or "an error")
    return 2 if driver.end.startswith("refused") else 0


if __name__ == "__main__":
    sys.exit(main())
