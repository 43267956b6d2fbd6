"""``td3-robot bench conformance``: checks whether a driver or a policy server follows the protocol.

The conformance kit plays the other side of the link, with plain ZeroMQ sockets. The checks follow
docs/reference/protocol.md. The kit makes its messages from :mod:`td3_robot.messages`, except malformed frames.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from td3_robot.bundle import Bundle
from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD
from td3_robot.policies import find_policy
from td3_robot.runtime.arguments import POLICY_HELP, Parser, real
from td3_robot.util.text import one_line

_FOUND = 3  # number of mistakes to print for each check; the report counts the others


class PeerStoppedError(Exception):
    """The peer did not do what the next checks need."""


class Checks:
    """The results of the checks of one peer.

    Args:
        demands: maps the name of each check to what the check demands.

    Attributes:
        wrong: maps the name of each check that found a mistake to the list of its mistakes.
        made: names of the checks that the kit has reached.
    """

    def __init__(self, demands: Mapping[str, str]) -> None:
        self.demands = demands
        self.wrong: dict[str, list[str]] = {}
        self.made: set[str] = set()

    def expect(self, name: str, good: bool, found: Callable[[], str] | str) -> bool:
        """Record the result of a check, and return ``good``. If ``good`` is false, ``found`` describes the mistake."""
        assert name in self.demands
        self.made.add(name)
        if not good:
            self.wrong.setdefault(name, []).append(found if isinstance(found, str) else found())
        return good

    def require(self, name: str, good: bool, found: str) -> None:
        """Like :meth:`expect`; a mistake ends the checks.

        Raises:
            PeerStoppedError: the check found a mistake.
        """
        if not self.expect(name, good, found):
            raise PeerStoppedError

    def lines(self) -> list[str]:
        """The report: one line for each check, lines for its mistakes, and the verdict."""
        lines = []
        for name, demand in self.demands.items():
            found = self.wrong.get(name, [])
            result = "WRONG" if found else "ok" if name in self.made else "-"
            lines.append(f"{result:5}  {name}: {demand}")
            lines += [f"         found: {one_line(text, 400)}" for text in found[:_FOUND]]
            if len(found) > _FOUND:
                lines.append(f"         and {len(found) - _FOUND} more")
        skipped = len(self.demands) - len(self.made)
        verdict = (
            f"{len(self.wrong)} of {len(self.demands)} checks found a mistake" if self.wrong else "no mistake found"
        )
        return [*lines, verdict + (f"; not reached (marked -): {skipped}" if skipped else "")]

    def report(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        checks = {
            name: {"demand": demand, "reached": name in self.made, "wrong": self.wrong.get(name, [])}
            for name, demand in self.demands.items()
        }
        return {"conforms": not self.wrong, "checks": checks}


def main(arguments: Sequence[str] | None = None) -> int:
    from td3_robot.bench import conformance_driver, conformance_policy

    options = _options().parse_args(arguments)
    if options.serves:
        bundle = Bundle.load(find_policy(options.serves))
        checks = conformance_policy.check(options.endpoint, bundle, options.wait)
    else:
        checks = conformance_driver.check(options.endpoint, options.wait, options.deadline)
    print(json.dumps(checks.report(), indent=2) if options.json else "\n".join(checks.lines()), flush=True)
    return EXIT_CHECK_FAILED if checks.wrong else EXIT_GOOD


def _options() -> argparse.ArgumentParser:
    parser = Parser(
        prog="td3-robot bench conformance",
        description="Check whether a driver follows the protocol; with --serves, check a policy server.",
        epilog="examples:\n"
        "  td3-robot bench conformance ipc:///tmp/policy      then start your driver with this endpoint\n"
        "  td3-robot bench conformance ipc:///tmp/policy --serves policy.safetensors\n\n"
        "The checks move the driver's robot: use a simulated robot.\n"
        "With --serves, the policy server is stopped and activated during the checks.",
    )
    parser.add_argument(
        "endpoint", metavar="ENDPOINT", help="address of the link `policy`: ipc://PATH or tcp://127.0.0.1:PORT"
    )
    parser.add_argument(
        "--serves", metavar="POLICY", help=f"check a policy server instead; POLICY is what it serves: {POLICY_HELP}"
    )
    parser.add_argument(
        "--wait", type=real(above=True), default=60.0, metavar="S", help="longest wait for the peer (default: 60)"
    )
    parser.add_argument(
        "--deadline",
        type=real(above=True),
        default=5.0,
        metavar="S",
        help="longest time from the last Action until the driver reports that it is in fault (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
