"""A mistake gives exit code 2 in every command. The error names the command and what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from td3_robot_sims import evaluator

from td3_robot.bundle import Bundle
from td3_robot.cli.main import main
from td3_robot.runtime import process


@pytest.fixture
def fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make_bundle: Callable[..., Bundle],
) -> Callable[[str], tuple[int, str]]:
    """Return a function that runs a command in a folder with some files.

    The function returns the exit code and the error text.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_catch_signals", lambda _: None)  # pytest handles the signals
    (tmp_path / "robot.yaml").write_text("endpoints: {policy: ipc://policy.sock}")
    endpoints, safety = "endpoints: {policy: ipc://policy.sock}", "safety: {observation_deadline_ms: 20}"
    (tmp_path / "hasty.yaml").write_text(f"{endpoints}\n{safety}")
    (tmp_path / "damaged.safetensors").write_bytes(b"damaged")
    toy = make_bundle()
    toy.save(tmp_path / "toy.safetensors")
    huge = {name: tensor * np.float32(1e30) for name, tensor in toy.tensors.items()}
    replace(toy, tensors=huge).save(tmp_path / "huge.safetensors")

    def run(words: str) -> tuple[int, str]:
        code = main(words.split())
        return code, capsys.readouterr().err.removesuffix("\n")

    return run


SAME_CODE = {
    "missing file": (
        "train nofile",
        "train walker2d --from nofile --set learner.precision=fp32",
        "eval nofile",
        "policy --config nofile",
        "policy --config robot.yaml --bundle nofile",
        "node state --config nofile",
        "node load nofile --config robot.yaml",
        "bundle show nofile",
        "bundle verify nofile",
        "bundle create nofile out.safetensors",
        "bundle export nofile out.onnx --onnx",
        "record out.mcap --config nofile",
        "info nofile",
        "play nofile --policy ipc://x",
        "replay nofile",
        "export nofile --out tables",
        "recover nofile",
        "monitor --config nofile",
        "topic echo step --config nofile",
        "keys allow robot nofile",
    ),
    "missing folder": (
        "train --resume nowhere",
        "sim --run nowhere",
        "learner --run nowhere",
        "policy --run nowhere",
        "node state --run nowhere",
        "record --run nowhere",
        "monitor --run nowhere",
        "topic echo step --run nowhere",
        "bundle create toy.safetensors nowhere/out.safetensors",
        "record nowhere/out.mcap --config robot.yaml",
    ),
    "wrong flag": tuple(
        f"{command} --frobnicate"
        for command in (
            "train walker2d",
            "eval walker2d",
            "sim --run x",
            "learner --run x",
            "policy --run x",
            "node state --run x",
            "bundle show walker2d",
            "keys list",
            "record --run x",
            "info x",
            "play x",
            "replay x",
            "export x --out y",
            "recover x",
            "list keys",
            "monitor --run x",
            "topic list",
            "bench policy",
            "doctor",
        )
    ),
    "bad number": (
        "train walker2d --steps many",
        "eval walker2d --episodes many",
        "node state --run x --timeout long",
        "bundle create walker2d out.safetensors --noise loud",
        "record --run x --split-mb many",
        "play x --policy ipc://x --rate fast",
        "monitor --run x --seconds long",
        "topic echo step --run x --count many",
        "bench policy --actions many",
        "sim --run x --incarnation many",
    ),
    "unreadable policy": (
        "eval damaged.safetensors",
        "policy --config robot.yaml --bundle damaged.safetensors",
        "node load damaged.safetensors --config robot.yaml",
        "bundle show damaged.safetensors",
        "bundle create damaged.safetensors out.safetensors",
        "bundle export damaged.safetensors out.onnx --onnx",
        "train walker2d --set learner.start_from=damaged.safetensors --set learner.critics_first=9",
    ),
    "a file in the way": (
        "bundle create walker2d toy.safetensors",
        "bundle export walker2d toy.safetensors --onnx",
        "bundle import x.zip toy.safetensors --task Ant",
        "record toy.safetensors --config robot.yaml",
        "recover toy.safetensors --out toy.safetensors",
    ),
}


@pytest.mark.parametrize(
    ("mistake", "words"), [(mistake, words) for mistake in SAME_CODE for words in SAME_CODE[mistake]]
)
def test_a_mistake_gives_exit_code_2_and_one_line(
    mistake: str, words: str, fail: Callable[[str], tuple[int, str]]
) -> None:
    code, error = fail(words)
    assert (code, error.count("\n")) == (2, 0), (mistake, error)


