"""Compares the runs in a folder: scores, configuration keys that differ, and learning curves with a band over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from td3_robot.config.section import flat
from td3_robot.runtime import metrics
from td3_robot.runtime.run_folder import RunFolder

_RUNS = 200  # maximum number of runs to compare: the first ones in the order of names


def compare(folder: Path) -> dict[str, Any]:
    """Compare the runs in a folder.

    Returns:
        A dictionary. ``title`` is the name of the folder, and ``runs`` has the facts of each compared run. ``left_out``
        is the number of runs that are not compared. ``keys`` are the configuration keys in which the runs differ.
        ``bands`` has the label and the :func:`band` of each group of runs. The runs of one group differ only in their
        seeds.
    """
    paths = _every_run(folder)
    runs = [_facts(path) for path in paths[:_RUNS]]
    names = {name for run in runs for name in run["config"]}
    differ = sorted(name for name in names if len({_key(run["config"].get(name)) for run in runs}) > 1)
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        others = {name: run["config"].get(name) for name in differ if name != "seed"}
        groups.setdefault(_key(others), []).append(run)
    bands = [
        {"label": _label(json.loads(key), group), **band([run["curve"] for run in group])}
        for key, group in groups.items()
    ]
    for run in runs:
        run["config"] = {name: run["config"].get(name) for name in differ}
    title, left_out = folder.absolute().name, len(paths) - len(runs)
    return {"title": title, "runs": runs, "left_out": left_out, "keys": differ, "bands": bands}


def band(curves: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Return the mean, lowest and highest value of the curves, at each step at which at least one curve has a point.

    The function interpolates each curve between its points. A curve has no value before its first point or after its
    last point.
    """
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


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders in a folder, sorted by name. If there are more than 200, return only the first 200."""
    return _every_run(folder)[:_RUNS]


def _every_run(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/config.yaml"))


def videos_of(run: Path) -> list[Path]:
    return sorted(file for file in run.iterdir() if file.suffix in (".mp4", ".webm"))


def _evaluations(path: Path) -> list[dict[str, Any]]:
    records = metrics.read(RunFolder(path).metrics_file, "evaluation")
    return [record for record in records if isinstance(record.get("eval_return_mean"), int | float)]


def curve_of(path: Path) -> dict[str, list[float]]:
    """Return the evaluations of a run: ``env_steps`` and mean ``returns``."""
    return _curve(_evaluations(path))


def _curve(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {
        "env_steps": [record["env_steps"] for record in records],
        "returns": [record["eval_return_mean"] for record in records],
    }


def _facts(path: Path) -> dict[str, Any]:
    run, records = RunFolder(path), _evaluations(path)
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
        "curve": _curve(records),
        "videos": [file.name for file in videos_of(path)],
    }


def _key(value: Any) -> str:
    """The JSON text of a value. A value from YAML can also be a date, which becomes text."""
    return json.dumps(value, default=str)


def _label(differences: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> str:
    """A label for a group of runs.

    The label of a group with one run is the name of this run. The label of a larger group lists the settings that
    differ between groups. If there are more than 3 such settings, it names the first and the last run instead.
    """
    if len(group) == 1:
        return str(group[0]["name"])
    if len(differences) > 3:
        return f"{group[0]['name']} to {group[-1]['name']} ({len(group)} seeds)"
    settings = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in differences.items())
    return f"{settings or 'all runs'} ({len(group)} seeds)"
