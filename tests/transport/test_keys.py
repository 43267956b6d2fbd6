"""Test the key folder: files, permissions, and errors about damaged files."""

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


def test_create_writes_private_and_public_files(folder: KeyFolder) -> None:
    identity = folder.create("robot-7")
    assert folder.identity() == identity
    assert (mode(folder.path), mode(folder.secret_file), mode(folder.public_file)) == (0o700, 0o600, 0o644)
    assert folder.public_file.read_text() == f"robot-7 {identity.public}\n"
    assert identity.secret not in repr(identity)
    assert zmq.curve_public(identity.secret.encode()).decode() == identity.public
    assert {path.name for path in folder.path.iterdir()} == {"identity.secret", "identity.public", ".lock"}


def test_a_key_pair_is_never_overwritten(folder: KeyFolder) -> None:
    identity = folder.create("robot-7")
    with pytest.raises(KeysError, match="has a key pair already"):
        folder.create("robot-7")
    assert folder.identity() == identity


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "../x", "ü", "a\n"])
def test_invalid_names_are_refused(folder: KeyFolder, name: str) -> None:
    with pytest.raises(KeysError, match="is not allowed; allowed: 1 to 64 letters"):
        folder.create(name)
    with pytest.raises(KeysError, match="is not allowed"):
        folder.allow(name, public())
    assert not folder.path.exists()
    check_name("A-z_0.9")


def test_a_secret_that_others_can_read_is_refused(folder: KeyFolder) -> None:
    folder.create("robot-7")
    folder.secret_file.chmod(0o640)
    with pytest.raises(KeysError, match=r"has mode 0640; allowed is 0600: chmod 600 .*identity.secret"):
        folder.identity()


@pytest.mark.parametrize("writable", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_that_others_can_write_is_refused(folder: KeyFolder, writable: int) -> None:
    """Other users could put their own key pair and allow-list into this folder."""
    folder.create("robot-7")
    folder.allow("a", public())
    keys = AllowList(folder)
    folder.path.chmod(writable)
    line = rf"^key folder '.*keys' has mode {writable:04o}; other users may write to it: chmod 700 .*keys$"
    uses = [folder.identity, folder.entries, lambda: AllowList(folder), lambda: folder.create("b")]
    for use in [*uses, lambda: folder.allow("b", public()), lambda: folder.revoke("a")]:
        with pytest.raises(KeysError, match=line):
            use()
    folder.allowed_file.touch()  # so that a running process reads the allow-list again
    assert "no other machine may connect: key folder" in str(keys.refresh())
    folder.path.chmod(0o755)  # others may read the folder, but not the secret file
    assert folder.identity().name == "robot-7"


def test_a_folder_of_another_user_is_refused(folder: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.create("robot-7")
    owner = folder.path.stat().st_uid
    if owner == 0:  # root's folders are always accepted, so change the owner
        os.chown(folder.path, 4242, -1)
        owner = 4242
    monkeypatch.setattr(os, "geteuid", lambda: 77)
    with pytest.raises(KeysError, match=rf"belongs to user {owner}; allowed: 77 \(this user\) and 0 \(root\)"):
        folder.identity()


def test_a_missing_key_pair_is_an_error(folder: KeyFolder) -> None:
    with pytest.raises(KeysError, match="has no key pair; make one: td3-robot keys create NAME --keys"):
        folder.identity()


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "\xff", '{"name": "a", "public": "b", "secret": "c"}'])
def test_a_damaged_secret_is_an_error(folder: KeyFolder, content: str) -> None:
    folder.create("robot-7")
    folder.secret_file.write_text(content, encoding="latin-1")
    with pytest.raises(KeysError, match="is damaged"):
        folder.identity()


def test_a_public_and_a_secret_key_of_different_pairs_are_an_error(folder: KeyFolder) -> None:
    folder.create("robot-7")
    content = json.loads(folder.secret_file.read_text())
    folder.secret_file.write_text(json.dumps({**content, "public": public()}))
    with pytest.raises(KeysError, match="its public and secret key do not belong together"):
        folder.identity()


def test_allow_adds_a_key_or_a_role_and_revoke_removes_a_key(folder: KeyFolder) -> None:
    folder.create("here")
    robot, learner = public(), public()
    folder.allow("robot-7", robot)
    folder.allow("workstation", learner, "server:learner")
    folder.allow("workstation", learner)
    folder.allow("robot-7", robot)  # allowing twice changes nothing
    assert {name: (entry.key, entry.roles) for name, entry in folder.entries().items()} == {
        "robot-7": (robot, ("client",)),
        "workstation": (learner, ("server:learner", "client")),
    }
    assert mode(folder.allowed_file) == 0o600
    folder.revoke("robot-7")
    assert list(folder.entries()) == ["workstation"]
    with pytest.raises(KeysError, match=r"no key is known as 'robot-7'; known in .*: workstation"):
        folder.revoke("robot-7")


