"""Print tables of observations and actions, in Markdown: ``python -m td3_robot_sims.tables [TASK …]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from td3_robot.errors import Td3RobotError
from td3_robot.runtime.arguments import Parser
from td3_robot.specs import Channel, RobotSpec
from td3_robot_sims import tasks


def table(spec: RobotSpec) -> str:
    """Return a heading, a table of observations and a table of actions."""
    period = f"{spec.control_period * 1000:g} ms ({1 / spec.control_period:.1f} Hz)"
    sizes = f"{spec.observation_size} observations, {spec.action_size} actions, one step every {period}."
    tables = [*_rows("observation", spec.observations), "", *_rows("action", spec.actions), ""]
    return "\n".join([f"## {spec.name}", "", sizes, "", *tables])


def _rows(kind: str, channels: Sequence[Channel]) -> list[str]:
    head = [f"| # | {kind} | unit | low | high | meaning |", "|--:|---|---|--:|--:|---|"]
    return head + [
        f"| {i} | `{c.name}` | {c.unit} | {c.low:g} | {c.high:g} | {c.meaning} |" for i, c in enumerate(channels)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of the named tasks; without names, of all tasks in :func:`td3_robot_sims.tasks.names`."""
    parser = Parser(prog="python -m td3_robot_sims.tables", description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="for example Walker2D or gymnasium:Pendulum-v1")
    named = parser.parse_args(arguments).tasks or tasks.names()
    try:
        print("\n".join(table(tasks.spec(task)) for task in named), end="")
    except Td3RobotError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
