"""``td3-robot list``: lists what a user can choose by name."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from td3_robot.bundle import Bundle
from td3_robot.config import loading as configuration
from td3_robot.config import reference
from td3_robot.errors import EXIT_GOOD, ConfigError
from td3_robot.learner.algorithms.table import ALGORITHMS
from td3_robot.policies import shipped_policies
from td3_robot.runtime.arguments import Parser
from td3_robot.specs import RobotSpec
from td3_robot.util import resources
from td3_robot.util.output import print_rows

log = logging.getLogger(__name__)

_EXAMPLES = """examples:
  td3-robot list configs
  td3-robot list keys --json
  td3-robot list policies
"""

Rows = list[dict[str, str]]


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="td3-robot list",
        description="List the names that you can give to td3-robot train, eval and policy.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("what", choices=_LISTS, metavar="WHAT", help=", ".join(_LISTS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    print_rows(_LISTS[options.what](), as_json=options.json)
    return EXIT_GOOD


def _configs() -> Rows:
    """The shipped configurations. The description is the first sentence of the comment in the file."""
    rows = []
    for file in sorted(resources.folder("configs").glob("*.yaml")):
        config = configuration.load(file)
        comment = " ".join(re.findall(r"^# (.*)", file.read_text(encoding="utf-8"), re.MULTILINE))
        rows.append(
            {
                "config": file.stem,
                "task": config.task,
                "steps": f"{config.total_steps:,}",
                "description": re.split(r"(?<=\.) ", comment)[0],
            }
        )
    return rows


def _tasks() -> Rows:
    """The tasks that backends can list, and patterns for the names of Gymnasium's tasks."""
    rows = []
    # td3_robot never imports simulators statically
    with importlib.import_module("td3_robot_sims.quiet").stdout_to_stderr():  # a backend may print text
        specs = dict(_specs(importlib.import_module("td3_robot_sims.tasks")))
    for name, spec in specs.items():
        sizes = str(spec.observation_size), str(spec.action_size)
        backend, colon, _ = name.partition(":")
        description = f"a task of the backend {backend}" if colon else "a walking robot in PyBullet"
        rows.append((name, *sizes, f"{spec.control_period * 1e3:g} ms", description))
    rows += [
        ("gymnasium:ID", "", "", "", "a Gymnasium environment with continuous actions"),
        ("gymnasium:MODULE:ID", "", "", "", "a Gymnasium environment that your module registers"),
        ("discrete:ID", "", "", "", "a Gymnasium environment with discrete actions, for a2c"),
    ]
    columns = "task", "observations", "actions", "period", "description"
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _specs(tasks: Any) -> Iterator[tuple[str, RobotSpec]]:
    """Yield the name and the specification of each task. If a task is broken, log a warning and leave it out."""
    for name in tasks.names():
        try:
            yield name, tasks.spec(name)
        except ConfigError as error:
            log.warning("%s; the task is not listed", error)


def _policies() -> Rows:
    rows = []
    for name, file in shipped_policies().items():
        bundle = Bundle.load(file)
        made = bundle.provenance
        rows.append(
            {
                "policy": name,
                "task": str(made.get("task", bundle.spec.name)),
                "algorithm": str(made.get("algorithm", "")),
                "steps": f"{made['env_steps']:,}" if "env_steps" in made else "",
                "file": str(file),
            }
        )
    return rows


def _keys() -> Rows:
    return [key._asdict() for key in reference.all_keys()]


def _algorithms() -> Rows:
    return [{"algorithm": name, "class": place} for name, place in ALGORITHMS.rows.items()]


_LISTS: dict[str, Callable[[], Rows]] = {
    "configs": _configs,
    "tasks": _tasks,
    "policies": _policies,
    "keys": _keys,
    "algorithms": _algorithms,
}
