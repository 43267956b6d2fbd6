"""The two ends of a measured link: a policy server in another process, and a robot in this process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from td3_robot.bench import example
from td3_robot.errors import NodeError
from td3_robot.messages import Action, Welcome
from td3_robot.transport import link as handshake
from td3_robot.transport.bus import Bus
from td3_robot.transport.keys import AllowList
from td3_robot.transport.link import ClientLink

TIMEOUT = 30.0  # seconds to wait for a server


@contextlib.contextmanager
def serving(endpoint: str, *options: str) -> Iterator[tuple[int, str]]:
    """Start :mod:`td3_robot.bench.server`, and stop it at the end of the block. Yield its process id and endpoint.

    Raises:
        NodeError: the server ended before it served the endpoint.
    """
    command = [sys.executable, "-m", "td3_robot.bench.server", "--endpoint", endpoint, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        bound = process.stdout.readline().strip()
        if not bound:
            raise NodeError(f"the policy server of the benchmark ended with exit code {process.wait(TIMEOUT)}")
        try:
            yield process.pid, bound
        finally:
            process.kill()


class Robot:
    """A source with one or several robots. It sends prepared Steps and receives Actions.

    Attributes:
        version: weights version of the newest Action.
    """

    def __init__(self, endpoint: str, robots: int, keys: AllowList | None = None) -> None:
        self.bus = Bus(keys=keys)
        name = f"{example.SOURCE}-{robots}"
        hello = handshake.hello("driver", name, client=robots, robots=robots, spec=example.spec())
        self.bus.connect(endpoint, ClientLink("policy", hello, (Action,)))
        rng = np.random.default_rng(robots)
        self._steps = [example.step(sequence, robots, rng, name) for sequence in range(1000)]
        self._newest = self._steps[0]
        self._sent = self.version = 0

    def send(self) -> int:
        """Send the next Step. Return its sequence number."""
        self._newest = replace(self._steps[self._sent % len(self._steps)], sequence=self._sent)
        self._sent += 1
        self.bus.send("policy", self._newest)
        return self._newest.sequence

    def answered(self, sequence: int, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the Action that answers a Step. Return whether the Action came.

        If the server has forgotten the robot after a long silence, the robot sends the Step again after the next
        Welcome.
        """
        end = time.monotonic() + timeout
        while True:
            for _, message in self.bus.receive(max(0.0, end - time.monotonic())):
                if isinstance(message, Welcome):
                    self.bus.send("policy", self._newest)
                elif isinstance(message, Action) and message.answers == sequence:
                    self.version = message.weights_version
                    return True
            if time.monotonic() >= end:
                return False

    def round_trip(self) -> int:
        """Return the time in ns from an observation to its action, with encoding and decoding.

        Raises:
            NodeError: no Welcome or no Action came.
        """
        end = time.monotonic() + TIMEOUT
        while not self.bus.welcome("policy"):
            self.bus.receive(0.01)
            if time.monotonic() > end:
                raise NodeError(f"the policy server of the benchmark did not answer within {TIMEOUT:g} s")
        begin = time.perf_counter_ns()
        if not self.answered(self.send(), TIMEOUT):
            raise NodeError(f"no action within {TIMEOUT:g} s")
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        self.bus.close()
