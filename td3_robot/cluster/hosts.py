"""Runs the processes of a training on the hosts of a Ray cluster.

The learner runs on a host that sees the run folder. If ``cluster.storage`` is set, the learner can run on any host. If
several hosts are possible, the run prefers a host with a GPU, and then the host with the most processor cores. The
other hosts run the simulators. If there is no other host, the learner's host runs them. Each host with simulators has
its own policy server, so observations and actions stay on the host. Recorder and evaluator run beside the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import ray
from ray.util import get_node_ip_address

from td3_robot.cluster.agent import remover
from td3_robot.cluster.connection import connect
from td3_robot.cluster.host import Host
from td3_robot.cluster.learner_files import LearnerFiles
from td3_robot.cluster.members import Members
from td3_robot.cluster.question import ANSWER, LOST
from td3_robot.cluster.stored_learner import stored
from td3_robot.config.schema import Config
from td3_robot.errors import EXIT_USAGE, NodeError
from td3_robot.runtime.hosts import Hosts, Lifeline, NoRoomError, Running, Start
from td3_robot.runtime.launch import Process
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.topics import LISTENERS
from td3_robot.transport.endpoints import with_host
from td3_robot.transport.keys import KeyFolder
from td3_robot.util.ports import keep_port, port_of

LEARNER, POLICY, SIMULATOR = "learner", "policy", "sim"
"""Names of processes in the launch description. All other processes run beside the supervisor."""
_LOOK = 2.0  # seconds between two searches for hosts that have joined
_JOIN = 5.0  # seconds to wait for answers of new hosts, if a process must move and a known host can take it


class RayHosts(Hosts):
    """Starts the processes of a run on the hosts of a Ray cluster.

    Args:
        address: address of the cluster: ``auto`` or ``HOST:PORT``.
        run: the run folder.
        config: the configuration of the run.
        resume: the command that continues the run, for the user.
        say: prints one line for the user.
    """

    def __init__(self, address: str, run: RunFolder, config: Config, resume: str, say: Callable[[str], None]) -> None:
        super().__init__(run.path)
        self._address = address
        self._resume = resume
        self._run = run
        self._config = config
        self._say = say
        self._where: dict[str, Host] = {}  # hosts of the learner and of the policy servers, by process name
        self._policy_of: dict[str, str] = {}  # maps a simulator to its policy server, and a server to itself
        self._endpoints: dict[str, str] = {}
        self._policy: Process  # the policy server in the launch description
        self._simulators: dict[str, Process] = {}  # by name
        self._absent: list[Process] = []  # simulators for which the cluster has no room now
        self._given_up: set[str] = set()  # policy servers of lost hosts; the run does not start them again
        self._looked_at = 0.0
        self._keys = KeyFolder(run.path.resolve() / "keys")
        self._members = Members(config, run.path, self._keys.public_file, say)
        self._files = LearnerFiles(config.cluster.storage, run, say) if config.cluster.storage else None

    def __enter__(self) -> RayHosts:
        with contextlib.ExitStack() as resources:
            super().__enter__()
            resources.callback(super().__exit__)
            resources.callback(ray.shutdown)
            connect(self._address)
            shutil.rmtree(self._keys.path, ignore_errors=True)  # left by a command that crashed
            resources.enter_context(self._keys_removed())
            self._keys.create("run")
            self._run.write_run(keys=str(self._keys.path))
            self._members.find(ANSWER, strict=True)
            resources.callback(self._end)
            resources.callback(self._members.withdraw_request)
            self._members.wait_for_cores(self.stopped)
            self._where[LEARNER] = self._host_for_learner()
            if self._files:
                self._files.begin()
            self._say(
                f"if Ray's head dies, the run saves all that it learned, and ends; to continue it: {self._resume}"
            )
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _end(self) -> None:
        """End the processes on all hosts.

        Raises:
            NodeError: the learner's host could not copy the last files to the storage.
        """
        problem = self._files.end() if self._files else ""
        for host in self._members.alive:
            host.close()
        if problem:
            raise NodeError(problem)

    @contextlib.contextmanager
    def _keys_removed(self) -> Iterator[None]:
        """Remove the keys after the block, even if this process is killed in the block."""
        lifeline = Lifeline()
        command = remover(lifeline.read_end, self._keys.path)
        process = subprocess.Popen(command, pass_fds=(lifeline.read_end,), start_new_session=True)
        try:
            yield
        finally:
            lifeline.close()
            process.wait()
            shutil.rmtree(self._keys.path, ignore_errors=True)  # somebody may have killed the remover
            with contextlib.suppress(OSError):  # a full disk must not hide the original error
                self._run.write_run(keys=None)

    def _host_for_learner(self) -> Host:
        """Choose the learner's host, and start its agent.

        Raises:
            NodeError: no host can run the learner.
        """
        while True:
            host = self._members.best_for_learner()
            try:
                host.begin(host.reserved[0] + self._config.cluster.learner_cpus, min(host.gpus, 1.0))
                host.promised = []  # the simulators promised to this host now wait for another host
                return host
            except NodeError as error:
                if not self._members.able_to_learn():
                    raise
                self._say(f"{error}; the run does not use this host")

    def place(self, processes: Sequence[Process]) -> list[Process]:
        """Return the processes to start, with one policy server for each host that gets simulators.

        The result lacks the simulators for which no host has cores; see :meth:`joined`.

        Raises:
            NodeError: the hosts have too few processor cores, or the launch description has no policy server.
        """
        names = [process.name for process in processes]
        if POLICY not in names:
            text = f"--cluster needs a process {POLICY!r} in the launch description, which has {', '.join(names)}"
            raise NodeError(text, EXIT_USAGE)
        simulators = [process for process in processes if process.name.startswith(f"{SIMULATOR}-")]
        self._simulators = {process.name: process for process in simulators}
        self._policy = next(process for process in processes if process.name == POLICY)
        result = [process for process in processes if process is not self._policy and process not in simulators]
        for host, count in self._shares():
            result += self._place_on(host, simulators[:count])
            simulators = simulators[count:]
        self._absent = simulators
        self._say(f"host {self._where[LEARNER].address}: learner")
        return result

    def _begun(self, host: Host, simulators: int, wait: float = ANSWER) -> bool:
        """Start the agent for a number of simulators. If this fails, the run does not use the host.

        See :meth:`Host.begin`.
        """
        cluster = self._config.cluster
        cpus = simulators * cluster.simulator_cpus + (cluster.learner_cpus if host is self._where[LEARNER] else 0.0)
        try:
            return host.begin(cpus, wait=wait)
        except NodeError as error:
            self._say(f"{error}; the run does not use this host")
            return False

    def _shares(self) -> list[tuple[Host, int]]:
        """Distribute the simulators over the hosts, and start the agents there.

        Return each host with its number of simulators.

        Raises:
            NodeError: the hosts have too few cores.
        """
        each, least = self._config.cluster.simulator_cpus, self._members.least
        while True:
            others, room = self._members.workers(self._where[LEARNER]), self._members.room(self._where[LEARNER])
            if room < least:
                raise NodeError(
                    f"the hosts of the cluster have cores for {room} simulators with cluster.simulator_cpus {each:g}; "
                    f"the run needs {least}; to wait for more hosts, set cluster.wait_s"
                )
            chosen = list(share(room, others, each))
            shares = [(host, chosen.count(host)) for host in others if host in chosen]
            if all(self._begun(host, count) for host, count in shares):
                return shares

    def _place_on(self, host: Host, simulators: Sequence[Process]) -> list[Process]:
        """Assign these simulators and a policy server to a host whose agent runs. Return these processes."""
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
        self._members.find()
        self._members.request_cores(self._where[LEARNER])
        result: list[Process] = []
        promised = [process for host in self._members.alive for process in host.promised]
        for host in self._members.alive:
            if host.simulators or host is self._where[LEARNER]:
                continue
            if not host.promised:
                free = [process for process in self._absent if process not in promised]
                host.promised = free[: self._members.room_on(host)]
                promised += host.promised
            if host.promised and self._begun(host, len(host.promised), wait=0.0):
                result += self._place_on(host, host.promised)
                self._absent = [process for process in self._absent if process not in host.promised]
                host.promised = []
        return result

    def endpoints(self) -> Mapping[str, str]:
        """For each link, return the endpoint that processes on other hosts must reach."""
        shown = str(get_node_ip_address())
        here = self._config.cluster.addresses.get(shown, shown)
        for link in ("supervisor", *LISTENERS):
            kept = self._resources.enter_context(keep_port())
            self._endpoints[link] = with_host(f":{port_of(kept)}", here)
        self._endpoints[LEARNER] = self._where[LEARNER].endpoint(LEARNER)
        return self._endpoints

    def start(self, start: Start) -> Running:
        """Start a process on its host. If this host was lost, choose another host.

        Raises:
            NodeError: no other host can run the process.
            NoRoomError: no other host has room for the process, and the run has enough other simulators.
        """
        server = self._policy_of.get(start.name, start.name)
        if server not in self._where:
            return super().start(start)
        while True:
            with contextlib.suppress(LOST):  # if the chosen host is lost, too, choose again
                moves = self._where[server].lost and server not in self._given_up
                if moves:
                    self._move(server)
                if server in self._given_up:
                    raise NoRoomError
                host = self._where[server]
                if server == LEARNER:
                    running = self._start_learner(host, start)
                    if moves:
                        self._announce_learner()
                    return running
                if start.name == server:
                    self._publish(server, host.endpoint(server))
                return _start_on(host, start, self._write_run(host, server))

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
            return _start_on(host, start, str(self._run.path.resolve()))
        folder = self._write_run(host, LEARNER)
        self._files.place = host, folder
        return _start_on(host, stored(start), folder)

    def _write_run(self, host: Host, server: str) -> str:
        """Write a run folder on a host, for the learner or for a policy server and its simulators.

        The folder gets configuration, endpoints, keys and storage. Return the path of the folder.
        """
        folder = f"{host.folder}/{server}"
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
        return folder

    def _move(self, server: str) -> None:
        """Choose another host for the learner, or for a policy server and its simulators."""
        lost = self._where[server]
        able = self._members.able_to_learn() if server == LEARNER else self._members.alive
        self._members.find(_JOIN if able else ANSWER)
        if server == LEARNER:
            self._where[LEARNER] = self._host_for_learner()
            if self._files:
                self._files.claim()
            self._endpoints[LEARNER] = self._where[LEARNER].endpoint(LEARNER)
            self._run.write_run(endpoints=self._endpoints)
        elif not self._move_simulators(server):
            return
        self._say(f"host {lost.address} was lost; {server} continues on host {self._where[server].address}")

    def _move_simulators(self, server: str) -> bool:
        """Choose another host for a policy server and its simulators. Return False if the run continues without them.

        Raises:
            NodeError: no host is alive.
        """
        each = self._config.cluster.simulator_cpus
        mine = [name for name, owner in self._policy_of.items() if owner == server and name in self._simulators]
        present = len(self._simulators) - len(self._absent)
        while workers := self._members.workers(self._where[LEARNER]):
            host = next(iter(share(1, workers, each)))
            if host.cpus < (host.simulators + len(mine)) * each and present - len(mine) >= self._members.least:
                self._given_up.add(server)
                self._publish(server, None)
                self._absent += [self._simulators[name] for name in mine]
                return False
            total = host.simulators + len(mine)
            # The run needs these simulators. If the host has too few cores for them, reserve the cores that it has.
            if self._begun(host, min(total, self._members.room_on(host))):
                host.promised = []  # the simulators promised to this host now wait for another host
                host.simulators += len(mine)
                self._where[server] = host
                return True
        raise NodeError("no host of the cluster is alive")

    def _announce_learner(self) -> None:
        """Write the learner's new endpoint for the policy servers and simulators. They then connect to it."""
        for server, host in self._where.items():
            if server != LEARNER and not host.lost:
                with contextlib.suppress(LOST):  # the processes of a lost host start again and get the new endpoint
                    self._write_run(host, server)


def share(count: int, hosts: Sequence[Host], each: float) -> Iterable[Host]:
    """For each of ``count`` simulators, yield the host with the most free cores. A simulator needs ``each`` cores."""
    given = {host.node: host.simulators for host in hosts}
    for _ in range(count):
        host = max(hosts, key=lambda it: it.cpus - given[it.node] * max(each, 1e-9))
        given[host.node] += 1
        yield host


def _start_on(host: Host, start: Start, run: str) -> Running:
    """Start a process on a host. ``run`` is the path of the process's run folder on this host."""
    return host.start(start.name, start.arguments(run), start.environment, start.log)
