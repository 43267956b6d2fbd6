"""Learners copy complete files to the storage and back. Only the newest learner of the run can change files there."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.cluster.agent import Agent
from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError, NodeError
from td3_robot.learner.checkpointing import checkpoint
from td3_robot.runtime import storage
from td3_robot.runtime.prepare import new_run, resumed_run
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.storage import Keeper, NotOwnerError, Storage, repeated, retried, stamps
from tests.conftest import poll_until

pytest.importorskip("fsspec")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder that serves as the storage."""
    return tmp_path / "storage"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with each kind of file that the learner copies, and with files that must stay on their host."""
    folder = RunFolder.create(tmp_path / "run", Config()).path
    save(folder, 1000)
    for name in ("metrics.jsonl", "tensorboard/events.1", "best.safetensors", "policy.safetensors", "keys/run.secret"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def claimed(run: Path, place: Path) -> Storage:
    """A storage that belongs to the run."""
    made = Storage(f"file://{place}")
    made.claim(RunFolder(run), newer=False)
    return made


def save(folder: Path, steps: int) -> None:
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder / "checkpoint", steps, {"weights": np.arange(1000.0)}, {"parts": {}}, keep=2)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


LEARNED = {"metrics.jsonl", "tensorboard/events.1", "best.safetensors", "policy.safetensors"}
FIRST, SECOND, THIRD = (f"checkpoint/checkpoint-{steps:012d}.safetensors" for steps in (1000, 2000, 3000))


def test_only_files_of_the_learner_reach_the_storage(claimed: Storage, run: Path, place: Path) -> None:
    claimed.push(run, {})
    assert names(place) == {*LEARNED, FIRST, "owner"}
    assert (place / FIRST).read_bytes() == (run / FIRST).read_bytes()


def test_a_claim_removes_the_unfinished_upload_of_a_killed_learner(claimed: Storage, run: Path, place: Path) -> None:
    claimed.push(run, {})
    (place / f".part-{claimed.owner}").write_text("half of a checkpoint")
    Storage(f"file://{place}").claim(RunFolder(run), newer=True)
    assert names(place) == {*LEARNED, FIRST, "owner"}


def test_a_copy_takes_only_what_has_changed(claimed: Storage, run: Path, place: Path) -> None:
    copied: dict[str, str] = {}
    claimed.push(run, copied)
    (place / "metrics.jsonl").write_text("an old copy")
    claimed.push(run, copied)
    assert (place / "metrics.jsonl").read_text() == "an old copy"
    (run / "metrics.jsonl").write_text("a longer text")
    save(run, 2000)
    save(run, 3000)  # removes the first checkpoint
    claimed.push(run, copied)
    assert names(place) == {*LEARNED, SECOND, THIRD, "owner"}
    assert (place / "metrics.jsonl").read_text() == "a longer text"


def test_a_pull_ignores_an_interrupted_upload(
    claimed: Storage, run: Path, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def half(source: str, target: str) -> None:
        content = Path(source).read_bytes()
        Path(target).write_bytes(content[: len(content) // 2])
        raise ConnectionResetError("the network was lost")

    copied: dict[str, str] = {}
    claimed.push(run, copied)
    save(run, 2000)
    with monkeypatch.context() as context:
        context.setattr(claimed._system, "put_file", half)
        with pytest.raises(NodeError, match=r"cluster.storage is 'file://.*': the network was lost"):
            claimed.push(run, copied)
    claimed.pull(tmp_path / "other")
    assert names(tmp_path / "other") == {*LEARNED, FIRST}
    claimed.push(run, copied)
    assert names(place) == {*LEARNED, FIRST, SECOND, "owner"}


def test_a_learner_survives_a_damaged_checkpoint_in_the_storage(
    claimed: Storage, run: Path, place: Path, tmp_path: Path
) -> None:
    """Some file systems can lose the end of a file. The learner then uses the previous checkpoint."""
    save(run, 2000)
    claimed.push(run, {})
    (place / SECOND).write_bytes((place / SECOND).read_bytes()[:-100])
    claimed.pull(tmp_path / "other")
    found = checkpoint.load_newest(tmp_path / "other" / "checkpoint")
    assert found
    assert found[0].name == Path(FIRST).name


def test_a_pull_makes_a_folder_equal_to_the_storage(claimed: Storage, run: Path, tmp_path: Path) -> None:
    claimed.push(run, {})
    other = tmp_path / "other"
    save(other, 3000)
    claimed.pull(other, checkpoints=False)
    assert names(other) == {*LEARNED, THIRD}
    claimed.pull(other)
    assert names(other) == {*LEARNED, FIRST}
    assert all((other / name).read_bytes() == (run / name).read_bytes() for name in names(other))


def test_a_storage_needs_no_folders_and_no_rename(run: Path, tmp_path: Path) -> None:
    """Like object storage, fsspec's memory file system needs no folders, and moves a file by a copy and a removal."""
    made = Storage(f"memory://{tmp_path}")
    made.claim(RunFolder(run), newer=False)
    copied: dict[str, str] = {}
    for steps in (1000, 2000, 3000):
        save(run, steps)
        made.push(run, copied)
    made.pull(tmp_path / "other")
    assert names(tmp_path / "other") == {*LEARNED, SECOND, THIRD}
    assert (tmp_path / "other" / THIRD).read_bytes() == (run / THIRD).read_bytes()


