"""``td3-robot doctor``: checks what is installed on this machine, and shows how to install what is missing."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import zmq

from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, EndpointError, KeysError
from td3_robot.runtime.arguments import Parser
from td3_robot.transport import endpoints
from td3_robot.transport.keys import KeyFolder, default_folder
from td3_robot.util import machine
from td3_robot.util.extras import NEEDED, missing

_BASE = ("numpy", "pyzmq", "msgspec", "pyyaml", "safetensors")
_TIMEOUT = 120.0  # seconds for a child process
_IMPORT_CODE = """
import importlib, json, os, sys
broken = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        broken[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
print()
print(json.dumps(broken), flush=True)
os._exit(0)  # skips exit handlers: a package could print after the JSON
"""
_REALTIME_CODE = """
import json
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.runtime.realtime import apply
outcome = apply(RealtimeConfig(priority=1, lock_memory=True))
print(json.dumps({"applied": outcome.applied, "refused": outcome.refused}))
"""
_EXAMPLES = """examples:
  td3-robot doctor
  td3-robot doctor --json

The result is valid only for this user, this Python environment and the limits of this shell (ulimit).
A line begins with
  ok   it works
  no   it is missing, but you may not need it
  BAD  it is present but cannot work
exit codes: 0 if no line is BAD, 1 if a line is BAD
"""

State = Literal["ok", "no", "BAD"]


class Finding(NamedTuple):
    """One line of the output: what was checked, the result, and details or what to do."""

    name: str
    state: State
    text: str


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="td3-robot doctor",
        description="For each use of td3-robot, check what this machine has and what is missing.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    findings = [*_packages(), *_uses(), _processor(), _compiler(), *_realtime(), _sockets(), _keys(default_folder())]
    if options.json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings]}))
    else:
        width = max(len(finding.name) for finding in findings)
        print("\n".join(f"{state:<4}{name:<{width}}  {text}" for name, state, text in findings))
    return EXIT_CHECK_FAILED if any(finding.state == "BAD" for finding in findings) else EXIT_GOOD


def _packages() -> list[Finding]:
    python = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    versions = ", ".join(f"{name} {machine.version(name)}".strip() for name in ("td3-robot", *_BASE))
    return [
        Finding("python", "ok", python),
        Finding("base packages", "ok", f"{versions}; ZeroMQ {zmq.zmq_version()}"),
        Finding("keys (CURVE)", "ok", "libzmq supports them")
        if zmq.has("curve")
        else Finding("keys (CURVE)", "BAD", "this libzmq has no CURVE, so links to other machines are impossible"),
    ]


def _uses() -> list[Finding]:
    """Check for each use of td3-robot whether its modules can be imported. A child process imports them."""
    findings = []
    modules = sorted({name for names in NEEDED.values() for name in names if importlib.util.find_spec(name)})
    broken, problem = _child(_IMPORT_CODE, *modules)
    for use, names in NEEDED.items():
        absent = [name for name in names if name not in modules]
        unusable = [f"{name}: {broken[name]}" for name in names if broken.get(name)]
        if absent:
            words = missing(ModuleNotFoundError(name=absent[0])) or f"needs {absent[0]}"
            others = f"; also missing: {', '.join(absent[1:])}" if absent[1:] else ""
            findings.append(Finding(use, "no", words + others))
        elif problem or unusable:
            advice = "; source the setup file of your ROS 2 installation" if "rclpy" in names else ""
            findings.append(Finding(use, "BAD", f"cannot be imported: {problem or '; '.join(unusable)}{advice}"))
        else:
            findings.append(Finding(use, "ok", ", ".join(f"{name} {machine.version(name)}".strip() for name in names)))
    return findings


def _child(code: str, *words: str) -> tuple[dict[str, Any], str]:
    """Run code in a child process. Return the JSON object that it prints last, and an error text (empty on success)."""
    command = [sys.executable, "-c", code, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {}, f"the check did not end within {_TIMEOUT:g} s"
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    try:
        answer = json.loads((done.stdout.splitlines() or [""])[-1])
    except ValueError:
        answer = None
    return (answer, "") if isinstance(answer, dict) else ({}, "the check ended without a result")


def _processor() -> Finding:
    described = machine.describe()
    room = machine.available_memory()
    memory = "" if room is None else f", {room / 1e9:.1f} GB of memory free"
    words = f"{described['processor']}, {machine.available_cores()} cores, load {described['load']}{memory}"
    return Finding("processor", "ok", words)


def _compiler() -> Finding:
    if lack := machine.compiler_lack():
        return Finding("C++ compiler", "no", f"{lack}: learner.compile has no effect")
    return Finding("C++ compiler", "ok", f"{' '.join(machine.compiler())}, for learner.compile")


def _realtime() -> list[Finding]:
    """Check which real-time settings the system grants. A child process asks for them."""
    answer, problem = _child(_REALTIME_CODE)
    if problem:
        return [Finding("real time", "BAD", f"the settings cannot be checked: {problem}")]
    remedy = "; under systemd, set LimitRTPRIO and LimitMEMLOCK"
    return [Finding("real time", "ok", text) for text in answer["applied"]] + [
        Finding("real time", "no", text + remedy) for text in answer["refused"]
    ]


def _sockets() -> Finding:
    """Check whether the processes of a run can bind their sockets: bind a socket in the same folder."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix=endpoints.SOCKETS_PREFIX, dir=endpoints.socket_home()) as folder,
            zmq.Context() as context,
            context.socket(zmq.ROUTER) as socket,
        ):
            endpoint = f"ipc://{Path(folder) / 'supervisor'}"
            endpoints.check(endpoint, bind=True, keys=False)
            socket.bind(endpoint)
    except (OSError, zmq.ZMQError, EndpointError) as error:
        return Finding(
            "sockets of runs",
            "BAD",
            f"in {endpoints.socket_home()}: {error}; to change the folder, set XDG_RUNTIME_DIR or TMPDIR",
        )
    return Finding("sockets of runs", "ok", str(endpoints.socket_home()))


def _keys(folder: Path) -> Finding:
    keys = KeyFolder(folder)
    if not keys.secret_file.exists():
        return Finding("this machine's keys", "no", f"none in {folder}; to make keys: td3-robot keys create NAME")
    try:
        identity = keys.identity()
        return Finding(
            "this machine's keys", "ok", f"{identity.name}, other known keys: {len(keys.entries())}, folder: {folder}"
        )
    except KeysError as error:
        return Finding("this machine's keys", "BAD", str(error))
