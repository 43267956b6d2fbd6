"""Commands of the page that wait for a file or a server do not delay an emergency stop, or the end of the dashboard."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs td3-robot[dashboard], which is not installed")

from td3_robot.config.schema import Config
from td3_robot.dashboard import server
from td3_robot.dashboard.actions import Action
from td3_robot.dashboard.guard import OPERATOR, ROLE
from tests.dashboard.conftest import Site

LOADS = 100  # more than the threads of Starlette's pool


async def post(app: Any, verb: str) -> tuple[int, bytes]:
    """Send a command to an ASGI application. Return the status and the body of the answer."""
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"verb": verb}).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "POST", "path": "/act", "headers": [], "query_string": b"", ROLE: OPERATOR}
    await app(scope, receive, send)
    return messages[0]["status"], messages[1]["body"]


def test_an_emergency_stop_does_not_wait_for_policies_whose_files_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file system of the policies does not answer until the stop is done."""
    answers = threading.Event()

    def act(action: Action, *_: Any) -> dict[str, Any]:
        assert action.verb == "estop" or answers.wait(300)
        return {"done": True}

    monkeypatch.setattr(server, "act", act)

    async def stop() -> list[tuple[int, bytes]]:
        dashboard = server.Dashboard("robot", None, None, Config(), lambda: False, None)  # type: ignore[arg-type]
        app = dashboard.app()
        loads = [asyncio.create_task(post(app, "load")) for _ in range(LOADS)]
        while sum(load.done() for load in loads) < LOADS - 1:  # the dashboard waits for only one of them
            await asyncio.sleep(0)
        assert await asyncio.wait_for(post(app, "estop"), 60) == (200, b'{"done":true}')
        answers.set()
        return await asyncio.gather(*loads)

    try:
        found = asyncio.run(stop())
    finally:
        answers.set()
    assert found[0] == (200, b'{"done":true}')
    assert set(found[1:]) == {(409, b"refused: the dashboard is still loading another policy\n")}


def test_a_function_that_never_returns_does_not_delay_the_end_of_the_process() -> None:
    program = (
        "import asyncio, threading\n"
        "from td3_robot.dashboard.ending import in_own_thread\n"
        "asyncio.run(asyncio.wait_for(in_own_thread(threading.Event().wait), 0.01))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "TimeoutError" in done.stderr


def test_ctrl_c_answers_a_command_that_waits(serve: Callable[..., Site], tmp_path: Path) -> None:
    """The policy server accepts the connection, and then sends nothing."""
    (tmp_path / "robot.yaml").write_text(f"endpoints: {{policy: 'ipc://{tmp_path}/policy.sock'}}")
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(60)
        listener.bind(f"{tmp_path}/policy.sock")
        listener.listen()
        site = serve("--config", "robot.yaml")
        cookie = site.get(site.operate.split(str(site.port))[1])[1]["set-cookie"].split(";")[0]
        here = {"Cookie": cookie, "Origin": f"http://127.0.0.1:{site.port}"}
        answer = pool.submit(site.get, "/act", here, "POST", b'{"verb": "estop"}')
        with listener.accept()[0]:
            site.process.interrupt()
            status, _, body = answer.result(60)
    assert (status, body) == (503, b"NOT done: the dashboard ends before an answer came\n")
    assert site.process.finish(30) == 130
    assert site.process.output().splitlines() == [f"operate: {site.operate}", f"view: {site.address}"]
