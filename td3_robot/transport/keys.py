"""A folder of small text files: the CURVE keys of one machine, and the list of keys that may connect.

``identity.secret``
    The machine's own key pair, mode 0600, as one JSON object: name, public, secret.
``identity.public``
    One line: ``NAME KEY``. Copy this file to each machine that must know this key.
``allowed``
    One line for each known key: ``NAME KEY ROLES``. Commas separate the ROLES. Each of the ROLES has a meaning:

    - a role of Hello (``driver``, ``operator``, …): the key may connect to this machine's servers in this role
    - ``client``: the key may connect to this machine's servers in every role except operator
    - ``server:LINK``: the server of LINK must have this key

    Running nodes read a changed file again. The machine's own key may connect in every role. If no line has
    ``server:LINK``, the server of LINK must have the machine's own key. So the processes of one machine trust each
    other.

A key has 32 bytes. It is written in Z85 (ZeroMQ RFC 32), as 40 characters. The algorithm is CurveZMQ (RFC 26).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from td3_robot.errors import KeysError
from td3_robot.topics import LINKS
from td3_robot.util import files
from td3_robot.util.process_lock import locked
from td3_robot.util.text import NAME, NAME_RULE

OPERATOR = "operator"
ROLES = ("simulator", "driver", "policy", "evaluator", "node", OPERATOR)
"""The roles of clients, as in Hello."""
CLIENT = "client"
"""Every role except operator. An operator commands robots and ends emergency stops."""
SERVER = "server:"
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LARGEST = 1 << 24  # bytes of the largest file to read: far above any real list
# The oldest allowed libzmq. In older versions, one stranger can block all clients, even with CURVE (CVE-2020-15166).
_OLDEST = (4, 3, 3)


def default_folder() -> Path:
    """``td3-robot/keys`` in the user's configuration folder. Raises KeysError if this user has no home folder."""
    try:
        return files.user_folder("XDG_CONFIG_HOME", "~/.config") / "keys"
    except RuntimeError:
        raise KeysError("this user has no home folder to keep keys in; name a folder with --keys") from None


def named(folder: str | Path) -> KeyFolder:
    """The folder of this name; ``~`` and ``~USER`` are expanded.

    Raises KeysError if USER does not exist, or if USER (for ``~``: the current user) has no home folder.
    """
    try:
        return KeyFolder(Path(folder).expanduser())
    except RuntimeError:
        raise KeysError(f"folder of keys {str(folder)!r}: there is no such user or home folder") from None


class Identity(msgspec.Struct, frozen=True):
    """A machine's own key pair, both halves in Z85."""

    name: str
    public: str
    secret: str

    def __repr__(self) -> str:  # keeps the secret out of logs
        return f"Identity({self.name!r}, {self.public!r})"


@dataclass(frozen=True)
class Entry:
    """A known key and its roles. Each role is ``client``, a role of Hello, or ``server:LINK``."""

    name: str
    key: str
    roles: tuple[str, ...]


