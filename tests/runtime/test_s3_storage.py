"""Tests of a storage on S3. A server of the package ``moto`` emulates S3 over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError
from td3_robot.learner.checkpointing import checkpoint
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.storage import NotOwnerError, Storage, check, stamps

pytest.importorskip("s3fs")
pytest.importorskip("moto")
import boto3
from moto.server import ThreadedMotoServer

URL = "s3://bucket/walker"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket. As on a user's host, environment variables hold the server's address and the credentials."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    for name, value in {**variables, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield
    server.stop()


def save(folder: Path, steps: int) -> None:
    """Save a checkpoint of 16 MB, and keep two checkpoints."""
    (folder / "checkpoint").mkdir(exist_ok=True)
    checkpoint.save(folder / "checkpoint", steps, {"weights": np.arange(2e6) + steps}, {"parts": {}}, keep=2)


@pytest.mark.usefixtures("bucket")
def test_a_storage_on_s3_holds_the_newest_files_and_refuses_an_earlier_owner(tmp_path: Path) -> None:
    check(URL, None)
    run = RunFolder.create(tmp_path / "run", Config())
    first = Storage(URL)
    first.claim(run, newer=False)
    copied: dict[str, str] = {}
    for steps in (1000, 2000, 3000):
        save(run.path, steps)
        (run.path / "metrics.jsonl").write_text(f"{steps}\n")
        first.push(run.path, copied)
    other = tmp_path / "other"
    other.mkdir()
    first.pull(other)
    names = ["checkpoint/checkpoint-000000002000.safetensors", "checkpoint/checkpoint-000000003000.safetensors"]
    assert list(stamps(other)) == [*names, "metrics.jsonl"]
    assert all((other / name).read_bytes() == (run.path / name).read_bytes() for name in stamps(run.path))

    Storage(URL).claim(run, newer=True)
    (run.path / "metrics.jsonl").write_text("4000\n")
    with pytest.raises(NotOwnerError, match="does not belong to this training"):
        first.push(run.path, copied)
    with pytest.raises(ConfigError, match="holds another run"):
        check(URL, None)
    check(URL, run)
