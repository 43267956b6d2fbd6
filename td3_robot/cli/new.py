"""``td3-robot new``: writes the working skeleton of a driver or a task, and its test."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from td3_robot.errors import EXIT_GOOD, UsageError
from td3_robot.runtime.arguments import Parser
from td3_robot.util import resources

_EXAMPLES = """examples:
  td3-robot new driver leg
  td3-robot new task reach --out tasks/reach
"""
_NEXT = {
    "driver": "td3-robot policy --bundle POLICY --config robot.yaml"
    "  # POLICY: the folder of a run of the task that 'td3-robot new task {name}' writes\n"
    "  python {name}_driver.py --config robot.yaml\n"
    "  td3-robot node configure --config robot.yaml && td3-robot node activate --config robot.yaml",
    "task": "PYTHONPATH=. td3-robot train {name}.yaml",
}


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="td3-robot new",
        description="Write a commented, working driver or task with its test into a new folder.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("kind", choices=_NEXT, metavar="KIND", help=" or ".join(_NEXT))
    parser.add_argument("name", type=_name, metavar="NAME", help="name of the robot or task, for example left_leg")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the new folder (default: NAME)")
    options = parser.parse_args(arguments)
    folder: Path = options.out or Path(options.name)
    if folder.exists():
        raise UsageError(f"{str(folder)!r} exists already; name another folder with --out")
    folder.mkdir(parents=True)
    for template in sorted((resources.folder("templates") / options.kind).glob("*.*")):
        file = folder / _filled(template.name, options.name)
        file.write_text(_filled(template.read_text(encoding="utf-8"), options.name), encoding="utf-8")
        print(file)
    print(f"next, in {folder}:\n  python -m pytest\n  {_NEXT[options.kind].format(name=options.name)}")
    return EXIT_GOOD


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", text):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; allowed: up to 31 small letters a to z, digits and _, beginning with a letter"
        )
    if text == "policy":
        raise argparse.ArgumentTypeError("is 'policy', which is the name of the policy server; use another name")
    return text


def _filled(text: str, name: str) -> str:
    """Return the text of a template with the name filled in, in the forms ``left_leg`` and ``LeftLeg``."""
    return text.replace("skeleton", name).replace("Skeleton", "".join(map(str.capitalize, name.split("_"))))
