"""Imported policies act as in Stable-Baselines3, and the import runs no code from their files."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import DDPG, SAC, TD3

from td3_robot.convert import sb3
from td3_robot.errors import BundleError
from td3_robot.policy.actor import Actor
from td3_robot.specs import Channel, RobotSpec


class Toy(gymnasium.Env[Any, Any]):
    """The toy robot's spaces. Its two actions have different limits. The limits of the first action are asymmetric."""

    observation_space = gymnasium.spaces.Box(-5, 5, (3,), np.float32)
    action_space = gymnasium.spaces.Box(np.array([-1.0, -0.5], "f4"), np.array([3.0, 0.5], "f4"))

    def reset(self, **_: Any) -> Any:
        return np.zeros(3, np.float32), {}


def saved(folder: Path, algorithm: Any = TD3, **settings: Any) -> Path:
    model = algorithm("MlpPolicy", Toy(), policy_kwargs={"net_arch": [16, 8], **settings}, seed=3)
    model.save(folder / "model.zip")
    return folder / "model.zip"


@pytest.fixture
def rewrite(tmp_path: Path) -> Callable[..., Path]:
    """Copies a saved model (a zip) with changed members.

    Each keyword is a member's name without its extension. Its value is the new content, or None to omit the member.
    """

    def change(model: Path, **members: bytes | None) -> Path:
        out = tmp_path / "changed.zip"
        with zipfile.ZipFile(model) as old, zipfile.ZipFile(out, "w") as new:
            for name in old.namelist():
                content = members.get(name.split(".")[0], old.read(name))
                if content is not None:
                    new.writestr(name, content)
        return out

    return change


@pytest.mark.parametrize("algorithm", [TD3, DDPG])
def test_imported_policies_give_the_same_actions(
    tmp_path: Path, spec: RobotSpec, rng: np.random.Generator, algorithm: Any
) -> None:
    model = saved(tmp_path, algorithm)
    bundle = sb3.read(model, spec)
    assert bundle.hidden == (16, 8)
    assert bundle.provenance["imported_from"] == "stable-baselines3"
    assert bundle.exploration.kind == "none"
    observations = rng.uniform(-5, 5, (50, 3)).astype(np.float32)
    theirs, _ = algorithm.load(model).predict(observations, deterministic=True)
    ours = np.concatenate([Actor(bundle)(row[None]) for row in observations])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_provenance_holds_the_training_steps_of_the_model(tmp_path: Path) -> None:
    environment = gymnasium.make("Pendulum-v1")
    model = TD3("MlpPolicy", environment, policy_kwargs={"net_arch": [8]}, learning_starts=10, batch_size=4)
    model.learn(30)
    model.save(tmp_path / "model.zip")
    channels = tuple(Channel(name, "1", -8, 8) for name in ("x", "y", "speed"))
    bundle = sb3.read(tmp_path / "model.zip", RobotSpec("Pendulum", channels, (Channel("torque", "N", -2, 2),), 0.05))
    assert (bundle.provenance["env_steps"], bundle.provenance["updates"]) == (model.num_timesteps, model._n_updates)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_fn": torch.nn.Tanh}, "its activation is .*Tanh.*; allowed: ReLU"),
        ({"net_arch": {"pi": [4], "qf": [4]}}, None),
    ],
)
def test_only_relu_networks_are_accepted(
    tmp_path: Path, spec: RobotSpec, settings: dict[str, Any], message: str | None
) -> None:
    model = saved(tmp_path, **settings)
    if message is None:
        assert sb3.read(model, spec).hidden == (4,)
    else:
        with pytest.raises(BundleError, match=message):
            sb3.read(model, spec)


def test_another_algorithm_is_refused(tmp_path: Path, spec: RobotSpec) -> None:
    with pytest.raises(BundleError, match=r"its policy is from stable_baselines3.sac.policies; allowed: TD3 and DDPG"):
        sb3.read(saved(tmp_path, SAC), spec)


def test_another_robot_is_refused(tmp_path: Path, spec: RobotSpec) -> None:
    model = saved(tmp_path)
    wider = RobotSpec("Wider", (*spec.observations, Channel("o3", "m", -5, 5)), spec.actions, 0.02)
    with pytest.raises(BundleError, match=r"actor.0.weight is float32\[16, 3\], needed is float32\[16, 4\]"):
        sb3.read(model, wider)
    stronger = RobotSpec("Stronger", spec.observations, (spec.actions[0], Channel("right", "N", -0.5, 9)), 0.02)
    with pytest.raises(
        BundleError, match=r"the upper limits of its actions are \[3.0, 0.5\], Stronger has \[3.0, 9.0\]"
    ):
        sb3.read(model, stronger)


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("bomb-went-off"), "boom"))


