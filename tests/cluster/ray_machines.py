"""A Ray cluster on this machine, as a program: ``python ray_machines.py CORES CORES …``, with the cores of each host.

It prints the address of the head. A line ``kill N`` on standard input kills all processes of host N at once. A line
``add CORES`` adds a host. The end of the input ends the cluster. All hosts have the same IP address.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster()
    nodes: list[Any] = []

    def add(cores: str) -> str:
        nodes.append(cluster.add_node(num_cpus=int(cores), include_dashboard=False))
        cluster.wait_for_nodes()
        return str(nodes[-1].node_id)

    made = [add(cores) for cores in sys.argv[1:]]
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
