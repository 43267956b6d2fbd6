"""A Ray cluster on this machine, as a program: ``python ray_machines.py CORES CORES …``, with the cores of each host.

It prints the address of the head. A line ``N`` on standard input kills all processes of host N at once. The end of the
input ends the cluster. All hosts have the same IP address.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster()
    nodes = [cluster.add_node(num_cpus=int(cores), include_dashboard=False) for cores in sys.argv[1:]]
    cluster.wait_for_nodes()
    print(json.dumps({"address": cluster.address, "nodes": [node.node_id for node in nodes]}), flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[int(line)], allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
