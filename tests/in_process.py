"""Runs a learner, a policy server and simulators in one process.

A lock-step run over several processes must give exactly the same results as this run in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from td3_robot_sims import core as sims_core
from td3_robot_sims import simulator
from td3_robot_sims.core import SimulatorCore

from td3_robot.config.schema import Config
from td3_robot.core_types import ROBOT_ROLES
from td3_robot.learner import warm_start
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.engine import selection
from td3_robot.learner.factory import make_core
from td3_robot.messages import Evaluation, SimulatorState, Step, Weights
from td3_robot.policy import core as policy_core
from td3_robot.policy.core import PolicyCore
from td3_robot.transport.link import ClientLink, ServerLink, hello
from td3_robot.transport.memory import MemoryBus, Network


class InProcess:
    """A run with links that are queues in memory. All other code, such as the handshake, is the code of a real run.

    Args:
        clock: returns the time in seconds; None for a clock that advances 1 ms per turn.
        make_bus: makes the bus of each node.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] | None = None,
        make_bus: Callable[[Network, Callable[[], float]], Any] = MemoryBus,
    ) -> None:
        selection.use_threads(config.learner)
        self.config = config
        self._time = -1  # ms
        self.clock = clock or (lambda: self._time * 1e-3)
        self.network = Network()
        agreement = config.agreement()
        learning = dict.fromkeys(ROBOT_ROLES, (Step, SimulatorState))
        self.learner = make_core(config)
        warm_start.begin(self.learner)
        self.policy = policy_core.make(config, "policy", exploring=True)
        accepts = {**learning, "policy": (), "evaluator": (Evaluation,)}
        learner_bus = make_bus(self.network, self.clock)
        learner_bus.serve("learner", ServerLink("learner", "learner", accepts, agreement, 1))
        policy_bus = make_bus(self.network, self.clock)
        policy_bus.serve("policy", ServerLink("policy", "policy", policy_core.ACCEPTS, agreement, 2))
        introduction = hello("policy", "policy", client=0, agreement=agreement)
        policy_bus.connect("learner", ClientLink("learner", introduction, (Weights,)))
        self.nodes: list[tuple[LearnerCore | PolicyCore | SimulatorCore, Any]] = [
            (self.learner, learner_bus),
            (self.policy, policy_bus),
        ]
        self.simulators: list[SimulatorCore] = []
        for index in range(config.simulators):
            name = f"sim-{index}"
            core, bus = simulator.make(config, name, 0), make_bus(self.network, self.clock)
            spec = core.envs.spec
            introduction = hello("simulator", name, client=index, robots=config.robots, spec=spec, agreement=agreement)
            for link in ("policy", "learner"):
                bus.connect(link, ClientLink(link, introduction, sims_core.ACCEPTS[link]))
            self.simulators.append(core)
            self.nodes.append((core, bus))

    def run(self) -> None:
        """Call :meth:`turn` until the learner is done."""
        while not self.learner.done:
            self.turn()

    def turn(self) -> None:
        """Call every core once. The default clock advances by only 1 ms, so that nothing times out."""
        self._time += 1
        for core, bus in self.nodes:
            for to, message in core.step(bus.receive(0.0), self.clock()):
                bus.send(to, message)
        if self.learner.scheduler.snapshot_ready:
            self.learner.scheduler.snapshot_saved()

    def close(self) -> None:
        for core in self.simulators:
            core.envs.close()
