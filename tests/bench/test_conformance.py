"""The conformance kit finds no mistake in our own peers, and each of its checks finds a mistake in a faulty peer."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
import zmq

from td3_robot.bench import conformance_driver, conformance_policy, conformance_wire, example
from td3_robot.bench.conformance import Checks
from td3_robot.cli.main import main
from td3_robot.policy.core import ACCEPTS, PolicyCore
from td3_robot.transport import codec
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ServerLink, hello
from tests.bench.faulty_driver import EXAMPLE, FAULTS

TOGETHER = 6  # number of faulty peers that run at the same time; they mostly wait
WAIT, SHORT_WAIT = 60.0, 20.0  # seconds
OWN_DRIVER = EXAMPLE.with_name("pendulum_driver.py")


@contextlib.contextmanager
def process(*words: str) -> Iterator[None]:
    """Run a Python program in the background."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, *words], stdout=quiet, stderr=quiet) as running:
        try:
            yield
        finally:
            running.kill()


# -- peers without a fault -------------------------------------------------------------------------------------------


def test_the_minimal_driver_conforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"ipc://{tmp_path}/policy"
    with process(str(EXAMPLE), endpoint, "--action-deadline", "5"):
        code = main(["bench", "conformance", endpoint, "--deadline", "20", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["conforms"]) == (0, True), report
    assert all(check["reached"] for check in report["checks"].values())
    assert not (tmp_path / "policy").exists()


def test_our_own_driver_conforms(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/policy"
    safety = {"action_deadline_ms": 5000, "safe_action": {"torque": 0.0}}
    settings = {"endpoints": {"policy": endpoint}, "policy": {"autostart": False}, "safety": safety}
    (tmp_path / "robot.yaml").write_text(yaml.safe_dump(settings))
    with process(str(OWN_DRIVER), "--config", str(tmp_path / "robot.yaml")):
        checks = conformance_driver.check(endpoint, WAIT, 20.0)
    assert not checks.wrong, "\n".join(checks.lines())


def test_hellos_sent_before_the_check_are_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may start before the check.

    ZeroMQ keeps this driver's Hellos until the check starts, and then delivers all of them at once.
    """
    monkeypatch.setattr(conformance_wire, "PATIENCE", 1.0)
    endpoint, ended = f"ipc://{tmp_path}/policy", threading.Event()
    frames = [b"hello", codec.encode(hello("driver", "early", client=1, robots=1, spec=example.spec()))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as driver, ThreadPoolExecutor(1) as pool:
        driver.setsockopt(zmq.LINGER, 0)
        driver.connect(endpoint)
        for _ in range(8):
            driver.send_multipart(frames)

        def send_hellos() -> None:
            while not ended.wait(0.25):
                driver.send_multipart(frames)

        sender = pool.submit(send_hellos)
        try:
            checks = conformance_driver.check(endpoint, WAIT, 2.0)
        finally:
            ended.set()
        sender.result()
    assert {"hello", "hello again"} <= checks.made
    assert set(checks.wrong) == {"inactive"}, "\n".join(checks.lines())  # this driver sends no Steps


def test_our_own_policy_server_conforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, bundle = f"ipc://{tmp_path}/policy", tmp_path / "policy.safetensors"
    example.bundle().save(bundle)
    (tmp_path / "robot.yaml").write_text(yaml.safe_dump({"endpoints": {"policy": endpoint}}))
    words = ["policy", "--bundle", str(bundle), "--config", str(tmp_path / "robot.yaml")]
    with process("-m", "td3_robot", *words):
        code = main(["bench", "conformance", endpoint, "--serves", str(bundle)])
    lines = capsys.readouterr().out.splitlines()
    assert (code, lines[-1]) == (0, "no mistake found"), lines
    assert len(lines) == len(conformance_policy.DEMANDS) + 1
    assert all(line.startswith("ok     ") for line in lines[:-1])


# -- faulty drivers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty_drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checks]:
    """The report about each faulty driver."""
    folder = tmp_path_factory.mktemp("drivers")
    program = str(Path(__file__).with_name("faulty_driver.py"))

    def examine(item: tuple[int, str]) -> Checks:
        endpoint = f"ipc://{folder}/{item[0]}"
        with process(program, endpoint, item[1]):
            return conformance_driver.check(endpoint, SHORT_WAIT, 20.0)

    with ThreadPoolExecutor(TOGETHER) as pool:
        return dict(zip(FAULTS, pool.map(examine, enumerate(FAULTS)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_driver_is_found(faulty_drivers: dict[str, Checks], fault: str) -> None:
    checks, check = faulty_drivers[fault], FAULTS[fault][0]
    assert check in checks.wrong, "\n".join(checks.lines())
    assert any(line.startswith(f"WRONG  {check}: ") for line in checks.lines())
    assert "found a mistake" in checks.lines()[-1]


def test_for_every_check_of_a_driver_there_is_a_faulty_driver() -> None:
    assert {check for check, _ in FAULTS.values()} == set(conformance_driver.DEMANDS)


def test_a_driver_that_does_not_connect_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "conformance", f"ipc://{tmp_path}/policy", "--wait", "0.1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "         found: no Hello within 0.1 s" in lines
    assert lines[-1] == "1 of 26 checks found a mistake; not reached (marked -): 25"


def test_a_hello_without_a_name_is_reported(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/policy"
    greeting = hello("driver", "", client=1, robots=1, spec=example.spec())
    with zmq.Context() as context, context.socket(zmq.DEALER) as driver:
        driver.setsockopt(zmq.LINGER, 0)
        driver.connect(endpoint)
        driver.send_multipart([b"hello", codec.encode(greeting)])
        checks = conformance_driver.check(endpoint, 5.0, 2.0)
    assert checks.wrong["hello"] == ["the kit cannot read the Hello; see the checks `frames` and `form`"]
    assert checks.wrong["form"] == ["hello: name '' is empty or not printable"]


# -- faulty policy servers -------------------------------------------------------------------------------------------

Change = Callable[[str, dict[str, Any]], list[tuple[str, dict[str, Any]]]]


class Proxy(threading.Thread):
    """A policy server behind a proxy that puts one fault into the messages.

    Args:
        down: changes a message of the server.
        up: changes a message of a client.
        frames: number of frames in each message of the server.
    """

    def __init__(self, folder: Path, down: Change, up: Change, frames: int = 2) -> None:
        super().__init__(daemon=True)
        self.endpoint, self._back = f"ipc://{folder}/front", f"ipc://{folder}/back"
        self._down, self._up, self._frames = down, up, frames
        self.ended = threading.Event()
        self._server = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        bus, core = Bus(), PolicyCore(0, exploring=False)
        core.load(1, example.bundle())
        bus.serve(self._back, ServerLink("policy", "policy", ACCEPTS, {}, 1, example.spec()))
        while not self.ended.is_set():
            for to, message in core.step(bus.receive(0.02), time.monotonic()):
                bus.send(to, message)
        bus.close()

    def run(self) -> None:
        self._server.start()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as front:
            front.bind(self.endpoint)
            backs: dict[bytes, Any] = {}
            poller = zmq.Poller()
            poller.register(front, zmq.POLLIN)
            while not self.ended.is_set():
                for ready, _ in poller.poll(20):
                    if ready is front:
                        key, *frames = front.recv_multipart()
                        if key not in backs:
                            backs[key] = context.socket(zmq.DEALER)
                            backs[key].connect(self._back)
                            poller.register(backs[key], zmq.POLLIN)
                        for topic, content in self._passed(frames, self._up):
                            backs[key].send_multipart([topic, content])
                        continue
                    key = next(key for key, back in backs.items() if back is ready)
                    for topic, content in self._passed(ready.recv_multipart(), self._down):
                        front.send_multipart([key, topic, content, *[b""] * (self._frames - 2)])
            for back in backs.values():
                back.close(linger=0)
        self._server.join()

    @staticmethod
    def _passed(frames: list[bytes], change: Change) -> list[tuple[bytes, bytes]]:
        try:
            topic, content = frames
            messages = change(topic.decode(), msgpack.unpackb(content))
        except (ValueError, msgpack.UnpackException):
            return [(frames[0], frames[1])] if len(frames) == 2 else []
        return [(name.encode(), msgpack.packb(message)) for name, message in messages]


def same(topic: str, message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(topic, message)]


def on(wanted: str, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Change:
    """Imitate a fault: replace each message of one topic with the messages that ``change`` returns."""
    return lambda topic, message: [(topic, item) for item in change(message)] if topic == wanted else [(topic, message)]


def setting(topic: str, **fields: Any) -> Change:
    return on(topic, lambda message: [{**message, **fields}])


def without(topic: str, wrong: Callable[[dict[str, Any]], bool] = lambda _: True) -> Change:
    return on(topic, lambda message: [] if wrong(message) else [message])


def once() -> Change:
    """Imitate a server that does not answer a repeated Step again: drop each later Action for the same Step."""
    seen: set[Any] = set()

    def change(action: dict[str, Any]) -> list[dict[str, Any]]:
        key = action["source"], action["answers"]
        new = key not in seen
        seen.add(key)
        return [action] * new

    return on("action", change)


def lenient() -> Change:
    """Imitate a server that accepts every source. The proxy replaces a wrong source with the right one."""

    def change(topic: str, message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        if topic == "step" and message.get("source") == "somebody-else":
            message = {**message, "source": "conformance"}
        return [(topic, message)]

    return change


def backwards() -> tuple[Change, Change]:
    """Imitate a server that answers a Step whose sequence goes back.

    After higher sequences, the kit sends a Step with sequence 0. The proxy gives this Step a higher sequence, so the
    server answers it. The proxy then sets ``answers`` in the Action back to 0.
    """
    high, newest = 10**6, [0]

    def up(message: dict[str, Any]) -> list[dict[str, Any]]:
        number = message.get("sequence")
        if not isinstance(number, int) or message.get("source") != "conformance":
            return [message]
        if number < newest[0]:
            return [{**message, "sequence": high}]
        newest[0] = number
        return [message]

    def down(action: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**action, "answers": 0} if action["answers"] == high else action]

    return on("action", down), on("step", up)


def without_seed(action: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in action.items() if key != "noise_seed"}]


def welcome_instead(topic: str, message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    taken = topic == "refused" and message["code"] == "name"
    return [("welcome", {"protocol": 1, "name": "policy", "session": 1})] if taken else [(topic, message)]


def numbered(*first: int) -> Change:
    """Imitate a server that puts the session numbers ``first`` into its first Welcomes, in this order.

    Each later Welcome has a new session number.
    """
    sessions = itertools.chain(first, itertools.count(10))
    return on("welcome", lambda message: [{**message, "session": next(sessions)}])


SERVER_FAULTS: dict[str, tuple[str, Callable[[], tuple[Change, Change]]]] = {
    "three frames": ("frames", lambda: (same, same)),
    "no noise seed": ("form", lambda: (on("action", without_seed), same)),
    "silent before a hello": ("stranger", lambda: (without("refused", lambda it: it["code"] == "hello"), same)),
    "refuses a stranger twice": ("stranger", lambda: (on("refused", lambda it: [it, it]), same)),
    "a new session in each welcome": ("welcome", lambda: (numbered(), same)),
    "another session for the operator": ("welcome", lambda: (numbered(7, 7), same)),
    "wrong code": ("refusals", lambda: (setting("refused", code="hello"), same)),
    "no reason": ("refusals", lambda: (setting("refused", reason=""), same)),
    "two drivers": ("name", lambda: (welcome_instead, same)),
    "another stamp": ("heartbeat", lambda: (setting("heartbeat", stamp=1), same)),
    "another step": ("answer", lambda: (setting("action", stamp=1), same)),
    "no policy": ("policy", lambda: (setting("action", weights_version=0), same)),
    "another action": (
        "action",
        lambda: (on("action", lambda it: [{**it, "action": bytes(len(it["action"]))}]), same),
    ),
    "answers each step once": ("again", lambda: (once(), same)),
    "actions twice": ("newest", lambda: (on("action", lambda it: [it, it]), same)),
    "accepts every source": ("wrong steps", lambda: (same, lenient())),
    "accepts every sequence": ("going back", backwards),
    "drops steps with new fields": ("unknown field", lambda: (same, without("step", lambda it: "later" in it))),
    "drops hellos with new fields": ("optional", lambda: (same, without("hello", lambda it: "later" in it))),
    "another reply": ("reply", lambda: (on("reply", lambda it: [{**it, "id": it["id"] + 1}]), same)),
    "two replies": ("reply", lambda: (on("reply", lambda it: [it, it]), same)),
    "replies without error text": ("unknown verb", lambda: (setting("reply", error=""), same)),
    "relay with a target": ("relay", lambda: (setting("command", target="conformance"), same)),
    "acts in a stop": (
        "stop",
        lambda: (on("action", lambda it: [{**it, "weights_version": it["weights_version"] or 9}]), same),
    ),
    "ignores the estop of a driver": (
        "stop from a driver",
        lambda: (same, without("command", lambda it: it["reason"] == "smoke")),
    ),
    "forgets a stop": (
        "joining during a stop",
        lambda: (without("command", lambda it: it["reason"].startswith("one is in force")), same),
    ),
    "ignores bye": ("bye", lambda: (same, without("bye"))),
}
"""Maps a fault to the check that must find it, and to a function that returns ``down`` and ``up`` of the Proxy."""


@pytest.fixture(scope="module")
def faulty_servers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checks]:
    """The report about each faulty policy server."""

    def examine(name: str) -> Checks:
        _, make = SERVER_FAULTS[name]
        frames = 3 if name == "three frames" else 2
        proxy = Proxy(tmp_path_factory.mktemp("server"), *make(), frames)
        proxy.start()
        try:
            return conformance_policy.check(proxy.endpoint, example.bundle(), SHORT_WAIT if frames == 2 else 3.0)
        finally:
            proxy.ended.set()
            proxy.join()

    with ThreadPoolExecutor(TOGETHER) as pool:
        return dict(zip(SERVER_FAULTS, pool.map(examine, SERVER_FAULTS), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fault", SERVER_FAULTS)
def test_a_faulty_policy_server_is_found(faulty_servers: dict[str, Checks], fault: str) -> None:
    checks, check = faulty_servers[fault], SERVER_FAULTS[fault][0]
    assert check in checks.wrong, "\n".join(checks.lines())
    assert any(line.startswith(f"WRONG  {check}: ") for line in checks.lines())


@pytest.mark.slow
def test_the_report_names_the_command_that_gets_two_replies(faulty_servers: dict[str, Checks]) -> None:
    assert faulty_servers["two replies"].wrong.keys() == {"reply"}
    assert "the Command activate gets two Replies" in faulty_servers["two replies"].wrong["reply"]


@pytest.mark.parametrize(
    ("low", "high", "middle"),
    [(-2.0, 4.0, 1.0), (3.0, math.inf, 4.0), (-math.inf, 3.0, 2.0), (-math.inf, math.inf, 0.0)],
)
def test_observations_of_the_kit_are_inside_the_range(low: float, high: float, middle: float) -> None:
    assert conformance_policy._inside(low, high) == middle


@pytest.mark.slow
def test_the_report_counts_the_actions_of_a_step(faulty_servers: dict[str, Checks]) -> None:
    assert any(found.endswith(" gets 2 Actions") for found in faulty_servers["actions twice"].wrong["answer"])


def test_for_every_check_of_a_policy_server_there_is_a_faulty_server() -> None:
    assert {check for check, _ in SERVER_FAULTS.values()} == set(conformance_policy.DEMANDS)


def test_a_mistake_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proxy = Proxy(tmp_path, setting("heartbeat", stamp=1), same)
    proxy.start()
    try:
        bundle = tmp_path / "policy.safetensors"
        example.bundle().save(bundle)
        assert main(["bench", "conformance", proxy.endpoint, "--serves", str(bundle)]) == 1
    finally:
        proxy.ended.set()
        proxy.join()
    lines = capsys.readouterr().out.splitlines()
    assert "WRONG  heartbeat: a Heartbeat comes back with its stamp and the session (section 3)" in lines
    assert lines[-1] == "1 of 23 checks found a mistake"
