"""Compares all runs in a folder: curves with seeds as bands, differences of configurations, scores and videos."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from td3_robot.dashboard.server import STATIC
from td3_robot.runtime import metrics
from td3_robot.runtime.run_folder import RunFolder

_RUNS = 200  # maximum number of runs on the page


def app(folder: Path) -> Starlette:
    """The pages that compare the runs in a folder."""

    def page(request: Request) -> Response:
        del request
        return FileResponse(STATIC / "compare.html")

    def data(request: Request) -> Response:
        del request
        return Response(msgspec.json.encode(compare(folder)), media_type="application/json")

    def video(request: Request) -> Response:
        wanted = request.path_params["run"], request.path_params["file"]
        for run in _runs(folder):
            for file in _videos(run):
                if (run.name, file.name) == wanted:
                    return FileResponse(file)
        return PlainTextResponse("there is no such video\n", 404)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/compare", data),
            Route("/video/{run}/{file}", video),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


def compare(folder: Path) -> dict[str, Any]:
    """What the page shows: ``runs``, the configuration ``keys`` in which they differ, and the ``bands`` of curves."""
    runs = [_facts(path) for path in _runs(folder)]
    names = {name for run in runs for name in run["config"]}
    differ = sorted(name for name in names if len({json.dumps(run["config"].get(name)) for run in runs}) > 1)
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        others = {name: run["config"].get(name) for name in differ if name != "seed"}
        groups.setdefault(json.dumps(others), []).append(run)
    bands = [
        {"label": _label(json.loads(key), group), **band([run["curve"] for run in group])}
        for key, group in groups.items()
    ]
    for run in runs:
        run["config"] = {name: run["config"].get(name) for name in differ}
    return {"title": folder.absolute().name, "runs": runs, "keys": differ, "bands": bands}


def band(curves: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """The mean, lowest and highest value of curves at each step of any curve. A curve counts only within its range."""
    steps = sorted({step for curve in curves for step in curve["env_steps"]})
    whole = [curve for curve in curves if curve["env_steps"]]
    if not steps:
        return {"env_steps": [], "mean": [], "low": [], "high": []}
    values = np.array(
        [np.interp(steps, curve["env_steps"], curve["returns"], left=np.nan, right=np.nan) for curve in whole]
    )
    return {
        "env_steps": steps,
        "mean": np.nanmean(values, axis=0).tolist(),
        "low": np.nanmin(values, axis=0).tolist(),
        "high": np.nanmax(values, axis=0).tolist(),
    }


def _runs(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/config.yaml"))[:_RUNS]


def _videos(run: Path) -> list[Path]:
    return sorted(run.glob("*.mp4"))


def _facts(path: Path) -> dict[str, Any]:
    run = RunFolder(path)
    records = metrics.read(run.metrics_file, "evaluation") if run.metrics_file.exists() else []
    records = [record for record in records if isinstance(record.get("eval_return_mean"), int | float)]
    last = records[-1] if records else {}
    try:
        config = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        config = {}
    return {
        "name": path.name,
        "config": flat(config if isinstance(config, dict) else {}),
        "score": last.get("eval_return_mean"),
        "score_std": last.get("eval_return_std"),
        "env_steps": last.get("env_steps"),
        "curve": {
            "env_steps": [record["env_steps"] for record in records],
            "returns": [record["eval_return_mean"] for record in records],
        },
        "videos": [file.name for file in _videos(path)],
    }


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by their whole key, such as ``learner.batch_size``."""
    values: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _label(differences: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> str:
    """A short name of a group of runs: what makes it different, or the name of its only run."""
    if len(group) == 1:
        return str(group[0]["name"])
    settings = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in list(differences.items())[:3])
    return f"{settings or 'all runs'} ({len(group)} seeds)"
