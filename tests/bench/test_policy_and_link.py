"""The benchmarks of policy server and links give consistent results. No test checks the speed."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bench import harness
from td3_robot.bench.peers import Robot
from td3_robot.cli import main as cli
from td3_robot.messages import Hello, Step
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ServerLink


def report(*words: str) -> Any:
    """Run a benchmark in a child process, because its real-time options affect the whole process."""
    command = [sys.executable, "-m", "td3_robot.cli.main", "bench", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_policy_benchmark_reports_times_and_bounded_memory() -> None:
    """The memory grows by less than 1 MB in 20,000 actions. A started policy server uses less than 60 MB."""
    result = report("policy", "--actions", "200", "--memory", "20000", "--starts", "1")
    assert set(result["server_us"]) == {"1", "8", "64"}
    for parts in result["server_us"].values():
        assert set(parts) == {"decode", "core", "encode", "all", "infer", "noise", "noise_v1"}
        assert all(0 < row["p50"] <= row["p99"] <= row["p999"] <= row["max"] for row in parts.values())
        assert parts["all"]["p50"] >= parts["core"]["p50"]  # the same loop measures both
    assert result["memory"]["growth_bytes"] < 1_000_000
    assert 10e6 < result["start"]["resident_bytes"] < 60e6


def test_the_link_benchmark_counts_every_turn() -> None:
    result = report("link", "--trips", "200", "--seconds", "0.3", "--freeze-gc", "--spin", "500")
    assert result["realtime"] == {"applied": ["garbage collector frozen"], "refused": [], "spin_us": 500}
    for row in result["round_trip_us"].values():
        assert row["policy"]["p50"] > 0
    loop = result["loop"]
    assert loop["turns"] == 300  # periods of the loop: 1 kHz for 0.3 s, including skipped periods
    assert 0 <= loop["missed_deadlines"] <= 300


def test_a_robot_that_the_server_forgot_sends_its_step_again(tmp_path: Path) -> None:
    """The server forgets a silent robot and refuses its Step. The robot sends the Step again after a new Hello."""
    endpoint = f"ipc://{tmp_path}/policy"
    session = ServerLink("policy", "bench", {"driver": (Step,)}, {}, 1)
    with closing(Bus()) as server, closing(Robot(endpoint, 1)) as robot:
        server.serve(endpoint, session)
        while not robot.bus.welcome("policy"):
            server.receive(0.01)
            robot.bus.receive(0.01)
        (peer,) = server.peers("policy")
        session.forget(peer.key, "silent")
        sequence = robot.send()
        got: list[Any] = []
        while not any(isinstance(message, Step) for _, message in got):
            got += server.receive(0.01)
            assert not robot.answered(sequence, 0.01)
    assert [type(message) for _, message in got] == [Hello, Step]
    assert got[1][1].sequence == sequence


def test_wrong_arguments_give_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in (
        (["policy", "--actions", "0"], "--actions is 0; allowed: whole numbers from 1"),
        (["link", "--seconds", "nan"], "--seconds is nan; allowed: 0.1 or more"),
        (["link", "--priority", "100"], "realtime.priority is 100"),
        (["link", "--spin", "-1"], "--spin is -1; allowed: whole numbers from 0"),
        (["link", "--spin", "9", "--priority", "1"], "realtime.spin_us is 9 and realtime.priority is 1"),
    ):
        assert cli.main(["bench", *words]) == 2
        error = capsys.readouterr().err
        assert line in error
        assert error.count("\n") == 1


def test_percentiles_of_nanoseconds_are_given_in_microseconds() -> None:
    assert harness.percentiles([1000, 2000, 3000]) == {"p50": 2.0, "p99": 3.0, "p999": 3.0, "max": 3.0}


def test_the_reported_load_is_the_load_before_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    assert harness.describe()["load"] < 1e6
