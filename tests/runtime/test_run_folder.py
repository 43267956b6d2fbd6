"""Run folders: no run uses the folder of another run, and the files hold the endpoints and the number of steps."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.config.cluster import ClusterConfig
from td3_robot.config.schema import Config, EndpointsConfig
from td3_robot.errors import RunFolderError
from td3_robot.messages import Status
from td3_robot.runtime.run_folder import RunFolder


def test_a_created_run_folder_can_be_opened(tmp_path: Path) -> None:
    created = RunFolder.create(tmp_path / "a" / "b", Config(seed=3))
    assert RunFolder.open(created.path).config() == Config(seed=3)
    assert created.checkpoints.is_dir()
    assert created.logs.is_dir()


def test_the_reference_lists_every_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "run_folder.md").read_text(encoding="utf-8")
    listed = {name.rstrip("/") for name in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)}
    run = RunFolder(tmp_path)
    assert listed == {path.name for path in vars(run).values() if path != tmp_path} | {"session.mcap", ".lock"}


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", Config())
    with pytest.raises(RunFolderError, match=r"already holds a run; name another folder"):
        RunFolder.create(tmp_path / "run", Config())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunFolderError, match="is not empty and not a run"):
        RunFolder.create(tmp_path / "other", Config())
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be made: "):
        RunFolder(tmp_path / "file" / "run").check_new()
    with pytest.raises(RunFolderError, match="cannot be made: "):
        RunFolder.create(tmp_path / "file" / "run", Config())
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder.open(tmp_path / "other")


@pytest.mark.parametrize("steps", range(6))
def test_ctrl_c_leaves_a_new_folder_or_a_run(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``create`` makes 5 steps: a folder, the beginning and the end of the configuration, and two more folders.

    Ctrl-C comes after ``steps`` of them.
    """
    left = iter(range(steps))

    def interrupt(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", interrupt(Path.mkdir))
        patch.setattr(Path, "write_bytes", interrupt(Path.write_bytes))
        patch.setattr(os, "replace", interrupt(os.replace))
        with pytest.raises(KeyboardInterrupt) if steps < 5 else contextlib.nullcontext():
            RunFolder.create(tmp_path / "run", Config(seed=3))
    is_run = RunFolder(tmp_path / "run").config_file.exists()
    assert is_run == (steps >= 3)
    run = RunFolder.open(tmp_path / "run") if is_run else RunFolder.create(tmp_path / "run", Config(seed=3))
    assert run.config() == Config(seed=3)
    assert run.checkpoints.is_dir()
    assert run.logs.is_dir()


def test_a_kill_before_the_configuration_is_complete_leaves_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / ".config.yaml-0a1b2c3d").write_text("task: Walk")
    assert RunFolder.create(tmp_path, Config(seed=3)).config() == Config(seed=3)


def test_endpoints_come_from_the_run_file(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    with pytest.raises(RunFolderError, match=r"no policy endpoint; start its training first, or set endpoints\.policy"):
        run.endpoint("policy", Config())
    run.write_run(endpoints={"policy": "ipc:///tmp/p"}, starts=1)
    assert run.endpoint("policy", Config()) == "ipc:///tmp/p"
    run.write_run(starts=2)
    assert run.read_run() == {"endpoints": {"policy": "ipc:///tmp/p"}, "starts": 2}


def test_operators_find_each_policy_server_of_a_cluster(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    run.write_run(endpoints={"policy": "ipc:///tmp/p"})
    assert run.policy_servers(Config()) == ["ipc:///tmp/p"]
    assert run.policy_servers(Config(), "sim-0") == ["ipc:///tmp/p"]
    one, two = "tcp://10.0.0.1:5001", "tcp://10.0.0.2:5002"
    names = {"policy-0": one, "sim-0": one, "sim-1": one, "policy-1": two, "sim-2": two}
    run.write_run(endpoints={"learner": "tcp://10.0.0.3:5003", "monitor": "tcp://10.0.0.3:5004", **names})
    assert run.policy_servers(Config()) == [one, two]
    assert [run.policy_servers(Config(), target) for target in ("policy-1", "sim-1")] == [[two], [one]]
    unknown = "no policy server or simulator is named 'sim-9'; allowed: policy-0, policy-1, sim-0, sim-1, sim-2"
    with pytest.raises(RunFolderError, match=unknown):
        run.policy_servers(Config(), "sim-9")


def test_a_server_of_a_cluster_binds_the_configured_address(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    run.write_run(
        endpoints={"policy": "ipc:///tmp/p", "policy-1": "tcp://10.0.0.1:5001", "learner": "tcp://[fd00::1]:5003"}
    )
    assert run.to_bind("policy", Config(), "policy-1") == ["ipc:///tmp/p", "tcp://10.0.0.1:5001"]
    assert run.to_bind("policy", Config(), "policy-2") == ["ipc:///tmp/p"]
    for address, host in (("0.0.0.0", "0.0.0.0"), ("eth1", "eth1"), ("::", "[::]")):
        config = Config(cluster=ClusterConfig(bind=address))
        assert run.to_bind("policy", config, "policy-1") == ["ipc:///tmp/p", f"tcp://{host}:5001"]
        assert run.to_bind("learner", config) == [f"tcp://{host}:5003"]
        named = Config(cluster=config.cluster, endpoints=EndpointsConfig(learner="tcp://127.0.0.1:1"))
        assert run.to_bind("learner", named) == ["tcp://127.0.0.1:1"]


def test_damaged_run_file_reads_as_empty(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    for content in ("{", "[1]", "\x00"):
        (run.path / "run.json").write_text(content)
        assert run.read_run() == {}


def test_only_one_training_may_use_a_run_folder(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    with run.locked():
        child = os.fork()
        if child == 0:
            try:
                with run.locked():
                    os._exit(0)
            except RunFolderError as error:
                os._exit(7 if "in use by another training" in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with run.locked():
        pass


def test_final_json_gives_the_number_of_steps(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    run.write_final({"learner": Status("learner", "finished", "", {"env_steps": 3.0}, {"missed": 0})})
    assert '"env_steps": 3.0' in (run.path / "final.json").read_text()
    assert run.steps_made() == 3
    (run.path / "final.json").write_text("{}")
    assert run.steps_made() == 0


def test_after_an_unclean_end_the_newest_checkpoint_gives_the_number_of_steps(tmp_path: Path) -> None:
    """After a full disk or the death of the supervisor, final.json is missing or comes from an earlier start.

    If final.json has more steps than the newest checkpoint, ``steps_made`` returns the steps of final.json.
    """
    run = RunFolder.create(tmp_path / "run", Config())
    assert run.steps_made() == 0
    (run.checkpoints / "checkpoint-000000005000.safetensors").touch()
    (run.checkpoints / "checkpoint-000000007000.safetensors.damaged").touch()
    assert run.steps_made() == 5000
    run.write_final({"learner": Status("learner", "ready", "", {"env_steps": 5679.0}, {})})
    assert run.steps_made() == 5679
    (run.checkpoints / "checkpoint-000000006000.safetensors").touch()
    assert run.steps_made() == 6000


def test_a_run_uses_a_folder_of_keys_only_if_the_folder_exists(tmp_path: Path) -> None:
    """If SIGKILL ends a training on a cluster, another process removes the folder of keys.

    run.json still names this folder.
    """
    run = RunFolder.create(tmp_path / "run", Config())
    keys = tmp_path / "run" / "keys"
    run.write_run(keys=str(keys))
    assert run.config().endpoints.keys is None
    keys.mkdir()
    assert run.config().endpoints.keys == str(keys)