@pytest.mark.parametrize(
    "words",
    [
        "bundle show pipe",
        "bundle create pipe out.safetensors",
        "eval pipe",
        "policy --config robot.yaml --bundle pipe",
        "node load pipe --config robot.yaml",
        "info pipe",
        "play pipe --policy ipc://x",
        "replay pipe",
        "export pipe --out tables",
        "recover pipe",
        "monitor --config robot.yaml --foxglove 0 --links pipe",
    ],
)
def test_a_pipe_is_refused_because_to_open_it_could_take_forever(
    words: str, fail: Callable[[str], tuple[int, str]], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    code, error = fail(words)
    assert (code, error.count("\n")) == (2, 0), error
    assert "not a regular file" in error


@pytest.mark.parametrize(
    "words",
    [
        "policy --config busy.yaml --bundle toy.safetensors",
        "monitor --config busy.yaml",
        "monitor --endpoint {endpoint}",
        "record out.mcap --config busy.yaml",
        "topic echo step --config busy.yaml",
    ],
)
def test_a_busy_address_gives_exit_code_2_and_the_last_line_names_the_address(
    words: str, fail: Callable[[str], tuple[int, str]], tmp_path: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        links = ", ".join(f"{link}: '{endpoint}'" for link in ("policy", "recorder", "monitor"))
        (tmp_path / "busy.yaml").write_text(f"endpoints: {{{links}}}")
        code, error = fail(words.format(endpoint=endpoint))
    assert code == 2, error
    last = error.splitlines()[-1]  # a policy server first logs which policy it serves
    assert endpoint in last
    assert "already in use" in last


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_gives_exit_code_2(fail: Callable[[str], tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    for words in ("bundle create walker2d locked/out.safetensors", "eval walker2d --video locked/a.mp4"):
        assert fail(words)[0] == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("train walker2d --steps -5", "td3-robot train: --steps is -5; allowed: whole numbers from 1"),
        ("train walker2d --steps 1.5", "td3-robot train: --steps is 1.5; allowed: whole numbers from 1"),
        ("train walker2d --steps ten", "td3-robot train: --steps is 'ten'; allowed: whole numbers from 1"),
        ("train walker2d --seed 1e10", "td3-robot train: --seed is 1e10; allowed: whole numbers from 0 to 4294967295"),
        (
            "policy --config robot.yaml --bundle huge.safetensors",
            "td3-robot policy: --bundle: policy 'huge.safetensors' gives actions that are not finite, although each "
            "observation is in its range: a sum in its network overflows",
        ),
        (
            "policy --config hasty.yaml --bundle toy.safetensors",
            "td3-robot policy: safety.observation_deadline_ms is 20; allowed: more than 20, which is the control "
            "period of Toy in ms",
        ),
        (
            "train walker2d --steps 1e3",
            "td3-robot train: --steps: learner.learning_starts is 10000 and total_steps is 1000: the learner would "
            "make no update; allowed: total_steps above 10000, or a lower learner.learning_starts",
        ),
        (
            "train walker2d --offline 100",
            "td3-robot train: --offline: learner.offline_updates is 100 and learner.recordings is empty; "
            "name recordings with learner.recordings (--from), or set offline_updates to 0",
        ),
        (
            "train walker2d --set learner.batch_size=0",
            "td3-robot train: --set learner.batch_size=0: learner.batch_size is 0; it must be a whole number >= 1",
        ),
        (
            'train walker2d --offline 9 --set learner={"offline_updates":8}',
            "td3-robot train: --offline and --set learner.offline_updates set the same key; give one of them",
        ),
        (
            "train walker2d --set learner.bach_size=3",
            "td3-robot train: --set learner.bach_size=3: unknown key 'learner.bach_size'; did you mean",
        ),
        (
            "train gymnasium:Pendulum-v1",
            "td3-robot train: CONFIG is 'gymnasium:Pendulum-v1', which is a task; allowed: a YAML file, or the name of "
            "a shipped one; to train this task with the default configuration: td3-robot train --task ",
        ),
        ("train Hopper", "td3-robot train: CONFIG is 'Hopper', which is a task; allowed: a YAML file, or the name of"),
        ("train walker2d --sed 3", "td3-robot train: there is no option --sed; did you mean --seed?"),
        ("train walker2d --stpes 3", "td3-robot train: there is no option --stpes; did you mean --steps?"),
        ("topic echo step --cuont 3", "td3-robot topic echo: there is no option --cuont; did you mean --count?"),
        ("topic echo step 7", "td3-robot topic echo: unrecognized arguments: 7; see td3-robot topic echo --help"),
        (
            "train --resume toy --task Ant",
            "td3-robot train: --task cannot be combined with --resume; "
            "allowed: CONFIG, --steps, --set, --cluster, --log-every",
        ),
        ("policy --config nofile", "td3-robot policy: --config 'nofile': there is no such file"),
        ("node estpo --run toy", "td3-robot node: VERB is 'estpo'; did you mean 'estop'?"),
        ("train --resume nowhere", "td3-robot train: --resume: run folder 'nowhere' holds no run"),
        ("sim --run nowhere", "td3-robot sim: --run: run folder 'nowhere' holds no run"),
        ("train nix.yaml", "td3-robot train: there is no file 'nix.yaml'; shipped files in configs: ant, ant_fast"),
        (
            "train walker2d --set learner.start_from=nofile --set learner.critics_first=1",
            "td3-robot train: learner.start_from: there is no policy 'nofile'; ",
        ),
        (
            "train walker2d --set endpoints.policy=tcp://0.0.0.0:5601",
            "td3-robot train: endpoints.policy: endpoint 'tcp://0.0.0.0:5601'",
        ),
        ("bundle create toy.safetensors out --final", "td3-robot bundle: --final needs a run folder; "),
        ("node state --config nofile", "td3-robot node: --config 'nofile': there is no such file"),
        ("eval nofile", "td3-robot eval: there is no policy 'nofile'; "),
        ("eval walker2d --episodes 0", "td3-robot eval: --episodes is 0; allowed: whole numbers from 1"),
    ],
)
def test_an_error_names_the_command_and_what_is_wrong(
    words: str, text: str, fail: Callable[[str], tuple[int, str]]
) -> None:
    code, error = fail(words)
    assert code == 2
    assert error.startswith(text)


def test_options_and_configuration_keys_accept_counts_like_1e5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command accepts its numbers and fails for another reason."""
    monkeypatch.chdir(tmp_path)
    for words in (
        "train walker2d --steps 2e5 --seed 1e1 --set total_steps=1e5",
        "eval nofile --episodes 1e1 --max-steps 1e3 --seed 1e3",
        "topic echo nothing --run x --count 1e1",
        "bench link --trips 1e4 --spin 1e1 --priority 1e1",
    ):
        assert main(words.split()) == 2
        assert "e1" not in (error := capsys.readouterr().err), error
        assert "whole numbers" not in error


@pytest.mark.usefixtures("fail")
def test_an_error_of_the_evaluator_begins_with_its_module_instead_of_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluator.main(["--run", "nowhere"]) == 2
    text = (
        "python -m td3_robot_sims.evaluator: --run: run folder 'nowhere' holds no run: there is no config.yaml in it\n"
    )
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    "words",
    [
        "bundle create walker2d toy.safetensors/out",
        "export toy.safetensors --out toy.safetensors/tables",
        "keys create robot --keys toy.safetensors/keys",
        "eval walker2d --video toy.safetensors/walk.mp4",
        "train walker2d --out toy.safetensors/run --set learner.precision=fp32",
    ],
)
def test_a_path_that_uses_a_file_as_a_folder_gives_exit_code_2_and_one_line(
    words: str, fail: Callable[[str], tuple[int, str]]
) -> None:
    code, error = fail(words)
    assert (code, error.count("\n")) == (2, 0), error


def test_train_does_not_resume_the_folder_of_a_deployed_learner(
    fail: Callable[[str], tuple[int, str]], tmp_path: Path
) -> None:
    """A person wrote the configuration. Its task is missing, so a training would use the default task."""
    text = "endpoints: {learner: ipc://learner.sock}\n"
    (tmp_path / "leg").mkdir()
    (tmp_path / "leg" / "config.yaml").write_text(text)
    assert fail("train --resume leg") == (
        2,
        "td3-robot train: run folder 'leg' belongs to a deployed learner, not to td3-robot train; "
        "to continue it: td3-robot learner --run leg",
    )
    assert (tmp_path / "leg" / "config.yaml").read_text() == text
