"""Output, files and errors of ``td3-robot keys``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zmq

from td3_robot.cli import main as cli
from td3_robot.transport.keys import KeyFolder


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs ``td3-robot keys`` and returns the exit code, the output and the errors."""

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(["keys", *words, "--keys", str(tmp_path / "keys")])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_keys_are_created_allowed_listed_and_revoked(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("create", "robot-7")
    assert code == 0
    identity = KeyFolder(tmp_path / "keys").identity()
    assert identity.secret not in out
    assert out.splitlines()[-1] == f"on the other machine: td3-robot keys allow robot-7 '{identity.public}'"
    key = "-"
    while key.startswith("-"):  # on a command line such a key looks like an option; `keys create` makes no such key
        key = zmq.curve_keypair()[0].decode()
    assert run("allow", "workstation", key) == (0, "workstation may connect as any role except operator\n", "")
    assert run("allow", "workstation", key, "--role", "operator") == (0, "workstation may connect as operator\n", "")
    assert run("allow", "workstation", key, "--server", "learner") == (
        0,
        "workstation is the server of the link learner\n",
        "",
    )
    code, out, _ = run("list")
    assert [line.split() for line in out.splitlines()] == [
        ["robot-7", identity.public, "this", "machine"],
        ["workstation", key, "client,", "operator,", "server:learner"],
    ]
    code, out, _ = run("list", "--json")
    assert json.loads(out) == {
        "folder": str(tmp_path / "keys"),
        "identity": {"name": "robot-7", "key": identity.public},
        "allowed": [{"name": "workstation", "key": key, "roles": ["client", "operator", "server:learner"]}],
    }
    code, out, _ = run("revoke", "workstation")
    assert (code, out) == (0, "workstation is forgotten; running processes disconnect it within 0.1 s\n")
    assert json.loads(run("list", "--json")[1])["allowed"] == []


def test_the_own_key_cannot_be_allowed_for_another_machine(run: Any, tmp_path: Path) -> None:
    """Both machines call their file identity.public, so the two files are easily confused."""
    run("create", "robot-7")
    public = tmp_path / "keys" / "identity.public"
    code, _, error = run("allow", "workstation", str(public))
    own = KeyFolder(tmp_path / "keys").identity().public
    assert code == 2
    assert error == (
        f"td3-robot keys: key {own} is this machine's own key, which has every role already; use the key of the other "
        "machine\n"
    )
    assert run("allow", "robot-7", own, "--server", "policy")[0] == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["create", "a/b"], "name 'a/b' is not allowed; allowed: 1 to 64 letters, digits, '_', '-' and '.'"),
        (
            ["allow", "a", "nonsense"],
            "'nonsense' is neither a public key (40 characters of Z85) nor a file that holds a public key",
        ),
        (["list"], "has no key pair; make one: td3-robot keys create NAME"),
        (["revoke", "a"], "cannot be used: No such file or directory"),
    ],
)
def test_a_mistake_gives_a_one_line_error(run: Any, words: list[str], line: str) -> None:
    code, out, error = run(*words)
    assert (code, out) == (2, "")
    assert line in error
    assert error.count("\n") == 1


def test_an_endpoint_beyond_loopback_needs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "walker2d", "--out", str(tmp_path / "run"), "--set"]
    assert cli.main([*words, "endpoints.learner=tcp://0.0.0.0:7001"]) == 2
    error = capsys.readouterr().err
    assert "'tcp://0.0.0.0:7001' is beyond loopback, and there are no keys: make them with 'td3-robot keys" in error
    assert cli.main([*words, f"endpoints.keys={tmp_path}/keys"]) == 2
    assert "has no key pair; make one: td3-robot keys create NAME" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
