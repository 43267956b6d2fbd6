"""``td3-robot bundle``: makes, shows, verifies, exports and imports policy files."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from td3_robot.bundle import Bundle, Exploration, sha256
from td3_robot.config import loading as configuration
from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, BundleError, UsageError
from td3_robot.learner.checkpointing import checkpoint
from td3_robot.policies import find_policy
from td3_robot.policy.actor import Actor
from td3_robot.policy.trial import check_finite, observations
from td3_robot.runtime.arguments import POLICY_HELP, Parser, real
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.specs import RobotSpec
from td3_robot.util import files
from td3_robot.util.text import one_line

_EXAMPLES = """examples:
  td3-robot bundle create runs/walker2d walker.safetensors --note "first on the robot"
  td3-robot bundle create runs/walker2d/checkpoint/checkpoint-000000050000.safetensors early.safetensors
  td3-robot bundle show walker.safetensors
  td3-robot bundle verify walker.safetensors --like the-one-that-runs.safetensors
  td3-robot bundle export walker.safetensors walker.onnx --onnx
  td3-robot bundle import td3_walker.zip walker.safetensors --task Walker2D
"""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    act = {"create": _create, "show": _show, "verify": _verify, "export": _export, "import": _import}
    return act[options.command](options)


def _parser() -> Parser:
    parser = Parser(
        prog="td3-robot bundle", description="Make, show, verify, export and import policy bundles.", epilog=_EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    create = commands.add_parser("create", help="make a deployable bundle from a run, a checkpoint or another bundle")
    create.add_argument("source", metavar="SOURCE", help=f"{POLICY_HELP}, or a checkpoint file")
    create.add_argument("out", type=Path, metavar="OUT", help="file to write")
    which = create.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="take a run's best policy; fail if it has none")
    which.add_argument("--final", action="store_true", help="take a run's final policy")
    create.add_argument("--note", metavar="TEXT", help="text to store in the bundle's provenance")
    create.add_argument(
        "--noise",
        type=real(),
        default=0.0,
        metavar="SCALE",
        help="scale of Gaussian exploration noise (default: no noise)",
    )

    show = commands.add_parser("show", help="print what a bundle contains")
    verify = commands.add_parser(
        "verify",
        help="check that a bundle is readable and gives finite actions; with --like or --task, also check that the "
        "bundle is for the robot of this option; exit with 1 if a check fails",
    )
    for command in (show, verify):
        command.add_argument("policy", metavar="POLICY", help=POLICY_HELP)
        command.add_argument("--json", action="store_true", help="print one JSON object")
    _add_robot(verify)

    export = commands.add_parser("export", help="convert a bundle for runtimes in other languages")
    export.add_argument("policy", metavar="POLICY", help=POLICY_HELP)
    export.add_argument("out", type=Path, metavar="OUT", help="file to write")
    export.add_argument("--onnx", action="store_true", required=True, help="write an ONNX model")

    imported = commands.add_parser(
        "import",
        help="convert a Stable-Baselines3 zip of TD3 or DDPG, without running code from it; "
        "the zip does not hold the statistics of VecNormalize",
    )
    imported.add_argument("zip", type=Path, metavar="ZIP", help="file of Stable-Baselines3")
    imported.add_argument("out", type=Path, metavar="OUT", help="file to write")
    _add_robot(imported)
    for command in (create, export, imported):
        command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


def _add_robot(command: argparse.ArgumentParser) -> None:
    robot = command.add_mutually_exclusive_group()
    robot.add_argument("--like", metavar="POLICY", help="use the robot specification of this policy")
    robot.add_argument("--task", metavar="NAME", help="use the robot specification of this task, for example Walker2D")


def _spec(options: argparse.Namespace) -> RobotSpec | None:
    """Return the robot specification that ``--like`` or ``--task`` selects; None if neither option is given."""
    if options.like:
        return Bundle.load(find_policy(options.like)).spec
    if options.task:  # td3_robot never imports simulators statically
        with importlib.import_module("td3_robot_sims.quiet").stdout_to_stderr():  # a task may print text
            spec: RobotSpec = importlib.import_module("td3_robot_sims.tasks").spec(options.task)
        return spec
    return None


def _create(options: argparse.Namespace) -> int:
    _check_free(options)
    source = Path(options.source)
    if (options.best or options.final) and not source.is_dir():
        flag = "--best" if options.best else "--final"
        raise UsageError(f"{flag} needs a run folder; {str(source)!r} is not a folder")
    if options.best or options.final:
        run = RunFolder.open(source)
        source = run.best_file if options.best else run.policy_file
        bundle = Bundle.load(source)
    else:
        source = find_policy(options.source)
        bundle = _from_checkpoint(source) if checkpoint.is_checkpoint(source) else Bundle.load(source)
    print(f"source: {source}")
    provenance = {**bundle.provenance, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if options.note is not None:
        provenance["note"] = options.note
    exploration = Exploration("gaussian_v2", options.noise) if options.noise else Exploration()
    return _write(replace(bundle, exploration=exploration, provenance=provenance), options.out)


def _check_free(options: argparse.Namespace) -> None:
    """Raise UsageError if OUT exists and the user did not give ``--force``, or if the folder of OUT does not exist."""
    out: Path = options.out
    if out.exists() and not options.force:
        raise UsageError(f"{str(out)!r} exists already; give --force to replace it, or name another file")
    if not out.parent.is_dir():
        raise UsageError(f"{str(out)!r}: the folder {str(out.parent)!r} does not exist")


def _from_checkpoint(path: Path) -> Bundle:
    """Make a bundle of the policy in a checkpoint."""
    from td3_robot.learner.engine import selection  # imported lazily: they need torch
    from td3_robot.learner.normaliser import Normaliser

    arrays, scalars = checkpoint.load(path)
    config = configuration.load(path.resolve().parent.parent / "config.yaml")
    learner = msgspec.structs.replace(config.learner, device="cpu", precision="fp32", threads=1, compile=False)
    kind, parts = selection.implementation(learner), scalars.get("parts", {})
    name = kind.part
    if name not in parts:
        raise BundleError(
            f"{str(path)!r} is not a checkpoint of {learner.algorithm!r}; "
            "give the run folder as SOURCE, or the file policy.safetensors of the run"
        )

    def arrays_of(part: str) -> dict[str, Any]:
        begin = f"{part}."
        return {key.removeprefix(begin): array for key, array in arrays.items() if key.startswith(begin)}

    spec = RobotSpec.from_description(scalars["spec"])
    algorithm = kind(spec.observation_size, spec.action_size, config.network.hidden, learner, seed=0)
    algorithm.restore(arrays_of(name), parts[name])
    tensors = algorithm.actor_tensors(averaged=True)
    if learner.normalise_observations:
        normaliser = Normaliser(spec.observation_size)
        normaliser.restore(arrays_of("normaliser"), parts["normaliser"])
        tensors |= normaliser.tensors()
    provenance = {
        "version": scalars["version"],
        "updates": algorithm.updates,
        "env_steps": scalars["env_steps"],
        "checkpoint": path.name,
        "task": config.task,
        "seed": config.seed,
    }
    bundle = Bundle(spec, config.network.hidden, tensors, provenance=provenance, safety=config.safety)
    return Bundle.decode(bundle.encode(), f"checkpoint {path.name}")


def _write(bundle: Bundle, out: Path) -> int:
    payload = bundle.encode()
    files.write_atomically(out, payload)
    print(f"{out}: {bundle.spec.name}, {_shape(bundle)}, sha256 {sha256(payload)}")
    return EXIT_GOOD


def _show(options: argparse.Namespace) -> int:
    file = find_policy(options.policy)
    bundle, payload = Bundle.load_with_bytes(file)
    content = _described(bundle, payload)
    if options.json:
        print(json.dumps(content))
        return EXIT_GOOD
    print(f"{file}: policy for {bundle.spec.name}, every {bundle.spec.control_period * 1e3:g} ms")
    print(f"network      {_shape(bundle)}; {content['parameters']:,} numbers")
    scale = bundle.exploration.scale
    text = f"{scale[0]:g} to {scale[1]:g}" if isinstance(scale, tuple) else f"{scale:g}"
    print(f"exploration  {bundle.exploration.kind}, scale {text}")
    print(f"sha256       {content['sha256']}")
    for kind, channels in (("observation", bundle.spec.observations), ("action", bundle.spec.actions)):
        print(f"{kind}s")
        for index, channel in enumerate(channels):
            name, unit = one_line(channel.name), one_line(channel.unit)
            print(f"  {index:3} {name:<32} [{channel.low:g}, {channel.high:g}] {unit}")
    for key, value in bundle.safety.settings().items():
        print(f"safety       {one_line(key)}: {one_line(value)}")
    print("provenance")
    for key, value in bundle.provenance.items():
        print(f"  {one_line(key):<12} {one_line(value)}")
    return EXIT_GOOD


def _verify(options: argparse.Namespace) -> int:
    robot, file = _spec(options), find_policy(options.policy)
    try:
        bundle, payload = Bundle.load_with_bytes(file)
        checks = _check(bundle, robot, str(file))
    except BundleError as error:
        problem = " ".join(str(error).split())
        if options.json:
            print(json.dumps({"file": str(file), "good": False, "problem": problem}))
        print(f"td3-robot bundle verify: {problem}", file=sys.stderr)
        return EXIT_CHECK_FAILED
    if options.json:
        print(json.dumps({"file": str(file), "good": True, **checks, **_described(bundle, payload)}))
    else:
        print(f"{file}: good; {bundle.spec.name}, {_shape(bundle)}, sha256 {sha256(payload)}")
    return EXIT_GOOD


def _check(bundle: Bundle, robot: RobotSpec | None, source: str) -> dict[str, Any]:
    """Check that the bundle is for ``robot``, if given, and that its actions are finite.

    Return whether the robot was checked, and the share of actions that are close to a limit. Raise BundleError if a
    check fails.
    """
    if robot and (difference := robot.difference(bundle.spec)):
        raise BundleError(f"policy {source!r} is for another robot: {difference}")
    check_finite(bundle, f"policy {source!r}")
    actions = Actor(bundle)(observations(bundle.spec))
    span = bundle.spec.action_high - bundle.spec.action_low
    to_limit = np.minimum(actions - bundle.spec.action_low, bundle.spec.action_high - actions)
    share = float((to_limit <= 1e-3 * span).mean())
    return {"robot_checked": robot is not None, "actions_at_a_limit": round(share, 3)}


def _export(options: argparse.Namespace) -> int:
    _check_free(options)
    bundle = Bundle.load(find_policy(options.policy))
    from td3_robot.convert import onnx_export  # imported lazily: it needs an extra

    files.write_atomically(options.out, onnx_export.convert(bundle))
    print(f"{options.out}: ONNX opset {onnx_export.OPSET}, without the safety filter")
    return EXIT_GOOD


def _import(options: argparse.Namespace) -> int:
    _check_free(options)
    from td3_robot.convert import sb3

    spec = _spec(options)
    if spec is None:
        raise UsageError(
            "no robot given; give --like with a policy for the robot of the zip, or --task with the task of this robot"
        )
    return _write(sb3.read(options.zip, spec), options.out)


def _described(bundle: Bundle, payload: bytes) -> dict[str, Any]:
    """Return the hash, the sizes and the header of a bundle as plain JSON values."""
    return {
        "sha256": sha256(payload),
        "bytes": len(payload),
        "hidden": list(bundle.hidden),
        "parameters": sum(tensor.size for tensor in bundle.tensors.values()),
        "exploration": bundle.exploration.describe(),
        "spec": bundle.spec.describe(),
        "safety": bundle.safety.settings(),
        "provenance": dict(bundle.provenance),
    }


def _shape(bundle: Bundle) -> str:
    """Return the widths of all layers as text, for example ``3-8-4-2``."""
    sizes = (bundle.spec.observation_size, *bundle.hidden, bundle.spec.action_size)
    return "-".join(map(str, sizes))
