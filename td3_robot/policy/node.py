"""The policy server process, in a run (``--run DIR``) or deployed without a run (``--bundle FILE --config FILE``)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from td3_robot.bundle import Bundle, sha256
from td3_robot.core_types import Input
from td3_robot.errors import EXIT_USAGE, BundleError, NodeError, UsageError
from td3_robot.messages import Weights
from td3_robot.policies import find_policy
from td3_robot.policy import core as policy_core
from td3_robot.policy.examiner import Examiner
from td3_robot.policy.rates import AnswerRates
from td3_robot.policy.state_file import StateFile, default_path
from td3_robot.policy.store import examine
from td3_robot.policy.trial import check_finite
from td3_robot.recording.boundary import PolicyObserver
from td3_robot.runtime.arguments import POLICY_HELP, node_parser
from td3_robot.runtime.node import Figures, Node
from td3_robot.runtime.process import run_node
from td3_robot.safety.lifecycle import State
from td3_robot.safety.limits import check_deadlines
from td3_robot.topics import RECORDER
from td3_robot.transport.link import PEER_TIMEOUT, ClientLink

log = logging.getLogger(__name__)

_SOON = 0.005  # seconds that a turn waits for inputs while the examiner works
_SWITCH = 0.0002
"""Seconds after which a thread passes the interpreter lock to a waiting thread. Python's default of 0.005 s could delay
an Action while another thread works. Hashing, number checks and file access release the lock. Only copying weights
holds the lock, for 0.1 ms per megabyte."""

_EPILOG = """examples:
  td3-robot policy --run runs/walker2d
  td3-robot policy --bundle policy.safetensors --config robot.yaml --frozen
  td3-robot policy --bundle policy.safetensors --config robot.yaml --set endpoints.learner=tcp://127.0.0.1:5555"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = node_parser(
        "td3-robot policy",
        "policy",
        "Answer the observations of a run's simulators, or of a robot's driver, with actions.",
        deployable=True,
        epilog=_EPILOG,
    )
    parser.add_argument("--bundle", metavar="POLICY", help=f"with --config: policy to serve: {POLICY_HELP}")
    parser.add_argument("--frozen", action="store_true", help="refuse the weights of learners")
    parser.add_argument("--explore", action="store_true", help="with --config: add the noise that the policy asks for")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="with --config: file that keeps stops, faults, takeovers and a freeze across a restart (default: the "
        "bundle's name with .state added; a second server of the same bundle gets its own file)",
    )
    parsed = parser.parse_args(arguments)
    return run_node("policy", parsed, lambda node: _serve(node, parsed))


def weights(version: int, bundle: Bundle) -> Weights:
    """A Weights message for the recorder, with a policy that a person chose."""
    payload = bundle.encode()
    made = [bundle.provenance.get(key) for key in ("updates", "env_steps")]
    updates, env_steps = (count if isinstance(count, int) and 0 <= count < 2**64 else 0 for count in made)
    return Weights(version, updates, env_steps, sha256(payload), payload)


def _serve(node: Node, arguments: argparse.Namespace) -> None:
    if node.folder and (arguments.bundle or arguments.explore or arguments.state):
        raise UsageError("--bundle, --explore and --state need --config: in a run, the learner sends the policy")
    if not (arguments.bundle or node.folder or node.config.endpoints.learner):
        raise UsageError("there is nothing to serve: give --bundle FILE, or set endpoints.learner")
    sys.setswitchinterval(_SWITCH)
    # numpy gives no warnings about overflows: the core checks each action, and its log names the policy.
    with np.errstate(all="ignore"), contextlib.ExitStack() as resources:
        _Server(node, arguments, resources).run()