def test_a_file_name_that_points_outside_the_folder_is_ignored(
    claimed: Storage, run: Path, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    claimed.push(run, {})
    bad = {f"{place}/tensorboard/../../escaped": {"size": 1}}
    monkeypatch.setattr(claimed._system, "find", lambda *_, **__: bad)
    claimed.pull(tmp_path / "a" / "b")
    assert not list(tmp_path.rglob("escaped"))


def test_only_the_newest_owner_writes(claimed: Storage, run: Path, place: Path, tmp_path: Path) -> None:
    Storage(claimed.url).claim(RunFolder(run), newer=True)
    with pytest.raises(NotOwnerError, match="does not belong to this training"):
        claimed.push(run, {})
    with pytest.raises(NotOwnerError):
        retried(lambda: claimed.pull(tmp_path / "other"))  # raises at the first attempt
    assert names(place) == {"owner"}


def test_a_learner_that_loses_the_storage_during_an_upload_changes_nothing_there(
    claimed: Storage, run: Path, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another learner becomes the owner during the upload, and copies a later checkpoint."""
    other = Storage(claimed.url)
    copied: dict[str, str] = {}
    claimed.push(run, copied)
    save(tmp_path / "other", 3000)
    upload = claimed._system.put_file

    save(run, 2000)
    with monkeypatch.context() as context:

        def slow(source: str, target: str) -> None:
            context.undo()  # ``other`` uses the same file system object; an upload by ``other`` must not call slow()
            upload(source, target)
            other.claim(RunFolder(run), newer=True)
            other.push(tmp_path / "other", {})

        context.setattr(claimed._system, "put_file", slow)
        with pytest.raises(NotOwnerError):
            claimed.push(run, copied)
    assert (place / THIRD).read_bytes() == (tmp_path / "other" / THIRD).read_bytes()
    assert not (place / SECOND).exists()


def test_a_resume_works_if_an_earlier_claim_changed_run_json_but_not_the_storage(claimed: Storage, run: Path) -> None:
    claimed.push(run, {})
    facts = RunFolder(run).read_run()["storage"]
    RunFolder(run).write_run(storage={**facts, "owner": facts["owner"].partition("-")[0] + "-new", "newer": True})
    (run / FIRST).unlink()
    storage.fetch(RunFolder(run))
    assert (run / FIRST).exists()


def test_a_folder_that_holds_files_but_has_no_owner_is_refused_as_storage(run: Path, tmp_path: Path) -> None:
    """The URL names the folder of another run. A slash at the end of the URL makes no difference."""
    overrides = [f"cluster.storage=file://{run}/"]
    with pytest.raises(ConfigError, match="which holds another run; allowed: an empty folder"):
        new_run("pendulum", overrides, tmp_path / "new", cluster=True)
    assert (run / FIRST).exists()


@pytest.mark.usefixtures("claimed")
def test_the_folder_of_an_ended_learner_stays_until_the_storage_has_its_files(
    run: Path, place: Path, tmp_path: Path
) -> None:
    learner = tmp_path / "learner"
    learner.mkdir()
    (learner / "run.json").write_bytes((run / "run.json").read_bytes())
    Keeper(learner)
    save(learner, 2000)
    kept, owner = Agent.keep(str(learner)), (place / "owner").read_text()
    (place / "owner").write_text("another")
    with pytest.raises(NotOwnerError):
        Agent.copy(kept)
    assert (Path(kept) / SECOND).exists()
    (place / "owner").write_text(owner)
    Agent.copy(kept)
    assert (place / SECOND).exists()
    assert not Path(kept).exists()


def test_a_new_learner_begins_with_the_files_of_the_storage(claimed: Storage, run: Path, tmp_path: Path) -> None:
    claimed.push(run, {})
    folder = tmp_path / "learner"
    folder.mkdir()
    (folder / "run.json").write_text((run / "run.json").read_text())
    Keeper(folder)
    assert names(folder) == {*LEARNED, FIRST, "run.json", ".copied"}
    save(folder, 2000)
    Keeper(folder).copy()  # a learner that restarts in its folder keeps its own files
    claimed.pull(run)
    assert names(run / "checkpoint") == {Path(FIRST).name, Path(SECOND).name}


def test_a_storage_that_fails_for_a_while_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PERIOD", 0.01)
    lines: list[str] = []
    calls = 0

    def action() -> None:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise NodeError("cluster.storage is 's3://b': no route")

    with repeated(action, lambda: lines.append("last"), lines.append):
        poll_until(lambda: calls > 5, lambda: f"only {calls} calls")
    assert lines == [
        "cluster.storage is 's3://b': no route; the training continues, and tries to copy every 0.01 s",
        "cluster.storage works again after 3 failures",
        "last",
    ]


def test_the_last_copy_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_RETRY", 0.0)
    calls: list[int] = []

    def last() -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise OSError("no route")

    with repeated(lambda: None, last, calls.append):  # type: ignore[arg-type]
        pass
    assert calls == [0, 1, 2]


def test_a_resume_fetches_the_checkpoint_of_an_interrupted_training(place: Path, tmp_path: Path) -> None:
    """If the run folder has a newer checkpoint than the storage, a fetch keeps the newer checkpoint."""
    run, config, _ = new_run("pendulum", [], tmp_path / "run")
    run.write_run(config=config.to_yaml())
    left = Storage(f"file://{place}")
    left.claim(run, newer=True)
    save(tmp_path / "learner", 2000)
    left.push(tmp_path / "learner", {})
    assert resumed_run(run.path, None, []).run.steps_made() == 2000
    save(run.path, 3000)
    storage.fetch(run)
    assert run.steps_made() == 3000


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "nope://bucket/walker",
            "cluster.storage is 'nope://bucket/walker': Protocol not known: nope; allowed: a folder",
        ),
        ("file:///proc/walker", "cluster.storage is 'file:///proc/walker': [Errno 2] No such file or directory"),
    ],
)
def test_the_error_names_a_storage_that_cannot_be_written(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        new_run("pendulum", [f"cluster.storage={url}"], tmp_path / "run", cluster=True)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_error_names_the_missing_package_of_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # importing s3fs fails
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)  # another test may have imported s3fs
    with pytest.raises(ConfigError, match=r"cluster\.storage is 's3://bucket/walker': Install s3fs"):
        new_run("pendulum", ["cluster.storage=s3://bucket/walker"], tmp_path / "run", cluster=True)


def test_a_run_with_a_storage_cannot_have_a_replay_buffer_in_a_file(place: Path, tmp_path: Path) -> None:
    settings = [f"cluster.storage=file://{place}", "learner.replay_storage=file"]
    with pytest.raises(
        ConfigError,
        match=r"^learner\.replay_storage is 'file'; with cluster\.storage, learner\.replay_storage must be 'memory'",
    ):
        new_run("pendulum", settings, tmp_path / "run", cluster=True)


def test_a_url_belongs_to_one_run(claimed: Storage, run: Path, tmp_path: Path) -> None:
    """The run may use its URL again, but another run may not."""
    storage.check(claimed.url, RunFolder(run))
    with pytest.raises(ConfigError, match=r"which holds another run; allowed: an empty folder"):
        new_run("pendulum", [f"cluster.storage={claimed.url}"], tmp_path / "new", cluster=True)
    other = RunFolder.create(tmp_path / "other", Config())
    Storage(f"file://{tmp_path / 'elsewhere'}").claim(other, newer=False)
    with pytest.raises(ConfigError, match="holds another run"):
        storage.check(claimed.url, other)


@pytest.mark.parametrize(
    "url", ["bucket/walker", "memory://walker", "file://walker", "s3://a b", "s3://b/*", "s3://", ""]
)
def test_the_error_names_a_malformed_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.parse({"cluster": {"storage": url}})
    assert f"cluster.storage is {url!r}; allowed: null, or the URL of a folder" in str(caught.value)


@pytest.mark.parametrize("chain", ["", "zip://a::"])
@pytest.mark.parametrize("password", ["hunter2", "hunter2/3"])
def test_a_password_is_refused_and_not_shown(chain: str, password: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.parse({"cluster": {"storage": f"{chain}sftp://robot:{password}@host/walker"}})
    assert "cluster.storage contains a password" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/walker", "sftp://robot@host:22/a", "abfs://c@account.net/a", "file:///a"])
def test_a_url_without_a_password_is_allowed(url: str) -> None:
    assert configuration.parse({"cluster": {"storage": url}}).cluster.storage == url


def test_run_json_holds_only_three_facts_about_the_storage(claimed: Storage, run: Path) -> None:
    facts: dict[str, Any] = json.loads((run / "run.json").read_text())["storage"]
    assert facts == {"url": claimed.url, "owner": claimed.owner, "newer": False}
    assert set(stamps(run)) == {*LEARNED, FIRST}
