"""TD3's update as a CUDA graph: one launch in place of some hundred.

An update of small networks takes a GPU less time than Python needs to launch its kernels. A graph launches them all,
with the same memory each time; what differs between two updates lies in that memory: the batch, the noise, the
learning rate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.learner.replay import Batch
from td3_robot.learner.td3 import TD3

log = logging.getLogger(__name__)

Work = Callable[[], object]


def capture(work: Work) -> Work:
    """Record ``work`` on the GPU without doing it; the result does it.

    Raises:
        RuntimeError: it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def aside(work: Work) -> None:
    """Do ``work`` on another stream than the current one: before a capture, libraries want to be set up there."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        work()
    current.wait_stream(side)


class CapturedUpdate:
    """Calls do what :meth:`TD3.update` does, through two graphs: with and without the delayed policy step.

    The first updates run as they are: the weight of ``policy_average`` is not constant yet, or the actor stands still
    for ``critics_first``. A graph is used once its first launch has given what the same update gives without it. Where
    capture or that check fails, a warning says so, ``problem`` holds the reason, and all updates run as they are from
    there on.

    Args:
        td3: on a GPU.
        capture, warm_up: how work is captured, and done before; for tests.
    """

    def __init__(self, td3: TD3, capture: Callable[[Work], Work] = capture, warm_up: Callable[[Work], None] = aside):
        config = td3.config
        self.problem: str | None = None
        self._td3 = td3
        self._capture, self._warm_up = capture, warm_up
        averages = math.ceil(1 / config.policy_average) if config.policy_average else 0
        self._from = max((averages + 1) * config.policy_delay, config.critics_first)  # updates made
        self._graphs: dict[bool, Work] = {}
        self._batch: Batch | None = None
        self._noise: Tensor | None = None

    def __call__(self, batch: Batch) -> Sequence[Tensor]:
        """One update; the critics' errors are not told: there are none to read before the device is done."""
        td3 = self._td3
        noise = td3.draw_noise(len(batch.action))
        if self.problem is not None or td3.updates < self._from:
            td3.improve(batch, noise)
            return ()
        inputs = self._place(batch, noise)
        with_policy = (td3.updates + 1) % td3.config.policy_delay == 0
        if with_policy in self._graphs:
            self._launch(self._graphs[with_policy])
        else:
            self._try(with_policy, *inputs)
        return ()

    def _place(self, batch: Batch, noise: Tensor) -> tuple[Batch, Tensor]:
        """The inputs in the memory that the graphs read."""
        if self._batch is None or self._noise is None or self._noise.shape != noise.shape:
            self._graphs.clear()  # they know other memory
            device = noise.device
            here = batch.action.device == device
            self._batch = batch if here else Batch(*(tensor.to(device) for tensor in batch))
            self._noise = noise.clone()
        self._noise.copy_(noise)
        if batch is not self._batch:
            for static, new in zip(self._batch, batch, strict=True):
                static.copy_(new)
        return self._batch, self._noise

    def _launch(self, graph: Work) -> None:
        count = self._td3.updates
        graph()
        self._td3.updates = count + 1

    def _try(self, with_policy: bool, batch: Batch, noise: Tensor) -> None:
        """One update, and whether it can be captured."""
        td3 = self._td3
        before = td3.state()
        self._warm_up(lambda: td3.improve(batch, noise))
        after = td3.state()
        td3.restore(*before)
        try:
            graph = self._capture(lambda: td3.improve(batch, noise))
            td3.updates = after[1]["updates"] - 1  # capturing counts, and does nothing
            self._launch(graph)
            self.problem = difference(before[0], after[0], td3.state()[0])
        except RuntimeError as error:
            self.problem = str(error).partition("\n")[0]
        if self.problem is None:
            self._graphs[with_policy] = graph
        else:
            self._graphs.clear()
            td3.restore(*after)
            log.warning("updates are not captured in a CUDA graph and slower for it: %s", self.problem)


def difference(
    before: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]
) -> str | None:
    """Where ``found`` is not ``expected``; None if all are equal but for rounding.

    Allowed are 1 % of the largest change since ``before`` and two steps of float32 of the largest value.
    """
    for name, array in expected.items():
        if array.dtype != np.float32:
            continue
        error = np.abs(found[name] - array).max()
        limit = 0.01 * np.abs(array - before[name]).max() + 2.4e-7 * np.abs(array).max()
        if not error <= limit:
            return f"{name} differs by {error:.2g} from what it is without the graph"
    return None