def test_contradictory_or_malformed_entries_are_refused(folder: KeyFolder) -> None:
    key = public()
    folder.allow("a", key, "server:policy")
    with pytest.raises(KeysError, match="'a' is known with another key; revoke it first: td3-robot keys revoke a"):
        folder.allow("a", public())
    with pytest.raises(KeysError, match="this key is known as 'a' already"):
        folder.allow("b", key)
    with pytest.raises(KeysError, match="link 'policy' has 'a' as its server; revoke that key first"):
        folder.allow("b", public(), "server:policy")
    with pytest.raises(KeysError, match=r"role is 'server:camera'; allowed: client, .* server:policy, server:learner"):
        folder.allow("b", public(), "server:camera")
    with pytest.raises(KeysError, match="is not a public key; allowed: 40 characters"):
        folder.allow("b", "x" * 39)


def test_a_key_may_have_only_its_listed_roles(folder: KeyFolder) -> None:
    """``client`` means every role except operator. The folder's own key has every role."""
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
    with pytest.raises(KeysError, match="role is 'king'; allowed: client, simulator, driver"):
        folder.allow("robot-7", robot, "king")


@pytest.mark.parametrize("line", ["a", "a b c", "a {key}", "a {key} client more", "a {key} client\na {key} client"])
def test_a_damaged_list_is_an_error(folder: KeyFolder, line: str) -> None:
    folder.create("here")
    folder.allowed_file.write_text(line.format(key=public()))
    with pytest.raises(
        KeysError, match=r"allow-list .*, line [12]: must be NAME KEY ROLES, with a NAME that no earlier line has"
    ):
        AllowList(folder)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("a {0} client,drivr", "line 1: role is 'drivr'; allowed: client, simulator, driver, .* server:learner"),
        ("a {0} client\nb {1} server:camera", "line 2: role is 'server:camera'; allowed: client, "),
        ("a {0} client\nb {0} operator", "line 2: this key is known as 'a' already"),
        ("a {0} server:policy\nb {1} server:policy", "line 2: link 'policy' has 'a' as its server"),
    ],
)
def test_a_contradiction_in_an_edited_list_is_an_error(folder: KeyFolder, lines: str, problem: str) -> None:
    """A running node then lets no other machine connect, as with a damaged list."""
    folder.create("here")
    first, second = public(), public()
    folder.allow("a", first)
    live = AllowList(folder)
    folder.allowed_file.write_text(lines.format(first, second))
    with pytest.raises(KeysError, match=rf"^allow-list '.*allowed', {problem}"):
        AllowList(folder)
    assert re.match(f"no other machine may connect: allow-list '.*allowed', {problem}", live.refresh() or "")
    assert live.client(first) is None


def test_a_list_that_others_can_write_is_refused(folder: KeyFolder) -> None:
    folder.create("here")
    folder.allow("a", public())
    folder.allowed_file.chmod(0o620)
    with pytest.raises(KeysError, match="has mode 0620; other users may write to it"):
        AllowList(folder)


def test_a_pipe_in_place_of_a_file_is_an_error(folder: KeyFolder) -> None:
    """Reading a pipe can block forever."""
    folder.create("here")
    for file in (folder.secret_file, folder.allowed_file):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    with pytest.raises(KeysError, match=r"secret key .* cannot be read: not a regular file"):
        folder.identity()
    with pytest.raises(KeysError, match=r"allow-list .* cannot be read: .*not a regular file"):
        folder.entries()


def test_the_list_is_reloaded_and_a_damaged_list_allows_no_other_machine(folder: KeyFolder) -> None:
    own = folder.create("here").public
    live = AllowList(folder)
    robot, server = public(), public()
    assert (live.client(own), live.client(robot), live.server("learner")) == ("here", None, own)
    assert live.refresh() is None
    folder.allow("robot-7", robot, CLIENT)
    folder.allow("workstation", server, "server:learner")
    assert live.client(robot) is None  # a change takes effect at the next refresh
    assert live.refresh() == "allow-list read again: robot-7, here may connect"
    assert live.refresh() is None
    assert (live.client(robot), live.client(server), live.server("learner")) == ("robot-7", None, server)
    folder.allowed_file.write_text("nonsense")
    assert "no other machine may connect" in (live.refresh() or "")
    assert (live.client(robot), live.client(own), live.server("learner")) == (None, "here", own)
    folder.allowed_file.unlink()
    assert live.refresh()
    assert live.client(robot) is None


def test_a_public_key_is_read_from_text_or_a_file(folder: KeyFolder, tmp_path: Path) -> None:
    key = folder.create("robot-7").public
    assert read_public(key) == read_public(str(folder.public_file)) == key
    with pytest.raises(KeysError, match="is neither a public key"):
        read_public("missing.public")
    (tmp_path / "other").write_text("one two")
    with pytest.raises(KeysError, match="does not hold a name and a public key"):
        read_public(str(tmp_path / "other"))


def test_the_default_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "td3-robot" / "keys"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/robot")
    assert default_folder() == Path("/home/robot/.config/td3-robot/keys")


def test_the_deployment_guide_describes_every_role() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
    table = text[text.index("| `--role` |") :].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")][1:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted((*ROLES, CLIENT))


def test_a_public_key_never_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alphabet of keys, Z85, includes the minus sign. If a new key begins with it, the folder makes another key."""
    drawn = iter([(b"-" + b"x" * 39, b"s" * 40), (b"y" * 40, b"t" * 40)])
    monkeypatch.setattr(zmq, "curve_keypair", lambda: next(drawn))
    assert KeyFolder(tmp_path / "keys").create("robot").public == "y" * 40
