"""The key folder: who made what, what may be read by whom, what a damaged file says."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest
import zmq

from td3_robot.errors import KeysError
from td3_robot.transport.keys import CLIENT, ROLES, AllowList, KeyFolder, check_name, default_folder, read_public


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "new" / "keys")


def public() -> str:
    return zmq.curve_keypair()[0].decode()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_create(folder: KeyFolder) -> None:
    identity = folder.create("robot-7")
    assert folder.identity() == identity
    assert (mode(folder.path), mode(folder.secret_file), mode(folder.public_file)) == (0o700, 0o600, 0o644)
    assert folder.public_file.read_text() == f"robot-7 {identity.public}\n"
    assert identity.secret not in repr(identity)
    assert zmq.curve_public(identity.secret.encode()).decode() == identity.public
    assert {path.name for path in folder.path.iterdir()} == {"identity.secret", "identity.public", ".lock"}


def test_a_key_pair_is_never_written_over(folder: KeyFolder) -> None:
    identity = folder.create("robot-7")
    with pytest.raises(KeysError, match="has a key pair already"):
        folder.create("robot-7")
    assert folder.identity() == identity


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "../x", "ü", "a\n"])
def test_names(folder: KeyFolder, name: str) -> None:
    with pytest.raises(KeysError, match="is not allowed; allowed: 1 to 64 letters"):
        folder.create(name)
    with pytest.raises(KeysError, match="is not allowed"):
        folder.allow(name, public())
    assert not folder.path.exists()
    check_name("A-z_0.9")


def test_secret_that_others_may_read_is_refused(folder: KeyFolder) -> None:
    folder.create("robot-7")
    folder.secret_file.chmod(0o640)
    with pytest.raises(KeysError, match=r"has mode 0640; allowed is 0600: chmod 600 .*identity.secret"):
        folder.identity()


@pytest.mark.parametrize("writable", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_that_others_may_write_is_refused(folder: KeyFolder, writable: int) -> None:
    """They could put their own key pair and list into it."""
    folder.create("robot-7")
    folder.allow("a", public())
    keys = AllowList(folder)
    folder.path.chmod(writable)
    line = rf"^key folder '.*keys' has mode {writable:04o}; others may write it: chmod 700 .*keys$"
    uses = [folder.identity, folder.entries, lambda: AllowList(folder), lambda: folder.create("b")]
    for use in [*uses, lambda: folder.allow("b", public()), lambda: folder.revoke("a")]:
        with pytest.raises(KeysError, match=line):
            use()
    folder.allowed_file.touch()  # a list that runs is read again, and lets nobody in
    assert "no other machine is let in any more: key folder" in str(keys.refresh())
    folder.path.chmod(0o755)  # who may only look sees no secret
    assert folder.identity().name == "robot-7"


def test_a_folder_of_somebody_else_is_refused(folder: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.create("robot-7")
    owner = folder.path.stat().st_uid
    if owner == 0:  # root's folders are everybody's choice, so make it another's
        os.chown(folder.path, 4242, -1)
        owner = 4242
    monkeypatch.setattr(os, "geteuid", lambda: 77)
    with pytest.raises(KeysError, match=rf"belongs to user {owner}; allowed: 77 \(us\) and 0 \(root\)"):
        folder.identity()


def test_no_key_pair(folder: KeyFolder) -> None:
    with pytest.raises(KeysError, match="has no key pair; make one: td3-robot keys create NAME --keys"):
        folder.identity()


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "\xff", '{"name": "a", "public": "b", "secret": "c"}'])
def test_damaged_secret(folder: KeyFolder, content: str) -> None:
    folder.create("robot-7")
    folder.secret_file.write_text(content, encoding="latin-1")
    with pytest.raises(KeysError, match="is damaged"):
        folder.identity()


def test_halves_of_two_pairs(folder: KeyFolder) -> None:
    folder.create("robot-7")
    content = json.loads(folder.secret_file.read_text())
    folder.secret_file.write_text(json.dumps({**content, "public": public()}))
    with pytest.raises(KeysError, match="its halves do not belong together"):
        folder.identity()


def test_allow_and_revoke(folder: KeyFolder) -> None:
    folder.create("here")
    robot, learner = public(), public()
    folder.allow("robot-7", robot)
    folder.allow("workstation", learner, "server:learner")
    folder.allow("workstation", learner)
    folder.allow("robot-7", robot)  # twice is once
    assert {name: (entry.key, entry.roles) for name, entry in folder.entries().items()} == {
        "robot-7": (robot, ("client",)),
        "workstation": (learner, ("server:learner", "client")),
    }
    assert mode(folder.allowed_file) == 0o600
    assert folder.revoke("robot-7").key == robot
    assert list(folder.entries()) == ["workstation"]
    with pytest.raises(KeysError, match=r"no key is known as 'robot-7'; known in .*: workstation"):
        folder.revoke("robot-7")


def test_contradictions(folder: KeyFolder) -> None:
    key = public()
    folder.allow("a", key, "server:policy")
    with pytest.raises(KeysError, match="'a' is known with another key; revoke it first: td3-robot keys revoke a"):
        folder.allow("a", public())
    with pytest.raises(KeysError, match="this key is known as 'a' already"):
        folder.allow("b", key)
    with pytest.raises(KeysError, match="link 'policy' has 'a' as its server; revoke it first"):
        folder.allow("b", public(), "server:policy")
    with pytest.raises(KeysError, match="link 'camera' is not one; allowed: policy, learner, supervisor"):
        folder.allow("b", public(), "server:camera")
    with pytest.raises(KeysError, match="is not a public key: 40 characters of Z85"):
        folder.allow("b", "x" * 39)


def test_roles(folder: KeyFolder) -> None:
    """A key may be what the list says; ``client`` is every role but operator, our own key every role."""
    own = folder.create("here").public
    robot, person, both, server, stranger = (public() for _ in range(5))
    folder.allow("robot-7", robot)
    folder.allow("person", person, "operator")
    folder.allow("both", both)
    folder.allow("both", both, "operator")
    folder.allow("learner", server, "server:learner")
    keys = AllowList(folder)
    allowed = {key: {role for role in ROLES if keys.may(key, role)} for key in (own, robot, person, both, stranger)}
    assert allowed == {
        own: {*ROLES},
        robot: {"simulator", "driver", "policy", "evaluator", "node"},
        person: {"operator"},
        both: {*ROLES},
        stranger: set(),
    }
    assert keys.client(server) is None
    with pytest.raises(KeysError, match="role 'king' is not one; allowed: client, simulator, driver"):
        folder.allow("robot-7", robot, "king")


@pytest.mark.parametrize("line", ["a", "a b c", "a {key}", "a {key} client more", "a {key} client\na {key} client"])
def test_damaged_list(folder: KeyFolder, line: str) -> None:
    folder.create("here")
    folder.allowed_file.write_text(line.format(key=public()))
    with pytest.raises(KeysError, match=r"allow-list .*, line [12]: needs a new NAME, a KEY and ROLES"):
        AllowList(folder)


def test_list_that_others_may_write(folder: KeyFolder) -> None:
    folder.create("here")
    folder.allow("a", public())
    folder.allowed_file.chmod(0o620)
    with pytest.raises(KeysError, match="has mode 0620; others may write it"):
        AllowList(folder)


def test_list_is_live_and_a_damaged_one_lets_nobody_in(folder: KeyFolder) -> None:
    own = folder.create("here").public
    live = AllowList(folder)
    robot, server = public(), public()
    assert (live.client(own), live.client(robot), live.server("learner")) == ("here", None, own)
    assert live.refresh() is None
    folder.allow("robot-7", robot, CLIENT)
    folder.allow("workstation", server, "server:learner")
    assert live.client(robot) is None  # not before it looks
    assert live.refresh() == "allow-list read again: robot-7, here may connect"
    assert live.refresh() is None
    assert (live.client(robot), live.client(server), live.server("learner")) == ("robot-7", None, server)
    folder.allowed_file.write_text("nonsense")
    assert "no other machine is let in any more" in (live.refresh() or "")
    assert (live.client(robot), live.client(own), live.server("learner")) == (None, "here", own)
    folder.allowed_file.unlink()
    assert live.refresh()
    assert live.client(robot) is None


def test_public_key_from_text_or_file(folder: KeyFolder, tmp_path: Path) -> None:
    key = folder.create("robot-7").public
    assert read_public(key) == read_public(str(folder.public_file)) == key
    with pytest.raises(KeysError, match="is neither a public key"):
        read_public("missing.public")
    (tmp_path / "other").write_text("one two")
    with pytest.raises(KeysError, match="does not hold a name and a public key"):
        read_public(str(tmp_path / "other"))


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "td3-robot" / "keys"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/robot")
    assert default_folder() == Path("/home/robot/.config/td3-robot/keys")


def test_the_documents_say_what_each_role_may_do() -> None:
    text = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted((*ROLES, CLIENT))


def test_a_public_key_is_no_option_of_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 85 characters of a key, a minus is one."""
    drawn = iter([(b"-" + b"x" * 39, b"s" * 40), (b"y" * 40, b"t" * 40)])
    monkeypatch.setattr(zmq, "curve_keypair", lambda: next(drawn))
    assert KeyFolder(tmp_path / "keys").create("robot").public == "y" * 40
