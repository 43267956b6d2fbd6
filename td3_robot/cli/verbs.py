"""The table of ``td3-robot``'s commands, and functions for such tables."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from td3_robot.errors import EXIT_GOOD, UsageError
from td3_robot.util.text import did_you_mean


class Verb(NamedTuple):
    """One row of a table of commands: the function to call, what it does, and the heading of the command in the help
    text.

    ``place`` is ``module:function``. The function takes the arguments and returns the exit code.
    """

    place: str
    purpose: str
    group: str = ""

    def run(self, arguments: Sequence[str]) -> int:
        """Import the module, call the function and return its exit code."""
        module, _, function = self.place.partition(":")
        code: int = getattr(importlib.import_module(module), function)(arguments)
        return code


_TRAIN, _DEPLOY, _RECORD, _TOOLS = "train", "deploy", "record and replay", "tools"

COMMANDS: dict[str, Verb] = {
    "train": Verb("td3_robot.cli.train:main", "train a policy: start simulator, policy server and learner", _TRAIN),
    "sweep": Verb("td3_robot.cli.sweep:main", "train with several seeds and values, and compare the runs", _TRAIN),
    "eval": Verb("td3_robot_sims.evaluate:main", "evaluate a policy, and make a video of it", _TRAIN),
    "sim": Verb("td3_robot_sims.node:main", "run one more simulator for a training", _TRAIN),
    "learner": Verb("td3_robot.learner.node:main", "run the learner of a training that you start by hand", _TRAIN),
    "bundle": Verb("td3_robot.cli.bundle:main", "make, show, verify, export and import policy files", _DEPLOY),
    "policy": Verb(
        "td3_robot.policy.node:main", "serve a policy to a robot, or to a training that you start by hand", _DEPLOY
    ),
    "node": Verb(
        "td3_robot.cli.node:main", "command a policy server and its robots: state, activate, estop, …", _DEPLOY
    ),
    "ros2": Verb("td3_robot.cli.ros2:main", "run a ROS 2 node: driver, operator or monitor", _DEPLOY),
    "keys": Verb("td3_robot.cli.keys:main", "make keys, and choose which other machines may connect", _DEPLOY),
    "record": Verb("td3_robot.recording.node:main", "record the messages of a run or a robot", _RECORD),
    "info": Verb("td3_robot.recording.info:main", "show what a recording holds, and whether it is whole", _RECORD),
    "play": Verb("td3_robot.recording.play:main", "play a recording to live nodes", _RECORD),
    "replay": Verb(
        "td3_robot.replay.check:main",
        "run the nodes' code on recorded inputs, and compare its outputs with the recording",
        _RECORD,
    ),
    "export": Verb(
        "td3_robot.recording.export:main", "convert a recording to tables, ROS 2, Foxglove or Minari", _RECORD
    ),
    "recover": Verb("td3_robot.recording.recover:main", "make a whole recording from a damaged one", _RECORD),
    "list": Verb(
        "td3_robot.cli.list:main", "list configurations, tasks, policies, configuration keys or algorithms", _TOOLS
    ),
    "new": Verb("td3_robot.cli.new:main", "write the skeleton of a driver or a task, with its test", _TOOLS),
    "monitor": Verb(
        "td3_robot.monitor.node:main", "watch a training or a robot live; send data to PlotJuggler or Foxglove", _TOOLS
    ),
    "dashboard": Verb("td3_robot.dashboard.command:main", "show a training or a robot on a web page, live", _TOOLS),
    "topic": Verb("td3_robot.cli.topic:main", "list topics, show their fields, and print messages live", _TOOLS),
    "bench": Verb("td3_robot.cli.bench:main", "measure speed and memory", _TOOLS),
    "doctor": Verb("td3_robot.cli.doctor:main", "check what is installed and what is missing", _TOOLS),
}
"""Maps the name of a command to its row. To add a command, write a module and add a row here."""


def find(table: Mapping[str, Verb], name: str, kind: str) -> Verb:
    """Return the row with this name. If there is no such row, raise UsageError.

    ``kind`` is the word that the error uses for a row, for example ``benchmark``.
    """
    if name not in table:
        raise UsageError(f"unknown {kind} {name!r}; {did_you_mean(name, table, 'allowed:')}")
    return table[name]


def run_row(table: Mapping[str, Verb], kind: str, usage: str, arguments: Sequence[str]) -> int:
    """Run the row whose name is ``arguments[0]``. The row gets the other elements of ``arguments``.

    If ``arguments[0]`` is ``--help``, print ``usage``.
    """
    if not arguments:
        raise UsageError(f"no {kind} given; allowed: {', '.join(table)}")
    if arguments[0] in ("-h", "--help"):
        print(usage)
        return EXIT_GOOD
    return find(table, arguments[0], kind).run(arguments[1:])


def listing(table: Mapping[str, Verb]) -> str:
    """Return the rows of a table as help text, under the headings of their groups."""
    lines: list[str] = []
    group = ""
    for name, verb in table.items():
        if verb.group != group:
            group = verb.group
            lines.append(f"{group}:")
        lines.append(f"  {name:<9} {verb.purpose}")
    return "\n".join(lines)
