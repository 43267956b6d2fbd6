"""Tests updates in CUDA graphs. On the CPU, a stand-in replaces the capture, so the work runs without a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.engine import graph
from td3_robot.learner.engine.graph import CapturedUpdate, Work, difference
from td3_robot.learner.engine.td3 import FastTD3
from tests.learner.td3_cases import A, B, O, filled_buffer


class Recorder:
    """A stand-in for graphs that counts captures and launches."""

    def __init__(self) -> None:
        self.captures = self.launches = 0

    def __call__(self, work: Work) -> Work:
        self.captures += 1

        def launch() -> None:
            self.launches += 1
            work()

        return launch


def trained(
    config: LearnerConfig, device: torch.device, updates: int, *, captures: bool = False
) -> tuple[FastTD3, CapturedUpdate | None]:
    """An engine that has made ``updates`` updates with a falling learning rate."""
    td3, replay = FastTD3(O, A, (24, 16), config, 3, device), filled_buffer(device)
    captured = CapturedUpdate(td3) if captures else None
    for number in range(updates):
        td3.set_learning_rate(1e-3 / (1 + number))
        (captured or td3.learn)(replay.sample(B))
    return td3, captured


def alike(one: FastTD3, other: FastTD3, device: torch.device) -> bool:
    assert one.state()[1] == other.state()[1]
    pairs = [(array, other.state()[0][name]) for name, array in one.state()[0].items()]
    if device.type == "cpu":
        return all(a.tobytes() == b.tobytes() for a, b in pairs)
    return all(np.allclose(a, b, rtol=1e-4, atol=2e-6) for a, b in pairs)


Replace = Callable[[Callable[[Work], Work]], None]


@pytest.fixture
def replace_capture(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """A function that replaces the capture of graphs. A real capture needs a GPU."""

    def replace(capture: Callable[[Work], Work]) -> None:
        monkeypatch.setattr(graph, "aside", lambda work: work())
        monkeypatch.setattr(graph, "capture", capture)

    return replace


@pytest.mark.parametrize(
    "config",
    [
        LearnerConfig(),
        LearnerConfig(policy_delay=3, layer_norm=True),
        LearnerConfig(policy_delay=1),
        LearnerConfig(policy_average=0.5),
        LearnerConfig(critics_first=6),
    ],
    ids=["as published", "layer norm", "no delay", "average", "critics first"],
)
def test_captured_updates_equal_plain_updates(
    config: LearnerConfig, device: torch.device, replace_capture: Replace
) -> None:
    """One graph updates the policy, and one does not. If every update changes the policy, there is only one graph.

    A round has ``policy_delay`` updates. The first launch comes after one round. With ``critics_first`` 6, the first
    launch comes after 6 updates. With ``policy_average`` 0.5, the average moves towards the actor by the fraction 1
    in round 1, and by 1/2 in round 2. From round 1/0.5 = 2 on, this fraction is constant. The first launch comes one
    round later, after 3 rounds.
    """
    recorder = Recorder()
    if device.type == "cpu":
        replace_capture(recorder)
    plain, _ = trained(config, device, 20)
    td3, captured = trained(config, device, 20, captures=True)
    assert captured is not None
    assert captured.problem is None
    assert alike(td3, plain, device)
    assert np.allclose(list(td3.metrics().values()), list(plain.metrics().values()), rtol=1e-4, atol=1e-5)
    if device.type == "cpu":
        first = config.critics_first or (3 if config.policy_average else 1) * config.policy_delay
        assert recorder.captures == (1 if config.policy_delay == 1 else 2)
        assert recorder.launches == 20 - first


class Graph:
    """A stand-in for a graph. As with a real graph, a launch changes memory but no Python attributes."""

    def __init__(self, td3: FastTD3) -> None:
        self._td3 = td3
        self._objects = (td3.measured, td3.actor_adam, td3.critics_adam)
        for adam in self._objects[1:]:
            adam._keeps = True  # as on a GPU  # type: ignore[attr-defined]

    def __call__(self, work: Work) -> Work:
        before = self._td3.state()
        work()
        self._td3.restore(*before)

        def launch() -> None:
            attributes = [{name: _copied(value) for name, value in vars(it).items()} for it in self._objects]
            with torch.inference_mode():
                work()
            for it, values in zip(self._objects, attributes, strict=True):
                vars(it).update(values)

        return launch


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


@pytest.mark.parametrize("config", [LearnerConfig(), LearnerConfig(gradient_clip=0.1)], ids=["as it is", "clipped"])
@pytest.mark.parametrize("resumed_at", [10, 11])
def test_gauges_show_the_newest_captured_update(
    config: LearnerConfig, resumed_at: int, replace_capture: Replace
) -> None:
    """The test restores the engine after an even or odd number of updates, and again after 26 more updates."""
    cpu, gauges = torch.device("cpu"), []
    for captures in (False, True):
        td3, replay = FastTD3(O, A, (24, 16), config, 3), filled_buffer(cpu)
        for _ in range(resumed_at):
            td3.learn(replay.sample(B))
        td3.restore(*td3.state())
        if captures:
            replace_capture(Graph(td3))
        update = CapturedUpdate(td3) if captures else td3.learn
        seen = []
        for number in range(40):
            update(replay.sample(B))
            if number == 25:
                td3.restore(*td3.state())
            if number > 2 and number != 25:
                seen.append(list(td3.metrics(clear=False).values()))
        assert not captures or update.problem is None  # type: ignore[union-attr]
        gauges.append(np.array(seen))
    assert len(np.unique(gauges[0], axis=0)) == len(gauges[0])
    np.testing.assert_allclose(gauges[1], gauges[0], rtol=1e-4, atol=1e-6)


def test_a_failed_capture_gives_one_warning_and_updates_continue(
    replace_capture: Replace, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(work: Work) -> Work:
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    cpu = torch.device("cpu")
    plain, _ = trained(LearnerConfig(), cpu, 9)
    replace_capture(fails)
    with caplog.at_level(logging.WARNING):
        td3, captured = trained(LearnerConfig(), cpu, 9, captures=True)
    assert captured is not None
    assert captured.problem == "operation not permitted when stream is capturing"
    assert alike(td3, plain, cpu)
    (message,) = caplog.messages
    assert message.endswith("operation not permitted when stream is capturing")


def test_a_wrong_graph_is_not_used(replace_capture: Replace) -> None:
    """One graph does nothing. The other graph does its work twice."""
    cpu = torch.device("cpu")
    plain, _ = trained(LearnerConfig(), cpu, 9)
    for capture in (lambda _: lambda: None, lambda work: lambda: (work(), work())):
        replace_capture(capture)
        td3, captured = trained(LearnerConfig(), cpu, 9, captures=True)
        assert captured is not None
        assert captured.problem is not None
        assert "differs by" in captured.problem
        assert alike(td3, plain, cpu)


def test_a_new_batch_reaches_the_memory_of_the_graphs(replace_capture: Replace) -> None:
    """A buffer on the host returns new tensors for each batch. The update copies them to the memory of the graphs.

    Each of the two batch sizes needs two graphs.
    """
    results = []
    recorder = Recorder()
    replace_capture(recorder)
    for captured in (False, True):
        td3 = FastTD3(O, A, (24, 16), LearnerConfig(), 3)
        update = CapturedUpdate(td3) if captured else td3.learn
        host = filled_buffer()
        for size in (B, B, B, B, B, B, 16, 16, 16):
            update(host.sample(size))
        results.append(td3)
    assert alike(*results, torch.device("cpu"))
    assert recorder.captures == 4


def test_differences_match_a_hand_calculation() -> None:
    """The limit is 1 % of the largest change (0.1) plus 2.4e-7 of the largest value (2), together about 0.001."""
    before = {"w": np.array([1.0, 2.0], np.float32), "generator": np.zeros(3, np.uint8)}
    after = {"w": np.array([1.1, 2.0], np.float32), "generator": np.ones(3, np.uint8)}
    near = {"w": np.array([1.1009, 2.0], np.float32), "generator": np.ones(3, np.uint8)}
    far = {"w": np.array([1.1, 2.0011], np.float32), "generator": np.ones(3, np.uint8)}
    assert difference(before, after, near) is None
    assert difference(before, after, far) == "w differs by 0.0011 from its value without the graph"
    assert difference(before, before, near) is not None
    assert difference(before, after, {"w": np.array([np.nan, 2.0], np.float32)}) is not None
