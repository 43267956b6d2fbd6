"""Run every command of docs/how-to/deploy.md in order. Two folders stand for the robot and the workstation.

Substitutions:

- ``ROBOT``, ``WORKSTATION`` and ``0.0.0.0`` become ``127.0.0.1``. Ports 5601 and 5555 become free ports.
- ``/opt``, ``/usr/local``, ``/etc`` and ``/var/lib`` become folders in the robot's folder. Home folders become folders
  of the test.
- ``scp`` copies on this machine, and ``ssh`` runs its command on this machine. ``python`` and ``python3`` are the
  Python of the tests.
- On the robot, pip installs only the wheel. Its dependencies come from the test environment;
  tests/process/test_install.py tests their installation.
- ``systemctl enable`` and ``restart`` run the command lines of the installed units. ``systemctl daemon-reload``,
  ``apt`` and ``useradd`` do nothing.
- The page also has commands for a smaller installation. They do nothing here; tests/process/test_install.py runs all of
  them except the first.
- Deadlines and timeouts are longer, because test machines are shared. ``learning_starts`` and ``critics_first`` are 20,
  so that the learner soon trains the policy.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from td3_robot.bundle import Bundle
from td3_robot.config.schema import Config
from td3_robot.runtime.run_folder import RunFolder
from tests.conftest import free_port, poll_until
from tests.process.conftest import ROOT
from tests.process.deployed_robot import bundle

PAGE = ROOT / "docs" / "how-to" / "deploy.md"
UNITS = sorted((ROOT / "docs" / "systemd").glob("*.service"))
SERVICES = ("td3-robot-policy", "td3-robot-driver")
POLICY, SAFE = "apply 0.500000", "apply 0.000000"
OWN_SETTINGS = {
    "_ms: 100": "_ms: 5000",
    "hang_ms: 500": "hang_ms: 5000",
    "td3-robot node ": "td3-robot node --timeout 60 ",
    "learning_starts: 1000": "learning_starts: 20",
    "critics_first: 5000": "critics_first: 20",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of the page.

    Attributes:
        place: robot, workstation or root. This machine or user runs the commands of the block, or has the file that the
            block shows. The place is empty if the language is ``console``.
        file: path of the file that the block shows; empty for commands.
    """

    section: str
    language: str
    place: str
    file: str
    text: str


