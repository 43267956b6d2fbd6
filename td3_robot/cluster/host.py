"""One host of a Ray cluster, and the processes of a run on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from td3_robot.cluster.agent import KILLED, Agent, Report
from td3_robot.cluster.question import ANSWER, LOST, Question, first_line
from td3_robot.errors import NodeError
from td3_robot.runtime.hosts import Running
from td3_robot.runtime.launch import Process
from td3_robot.transport.endpoints import with_host

_PERIOD = 0.1  # seconds between two reports of a host


@dataclass
class Host:
    """One host of the cluster, with the agent that starts its processes.

    Attributes:
        node: Ray's id of the host.
        address: the address at which other hosts reach this host.
        cpus, gpus: numbers of processor cores and of GPUs of the host.
        sees_run: whether the host can read the run folder.
        lost: whether the run has given up the host. If so, the host has died or does not answer, or a call to the host
            failed.
        simulators: number of simulators that run here.
        promised: simulators that start here when the agent has started. Other hosts must not take them.
        reserved: numbers of cores and of GPUs that the run has reserved here.
    """

    node: str
    address: str
    cpus: float
    gpus: float
    sees_run: bool
    lost: bool = False
    simulators: int = 0
    promised: list[Process] = field(default_factory=list)
    reserved: tuple[float, float] = (0.0, 0.0)
    agent: Any = None
    folder: str = ""
    _endpoints: dict[str, str] = field(default_factory=dict)  # by server
    _opening: Question | None = None
    _reservations: list[Any] = field(default_factory=list)
    _processes: dict[str, _Remote] = field(default_factory=dict)
    _asked: Question | None = None
    _asked_at: float = float("-inf")

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the agent and return its result.

        Raises:
            RayError: the host has died, does not answer, or the method failed. The host then counts as lost.
        """
        try:
            return ray.get(getattr(self.agent, method).remote(*arguments), timeout=ANSWER)
        except LOST:
            self._lose()
            raise

    def endpoint(self, server: str) -> str:
        """Return the TCP endpoint of a server on this host. It stays the same when the server restarts here.

        Raises:
            RayError: see :meth:`ask`.
        """
        if server not in self._endpoints:
            self._endpoints[server] = with_host(f":{self.ask('keep_port')}", self.address)
        return self._endpoints[server]

    def _lose(self) -> None:
        """Mark the host as lost, and kill its actors. This also ends the processes that the agent has started."""
        self.lost = True
        for actor in (self.agent, *self._reservations):
            with contextlib.suppress(Exception):  # Ray's head may be dead
                ray.kill(actor)

    def begin(self, cpus: float, gpus: float = 0.0, wait: float = ANSWER) -> bool:
        """Start the agent, and reserve cores and GPUs for its processes.

        A later call reserves more cores and GPUs if the run needs more in total. The processes do not wait for this
        reservation: Ray makes it as soon as other jobs leave enough cores free.

        Args:
            cpus, gpus: numbers of cores and of GPUs for all processes of the run on this host.
            wait: maximum time in seconds to wait for the start of the agent.

        Returns:
            whether the agent has started. If not, the host still has time to answer: call this method again.

        Raises:
            NodeError: the host has died, has not answered in time, or has too few free cores or GPUs.
        """
        if self._opening is None:
            self.agent = self._reserve(Agent, cpus, gpus).remote()
            self._opening = Question(self.agent.folder.remote())
        if not self.folder:
            try:
                if not self._opening.settled(wait):
                    return False
                self.folder = self._opening.answer()
            except GetTimeoutError:
                self._lose()
                raise NodeError(
                    f"host {self.address} of the cluster has fewer than {cpus:g} free cores"
                    f"{', or no free GPU' if gpus else ''}; perhaps other jobs run on this host"
                ) from None
            except RayError as error:
                self._lose()
                raise NodeError(f"host {self.address} of the cluster: {first_line(error)}") from None
        more = [
            max(0.0, min(wanted, most) - has)
            for wanted, most, has in zip((cpus, gpus), (self.cpus, self.gpus), self.reserved, strict=True)
        ]
        if any(more):
            self._reservations.append(self._reserve(Reservation, *more).remote())
        return True

    def _reserve(self, kind: type, cpus: float, gpus: float) -> Any:
        """Return a Ray actor class whose actors reserve cores and GPUs of this host."""
        self.reserved = self.reserved[0] + cpus, self.reserved[1] + gpus
        actor: Any = ray.remote(kind)
        where = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where)

    def close(self) -> None:
        """End the processes on this host, and remove their folders."""
        if self.agent is not None and not self.lost:
            with contextlib.suppress(LOST):
                self.ask("close")

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Running:
        """Start a process on this host: Python with these arguments. ``log`` is a file on the caller's machine."""
        # An old report may hold the exit code of an earlier process of this name. Take the old report before the start.
        self.take(wait=True)
        self.ask("start", name, arguments, environment)
        self._processes[name] = _Remote(self, name, log)
        return self._processes[name]

    @property
    def running(self) -> int:
        """Number of processes that run."""
        return sum(process.code is None for process in self._processes.values())

    def take(self, *, wait: bool = False) -> None:
        """Take the newest reports if they have come, and ask for the next ones.

        If ``wait`` is set, this method waits for the reports that an earlier call asked for, and does not ask for new
        reports.
        """
        if self.lost:
            return
        if self._asked and self._asked.settled(ANSWER if wait else 0.0):
            asked, self._asked = self._asked, None
            try:
                reports: Mapping[str, Report] = asked.answer()
            except LOST:
                self._lose()
                return
            for name, report in reports.items():
                process = self._processes[name]
                process.code = report.code
                with contextlib.suppress(OSError), process.log.open("ab") as log:  # the disk may be full
                    log.write(report.output)
        now = time.monotonic()
        if not wait and self._asked is None and now - self._asked_at >= _PERIOD:
            self._asked, self._asked_at = Question(self.agent.reports.remote()), now


class Reservation:
    """An actor that only holds cores and GPUs."""


@dataclass(eq=False, repr=False)
class _Remote:
    """A process on another host. ``code`` is its exit code, or None until a report of the host has it."""

    host: Host
    name: str
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        self.host.take()
        if self.code is None and self.host.lost:
            self.code = KILLED
        return self.code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_PERIOD)
        return code

    def send_signal(self, sig: int) -> None:
        if self.host.lost:
            raise ProcessLookupError
        self.host.agent.send_signal.remote(self.name, int(sig))