class _Server:
    """The policy server's core with its files, links and threads. ``resources`` closes them at the end."""

    def __init__(self, node: Node, arguments: argparse.Namespace, resources: contextlib.ExitStack) -> None:
        config = node.config
        learns = bool(node.folder or config.endpoints.learner)
        exploring = bool(node.folder or arguments.explore)
        settings: dict[str, Any] = {"exploring": exploring, "frozen": arguments.frozen, "tells_drivers": True}
        self.node = node
        realtime = config.pacing.mode == "realtime"
        self.rates = AnswerRates(config.realtime.missed_share, realtime=realtime)
        self.examiner: Examiner | None = None
        # The examiner checks new weights in a thread, so that robots do not wait for this check. In lock-step, robots
        # wait for new weights anyway, so there is no examiner.
        if learns and config.timing == "free":
            self.examiner = Examiner(node.counters)
            resources.callback(self.examiner.close)
        self.core = policy_core.make(config, node.name, **settings, examine=self.examiner or examine)
        settings["tries_policies"] = True  # a replay then makes the core with ``examine``, not with ``read``
        if arguments.bundle:
            settings |= self._load(arguments.bundle)
        # Bind first. If another server has the endpoint, binding fails, and this server does not open the state file.
        node.serve("policy", policy_core.ACCEPTS, self.core.spec)
        owner = f"{node.name} of {Path(arguments.config).resolve()}" if arguments.config else ""
        path = arguments.state or (default_path(Path(arguments.bundle), owner) if arguments.bundle else None)
        self.state_file = StateFile(path, owner) if path else None
        if self.state_file:
            resources.callback(self.state_file.close)
            settings |= self._resume(self.state_file)
        elif not node.folder:
            log.warning("a restart will forget stops, faults, a freeze and takeovers: keep them with --state FILE")
        self.recorded = node.recorded(self.core, settings, PolicyObserver(self.core))
        self.learner: ClientLink | None = None
        if learns:
            # The first Hello names the version that this server holds, so that the learner's versions begin above it.
            version = self.core.version
            self.learner = node.connect("learner", (Weights,), essential=bool(node.folder), weights_version=version)
        self._began_at = time.monotonic()
        self._noise_problem = ""
        self._served = self.core.spec
        self._loaded = self.core.store.loaded[-1:]

    def run(self) -> None:
        """Serve until a signal or a shutdown."""
        self._after()
        self.node.spin(
            self.recorded,
            busy=lambda: False,
            report=self._report,
            after=self._after,
            deadline=self._deadline,
            sift=self._sift,
        )

    def _load(self, name: str) -> dict[str, Any]:
        """Serve a policy. Return the settings that replay needs to repeat this."""
        try:
            path = find_policy(name)
        except BundleError as error:
            raise BundleError(f"--bundle: {error}") from None
        bundle = Bundle.load(path)
        check_deadlines(self.node.config.safety, bundle.spec)
        check_finite(bundle, f"--bundle: policy {str(path)!r}")
        self.core.load(bundle.version or 1, bundle)
        log.info("serves %s: version %d, robot %s", path, self.core.version, bundle.spec.name)
        loaded = weights(self.core.version, bundle)
        self.node.bus.send(RECORDER, loaded)
        return {"version": loaded.version, "sha256": loaded.sha256}

    def _resume(self, state_file: StateFile) -> dict[str, Any]:
        """Restore the safety state. Return the settings that replay needs to repeat this."""
        now = time.monotonic()
        for line in self.core.resume(state_file.kept, now):
            log.warning("%s: %s (%s)", self.node.name, line, state_file.path)
        return {"resumed": now, "latches": state_file.kept.stored()}

    def _after(self) -> bool:
        """Pass the core's changes to links, state file and recorder. Return whether the server is finalized."""
        core = self.core
        answers = core.store.serving is not None and core.lifecycle.state is not State.UNCONFIGURED
        self.rates.answered(time.monotonic(), answers=answers)
        loaded = core.store.loaded[-1:]
        if loaded != self._loaded:  # a person loaded a policy, or a learner in lock-step returned to an earlier version
            self._loaded = loaded
            for version in loaded:
                self.node.bus.send(RECORDER, weights(version, core.store.held[version].bundle))
        if self.learner and core.version != self.learner.hello.weights_version:
            self.learner.hello = replace(self.learner.hello, weights_version=core.version)
        if self._served is None and core.spec:
            self._served = core.spec
            self.node.bus.adopt("policy", core.spec)
        if self.state_file:
            self.state_file.keep(core.safety_state)
        self._tell_noise_problem()
        return core.lifecycle.state is State.FINALIZED

    def _tell_noise_problem(self) -> None:
        """End the run if an exploration noise has a mistake. A server without a run continues, for its robots.

        Raises:
            NodeError: the noise has a mistake. The supervisor does not restart the server, because the noise would fail
                again.
        """
        problem = self.core.answers.noise_problem
        if not problem or problem == self._noise_problem:
            return
        self._noise_problem = problem
        if self.node.folder:
            raise NodeError(problem, EXIT_USAGE)
        log.error(
            "%s; for these actions, the server sends the safe action, or nothing if there are no safety settings",
            problem,
        )

    def _report(self) -> Figures:
        # The server is ready as soon as its endpoint is bound. It does not wait for weights, because the learner
        # sends the first weights only after a simulator has joined.
        core = self.core
        figures = {"weights_version": core.version, **self.rates.figures(time.monotonic())}
        return Figures("ready", core.lifecycle.trouble, figures, counters=dict(core.counters))

    def _for_reply(self) -> Figures:
        bus, now = self.node.bus, time.monotonic()
        figures = dict(self.rates.figures(now))
        if self.learner and now - self.learner.received_at > PEER_TIMEOUT:
            figures["learner_silent_s"] = now - max(self.learner.received_at, self._began_at)
        return Figures("running", bus.last_dropped(), figures, dict(bus.dropped()))

    def _sift(self, inputs: list[Input]) -> list[Input]:
        if self.core.spec:
            self.rates.received(inputs, self.core.spec.control_period, time.monotonic())
        inputs = self.node.tell_core(self._for_reply, inputs)
        return self.examiner.sift(inputs, self.core.store.wanted) if self.examiner else inputs

    def _deadline(self) -> float | None:
        due = self.core.due
        if self.examiner and self.examiner.busy:
            soon = time.monotonic() + _SOON
            return soon if due is None else min(soon, due)
        return due


if __name__ == "__main__":
    sys.exit(main())
