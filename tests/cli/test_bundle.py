"""Files, output and errors of the ``td3-robot bundle`` commands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.bundle import OBSERVATION_MEAN, Bundle, Exploration, sha256
from td3_robot.cli import bundle as bundle_command
from td3_robot.cli import main as cli
from td3_robot.config import loading as configuration
from td3_robot.core_types import Peer
from td3_robot.learner.checkpointing import checkpoint, state
from td3_robot.learner.factory import make_core
from td3_robot.policy.actor import Actor
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport.link import hello


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs ``td3-robot bundle`` and gives its exit code, output and errors."""

    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main(["bundle", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def file(tmp_path: Path, make_bundle: Callable[..., Bundle]) -> Path:
    make_bundle(kind="gaussian", scale=0.1).save(tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"


def test_show_describes_a_policy(run: Any, file: Path) -> None:
    code, out, _ = run("show", file)
    assert code == 0
    assert f"{file}: policy for Toy, every 20 ms" in out
    assert "3-8-4-2; 78 numbers" in out  # 3*8 + 8 + 8*4 + 4 + 4*2 + 2
    assert "gaussian, scale 0.1" in out
    assert [line.split() for line in out.splitlines() if "left" in line] == [["0", "left", "[-1,", "3]", "N"]]
    described = json.loads(run("show", file, "--json")[1])
    assert described["sha256"] == sha256(file.read_bytes())
    assert (described["hidden"], described["parameters"]) == ([8, 4], 78)


def test_show_prints_a_range_of_noise(run: Any, tmp_path: Path, make_bundle: Any) -> None:
    make_bundle(kind="gaussian", scale=(0.1, 0.4)).save(tmp_path / "policy.safetensors")
    code, out, _ = run("show", tmp_path / "policy.safetensors")
    assert code == 0
    assert "gaussian, scale 0.1 to 0.4" in out


def test_a_file_cannot_control_the_terminal(run: Any, tmp_path: Path, make_bundle: Any) -> None:
    whole = make_bundle()
    channels = (Channel("\x1b[2J", "\x07", -1, 1), *whole.spec.observations[1:])
    spec = RobotSpec("Toy", channels, whole.spec.actions, 0.02)
    Bundle(spec, whole.hidden, whole.tensors, provenance={"a\nb": "\x1b[31m"}).save(tmp_path / "p")
    code, out, _ = run("show", tmp_path / "p")
    assert code == 0
    assert "policy for Toy" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_create_removes_or_sets_the_noise_and_adds_a_note(run: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run("create", file, out, "--note", "for robot 7")[0] == 0
    old, new = Bundle.load(file), Bundle.load(out)
    assert new.exploration == Exploration()
    assert new.provenance["note"] == "for robot 7"
    assert new.provenance["version"] == old.provenance["version"]
    assert all(np.array_equal(new.tensors[name], old.tensors[name]) for name in old.tensors)
    run("create", file, out, "--noise", 0.05, "--force")
    assert Bundle.load(out).exploration == Exploration("gaussian_v2", 0.05)


def test_create_accepts_a_policy_file_that_is_named_like_a_checkpoint(run: Any, file: Path, tmp_path: Path) -> None:
    named = file.rename(tmp_path / "checkpoint-1.safetensors")
    assert run("create", named, tmp_path / "out.safetensors")[0] == 0
    assert Bundle.load(tmp_path / "out.safetensors").spec == Bundle.load(named).spec
    named.write_bytes(b"nonsense")
    assert f"policy '{named}': not a safetensors file" in run("create", named, tmp_path / "other")[2]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("average", [0.0, 0.01])
def test_create_makes_a_policy_from_a_run(
    run: Any, tmp_path: Path, make_bundle: Any, average: float, normalised: bool, rng: np.random.Generator
) -> None:
    """Create a policy from a run folder, and from a checkpoint after four updates."""
    last, best = make_bundle(0), make_bundle(1)
    settings = {"policy_average": average, "normalise_observations": normalised, "threads": 1, "precision": "fp32"}
    config = configuration.parse(
        {"network": {"hidden": [8, 4]}, "learner": settings, "safety": {"limits": {"left": [-0.5, 0.5]}}}
    )
    folder = RunFolder.create(tmp_path / "run", config)
    last.save(folder.policy_file)
    best.save(folder.best_file)
    core = make_core(config)
    simulator = Peer("learner", b"1", hello("simulator", "sim-0", client=1, robots=1, spec=last.spec), {})
    core.step([(simulator, simulator.hello)], 0.0)
    content = rng.normal(size=(50, 10)).astype(np.float32)
    if core.training.normaliser:
        core.training.normaliser.add(content[:, :3] * 5 + 1)
    core.training.experience.replay.add(
        content[:, :3], content[:, 3:5], content[:, 5], content[:, 6:9], np.ones(50, np.float32)
    )
    for _ in range(4):
        core.training.update(1e-2)
    core.learning.env_steps, core.publisher.version = 12, 3
    saved = checkpoint.save(folder.checkpoints, 12, *state.save(core, 0.0), keep=1)
    out = tmp_path / "out.safetensors"
    learned = core.publisher.bundle(averaged=True)
    assert (OBSERVATION_MEAN in learned.tensors) == normalised
    for (source, *options), bundle in {
        (folder.path, "--final"): last,
        (folder.path, "--best"): best,
        (folder.path,): best,
        (saved,): learned,
    }.items():
        code, printed, _ = run("create", source, out, "--force", *options)
        assert code == 0
        assert f"source: {source}" in printed
        made = Bundle.load(out)
        assert made.tensors.keys() == bundle.tensors.keys()
        assert all(np.array_equal(made.tensors[name], bundle.tensors[name]) for name in bundle.tensors)
    assert (made.provenance["env_steps"], made.provenance["version"]) == (12, 3)
    assert (made.provenance["updates"], made.safety) == (4, learned.safety)
    assert made.safety.limits == {"left": (-0.5, 0.5)}
    assert (average == 0) == np.array_equal(
        learned.tensors["actor.0.weight"], core.publisher.bundle().tensors["actor.0.weight"]
    )
    code, _, error = run("verify", saved)
    assert code == 1
    assert "this is a learner's checkpoint; make a policy from it: td3-robot bundle create" in error


def test_verify_accepts_a_valid_policy(run: Any, file: Path) -> None:
    code, out, error = run("verify", file, "--like", file)
    assert (code, error) == (0, "")
    assert out == f"{file}: good; Toy, 3-8-4-2, sha256 {sha256(file.read_bytes())}\n"
    report = json.loads(run("verify", file, "--json")[1])
    assert (report["good"], report["robot_checked"]) == (True, False)
    assert 0 <= report["actions_at_a_limit"] <= 1


def _overflowing(bundle: Bundle) -> bytes:
    """Return the bytes of a bundle whose numbers are finite. A product of these numbers overflows."""
    tensors = {name: np.full_like(tensor, 3e38) for name, tensor in bundle.tensors.items()}
    tensors["actor.2.weight"] = np.stack([np.full(4, 3e38), np.array([3e38, -3e38, 3e38, -3e38])]).astype("f4")
    return Bundle(bundle.spec, bundle.hidden, tensors).encode()


DAMAGE: dict[str, Callable[[Bundle], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda bundle: bundle.encode()[:-1],
    "part of the header": lambda bundle: bundle.encode()[:100],
    "trailing bytes": lambda bundle: bundle.encode() + b"x",
    "pickle": lambda _: b"cos\nsystem\n(S'true'\ntR.",
    "header announces a terabyte": lambda bundle: (1 << 40).to_bytes(8, "little") + bundle.encode()[8:],
    "not a number": lambda bundle: Bundle(
        bundle.spec, bundle.hidden, {name: tensor * np.float32("nan") for name, tensor in bundle.tensors.items()}
    ).encode(),
    "overflowing": _overflowing,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_verify_refuses_a_damaged_policy(
    run: Any, tmp_path: Path, make_bundle: Callable[..., Bundle], what: str
) -> None:
    path = tmp_path / "policy.safetensors"
    path.write_bytes(DAMAGE[what](make_bundle()))
    code, out, error = run("verify", path)
    assert (code, out) == (1, "")
    assert error.startswith(f"td3-robot bundle verify: policy '{path}'")
    assert error.count("\n") == 1
    assert json.loads(run("verify", path, "--json")[1])["good"] is False


@pytest.mark.parametrize(
    ("low", "high", "between"),
    [
        (-2.0, 3.0, (-2, 3)),
        (5000.0, 6000.0, (5000, 6000)),
        (5000.0, math.inf, (5000, 7000)),
        (-math.inf, -5000.0, (-7000, -5000)),
        (-math.inf, math.inf, (-1000, 1000)),
    ],
)
def test_verify_uses_observations_within_their_ranges(
    run: Any, tmp_path: Path, make_bundle: Any, monkeypatch: pytest.MonkeyPatch, low: float, high: float, between: Any
) -> None:
    whole, seen = make_bundle(), list[Any]()
    channels = (Channel("far", "m", low, high), *whole.spec.observations[1:])
    Bundle(RobotSpec("Toy", channels, whole.spec.actions, 0.02), whole.hidden, whole.tensors).save(tmp_path / "p")

    class Watched(Actor):
        def __call__(self, observations: Any) -> Any:
            seen.append(observations[:, 0].copy())
            return super().__call__(observations)

    monkeypatch.setattr(bundle_command, "Actor", Watched)
    assert run("verify", tmp_path / "p")[0] == 0
    assert between[0] <= seen[0].min() < seen[0].max() <= between[1]
    assert np.ptp(seen[0]) > 0.9 * (between[1] - between[0])


def test_verify_refuses_a_policy_for_another_robot(run: Any, file: Path, tmp_path: Path, make_bundle: Any) -> None:
    whole = make_bundle()
    other = RobotSpec("Toy", whole.spec.observations, (whole.spec.actions[0], Channel("right", "N", -0.5, 0.6)), 0.02)
    Bundle(other, whole.hidden, whole.tensors).save(tmp_path / "other")
    code, _, error = run("verify", file, "--like", tmp_path / "other")
    assert (code, error) == (
        1,
        f"td3-robot bundle verify: policy '{file}' is for another robot: actions[1].high is 0.6 here, 0.5 there\n",
    )
    assert run("verify", file, "--task", "Ant")[0] == 1


def test_text_that_a_task_prints_is_not_part_of_the_result(
    run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talking_task.py").write_text("print('engine 7')")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, error = run("verify", file, "--json", "--task", "gymnasium:talking_task:Pendulum-v1")
    assert (code, json.loads(out)["good"]) == (1, False)
    assert error.startswith("engine 7\n")


def test_error_names_the_mistake(run: Any, file: Path, tmp_path: Path) -> None:
    assert run("show", tmp_path / "missing")[0] == 2
    assert "no robot given" in run("import", file, tmp_path / "out")[2]
    for command in ("show", "verify"):
        assert "cannot be read: not a regular file" in run(command, "/dev/zero")[2]
    assert "not a zip file" in run("import", file, tmp_path / "out", "--like", file)[2]
    assert "--best needs a run folder" in run("create", file, tmp_path / "out", "--best")[2]
    assert "--noise is -1; allowed: 0 or more" in run("create", file, tmp_path / "out", "--noise", "-1")[2]
    assert not (tmp_path / "out").exists()


def test_export_writes_an_onnx_file(run: Any, file: Path, tmp_path: Path) -> None:
    assert run("export", file, tmp_path / "policy.onnx", "--onnx")[0] == 0
    assert (tmp_path / "policy.onnx").stat().st_size > 4 * 78  # 78 parameters in float32


@pytest.mark.parametrize("words", [("create", "FILE", "OUT"), ("export", "FILE", "OUT", "--onnx")])
def test_a_file_is_replaced_only_with_force(words: tuple[str, ...], run: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    arguments = [{"FILE": file, "OUT": out}.get(word, word) for word in words]
    code, _, error = run(*arguments)
    assert (code, out.read_text()) == (2, "precious")
    assert error == f"td3-robot bundle: '{out}' exists already; give --force to replace it, or name another file\n"
    assert run(*arguments, "--force")[0] == 0
    assert len(out.read_bytes()) > 100


def test_commands_accept_the_name_of_a_shipped_policy_or_a_run_folder(run: Any, file: Path, tmp_path: Path) -> None:
    assert "policy for Walker2D" in run("show", "walker2d")[1]
    assert run("verify", "ant", "--task", "Ant")[0] == 0
    folder = RunFolder.create(tmp_path / "run", configuration.parse({}))
    folder.policy_file.write_bytes(file.read_bytes())
    assert "policy for Toy" in run("show", tmp_path / "run")[1]
    named = folder.path.rename(tmp_path / "checkpoint-run")
    assert run("create", named, tmp_path / "toy.safetensors")[0] == 0
    assert run("create", "ant", tmp_path / "ant.safetensors")[0] == 0
