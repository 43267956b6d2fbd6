"""Make the recorded sessions that `test_sessions.py` replays.

    python tests/replay/make_sessions.py [NAME …]

Two sessions are trainings with real processes; in one of them the policy server is killed. All remaining sessions run
in one process with a simulated clock and simulated links, so messages can be lost or late, and deadlines can be missed.

If the protocol changes, make the sessions again. If you intentionally change the outputs of a core, but not the
protocol, run `td3-robot replay FILE --update`. The command shows the changed outputs and stores them as expected
outputs.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.cli.main import main as td3_robot
from td3_robot.config import loading as configuration
from td3_robot.messages import Command, LifecycleChange, Reply, Teleop, Weights
from td3_robot.policy.node import weights
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.transport.link import ClientLink, hello
from tests.conftest import Command as Process
from tests.replay.stages import LEG, Deployed, Stage, leg_policy, repeat, tamper

FOLDER = Path(__file__).parent / "sessions"
SMALL = (
    "record=true",
    "record.weights_every=1",
    "network.hidden=[8]",
    "learner.batch_size=16",
    "learner.publish_every=40",
    "learner.policy_average=0",
    "learner.compile=false",
    "checkpoint.every=0",
)
PENDULUM = ("task=gymnasium:Pendulum-v1", "evaluation.every=0", *SMALL)


def start(target: Path, steps: int, *overrides: str) -> Process:
    """Start a training in the folder ``run`` beside ``target``."""
    sets = [word for item in ("learner.threads=2", *overrides) for word in ("--set", item)]
    words = ("train", "walker2d", "--out", "run", "--steps", str(steps), "--log-every", "0.1")
    return Process(*words, *sets, cwd=target.parent)


def finish(training: Process, target: Path) -> None:
    if training.finish():
        raise RuntimeError(training.output())
    (training.cwd / "run" / "session.mcap").rename(target)


def walkers(target: Path) -> None:
    """Train in lock-step with evaluations and two simulators of two robots each.

    An episode ends only when its robot falls.
    """
    overrides = ("simulators=2", "robots=2", "learner.learning_starts=100", "evaluation.every=200")
    finish(start(target, 400, *SMALL, *overrides, "evaluation.episodes=1", "timing=lockstep"), target)


def pendulum(target: Path) -> None:
    """One robot, whose episodes are truncated after 200 steps. The policy server is killed and restarted."""
    training = start(target, 1040, *PENDULUM, "learner.learning_starts=150", "learner.replay_ratio=0.25")
    training.wait_for_steps(300)
    training.children()["policy"].kill()
    finish(training, target)


def tampered(target: Path) -> None:
    """Three robots run in real time. Step 20 comes after Step 21, the policy server pauses, and Step 60 is lost."""
    overrides = ("pacing.mode=realtime", "robots=3", "learner.learning_starts=60", "learner.replay_ratio=0.2")
    stage = Stage(target, configuration.load("walker2d", [*PENDULUM, *overrides, "total_steps=210"]))
    tamper(stage.bus(stage.policy), stage.bus(stage.learner), lost=60, late=20)
    for step in stage.turns():
        stage.play([stage.policy] if 40 <= step < 43 else [])
    stage.close()


def faulted(target: Path) -> None:
    """One robot runs in real time. The policy server and later the robot pause too long. An operator sends commands.

    One period is 50 ms, and deadlines are 100 ms. So the server's pause of 8 periods causes a fault. The robot's pause
    of 270 ms causes another. A fault ends after valid data have come for 100 ms.
    """
    overrides = ("pacing.mode=realtime", "learner.learning_starts=40", "learner.replay_ratio=0.2", "total_steps=180")
    safety = (
        "safety.action_deadline_ms=100",
        "safety.observation_deadline_ms=100",
        "safety.recovery=automatic",
        "safety.recovery_ms=100",
        "safety.rate=20",
    )
    settings = [*PENDULUM, *overrides, *safety, "safety.limits=[-1.5, 1.5]"]
    stage = Stage(target, configuration.load("walker2d", settings))
    operator = stage.another_bus()
    introduction = hello("operator", "operator", client=9)
    operator.connect("policy", ClientLink("policy", introduction, (Reply, LifecycleChange)))
    verbs = {20: "state", 90: "estop", 100: "reset", 104: "activate", 130: "rollback", 150: "unfreeze"}
    silent_until = 0  # ns
    for step in stage.turns():
        operator.receive(0.0)
        if step == 70 and not silent_until:
            silent_until = stage.tape.now + 270_000_000
        if verb := verbs.pop(step, None):
            operator.send("policy", Command(step, "", verb, "as make_sessions.py says", 0, "", b""))
        paused = [stage.policy] if 50 <= step < 58 else [stage.robot] if stage.tape.now < silent_until else []
        stage.play(paused)
    stage.close()


Act = Callable[[], object]


def perform(stage: Deployed, acts: Sequence[tuple[int, Act]], paused: Sequence[tuple[str, int, int]], end: int) -> None:
    """Run the stage until the time ``end`` (ms), then close it.

    ``acts`` lists (TIME, ACT): at TIME (ms), the stage calls the function ACT.
    ``paused`` lists (NODE, BEGIN, END): between BEGIN and END (ms), the node takes no turns.
    """
    waiting = sorted(acts, key=lambda act: act[0])
    while stage.ms < end:
        while waiting and waiting[0][0] <= stage.ms:
            waiting.pop(0)[1]()
        stage.turn([name for name, begin, until in paused if begin <= stage.ms < until])
    stage.close()


def commander(stage: Deployed) -> Callable[..., Act]:
    """Return ``say(VERB, TARGET, POLICY, VERSION, BY)``, which makes an act that sends a Command.

    BY names the driver that sends the Command. If BY is empty, the operator sends it.
    """
    numbers = itertools.count(1)

    def say(verb: str, target: str = "", policy: Bundle | None = None, version: int = 0, by: str = "") -> Act:
        payload = policy.encode() if policy else b""
        digest = sha256(payload) if payload else ""
        command = Command(next(numbers), target, verb, "as make_sessions.py says", version, digest, payload)
        return lambda: stage.send(command, by)

    return say


def deployed(target: Path) -> None:
    """A robot and its policy server have nine safety settings.

    Events in ``script``, pauses of nodes, and Commands cause faults.
    """
    safety = (
        "safety.limits=[-0.6, 0.6]",
        "safety.rate=12",
        "safety.low_pass=9",
        "safety.safe_action={torque: -0.125}",
        "safety.refuse_out_of_range=true",
        "safety.frozen_ms=150",
        "safety.observation_deadline_ms=100",
        "safety.action_deadline_ms=100",
        "safety.recovery_ms=40",
    )
    script = {  # each event lasts at least one control period (20 ms), so that it covers an observation
        "nan": (600, 660),
        "frozen": (1200, 1500),
        "out of range": (2000, 2020),
        "stop": (4700, 4720),
        "fall": (5500, 5520),
        "no motor": (6100, 6120),
    }
    config = configuration.load("walker2d", safety)
    stage = Deployed(target, config, configuration.load("walker2d", [*safety, "safety.limits=[-0.5, 0.5]"]), script)
    stage.serve(leg_policy(0, 1))
    stage.drive()
    say = commander(stage)
    acts = [
        (150, say("state")),
        *((time, say("activate", "leg")) for time in (800, 6200)),
        *((time, say("activate")) for time in (1700, 2600, 3300, 3700, 3900, 4350, 4500, 5000, 5300)),
        (3600, say("estop")),
        (3800, say("reset")),
        (4200, say("estop", "leg")),
        (4300, say("activate", "leg")),
        (4400, say("reset", "leg")),
        (4900, say("reset")),
        (5200, say("deactivate")),
        (5600, say("load", policy=leg_policy(1, 2, 1e30))),
        (5650, say("rollback")),
        (5700, say("load", policy=leg_policy(1, 2))),
        (5800, say("freeze")),
        (5900, say("rollback")),
        (6000, say("estop", "nobody")),
    ]
    perform(stage, acts, [("policy", 2300, 2450), ("leg", 3000, 3150), ("policy", 5505, 5560)], 6500)


def restarted(target: Path) -> None:
    """The policy server starts late, and is killed three times. The robot leaves and returns.

    A learner sends weights. The operator and a second driver send commands.
    """
    safety = (
        "safety.limits=[-0.9, 0.9]",
        "safety.safe_action={torque: -0.125}",
        "safety.observation_deadline_ms=100",
        "safety.action_deadline_ms=100",
    )
    config = configuration.load("walker2d", safety)
    of_driver = configuration.load("walker2d", [*safety, "safety.safe_action={torque: 0.25}"])
    stage = Deployed(target, config, of_driver, {"stop": (3780, 3800), "fall": (1390, 1410)})
    say = commander(stage)
    kept: list[SafetyState] = []

    def learn(version: int, **fields: Any) -> Act:
        return lambda: stage.learn(changed(learnt(version), **fields))

    def kill() -> None:
        kept.append(stage.policy.safety_state)
        stage.end("policy", bye=False)

    def serve(policy: Bundle | None = None) -> Act:
        return lambda: stage.serve(policy, safety_state=(kept or [SafetyState()])[-1] if policy else None, learner=True)

    # The safety settings of these policies also apply to the learner's policies.
    first = replace(leg_policy(0, 1), safety=SafetyConfig(rate=12))
    second = replace(leg_policy(6, 6), safety=SafetyConfig(rate=8))
    other_leg = replace(LEG, actions=(replace(LEG.actions[0], high=2.0),))
    foreign = replace(leg_policy(3, 3), spec=other_leg).encode()
    acts: list[tuple[int, Act]] = [
        (0, stage.drive),
        (600, serve(first)),
        # Six cases of Weights: valid; wrong hash; for another robot; not newer; during a freeze; after a rollback.
        (900, learn(2)),
        (1000, learn(3, sha256="0" * 64)),
        (1050, learn(3, payload=foreign, sha256=sha256(foreign))),
        (1100, learn(2, payload=foreign, sha256=sha256(foreign))),
        (1150, say("state")),
        (1200, say("freeze")),
        (1250, learn(4)),
        (1300, say("unfreeze")),
        (1350, learn(5)),
        (1450, say("load", policy=second)),
        (1500, say("rollback")),
        (1550, learn(7)),
        (1600, say("unfreeze")),
        (1650, learn(8)),
        (1700, say("rollback", version=7)),
        # From 1800 to 1960 ms, the server receives the same Step repeatedly.
        (1800, lambda: repeat(stage.server, until=lambda: stage.ms >= 1960)),
        (2100, say("activate", "leg")),
        # The driver leaves and returns during a stop, and during a fault.
        (2200, say("estop", "leg")),
        (2250, lambda: stage.end("leg")),
        (2300, say("activate", "leg")),
        (2350, stage.drive),
        (2450, say("activate", "leg")),
        (2500, say("reset", "leg")),
        (2550, say("activate", "leg")),
        (2850, lambda: stage.end("leg")),
        (2900, stage.drive),
        (3000, say("activate", "leg")),
        # Of a driver's commands, the server carries out only the emergency stop of all robots.
        (3050, lambda: stage.join("arm")),
        (3100, say("deactivate", by="arm")),
        (3120, say("estop", "leg", by="arm")),
        (3150, say("estop", by="arm")),
        (3200, say("reset", by="arm")),
        (3250, lambda: stage.end("arm")),
        (3300, say("reset")),
        (3350, say("activate")),
        # After a rollback, the server is killed while inactive. The robot then reports an emergency stop.
        (3550, say("rollback")),
        (3600, say("deactivate")),
        (3650, kill),
        (3850, serve(learnt_policy(8))),
        (4000, say("reset")),
        (4050, say("activate")),
        # Three stops are in force when the server is killed: for the robot, for an absent robot, and for all robots.
        (4250, say("estop", "leg")),
        (4270, say("estop", "nobody")),
        (4300, say("estop")),
        (4350, kill),
        (4400, serve(first)),
        (4500, say("activate")),
        (4550, say("reset")),
        (4600, say("activate")),
        (4750, say("shutdown", "leg")),
        (4800, lambda: stage.end("leg")),
        (4850, say("deactivate")),
        (4900, say("shutdown")),
        (4950, kill),
        # The server starts without a policy. When the first weights arrive, the newest Step is too old for an answer.
        (5000, stage.drive),
        (5000, serve()),
        (5340, learn(9)),
    ]
    perform(stage, acts, [("leg", 2680, 2850), ("leg", 5210, 5350)], 5500)


def learnt_policy(version: int) -> Bundle:
    return replace(leg_policy(version, version), exploration=Exploration("gaussian", 0.1))


def learnt(version: int) -> Weights:
    return weights(version, learnt_policy(version))


def takeover(target: Path) -> None:
    """An operator takes over a robot, is silent for 420 ms, stops all robots, and gives the robot back.

    The robot's driver pauses during the takeover.
    """
    safety = (
        "safety.limits=[-0.9, 0.9]",
        "safety.rate=12",
        "safety.safe_action={torque: -0.125}",
        "safety.observation_deadline_ms=100",
        "safety.action_deadline_ms=400",
    )
    config = configuration.load("walker2d", safety)
    stage = Deployed(target, config, config, {})
    stage.serve(leg_policy(0, 1))
    stage.drive()
    say = commander(stage)
    numbers = itertools.count(1)

    def act(torque: float) -> Act:
        return lambda: stage.send(Teleop("leg", 0, next(numbers), 0, [torque]))

    acts: list[tuple[int, Act]] = [
        (100, act(0.5)),  # refused: the operator does not have the robot
        (200, say("takeover", "leg")),
        *((time, act(1.5 if time < 600 else -0.5)) for time in range(300, 1000, 40)),
        # The operator is silent from 980 to 1400 ms. The emergency stop at 1700 ms interrupts the operator's control.
        *((time, act(0.25)) for time in range(1400, 2600, 40)),
        (1700, say("estop")),
        (1900, say("reset")),
        (1950, say("activate")),
        (2400, say("activate", "leg")),
        (2700, say("give_back", "leg")),
    ]
    perform(stage, acts, [("leg", 2150, 2300)], 3600)


SESSIONS = {
    "walkers": walkers,
    "pendulum": pendulum,
    "tampered": tampered,
    "faulted": faulted,
    "deployed": deployed,
    "restarted": restarted,
    "takeover": takeover,
}


def main(names: list[str]) -> int:
    if unknown := sorted({*names} - {*SESSIONS}):
        print(f"there is no session {unknown[0]!r}; allowed: {', '.join(SESSIONS)}", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    for name in names or SESSIONS:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / f"{name}.mcap"
            SESSIONS[name](made)
            # The first replay must find no difference. So --update only attaches the learner's transitions.
            for words in ((), ("--update",)):
                if code := td3_robot(["replay", str(made), *words]):
                    return code
            (FOLDER / made.name).write_bytes(made.read_bytes())
    return td3_robot(["replay", *(str(FOLDER / f"{name}.mcap") for name in names or SESSIONS)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
