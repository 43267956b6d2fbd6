"""``td3-robot bench record`` and ``bench replay``: what a recording costs, and how fast the policy core repeats one.

But for ``record --training``, both use one robot of Walker2D's size (22 observations, 6 actions), networks of 400 and
300, and 60 steps a second of recorded time; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.bench import recorded_training as bench_training
from td3_robot.bundle import Bundle, Exploration, layer_shapes, sha256
from td3_robot.config.schema import Config, RecordConfig
from td3_robot.core_types import Input, Origin, Peer
from td3_robot.errors import EXIT_GOOD, UsageError
from td3_robot.messages import MESSAGES, NO_NOISE, Action, Message, Phase, Record, Start, Step, Weights
from td3_robot.policy import core as policy_core
from td3_robot.policy.noise import Gaussian
from td3_robot.recording.boundary import PolicyObserver, RecordedCore
from td3_robot.recording.entries import facts_of_this_machine
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import Recorder
from td3_robot.replay import check as replay
from td3_robot.runtime.node import Parser
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import codec, turns
from td3_robot.transport import link as handshake
from td3_robot.transport.link import ClientLink
from td3_robot.transport.tap import Tap
from td3_robot.util import machine

RATE = 60.0
_OBSERVATIONS, _ACTIONS, _HIDDEN = 22, 6, (400, 300)
_PACKAGES = ("numpy", "msgspec", "mcap")
Said = list[tuple[str, Message]]


def record(arguments: Sequence[str] | None = None) -> int:
    """``bench record``."""
    parser = _parser("record", "what it costs a node, or a whole training, to be recorded; how fast a recorder writes")
    parser.epilog = f"{parser.epilog}\n  td3-robot bench record --training walker2d --blocks 12"
    parser.add_argument("--training", metavar="CONFIG", help="measure in a training with this configuration instead")
    parser.add_argument("--blocks", type=int, default=8, metavar="N", help="of it, see docs (default: %(default)s)")
    parser.add_argument(
        "--stretch", type=float, default=5.0, metavar="S", help="a quarter of one (default: %(default)s)"
    )
    parser.add_argument("--warm-up", type=int, default=1000, metavar="STEPS", help="before (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of CONFIG")
    options = _options(parser, arguments, "blocks", "warm_up")
    if not 1 <= options.stretch < math.inf:
        raise UsageError(f"--stretch is {options.stretch:g}; it must be at least 1 s")
    if options.training:
        computer = machine.describe((*_PACKAGES, "torch"))
        with tempfile.TemporaryDirectory() as folder:
            figures = bench_training.measure(
                options.training, Path(folder), options.blocks, options.stretch, options.warm_up, options.set
            )
        return _print({"machine": computer, **figures}, options.json)
    said = _session(options.steps)
    alone = _offers(said, welcome=False, rounds=options.rounds)
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(_written(said, Path(folder) / "bench.mcap"))
    messages, seconds = len(said), statistics.median(item["seconds"] for item in rounds)
    report = {
        "machine": machine.describe(_PACKAGES),
        "messages": messages,
        "tap_without_recorder_us": alone * 1e6,
        "tap_with_recorder_us": _offers(said, welcome=True, rounds=options.rounds) * 1e6,
        "recorder_messages_per_s": messages / seconds,
        "recorder_mb_per_s": rounds[0]["payload"] / seconds / 1e6,
        "wire_bytes_per_step": rounds[0]["payload"] / options.steps,
        "file_bytes_per_step": rounds[0]["file"] / options.steps,
    }
    return _print(report, options.json)


def replay_policy(arguments: Sequence[str] | None = None) -> int:
    """``bench replay``."""
    parser = _parser("replay", "how much faster than real time the policy core is replayed")
    options = _options(parser, arguments)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.mcap"
        _written(_session(options.steps), path)
        for _ in range(options.rounds):
            begin, begin_processor = time.perf_counter(), time.process_time()
            (report,) = replay.check(Session([path]), ["policy"], exact=True)
            rounds.append((time.perf_counter() - begin, time.process_time() - begin_processor))
            if not report.same or report.turns != options.steps + 1:
                raise UsageError("the recording made for this benchmark does not replay; run td3-robot replay on yours")
    seconds, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
    figures = {
        "machine": machine.describe(_PACKAGES),
        "steps": options.steps,
        "seconds": seconds,
        "steps_per_s": options.steps / seconds,
        "times_real_time_at_60_hz": options.steps / RATE / seconds,
        "times_real_time_undisturbed": options.steps / RATE / processor,  # by processor time: other load left out
    }
    return _print(figures, options.json)


def _parser(name: str, purpose: str) -> Parser:
    parser = Parser(
        prog=f"td3-robot bench {name}",
        description=f"Measure {purpose}.",
        epilog=f"examples:\n  td3-robot bench {name}\n  td3-robot bench {name} --json > {name}.json",
    )
    parser.add_argument("--steps", type=int, default=6000, metavar="N", help="recorded (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _options(parser: Parser, arguments: Sequence[str] | None, *counts: str) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    for key in ("steps", "rounds", *counts):
        if getattr(options, key) < 1:
            raise UsageError(f"--{key.replace('_', '-')} is {getattr(options, key)}; it must be at least 1")
    return options


def _session(steps: int) -> Said:
    """What a robot, its policy server and a learner say that sends one set of weights, and the turns of the server."""
    rng = np.random.default_rng(0)
    spec = RobotSpec(
        "Bench",
        tuple(Channel(f"o{index}", "1", -5.0, 5.0) for index in range(_OBSERVATIONS)),
        tuple(Channel(f"a{index}", "1", -1.0, 1.0) for index in range(_ACTIONS)),
        1 / RATE,
    )
    shapes = layer_shapes(spec, _HIDDEN)
    tensors = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
    payload = Bundle(spec, _HIDDEN, tensors, Exploration("gaussian", 0.1), {"version": 1}).encode()
    weights = Weights(1, 0, 0, sha256(payload), payload)
    hello = handshake.hello("simulator", "robot", client=0, robots=1, spec=spec)
    core, peer = policy_core.make(Config(), "policy", exploring=True), Peer("policy", b"robot", hello, {})
    start = Start("policy", Config().to_yaml(), {"exploring": True, "frozen": False, "offers": sorted(MESSAGES)})
    said: Said = [("robot", hello), ("learner", weights), ("policy", start)]
    recorded = RecordedCore(core, _Records(said), PolicyObserver(core))

    def told(now: float, *inputs: Input) -> list[Message]:
        """Run and record a turn of the server; returns its outputs."""
        outputs = [message for _, message in recorded.step(inputs, now)]
        said.extend(("policy", message) for message in outputs)
        return outputs

    told(0.0, (peer, hello), ("learner", weights))
    action = np.zeros((1, _ACTIONS), np.float32)
    for number in range(steps):
        step = Step(
            source="robot",
            incarnation=0,
            sequence=number,
            transitions=number,
            stamp=int(number / RATE * 1e9),
            phase=np.array([Phase.MID if number else Phase.FIRST], np.uint8),
            episode=np.zeros(1, np.uint64),
            episode_step=np.array([number], np.uint32),
            observation=rng.normal(size=(1, _OBSERVATIONS)).astype(np.float32),
            reward=rng.normal(size=1).astype(np.float32),
            action=action,
            origin=1 if number else 0,
            answered=max(0, number - 1),
            weights_version=1 if number else 0,
            noise_kind=Gaussian.NUMBER if number else NO_NOISE,
            noise_seed=0,
            needs_version=0,
            world={},
        )
        said.append(("robot", step))
        (action,) = (answer.action for answer in told(number / RATE, (peer, step)) if isinstance(answer, Action))
    return said


class _Records:
    """Collects what the policy server's boundary records."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def took(self, now: float, inputs: Sequence[Input]) -> None:
        self._said.append(("policy", turns.turn(now, inputs)))

    def send(self, to: Origin, message: Message) -> bool:
        del to
        self._said.append(("policy", message))
        return True


