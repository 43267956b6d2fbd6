"""Policies of Stable-Baselines3: the same actions, and nothing in the file is run."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3 import DDPG, SAC, TD3

from td3_robot.convert import sb3
from td3_robot.convert.torch_zip import read_state_dict
from td3_robot.errors import BundleError
from td3_robot.policy.actor import Actor
from td3_robot.specs import Channel, RobotSpec


class Toy(gymnasium.Env[Any, Any]):
    """The toy robot's spaces; its limits are neither symmetric nor alike."""

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
    """Writes a saved model again with members changed: new content, or None to leave one out."""

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
def test_same_actions(tmp_path: Path, spec: RobotSpec, rng: np.random.Generator, algorithm: Any) -> None:
    model = saved(tmp_path, algorithm)
    bundle = sb3.read(model, spec)
    assert bundle.hidden == (16, 8)
    assert bundle.provenance["imported_from"] == "stable-baselines3"
    assert bundle.exploration.kind == "none"
    observations = rng.uniform(-5, 5, (50, 3)).astype(np.float32)
    theirs, _ = algorithm.load(model).predict(observations, deterministic=True)
    ours = np.concatenate([Actor(bundle)(row[None]) for row in observations])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_file_of_a_trained_model_says_how_long(tmp_path: Path) -> None:
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
        ({"activation_fn": torch.nn.Tanh}, "its activation is .*Tanh.*; a bundle has ReLU between its layers"),
        ({"net_arch": {"pi": [4], "qf": [4]}}, None),
    ],
)
def test_networks(tmp_path: Path, spec: RobotSpec, settings: dict[str, Any], message: str | None) -> None:
    model = saved(tmp_path, **settings)
    if message is None:
        assert sb3.read(model, spec).hidden == (4,)
    else:
        with pytest.raises(BundleError, match=message):
            sb3.read(model, spec)


def test_other_algorithm(tmp_path: Path, spec: RobotSpec) -> None:
    with pytest.raises(BundleError, match=r"its policy is of stable_baselines3.sac.policies; needed is one of TD3"):
        sb3.read(saved(tmp_path, SAC), spec)


def test_other_robot(tmp_path: Path, spec: RobotSpec) -> None:
    model = saved(tmp_path)
    wider = RobotSpec("Wider", (*spec.observations, Channel("o3", "m", -5, 5)), spec.actions, 0.02)
    with pytest.raises(BundleError, match=r"actor.0.weight is float32\[16, 3\], needed is float32\[16, 4\]"):
        sb3.read(model, wider)
    stronger = RobotSpec("Stronger", spec.observations, (spec.actions[0], Channel("right", "N", -0.5, 9)), 0.02)
    with pytest.raises(BundleError, match=r"its actions' high is \[3.0, 0.5\], that of Stronger is \[3.0, 9.0\]"):
        sb3.read(model, stronger)


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("bomb-went-off"), "boom"))


