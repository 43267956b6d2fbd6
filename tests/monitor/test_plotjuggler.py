"""The tests read the frames for PlotJuggler with a plain ZeroMQ subscriber and plain msgpack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from td3_robot.errors import EndpointError
from td3_robot.messages import Action, Evaluation, LifecycleChange, Status, Throttle, Turn, Weights
from td3_robot.monitor.plotjuggler import PlotJuggler, frames
from tests.sessions import BEGIN, entries_of

Make = Callable[..., Any]
NAMES = {"O": ["height", "knee.position", "knee.velocity"], "A": ["left", "right"]}  # O: observations, A: actions


def shown(publisher: str, message: Any) -> dict[str, Any]:
    """Return the plotted values of each topic."""
    (entry,) = entries_of([(publisher, message)])
    made = list(frames(entry, message, NAMES))
    assert {time for _, _, time in made} <= {b"1700000000.000001"}  # BEGIN plus 1 µs: the receive time
    assert BEGIN == 1_700_000_000 * 10**9
    return {topic.decode(): msgpack.unpackb(payload) for topic, payload, _ in made}


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def test_the_plotted_values_of_a_step_of_one_robot(make_step: Make) -> None:
    step = make_step(3, observation=np.array([[1.5, 2, 3]], "f4"), action=np.array([[0.25, -0.5]], "f4"))
    plotted = shown("sim-0", step)["sim-0/step"]
    assert plotted["observation"] == {"height": 1.5, "knee.position": 2.0, "knee.velocity": 3.0}
    assert plotted["action"] == {"left": 0.25, "right": -0.5}
    assert (plotted["phase"], plotted["reward"], plotted["sequence"]) == (1, 0.0, 3)
    assert all(type(value) in (int, float, bool) for value in leaves(plotted))
    assert "source" not in plotted  # text cannot be plotted


def test_robots_and_sources_have_separate_topics(make_step: Make) -> None:
    step = make_step(0, 2, reward=np.array([1, 2], "f4"), world={"1": {"mass": 2.5}})
    plotted = shown("sim-0", step)
    assert {topic: values["reward"] for topic, values in plotted.items()} == {"sim-0/step/0": 1.0, "sim-0/step/1": 2.0}
    assert plotted["sim-0/step/0"]["world"] == {"1": {"mass": 2.5}}
    action = Action("sim-1", 0, 0, 0, np.array([[1, 2]], "f4"), 3, 0, 0)
    assert shown("policy", action)["policy/action/sim-1"]["action"] == {"left": 1.0, "right": 2.0}
    assert shown("learner", Throttle("sim-1", 0, 5, 2**63, 0, 0))["learner/throttle/sim-1"]["answers"] == 5


def test_the_plotted_values_of_other_messages() -> None:
    status = Status("learner", "ready", "", {"env_steps": 7.0}, {"gaps": 1})
    assert shown("learner", status) == {"learner/status": {"figures": {"env_steps": 7.0}, "counters": {"gaps": 1}}}
    evaluation = Evaluation(4, 10, 20, np.array([1.5, 2.5]), np.array([5, 6], np.uint32))
    assert shown("evaluator", evaluation)["evaluator/evaluation"]["returns"] == [1.5, 2.5]
    assert shown("learner", Weights(2, 0, 0, "", b"12345"))["learner/weights"]["payload"] == 5
    assert shown("policy", Turn(1.5, [["#sim-0", "step", {"named": ["sim-0", 0, 1]}]])) == {"policy/turn": {"now": 1.5}}
    assert list(shown("sim-0", LifecycleChange("sim-0", "a", "b", "", 5))["sim-0/lifecycle"]) == ["stamp"]


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_subscriber_receives_frames_and_a_full_queue_does_not_block_publishing(
    kind: str, make_step: Make, tmp_path: Path
) -> None:
    stream = PlotJuggler(f"ipc://{tmp_path}/pj" if kind == "ipc" else "tcp://127.0.0.1:*")
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.connect(stream.endpoint)
        subscriber.subscribe("")
        step = make_step(1)
        (entry,) = entries_of([("sim-0", step)])
        while not subscriber.poll(20):  # the subscription needs some time to arrive
            stream.publish(entry, step, NAMES)
        topic, payload, time = subscriber.recv_multipart()
        assert topic == b"sim-0/step"
        assert msgpack.unpackb(payload)["observation"]["height"] == 1.0
        assert float(time) == pytest.approx(BEGIN * 1e-9, abs=1e-3)
        for _ in range(5000):  # more than a queue holds
            stream.publish(entry, step, NAMES)
    finally:
        subscriber.close(linger=0)
        context.term()
        stream.close()
    assert not (tmp_path / "pj").exists()


LEAVING = """
import zmq
from td3_robot.monitor.plotjuggler import PlotJuggler

frames = [b"sim-0/step", bytes(200), b"1700000000.000001"]
for _ in range(300):
    stream = PlotJuggler("tcp://127.0.0.1:*")
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(stream.endpoint)
    subscriber.subscribe("")
    while not subscriber.poll(2):
        stream._socket.send_multipart(frames)
    for _ in range(3000):  # more than a queue holds
        stream._socket.send_multipart(frames)
    subscriber.close(linger=0)
    context.term()
    stream.close()
"""


@pytest.mark.slow
def test_a_subscriber_that_leaves_a_closing_socket_does_not_abort_the_process() -> None:
    """Six programs at once keep the processor cores busy. Then the fault is more frequent."""
    programs = [subprocess.Popen([sys.executable, "-c", LEAVING], stderr=subprocess.PIPE) for _ in range(6)]
    assert [program.communicate()[1] for program in programs] == [b""] * 6
    assert [program.returncode for program in programs] == [0] * 6


def test_other_machines_can_subscribe_only_if_allowed(tmp_path: Path) -> None:
    for endpoint, words in (
        ("tcp://0.0.0.0:9872", "every machine in the network can read endpoint"),
        ("tcp://*:9872", "every machine in the network can read endpoint"),
        ("tcp://127.0.0.1", "is not understood"),
        ("udp://127.0.0.1:9872", "is not understood"),
        ("ipc:///no/such/folder/x", "does not exist"),
    ):
        with pytest.raises(EndpointError, match=words):
            PlotJuggler(endpoint)
    PlotJuggler("tcp://0.0.0.0:*", anywhere=True).close()
    first = PlotJuggler(f"ipc://{tmp_path}/pj")
    with pytest.raises(EndpointError, match="busy"):
        PlotJuggler(f"ipc://{tmp_path}/pj")
    first.close()
