"""Makes the recorded sessions that `test_sessions.py` replays:

    python tests/replay/make_sessions.py [NAME …]

Two are trainings with real processes, one of which loses its policy server on the way; three are runs in one process,
whose clock and links are in our hands, so that a message can be lost, another be late, and a deadline be missed. Make
them anew when the protocol changes; when only behaviour changes on purpose, `td3-robot replay FILE --update` shows and
keeps that.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from td3_robot import config as configuration
from td3_robot.bundle import sha256
from td3_robot.cli.main import main as td3_robot
from td3_robot.messages import Command, Reply, StateChange
from td3_robot.transport.memory import MemoryBus
from td3_robot.transport.session import ClientSession, hello
from tests.replay.stages import Deployed, Stage, Training, leg_policy, tamper

FOLDER = Path(__file__).parent / "sessions"
SMALL = (
    "record=true",
    "network.hidden=[8]",
    "learner.batch_size=16",
    "learner.publish_every=40",
    "learner.policy_average=0",
    "checkpoint.every=0",
)
PENDULUM = ("task=gymnasium:Pendulum-v1", "evaluation.every=0", *SMALL)


def walkers(target: Path) -> None:
    """Lock-step, two simulators of two robots each, evaluations; every episode ends with a fall."""
    overrides = ("simulators=2", "robots=2", "learner.learning_starts=100", "evaluation.every=200")
    run = Training(target.parent, 400, *SMALL, *overrides, "evaluation.episodes=1", "timing=lockstep")
    run.finish()
    run.session.rename(target)


def pendulum(target: Path) -> None:
    """One robot whose episodes are truncated after 200 steps; the policy server is killed and comes back."""
    run = Training(target.parent, 1040, *PENDULUM, "learner.learning_starts=150", "learner.replay_ratio=0.25")
    run.wait_for_steps(300)
    os.kill(run.pid_of("policy"), signal.SIGKILL)
    run.finish()
    run.session.rename(target)


def tampered(target: Path) -> None:
    """Three robots in real time: Step 20 comes after Step 21, the policy server pauses, Step 60 is lost."""
    overrides = ("pacing.mode=realtime", "robots=3", "learner.learning_starts=60", "learner.replay_ratio=0.2")
    stage = Stage(target, configuration.load("walker2d", [*PENDULUM, *overrides, "total_steps=210"]))
    tamper(stage.bus(stage.policy), stage.bus(stage.learner), lost=60, late=20)
    for step in stage.turns():
        stage.play([stage.policy] if 40 <= step < 43 else [])
    stage.close()


def faulted(target: Path) -> None:
    """A robot in real time: its policy server, then itself, pauses until watchdogs bite; an operator does the rest.

    One period is 1/30 s: with deadlines of 100 ms, a pause of 8 periods is a fault, which 100 ms without one end.
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
    operator = MemoryBus()
    introduction = hello("operator", "operator", client=9)
    operator.connect(ClientSession("policy", introduction, (Reply, StateChange)), stage.bus(stage.policy))
    said = {20: "state", 90: "estop", 100: "reset", 104: "activate", 130: "rollback", 150: "unfreeze"}
    silent_until = 0  # ns
    for step in stage.turns():
        operator.receive(stage.now)
        if step == 70 and not silent_until:
            silent_until = stage.tape.now + 270_000_000
        if verb := said.pop(step, None):
            operator.send("policy", Command(step, "", verb, "as make_sessions.py says", 0, "", b""), stage.now)
        paused = [stage.policy] if 50 <= step < 58 else [stage.robot] if stage.tape.now < silent_until else []
        stage.play(paused)
    stage.close()


def deployed(target: Path) -> None:
    """A robot and its policy server: whatever can go wrong with either does, with every safety setting in force."""
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
    script = {  # for one control period of 20 ms or more, so that one observation at least falls into it
        "nan": (600, 660),
        "frozen": (1200, 1500),
        "out of range": (2000, 2020),
        "stop": (4700, 4720),
        "fall": (5500, 5520),
        "no motor": (6100, 6120),
    }
    paused = [("policy", 2300, 2450), ("leg", 3000, 3150), ("policy", 5505, 5560)]
    said = [
        (150, "state", ""),
        *((time, "activate", "leg") for time in (800, 6200)),
        *((time, "activate", "") for time in (1700, 2600, 3300, 3700, 3900, 4350, 4500, 5000, 5300)),
        (3600, "estop", ""),
        (3800, "reset", ""),
        (4200, "estop", "leg"),
        (4300, "activate", "leg"),
        (4400, "reset", "leg"),
        (4900, "reset", ""),
        (5200, "deactivate", ""),
        (5600, "load", "bad"),
        (5650, "rollback", ""),
        (5700, "load", ""),
        (5800, "freeze", ""),
        (5900, "rollback", ""),
        (6000, "estop", "nobody"),
    ]
    config = configuration.load("walker2d", safety)
    stage = Deployed(target, config, configuration.load("walker2d", [*safety, "safety.limits=[-0.5, 0.5]"]), script)
    waiting = sorted(said)
    while stage.ms < 6500:
        while waiting and waiting[0][0] <= stage.ms:
            number, (_, verb, name) = len(waiting), waiting.pop(0)
            policy = leg_policy(1, 2, 1e30) if name == "bad" else leg_policy(1, 2)
            payload = policy.encode() if verb == "load" else b""
            digest = sha256(payload) if payload else ""
            stage.say(
                Command(number, name if name != "bad" else "", verb, "as make_sessions.py says", 0, digest, payload)
            )
        still = {name for name, begin, end in paused if begin <= stage.ms < end}
        stage.turn([core for name, core in (("policy", stage.policy), ("leg", stage.driver)) if name in still])
    stage.close()


SESSIONS = {"walkers": walkers, "pendulum": pendulum, "tampered": tampered, "faulted": faulted, "deployed": deployed}


def main(names: list[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in names or SESSIONS:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / f"{name}.mcap"
            SESSIONS[name](made)
            # As it was recorded first, so that nothing is put right by the update, which only adds transitions.
            for words in ((), ("--update",)):
                if code := td3_robot(["replay", str(made), *words]):
                    return code
            (FOLDER / made.name).write_bytes(made.read_bytes())
    return td3_robot(["replay", *(str(FOLDER / f"{name}.mcap") for name in names or SESSIONS)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