def test_no_code_in_the_file_runs(
    tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stable-Baselines3 would run the code in ``data`` when it loads the file."""
    monkeypatch.chdir(tmp_path)
    model = saved(tmp_path)
    with pytest.raises(BundleError, match="not a plain dictionary of tensors"):
        sb3.read(rewrite(model, policy=saved_by_torch({"actor.mu.0.weight": Bomb()})), spec)
    data = json.loads(zipfile.ZipFile(model).read("data"))
    data["action_space"][":serialized:"] = base64.b64encode(pickle.dumps(Bomb())).decode()
    assert sb3.read(rewrite(model, data=json.dumps(data).encode()), spec).hidden == (16, 8)
    assert not Path("bomb-went-off").exists()


@pytest.mark.parametrize("member", ["data", "policy"])
def test_the_error_names_the_missing_member(
    tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], member: str
) -> None:
    with pytest.raises(BundleError, match=f"it has no member '{member}"):
        sb3.read(rewrite(saved(tmp_path), **{member: None}), spec)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"policy_class": {}}', b"[" * 100_000])
def test_a_damaged_data_member_is_refused(
    tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], content: bytes
) -> None:
    with pytest.raises(BundleError, match="its data does not describe a model"):
        sb3.read(rewrite(saved(tmp_path), data=content), spec)


@pytest.mark.slow
def test_a_damaged_file_is_refused_or_read_completely(
    tmp_path: Path, spec: RobotSpec, rng: np.random.Generator
) -> None:
    """A missing or truncated file is an error. A file with one flipped bit is an error or gives a complete policy."""
    whole = saved(tmp_path).read_bytes()
    damaged = tmp_path / "damaged.zip"
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:cut])
        with pytest.raises(BundleError):
            sb3.read(damaged, spec)
    for _ in range(60):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(content)
        try:
            bundle = sb3.read(damaged, spec)
        except BundleError:
            continue
        assert bundle.hidden == (16, 8)
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        sb3.read(tmp_path / "missing.zip", spec)


@pytest.mark.slow
def test_damaged_tensors_are_refused_or_read_completely(
    tmp_path: Path, spec: RobotSpec, rng: np.random.Generator, rewrite: Callable[..., Path]
) -> None:
    """The test flips one bit of policy.pth. The result is an error or a complete policy."""
    model = saved(tmp_path)
    whole = zipfile.ZipFile(model).read("policy.pth")
    for _ in range(60):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        try:
            assert sb3.read(rewrite(model, policy=bytes(content)), spec).hidden == (16, 8)
        except BundleError as error:
            assert "\n" not in str(error)  # noqa: PT017 - the call may also return a policy


def saved_by_torch(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def test_tensors_that_require_gradients_are_read(tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path]) -> None:
    """One flipped bit in a file can set the flag ``requires_grad`` of a tensor."""
    model = saved(tmp_path)
    state = torch.load(io.BytesIO(zipfile.ZipFile(model).read("policy.pth")), weights_only=True)
    marked = saved_by_torch({name: tensor.requires_grad_() for name, tensor in state.items()})
    assert sb3.read(rewrite(model, policy=marked), spec).hidden == (16, 8)


def test_a_layer_without_bias_is_refused(tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path]) -> None:
    model = saved(tmp_path)
    state = torch.load(io.BytesIO(zipfile.ZipFile(model).read("policy.pth")), weights_only=True)
    del state["actor.mu.0.bias"]
    with pytest.raises(BundleError, match="its actor has a layer whose weight or bias is missing"):
        sb3.read(rewrite(model, policy=saved_by_torch(state)), spec)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (saved_by_torch({"actor.mu.0.weight": torch.zeros(2, dtype=torch.float64)}), "is not a float32 tensor"),
        (saved_by_torch({"actor.mu.0.weight": 3}), "is not a float32 tensor"),
        (saved_by_torch({3: torch.zeros(2)}), "not a plain dictionary of tensors"),
        (saved_by_torch([torch.zeros(2)]), "not a plain dictionary of tensors"),
        (saved_by_torch(torch.nn.Linear(2, 2)), "not a plain dictionary of tensors"),
        (pickle.dumps({"actor.mu.0.weight": 3}), "policy.pth: not a zip file"),
        (b"", "policy.pth: not a zip file"),
    ],
)
def test_a_policy_member_that_is_not_a_state_dict_is_refused(
    tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], content: bytes, message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        sb3.read(rewrite(saved(tmp_path), policy=content), spec)


def test_a_zip_bomb_is_refused(
    tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_LONGEST`` limits the total size of a zip's members, and ``_LONGEST_MEMBER`` the size of each member."""
    model = saved(tmp_path)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    monkeypatch.setattr(sb3, "_LONGEST", 1_000_000)
    with pytest.raises(BundleError, match=r"policy.pth: its members have more than 1,000,000 bytes"):
        sb3.read(rewrite(model, policy=stream.getvalue()), spec)
    monkeypatch.setattr(sb3, "_LONGEST_MEMBER", 1000)
    with pytest.raises(BundleError, match="member 'data' has more than 1,000 bytes"):
        sb3.read(rewrite(model, data=bytes(2000)), spec)


def test_without_torch_the_error_is_one_line_with_the_command_that_installs_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    command = [sys.executable, "-m", "td3_robot.cli.main", "bundle", "import", "a.zip", "b", "--task", "Walker2D"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "td3-robot bundle: needs torch, which is not installed; pip install 'td3-robot[learner]'"
    ]
