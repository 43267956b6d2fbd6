"""The dashboard's pages and data: the page, its live stream, and the curves of a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from td3_robot.config.schema import Config
from td3_robot.dashboard.actions import LONGEST, Action, act
from td3_robot.dashboard.drawing import ROBOTS
from td3_robot.dashboard.ending import in_own_thread
from td3_robot.dashboard.guard import OPERATOR, ROLE
from td3_robot.dashboard.live import BINS_MS, HISTORY, LISTED, PERIOD, Live
from td3_robot.dashboard.recordings import STATIC, Recordings, as_json
from td3_robot.runtime import metrics
from td3_robot.runtime.run_folder import RunFolder

_POINTS = 2000  # maximum number of points of a curve
_LOOK = 0.1  # seconds between two checks for a new snapshot


@dataclass
class Dashboard:
    """Answers the requests of the page.

    Attributes:
        title: name of the run or configuration.
        live: the newest snapshot and the history.
        folder: folder of the run; None without a run.
        config: configuration of the robot, if there is no run.
        closing: returns whether the server is closing. If it is, the live streams end.
        recordings: the page of the run's recordings; None without a run.
    """

    title: str
    live: Live
    folder: RunFolder | None
    config: Config
    closing: Callable[[], bool]
    recordings: Recordings | None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", lambda _: FileResponse(STATIC / "index.html")),
                Route("/about", self._about),
                Route("/events", self._events),
                Route("/metrics", self._metrics),
                Route("/act", self._act, methods=["POST"]),
                *(self.recordings.routes() if self.recordings else ()),
                Mount("/static", StaticFiles(directory=STATIC)),
            ]
        )

    async def _about(self, request: Request) -> Response:
        limits = {"bins_ms": BINS_MS, "history": HISTORY, "period_s": PERIOD, "drawn": ROBOTS, "listed": LISTED}
        own = {"title": self.title, "role": request.scope[ROLE], "recordings": self.recordings is not None}
        return as_json({**limits, **own})

    async def _events(self, request: Request) -> Response:
        del request
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        """Yield the history, then each new snapshot. The server queues no snapshots, so a slow viewer misses some."""
        yield b"retry: 1000\nevent: history\ndata: " + self.live.history() + b"\n\n"
        sent = 0
        self.live.viewers += 1
        try:
            while not self.closing():
                if self.live.number != sent:
                    sent = self.live.number
                    yield b"data: " + self.live.newest + b"\n\n"
                await asyncio.sleep(_LOOK)
        finally:
            self.live.viewers -= 1

    async def _act(self, request: Request) -> Response:
        if request.scope[ROLE] != OPERATOR:
            return PlainTextResponse(
                "refused: to command the robots, open the address that td3-robot dashboard printed after 'operate:'\n",
                403,
            )
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LONGEST:
                return PlainTextResponse(f"refused: the request is longer than {LONGEST} bytes\n", 413)
        try:
            action = msgspec.json.decode(body, type=Action)
        except msgspec.DecodeError as error:  # a ValidationError is a DecodeError
            return PlainTextResponse(f"refused: {error}\n", 400)
        # A load may never return, and keeps its thread. So only one load may wait.
        if action.verb == "load" and self._loading.locked():
            return PlainTextResponse("refused: the dashboard is still loading another policy\n", 409)
        async with self._loading if action.verb == "load" else contextlib.nullcontext():
            return as_json(await in_own_thread(lambda: act(action, self.folder, self.config)))

    def _metrics(self, request: Request) -> Response:
        """The records of ``metrics.jsonl`` as columns. Starlette calls this function in a thread."""
        del request
        file = self.folder.metrics_file if self.folder else None
        kinds = ("train", "evaluation")
        return as_json({kind: columns(metrics.read(file, kind) if file else []) for kind in kinds})


def columns(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return one list for each name whose value is a number in at least one record.

    The list has the name's value in each record, and None for a record without this name. If there are more than
    ``_POINTS`` records, only every n-th record remains, counted back from the newest.
    """
    stride = -(-len(records) // _POINTS)
    kept = records[::-1][::stride][::-1] if records else []
    names = {name: None for record in kept for name, value in record.items() if type(value) in (int, float)}
    return {name: [record.get(name) for record in kept] for name in names}
