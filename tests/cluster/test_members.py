"""Which hosts a run on a cluster uses, and how it distributes its processes over these hosts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from td3_robot.config.schema import Config
from td3_robot.errors import NodeError
from td3_robot.runtime.launch import expand, load
from td3_robot.runtime.prepare import new_run
from td3_robot.runtime.run_folder import RunFolder

pytest.importorskip("ray")
from ray.exceptions import GetTimeoutError

from td3_robot.cluster import host as cluster_host
from td3_robot.cluster import hosts, members


@pytest.fixture
def new(tmp_path: Path) -> tuple[RunFolder, Config]:
    """A run that wants 2 to 5 simulators. It has not connected to a cluster."""
    run, config, _ = new_run("pendulum", ["cluster.simulators=[2, 5]"], tmp_path / "run", cluster=True)
    return run, config


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def found(new: tuple[RunFolder, Config], tmp_path: Path, said: list[str]) -> members.Members:
    """The hosts of a cluster, before the run has looked for them."""
    (tmp_path / "marker").write_text("content")
    return members.Members(new[1], new[0].path, tmp_path / "marker", said.append)


def host(number: str, cpus: float, gpus: float = 0.0) -> hosts.Host:
    return hosts.Host(number, "10.0.0.1", cpus, gpus, True)


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ([host("a", 2.0)], [{"CPU": 2.0}]),
        ([host("a", 1.0, 1.0), host("b", 4.0)], [{"CPU": 1.0, "GPU": 1.0}]),
        ([host("a", 1.0, 1.0), host("b", 5.0)], None),
        ([host("a", 8.0)], None),  # the only host runs all processes, and has enough cores
    ],
)
def test_the_autoscaler_is_asked_once_for_processor_cores_that_the_hosts_lack(
    found: members.Members,
    present: list[hosts.Host],
    expected: list[dict[str, float]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request holds all cores and GPUs of the learner's host, and one processor core for each of 5 simulators."""
    requests: list[Any] = []
    monkeypatch.setattr(members, "request_resources", lambda bundles=None: requests.append(bundles))
    found._hosts = {item.node: item for item in present}
    found.wait_for_cores(lambda: 0)
    found.wait_for_cores(lambda: 0)
    assert requests == ([[*expected, *[{"CPU": 1.0}] * 5]] if expected else [])
    found.withdraw_request()
    assert requests[1:] == ([None] if expected else [])


@pytest.mark.parametrize(
    ("cpus", "each", "room"),
    [((3.0, 3.0), 2.0, 2), ((3.0, 3.0), 1.5, 4), ((3.0,), 0.1, 5), ((3.0, 0.5), 0.0, 5), ((1.0, 1.0), 2.0, 0)],
)
def test_a_simulator_needs_all_its_processor_cores_on_one_host(
    found: members.Members, cpus: tuple[float, ...], each: float, room: int
) -> None:
    """The run can use up to 5 simulators."""
    found._cluster = replace(found._cluster, simulator_cpus=each)
    learner = host("learner", 4.0)
    robots = [host(str(number), cores) for number, cores in enumerate(cpus)]
    found._hosts = {item.node: item for item in (learner, *robots)}
    assert found.room(learner) == room
    placed = list(hosts.share(room, robots, each))
    assert all(placed.count(robot) <= found.room_on(robot) for robot in robots)


class Silent:
    """A question to a host that has joined and does not answer."""

    late = False

    def settled(self, wait: float) -> bool:
        assert wait == 0.0
        return self.late

    def answer(self) -> None:
        raise GetTimeoutError


