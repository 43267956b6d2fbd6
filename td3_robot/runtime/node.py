"""A node: its run or configuration, its links, its reports, and the loop around its core."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from td3_robot.config.schema import Config
from td3_robot.core_types import Core, Input
from td3_robot.errors import ConfigError, EndpointBusyError, EndpointError, RunFolderError
from td3_robot.messages import Command, Hello, Message, Start, Status
from td3_robot.recording.boundary import Observer, RecordedCore
from td3_robot.runtime.outbox import Outbox
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.silence import Silence
from td3_robot.runtime.systemd import Notifier
from td3_robot.specs import RobotSpec
from td3_robot.topics import RECORDER
from td3_robot.transport import attach
from td3_robot.transport import link as handshake
from td3_robot.transport.endpoints import is_tcp
from td3_robot.transport.interface import Transport
from td3_robot.transport.link import HEARTBEAT_PERIOD, ClientLink, ServerLink
from td3_robot.transport.tap import RECORDED

log = logging.getLogger(__name__)

STATUS_PERIOD = 0.5  # seconds between two reports
_LOOK_PERIOD = 1.0  # seconds between two looks at the endpoints of the run
_SILENCE = 2 * HEARTBEAT_PERIOD  # seconds; a server that is silent for longer may have moved
_IDLE = 0.05  # seconds that a core without work waits for input
_POLL_ERROR = 0.002  # seconds by which polling can be late, because ZeroMQ measures time in milliseconds


@dataclass(frozen=True)
class Figures:
    """What a node reports about itself. :class:`~td3_robot.messages.Status` explains the fields."""

    state: str = "ready"
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class Node:
    """A process with a role: its run or configuration, its links, and the loop around its core.

    Attributes:
        folder: folder of the node's run; None if the node is deployed without a run.
        supervised: whether a supervisor started this process. The supervisor also stops it.
        stop_signal: number of the last signal that asked this process to stop, or 0.
        counters: counts that the node reports in addition to the counts of its core.
        outbox: sends the messages that the core returns.
    """

    role: str
    name: str
    incarnation: int
    folder: RunFolder | None
    config: Config
    bus: Transport
    supervised: bool = False
    stop_signal: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    _client: int = field(default_factory=lambda: secrets.randbits(63))
    _next_status: float = float("-inf")
    _next_look: float = float("-inf")

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.bus, self.counters)

    @property
    def run(self) -> RunFolder:
        """The run's folder. Only a node that joined a run may use it."""
        assert self.folder
        return self.folder

    def endpoint(self, link: str) -> str:
        """Return the endpoint of a link.

        Raises:
            RunFolderError: the link has no endpoint, and this node belongs to a run.
            ConfigError: the link has no endpoint, and this node is deployed without a run.
        """
        if self.folder:
            return self.folder.endpoint(link, self.config)
        configured: str | None = getattr(self.config.endpoints, link)
        if not configured:
            raise ConfigError(f"endpoints.{link} is not set; allowed: ipc://PATH, tcp://HOST:PORT")
        return configured

    def listeners(self, link: str) -> str:
        """Return the ``ipc://`` endpoint at which monitors or recorders attach; empty if there is none.

        If the link has an ``ipc://`` endpoint, the result is this endpoint. If not, a deployed node with a policy
        endpoint gets the result from :func:`td3_robot.transport.attach.beside`.
        """
        with contextlib.suppress(ConfigError, RunFolderError):
            endpoint = self.endpoint(link)
            if not is_tcp(endpoint):
                return endpoint
        policy = self.config.endpoints.policy
        return attach.beside(policy, link) if policy and not self.folder else ""

    def listen(self, link: str, accepts: dict[str, tuple[type[Message], ...]]) -> None:
        """Bind the first free socket of a link. Only monitors and recorders call this method.

        Several monitors or recorders can attach to a node, each with a socket, see :mod:`td3_robot.transport.attach`.

        Raises:
            ConfigError, RunFolderError: see :meth:`endpoint`.
            EndpointError: the endpoint is busy, malformed or not allowed.
        """
        place = self.listeners(link)
        named = getattr(self.config.endpoints, link)
        # With the option --endpoint, only this link has an endpoint. The node then binds exactly this endpoint.
        only = not self.folder and not self.config.endpoints.policy
        if only or not place or (named and is_tcp(named)):
            self.serve(link, accepts)
            return
        attach.prepare(place)
        for endpoint in attach.places(place):
            with contextlib.suppress(EndpointBusyError):
                self._bind(endpoint, ServerLink(link, self.name, accepts, self.agreement(), secrets.randbits(63)))
                return
        raise EndpointError(f"endpoints.{link}: all {attach.PLACES} sockets of {place!r} are busy")

    def agreement(self) -> dict[str, str]:
        """Return the values that must be equal at all peers of a run.

        The result is empty for deployed nodes, which compare only the robot's specification.
        """
        return self.config.agreement() if self.folder else {}

    def serve(self, link: str, accepts: dict[str, tuple[type[Message], ...]], spec: RobotSpec | None = None) -> None:
        """Bind the endpoint of a link. For errors see :meth:`listen`.

        A policy server on a cluster may have a second endpoint. If so, this method binds both endpoints.
        """
        server = ServerLink(link, self.name, accepts, self.agreement(), secrets.randbits(63), spec)
        chosen = self.folder.to_bind(link, self.config, self.name) if self.folder else [self.endpoint(link)]
        for endpoint in chosen:
            self._bind(endpoint, server)

    def _bind(self, endpoint: str, server: ServerLink) -> None:
        try:
            bound = self.bus.serve(endpoint, server)
        except EndpointError as error:
            raise type(error)(f"endpoints.{server.link}: {error}") from None
        if bound != endpoint:  # the operating system chose the port
            log.info("link %s is served at %s", server.link, bound)

    def connect(
        self,
        link: str,
        accepts: tuple[type[Message], ...],
        *,
        spec: RobotSpec | None = None,
        robots: int = 0,
        essential: bool = True,
        weights_version: int = 0,
    ) -> ClientLink:
        """Connect to the server of a link.

        Args:
            link: name of the link.
            accepts: messages that the server may send.
            spec: specification of this node's robots; None if the node is not a source of experience.
            robots: number of this node's robots.
            essential: whether a refusal by the server ends this node. If not, the node asks again later.
            weights_version: version of the policy that this node serves; 0 if it serves no policy.

        Raises:
            ConfigError, RunFolderError: see :meth:`endpoint`.
            EndpointError: the endpoint is malformed or not allowed.
        """
        greeting = self.hello(self.role, spec=spec, robots=robots, weights_version=weights_version)
        client = ClientLink(link, greeting, accepts, essential=essential)
        self.bus.connect(self.endpoint(link), client)
        return client

    def hello(self, role: str, *, spec: RobotSpec | None = None, robots: int = 0, weights_version: int = 0) -> Hello:
        """Make the Hello of this process."""
        return handshake.hello(
            role,
            self.name,
            client=self._client,
            incarnation=self.incarnation,
            robots=robots,
            weights_version=weights_version,
            spec=spec,
            agreement=self.agreement(),
        )

    def recorded(self, core: Core, settings: Mapping[str, Any], observer: Observer | None = None) -> RecordedCore:
        """Record how the node made its core, and wrap the core so that its inputs and outputs are recorded.

        Args:
            core: the core to wrap.
            settings: arguments of the core that the configuration does not hold, as plain JSON values.
            observer: object that returns additional facts about a turn, which ``core.step`` does not return.
        """
        offers = sorted(kind.NAME for kind in RECORDED)  # a replay expects only these topics
        self.bus.send(RECORDER, Start(self.role, self.config.to_yaml(), {**settings, "offers": offers}))
        return RecordedCore(core, self.bus, observer)

    def spin(
        self,
        core: Core,
        *,
        busy: Callable[[], bool],
        report: Callable[[], Figures],
        after: Callable[[], bool],
        deadline: Callable[[], float | None] = lambda: None,
        stops: Callable[[], bool] = lambda: True,
        sift: Callable[[list[Input]], list[Input]] = lambda inputs: inputs,
    ) -> None:
        """Run the core until the run ends, ``after`` returns True, or a signal to stop arrives (see ``stops``).

        Args:
            core: the core to run.
            busy: function that returns whether the core has work to do without new inputs.
            report: function that returns the node's figures.
            after: function that the loop calls after each turn. If it returns True, the loop ends.
            deadline: function that returns the time (s, ``time.monotonic``) by which the next turn must begin. At this
                time, the turn begins even if there are no inputs. The function returns None if there is no limit.
            stops: after a signal to stop, the loop calls this function before each turn. If it returns True, the loop
                ends.
            sift: function that takes the received inputs of a turn, and returns the inputs for the core.

        Raises:
            HandshakeError: a server refused this node on an essential link.
        """
        finished = False
        notifier, silence = Notifier(os.environ), Silence()
        while not finished and not (self.stop_signal and stops()):
            notifier.turn(time.monotonic())
            inputs = sift(self._receive(0.0 if busy() else _IDLE, deadline()))
            self.outbox.forget_steps(inputs)
            self.outbox.add(core.step(inputs, time.monotonic()))
            self.outbox.flush()
            if not self.supervised:  # a supervisor reports its processes itself
                silence.turn(self.bus.clients.values(), time.monotonic())
            finished = after() or self._look()
            if time.monotonic() >= self._next_status:  # only when due, because a report may take long to compute
                self.status(report())
        self.outbox.close()
        self.status(report())
        self.bus.flush()

    def _receive(self, timeout: float, deadline: float | None) -> list[Input]:
        """Return the received inputs. Wait up to ``timeout`` seconds for the first input, but not beyond the deadline.

        ZeroMQ's poll can return up to 2 ms late. So polling ends 2 ms before the deadline. A call in these last 2 ms
        sleeps until the deadline, exact to about 0.1 ms, and then returns what has arrived.
        """
        if deadline is None:
            return self.bus.receive(timeout)
        left = deadline - time.monotonic()
        if left > _POLL_ERROR:
            return self.bus.receive(min(timeout, left - _POLL_ERROR))
        if left > 0:
            time.sleep(left)
        return self.bus.receive(0.0)

    def status(self, figures: Figures) -> None:
        """Report to the supervisor. A node without a supervisor reports to recorders and monitors only."""
        self._next_status = time.monotonic() + STATUS_PERIOD
        self.bus.send("supervisor" if self.supervised else RECORDER, self.status_message(figures))

    def status_message(self, figures: Figures) -> Status:
        """Make a Status from the figures and the node's counters."""
        counters = {**self.bus.dropped(), **self.counters, **figures.counters}
        return Status(self.name, figures.state, figures.detail, figures.figures, counters)

    def tell_core(self, figures: Callable[[], Figures], inputs: list[Input]) -> list[Input]:
        """If the inputs of a turn contain a Command, add a Status of this node.

        The core copies this Status into its Reply. The recording contains the inputs, so a replay computes the same
        Reply.
        """
        if not any(isinstance(message, Command) for _, message in inputs):
            return inputs
        return [(self.name, self.status_message(figures())), *inputs]

    def _look(self) -> bool:
        """Look at the endpoints of the run, and follow a server that has moved. Return whether the run has ended.

        Only a server of a TCP endpoint can move. While such a server is silent, the node looks for a new endpoint of
        this server. A supervised node does not look whether the run has ended, because its supervisor stops the node at
        the end of the run. If the configuration sets ``endpoints.learner``, this method does nothing.
        """
        now = time.monotonic()
        if not self.folder or self.config.endpoints.learner or now < self._next_look:
            return False
        self._next_look = now + _LOOK_PERIOD
        for client in self.bus.clients.values():
            if is_tcp(client.endpoint) and now - client.received_at > _SILENCE:
                self._follow(client)
        if self.supervised or self.folder.read_run().get("endpoints"):
            return False
        log.info("the run in %s has ended", self.folder.path)
        return True

    def _follow(self, client: ClientLink) -> None:
        """Connect a client to its server again if the endpoint in the run folder has changed."""
        with contextlib.suppress(RunFolderError, EndpointError):  # the run has ended, or another version wrote the file
            endpoint = self.endpoint(client.link)
            if endpoint != client.endpoint:
                log.info("the server of link %s has moved to %s", client.link, endpoint)
                self.bus.move(client.link, endpoint)
