"""``td3-robot``: finds the command, runs it, turns expected errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

# Small matrices on a control loop: threads of the linear algebra library only get in its way. Read when numpy loads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, Td3RobotError, UsageError
from td3_robot.util.extras import missing
from td3_robot.util.text import meant, nobody_reads

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("td3_robot.cli.train", "train a policy: starts simulator, policy server and learner"),
    "eval": ("td3_robot_sims.evaluate", "evaluate a policy, and make a video of it"),
    "bench": ("td3_robot.cli.bench", "measure speed and memory on this machine"),
    "bundle": ("td3_robot.cli.bundle", "make, show, verify, export and import policy files"),
    "keys": ("td3_robot.cli.keys", "make keys, and say which may connect beyond this machine"),
    "record": ("td3_robot.recording.node", "record what the processes of a training or a robot publish"),
    "monitor": ("td3_robot.monitor.node", "watch what a training or a robot says, live; feed PlotJuggler"),
    "info": ("td3_robot.recording.info", "say what is in a recording, and whether it is whole"),
    "play": ("td3_robot.recording.play", "play a recording to live nodes"),
    "replay": ("td3_robot.replay.check", "drive the cores from recordings, and compare"),
    "export": ("td3_robot.recording.export", "a recording as tables, in ROS 2 types, or as a Minari dataset"),
    "recover": ("td3_robot.recording.recover", "make a whole recording from a damaged one"),
    "sim": ("td3_robot_sims.node", "run one more simulator for a training"),
    "policy": ("td3_robot.policy.node", "serve a policy to a robot, or by hand in a training"),
    "node": ("td3_robot.cli.node", "command a policy server and its robots: state, activate, estop, load, …"),
    "learner": ("td3_robot.learner.node", "run the learner of a training by hand"),
    "topic": ("td3_robot.cli.topic", "list topics, show their fields, and print what is said on one, live"),
    "doctor": ("td3_robot.cli.doctor", "say what this machine has, and has not, for what"),
}
"""Command: the module whose ``main(arguments)`` it is (by name: simulators are never imported), and what for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0 good, 1 a check failed, 2 usage or configuration, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = f"td3-robot {words[0]}" if words and words[0] in COMMANDS else "td3-robot"
    try:
        return _run(words)
    except Td3RobotError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        problem = missing(error)
        if problem is None:
            raise
        print(f"{name}: {problem}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # before its base class OSError
        nobody_reads()
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_CHECK_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage(), flush=True)
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"td3-robot {version('td3-robot')}", flush=True)
        return 0
    if words[0] not in COMMANDS:
        raise UsageError(f"unknown command {words[0]!r}; {meant(words[0], COMMANDS, 'commands:')}")
    code: int = importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
    return code


def usage() -> str:
    """What ``td3-robot --help`` prints."""
    rows = "\n".join(f"  {name:<8} {purpose}" for name, (_, purpose) in COMMANDS.items())
    return (
        "usage: td3-robot COMMAND [ARGUMENTS]\n\n"
        f"commands:\n{rows}\n\n"
        "examples:\n"
        "  td3-robot train walker2d --out runs/walker2d\n"
        "  td3-robot eval runs/walker2d/policy.safetensors --video walker.mp4\n\n"
        "td3-robot COMMAND --help says more."
    )


if __name__ == "__main__":
    sys.exit(main())
