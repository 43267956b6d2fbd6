"""examples/minimal_driver.py with one fault, for the tests of the conformance kit.

python faulty_driver.py ENDPOINT FAULT
"""

from __future__ import annotations

import importlib.util
import secrets
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import zmq

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_driver.py"
Messages = list[tuple[str, dict[str, Any]]]
THROTTLE = {"source": "leg", "incarnation": 1, "answers": 0, "transitions_allowed": 1, "weights_version": 0, "save": 0}


def load() -> Any:
    spec = importlib.util.spec_from_file_location("minimal_driver", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(topic: str, **fields: Any) -> Callable[[Any], None]:
    """A fault: the driver sends wrong values in ``fields`` of a topic.

    Each item of ``fields`` is a wrong value, or a function that makes the wrong value from the right value.
    """

    def apply(example: Any) -> None:
        def outgoing(name: str, message: dict[str, Any]) -> Messages:
            if name == topic:
                message = {k: fields[k](v) if callable(fields.get(k)) else fields.get(k, v) for k, v in message.items()}
            return [(name, message)]

        send_through(example, outgoing)

    return apply


def dropped(topic: str) -> Callable[[Any], None]:
    """A fault: the driver sends no messages of this topic."""
    return lambda example: send_through(example, lambda name, message: [] if name == topic else [(name, message)])


def send_through(example: Any, outgoing: Callable[[str, dict[str, Any]], Messages]) -> None:
    send = example.Link.send

    def changed_send(link: Any, topic: str, message: dict[str, Any]) -> None:
        for name, content in outgoing(topic, message):
            send(link, name, content)

    example.Link.send = changed_send


def receive_through(example: Any, wanted: Callable[[str, dict[str, Any]], bool]) -> None:
    take = example.Link.take
    example.Link.take = lambda link, topic, message: wanted(topic, message) and take(link, topic, message)


def three_frames(example: Any) -> None:
    def send(link: Any, topic: str, message: dict[str, Any]) -> None:
        link.socket.send_multipart([topic.encode(), msgpack.packb(message), b""], zmq.DONTWAIT)

    example.Link.send = send


def hello_once(example: Any) -> None:
    sent: list[str] = []

    def outgoing(topic: str, message: dict[str, Any]) -> Messages:
        sent.append(topic)
        return [] if topic == "hello" and sent.count("hello") > 1 else [(topic, message)]

    send_through(example, outgoing)


def lacking_world(example: Any) -> None:
    def outgoing(topic: str, message: dict[str, Any]) -> Messages:
        return [(topic, {key: value for key, value in message.items() if key != "world"})]

    send_through(example, outgoing)


def also(extra: str, after: str, **fields: Any) -> Callable[[Any], None]:
    """A fault: after each message of the topic ``after``, the driver sends a message of the topic ``extra``."""

    def outgoing(topic: str, message: dict[str, Any]) -> Messages:
        return [(topic, message), *([(extra, fields)] if topic == after else [])]

    return lambda example: send_through(example, outgoing)


def replaces_large_actions_by_zero(example: Any) -> None:
    clip = example.Driver.take_action

    def changed_clip(driver: Any, message: dict[str, Any]) -> None:
        (torque,) = struct.unpack("<f", message["action"])
        clip(driver, message if abs(torque) <= example.HIGH else {**message, "action": bytes(4)})

    example.Driver.take_action = changed_clip


def slow(example: Any) -> None:
    example.PERIOD = 0.06


def obeys_activate_in_a_stop(example: Any) -> None:
    take = example.Driver.take_command

    def forgetful(driver: Any, message: dict[str, Any]) -> None:
        driver.stopped = driver.stopped and message["verb"] != "activate"
        take(driver, message)

    example.Driver.take_command = forgetful


def silent_unless_active(example: Any) -> None:
    control = example.Driver.control
    example.Driver.control = lambda driver: control(driver) if driver.state == "active" else None


def crashes_at_garbage(example: Any) -> None:
    example.MALFORMED = ()


def without_deadline(example: Any) -> None:
    example.Driver.watch = lambda *_: None


def ignoring(topic: str, wanted: Callable[[dict[str, Any]], bool] = lambda _: False) -> Callable[[Any], None]:
    """A fault: the driver ignores messages of this topic, except those for which ``wanted`` returns true."""
    return lambda example: receive_through(example, lambda name, message: name != topic or wanted(message))


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "three frames": ("frames", three_frames),
    "no world": ("form", lacking_world),
    "reply id as text": ("form", changed("reply", id=str)),
    "protocol 2": ("hello", changed("hello", protocol=2)),
    "no name": ("hello", changed("hello", name="")),
    "specification with only a name": ("hello", changed("hello", spec={"name": "Leg"})),
    "one hello": ("hello again", hello_once),
    "another client in each hello": ("hello again", changed("hello", client=lambda _: secrets.randbits(60))),
    "heartbeat before the welcome": ("wait", also("heartbeat", "hello", stamp=1, session=0)),
    "throttle": ("topics", also("throttle", "step", **THROTTLE)),
    "another source": ("identity", changed("step", source="other")),
    "sequence grows by two": ("sequence", changed("step", sequence=lambda number: 2 * number)),
    "no transitions": ("transitions", changed("step", transitions=0)),
    "no episode step": ("episodes", changed("step", episode_step=bytes(4))),
    "reward in a FIRST step": ("episodes", changed("step", reward=b"\0\0\x80\x3f")),
    "origin 7": ("origin", changed("step", origin=7)),
    "no version": ("answered", changed("step", weights_version=0)),
    "beyond the limits": ("action", changed("step", action=b"\0\0\x20\x41")),
    "zero in place of a large action": ("action", replaces_large_actions_by_zero),
    "ignores actions": ("answers", ignoring("action")),
    "refuses new fields": ("unknown field", ignoring("action", lambda message: "later" not in message)),
    "slow": ("pace", slow),
    "another reply id": ("reply", changed("reply", id=lambda number: number + 1)),
    "reply without stopped in its detail": ("reply", changed("reply", detail={})),
    "refusal without error text": ("refusal", changed("reply", error="")),
    "no lifecycle": ("lifecycle", dropped("lifecycle")),
    "lifecycle of another node": ("lifecycle", changed("lifecycle", node="policy")),
    "ends a stop": ("stop", obeys_activate_in_a_stop),
    "silent unless active": ("inactive", silent_unless_active),
    "crashes at garbage": ("garbage", crashes_at_garbage),
    "no deadline": ("deadline", without_deadline),
    "no heartbeat": ("heartbeat", dropped("heartbeat")),
    "ignores the message refused": ("rejoin", ignoring("refused")),
    "no bye": ("bye", dropped("bye")),
}
"""Maps the name of a fault to the check that must find it, and to a function that puts the fault into the example."""


if __name__ == "__main__":
    example = load()
    FAULTS[sys.argv[2]][1](example)
    sys.argv = [str(EXAMPLE), sys.argv[1], "--action-deadline", "5"]
    sys.exit(example.main())
