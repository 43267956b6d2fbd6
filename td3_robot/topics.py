"""Every topic, once: its message, who publishes it to whom, how often, what a full queue does, whether it is recorded.

Each link is a ZeroMQ DEALER (the client, which connects) to a ROUTER (the server, which binds). Nothing else is used:
one kind of link means one handshake, one set of limits and one place where malformed input is counted.
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
        link: the server whose endpoint carries it: policy, learner, supervisor, recorder, monitor, or any.
        rate: what to expect, in words, because most rates follow the configuration.
        queue: *never drop*: bounded, the sender waits where it may block, counts where it may not. *keep latest*:
            the receiver drains its queue, uses the newest and counts the rest. *never wait*: bounded, the sender drops
            what finds no room and counts it.
        recorded: who offers it to a recorder, the publisher (*sent*) or the subscriber (*taken*: publishers that are
            not recorded themselves), or nobody (*no*). What goes to several subscribers is offered once.
    """

    message: type[Message]
    publisher: str
    subscriber: str
    link: str
    rate: str
    queue: QueueRule
    recorded: Recorded


RECORDER = "recorder"
"""The link to whoever records. What a core sends there goes into the recording and nowhere else."""
MONITOR = "monitor"
"""The link to whoever watches. It is offered what the recorder is."""
LISTENERS = (RECORDER, MONITOR)
"""The links to those whom every node offers what it sends, and waits for none of them."""
LINKS = ("policy", "learner", "supervisor", *LISTENERS)
"""The servers of a run, each of which is the end of one link."""

QUEUE_LENGTH = 1000
"""Messages a link holds in each direction (ZeroMQ's high-water mark) before its queue rule applies."""

TOPICS: tuple[Topic, ...] = (
    Topic(messages.Hello, "client", "server", "any", "at connect, and when asked", "handshake", "sent"),
    Topic(messages.Welcome, "server", "client", "any", "once for each Hello", "handshake", "sent"),
    Topic(messages.Refused, "server", "client", "any", "once for each refused message", "handshake", "sent"),
    Topic(messages.Heartbeat, "client, server", "server, client", "any", "1 Hz when idle", "handshake", "no"),
    Topic(messages.Bye, "client", "server", "any", "once", "handshake", "sent"),
    Topic(messages.Step, "simulator", "policy server", "policy", "control rate", "keep latest", "sent"),
    Topic(messages.Step, "simulator", "learner", "learner", "control rate", "never drop", "sent"),
    Topic(messages.Action, "policy server", "simulator", "policy", "one for each Step", "keep latest", "sent"),
    Topic(messages.Throttle, "learner", "simulator", "learner", "as the ratio allows", "keep latest", "sent"),
    Topic(messages.SimulatorState, "simulator", "learner", "learner", "when asked for", "never drop", "sent"),
    Topic(messages.SimulatorState, "learner", "simulator", "learner", "to go back", "never drop", "sent"),
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
    Topic(messages.Command, "policy server", "driver", "policy", "when relayed", "never drop", "sent"),
    Topic(messages.Command, "driver", "policy server", "policy", "at an emergency stop", "never drop", "sent"),
    Topic(messages.Reply, "policy server", "operator", "policy", "one for each Command", "never drop", "sent"),
    Topic(messages.Reply, "driver", "policy server", "policy", "one for each Command", "never drop", "sent"),
    Topic(messages.LifecycleChange, "policy server", "operator", "policy", "at every change", "never drop", "sent"),
    Topic(messages.LifecycleChange, "driver", "policy server", "policy", "at every change", "never drop", "sent"),
    Topic(messages.Start, "every core's node", "recorder", "recorder", "once", "never wait", "sent"),
    Topic(messages.Turn, "every core's node", "recorder", "recorder", "once for each turn", "never wait", "sent"),
    Topic(messages.Heard, "driver", "recorder", "recorder", "at every change", "never wait", "sent"),
    Topic(messages.Told, "driver", "recorder", "recorder", "once or twice for each Step", "never wait", "sent"),
    Topic(messages.InForce, "policy server", "recorder", "recorder", "at every change", "never wait", "sent"),
    Topic(messages.Record, "every node", "recorder", "recorder", "once for each message", "never wait", "no"),
    Topic(messages.Record, "every node", "monitor", "monitor", "once for each message", "never wait", "no"),
)
