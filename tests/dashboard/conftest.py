"""Helpers for tests of the dashboard: a run that has ended, the dashboard's server, and a browser."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from td3_robot.config import loading
from td3_robot.runtime.run_folder import RunFolder
from tests.dashboard.browser import Page, chromium

RECORDS = [
    {"kind": "train", "env_steps": 1000, "updates": 500, "return_mean": -12.25, "critic_loss": 0.75, "actor_loss": 3.0},
    {"kind": "evaluation", "env_steps": 1000, "eval_return_mean": 10.0, "eval_return_std": 1.5},
    {"kind": "train", "env_steps": 2000, "updates": 1500, "return_mean": 31.0625, "critic_loss": 0.12345678901234567},
    {"kind": "evaluation", "env_steps": 2000, "eval_return_mean": 123.456789, "eval_return_std": 2.0},
]


class Site(NamedTuple):
    """A running dashboard: its process, and the addresses for viewers and operators."""

    process: Any
    address: str
    operate: str

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def token(self) -> str:
        return urlsplit(self.address).query.removeprefix("token=")

    def get(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: bytes | None = None
    ) -> tuple[int, Any, bytes]:
        """Send a request, without a cookie by default. Return the status, the headers and the body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, body, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def cookie(self) -> dict[str, str]:
        """Return the header with a viewer's cookie."""
        return {"Cookie": self.get(f"/?token={self.token}")[1]["set-cookie"].split(";")[0]}


def make_run(folder: Path) -> RunFolder:
    """Make a run that has ended, with RECORDS as its metrics."""
    run = RunFolder.create(folder, loading.load("walker2d_fast"))
    run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return run


@pytest.fixture
def serve(command: Callable[..., Any]) -> Callable[..., Site]:
    """Starts a dashboard on a free port: ``serve("--run", folder)``."""
    for module in ("starlette", "uvicorn"):
        pytest.importorskip(module, reason="needs td3-robot[dashboard], which is not installed")

    def start(*arguments: str) -> Site:
        process = command("dashboard", *arguments, "--port", "0")
        operate = process.wait_for("^operate: ").removeprefix("operate: ")
        return Site(process, process.wait_for("^view: ").removeprefix("view: "), operate)

    return start


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "browser") as opened:
        yield opened
