"""Tools for tests of policies and robots: a clock that the test sets, and a robot in memory."""

from __future__ import annotations

import numpy as np

from td3_robot.messages import NO_NOISE, Action, ActionOrigin, Phase, Step
from td3_robot.policy.core import PolicyCore
from td3_robot.specs import Float32, RobotSpec
from td3_robot.transport.link import ClientLink, ServerLink, hello
from td3_robot.transport.memory import MemoryBus, Network


class ManualClock:
    """A clock in seconds. Only :meth:`advance` changes its time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> float:
        """Move the clock forward. Returns the new time.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"the clock cannot go back by {-seconds} s")
        self.now += seconds
        return self.now

    def __call__(self) -> float:
        return self.now


class FakeRobot:
    """A client that sends the Steps of one robot. It is connected in memory to the core of a policy server.

    The connection uses the real handshake and encoding.

    Args:
        policy: the core that answers the robot's Steps.
        clock: each observation advances this clock by one control period.
        source: name of the robot.
    """

    def __init__(self, policy: PolicyCore, spec: RobotSpec, clock: ManualClock, source: str = "fake-robot") -> None:
        self.policy, self.spec, self.clock, self.source = policy, spec, clock, source
        network = Network()
        self.bus, self.server = MemoryBus(network, clock), MemoryBus(network, clock)
        self.steps: list[Step] = []
        self.last: Action | None = None
        self._episode = 0
        self._episode_step = 0
        self.server.serve("policy", ServerLink("policy", "policy", {"driver": (Step,)}, {}, 1))
        client = ClientLink("policy", hello("driver", source, client=1, robots=1, spec=spec), (Action,))
        self.bus.connect("policy", client)
        self._exchange()

    def observe(self, observation: Float32, reward: float = 0.0, phase: Phase = Phase.MID) -> Action | None:
        """Publish an observation of all O channels, float32[O]. Returns the Action that answers it, or None.

        The robot sends the observation in a Step. The applied action in this Step is the answer to the previous
        observation. If there was no such answer, the applied action is zero.
        The first observation of an episode always gets the phase FIRST. Its Step has a zero action and the reward 0.

        Raises:
            ValueError: ``phase`` is FIRST in the middle of an episode.
        """
        last = self.steps[-1] if self.steps else None
        if last is None or last.phase[0] >= Phase.TERMINATED:
            phase = Phase.FIRST
            self._episode += last is not None
            self._episode_step = 0
        elif phase is Phase.FIRST:
            raise ValueError("phase is FIRST in the middle of an episode; allowed: MID, TERMINATED, TRUNCATED")
        else:
            self._episode_step += 1
        sequence = len(self.steps)
        applied = self.last if phase is not Phase.FIRST else None
        zero = np.zeros((1, self.spec.action_size), np.float32)
        substitute = ActionOrigin.NONE if phase is Phase.FIRST else ActionOrigin.ZERO
        step = Step(
            source=self.source,
            incarnation=0,
            sequence=sequence,
            transitions=sequence - self._episode,
            stamp=int(self.clock.advance(self.spec.control_period) * 1e9),
            phase=np.array([phase], np.uint8),
            episode=np.array([self._episode], np.uint64),
            episode_step=np.array([self._episode_step], np.uint32),
            observation=np.asarray(observation, np.float32).reshape(1, -1),
            reward=np.array([0.0 if phase is Phase.FIRST else reward], np.float32),
            action=applied.action.copy() if applied else zero,
            origin=int(ActionOrigin.POLICY if applied else substitute),
            answered=applied.answers if applied else sequence,
            weights_version=applied.weights_version if applied else 0,
            noise_kind=applied.noise_kind if applied else NO_NOISE,
            noise_seed=applied.noise_seed if applied else 0,
            needs_version=0,
            world={},
        )
        self.steps.append(step)
        if not self.bus.send("policy", step):  # after a long silence, send() sends Hello instead of the Step
            self._exchange()
            self.bus.send("policy", step)
        self.last = self._exchange()
        return self.last

    def _exchange(self) -> Action | None:
        self.bus.receive(0.0)
        for to, message in self.policy.step(self.server.receive(0.0), self.clock.now):
            self.server.send(to, message)
        answers = [message for _, message in self.bus.receive(0.0) if isinstance(message, Action)]
        return answers[-1] if answers else None
