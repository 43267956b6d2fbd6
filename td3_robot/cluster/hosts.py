"""The hosts of a Ray cluster as hosts of a run.

The learner runs on the host with a GPU, or else with the most cores. Each other host gets one policy server and a share
of the simulators, so observations and actions stay on the host. Recorder and evaluator run beside the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from td3_robot.cluster.agent import Agent, Report
from td3_robot.config.schema import Config
from td3_robot.errors import NodeError, UsageError
from td3_robot.runtime.hosts import Running, Start, ThisMachine
from td3_robot.runtime.launch import Process
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import LISTENERS
from td3_robot.transport.keys import KeyFolder
from td3_robot.util.version import __version__

LEARNER, POLICY, SIMULATOR = "learner", "policy", "sim"
"""Names of processes in the launch description. All other processes run beside the supervisor."""
_ANSWER = 60.0  # seconds within which a host answers
_CONNECT = 5.0  # seconds within which the head of the cluster accepts a connection
_PERIOD = 0.1  # seconds between two reports of a host
_KILLED = -int(signal.SIGKILL)
_LOST = (RayError, GetTimeoutError)


@dataclass
class Host:
    """One host of the cluster, with the agent that starts its processes.

    Attributes:
        node: number of the host in Ray.
        address: the address at which other hosts reach this host.
        cpus, gpus: how many the host has.
        sees_run: whether the host can read the run folder.
        lost: whether the host, or its agent, has died.
    """

    node: str
    address: str
    cpus: float
    gpus: float
    sees_run: bool
    lost: bool = False
    simulators: int = 0
    agent: Any = None
    folder: str = ""
    _codes: dict[str, int | None] = field(default_factory=dict)
    _logs: dict[str, Path] = field(default_factory=dict)
    _asked: Any = None
    _asked_at: float = float("-inf")

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the agent and return its result.

        Raises:
            RayError: the host has died, or does not answer.
        """
        try:
            return ray.get(getattr(self.agent, method).remote(*arguments), timeout=_ANSWER)
        except _LOST:
            self.lost = True
            raise

    def begin(self, cpus: float, gpus: float) -> None:
        """Start the agent, and reserve cores and GPUs for its processes."""
        if self.agent is None:
            actor: Any = ray.remote(Agent)
            where = NodeAffinitySchedulingStrategy(self.node, soft=False)
            self.agent = actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where).remote()
            self.folder = self.ask("folder")

    def start(self, start: Start, run: str) -> Running:
        self._take(wait=True)  # a report from before the start does not count
        self.ask("start", start, run)
        self._codes[start.name], self._logs[start.name] = None, start.log
        return _Remote(self, start.name)

    def code(self, name: str) -> int | None:
        """Return the exit code of a process; None while it runs."""
        self._take()
        if self.lost and self._codes[name] is None:
            self._codes[name] = _KILLED
        return self._codes[name]

    def send_signal(self, name: str, number: int) -> None:
        if self.lost:
            raise ProcessLookupError
        self.agent.send_signal.remote(name, int(number))

    def _take(self, *, wait: bool = False) -> None:
        """Take the newest reports if they have come, and ask for the next ones."""
        if self.lost:
            return
        if self._asked is not None and (wait or ray.wait([self._asked], timeout=0)[0]):
            asked, self._asked = self._asked, None
            try:
                reports: Mapping[str, Report] = ray.get(asked, timeout=_ANSWER)
            except _LOST:
                self.lost = True
                return
            for name, report in reports.items():
                self._codes[name] = report.code
                with self._logs[name].open("ab") as log:
                    log.write(report.output)
        now = time.monotonic()
        if not wait and self._asked is None and now - self._asked_at >= _PERIOD:
            self._asked, self._asked_at = self.agent.reports.remote(), now


@dataclass(frozen=True)
class _Remote:
    """A process on another host."""

    host: Host
    name: str

    def poll(self) -> int | None:
        return self.host.code(self.name)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_PERIOD)
        return code

    def send_signal(self, sig: int) -> None:
        self.host.send_signal(self.name, sig)


