"""The policy server process, in a run (``--run DIR``) or deployed without one (``--bundle FILE --config FILE``)."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from td3_robot.bundle import Bundle, sha256
from td3_robot.core_types import Input
from td3_robot.errors import UsageError
from td3_robot.messages import Weights
from td3_robot.policy import core as policy_core
from td3_robot.policy.examiner import Examiner
from td3_robot.policy.state_file import StateFile
from td3_robot.policy.store import examine
from td3_robot.recording.boundary import PolicyObserver
from td3_robot.runtime.arguments import node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.safety.lifecycle import State
from td3_robot.specs import RobotSpec
from td3_robot.topics import RECORDER
from td3_robot.transport.link import ClientLink

log = logging.getLogger(__name__)

_SOON = 0.005  # seconds to the next turn while weights are looked at, if nothing arrives
_SWITCH = 0.0002
"""Seconds after which a thread hands the interpreter to another that waits for it. What takes the others long they do
without the interpreter (hashing, looking at numbers, files), but for a call that copies weights: 0.1 ms a megabyte."""

_EPILOG = """examples:
  td3-robot policy --run runs/walker2d
  td3-robot policy --bundle policy.safetensors --config robot.yaml --frozen
  td3-robot policy --bundle policy.safetensors --config robot.yaml --set endpoints.learner=tcp://127.0.0.1:5555"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = node_parser(
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
    return run_node("policy", parsed, lambda node: _serve(node, parsed))


def weights(version: int, bundle: Bundle) -> Weights:
    """A policy that a person chose, as a learner would send it: for the recorder."""
    payload = bundle.encode()
    made = [bundle.provenance.get(key) for key in ("updates", "env_steps")]
    updates, env_steps = (count if isinstance(count, int) and count >= 0 else 0 for count in made)
    return Weights(version, updates, env_steps, sha256(payload), payload)


def _serve(node: Node, arguments: argparse.Namespace) -> None:
    config = node.config
    if node.folder and (arguments.bundle or arguments.explore or arguments.state):
        raise UsageError("--bundle, --explore and --state need --config: in a run, the learner says what is served")
    learns = bool(node.folder or config.endpoints.learner)
    if not (arguments.bundle or learns):
        raise UsageError("there is nothing to serve: give --bundle FILE, or set endpoints.learner")
    settings: dict[str, Any] = {
        "exploring": bool(node.folder or arguments.explore),
        "frozen": arguments.frozen,
    }
    # In lock-step a robot waits for its weights anyway.
    examiner = Examiner(node.counters) if learns and config.timing == "free" else None
    sys.setswitchinterval(_SWITCH)
    core = policy_core.make(config, node.name, **settings, examine=examiner or examine)
    if arguments.bundle:
        bundle = Bundle.load(arguments.bundle)
        core.load(bundle.version or 1, bundle)
        log.info("serves %s: version %d, robot %s", arguments.bundle, core.version, bundle.spec.name)
        loaded = weights(core.version, bundle)
        node.bus.send(RECORDER, loaded)
        settings |= {"version": loaded.version, "sha256": loaded.sha256}
    node.serve("policy", policy_core.ACCEPTS, core.spec)  # before the state file: a second server is told of the first
    path = arguments.state or (Path(f"{arguments.bundle}.state") if arguments.bundle else None)
    state_file = StateFile(path) if path else None
    if state_file:
        now = time.monotonic()
        for line in core.resume(state_file.kept, now):
            log.warning("%s: %s (%s)", node.name, line, state_file.path)
        settings |= {"resumed": now, "latches": state_file.kept.stored()}
    elif not node.folder:
        log.warning("a restart will forget stops, faults and a freeze: keep them with --state FILE")
    recorded_core = node.recorded(core, settings, PolicyObserver(core))
    learner: ClientLink | None = None
    if learns:
        learner = node.connect("learner", (Weights,), essential=node.folder is not None)
    served: RobotSpec | None = core.spec
    recorded = core.store.loaded[-1:]

    def after() -> bool:
        nonlocal served, recorded
        if core.store.loaded[-1:] != recorded:  # by an operator
            recorded = core.store.loaded[-1:]
            node.bus.send(RECORDER, weights(recorded[0], core.store.held[recorded[0]].bundle))
        if learner and core.version != learner.hello.weights_version:
            learner.hello = replace(learner.hello, weights_version=core.version)
        if served is None and core.spec:
            served = core.spec
            node.bus.adopt("policy", served)
        if state_file:
            state_file.keep(core.safety_state)
        return core.lifecycle.state is State.FINALIZED

    def report() -> Figures:
        # Ready means bound: weights come once a simulator has told the learner which robot this is.
        return Figures("ready", core.lifecycle.trouble, {"weights_version": core.version}, counters=dict(core.counters))

    def sift(inputs: list[Input]) -> list[Input]:
        return examiner.sift(inputs, core.wanted) if examiner else inputs

    def deadline() -> float | None:
        due = core.due
        if examiner and examiner.busy:
            soon = time.monotonic() + _SOON
            return soon if due is None else min(soon, due)
        return due

    after()  # so that the first Hello says what is held
    try:
        node.spin(recorded_core, busy=lambda: False, report=report, after=after, deadline=deadline, sift=sift)
    finally:
        if examiner:
            examiner.close()
        if state_file:
            state_file.close()


if __name__ == "__main__":
    sys.exit(main())
