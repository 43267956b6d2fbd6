"""The page of the recordings in a run folder: their content, and what a replay says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from td3_robot.runtime.comparison import runs_in

STATIC = Path(__file__).parent / "static"
_MOST = 1000  # maximum number of listed recordings
_TEXT = 20_000  # characters of a replay's output that the page shows
_COMMAND = (sys.executable, "-m", "td3_robot")


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

    A request names a recording. The name must be in the list: it never becomes a path. Other processes read and replay
    the files, with low priority. So a large or damaged file does not delay the emergency stop.

    Args:
        title: name of the run, or of the folder of runs.
        home: name of the page at ``/``.
        listed: returns the path of each recording, by name.
    """

    def __init__(self, title: str, home: str, listed: Callable[[], Mapping[str, Path]]) -> None:
        self._title, self._home = title, home
        self._listed = listed
        self._reading = asyncio.Lock()
        self._replay = _Replay()

    def routes(self) -> list[Route]:
        return [
            Route("/recordings", self._page),
            Route("/recordings/list", self._list),
            Route("/recordings/content", self._content),
            Route("/recordings/replay", self._show_replay, methods=["GET"]),
            Route("/recordings/replay", self._start_replay, methods=["POST"]),
        ]

    def close(self) -> None:
        """End a replay that runs."""
        self._replay.close()

    async def _page(self, request: Request) -> Response:
        del request
        return FileResponse(STATIC / "recordings.html")

    def _list(self, request: Request) -> Response:
        """The recordings with their sizes. Starlette calls this function in a thread."""
        del request
        rows = []
        for name, file in self._listed().items():
            with contextlib.suppress(OSError):  # the file has just been removed
                rows.append({"name": name, "bytes": file.stat().st_size})
        return _json({"title": self._title, "home": self._home, "recordings": rows})

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
        if not self._replay.start(request.query_params["name"], file):
            return PlainTextResponse("refused: another replay runs; wait until it ends\n", 409)
        return _json(self._replay.report())

    async def _show_replay(self, request: Request) -> Response:
        del request
        return _json(self._replay.report())


class _Replay:
    """Runs ``td3-robot replay``, one at a time, and keeps the output of the newest one."""

    def __init__(self) -> None:
        self._name = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (close() closes it)

    def start(self, name: str, file: Path) -> bool:
        """Replay a recording. Returns False if a replay runs."""
        if self._process and self._process.poll() is None:
            return False
        self._output.seek(0)
        self._output.truncate()
        self._name = name
        self._process = subprocess.Popen(
            [*_COMMAND, "replay", str(file)], stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
        )
        _yield_processors(self._process.pid)
        return True

    def report(self) -> dict[str, Any]:
        """Name of the recording, whether the replay runs, its exit code, and its output without the folder."""
        code = self._process.poll() if self._process else None
        running = self._process is not None and code is None
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), _TEXT, 0).decode(errors="replace")
        if self._process:
            assert isinstance(self._process.args, list)
            text = text.replace(str(self._process.args[-1]), self._name)
        return {
            "name": self._name,
            "running": running,
            "code": code,
            "text": "" if running else text + ("…\n" if size > _TEXT else ""),
        }

    def close(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()


async def _run(words: tuple[str, ...]) -> tuple[int, bytes, str]:
    """Run a command of td3-robot. The command ends when the task is cancelled.

    Returns its exit code, its output and its errors.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    _yield_processors(process.pid)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, output, errors.decode(errors="replace")


def _yield_processors(process: int) -> None:
    """Give a process the lowest priority, because a robot may run on this machine."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, 19)


def _unknown() -> Response:
    return PlainTextResponse("there is no such recording\n", 404)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