class RayHosts:
    """Starts the processes of a run on the hosts of a Ray cluster.

    Args:
        address: address of the cluster: ``auto`` or ``HOST:PORT``.
        run: the run folder.
        config: the configuration of the run.
        say: prints one line for the user.
    """

    def __init__(self, address: str, run: RunFolder, config: Config, say: Callable[[str], None]) -> None:
        self._address = address
        self._run = run
        self._config = config
        self._say = say
        self._here = ThisMachine(run.path)
        self._local: dict[str, Running] = {}
        self._hosts: dict[str, Host] = {}  # by number in Ray
        self._where: dict[str, Host] = {}  # by name of the learner or of a policy server
        self._policy_of: dict[str, str] = {}  # policy server of each simulator and policy server
        self._endpoints: dict[str, str] = {}
        self._keys = KeyFolder(run.path.resolve() / "keys")

    def __enter__(self) -> RayHosts:
        with contextlib.ExitStack() as resources:
            resources.enter_context(self._here)
            resources.callback(ray.shutdown)
            _connect(self._address)
            resources.callback(self._remove_keys)
            self._remove_keys()  # a killed supervisor has left its keys
            self._keys.create("run")
            self._run.write_run(keys=str(self._keys.path))
            self._find_hosts()
            resources.callback(self._end)
            self._where[LEARNER] = self._host_for_learner()
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _end(self) -> None:
        for host in self._hosts.values():
            if host.agent is not None and not host.lost:
                with contextlib.suppress(*_LOST):
                    host.ask("close")

    def _remove_keys(self) -> None:
        shutil.rmtree(self._keys.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk must not hide the original error
            self._run.write_run(keys=None)

    def _find_hosts(self) -> None:
        """Read the list of living hosts from Ray. Hosts may have joined since the last call.

        Raises:
            NodeError: a host has another version of this program, or cannot run it.
        """
        addresses = self._config.cluster.addresses
        marker = self._keys.public_file
        probe: Any = ray.remote(_probe)
        for node in ray.nodes():
            if not node["Alive"] or node["NodeID"] in self._hosts:
                continue
            has, shown = node["Resources"], node["NodeManagerAddress"]
            where, address = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), addresses.get(shown, shown)
            asked = probe.options(num_cpus=0, scheduling_strategy=where)
            try:
                version, sees = ray.get(asked.remote(str(marker), marker.read_text()), timeout=_ANSWER)
            except RayTaskError as error:  # for example, this program is not installed there
                raise NodeError(f"host {address} of the cluster: {_first_line(error)}") from None
            except _LOST:  # Ray has not yet noticed that the host died
                self._say(f"host {address} of the cluster does not answer; the run does not use it")
                continue
            if version != __version__:
                raise NodeError(f"host {address} of the cluster has td3-robot {version}; this one is {__version__}")
            has_cpus, has_gpus = has.get("CPU", 0.0), has.get("GPU", 0.0)
            self._hosts[node["NodeID"]] = Host(node["NodeID"], address, has_cpus, has_gpus, sees)

    def _host_for_learner(self) -> Host:
        """Choose the learner's host, and start its agent."""
        able = [host for host in self._hosts.values() if host.sees_run and not host.lost]
        if not able:
            raise NodeError(
                f"no host of the cluster sees the run folder {str(self._run.path)!r}; the learner needs it for its "
                "checkpoints; name a folder on shared storage: --out DIR"
            )
        host = max(able, key=lambda it: (it.gpus > 0, it.cpus))
        self._begin(host, self._config.cluster.learner_cpus, min(host.gpus, 1.0))
        return host

    def _begin(self, host: Host, cpus: float, gpus: float = 0.0) -> None:
        try:
            host.begin(cpus, gpus)
        except GetTimeoutError:
            raise NodeError(
                f"host {host.address} of the cluster has not {cpus:g} free cores: other jobs of the cluster use them"
            ) from None
        except RayError as error:
            raise NodeError(f"host {host.address} of the cluster: {_first_line(error)}") from None

    def place(self, processes: Sequence[Process]) -> list[Process]:
        """Return the processes, with one policy server for each host that gets simulators."""
        simulators = [process for process in processes if process.name.startswith(f"{SIMULATOR}-")]
        policy = next(process for process in processes if process.name == POLICY)
        others = [it for it in self._hosts.values() if it is not self._where[LEARNER]] or [self._where[LEARNER]]
        each = self._config.cluster.simulator_cpus
        if sum(host.cpus for host in others) < len(simulators) * each:
            raise NodeError(
                f"the cluster has {sum(host.cpus for host in others):g} cores for simulators; {len(simulators)} "
                f"simulators with cluster.simulator_cpus {each:g} need {len(simulators) * each:g}"
            )
        for host in share(len(simulators), others, each):
            host.simulators += 1
        result = [process for process in processes if process.name != POLICY and process not in simulators]
        for host in others:
            if not host.simulators:
                continue
            server = f"{POLICY}-{len(self._where) - 1}"
            self._where[server] = host
            self._begin(host, host.simulators * each)
            mine, simulators = simulators[: host.simulators], simulators[host.simulators :]
            self._policy_of |= dict.fromkeys([server, *(process.name for process in mine)], server)
            result += [replace(policy, name=server), *mine]
            self._say(f"host {host.address}: {server}, {len(mine)} simulators")
        self._say(f"host {self._where[LEARNER].address}: learner")
        return result

    def endpoints(self) -> Mapping[str, str]:
        """Return the endpoints that other hosts reach, by link."""
        shown = str(get_node_ip_address())
        here = self._config.cluster.addresses.get(shown, shown)
        for link in ("supervisor", *LISTENERS):
            self._endpoints[link] = f"tcp://{_bracketed(here)}:{Agent.free_port()}"
        self._publish_learner()
        return self._endpoints

    def _publish_learner(self) -> None:
        host = self._where[LEARNER]
        self._endpoints["learner"] = f"tcp://{_bracketed(host.address)}:{host.ask('free_port')}"

    def start(self, start: Start) -> Running:
        """Start a process on its host. If this host was lost, choose another host.

        Raises:
            NodeError: no other host can run the process.
        """
        server = self._policy_of.get(start.name, start.name)
        if server not in self._where:
            self._local[start.name] = self._here.start(start)
            return self._local[start.name]
        while True:
            if self._where[server].lost:
                self._move(server)
            host = self._where[server]
            with contextlib.suppress(*_LOST):
                if server == LEARNER:
                    return host.start(start, str(self._run.path.resolve()))
                folder = f"{host.folder}/{server}"
                self._write_run(host, server, folder)
                return host.start(start, folder)

    def _write_run(self, host: Host, server: str, folder: str) -> None:
        """Write the run folder of a policy server and its simulators: configuration, endpoints and keys."""
        mine = {"endpoints": {**self._endpoints, "policy": f"ipc://{folder}/policy"}, "keys": f"{folder}/keys"}
        secret, public = self._keys.secret_file, self._keys.public_file
        host.ask(
            "write",
            {
                f"{server}/config.yaml": self._config.to_yaml().encode(),
                f"{server}/run.json": json.dumps(mine).encode(),
                **{f"{server}/keys/{file.name}": file.read_bytes() for file in (secret, public)},
            },
        )

    def _move(self, server: str) -> None:
        """Choose another host for the learner, or for a policy server and its simulators."""
        lost = self._where[server]
        self._find_hosts()
        if server == LEARNER:
            self._where[LEARNER] = self._host_for_learner()
            self._publish_learner()
            self._run.write_run(endpoints={**self._run.read_run().get("endpoints", {}), **self._endpoints})
            self._restart_others()
        else:
            alive = [host for host in self._hosts.values() if not host.lost]
            if not alive:
                raise NodeError("no host of the cluster is alive")
            workers = [host for host in alive if host is not self._where[LEARNER]] or alive
            each = self._config.cluster.simulator_cpus
            host = next(iter(share(1, workers, each)))
            self._begin(host, lost.simulators * each)
            host.simulators += lost.simulators
            self._where[server] = host
        self._say(f"host {lost.address} was lost; {server} continues on host {self._where[server].address}")

    def _restart_others(self) -> None:
        """End the processes that know only the old address of the learner. The supervisor starts them again."""
        for name, server in self._policy_of.items():
            with contextlib.suppress(ProcessLookupError):
                self._where[server].send_signal(name, signal.SIGTERM)
        for name, process in self._local.items():
            if name not in LISTENERS:
                process.send_signal(signal.SIGTERM)


