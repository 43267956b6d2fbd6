"""The pages that compare all runs in a folder."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from td3_robot.dashboard.recordings import STATIC, Recordings, as_json
from td3_robot.runtime.comparison import compare, runs_in, videos_of


def app(folder: Path, recordings: Recordings) -> Starlette:
    """The pages that compare the runs in a folder, and the page of their recordings."""

    def video(request: Request) -> Response:
        wanted = request.path_params["run"], request.path_params["file"]
        for run in runs_in(folder):
            for file in videos_of(run):
                if (run.name, file.name) == wanted:
                    return FileResponse(file)
        return PlainTextResponse("there is no such video\n", 404)

    return Starlette(
        routes=[
            Route("/", lambda _: FileResponse(STATIC / "compare.html")),
            Route("/compare", lambda _: as_json(compare(folder))),
            Route("/video/{run}/{file}", video),
            *recordings.routes(),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )
