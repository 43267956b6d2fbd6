"""``find_policy`` finds a policy from a shipped name, a run folder or a path. A ``Policy`` computes actions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.bundle import Bundle
from td3_robot.errors import BundleError
from td3_robot.policies import Policy, find_policy, load_policy, shipped_policies
from td3_robot.policy.actor import Actor

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has not saved a policy."""
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


def test_a_policy_file_can_have_any_name(tmp_path: Path) -> None:
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


@pytest.fixture
def policy(make_bundle: Callable[..., Bundle]) -> Policy:
    """A random policy of the toy robot: 3 observations, 2 actions."""
    return Policy(make_bundle(hidden=(8,), tame=True))


def test_a_policy_acts_like_the_actor_of_the_policy_server(policy: Policy, rng: np.random.Generator) -> None:
    observations = rng.normal(size=(5, 3)).astype(np.float32)
    actions = policy.predict(observations)
    assert (actions.shape, actions.dtype) == ((5, 2), np.float32)
    assert actions.tobytes() == Actor(policy.bundle)(observations).tobytes()
    assert (actions >= policy.spec.action_low).all()
    assert (actions <= policy.spec.action_high).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i8"])
def test_a_policy_takes_observations_of_any_real_dtype(policy: Policy, dtype: str) -> None:
    observation = np.array([1, -2, 3], dtype)
    action = policy.predict(observation)
    assert (action.shape, action.dtype) == ((2,), np.float32)
    assert action.tolist() == policy.predict([1.0, -2.0, 3.0]).tolist() == policy.predict([[1, -2, 3]])[0].tolist()
    fortran = np.asfortranarray(np.tile(observation, (4, 1)))
    np.testing.assert_allclose(policy.predict(fortran), np.tile(action, (4, 1)), rtol=1e-5)
    assert policy.predict(np.zeros((0, 3))).shape == (0, 2)


def test_the_first_batch_of_a_policy_can_be_empty(policy: Policy) -> None:
    assert policy.predict(np.zeros((0, 3))).shape == (0, 2)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ([1.0, 2.0], "observation has shape [2]; robot 'Toy' needs [3] or [N, 3]"),
        (1.0, "observation has shape []; robot 'Toy' needs [3] or [N, 3]"),
        (np.zeros((2, 2, 3)), "observation has shape [2, 2, 3]; robot 'Toy' needs [3] or [N, 3]"),
        ([0, np.nan, 0], "observation o1 is nan; it must be finite in float32"),
        ([[0, 0, 0], [0, 0, 1e39]], "observation o2 of robot 1 is 1e+39; it must be finite in float32"),
        (["a", "b", "c"], "observation has dtype <U1; allowed: real numbers"),
        ([1j, 0, 0], "observation has dtype complex128; allowed: real numbers"),
    ],
)
def test_a_wrong_observation_gives_a_clear_error(policy: Policy, observation: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        policy.predict(observation)


def test_a_tensor_that_needs_a_gradient_gives_a_clear_error(policy: Policy) -> None:
    torch = pytest.importorskip("torch")
    observation = torch.zeros(policy.spec.observation_size)
    assert policy.predict(observation).shape == (policy.spec.action_size,)
    with pytest.raises(ValueError, match=r"^observation is no array: Can't call numpy\(\) on Tensor that requires "):
        policy.predict(observation.requires_grad_())


def test_load_policy_reads_a_shipped_policy_and_a_run_folder(run: Path, policy: Policy) -> None:
    assert repr(load_policy("walker2d")) == "<Policy for Walker2D: 22 observations, 6 actions>"
    policy.bundle.save(run / "policy.safetensors")
    assert load_policy(run).spec == policy.spec
    assert load_policy(run).provenance["version"] == 1