def share(count: int, hosts: Sequence[Host], each: float) -> Iterable[Host]:
    """Yield a host for each of ``count`` simulators: always the one with the most free cores."""
    given = {host.node: host.simulators for host in hosts}
    for _ in range(count):
        host = max(hosts, key=lambda it: it.cpus - given[it.node] * max(each, 1e-9))
        given[host.node] += 1
        yield host


def _probe(file: str, content: str) -> tuple[str, bool]:
    """Return the version of this program on a host, and whether the host reads the run folder."""
    return __version__, Agent.sees(file, content)


def check_address(address: str) -> None:
    """Check that a cluster may be at an address. Ray itself would wait for minutes.

    Raises:
        UsageError: the address is malformed, or nothing answers there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"--cluster is {address!r}; allowed: auto, or HOST:PORT with a port from 1 to 65535")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except OSError as error:
        raise UsageError(f"--cluster is {address!r}: nothing answers there ({error.strerror or error})") from None


def _connect(address: str) -> None:
    """Connect to the cluster.

    Raises:
        NodeError: there is no cluster.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many types: ConnectionError, ValueError, RuntimeError, …
        advice = "start one on this machine: ray start --head, or ray start --address HEAD:PORT"
        raise NodeError(f"--cluster is {address!r}: {_first_line(error)}; {advice}") from None


def _first_line(error: Exception) -> str:
    """Return what an error says in one line: the cause of an error on another host, else the first line."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[0].strip()[:200] if lines else type(cause).__name__


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