def test_nothing_is_run(
    tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bomb in every place where loading with the library would set it off."""
    monkeypatch.chdir(tmp_path)
    model = saved(tmp_path)
    stream = io.BytesIO()
    torch.save({"actor.mu.0.weight": Bomb()}, stream)
    with pytest.raises(BundleError, match="only float32 tensors are read"):
        sb3.read(rewrite(model, policy=stream.getvalue()), spec)
    data = json.loads(zipfile.ZipFile(model).read("data"))
    import base64

    data["action_space"][":serialized:"] = base64.b64encode(pickle.dumps(Bomb())).decode()
    assert sb3.read(rewrite(model, data=json.dumps(data).encode()), spec).hidden == (16, 8)
    assert not Path("bomb-went-off").exists()


@pytest.mark.parametrize("member", ["data", "policy"])
def test_member_missing(tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], member: str) -> None:
    with pytest.raises(BundleError, match=f"it has no member '{member}"):
        sb3.read(rewrite(saved(tmp_path), **{member: None}), spec)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"policy_class": {}}', b"[" * 100_000])
def test_damaged_data(tmp_path: Path, spec: RobotSpec, rewrite: Callable[..., Path], content: bytes) -> None:
    with pytest.raises(BundleError, match="its data are not those of a model"):
        sb3.read(rewrite(saved(tmp_path), data=content), spec)


def test_damaged_files(tmp_path: Path, spec: RobotSpec, rng: np.random.Generator) -> None:
    """Cut off anywhere, or with one byte changed: an error, or a policy that is whole all the same."""
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


# -- the reader of torch.save's files --------------------------------------------------------------------------------


def torch_file(program: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
    return stream.getvalue()


def saved_by_torch(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def test_tensors_as_torch_saves_them() -> None:
    shared = torch.arange(12.0)
    state = {"a": torch.randn(3, 4), "part": shared[4:8], "scalar": torch.tensor(2.0), "one": shared.view(1, 12)}
    read = read_state_dict(saved_by_torch(state), "file")
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        np.testing.assert_array_equal(read[name], tensor.numpy())
    assert read_state_dict(saved_by_torch(state), "file", "par").keys() == {"part"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": torch.randn(2, 3).T}, "strides .* do not fit"),
        ({"a": torch.zeros(2, dtype=torch.float64)}, "only float32 tensors are read"),
        ({"a": 3}, "'a' is not a tensor"),
        ({3: torch.zeros(2)}, "under a key of type int"),
        ([torch.zeros(2)], "its pickle uses EMPTY_LIST"),
        (torch.zeros(2), "it holds no dictionary"),
        (torch.nn.Linear(2, 2), "only float32 tensors are read"),
    ],
)
def test_what_is_not_a_state_dict(content: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read_state_dict(saved_by_torch(content), "file")


# Nested tuples that share their parts: 2 to the power of 60 of them for whoever would hash, compare or print them.
_LAUGHS = b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 60


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02h\x05.",
        b"\x80\x02t.",
        b"\x80\x02\x87.",
        b"\x80\x02}}N.",
        b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
        b"\x80\x02ccollections\nOrderedDict\n(K\x01tR.",
        b"\x80\x02}X\x01\x00\x00\x00aNb.",
        b"(dS'a'\nI1\ns.",
        _LAUGHS + b".",
        b"\x80\x02}" + _LAUGHS[2:] + b"K\x01s.",
        b"\x80\x02}X\x01\x00\x00\x00a" + _LAUGHS[2:] + b"s.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + _LAUGHS[2:] + b"R.",
        b"\x80\x02" + _LAUGHS[2:] + b"Q.",
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    ],
)
def test_hostile_programs(program: bytes) -> None:
    with pytest.raises(BundleError):
        read_state_dict(torch_file(program), "file")


@given(st.binary(max_size=200))
def test_random_programs(program: bytes) -> None:
    try:
        assert read_state_dict(torch_file(b"\x80\x02" + program + b"."), "file") == {}
    except BundleError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either is right; what matters is that nothing else comes


def test_storage_that_lies_about_its_size() -> None:
    content = saved_by_torch({"a": torch.zeros(4)})
    program = next(
        zipfile.ZipFile(io.BytesIO(content)).read(name)
        for name in zipfile.ZipFile(io.BytesIO(content)).namelist()
        if name.endswith("data.pkl")
    )
    with pytest.raises(BundleError, match="do not fit"):
        read_state_dict(torch_file(program, {"0": bytes(15)}), "file")
    with pytest.raises(BundleError, match="it has no member 'archive/data/0'"):
        read_state_dict(torch_file(program), "file")


def test_zip_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member is never unpacked beyond the limit, whatever its head says."""
    monkeypatch.setattr("td3_robot.convert.torch_zip._MAX_PROGRAM", 1000)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    with pytest.raises(BundleError, match="has more than 1000 bytes"):
        read_state_dict(stream.getvalue(), "file")
