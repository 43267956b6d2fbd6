"""A training as a job of Ray: ``ray job submit`` and ``ray job stop``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SMALL, Head, free_address
from tests.conftest import free_port, poll_until

pytestmark = pytest.mark.timeout(1800)

STEPS = re.compile(r"^([\d,]+)/[\d,]+ steps", re.MULTILINE)


@pytest.fixture
def head(folder: Path) -> Iterator[Head]:
    """A head with Ray's dashboard, which accepts jobs."""
    pytest.importorskip("aiohttp_cors", reason="needs ray[default], which is not installed")
    port, agent = str(free_port()), str(free_port())  # Ray accepts no job if the agent's default port is taken
    ports = ("--dashboard-port", port, "--dashboard-agent-listen-port", agent)
    options = ("--num-cpus", "3", "--include-dashboard", "true", *ports)
    made = Head(folder, free_address(), *options, RAY_JOB_STOP_WAIT_TIME_S="120")
    made.dashboard = f"http://127.0.0.1:{port}"
    yield made
    made.close()


@pytest.mark.slow
def test_a_training_can_run_as_a_job_of_ray(head: Head, tmp_path: Path) -> None:
    """The job trains until ``ray job stop`` ends it. The learner saves a checkpoint at the end."""
    run = tmp_path / "run"
    sets = ("cluster.simulators=2", "evaluation.every=0", "total_steps=1_000_000", "checkpoint.every=0")
    words_of_run = [word for item in (*SMALL, *sets) for word in ("--set", item)]
    training = [sys.executable, "-m", "td3_robot.cli.main", "train", "pendulum", "--out", str(run), "--cluster", "auto"]

    def run_job(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", verb, "--address", head.dashboard, *arguments]
        variables = {**os.environ, **head.environment}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)

    def job(verb: str, *arguments: str) -> str:
        done = run_job(verb, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submitted() -> bool:
        words = ("--submission-id", "walker", "--no-wait", "--", *training, "--log-every", "0.5", *words_of_run)
        done = run_job("submit", *words)
        waits = "No available agent" in done.stderr  # the dashboard starts before the agent that accepts jobs
        assert waits or done.returncode == 0, done.stdout + done.stderr
        return not waits

    def steps() -> int:
        return max((int(found.replace(",", "")) for found in STEPS.findall(job("logs", "walker"))), default=0)

    poll_until(submitted, lambda: "Ray accepts no job")
    poll_until(lambda: steps() >= 700, lambda: job("logs", "walker"), 300)
    job("stop", "walker")
    assert "STOPPED" in job("status", "walker").upper()
    assert list((run / "checkpoint").glob("checkpoint-*.safetensors"))
    assert not (run / "keys").exists()
    assert "stopped; everything learned is saved; continue" in job("logs", "walker")
    head.wait_for_removal()