class KeyFolder:
    """The files of one folder. Every change of a file is atomic.

    A method raises KeysError in each of these cases:

    - an argument is malformed or contradicts the files
    - the key pair is missing
    - a file is damaged
    - other users can read the secret key or replace a file
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secret_file = path / "identity.secret"
        self.public_file = path / "identity.public"
        self.allowed_file = path / "allowed"

    def create(self, name: str) -> Identity:
        """Create a key pair."""
        check_name(name)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_folder()
        with self._locked():
            if self.secret_file.exists():
                raise KeysError(f"key folder {str(self.path)!r} has a key pair already; remove the old pair first")
            public = "-"
            while public.startswith("-"):  # a key that begins with "-" would look like an option on a command line
                public, secret = (half.decode("ascii") for half in zmq.curve_keypair())
            identity = Identity(name, public, secret)
            files.write_atomically(self.secret_file, msgspec.json.encode(identity) + b"\n", 0o600)
            files.write_atomically(self.public_file, f"{name} {public}\n".encode())
        return identity

    def identity(self) -> Identity:
        """The machine's own key pair."""
        self._check_folder()
        path = self.secret_file
        try:
            mode = path.stat().st_mode & 0o777
            identity = msgspec.json.decode(files.read(path, _LARGEST), type=Identity)
            public = zmq.curve_public(identity.secret.encode()).decode()
        except FileNotFoundError:
            command = f"td3-robot keys create NAME --keys {self.path}"
            raise KeysError(f"key folder {str(self.path)!r} has no key pair; make one: {command}") from None
        except OSError as error:
            raise KeysError(f"secret key {str(path)!r} cannot be read: {error.strerror}") from None
        except (ValueError, msgspec.MsgspecError, zmq.ZMQError):
            raise KeysError(f"secret key {str(path)!r} is damaged: it is not a key pair in JSON") from None
        if mode & 0o077:
            raise KeysError(f"secret key {str(path)!r} has mode {mode:04o}; allowed is 0600: chmod 600 {path}")
        if public != identity.public:
            raise KeysError(f"secret key {str(path)!r} is damaged: its public and secret key do not belong together")
        return identity

    def entries(self) -> dict[str, Entry]:
        """Return a dict from names to known keys. The oldest key comes first."""
        self._check_folder()
        try:
            mode = self.allowed_file.stat().st_mode & 0o777
            text = files.read(self.allowed_file, _LARGEST).decode("ascii")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(f"allow-list {str(self.allowed_file)!r} cannot be read: {error}") from None
        what = f"allow-list {str(self.allowed_file)!r}"
        if mode & 0o022:
            raise KeysError(f"{what} has mode {mode:04o}; other users may write to it: chmod 600")
        known: dict[str, Entry] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if len(words) != 3 or not NAME.fullmatch(words[0]) or not _KEY.fullmatch(words[1]) or words[0] in known:
                raise KeysError(f"{what}, line {number}: must be NAME KEY ROLES, with a NAME that no earlier line has")
            entry = Entry(words[0], words[1], tuple(words[2].split(",")))
            if problem := _problem(entry, known.values()):
                raise KeysError(f"{what}, line {number}: {problem}")
            known[entry.name] = entry
        return known

    def allow(self, name: str, key: str, role: str = CLIENT) -> None:
        """Add a key, or add one role to a known key."""
        check_name(name)
        if not _KEY.fullmatch(key):
            raise KeysError(f"key {key[:60]!r} is not a public key; allowed: 40 characters, see 'keys create'")
        if problem := _problem(Entry(name, key, (role,)), ()):
            raise KeysError(problem)
        if self.public_file.exists() and key == self.identity().public and not role.startswith(SERVER):
            raise KeysError(
                f"key {key} is this machine's own key, which has every role already; use the key of the other machine"
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            known = self.entries()
            old = known.get(name)
            if old and old.key != key:
                raise KeysError(f"{name!r} is known with another key; revoke it first: td3-robot keys revoke {name}")
            entry = Entry(name, key, tuple(dict.fromkeys([*(old.roles if old else ()), role])))
            if problem := _problem(entry, known.values()):
                raise KeysError(problem)
            known[name] = entry
            self._write(known)

    def revoke(self, name: str) -> None:
        """Remove a key.

        Within :data:`REVOCATION_TIME`, running nodes forget the clients that use this key, and refuse messages from
        these clients.
        """
        with self._locked():
            known = self.entries()
            if name not in known:
                names = ", ".join(known) or "none"
                raise KeysError(f"no key is known as {name!r}; known in {str(self.path)!r}: {names}")
            del known[name]
            self._write(known)

    def _check_folder(self) -> None:
        """Raise KeysError if the owner or mode of a folder lets other users replace the files."""
        what = f"key folder {str(self.path)!r}"
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise KeysError(f"{what} cannot be used: {error.strerror}") from None
        if found.st_uid not in (0, os.geteuid()):
            raise KeysError(f"{what} belongs to user {found.st_uid}; allowed: {os.geteuid()} (this user) and 0 (root)")
        if found.st_mode & 0o022:
            mode = found.st_mode & 0o7777
            raise KeysError(f"{what} has mode {mode:04o}; other users may write to it: chmod 700 {self.path}")

    def _write(self, known: dict[str, Entry]) -> None:
        lines = [f"{entry.name} {entry.key} {','.join(entry.roles)}\n" for entry in known.values()]
        files.write_atomically(self.allowed_file, "".join(lines).encode("ascii"), 0o600)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder for one writer, so that two commands do not overwrite each other's changes."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / ".lock", wait=True))
            except OSError as error:
                raise KeysError(f"key folder {str(self.path)!r} cannot be used: {error.strerror}") from None
            yield


def _problem(entry: Entry, known: Iterable[Entry]) -> str | None:
    """An error text if a role does not exist, or if an entry with a different name blocks this entry.

    The other entry blocks this entry if it already has the same key, or is already the server of the same link.
    """
    allowed = (CLIENT, *ROLES, *(SERVER + link for link in LINKS))
    for role in entry.roles:
        if role not in allowed:
            return f"role is {role[:60]!r}; allowed: {', '.join(allowed)}"
    for other in known:
        if other.name == entry.name:
            continue
        if other.key == entry.key:
            return f"this key is known as {other.name!r} already"
        for role in entry.roles:
            if role.startswith(SERVER) and role in other.roles:
                return f"link {role.removeprefix(SERVER)!r} has {other.name!r} as its server; revoke that key first"
    return None


REVOCATION_TIME = 0.1
"""Seconds until a running node reads a changed allow-list. A node with a slower loop needs longer."""


class AllowList:
    """The machine's own key pair and the current list, for a running node. ``__init__`` may raise KeysError."""

    def __init__(self, folder: KeyFolder) -> None:
        if not zmq.has("curve") or zmq.zmq_version_info() < _OLDEST:
            needed = ".".join(map(str, _OLDEST))
            raise KeysError(f"keys need libzmq {needed} or newer with CURVE; this machine has {zmq.zmq_version()}")
        self.folder = folder
        self.identity = folder.identity()
        self._stamp = self._look()
        self._read(folder.entries())

    def refresh(self) -> str | None:
        """Read the list again if it changed. Return a line for the log; None if the list did not change.

        If the list cannot be read, no other machine may connect, because it is unknown which keys are revoked.
        """
        stamp = self._look()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self._read(self.folder.entries())
        except KeysError as error:
            self._read({})
            return f"no other machine may connect: {error}"
        return f"allow-list read again: {', '.join(self._clients.values())} may connect"

    def client(self, key: str) -> str | None:
        """The name of a key that may connect; None for other keys."""
        return self._clients.get(key)

    def may(self, key: str, role: str) -> bool:
        """Whether a key may have this role of Hello."""
        return role in self._roles.get(key, ())

    def server(self, link: str) -> str:
        """The key that the server of a link must hold."""
        return self._servers.get(SERVER + link, self.identity.public)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.folder.allowed_file)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns

    def _read(self, entries: dict[str, Entry]) -> None:
        known = entries.values()
        ordinary = {*ROLES} - {OPERATOR}
        self._roles = {
            entry.key: {*ROLES}.intersection(entry.roles) | (ordinary if CLIENT in entry.roles else set())
            for entry in known
        }
        self._clients = {entry.key: entry.name for entry in known if self._roles[entry.key]}
        self._roles[self.identity.public] = {*ROLES}
        self._clients[self.identity.public] = self.identity.name
        self._servers = {role: entry.key for entry in known for role in entry.roles if role.startswith(SERVER)}


def open_keys(folder: str | None) -> AllowList | None:
    """The keys in the folder that a configuration names; None if it names no folder."""
    return AllowList(named(folder)) if folder is not None else None


def read_public(text: str) -> str:
    """Return a public key. ``text`` is the key itself, or the path of an ``identity.public`` file."""
    if _KEY.fullmatch(text):
        return text
    try:
        words = Path(text).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        raise KeysError(
            f"{text[:200]!r} is neither a public key (40 characters of Z85) nor a file that holds a public key"
        ) from None
    if len(words) != 2 or not _KEY.fullmatch(words[1]):
        raise KeysError(f"file {text!r} does not hold a name and a public key; allowed: a file like identity.public")
    return words[1]


def check_name(name: str) -> None:
    """Raise KeysError if this name is not allowed for a key."""
    if not NAME.fullmatch(name):
        raise KeysError(f"name {name!r} is not allowed; allowed: {NAME_RULE}")