def blocks() -> list[Block]:
    found, section = [], ""
    pattern = r"^## (?P<section>.+)$|^```(?P<info>.*)\n(?P<text>(?:.*\n)*?)```$"
    for match in re.finditer(pattern, PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        if match["section"]:
            section = match["section"]
        else:
            language, _, title = match["info"].partition(" ")
            place, _, file = title.removeprefix('title="').removesuffix('"').partition(": ")
            found.append(Block(section, language, place, file, match["text"]))
    return found


def policy() -> Bundle:
    """A policy that always returns 0.5 N·m. The page's learner uses the same layers."""
    return bundle(hidden=(32, 32))


@dataclass
class Site:
    """The robot and the workstation, and the processes that run on them."""

    folder: Path
    waiting: list[Block] = field(default_factory=blocks)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ours, theirs = free_port(), free_port()
        self.words = dict.fromkeys(("ROBOT", "WORKSTATION", "0.0.0.0"), "127.0.0.1")
        self.words |= {":5601": f":{ours}", ":5555": f":{theirs}", **OWN_SETTINGS}
        self.robot, self.workstation = self.at("/var/lib/td3-robot"), self.folder / "workstation"
        for path in (self.robot, self.workstation, *map(self.at, ("/opt", "/usr/local/bin", "/etc/systemd/system"))):
            path.mkdir(parents=True)
        self.site_packages = str(Path(np.__file__).parents[1])
        self._tools()
        self._workstation()

    def at(self, path: str) -> Path:
        """Return the file or folder in this test that stands for an absolute path on the robot."""
        return self.folder / "robot" / path.lstrip("/")

    def _tools(self) -> None:
        python, main = shlex.quote(sys.executable), '-m td3_robot.cli.main "$@"'
        ssh = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment("robot").items())
        for name, script in {
            "all/python": f'exec {python} "$@"',
            "all/python3": f'exec {python} "$@"',
            "all/scp": 'for word in "$@"; do\n case "$word" in\n'
            f' td3-robot@*:*) set -- "$@" "{self.robot}/${{word#*:}}";;\n *) set -- "$@" "$word";;\n'
            ' esac\n shift\ndone\nexec cp -- "$@"',
            "all/ssh": f'shift\ncd {shlex.quote(str(self.robot))} && exec env {ssh} sh -c "$*"',
            "workstation/td3-robot": f"exec {python} {main}",
        }.items():
            tool = self.folder / "tools" / name
            tool.parent.mkdir(parents=True, exist_ok=True)
            tool.write_text(f"#!/bin/sh\n{script}\n")
            tool.chmod(0o755)

    def _workstation(self) -> None:
        """Prepare the workstation: a checkout, a finished training and the user's driver."""
        home = self.workstation
        (home / "td3-robot").symlink_to(ROOT)
        (home / "runs").mkdir()
        policy().save(RunFolder.create(home / "runs" / "leg", Config()).policy_file)
        example = [str(self.robot / "record"), str(self.robot / "fault"), str(ROOT / "examples" / "pendulum_driver.py")]
        driver = str(Path(__file__).parent / "recording_driver.py")
        script = f"import runpy, sys\nsys.argv[1:1] = {example!r}\nrunpy.run_path({driver!r}, run_name='__main__')\n"
        (home / "driver.py").write_text(script)
        (home / "fleet").write_text("127.0.0.1\n")

    def environment(self, place: str) -> dict[str, str]:
        own = self.folder / "tools" / "workstation" if place == "workstation" else self.at("/usr/local/bin")
        path = os.pathsep.join([str(own), str(self.folder / "tools" / "all"), "/usr/bin", "/bin"])
        values = {"PATH": path, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if place == "root":  # no PYTHONPATH, so that pip sees only the packages of the new environment
            return values | {"HOME": str(self.folder), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
        home, packages = (self.robot, self.site_packages) if place == "robot" else (self.workstation, str(ROOT))
        return values | {"HOME": str(home), "PYTHONPATH": packages}

    def here(self, text: str) -> str:
        """Replace the page's names, ports, folders and some settings with those of the test."""
        for word, ours in self.words.items():
            text = text.replace(word, ours)
        return re.sub(r"/(?=(opt|usr/local|etc|var/lib)/)", f"{self.at('/')}/", text)

    # -- the page ------------------------------------------------------------------------------------------------

    def follow(self, section: str, until: str = "") -> str:
        """Run the next blocks of a section, up to the block that contains ``until``, or to the section's end.

        Returns:
            Standard output of the ``sh`` blocks. The output of ``console`` blocks is left out.
        """
        output = ""
        while self.waiting and self.waiting[0].section == section:
            block = self.waiting.pop(0)
            output += self._do(block)
            if until and until in block.text:
                return output
        assert not until, f"no block with {until!r} in {section!r}"
        return output

    def _do(self, block: Block) -> str:
        if block.language == "sh":
            return self.run(block.place, block.text)
        if block.language == "console":
            for line in block.text.splitlines():
                self._console(line)
            return ""
        assert block.language in ("yaml", "ini"), block
        base = {"robot": self.robot, "workstation": self.workstation, "root": self.at("/")}[block.place]
        file = base / block.file.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.here(block.text) if block.language == "yaml" else block.text)
        return ""

    def run(self, place: str, text: str) -> str:
        home = self.workstation if place == "workstation" else self.robot
        # `node state` gives exit code 1 for a fault. A person who follows the page continues, so the test does too.
        lines = re.sub(r"^(td3-robot node state .*)$", r"\1 || [ $? = 1 ]", text, flags=re.MULTILINE)
        command, variables = ["sh", "-e", "-c", self.here(lines)], self.environment(place)
        done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def _console(self, line: str) -> None:
        sign, program, *words = shlex.split(line, comments=False)
        if sign == "$":
            self.start("learner", "workstation", line.removeprefix("$ "))
        elif program == "systemctl" and words[0] in ("enable", "restart"):
            names = words[-2:]
            assert tuple(names) == SERVICES
            for name in names if words[0] == "restart" else ():
                self.stop(name)
            for name in names:
                self.start_service(name)
            self.wait("the robot", lambda: self.state()["connected"] == ["leg"])
        elif program == "find" or program.startswith("/opt/"):
            pass  # tests/process/test_install.py tests the smaller installation
        elif program == "rm":
            self.run("root", line.removeprefix("# "))
        else:
            assert program in ("apt", "useradd", "systemctl"), line

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, name: str, place: str, command: str) -> None:
        home = self.workstation if place == "workstation" else self.robot
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                shlex.split(self.here(command)),
                cwd=home,
                env=self.environment(place),
                stdout=log,
                stderr=log,
            )

    def start_service(self, name: str) -> None:
        """Start a service as systemd does: in WorkingDirectory, run the last ExecStart of the unit and its drop-ins."""
        unit = self.at(f"/etc/systemd/system/{name}.service")
        texts = [file.read_text() for file in (unit, *sorted(unit.with_suffix(".service.d").glob("*.conf")))]
        assert "WorkingDirectory=/var/lib/td3-robot\n" in texts[0]
        commands = re.findall(r"^ExecStart=(.*)$", "\n".join(texts), re.MULTILINE)
        # A drop-in must clear ExecStart before it sets a new one.
        assert commands[1:] == ([] if len(texts) == 1 else ["", commands[-1]])
        self.start(name, "robot", commands[-1])

    def stop(self, name: str) -> None:
        """Stop a service as systemd does. The exit code must be 0 or one of the unit's SuccessExitStatus."""
        self.running[name].terminate()
        code = self.running.pop(name).wait(120)
        [good] = re.findall(
            r"^SuccessExitStatus=(.*)$", (ROOT / "docs" / "systemd" / f"{name}.service").read_text(), re.M
        )
        assert str(code) in ["0", *good.split()]

    def state(self) -> Any:
        answer = self.run("robot", "td3-robot node state --config robot.yaml --json")
        return json.loads(answer)

    def record(self) -> list[str]:
        return (self.robot / "record").read_text().splitlines()

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait(self, what: str, check: Callable[[], Any]) -> None:
        poll_until(check, lambda: f"timeout while waiting for {what}\n{self.record()[-5:]}\n{self.logs()}")

    def wait_for(self, line: str, after: int = 0) -> None:
        self.wait(line, lambda: line in self.record()[after:])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    it = Site(tmp_path)
    yield it
    for process in it.running.values():
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1600)  # the page starts about a hundred processes, and test machines are shared
def test_every_command_of_the_page_works(site: Site) -> None:
    site.follow("Install")
    installed = site.at("/usr/local/bin/td3-robot").resolve()
    assert installed.is_relative_to(site.at("/opt/td3-robot"))
    for unit in UNITS:
        assert (site.at("/etc/systemd/system") / unit.name).read_bytes() == unit.read_bytes()

    assert "policy.safetensors: good; Pendulum, 3-32-32-1" in site.follow("Policy and driver")
    site.follow("Keys")
    assert (site.robot / ".config/td3-robot/keys/identity.secret").stat().st_mode & 0o777 == 0o600
    site.follow("Configuration")

    output = site.follow("Services")
    assert output.startswith("policy: unconfigured\n")
    assert output.rindex("policy: active\n") > output.index("policy: inactive\n")
    assert "frozen: True" in output
    site.wait_for(POLICY)

    # systemd restarts a crashed server. The robot must not move before an operator activates the server.
    site.running["td3-robot-policy"].kill()
    site.running["td3-robot-policy"].wait()
    killed = len(site.record())
    site.start_service("td3-robot-policy")
    site.wait("the driver's fault", lambda: "leg: active -> fault" in site.log("td3-robot-driver"))
    site.wait_for(SAFE, killed)
    assert site.state()["state"] == "unconfigured"
    begin = len(site.record())
    assert POLICY not in site.record()[site.record().index(SAFE, killed) :]
    site.wait("the robot", lambda: site.state()["connected"] == ["leg"])
    site.run("robot", "td3-robot node configure --config robot.yaml; td3-robot node activate --config robot.yaml")
    site.wait_for(POLICY, begin)

    begin = len(site.record())
    site.follow("Emergency stop")
    stopped = site.record().index(SAFE, begin)
    site.wait_for(POLICY, stopped)
    assert "policy: active -> fault: emergency stop: a leg is loose" in site.log("td3-robot-policy")
    assert "leg: active -> fault: emergency stop: a leg is loose" in site.log("td3-robot-driver")

    learns(site)
    updates_a_fleet(site)

    site.follow("Remove a robot")
    assert "robot-7" not in site.run("workstation", "td3-robot keys list")
    for name in SERVICES[::-1]:
        site.stop(name)
    assert site.record()[-1] == SAFE
    assert not site.waiting


