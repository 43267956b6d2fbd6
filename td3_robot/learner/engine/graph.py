"""The engine's update as a CUDA graph. One launch runs the graph. Without a graph, an update needs about 100 launches.

For small networks, a GPU runs the kernels of an update faster than Python can launch them. A graph launches all kernels
at once and always uses the same memory. Each update first copies its noise to that memory. If the replay buffer has not
gathered the batch there, the update copies the batch, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from td3_robot.learner.replay_buffer.buffer import Batch

if TYPE_CHECKING:
    from td3_robot.learner.engine.td3 import FastTD3

log = logging.getLogger(__name__)

Work = Callable[[], object]


def capture(work: Work) -> Work:
    """Record ``work`` on the GPU without running it. Returns a function that runs the recorded work."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def aside(work: Work) -> None:
    """Run ``work`` on a side stream, so that libraries initialise themselves before a capture."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        work()
    current.wait_stream(side)


class CapturedUpdate:
    """Makes the updates of :meth:`FastTD3.improve` with two graphs: one with the policy update, and one without it.

    A graph always repeats the same operations with the same constants. In the first updates, operations and
    constants still change, so these updates use no graph. The operations change because the first ``critics_first``
    updates train only the critics. The constants change because the moving average of the actor first moves by a larger
    fraction than ``policy_average``.

    The first launch of a graph must give the same result, up to rounding, as the update without a graph. If capture or
    this check fails, a warning gives the reason, and later updates use no graph.

    Attributes:
        problem: the reason why updates cannot use a graph; None while no such reason is known.
    """

    def __init__(self, engine: FastTD3) -> None:
        config = engine.config
        self.problem: str | None = None
        self._engine = engine
        averages = math.ceil(1 / config.policy_average) if config.policy_average else 0
        self._from = max((averages + 1) * config.policy_delay, config.critics_first)  # updates before the first graph
        self._graphs: dict[bool, Work] = {}
        self._batch: Batch | None = None
        self._noise: Tensor | None = None

    def __call__(self, batch: Batch) -> Sequence[Tensor]:
        """Make one update. The result is empty: it has no TD errors, because reading them would wait for the device."""
        engine = self._engine
        noise = engine.draw_noise(len(batch.action))
        if self.problem is not None or engine.updates < self._from:
            engine.improve(batch, noise)
            return ()
        inputs = self._place(batch, noise)
        with_policy = (engine.updates + 1) % engine.config.policy_delay == 0
        if with_policy in self._graphs:
            self._launch(self._graphs[with_policy])
        else:
            self._try(with_policy, *inputs)
        return ()

    def _place(self, batch: Batch, noise: Tensor) -> tuple[Batch, Tensor]:
        """Copy the inputs to the memory that the graphs read, and return that memory."""
        if self._batch is None or self._noise is None or self._noise.shape != noise.shape:
            self._graphs.clear()  # the graphs read the old memory
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
        count = self._engine.updates
        graph()
        self._engine.updates = count + 1

    def _try(self, with_policy: bool, batch: Batch, noise: Tensor) -> None:
        """Make one update, and test whether a graph can repeat it."""
        engine = self._engine
        before = engine.state()
        aside(lambda: engine.improve(batch, noise))
        after = engine.state()
        engine.restore(*before)
        try:
            graph = capture(lambda: engine.improve(batch, noise))
            engine.updates = after[1]["updates"] - 1  # the capture counted an update, but did not run it
            self._launch(graph)
            self.problem = difference(before[0], after[0], engine.state()[0])
        except RuntimeError as error:
            self.problem = str(error).partition("\n")[0]
        if self.problem is None:
            self._graphs[with_policy] = graph
        else:
            self._graphs.clear()
            engine.restore(*after)
            log.warning("updates use no CUDA graph and are slower: %s", self.problem)


def difference(
    before: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]
) -> str | None:
    """The first difference of ``found`` from ``expected``, as text; None if all float32 arrays are about equal.

    Two arrays are about equal if no element differs by more than the sum of two numbers: 1 % of the largest change from
    ``before`` to ``expected``, and two float32 rounding steps of the largest value in ``expected``.
    """
    for name, array in expected.items():
        if array.dtype != np.float32:
            continue
        error = np.abs(found[name] - array).max()
        limit = 0.01 * np.abs(array - before[name]).max() + 2.4e-7 * np.abs(array).max()
        if not error <= limit:
            return f"{name} differs by {error:.2g} from its value without the graph"
    return None
