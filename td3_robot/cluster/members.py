"""The hosts of a Ray cluster that a run can use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayTaskError

from td3_robot.cluster.connection import ask_probe
from td3_robot.cluster.host import Host
from td3_robot.cluster.question import LOST, Question, first_line
from td3_robot.config.schema import Config
from td3_robot.errors import NodeError, exit_code_of
from td3_robot.util.version import __version__

_SAY = 30.0  # seconds between two messages while the run waits for hosts
_PAUSE = 1.0  # seconds between two reads of the list of hosts while the run waits


class Members:
    """Finds the hosts of a Ray cluster, counts their processor cores, and asks Ray's autoscaler for more hosts.

    Args:
        config: the configuration of the run.
        run: path of the run folder.
        marker: a file in the run folder. If a host can read this file, the host sees the run folder.
        say: prints one line for the user.

    Attributes:
        least: number of simulators that the run needs.
        most: number of simulators that the run can use.
    """

    def __init__(self, config: Config, run: Path, marker: Path, say: Callable[[str], None]) -> None:
        self._cluster = config.cluster
        self._run = run
        self._marker = marker
        self._say = say
        self.least, self.most = config.cluster.range(config.simulators)
        self._hosts: dict[str, Host] = {}  # by Ray's NodeID
        self._asked: dict[str, tuple[Mapping[str, Any], Question]] = {}  # hosts that have not answered yet
        self._refused: set[str] = set()  # NodeIDs of hosts that the run cannot use
        self._requested: list[dict[str, float]] = []  # the newest request to Ray's autoscaler

    @property
    def alive(self) -> list[Host]:
        """The living hosts."""
        return [host for host in self._hosts.values() if not host.lost]

    def find(self, wait: float = 0.0, *, strict: bool = False) -> None:
        """Read the list of hosts from Ray, and wait up to ``wait`` seconds for the answers of new hosts.

        Raises:
            NodeError: with ``strict``, a host has another version of this program, or cannot run it. Without
                ``strict``, the run does not use this host.
        """
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for number in self._hosts.keys() - nodes.keys():
            self._hosts[number].lost = True  # for example, Ray's autoscaler has stopped it
        for number, node in nodes.items():
            if number not in {*self._hosts, *self._refused, *self._asked}:
                self._asked[number] = node, ask_probe(number, self._marker, self._marker.read_text())
        end = time.monotonic() + wait
        for number, (node, question) in list(self._asked.items()):
            if not question.settled(max(0.0, end - time.monotonic())):
                continue
            del self._asked[number]
            try:
                self._hosts[number] = examined(node, question, self._cluster.addresses)
            except NodeError as error:
                if strict and not isinstance(error.__cause__, LOST):
                    raise
                self._refused.add(number)
                self._say(f"{error}; the run does not use this host")

    def wait_for_cores(self, stopped: Callable[[], int]) -> None:
        """Wait for the cores that the run needs. Ask Ray's autoscaler for all cores that the run can use.

        The wait lasts at most ``cluster.wait_s`` seconds. This method counts all cores, also those that other jobs use.

        Args:
            stopped: returns the number of the signal that asked the run to stop; 0 without a signal.

        Raises:
            NodeError: a signal asked the run to stop, or no host can run the learner.
        """
        begin = now = time.monotonic()
        said = begin - _SAY
        while True:
            learner = self.best_for_learner()
            self.request_cores(learner)
            room = self.room(learner)
            if room >= self.least or now - begin >= self._cluster.wait_s:
                return
            if number := stopped():
                raise NodeError("stopped while the run waited for hosts", exit_code_of(number))
            if now - said >= _SAY:
                said = now
                self._say(f"waiting for hosts: the cluster has cores for {room} of {self.least} simulators")
            time.sleep(_PAUSE)
            self.find()
            now = time.monotonic()

    def request_cores(self, learner: Host) -> None:
        """If the hosts have too few cores for all simulators, request more hosts from Ray's autoscaler.

        The request asks for the cores that all simulators need, and for all cores and GPUs of the learner's host.
        Without an autoscaler, the request has no effect.
        """
        if self.room(learner) >= self.most:
            return
        whole = {name: amount for name, amount in (("CPU", learner.cpus), ("GPU", learner.gpus)) if amount}
        bundles = [whole, *({"CPU": self._cluster.simulator_cpus} for _ in range(self.most))]
        if bundles != self._requested:
            self._requested = bundles
            request_resources(bundles=bundles)

    def workers(self, learner: Host) -> list[Host]:
        """Return the hosts for simulators: the living hosts except the host of the learner.

        If only one host is alive, return this host: it runs all processes.
        """
        return [host for host in self.alive if host is not learner] or self.alive

    def room(self, learner: Host) -> int:
        """Return the number of simulators for which the hosts have cores. The result is at most :attr:`most`."""
        return min(self.most, sum(map(self.room_on, self.workers(learner))))

    def room_on(self, host: Host) -> int:
        """Return the number of simulators for which a host has cores. The result is at most :attr:`most`."""
        each = self._cluster.simulator_cpus
        return min(self.most, int(host.cpus / each + 1e-9)) if each else self.most

    def able_to_learn(self) -> list[Host]:
        """Return the living hosts that can run the learner.

        If ``cluster.storage`` is not set, the host of the learner must see the run folder.
        """
        return [host for host in self.alive if self._cluster.storage or host.sees_run]

    def best_for_learner(self) -> Host:
        """Return the best host for the learner. Raise NodeError if no host can run it."""
        able = self.able_to_learn()
        if not self.alive:
            raise NodeError("no host of the cluster is alive")
        if not able:
            raise NodeError(
                f"no host of the cluster sees the run folder {str(self._run)!r}; the learner needs it for its "
                "checkpoints; name a folder on shared storage (--out DIR), or set cluster.storage"
            )
        return max(able, key=lambda it: (it.gpus > 0, it.cpus))

    def withdraw_request(self) -> None:
        """Withdraw the request to Ray's autoscaler, so that the autoscaler can stop hosts."""
        if self._requested and self.alive:
            with contextlib.suppress(Exception):  # Ray's head may be dead
                request_resources()


def examined(node: Mapping[str, Any], question: Question, addresses: Mapping[str, str]) -> Host:
    """Check the version of td3-robot on a host in Ray's list. Return the host.

    ``question`` comes from :func:`ask_probe`, and is settled. ``addresses`` is like ``cluster.addresses``. Raises
    NodeError if a run cannot use the host.
    """
    has, shown = node["Resources"], node["NodeManagerAddress"]
    address = addresses.get(shown, shown)
    try:
        version, sees = question.answer()
    except RayTaskError as error:  # for example, this program is not installed there
        raise NodeError(f"host {address} of the cluster: {first_line(error)}") from None
    except LOST as error:  # Ray has not yet noticed that the host died
        raise NodeError(f"host {address} of the cluster does not answer") from error
    if version != __version__:
        raise NodeError(f"host {address} of the cluster has td3-robot {version}; this machine has {__version__}")
    return Host(node["NodeID"], address, has.get("CPU", 0.0), has.get("GPU", 0.0), sees)
