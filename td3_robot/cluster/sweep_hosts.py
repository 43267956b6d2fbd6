"""The hosts of a Ray cluster for the trainings of a sweep. Each training runs on one host."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import ray

from td3_robot.cluster.connection import ask_probe, check_address, connect
from td3_robot.cluster.host import Host
from td3_robot.cluster.members import examined
from td3_robot.cluster.question import ANSWER, LOST
from td3_robot.errors import NodeError
from td3_robot.runtime.hosts import Running

_CORES = 2  # processor cores of one training


class SweepHosts:
    """Starts trainings on the hosts of a cluster that see the folder of the sweep.

    Args:
        address: address of the cluster: ``auto`` or ``HOST:PORT``.
        folder: folder of the sweep.
    """

    def __init__(self, address: str, folder: Path) -> None:
        check_address(address)
        self._address = address
        self._folder = folder.resolve()
        self._hosts: list[Host] = []

    def __enter__(self) -> SweepHosts:
        with contextlib.ExitStack() as resources:
            resources.callback(ray.shutdown)
            connect(self._address)
            self._find_hosts()
            resources.callback(self._end)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def slots(self) -> int:
        """Number of trainings that fit the cores of the living hosts. Each host gets at least one."""
        return sum(max(1, int(host.cpus // _CORES)) for host in self._hosts if not host.lost)

    def start(self, name: str, arguments: Sequence[str], log: Path) -> Running:
        """Start ``td3-robot train`` with these arguments on the host with the most free cores.

        The sweep reserves all cores of a host, and the trainings of the sweep share these cores. So the sweep does not
        use a host on which other jobs use cores.

        Raises:
            NodeError: no host is left.
        """
        reason = "no host of the cluster is alive"
        while alive := [host for host in self._hosts if not host.lost]:
            host = max(alive, key=lambda it: it.cpus - _CORES * it.running)
            try:
                host.begin(host.cpus)
                return host.start(name, ["-m", "td3_robot.cluster.training", *arguments], {}, log)
            except NodeError as error:
                reason = str(error)
            except LOST:
                host.lost = True
        raise NodeError(reason)

    def _find_hosts(self) -> None:
        """Find the hosts that run this version and see the folder of the sweep.

        Raises:
            NodeError: there is no such host.
        """
        marker, content = self._folder / ".sweep", secrets.token_hex()
        marker.write_text(content)
        reasons = []
        try:
            asked = [(node, ask_probe(node["NodeID"], marker, content)) for node in ray.nodes() if node["Alive"]]
            for node, question in asked:
                question.settled(ANSWER)
                try:
                    host = examined(node, question, {})
                    if not host.sees_run:
                        raise NodeError(f"host {host.address} of the cluster does not see the folder")
                    self._hosts.append(host)
                except NodeError as error:
                    reasons.append(str(error))
        finally:
            marker.unlink()
        if not self._hosts:
            raise NodeError(f"no host of the cluster can train in {str(self._folder)!r}: {'; '.join(reasons)}")

    def _end(self) -> None:
        for host in self._hosts:
            host.close()
