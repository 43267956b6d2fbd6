"""The tables and plots of docs/explanation/reliability.md, and the function that inserts a table into a page."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from td3_robot.errors import UsageError

ROOT = Path(__file__).parents[1]
DATA = ROOT / "benchmarks" / "results" / "reliability"
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
KINDS = {"train": "training", "deploy": "deployment"}
_PANELS = {
    "uss": "memory that only one process uses, MB",
    "files": "open file descriptors",
    "threads": "threads",
    "disk": "disk, MB",
    "latency": "latency, ms",
    "load": "load of the machine",
}


def insert(table: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Replace the text between the marks of a table in the page.

    Raises:
        UsageError: the page has no such marks.
    """
    begin, end = f"<!-- {table}: made by a command -->", f"<!-- end of {table} -->"
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise UsageError(f"{page} has no lines {begin!r} and {end!r}")
    page.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]), encoding="utf-8")


def write_soak(data: Path = DATA, page: Path = PAGE) -> None:
    """For each soak test with data, write the tables into the page and draw the plot."""
    for kind in KINDS:
        if (data / f"{kind}.json").exists():
            insert(f"soak {kind}", _soak_table(data, kind), page)
            draw(data / f"{kind}.csv", page.parents[1] / "images" / f"soak_{kind}.png")


def _soak_table(data: Path, kind: str) -> list[str]:
    report = json.loads((data / f"{kind}.json").read_text())
    run = report["run"]
    lines = [
        f"{report['minutes']:g} minutes of {KINDS[kind]}. The column 'first' shows the median of the first "
        "tenth of the samples after the warm-up. The column 'last' shows the median of the last tenth.",
        "",
        "| process | memory, first | last | slope | files, first → last | threads, first → last |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, figures in report["processes"].items():
        uss, files, threads = (figures[key] for key in ("uss", "files", "threads"))
        lines.append(
            f"| {name} | {uss['first']:.1f} MB | {uss['last']:.1f} MB | {uss['slope_per_h']:+.2f} MB/h "
            f"| {files['first']:.0f} → {files['last']:.0f} | {threads['first']:.0f} → {threads['last']:.0f} |"
        )
    quantities = {
        "median_ms": ("median of the latency", "{:.2f} ms"),
        "p99_ms": ("99th percentile of the latency", "{:.2f} ms"),
        "load": ("load of the machine", "{:.0f}"),
    }
    return [
        *lines,
        "",
        "| | first | last |",
        "|---|--:|--:|",
        *(
            f"| {title} | {form.format(run[key]['first'])} | {form.format(run[key]['last'])} |"
            for key, (title, form) in quantities.items()
            if key in run
        ),
        f"| disk of the run ({run['disk']['slope_per_h']:.1f} MB/h) | {run['disk']['first']:.1f} MB "
        f"| {run['disk']['last']:.1f} MB |",
        "",
        f"Missing in the recordings: {report['missing'] or 'nothing'}. "
        f"Grows: {', '.join(report['grows']) or 'nothing'}.",
        "",
        f"![Memory, files, threads, disk and latency of the {KINDS[kind]}](../images/soak_{kind}.png)",
    ]


def draw(samples: Path, picture: Path) -> None:
    """Draw the samples of a soak test: one panel for each quantity.

    Each line shows a process, or a statistic of the latency.
    """
    series: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with samples.open(newline="") as file:
        for row in csv.DictReader(file):
            series[row["quantity"]][row["process"]].append((float(row["time_s"]) / 60, float(row["value"])))
    names = {"median_ms": "median", "p99_ms": "99th percentile", "longest_ms": "longest"}
    series["latency"] = {title: series[key]["run"] for key, title in names.items()}
    figure = Figure(figsize=(10, 10), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (quantity, title) in zip(figure.subplots(3, 2).flat, _PANELS.items(), strict=True):
        for number, (name, points) in enumerate(series[quantity].items()):
            if not points:  # for example, no latencies after a soak without Actions
                continue
            x, y = zip(*points, strict=True)
            axes.plot(x, y, label=name, color=f"C{number}", linewidth=1)
        axes.set(
            title=title, xlabel="minutes", xlim=(0, None), ylim=(0.1, None) if quantity == "latency" else (0, None)
        )
        if quantity == "latency":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if len(series[quantity]) > 1:
            axes.legend(fontsize="small", ncols=2)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)


FAULT_NAMES = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP for 3 s",
    "cut": "link cut for 3 s",
    "lossy": "5 % loss, 50 ms delay",
    "disk": "disk full",
    "clock": "clock jumps by an hour",
    "memory": "memory limit reached",
}


def write_faults(data: Path = DATA / "faults.json", page: Path = PAGE) -> None:
    """Write the fault matrix into the page."""
    report = json.loads(data.read_text())
    lines = [
        "| fault | process | use | Steps lost | not recorded | works again | safe action | robot moves again | note |",
        "|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for cell, result in report["cells"].items():
        fault, process, use = cell.split("/")
        figures = [_figure(result, key) for key in ("lost_steps", "missing_in_recording")]
        times = [_figure(result, key, " s") for key in ("goes_on_s", "safe_s", "robot_goes_on_s")]
        note = f"not measured: {result['failed']}" if "failed" in result else result.get("note", "")
        lines.append(" | ".join([f"| {FAULT_NAMES[fault]}", process, use, *figures, *times, f"{note} |"]))
    reasons: dict[str, list[str]] = defaultdict(list)
    for cell, why in report["left_out"].items():
        reasons[why].append(cell)
    lines += ["", "These combinations of FAULT/PROCESS/USE are left out:", ""]
    lines += [f"- {', '.join(f'`{cell}`' for cell in _grouped(cells))}: {why}." for why, cells in reasons.items()]
    if report["not_run"]:
        cells = ", ".join(f"`{cell}`" for cell in _grouped(report["not_run"]))
        lines += ["", f"These combinations were not run: {cells}."]
    insert("fault matrix", lines, page)


def _grouped(cells: Sequence[str]) -> list[str]:
    """Join cells that differ only in the fault: ``kill+stop/policy/train``. ``*`` stands for every fault."""
    faults: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        fault, _, place = cell.partition("/")
        faults[place].append(fault)
    return [f"{'*' if len(found) == len(FAULT_NAMES) else '+'.join(found)}/{place}" for place, found in faults.items()]


def _figure(result: dict[str, float | None], key: str, unit: str = "") -> str:
    value = result.get(key)
    return "" if value is None else f"{value:.2f}{unit}" if unit else str(value)