def _offers(said: Said, *, welcome: bool, rounds: int) -> float:
    """Seconds that being recorded costs a node for each message it sends, the sending itself left out."""
    payloads = [codec.encode(message) for _, message in said]
    taken = []
    for _ in range(rounds):
        session = ClientLink("recorder", handshake.hello("node", "bench", client=0), ())
        session.state = "welcome" if welcome else "connecting"
        tap = Tap(session, _swallow)
        begin = time.perf_counter()
        for number, ((_, message), payload) in enumerate(zip(said, payloads, strict=True)):
            if number % (3 * RATE) == 0:
                session.sent(number / 3 / RATE)  # as by a Heartbeat
            tap.offer("learner", message, payload)
            tap.flush(number / 3 / RATE)
        taken.append((time.perf_counter() - begin) / len(said))
    return statistics.median(taken)


def _swallow(name: str, payload: bytes) -> bool:
    return bool(name) and bool(payload)


def _written(said: Said, path: Path) -> dict[str, float]:
    """What a recorder needs for all of it, with the time between messages taken out."""
    recorder = Recorder(path, facts_of_this_machine(Config()), RecordConfig(enabled=True), 0)
    peers = {name: Peer("recorder", name.encode(), handshake.hello("node", name, client=0), {}) for name, _ in said}
    sequence: dict[tuple[str, str], int] = {}
    inputs: list[Input] = []
    for name, message in said:
        number = sequence[name, message.NAME] = sequence.get((name, message.NAME), -1) + 1
        inputs.append((peers[name], Record(message.NAME, "policy", number, 0, codec.encode(message))))
    begin = time.perf_counter()
    for number, item in enumerate(inputs):
        recorder.step([item], 1.0 + number / 3 / RATE)  # a Step, a Turn and an Action each 1/60 s
    recorder.close(0.0)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "payload": float(recorder.counters["bytes"]), "file": float(path.stat().st_size)}


def _figure(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:12.3f}"
    if "median" not in value:
        return "  ".join(f"{part:12.3f} {name}" for name, part in value.items())
    interval = f"{value['low']:.3f} to {value['high']:.3f}" if value["low"] is not None else "none, of under 6 values"
    return f"{value['median']:12.3f} (95 % interval: {interval})"


def _print(report: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(report, indent=2))
        return EXIT_GOOD
    computer = report["machine"]
    print(f"{computer['processor']}, {computer['cores']} cores, load {computer['load']} before")
    for name, value in report.items():
        if name != "machine":
            print(f"{name:28} {_figure(value)}")
    return EXIT_GOOD
