"""The policy server process, in a run (``--run DIR``) or deployed without one (``--bundle FILE --config FILE``)."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from td3_robot import node as nodes
from td3_robot.bundle import Bundle
from td3_robot.errors import UsageError
from td3_robot.lifecycle import FINALIZED
from td3_robot.messages import Weights
from td3_robot.node import Figures, Node
from td3_robot.policy.core import ACCEPTS, PolicyCore
from td3_robot.policy.latch_file import LatchFile
from td3_robot.specs import RobotSpec
from td3_robot.transport.session import ClientSession

log = logging.getLogger(__name__)

_EPILOG = """examples:
  td3-robot policy --run runs/walker2d
  td3-robot policy --bundle policy.safetensors --config robot.yaml --frozen
  td3-robot policy --bundle policy.safetensors --config robot.yaml --set endpoints.learner=tcp://127.0.0.1:5555"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = nodes.parser(
        "policy",
        "policy",
        "Answer the observations of a run's simulators, or of a robot's driver, with actions.",
        deployable=True,
        epilog=_EPILOG,
    )
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="policy to serve; with --config")
    parser.add_argument("--frozen", action="store_true", help="refuse the weights of learners")
    parser.add_argument("--explore", action="store_true", help="deployed: add the exploration that weights ask for")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="deployed: keeps stops, faults and a freeze over a restart (default: the bundle's name and .state)",
    )
    parsed = parser.parse_args(arguments)
    return nodes.main("policy", parsed, lambda node: _serve(node, parsed))


def _serve(node: Node, arguments: argparse.Namespace) -> None:
    config = node.config
    if node.folder and (arguments.bundle or arguments.explore or arguments.state):
        raise UsageError("--bundle, --explore and --state need --config: in a run, the learner says what is served")
    learns = bool(node.folder or config.endpoints.learner)
    if not (arguments.bundle or learns):
        raise UsageError("there is nothing to serve: give --bundle FILE, or set endpoints.learner")
    core = PolicyCore(
        config.seed,
        exploring=bool(node.folder or arguments.explore),
        lockstep=config.timing == "lockstep",
        safety=config.safety,
        autostart=config.policy.autostart,
        frozen=config.policy.frozen or arguments.frozen,
        name=node.name,
    )
    if arguments.bundle:
        bundle = Bundle.load(arguments.bundle)
        core.load(bundle.version or 1, bundle)
        log.info("serves %s: version %d, robot %s", arguments.bundle, core.version, bundle.spec.name)
    node.serve("policy", ACCEPTS, core.spec)
    state = arguments.state or (Path(f"{arguments.bundle}.state") if arguments.bundle else None)
    latches = LatchFile(state) if state else None
    if latches:
        for line in core.resume(latches.kept, time.monotonic()):
            log.warning("%s: %s (%s)", node.name, line, latches.path)
    elif not node.folder:
        log.warning("a restart will forget stops, faults and a freeze: keep them with --state FILE")
    learner: ClientSession | None = None
    if learns:
        learner = node.connect("learner", (Weights,), essential=node.folder is not None)
    served: RobotSpec | None = core.spec

    def after() -> bool:
        nonlocal served
        if learner and core.version != learner.hello.weights_version:
            learner.hello = replace(learner.hello, weights_version=core.version)
        if served is None and core.spec:
            served = core.spec
            node.bus.adopt("policy", served)
        if latches:
            latches.keep(core.latches)
        return core.lifecycle.state == FINALIZED

    def report() -> Figures:
        # Ready means bound: weights come once a simulator has told the learner which robot this is.
        return Figures("ready", core.lifecycle.trouble, {"weights_version": core.version}, counters=dict(core.counters))

    after()  # so that the first Hello says what is held
    try:
        node.spin(core, busy=lambda: False, report=report, after=after, deadline=lambda: core.due)
    finally:
        if latches:
            latches.close()


if __name__ == "__main__":
    sys.exit(main())
