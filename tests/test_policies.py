"""A policy is found by a shipped name, a run folder or a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from td3_robot.bundle import Bundle
from td3_robot.errors import BundleError
from td3_robot.policies import find_policy, shipped_policies

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run without a policy."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    return folder


def test_every_shipped_policy_has_a_name_and_loads() -> None:
    assert shipped_policies() == {name: ROOT / "policies" / f"{name}.safetensors" for name in ("ant", "walker2d")}
    for name in shipped_policies():
        assert Bundle.load(find_policy(name)).spec.name.lower() == name


def test_a_run_folder_gives_its_best_policy_or_the_final_one(run: Path) -> None:
    (run / "policy.safetensors").touch()
    assert find_policy(run) == run / "policy.safetensors"
    (run / "best.safetensors").touch()
    assert find_policy(str(run)) == run / "best.safetensors"


def test_a_file_is_found_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert find_policy(tmp_path / "mine") == tmp_path / "mine"


def test_a_shipped_name_comes_before_a_folder_of_this_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "policy.safetensors").touch()
    run.rename(run.with_name("walker2d"))
    monkeypatch.chdir(run.parent)
    assert find_policy("walker2d") == ROOT / "policies" / "walker2d.safetensors"
    assert find_policy("./walker2d/") == Path("walker2d/policy.safetensors")


def test_errors_are_one_line_and_suggest_a_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(name: str) -> str:
        with pytest.raises(BundleError) as caught:
            find_policy(name)
        return str(caught.value)

    monkeypatch.chdir(run.parent)
    allowed = "allowed: a run folder, a .safetensors file, or a shipped policy (ant, walker2d)"
    assert error("walker") == "there is no policy 'walker'; did you mean 'walker2d'?"
    assert error("runn") == "there is no policy 'runn'; did you mean 'run'?"
    assert error("no/such/folder") == f"there is no policy 'no/such/folder'; {allowed}"
    assert error("x" * 5000) == f"there is no policy {'x' * 5000!r}; {allowed}"
    assert error("run") == (
        "folder 'run' holds neither best.safetensors nor policy.safetensors: this run has not saved a policy yet"
    )
    os.mkdir("empty")
    assert error("empty").endswith("it is not a run folder")
