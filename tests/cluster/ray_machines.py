"""A Ray cluster on this machine, as a program: ``python ray_machines.py CORES CORES …``.

Each CORES is the number of processor cores of one host. The first host is the head.

If ``--hide FOLDER`` comes before the first CORES, all hosts except the head see an empty folder at FOLDER. Each
of these hosts has its own mount namespace, which only root can make.

The program first prints a JSON map: the address of the head, and the id of each host. A line ``kill N`` on standard
input kills Ray's processes on host N (0 is the head); the answer is ``killed``. A line ``add CORES`` adds a host; the
answer is its id. The end of the input ends the cluster. All hosts have the same IP address.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from ray.cluster_utils import Cluster

_CLONE_FS, _CLONE_NEWNS, _MS_PRIVATE, _MS_REC = 0x200, 0x20000, 1 << 18, 1 << 14  # from sched.h and sys/mount.h


@contextlib.contextmanager
def hidden(folder: str) -> Iterator[None]:
    """Hide the content of a folder from the processes that the ``with`` block starts."""
    system, cwd = ctypes.CDLL(None, use_errno=True), os.getcwd()

    def call(name: str, *arguments: Any) -> None:
        if getattr(system, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    call("unshare", _CLONE_NEWNS)
    call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None)
    yield
    call("unshare", _CLONE_FS)  # setns fails while threads share the working folder, as Ray's threads do
    call("setns", before, _CLONE_NEWNS)
    os.close(before)
    os.chdir(cwd)


def main() -> None:
    cluster = Cluster()
    nodes: list[Any] = []
    hide, cores = (sys.argv[2], sys.argv[3:]) if sys.argv[1] == "--hide" else ("", sys.argv[1:])

    def add(cores: str) -> str:
        with hidden(hide) if hide and nodes else contextlib.nullcontext():
            nodes.append(cluster.add_node(num_cpus=int(cores), include_dashboard=False, wait=False))
        cluster.wait_for_nodes(timeout=300)
        return str(nodes[-1].node_id)

    made = [add(number) for number in cores]
    print(json.dumps({"address": cluster.address, "nodes": made}), flush=True)
    for line in sys.stdin:
        order, argument = line.split()
        if order == "add":
            print(add(argument), flush=True)
        else:
            cluster.remove_node(nodes[int(argument)], allow_graceful=False)
            print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