def test_a_silent_host_delays_nobody_and_is_left_out(
    found: members.Members, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, asked = Silent(), []
    nodes = [{"NodeID": "b", "Alive": True, "Resources": {}, "NodeManagerAddress": "10.0.0.2"}]
    monkeypatch.setattr(members.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(members, "ask_probe", lambda number, *_: asked.append(number) or silent)
    found.find()
    found.find()
    silent.late = True
    found.find()
    found.find()
    assert (asked, found.alive) == (["b"], [])
    assert said == ["host 10.0.0.2 of the cluster does not answer; the run does not use this host"]


def test_hosts_that_join_at_the_same_time_get_different_simulators(
    new: tuple[RunFolder, Config], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run begins with 2 of its 5 simulators. Then two hosts join, each with 2 processor cores.

    Each host needs an agent: a Ray actor that starts the processes. Here, both agents are ready at the
    second call of ``joined``.
    """
    run, config = new
    ray_hosts = hosts.RayHosts("auto", run, config, "RESUME", said.append)
    monkeypatch.setattr(hosts, "_LOOK", 0.0)
    monkeypatch.setattr(ray_hosts._members, "find", lambda: None)
    reserved: list[tuple[str, float]] = []

    def begin(it: hosts.Host, cpus: float, wait: float = 60.0) -> bool:
        reserved.append((it.node, cpus))
        return wait > 0.0 or reserved.count((it.node, cpus)) == 2

    monkeypatch.setattr(hosts.Host, "begin", begin)
    ray_hosts._members._hosts = {"a": host("a", 2.0), "b": host("b", 2.0)}
    ray_hosts._where["learner"] = ray_hosts._members._hosts["a"]
    placed = ray_hosts.place(expand(load(config.launch), config))
    assert [process.name for process in placed if process.name.startswith("sim-")] == ["sim-0", "sim-1"]
    reserved.clear()
    ray_hosts._members._hosts |= {"c": host("c", 2.0), "d": host("d", 2.0)}
    requests: list[hosts.Host] = []
    monkeypatch.setattr(ray_hosts._members, "request_cores", requests.append)
    looks = [[process.name for process in ray_hosts.joined()] for _ in range(3)]
    # The third call of ``joined`` requests no cores, because all simulators have a host.
    assert requests == [ray_hosts._where["learner"]] * 2
    assert looks == [[], ["policy-1", "sim-2", "sim-3", "policy-2", "sim-4"], []]
    assert reserved == [("c", 2.0), ("d", 1.0)] * 2


def test_the_run_leaves_out_a_host_on_which_other_jobs_use_processor_cores(
    new: tuple[RunFolder, Config], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts b and c have 2 processor cores each, but another job uses a core of b. The run needs 2 simulators."""
    run, config = new
    ray_hosts = hosts.RayHosts("auto", run, config, "RESUME", said.append)

    def begin(it: hosts.Host, cpus: float, gpus: float = 0.0, wait: float = 60.0) -> bool:
        del cpus, gpus, wait
        it.lost = it.node == "b"
        if it.lost:
            raise NodeError("host b has fewer free cores")
        return True

    monkeypatch.setattr(hosts.Host, "begin", begin)
    ray_hosts._members._hosts = {name: host(name, cpus) for name, cpus in (("a", 4.0), ("b", 2.0), ("c", 2.0))}
    ray_hosts._where["learner"] = ray_hosts._host_for_learner()
    placed = ray_hosts.place(expand(load(config.launch), config))
    names = [process.name for process in placed if process.name.startswith(("sim-", "policy"))]
    assert names == ["policy-0", "sim-0", "sim-1"]
    assert ray_hosts._where["policy-0"].node == "c"
    assert said[0] == "host b has fewer free cores; the run does not use this host"


def test_needed_simulators_move_even_to_a_host_with_too_few_processor_cores(
    new: tuple[RunFolder, Config], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run needs at least 2 simulators. All its 5 simulators are on host b, which dies.

    The run cannot continue without simulators. So all 5 move to host c, which has only 2 cores.
    """
    run, config = new
    ray_hosts = hosts.RayHosts("auto", run, config, "RESUME", said.append)
    reserved: list[tuple[str, float]] = []
    monkeypatch.setattr(hosts.Host, "begin", lambda it, cpus, **_: reserved.append((it.node, cpus)) or True)
    ray_hosts._members._hosts = {"a": host("a", 1.0), "b": host("b", 5.0)}
    ray_hosts._where["learner"] = ray_hosts._members._hosts["a"]
    ray_hosts.place(expand(load(config.launch), config))
    ray_hosts._members._hosts = {"a": host("a", 1.0), "c": host("c", 2.0)}
    reserved.clear()
    assert ray_hosts._move_simulators("policy-0")
    assert reserved == [("c", 2.0)]
    assert ray_hosts._where["policy-0"].simulators == 5


def test_the_run_reserves_more_of_a_host_when_more_processes_move_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent starts with 2 of the host's 4 cores. Then more processes move to the host.

    Together, the processes on the host now need 6 cores and a GPU. The host has only 4 cores, so the run reserves the
    other 2 cores, and the GPU.
    """
    reserved: list[tuple[str, float, float]] = []

    class Remote:
        def __init__(self, kind: type) -> None:
            self.kind = kind

        def options(self, num_cpus: float, num_gpus: float, **_: Any) -> Remote:
            reserved.append((self.kind.__name__, num_cpus, num_gpus))
            return self

        def remote(self) -> Any:
            return SimpleNamespace(folder=SimpleNamespace(remote=lambda: None))

    question = SimpleNamespace(settled=bool, answer=lambda: "/tmp/agent")
    monkeypatch.setattr(cluster_host.ray, "remote", Remote)
    monkeypatch.setattr(cluster_host, "Question", lambda _: question)
    it = host("a" * 56, 4.0, 1.0)
    for cpus, gpus in ((2.0, 0.0), (2.0, 0.0), (6.0, 1.0), (6.0, 1.0)):
        assert it.begin(cpus, gpus)
    assert reserved == [("Agent", 2.0, 0.0), ("Reservation", 2.0, 1.0)]
    assert it.reserved == (4.0, 1.0)


def test_a_launch_description_without_a_policy_server_is_refused(
    new: tuple[RunFolder, Config], said: list[str]
) -> None:
    run, config = new
    ray_hosts = hosts.RayHosts("auto", run, config, "RESUME", said.append)
    processes = [process for process in expand(load(config.launch), config) if process.name != "policy"]
    with pytest.raises(
        NodeError, match=r"--cluster needs a process 'policy' in the launch description, which has .*sim-0"
    ):
        ray_hosts.place(processes)
