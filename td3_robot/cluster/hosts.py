"""The hosts of a Ray cluster as hosts of a run.

The learner runs on a host with a GPU, if there is one. Among several such hosts, or without a GPU, it runs on the host
with the most cores. Each other host gets one policy server and a share of the simulators, so observations and actions
stay on the host. Recorder and evaluator run beside the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import get_node_ip_address

from td3_robot.cluster.agent import Agent
from td3_robot.cluster.connection import ask_probe, connect, first_line
from td3_robot.cluster.host import ANSWER, LOST, Host, Question
from td3_robot.cluster.learner_files import LearnerFiles
from td3_robot.cluster.stored_learner import stored
from td3_robot.config.schema import Config
from td3_robot.errors import NodeError, exit_code_of
from td3_robot.runtime.hosts import NoRoomError, Running, Start, ThisMachine
from td3_robot.runtime.launch import Process
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import LISTENERS
from td3_robot.transport.endpoints import with_host
from td3_robot.transport.keys import KeyFolder
from td3_robot.util.version import __version__

LEARNER, POLICY, SIMULATOR = "learner", "policy", "sim"
"""Names of processes in the launch description. All other processes run beside the supervisor."""
_LOOK = 2.0  # seconds between two looks for hosts that have joined
_JOIN = 5.0  # seconds to wait for answers of new hosts when a process must move to another host
_SAY = 30.0  # seconds between two messages while the run waits for hosts
_PAUSE = 1.0  # seconds between two looks while the run waits for hosts


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
        self.stopped: Callable[[], int] = lambda: 0
        self._hosts: dict[str, Host] = {}  # by number in Ray
        self._asked: dict[str, tuple[Mapping[str, Any], Question]] = {}  # hosts that have not answered yet
        self._refused: set[str] = set()  # numbers of hosts that the run cannot use
        self._requested: list[dict[str, float]] = []  # what Ray's autoscaler was asked for
        self._where: dict[str, Host] = {}  # hosts of the learner and of the policy servers, by process name
        self._policy_of: dict[str, str] = {}  # maps a simulator to its policy server, and a server to itself
        self._endpoints: dict[str, str] = {}
        self._least, self._most = config.cluster.range(config.simulators)
        self._policy: Process  # the policy server in the launch description
        self._simulators: dict[str, Process] = {}  # by name
        self._absent: list[Process] = []  # simulators for which the cluster has no room now
        self._given_up: set[str] = set()  # policy servers whose host was lost, and whose simulators are absent
        self._looked_at = 0.0
        self._keys = KeyFolder(run.path.resolve() / "keys")
        self._files = LearnerFiles(config.cluster.storage, run, say) if config.cluster.storage else None

    def __enter__(self) -> RayHosts:
        with contextlib.ExitStack() as resources:
            resources.enter_context(self._here)
            resources.callback(ray.shutdown)
            connect(self._address)
            resources.callback(self._remove_keys)
            self._remove_keys()  # a killed supervisor has left its keys
            self._keys.create("run")
            self._run.write_run(keys=str(self._keys.path))
            self._find_hosts(ANSWER)
            resources.callback(self._end)
            resources.callback(self._withdraw_request)
            self._wait_for_hosts()
            self._where[LEARNER] = self._host_for_learner()
            if self._files:
                self._files.begin()
            words = shlex.join(["td3-robot", "train", "--resume", str(self._run.path), "--cluster", self._address])
            self._say(f"if Ray's head dies, the run saves all that it learned, and ends; to continue it: {words}")
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _end(self) -> None:
        """End the processes on all hosts.

        Raises:
            NodeError: the storage does not have everything that the learner learned.
        """
        problem = self._files.end() if self._files else ""
        for host in self._hosts.values():
            host.close()
        if problem:
            raise NodeError(problem)

    def _remove_keys(self) -> None:
        shutil.rmtree(self._keys.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk must not hide the original error
            self._run.write_run(keys=None)

    def _withdraw_request(self) -> None:
        """Take back the request to Ray's autoscaler, so that it can stop hosts."""
        if self._requested and not all(host.lost for host in self._hosts.values()):
            with contextlib.suppress(Exception):  # Ray's head may be dead
                request_resources()

    def _find_hosts(self, wait: float = 0.0) -> None:
        """Read the list of hosts from Ray, and wait up to ``wait`` seconds for the answers of new hosts.

        A host that joins later and cannot run this program does not end the run.

        Raises:
            NodeError: at the first call, a host has another version of this program, or cannot run it.
        """
        marker = self._keys.public_file
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for number in self._hosts.keys() - nodes.keys():
            self._hosts[number].lost = True  # for example, Ray's autoscaler has stopped it
        for number, node in nodes.items():
            if number not in {*self._hosts, *self._refused, *self._asked}:
                self._asked[number] = node, ask_probe(number, marker, marker.read_text())
        end = time.monotonic() + wait
        for number, (node, question) in list(self._asked.items()):
            if not question.settled(max(0.0, end - time.monotonic())):
                continue
            del self._asked[number]
            try:
                self._hosts[number] = self._examined(node, question)
            except NodeError as error:
                if wait and not self._where and not isinstance(error.__cause__, LOST):
                    raise
                self._refused.add(number)
                self._say(f"{error}; the run does not use it")

    def _examined(self, node: Mapping[str, Any], question: Question) -> Host:
        """Check the version of a host, and return the host. Raise NodeError if the run cannot use it."""
        has, shown = node["Resources"], node["NodeManagerAddress"]
        address = self._config.cluster.addresses.get(shown, shown)
        try:
            version, sees = question.answer()
        except RayTaskError as error:  # for example, this program is not installed there
            raise NodeError(f"host {address} of the cluster: {first_line(error)}") from None
        except LOST as error:  # Ray has not yet noticed that the host died
            raise NodeError(f"host {address} of the cluster does not answer") from error
        if version != __version__:
            raise NodeError(f"host {address} of the cluster has td3-robot {version}; this one is {__version__}")
        return Host(node["NodeID"], address, has.get("CPU", 0.0), has.get("GPU", 0.0), sees)

    def _wait_for_hosts(self) -> None:
        """Ask Ray's autoscaler for the cores that the run can use. Wait for the cores that the run needs.

        Raises:
            NodeError: a signal asked the run to stop; or see :meth:`_find_hosts` and :meth:`_best_for_learner`.
        """
        begin = now = time.monotonic()
        said = begin - _SAY
        while True:
            learner = self._best_for_learner()
            self._request_cores(learner)
            room = self._room(learner)
            if room >= self._least or now - begin >= self._config.cluster.wait_s:
                return
            if number := self.stopped():
                raise NodeError("stopped while the run waited for hosts", exit_code_of(number))
            if now - said >= _SAY:
                said = now
                self._say(f"waiting for hosts: the cluster has cores for {room} of {self._least} simulators")
            time.sleep(_PAUSE)
            self._find_hosts()
            now = time.monotonic()

    def _request_cores(self, learner: Host) -> None:
        """Ask Ray's autoscaler for the learner's host and for cores for all simulators, if the hosts have fewer cores.

        Without an autoscaler, the request has no effect.
        """
        if self._room(learner) >= self._most:
            return
        whole = {name: amount for name, amount in (("CPU", learner.cpus), ("GPU", learner.gpus)) if amount}
        bundles = [whole, *({"CPU": self._config.cluster.simulator_cpus} for _ in range(self._most))]
        if bundles != self._requested:
            self._requested = bundles
            request_resources(bundles=bundles)

    def _workers(self, learner: Host) -> list[Host]:
        """Return the hosts for simulators: the living hosts except the learner's. A single host runs all processes."""
        alive = [host for host in self._hosts.values() if not host.lost]
        return [host for host in alive if host is not learner] or alive

    def _room(self, learner: Host) -> int:
        """Return the number of simulators for which the hosts have cores, at most the number that the run can use."""
        each, cpus = self._config.cluster.simulator_cpus, sum(host.cpus for host in self._workers(learner))
        return min(self._most, int(cpus / each)) if each else self._most

    def _able(self, process: str) -> list[Host]:
        """Return the living hosts that can run a process. Without a storage, the learner must see the run folder."""
        anywhere = process != LEARNER or self._files
        return [host for host in self._hosts.values() if not host.lost and (anywhere or host.sees_run)]

    def _best_for_learner(self) -> Host:
        """Return the best host for the learner. Raise NodeError if no host can run it."""
        able = self._able(LEARNER)
        if not able:
            raise NodeError(
                f"no host of the cluster sees the run folder {str(self._run.path)!r}; the learner needs it for its "
                "checkpoints; name a folder on shared storage (--out DIR), or set cluster.storage"
            )
        return max(able, key=lambda it: (it.gpus > 0, it.cpus))

    def _host_for_learner(self) -> Host:
        """Choose the learner's host, and start its agent."""
        host = self._best_for_learner()
        self._begin(host, self._config.cluster.learner_cpus, min(host.gpus, 1.0))
        return host

    def _begin(self, host: Host, cpus: float, gpus: float = 0.0, wait: float = ANSWER) -> bool:
        """Start the agent of a host, see :meth:`Host.begin`. Raise NodeError if this is not possible."""
        try:
            return host.begin(cpus, gpus, wait)
        except GetTimeoutError:
            raise NodeError(
                f"host {host.address} of the cluster has fewer than {cpus:g} free cores"
                f"{', or no free GPU' if gpus else ''}: other jobs use them"
            ) from None
        except RayError as error:
            raise NodeError(f"host {host.address} of the cluster: {first_line(error)}") from None

    def place(self, processes: Sequence[Process]) -> list[Process]:
        """Return the processes, with one policy server for each host that gets simulators."""
        simulators = [process for process in processes if process.name.startswith(f"{SIMULATOR}-")]
        self._simulators = {process.name: process for process in simulators}
        self._policy = next(process for process in processes if process.name == POLICY)
        others, room = self._workers(self._where[LEARNER]), self._room(self._where[LEARNER])
        each, cpus = self._config.cluster.simulator_cpus, sum(host.cpus for host in others)
        if room < self._least:
            raise NodeError(
                f"the cluster has {cpus:g} cores for simulators; {self._least} "
                f"simulators with cluster.simulator_cpus {each:g} need {self._least * each:g}; to wait for more hosts, "
                "set cluster.wait_s"
            )
        present, self._absent = simulators[:room], simulators[room:]
        result = [process for process in processes if process is not self._policy and process not in simulators]
        shares = list(share(len(present), others, each))
        for host in others:
            if count := shares.count(host):
                self._begin(host, count * each)
                result += self._place_on(host, present[:count])
                present = present[count:]
        self._say(f"host {self._where[LEARNER].address}: learner")
        return result

    def _place_on(self, host: Host, simulators: Sequence[Process]) -> list[Process]:
        """Give a host, whose agent has started, these simulators and a policy server. Return these processes."""
        server = f"{POLICY}-{len(self._where) - 1}"
        self._where[server] = host
        host.simulators += len(simulators)
        self._policy_of |= dict.fromkeys([server, *(process.name for process in simulators)], server)
        self._say(f"host {host.address}: {server}, {len(simulators)} simulators")
        return [replace(self._policy, name=server), *simulators]

    def joined(self) -> Sequence[Process]:
        """Return simulators, and their policy servers, for hosts that have joined and have room."""
        now = time.monotonic()
        if not self._absent or now - self._looked_at < _LOOK:
            return ()
        self._looked_at = now
        self._find_hosts()
        each, result = self._config.cluster.simulator_cpus, list[Process]()
        for host in self._hosts.values():
            if host.lost or host.simulators or host is self._where[LEARNER]:
                continue
            mine = self._absent[: int(host.cpus / each) if each else len(self._absent)]
            try:
                if mine and self._begin(host, len(mine) * each, wait=0.0):
                    result += self._place_on(host, mine)
                    self._absent = self._absent[len(mine) :]
            except NodeError as error:
                host.lost = True
                self._say(f"{error}; the run does not use it")
        return result

    def endpoints(self) -> Mapping[str, str]:
        """Return the endpoints that other hosts reach, by link."""
        shown = str(get_node_ip_address())
        here = self._config.cluster.addresses.get(shown, shown)
        for link in ("supervisor", *LISTENERS):
            self._endpoints[link] = with_host(f":{Agent.free_port()}", here)
        self._endpoints[LEARNER] = _free_endpoint(self._where[LEARNER])
        return self._endpoints

    def start(self, start: Start) -> Running:
        """Start a process on its host. If this host was lost, choose another host.

        Raises:
            NodeError: no other host can run the process.
            NoRoomError: no other host has room for the process, and the run has enough other simulators.
        """
        server = self._policy_of.get(start.name, start.name)
        if server not in self._where:
            self._local[start.name] = self._here.start(start)
            return self._local[start.name]
        while True:
            if self._where[server].lost and server not in self._given_up:
                self._move(server)
            if server in self._given_up:
                raise NoRoomError
            host = self._where[server]
            with contextlib.suppress(*LOST):
                if server == LEARNER:
                    return self._start_learner(host, start)
                if start.name == server:
                    self._publish(server, _free_endpoint(host))
                folder = f"{host.folder}/{server}"
                self._write_run(host, folder)
                return host.start(start, folder)

    def _publish(self, server: str, endpoint: str | None) -> None:
        """Publish the endpoint at which operators reach a policy server and its simulators.

        If ``endpoint`` is None, remove the published endpoint.
        """
        for name, owner in self._policy_of.items():
            if owner == server and endpoint:
                self._endpoints[name] = endpoint
            elif owner == server:
                self._endpoints.pop(name, None)
        self._run.write_run(endpoints=self._endpoints)

    def _start_learner(self, host: Host, start: Start) -> Running:
        if not self._files:
            return host.start(start, str(self._run.path.resolve()))
        folder = self._files.folder_on(host)
        self._write_run(host, folder)
        return host.start(stored(start), folder)

    def _write_run(self, host: Host, folder: str) -> None:
        """Write the run folder of some processes of a host: configuration, endpoints, keys and storage."""
        mine = {
            "endpoints": {**self._endpoints, "policy": f"ipc://{folder}/policy"},
            "keys": f"{folder}/keys",
            "storage": self._run.read_run().get("storage"),
        }
        secret, public = self._keys.secret_file, self._keys.public_file
        host.ask(
            "write",
            {
                f"{folder}/config.yaml": self._config.to_yaml().encode(),
                f"{folder}/run.json": json.dumps(mine).encode(),
                **{f"{folder}/keys/{file.name}": file.read_bytes() for file in (secret, public)},
            },
        )

    def _move(self, server: str) -> None:
        """Choose another host for the learner, or for a policy server and its simulators."""
        lost = self._where[server]
        self._find_hosts(_JOIN if self._able(server) else ANSWER)
        if server == LEARNER:
            self._where[LEARNER] = self._host_for_learner()
            if self._files:
                self._files.claim()
            self._endpoints[LEARNER] = _free_endpoint(self._where[LEARNER])
            self._run.write_run(endpoints=self._endpoints)
            self._restart_others()
        elif not self._move_simulators(server):
            return
        self._say(f"host {lost.address} was lost; {server} continues on host {self._where[server].address}")

    def _move_simulators(self, server: str) -> bool:
        """Choose another host for a policy server and its simulators. Return False if the run continues without them.

        Raises:
            NodeError: no host is alive.
        """
        workers = self._workers(self._where[LEARNER])
        if not workers:
            raise NodeError("no host of the cluster is alive")
        each = self._config.cluster.simulator_cpus
        mine = [name for name, owner in self._policy_of.items() if owner == server and name in self._simulators]
        host = next(iter(share(1, workers, each)))
        present = len(self._simulators) - len(self._absent)
        if host.cpus < (host.simulators + len(mine)) * each and present - len(mine) >= self._least:
            self._given_up.add(server)
            self._publish(server, None)
            self._absent += [self._simulators[name] for name in mine]
            return False
        self._begin(host, len(mine) * each)
        host.simulators += len(mine)
        self._where[server] = host
        return True

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


def _free_endpoint(host: Host) -> str:
    """Return a TCP endpoint that is free now on a host."""
    return with_host(f":{host.ask('free_port')}", host.address)
