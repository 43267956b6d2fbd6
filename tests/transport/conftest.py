"""Fixtures: links and buses for the toy robot, and functions that wait for messages and select them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from td3_robot.core_types import ROBOT_ROLES, Input
from td3_robot.messages import Action, Evaluation, Hello, Message, Step, Throttle, Weights
from td3_robot.specs import RobotSpec
from td3_robot.transport import link as handshake
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ClientLink, ServerLink
from tests.contract import transport as contract

AGREEMENT = {"task": "Toy", "timing": "free"}


@pytest.fixture
def time_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a closing bus enough time to send its last messages on a busy machine."""
    monkeypatch.setattr("td3_robot.transport.bus._FAREWELL", 60_000)  # ms


@pytest.fixture
def make_server() -> Callable[..., ServerLink]:
    """Returns a function that builds server links.

    The links accept Steps from robots, Evaluations from evaluators, and nothing from policy servers.
    """

    def make(number: int = 1, link: str = "policy", **fields: Any) -> ServerLink:
        accepts: dict[str, tuple[type[Message], ...]]
        accepts = {"simulator": (Step,), "driver": (Step,), "policy": (), "evaluator": (Evaluation,)}
        return ServerLink(link, "server", accepts, AGREEMENT, number, **fields)

    return make


@pytest.fixture
def make_hello(spec: RobotSpec) -> Callable[..., Hello]:
    """Returns a function that builds Hellos. The default is the Hello of a simulator with one robot.

    Keywords go to ``handshake.hello``.
    """

    def make(role: str = "simulator", name: str = "sim-0", **fields: Any) -> Hello:
        robot = role in ROBOT_ROLES
        own = {"robots": 1, "spec": spec} if robot else {}
        return handshake.hello(role, name, **{"client": 7, "agreement": AGREEMENT, **own, **fields})

    return make


@pytest.fixture
def make_client(make_hello: Callable[..., Hello]) -> Callable[..., ClientLink]:
    """Returns a function that builds client links. The default is the link of a simulator with one robot."""

    def make(name: str = "sim-0", link: str = "policy", essential: bool = True, **fields: Any) -> ClientLink:
        hello = make_hello(name=name, **fields)
        return ClientLink(link, hello, (Action, Throttle, Weights), essential)

    return make


@pytest.fixture
def make_bus() -> Iterator[Callable[[], Bus]]:
    """Returns a function that builds buses. After the test, buses that are still open are closed."""
    made: list[Bus] = []

    def make() -> Bus:
        bus = Bus()
        made.append(bus)
        close = bus.close

        def forget(reason: str = "") -> None:
            made.remove(bus)
            close(reason)

        bus.close = forget  # type: ignore[method-assign]
        return bus

    yield make
    # Close the newest bus first, because most clients are newer than their servers. A client whose server is already
    # closed waits for this server.
    for bus in made[::-1]:
        bus.close()


@pytest.fixture
def pump() -> Callable[..., list[list[Input]]]:
    """Returns ``pump(condition, *buses)``, which receives from one bus after another until ``condition`` holds."""
    return contract.pump


@pytest.fixture
def of() -> Callable[[list[Input], type[Message]], list[Any]]:
    """Returns ``of(inputs, kind)``, which selects the messages of one kind from the inputs."""
    return contract.of
