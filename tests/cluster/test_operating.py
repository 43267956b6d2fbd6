"""The commands and the dashboard for a training on one machine also operate a training on a cluster."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.conftest import Cluster, nothing_is_left
from tests.conftest import Command, poll_until

pytestmark = pytest.mark.timeout(1800)

SIMULATORS = {"sim-0", "sim-1", "sim-2", "sim-3"}
SERVERS = {"policy-0", "policy-1"}


class Tools:
    """The tools of a person who operates the run in the folder ``run``."""

    def __init__(self, command: Callable[..., Command]) -> None:
        self._command = command

    def rows(self, *words: str, code: int = 0) -> list[dict[str, Any]]:
        """Run a command on the run, and return the lines of JSON that it prints."""
        done = self._command(*words, "--run", "run")
        assert done.finish() == code, done.output()
        return [json.loads(line) for line in done.output().splitlines() if line.startswith("{")]

    def node(self, *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
        """Run ``td3-robot node``, and return the answer of each policy server or simulator."""
        return {row["node"]: row for row in self.rows("node", *words, "--json", "--timeout", "20", code=code)}


@pytest.fixture
def tools(command: Callable[..., Command]) -> Tools:
    return Tools(command)


@pytest.mark.slow
def test_a_person_watches_and_commands_a_run(
    train: Callable[..., Command], command: Callable[..., Command], cluster: Cluster, tools: Tools, tmp_path: Path
) -> None:
    """With ``cluster.bind=0.0.0.0``, every TCP endpoint is open on all network interfaces of its host.

    Other hosts reach the endpoint at the address that Ray shows.
    """
    run = train("cluster.bind=0.0.0.0", "evaluation.every=0", "total_steps=1_000_000")
    run.wait_for("^ready: .*policy-0.*policy-1")
    run.wait_for_steps(600)

    report = tools.rows("monitor", "--json", "--every", "20", "--seconds", "20")[-1]
    assert report["states"].items() >= dict.fromkeys(SERVERS | SIMULATORS, "active").items()
    assert {f"{name}/step" for name in SIMULATORS} <= report["topics"].keys()
    rates = tools.rows("topic", "hz", "step", "--json", "--every", "20", "--seconds", "20")
    assert {row["publisher"] for row in rates} == SIMULATORS
    assert all(row["rate_hz"] > 0 for row in rates)
    echoed = tools.rows("topic", "echo", "action", "--node", "policy-1", "--count", "3")
    assert [row["publisher"] for row in echoed] == ["policy-1"] * 3

    assert {name: row["state"] for name, row in tools.node("state").items()} == dict.fromkeys(SERVERS, "active")
    tools.node("freeze", "--target", "policy-1")
    assert {name: row["frozen"] for name, row in tools.node("state").items()} == {"policy-0": False, "policy-1": True}
    assert tools.node("deactivate", "--target", "sim-3").keys() == {"sim-3"}
    stopped = tools.node("estop", "--reason", "test")
    assert {name: row["state"] for name, row in stopped.items()} == dict.fromkeys(SERVERS, "fault")
    assert {name for row in stopped.values() for name in row["confirmed"]} == SIMULATORS
    assert all(SERVERS & row["faults"].keys() for row in tools.node("state", code=1).values())
    nobody = command("node", "estop", "--run", "run", "--target", "sim-9")
    assert nobody.finish() == 2
    unknown = "no policy server or simulator is named 'sim-9'; allowed: policy-0, policy-1, sim-0, sim-1, sim-2, sim-3"
    assert unknown in nobody.output()
    watch = command("node", "watch", "--run", "run")
    watch.until("the connections", lambda: shows(watch, *[": watching"] * 2))
    tools.node("reset")
    watch.until("the changes", lambda: shows(watch, *(f"{name}: fault -> inactive" for name in SERVERS)))
    tools.node("activate")
    run.wait_for_more_steps(500)
    _operate_on_the_page(command)

    run.interrupt()
    assert run.finish() == 130, run.output()
    nothing_is_left(cluster, tmp_path / "run")


def shows(command: Command, *texts: str) -> bool:
    """Whether each text occurs in the output of a command at least as often as it occurs in ``texts``."""
    command.take_lines()
    return all(command.output().count(text) >= texts.count(text) for text in texts)


def _operate_on_the_page(command: Callable[..., Command]) -> None:
    """Read the data of the dashboard's live page. Then send the request of the page's stop button: all robots stop."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    site = command("dashboard", "--run", "run", "--port", "0")
    address = urlsplit(site.wait_for("^operate: ").removeprefix("operate: "))
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("GET", f"/?{address.query}")
    answer = connection.getresponse()
    answer.read()
    headers = {
        "Cookie": answer.headers["set-cookie"].split(";")[0],
        "Origin": f"http://{address.netloc}",
        "Content-Type": "application/json",
    }

    connection.request("GET", "/events", headers=headers)
    stream = connection.getresponse()

    def names() -> set[str]:
        line = stream.readline()
        snapshot = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {"nodes": []}
        return {row["name"] for row in snapshot["nodes"]}

    poll_until(lambda: names() >= SERVERS | SIMULATORS | {"learner"}, lambda: "the page does not show all nodes")
    connection.close()

    def stop() -> dict[str, Any] | None:  # on a busy machine, a simulator can confirm the stop too late
        connection.request("POST", "/act", json.dumps({"verb": "estop"}), headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer if answer["done"] else None

    done = poll_until(stop, lambda: "not all simulators confirm the emergency stop")
    assert (done["state"], set(done["confirmed"])) == ("fault", SIMULATORS), done
    connection.close()
    site.interrupt()
    site.finish()
