"""The tables, sentences and plot of docs/explanation/scale.md, from the results of benchmarks/scale.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scale_queues
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from reliability import insert

from td3_robot.bench import harness

ROOT = Path(__file__).parents[1]
DATA = ROOT / "benchmarks" / "results" / "scale" / "scale.json"
PAGE = ROOT / "docs" / "explanation" / "scale.md"
PICTURE = ROOT / "docs" / "images" / "scale.png"
RATE = 60.0  # Steps per second of a source in real time
THOUSAND = ((1000, 1), (63, 16), (16, 64))  # (sources, robots of each source) for about 1,000 robots
MEASURED = ("growth", "full", "robots", "weights", "updates", "costs", "ray")
"""Names of the parts that benchmarks/scale.py measures."""
_HOSTS = 16  # hosts with a policy server, in the table of 1,000 robots
_FITTED = 4  # the fit of the costs uses only loads with at most this number of sources
Report = Mapping[str, Any]
Cells = Sequence[Mapping[str, Any]]
"""Measurements, one for each load (number of sources, robots and policy servers)."""


def write(report: Report) -> None:
    """Write all parts into the page, and draw the plot."""
    for name, part in PARTS.items():
        insert(f"scale {name}", list(part(report)), PAGE)
    draw(report)


def lines(report: Report) -> Iterator[str]:
    """Yield all parts of the page as text. For a part that was not measured, yield a line that names it."""
    for name, part in PARTS.items():
        try:
            text = list(part(report))
        except KeyError as missing:  # a run with --only has not measured this part
            text = [f"not shown: the part {missing} was not measured"]
        yield from (f"== {name}", *text)


def _machine(report: Report) -> Iterator[str]:
    machine, loads = report["machine"], report["loads"]
    unknown = ", ".join(f"`{part}`" for part in MEASURED if part in report and part not in loads)
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    yield (
        f"{harness.hardware(machine)}. Other programs used the machine at the same time: the load "
        f"average was {min(loads.values()):.0f} to {max(loads.values()):.0f} at the start of each part of the benchmark"
        f"{f' (not recorded for the parts {unknown})' if unknown else ''}. "
        f"Each measured figure of the learner is a median of {report['rounds']} measurements "
        f"of {report['seconds']:g} s. {packages}."
    )


def _growth(report: Report) -> Iterator[str]:
    yield "| sources | robots of each | Steps/s sent | Steps/s taken | main thread, share of a core | turns per Step |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for cell in report["growth"]:
        yield (
            f"| {cell['sources']} | {cell['robots']} | {cell['sources'] * RATE:,.0f} | {cell['steps_per_s']:,.0f} "
            f"| {_busy(cell):.0%} | {cell['turns_per_step']:.2f} |"
        )
    parts = []
    for robots in sorted({cell["robots"] for cell in report["growth"]}):
        shares = [_busy(cell) for cell in report["growth"] if cell["robots"] == robots]
        parts.append(f"by a factor of {shares[-1] / shares[0]:.0f} if each source has {_robot_count(robots)}")
    yield ""
    yield f"From 1 to 64 sources, the share of a core grows {', and '.join(parts)}."


def _full(report: Report) -> Iterator[str]:
    yield (
        "| sources | robots of each | main thread, µs | other threads, µs | Steps/s for a whole core "
        "| sent, bytes | memory, MB |"
    )
    yield "|--:|--:|--:|--:|--:|--:|--:|"
    for cell in report["full"]:
        yield _row(cell)
    parts = []
    for robots in sorted({cell["robots"] for cell in report["full"]}):
        costs = [cell["main_us"] for cell in report["full"] if cell["robots"] == robots]
        parts.append(f"{min(costs):.0f} to {max(costs):.0f} µs for a Step of {_robot_count(robots)}")
    yield ""
    yield f"With 1 to 64 sources, the main thread needs {' and '.join(parts)}."


def _robots(report: Report) -> Iterator[str]:
    yield (
        "| sources | robots of each | main thread, µs | other threads, µs | Steps/s for a whole core "
        "| sent, bytes | memory, MB |"
    )
    yield "|--:|--:|--:|--:|--:|--:|--:|"
    for cell in report["robots"]:
        yield _row(cell)
    slope, start = np.polyfit(*_columns(report["robots"], "robots", "main_us"), 1)
    most = max(report["robots"], key=lambda cell: cell["robots"] / cell["main_us"])
    yield ""
    yield (
        f"The best straight line for the main thread is {start:.0f} µs + {slope:.2f} µs for each robot. One core "
        f"takes at most {1e6 * most['robots'] / most['main_us']:,.0f} transitions per second ({most['robots']} robots)."
    )


def _weights(report: Report) -> Iterator[str]:
    yield (
        "| policy servers | learner, total ms | learner, I/O threads ms | each server, ms | first to last server, ms |"
    )
    yield "|--:|--:|--:|--:|--:|"
    for cell in report["weights"]:
        yield (
            f"| {cell['servers']} | {cell['all_ms_per_weights']:.1f} | {cell['io_ms_per_weights']:.2f} "
            f"| {cell['server_cpu_ms']:.2f} | {cell['server_span_ms']:.0f} |"
        )
    slope, _ = np.polyfit(*_columns(report["weights"], "servers", "all_ms_per_weights"), 1)
    rates = [cell["weights_per_s"] for cell in report["weights"]]
    yield ""
    yield (
        f"Each policy server costs the learner about {slope:.1f} ms for each set of weights of "
        f"{_weights_bytes(report) / 1e6:.2f} MB. The rest of *learner, total* is the time for the ten updates and for "
        "the Steps that arrive between two sets. "
        f"The learner published {min(rates):.1f} to {max(rates):.1f} sets per second."
    )


def _ray(report: Report) -> Iterator[str]:
    yield "| | Steps/s | learner, µs per Step | all processes, µs per Step |"
    yield "|---|--:|--:|--:|"
    for name, row in report["ray"]["rows"].items():
        yield f"| {name} | {row['steps_per_s']:,.0f} | {row['all_us']:.0f} | {row['family_us']:.0f} |"
    for name, reason in report["ray"]["not_measured"].items():
        yield f"| {name} | not measured: {reason} | | |"


def _simulation(report: Report) -> Iterator[str]:
    costs = _costs(report)
    yield (
        f"Fitted costs: {costs.turn * 1e6:.0f} µs for a turn, plus {costs.turn_source * 1e6:.1f} µs for each source; "
        f"{costs.step * 1e6:.0f} µs for a Step, plus {costs.step_robot * 1e6:.2f} µs for each of its robots. "
        f"The fit uses only rows with at most {_FITTED} sources, from this table and from the tables at full speed. "
        "The other rows of this table are predictions."
    )
    yield ""
    yield "| sources | robots of each | share of a core, measured | simulated | turns per Step, measured | simulated |"
    yield "|--:|--:|--:|--:|--:|--:|"
    errors = []
    for cell in report["growth"]:
        share = _busy(cell) / (_busy(cell) + cell["kept_waiting"])
        rate, run = cell["steps_per_s"] / cell["sources"], cell["slice_ms"] / 1e3
        outcome = scale_queues.simulate(cell["sources"], cell["robots"], rate, costs, share=share, run=run)
        yield (
            f"| {cell['sources']} | {cell['robots']} | {_busy(cell):.1%} | {outcome.busy:.1%} "
            f"| {cell['turns_per_step']:.2f} | {outcome.turns_per_step:.2f} |"
        )
        if cell["sources"] > _FITTED:
            errors.append(abs(outcome.busy / _busy(cell) - 1))
    yield ""
    yield (
        f"In the predicted rows, the simulated share of a core differs from the measured share by "
        f"{np.median(errors):.0%} (median) and at most {max(errors):.0%}."
    )


def _thousand(report: Report) -> Iterator[str]:
    costs, recording = _costs(report), report["costs"]["recording"]
    columns = [_layout(report, costs, *layout) for layout in THOUSAND]
    yield "| | " + " | ".join(f"{sources:,} sources of {_robot_count(robots)}" for sources, robots in THOUSAND) + " |"
    yield "|---|" + "--:|" * len(THOUSAND)
    for name in columns[0]:
        yield f"| {name} | " + " | ".join(column[name] for column in columns) + " |"
    yield ""
    update = report["updates"][0]["update_ms"] * 1e3
    served = {n: scale_queues.most_sources(n, RATE, costs) for n in (1, 16, 64)}
    yield (
        f"One update and the receipt of one Step together take {update / 1e3:.1f} ms of processor time (batch 256, "
        "networks 400-300). "
        f"1,000 robots make 60,000 transitions per second, so replay ratio 1 needs {60_000 * update / 1e6:,.0f} cores. "
        f"One core reaches a replay ratio of {1e6 / update / 60_000:.2g}."
    )
    yield ""
    yield (
        "According to the simulation, one learner without updates serves at most "
        + ", or ".join(
            f"{count:,} sources of {_robot_count(n)} ({count * n:,} robots in all)" for n, count in served.items()
        )
        + f" at {RATE:g} Hz. The configuration allows 64 simulators, and any number of drivers."
    )
    yield ""
    yield (
        f"A link with 1 Gbit/s carries {1e9 / 8 / _weights_bytes(report):.0f} sets of weights per second, without any "
        "other traffic."
    )
    yield ""
    yield (
        f"1,000 simulated robots at 60 Hz need {60_000 * report['costs']['simulator_us'] / 1e6:.0f} cores "
        f"({report['costs']['simulator_us']:.0f} µs for a step of Walker2D). A "
        f"recorder needs {recording['1']['recorder_us']:.0f} µs for a Step of one robot and "
        f"{recording['64']['recorder_us']:.0f} µs for a Step of 64 robots."
    )


def _layout(report: Report, costs: scale_queues.Costs, sources: int, robots: int) -> dict[str, str]:
    """Return the figures for these sources and robots. The dictionary maps the name of a figure to its text."""
    steps = sources * RATE
    outcome = scale_queues.simulate(sources, robots, RATE, costs, seconds=5.0)
    wire = np.interp(robots, *_columns(report["robots"], "robots", "bytes"))
    file = report["costs"]["recording"][str(robots)]["file_bytes"]
    overloaded = outcome.steps_per_s < 0.98 * steps
    weights = _HOSTS * 5 * _weights_bytes(report)
    return {
        "Steps per second": f"{steps:,.0f}",
        "learner's main thread, share of a core": f"above {outcome.busy:.0%}" if overloaded else f"{outcome.busy:.0%}",
        "delay of a Step at the learner, p99": "grows" if overloaded else f"{outcome.delay_ms:.1f} ms",
        "network into the learner": f"{steps * wire * 8 / 1e6:,.0f} Mbit/s",
        f"network out, five sets of weights per second to {_HOSTS} hosts": f"{weights * 8 / 1e6:,.0f} Mbit/s",
        "policy servers, cores": f"{steps * report['costs']['policy_us'][str(robots)] / 1e6:.1f}",
        "recording of the Steps, per second": f"{steps * file / 1e6:.1f} MB",
        "recording of the Steps, per day": f"{steps * file * 86_400 / 1e12:.2f} TB",
    }


PARTS = {
    "machine": _machine,
    "growth": _growth,
    "full": _full,
    "robots": _robots,
    "weights": _weights,
    "ray": _ray,
    "simulation": _simulation,
    "thousand": _thousand,
}
"""Maps the name of each produced part of the page to a function that yields its lines."""


def _row(cell: Mapping[str, Any]) -> str:
    return (
        f"| {cell['sources']} | {cell['robots']} | {cell['main_us']:.0f} | {cell['all_us'] - cell['main_us']:.0f} "
        f"| {1e6 / cell['main_us']:,.0f} | {cell['bytes']:,.0f} | {cell['memory_mb']:.0f} |"
    )


def _robot_count(robots: int) -> str:
    return f"{robots} robot{'s' if robots > 1 else ''}"


def _busy(cell: Mapping[str, Any]) -> float:
    """Return the share of a core that the main thread used."""
    return float(cell["main_us"] * cell["steps_per_s"] / 1e6)


def _costs(report: Report) -> scale_queues.Costs:
    cells = [*report["growth"], *report["full"], *report["robots"]]
    return scale_queues.fit([cell for cell in cells if cell["sources"] <= _FITTED])


def _columns(cells: Cells, *names: str) -> tuple[list[float], ...]:
    return tuple([cell[name] for cell in cells] for name in names)


def _weights_bytes(report: Report) -> float:
    return float(np.median([cell["server_received"] / cell["server_weights"] for cell in report["weights"]]))


def draw(report: Report, picture: Path = PICTURE) -> None:
    """Draw the growth of the learner's processor time."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for color, robots in (("C0", 1), ("C1", 16)):
        real_time = [cell for cell in report["growth"] if cell["robots"] == robots]
        steps = [cell["steps_per_s"] for cell in real_time]
        left.plot(steps, [100 * _busy(cell) for cell in real_time], "o", color=color, label=_robot_count(robots))
        full = [cell for cell in report["full"] if cell["robots"] == robots]
        floor = min(cell["main_us"] for cell in full)
        left.plot([0, max(steps)], [0, max(steps) * floor / 1e4], color=color, linewidth=1)
        middle.plot(*_columns(full, "sources", "main_us"), "o-", color=color, label=_robot_count(robots))
    left.set(title="main thread, % of a core", xlabel="Steps per second", xlim=(0, None), ylim=(0, None))
    middle.set(title="µs for a Step at full speed", xlabel="sources", xscale="log", ylim=(0, None))
    right.plot(*_columns(report["robots"], "robots", "main_us"), "o-", color="C2")
    right.set(title="µs for a Step of one source", xlabel="robots", xlim=(0, None), ylim=(0, None))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    middle.legend(fontsize="small")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
