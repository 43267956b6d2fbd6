"""The benchmarks of policy server and links: they run, agree with themselves, and hold what no clock decides."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bench import attack, harness
from td3_robot.bench.peers import Robot
from td3_robot.cli import main as cli
from td3_robot.messages import Hello, Step
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ServerLink


def report(*words: str) -> Any:
    """In a process of its own: what a benchmark asks of the operating system holds for the whole of it."""
    command = [sys.executable, "-m", "td3_robot.cli.main", "bench", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_policy() -> None:
    """Memory is what a test can hold it to: no growth over 20,000 actions, and a process below 60 MB."""
    told = report("policy", "--actions", "200", "--memory", "20000", "--starts", "1")
    assert set(told["server_us"]) == {"1", "8", "64"}
    for parts in told["server_us"].values():
        assert set(parts) == {"decode", "core", "encode", "all", "infer", "noise"}
        assert all(0 < row["p50"] <= row["p99"] <= row["p999"] <= row["max"] for row in parts.values())
        assert parts["all"]["p50"] >= parts["core"]["p50"]  # timed in one loop
    assert told["memory"]["growth_bytes"] < 1_000_000
    assert 10e6 < told["start"]["resident_bytes"] < 60e6


def test_link() -> None:
    told = report("link", "--trips", "200", "--seconds", "0.3", "--freeze-gc", "--spin", "500")
    assert told["realtime"] == {"applied": ["garbage collector frozen"], "refused": [], "spin_us": 500}
    for row in told["round_trip_us"].values():
        assert row["policy"]["p50"] > 0
        assert row["p50_over_echo"] > 0
    turned = told["loop"]
    assert turned["turns"] == 300  # 1 kHz for 0.3 s, whether in time or not
    assert sum(turned["late_histogram_us"].values()) <= 300
    assert 0 <= turned["missed_deadlines"] <= 300


def test_attacks_are_survived() -> None:
    """Under each of them every Step of a robot gets its Action; else the benchmark fails."""
    told = report("link", "--attack", "--trips", "200")
    assert set(told["attacks"]) == set(attack.KINDS)
    assert all(row["attacked"]["p50"] > 0 for row in told["attacks"].values())


def test_a_robot_that_was_given_up_asks_again(tmp_path: Path) -> None:
    """As while another process is started: its Step is refused, and comes after a new Hello."""
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


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in (
        (["policy", "--actions", "0"], "--actions is 0; it must be at least 1"),
        (["link", "--seconds", "nan"], "--seconds is nan; it must be at least 0.1"),
        (["link", "--priority", "100"], "--priority is 100; allowed: 0 to 99"),
        (["link", "--spin", "-1"], "--spin is -1; allowed: 0 to 20000"),
        (["link", "--spin", "9", "--priority", "1"], "--spin is 9 and --priority is 1; one of them must be 0"),
    ):
        assert cli.main(["bench", *words]) == 2
        assert line in capsys.readouterr().err


def test_percentiles() -> None:
    assert harness.percentiles([1000, 2000, 3000]) == {"p50": 2.0, "p99": 3.0, "p999": 3.0, "max": 3.0}