def learns(site: Site) -> None:
    """Follow the section "A learner on the workstation".

    The learner starts from the served policy, learns while the robot runs, and is removed at the end.
    """
    section = "A learner on the workstation"
    output = site.follow(section, until="unfreeze")
    assert "frozen: False" in output
    site.wait("the learner", lambda: "starts with the actor of policy.safetensors" in site.log("learner"))
    site.wait("weights that the learner has trained", lambda: site.state()["version"] >= 12)
    explored = [line for line in site.record() if line.startswith("apply") and line not in (POLICY, SAFE)]
    # Actions have mean 0.5 and standard deviation 0.05, so 0.2 is 6 standard deviations below the mean. Random weights
    # would give actions of about 0.
    assert min(float(line.split()[1]) for line in explored[:30]) > 0.2

    site.follow(section, until="rollback")
    back = len(site.record())
    state = site.state()
    assert (state["version"], state["frozen"]) == (3, True)
    site.wait_for(POLICY, back)

    for number in range(2):  # the page says that the same command resumes from the checkpoint
        learner = site.running.pop("learner")
        learner.send_signal(signal.SIGINT)
        assert learner.wait(120) == 130, site.log("learner")
        if number == 0:
            site.start("learner", "workstation", "td3-robot learner --run leg")
            site.wait("the checkpoint", lambda: "continues from checkpoint-" in site.log("learner"))
    learned = Bundle.load(site.workstation / "leg" / "policy.safetensors")
    assert learned.provenance["updates"] > 20
    assert not np.array_equal(learned.tensors["actor.2.bias"], policy().tensors["actor.2.bias"])
    assert list((site.workstation / "leg" / "checkpoint").iterdir())
    assert (site.workstation / "leg" / "metrics.jsonl").exists()

    site.follow(section)
    assert yaml.safe_load((site.robot / "robot.yaml").read_text())["endpoints"].keys() == {"policy", "keys"}
    assert site.state()["state"] == "active"


