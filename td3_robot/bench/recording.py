"""``td3-robot bench record`` and ``bench replay``: the cost of a recording, and the speed of a replay.

Both benchmarks use one robot with Walker2D's sizes, hidden layers of 400 and 300, and 60 Steps per second of recorded
time. Each Step comes with a Turn and an Action, so there are three messages per Step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from td3_robot.bench import example, harness
from td3_robot.bench.harness import Report
from td3_robot.bundle import sha256
from td3_robot.config.schema import Config, RecordConfig
from td3_robot.core_types import Input, Origin, Peer
from td3_robot.errors import NodeError
from td3_robot.messages import MESSAGES, NO_NOISE, Action, Message, Phase, Record, Start, Weights
from td3_robot.policy import core as policy_core
from td3_robot.policy.noise_v2 import GaussianV2
from td3_robot.recording.boundary import PolicyObserver, RecordedCore
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import Recorder
from td3_robot.replay import check as replay
from td3_robot.transport import codec, turns
from td3_robot.transport import link as handshake
from td3_robot.transport.link import ClientLink
from td3_robot.transport.tap import Copies

RATE = 60.0  # Steps per second of recorded time
_PACKAGES = ("numpy", "msgspec", "mcap")
Published = list[tuple[str, Message]]
"""Messages, each with the name of the node that published it."""


def record(arguments: Sequence[str]) -> int:
    description = "Measure a node's time for recording, and how fast a recorder writes."
    options = _options("record", description).parse_args(arguments)
    published = _session(options.steps)
    payloads = [codec.encode(message) for _, message in published]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.mcap"
        contestants = {
            "tap": lambda: _tapped(published, payloads, recorder=False),
            "recorded tap": lambda: _tapped(published, payloads, recorder=True),
            "recorder": lambda: _written(published, payloads, path),
        }
        seconds = {name: statistics.median(v) for name, v in harness.take_turns(contestants, options.rounds).items()}
        file_bytes = path.stat().st_size
    count, wire_bytes = len(published), sum(map(len, payloads))
    report = {
        "machine": harness.describe(*_PACKAGES),
        "messages": count,
        "tap_without_recorder_us": seconds["tap"] / count * 1e6,
        "tap_with_recorder_us": seconds["recorded tap"] / count * 1e6,
        "recorder_messages_per_s": count / seconds["recorder"],
        "recorder_mb_per_s": wire_bytes / seconds["recorder"] / 1e6,
        "wire_bytes_per_step": wire_bytes / options.steps,
        "file_bytes_per_step": file_bytes / options.steps,
    }
    return harness.show(report, options.json, _lines)


def replay_policy(arguments: Sequence[str]) -> int:
    options = _options("replay", "Measure how fast the policy core is replayed, compared with real time.").parse_args(
        arguments
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.mcap"
        published = _session(options.steps)
        _written(published, [codec.encode(message) for _, message in published], path)
        rounds = harness.take_turns({"replay": lambda: _replayed(path, options.steps)}, options.rounds)["replay"]
    seconds, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
    report = {
        "machine": harness.describe(*_PACKAGES),
        "steps": options.steps,
        "seconds": seconds,
        "steps_per_s": options.steps / seconds,
        "times_real_time_at_60_hz": options.steps / RATE / seconds,
        "times_real_time_undisturbed": options.steps / RATE / processor,  # processor time excludes other load
    }
    return harness.show(report, options.json, _lines)


def _options(name: str, description: str) -> harness.Options:
    parser = harness.Options(f"td3-robot bench {name}", description, ("", f"--json > {name}.json"))
    parser.number("--steps", 6000, "N", "Steps to record")
    parser.number("--rounds", 5, "N", "repetitions of each measurement")
    return parser


def _replayed(path: Path, steps: int) -> tuple[float, float]:
    """Replay the policy server of a recording. Return the time and the processor time in s."""
    begin, begin_processor = time.perf_counter(), time.process_time()
    (report,) = replay.check(Session([path]), ["policy"], exact=True)
    taken = time.perf_counter() - begin, time.process_time() - begin_processor
    if not report.same or report.turns != steps + 1:
        raise NodeError(
            "this installation does not replay the benchmark's recording exactly; check your own recordings "
            "with `td3-robot replay`"
        )
    return taken


def _session(steps: int) -> Published:
    """Make the messages of a robot, a policy server and a learner that publishes one policy."""
    rng = np.random.default_rng(0)
    bundle = example.bundle(control_period=1 / RATE)
    payload = bundle.encode()
    weights = Weights(1, 0, 0, sha256(payload), payload)
    hello = handshake.hello("simulator", "robot", client=0, robots=1, spec=bundle.spec)
    core, peer = policy_core.make(Config(), "policy", exploring=True), Peer("policy", b"robot", hello, {})
    start = Start("policy", Config().to_yaml(), {"exploring": True, "frozen": False, "offers": sorted(MESSAGES)})
    published: Published = [("robot", hello), ("learner", weights), ("policy", start)]
    recorded = RecordedCore(core, _Records(published), PolicyObserver(core))

    def turn(now: float, *inputs: Input) -> list[Message]:
        """Make and record one turn of the server; return its outputs."""
        outputs = [message for _, message in recorded.step(inputs, now)]
        published.extend(("policy", message) for message in outputs)
        return outputs

    turn(0.0, (peer, hello), ("learner", weights))
    action = np.zeros((1, example.ACTIONS), np.float32)
    for number in range(steps):
        begun = number > 0
        step = example.step(
            number,
            1,
            rng,
            "robot",
            stamp=int(number / RATE * 1e9),
            phase=np.array([Phase.MID if begun else Phase.FIRST], np.uint8),
            episode_step=np.array([number], np.uint32),
            reward=rng.normal(size=1).astype(np.float32),
            action=action,
            origin=int(begun),
            weights_version=int(begun),
            noise_kind=GaussianV2.NUMBER if begun else NO_NOISE,
        )
        published.append(("robot", step))
        (action,) = (answer.action for answer in turn(number / RATE, (peer, step)) if isinstance(answer, Action))
    return published


class _Records:
    """Collects what a policy server records besides its outputs: its Turns and the messages of its observer."""

    def __init__(self, published: Published) -> None:
        self._published = published

    def record_turn(self, now: float, inputs: Sequence[Input]) -> None:
        self._published.append(("policy", turns.turn(now, inputs)))

    def send(self, to: Origin, message: Message) -> bool:
        del to
        self._published.append(("policy", message))
        return True


def _tapped(published: Published, payloads: Sequence[bytes], *, recorder: bool) -> float:
    """Return the seconds that a tap needs for all messages, with or without a connected recorder.

    The tap's function ``post`` drops each message, so the time does not include sending.
    """
    link = ClientLink("recorder", handshake.hello("node", "bench", client=0), (), essential=False)
    link.state = "welcome" if recorder else "connecting"
    copies = Copies()
    tap = copies.tap(link, lambda name, payload: bool(name) and bool(payload))
    begin = time.perf_counter()
    for number, ((_, message), payload) in enumerate(zip(published, payloads, strict=True)):
        if number % (3 * RATE) == 0:  # once per second of recorded time, as if the link sent a Heartbeat
            link.sent_at = number / 3 / RATE
        copies.offer("learner", message, payload)
        tap.flush(number / 3 / RATE)
    return time.perf_counter() - begin


def _written(published: Published, payloads: Sequence[bytes], path: Path) -> float:
    """Return the seconds that a recorder needs to write all messages to a new file."""
    path.unlink(missing_ok=True)
    recorder = Recorder(path, facts_of_this_machine(Config()), RecordConfig(enabled=True), 0)
    names = {name for name, _ in published}
    peers = {name: Peer("recorder", name.encode(), handshake.hello("node", name, client=0), {}) for name in names}
    sequence: dict[tuple[str, str], int] = {}
    inputs: list[Input] = []
    for (name, message), payload in zip(published, payloads, strict=True):
        number = sequence[name, message.NAME] = sequence.get((name, message.NAME), -1) + 1
        inputs.append((peers[name], Record(message.NAME, "policy", number, 0, payload)))
    begin = time.perf_counter()
    for number, item in enumerate(inputs):
        recorder.step([item], 1.0 + number / 3 / RATE)  # a Step, a Turn and an Action every 1/60 s
    recorder.close(0.0)
    return time.perf_counter() - begin


def _lines(report: Report) -> Iterator[str]:
    return (f"{name:28} {value:12.3f}" for name, value in report.items() if name != "machine")
