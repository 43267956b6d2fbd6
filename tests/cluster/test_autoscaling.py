"""A training asks Ray's autoscaler for hosts. Ray's fake provider starts them on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Head, free_address, nothing_is_left, start_training
from tests.conftest import Command, poll_until

pytestmark = pytest.mark.timeout(1800)

PROVIDER = {
    "type": "fake_multinode",
    "use_node_id_as_ip": True,  # all hosts have the IP address of this machine, so Ray tells them apart by ID
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}
WORKER = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 1}
UNUSED: dict[str, Any] = {
    "docker": {},
    "auth": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
"""Ray requires these keys, but the fake provider ignores them."""


class AutoscalingCluster(Head):
    """A head with one processor core and a pretended GPU. Its autoscaler can add one host with two processor cores."""

    def __init__(self, folder: Path) -> None:
        address = free_address()
        head = {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "max_workers": 0}
        description = {
            "cluster_name": "fake",
            "max_workers": 1,
            "provider": {**PROVIDER, "gcs_address": address},
            "available_node_types": {"ray.head.default": head, "worker": WORKER},
            "head_node_type": "ray.head.default",
            "idle_timeout_minutes": 0.05,
            **UNUSED,
        }
        file = folder / "cluster.json"
        file.write_text(json.dumps(description))
        options = ("--num-cpus", "1", "--num-gpus", "1", "--include-dashboard", "false")
        variables = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        super().__init__(folder, address, *options, "--autoscaling-config", str(file), **variables)

    def hosts(self) -> int:
        """Return the number of hosts. Each host runs one process ``raylet``."""
        return sum(process.info["name"] == "raylet" for process in self._all())


@pytest.fixture
def cluster(folder: Path) -> Iterator[AutoscalingCluster]:
    made = AutoscalingCluster(folder)
    yield made
    made.close()


@pytest.mark.slow
def test_a_training_gets_a_host_from_the_autoscaler(
    command: Callable[..., Command], cluster: AutoscalingCluster, tmp_path: Path
) -> None:
    """Only the head has a GPU, so the learner runs there. The second host has processor cores for two simulators."""
    sets = ("cluster.simulators=2", "cluster.wait_s=120", "evaluation.every=0", "total_steps=1500")
    run = start_training(command, cluster, *sets)
    run.wait_for("waiting for hosts: the cluster has cores for 1 of 2 simulators")
    run.wait_for("^ready: .*policy-0")
    poll_until(lambda: cluster.hosts() == 2, lambda: f"{cluster.hosts()} hosts")
    assert run.finish() == 0, run.output()
    assert "; 0 Steps lost;" in run.output()
    nothing_is_left(cluster, tmp_path / "run")
    poll_until(lambda: cluster.hosts() == 1, lambda: "the autoscaler still keeps the host", timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["0", "600"])
def test_a_run_with_too_few_cores_ends_or_waits_for_hosts(
    command: Callable[..., Command], cluster: AutoscalingCluster, tmp_path: Path, wait: str
) -> None:
    """The simulators need 8 processor cores. Even with the host that the autoscaler can add, the cluster has only 3.

    With ``cluster.wait_s`` 0, the run ends at once. With 600, it waits until Ctrl-C.
    """
    run = start_training(command, cluster, "cluster.simulators=8", f"cluster.wait_s={wait}")
    if wait == "0":
        assert run.finish() == 1
        assert "have cores for 1 simulators with cluster.simulator_cpus 1; the run needs 8; to wait for" in run.output()
    else:
        run.wait_for("waiting for hosts: ")
        run.interrupt()
        assert run.finish() == 130
        assert "stopped while the run waited for hosts" in run.output()
    cluster.wait_for_removal()
    assert not (tmp_path / "run" / "keys").exists()
