"""Reads files with a size limit, replaces files atomically, and removes incomplete files. Errors name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def naming(path: Path, instead_of: str = "") -> Iterator[None]:
    """If the block raises an OSError without a file name, add ``path``.

    For example, the error of a failed write has no file name.
    If the error names a temporary file or folder with the prefix ``instead_of``, or a file in such a folder, ``path``
    replaces that name.
    """
    try:
        yield
    except OSError as error:
        named = Path(error.filename or "").parts
        if not named or (instead_of and any(part.startswith(instead_of) for part in named)):
            error.filename = str(path)
            if error.filename2 is not None:
                del error.filename2
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: there is no such file; or it is a folder, a device or a pipe. Opening a pipe can block forever.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.open("rb")  # raises IsADirectoryError for a folder


def read(path: Path, most: int) -> bytes:
    """Read a regular file of at most ``most`` bytes. Raises OSError if the file is longer, see also open_regular."""
    with naming(path), open_regular(path) as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file by new content, see :func:`replacing`."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary file, which the block writes.

    When the block ends, flush the temporary file to the disk and rename it to ``path``.

    Args:
        mode: the permissions of the file, minus the umask of this process.

    Raises:
        OSError: the disk is full, the folder is not writable, or ``path`` is a folder, a device or a pipe. The old file
            stays; the temporary file is removed.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(path))
    beginning = _beginning(path)
    with naming(path, instead_of=beginning):
        temporary = path.parent / f"{beginning}{secrets.token_hex(4)}"
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        try:
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _flush_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def is_unfinished(item: Path, path: Path) -> bool:
    """Whether ``item`` is a temporary file of :func:`replacing` that a kill left beside ``path``."""
    return item.name.startswith(_beginning(path))


def _beginning(path: Path) -> str:
    return f".{path.name}-"


@contextlib.contextmanager
def creating(path: Path) -> Iterator[None]:
    """If the block fails, remove the file ``path``, which the block creates.

    Raises:
        FileExistsError: the file exists. It does not change.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _flush_folder(folder: Path) -> None:
    """Flush a folder to the disk. Without this flush, a power cut can undo a rename.

    Some file systems and unreadable folders refuse the flush. The function ignores this error: the new file is valid.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def free(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder; None if unknown. The folder does not have to exist."""
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def allocated(path: Path) -> int:
    """Return the bytes that a file uses on its disk; 0 if it does not exist."""
    with contextlib.suppress(OSError):
        return 512 * path.stat().st_blocks
    return 0


def user_folder(variable: str, otherwise: str) -> Path:
    """Return this program's folder for user data, see the XDG Base Directory Specification.

    The environment variable ``variable`` names the parent folder. If it is not set, ``otherwise`` is the parent folder.

    Raises:
        RuntimeError: the parent folder begins with ``~``, and the user has no home folder.
    """
    return Path(os.environ.get(variable) or otherwise).expanduser() / "td3-robot"