def updates_a_fleet(site: Site) -> None:
    """Follow the section on fleets: update the policy, then roll back."""
    old = (site.robot / "policy.safetensors").read_bytes()
    site.follow("Update a fleet", until="for robot in")
    new = (site.workstation / "adapted.safetensors").read_bytes()
    assert ((site.robot / "policy.safetensors").read_bytes(), (site.robot / "previous.safetensors").read_bytes()) == (
        new,
        old,
    )
    state = site.state()
    # With --force, the new version is the server's newest version (3) plus 1.
    assert (state["state"], state["version"]) == ("active", 4)
    site.follow("Update a fleet")
    assert site.state()["version"] == 3
    assert (site.robot / "policy.safetensors").read_bytes() == old


@pytest.fixture
def verify(tmp_path: Path) -> Callable[[dict[str, str]], str]:
    """A function that returns systemd's errors about units as text. The text is empty if the units are valid.

    /bin/true replaces the programs in /opt/td3-robot/bin.
    """
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("this machine has no systemd-analyze")

    def say(units: dict[str, str]) -> str:
        for name, text in units.items():
            (tmp_path / name).write_text(re.sub(r"/opt/td3-robot/bin/\S+", "/bin/true", text))
        command = [program, "verify", *(str(tmp_path / name) for name in units)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        # Skip errors about the machine's own units.
        return "\n".join(line for line in done.stdout.splitlines() if "td3-robot-" in line)

    return say


def test_the_systemd_units_are_valid(verify: Callable[[dict[str, str]], str]) -> None:
    units = {unit.name: unit.read_text() for unit in UNITS}
    assert set(units) == {f"{name}.service" for name in SERVICES}
    assert verify(units) == ""
    name, text = next(iter(units.items()))
    for good, bad in (("=on-failure", "=maybe"), ("LimitMEMLOCK", "LimitMEMORYLOCK")):
        assert bad.strip("=") in verify({name: text.replace(good, bad)})


def test_the_limits_of_the_systemd_unit_allow_the_realtime_settings_of_the_page() -> None:
    [unit] = [unit for unit in UNITS if "policy" in unit.name]
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    service = parser["Service"]
    [config] = [block for block in blocks() if block.file == "robot.yaml"]
    asked = yaml.safe_load(config.text)["realtime"]
    assert 0 < asked["priority"] <= int(service["LimitRTPRIO"])
    assert asked["lock_memory"]
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["User"] == "td3-robot"
    assert service["Restart"] == "on-failure"
