"""Errors about wrong settings with ``--cluster``, and the effect of right settings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.cli.main import main
from td3_robot.config import loading as configuration
from td3_robot.errors import ConfigError, UsageError
from td3_robot.runtime.prepare import new_run
from tests.conftest import Command

pytest.importorskip("ray")
from td3_robot.cluster import hosts


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("timing=lockstep", "timing is 'lockstep'"),
        ("endpoints.policy=ipc:///tmp/p", "endpoints.policy is 'ipc:///tmp/p'; with --cluster it must be null"),
        ("endpoints.monitor=tcp://127.0.0.1:5555", "endpoints.monitor is 'tcp://127.0.0.1:5555'"),
        ("endpoints.keys=/tmp/keys", "endpoints.keys is '/tmp/keys'; with --cluster it must be null"),
        (
            "cluster.simulators=64",
            "cluster.simulators: learner.replay_ratio_band is 64.0; it must be at least 65 with 64 simulators of 1 "
            "robots at replay_ratio 1.0",
        ),
    ],
)
def test_the_error_contains_the_setting_that_does_not_fit_a_cluster(
    override: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        new_run("pendulum", [override], tmp_path / "run", cluster=True)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.simulators=0", "cluster.simulators is 0; it must be a whole number >= 1"),
        ("cluster.simulators=65", "cluster.simulators is 65; it must be a whole number <= 64"),
        ("cluster.simulators=[5, 2]", "cluster.simulators is [5, 2]; allowed: two numbers from 1 to 64, lower first"),
        ("cluster.simulators=[0, 2]", "cluster.simulators is [0, 2]"),
        ("cluster.simulator_cpus=-1", "cluster.simulator_cpus is -1"),
        ("cluster.simulator=4", "cluster.simulator"),
        ("cluster.wait_s=-1", "cluster.wait_s is -1"),
        ("cluster.bind=10.0.0.1:80", "cluster.bind is '10.0.0.1:80'; allowed: an address or a network interface"),
        ("cluster.bind=tcp://eth0", "cluster.bind is 'tcp://eth0'"),
    ],
)
def test_the_error_contains_the_wrong_key_or_value(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.parse({}, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(("value", "expected"), [("null", 3), ("5", 5), ("[2, 7]", 7)])
def test_a_cluster_run_gets_the_highest_allowed_number_of_simulators(value: str, expected: int, tmp_path: Path) -> None:
    """If ``cluster.simulators`` is null, the key ``simulators`` gives the number."""
    overrides = [f"cluster.simulators={value}", "simulators=3"]
    assert new_run("pendulum", overrides, tmp_path / "run", cluster=True).config.simulators == expected


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_command_leaves_device_and_threads_to_the_host_of_the_learner(device: str, tmp_path: Path) -> None:
    """The command may run on a host without a GPU. So it keeps ``auto``, and accepts ``cuda`` without a check."""
    overrides = [f"learner.device={device}", "learner.threads=auto"]
    learner = new_run("pendulum", overrides, tmp_path / "run", cluster=True).config.learner
    assert (learner.device, learner.threads, learner.thread_count) == (device, "auto", 1)


def test_a_url_is_no_run_folder() -> None:
    with pytest.raises(UsageError, match="--out is 's3://bucket/run', which is a URL; it must be a folder"):
        new_run("pendulum", [], Path("s3://bucket/run"))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", ": nothing answers there (Connection refused)"),
        ("localhost", "; allowed: auto, or HOST:PORT"),
        ("localhost:0", "; allowed: auto, or HOST:PORT"),
    ],
)
def test_the_error_contains_the_address_if_no_cluster_is_there(
    command: Callable[..., Command], address: str, reason: str
) -> None:
    run = command("train", "pendulum", "--cluster", address, "--out", "run")
    assert run.finish() == 2
    assert not (run.cwd / "run").exists()
    assert f"td3-robot train: --cluster is {address!r}{reason}" in run.output()


def test_without_ray_a_one_line_error_names_the_package_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("connection", "hosts"):
        monkeypatch.delitem(sys.modules, f"td3_robot.cluster.{name}")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "pendulum", "--cluster", "auto", "--out", "run"]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'td3-robot[cluster]'" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("count", "cpus", "each", "expected"),
    [
        (4, (4, 4), 1.0, [2, 2]),
        (5, (8, 2), 1.0, [5, 0]),  # the first host keeps 8 - 5 = 3 free cores, more than the 2 of the second host
        (3, (2, 2, 2), 1.0, [1, 1, 1]),
        (2, (4, 1), 0.0, [2, 0]),  # simulators that need no cores all go to the host with the most cores
    ],
)
def test_each_simulator_goes_to_the_host_with_the_most_free_cores(
    count: int, cpus: tuple[int, ...], each: float, expected: list[int]
) -> None:
    all_hosts = [hosts.Host(str(number), "10.0.0.1", float(cores), 0.0, True) for number, cores in enumerate(cpus)]
    chosen = list(hosts.share(count, all_hosts, each))
    assert [chosen.count(host) for host in all_hosts] == expected
