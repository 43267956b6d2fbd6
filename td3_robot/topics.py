"""The table of all topics: message, publisher, subscriber, rate, queue rule, and recording.

Each link connects clients (ZeroMQ DEALER) to one server (ROUTER).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from td3_robot import messages
from td3_robot.messages import Message

Recorded = Literal["sent", "taken", "no"]
QueueRule = Literal["never drop", "keep latest", "never wait", "handshake"]


@dataclass(frozen=True)
class Topic:
    """One row of the table.

    Attributes:
        publisher, subscriber: the roles of the two ends. A source is a simulator or a driver.
        link: the name of the server whose endpoint carries the topic: policy, learner, supervisor, recorder, monitor,
            or any.
        rate: how often the publisher sends the message. The rate is text, because most rates depend on the
            configuration.
        queue: what happens when the queue is full. *never drop*: the sender waits. Only a sender that must not wait
            drops the message, and counts it. *keep latest*: the receiver empties its queue and uses the newest message
            of each sender. It counts the older messages, except Throttles and repeated Actions. In lock-step, the
            policy server uses all Weights. *never wait*: the sender drops the message, and counts it if it was for a
            recorder. *handshake*: the rules of the handshake apply.
        recorded: which side copies the message to a recorder. *sent*: the publisher makes one copy, even if the message
            has several subscribers. *taken*: the subscriber copies it, because the publisher has no recorder. *no*: no
            side copies it.
    """

    message: type[Message]
    publisher: str
    subscriber: str
    link: str
    rate: str
    queue: QueueRule
    recorded: Recorded


RECORDER = "recorder"
"""The link to the recorder.

Monitors also get the messages that a node sends on this link, except Turns. No other peer gets these messages.
"""
MONITOR = "monitor"
"""The link to a monitor. A monitor gets the same messages as the recorder, except Turns."""
LISTENERS = (RECORDER, MONITOR)
"""The links that get copies of the messages of every node. No node waits for a recorder or a monitor."""
LINKS = ("policy", "learner", "supervisor", *LISTENERS)
"""The links of a run, named after their servers."""

QUEUE_LENGTH = 1000
"""The maximum number of messages that each end of a connection queues in each direction (ZeroMQ's high-water mark)."""

TOPICS: tuple[Topic, ...] = (
    Topic(messages.Hello, "client", "server", "any", "at connect, and when asked", "handshake", "sent"),
    Topic(messages.Welcome, "server", "client", "any", "once for each Hello", "handshake", "sent"),
    Topic(messages.Refused, "server", "client", "any", "once for each refused message", "handshake", "sent"),
    Topic(messages.Heartbeat, "client, server", "server, client", "any", "1 Hz when idle", "handshake", "no"),
    Topic(messages.Bye, "client", "server", "any", "once", "handshake", "sent"),
    Topic(messages.Step, "source", "policy server", "policy", "control rate", "keep latest", "sent"),
    Topic(messages.Step, "source", "learner", "learner", "control rate", "never drop", "sent"),
    Topic(messages.Action, "policy server", "source", "policy", "one for each Step", "keep latest", "sent"),
    Topic(messages.Throttle, "learner", "source", "learner", "as the replay ratio allows", "keep latest", "sent"),
    Topic(messages.SimulatorState, "simulator", "learner", "learner", "when asked for", "never drop", "sent"),
    Topic(
        messages.SimulatorState,
        "learner",
        "simulator",
        "learner",
        "when the run returns to a checkpoint",
        "never drop",
        "sent",
    ),
    Topic(
        messages.Weights,
        "learner",
        "policy server",
        "learner",
        "every learner.publish_every updates",
        "keep latest",
        "sent",
    ),
    Topic(messages.Weights, "learner", "evaluator", "learner", "every evaluation.every steps", "never drop", "sent"),
    Topic(messages.Evaluation, "evaluator", "learner", "learner", "once for each Weights", "never drop", "sent"),
    Topic(messages.Status, "every node", "supervisor", "supervisor", "2 Hz", "never drop", "sent"),
    Topic(messages.Command, "operator", "policy server", "policy", "when a person acts", "never drop", "taken"),
    Topic(messages.Teleop, "operator", "policy server", "policy", "while an operator drives", "never drop", "taken"),
    Topic(messages.Command, "policy server", "source", "policy", "when relayed", "never drop", "sent"),
    Topic(messages.Command, "driver", "policy server", "policy", "at an emergency stop", "never drop", "sent"),
    Topic(messages.Reply, "policy server", "operator", "policy", "one for each Command", "never drop", "sent"),
    Topic(messages.Reply, "source", "policy server", "policy", "one for each Command", "never drop", "sent"),
    Topic(messages.LifecycleChange, "policy server", "operator", "policy", "at every change", "never drop", "sent"),
    Topic(messages.LifecycleChange, "source", "policy server", "policy", "at every change", "never drop", "sent"),
    Topic(messages.Start, "source, policy server, learner", "recorder", "recorder", "once", "never wait", "sent"),
    Topic(
        messages.Turn,
        "source, policy server, learner",
        "recorder",
        "recorder",
        "once for each turn",
        "never wait",
        "sent",
    ),
    Topic(messages.RobotReport, "driver", "recorder", "recorder", "at every change", "never wait", "sent"),
    Topic(messages.MotorCommand, "driver", "recorder", "recorder", "once or twice for each Step", "never wait", "sent"),
    Topic(messages.Latches, "policy server", "recorder", "recorder", "at every change", "never wait", "sent"),
    Topic(messages.Record, "every node", "recorder", "recorder", "once for each message", "never wait", "no"),
    Topic(messages.Record, "every node", "monitor", "monitor", "once for each message", "never wait", "no"),
)
