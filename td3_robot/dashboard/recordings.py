"""The page that lists the recordings of a run or of a folder of runs, shows their content and replays them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from td3_robot.runtime.comparison import runs_in
from td3_robot.runtime.hosts import Lifeline

STATIC = Path(__file__).parent / "static"
_MOST = 1000  # maximum number of listed recordings
_TEXT = 20_000  # maximum number of characters of a replay's output on the page
_COMMAND = (sys.executable, "-m", "td3_robot.dashboard.reading")


def recordings_in(run: Path) -> dict[str, Path]:
    """The recordings in a run folder, by file name."""
    files = sorted(file for file in run.glob("*.mcap") if file.is_file() and file.name.isprintable())
    return {file.name: file.absolute() for file in files[:_MOST]}


def recordings_of_runs(folder: Path) -> dict[str, Path]:
    """The recordings of all runs in a folder, by run and file name."""
    found = {f"{run.name}/{name}": file for run in runs_in(folder) for name, file in recordings_in(run).items()}
    return {name: found[name] for name in list(found)[:_MOST] if name.isprintable()}


class Recordings:
    """Answers the requests of the page.

    A request names a recording. The server accepts only names in the list, and never uses a name as a path. Separate
    processes with low priority read and replay the files. So a large or damaged file does not delay the dashboard's
    emergency stop.

    Args:
        title: name of the run, or of the folder of runs.
        home: name of the page at ``/``.
        listed: returns the path of each recording, by name.
    """

    def __init__(self, title: str, home: str, listed: Callable[[], Mapping[str, Path]]) -> None:
        self._title, self._home = title, home
        self._listed = listed
        self._reading = asyncio.Lock()
        self._replay: asyncio.Task[tuple[int, str]] | None = None
        self._replayed = ""  # name of the recording of the newest replay

    def routes(self) -> list[Route]:
        return [
            Route("/recordings", lambda _: FileResponse(STATIC / "recordings.html")),
            Route("/recordings/list", self._list),
            Route("/recordings/content", self._content),
            Route("/recordings/replay", self._show_replay, methods=["GET"]),
            Route("/recordings/replay", self._start_replay, methods=["POST"]),
        ]

    def _list(self, request: Request) -> Response:
        """The recordings with their sizes. Starlette calls this function in a thread."""
        del request
        rows = []
        for name, file in self._listed().items():
            with contextlib.suppress(OSError):  # the file has just been removed
                rows.append({"name": name, "bytes": file.stat().st_size})
        return as_json({"title": self._title, "home": self._home, "recordings": rows})

    async def _content(self, request: Request) -> Response:
        """What ``td3-robot info --timeline`` says about a recording. One recording is read at a time."""
        file = await run_in_threadpool(self._file, request)
        if file is None:
            return _unknown()
        robot = request.query_params.get("robot", "")
        words = ("info", str(file), "--json", "--timeline", *((f"--robot={robot}",) if robot else ()))
        async with self._reading:
            code, output, problem = await _run(words)
        if code != 0:
            return PlainTextResponse(problem or f"td3-robot info ended with exit code {code}", 422)
        return Response(output, media_type="application/json")

    def _file(self, request: Request) -> Path | None:
        return self._listed().get(request.query_params.get("name", ""))

    async def _start_replay(self, request: Request) -> Response:
        file = await run_in_threadpool(self._file, request)
        if file is None:
            return _unknown()
        if self._replay and not self._replay.done():
            return PlainTextResponse("refused: another replay runs; wait until it ends\n", 409)
        self._replayed = request.query_params["name"]
        self._replay = asyncio.create_task(_replay(self._replayed, file))
        return await self._show_replay(request)

    async def _show_replay(self, request: Request) -> Response:
        """The newest replay: the name of its recording, whether it still runs, its exit code and its output."""
        del request
        running = self._replay is not None and not self._replay.done()
        code, text = self._replay.result() if self._replay and not running else (None, "")
        return as_json({"name": self._replayed, "running": running, "code": code, "text": text})


async def _replay(name: str, file: Path) -> tuple[int, str]:
    """Replay a recording. Return the exit code, and the output with the recording's name in place of its path."""
    code, output, problem = await _run(("replay", str(file)))
    text = (output.decode(errors="replace") + problem).replace(str(file), name)
    return code, text[:_TEXT] + ("…\n" if len(text) > _TEXT else "")


async def _run(words: tuple[str, ...]) -> tuple[int, bytes, str]:
    """Run a td3-robot command, and return its exit code, output and errors.

    If the asyncio task that calls this function is cancelled, or this process ends, the command ends, too.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        env=_lifeline().environment(os.environ),
        pass_fds=(_lifeline().read_end,),
    )
    _yield_processors(process.pid)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, output, errors.decode(errors="replace")


@cache
def _lifeline() -> Lifeline:
    """The pipe that all commands follow. It closes when this process ends."""
    return Lifeline()


def _yield_processors(process: int) -> None:
    """Give a process the lowest priority, because this machine possibly controls a robot."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, 19)


def _unknown() -> Response:
    return PlainTextResponse("there is no such recording\n", 404)


def as_json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
