"""Files: reads with a size limit, writes that a crash cannot leave half done, errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path, instead_of: str = "") -> Iterator[None]:
    """Errors of the operating system inside the block name this file if they name none, as those of writes do.

    Args:
        path: the file.
        instead_of: beginning of the names of temporary files, which errors must not show either; empty for none.
    """
    try:
        yield
    except OSError as error:
        named = Path(error.filename or "").name
        if not named or (instead_of and named.startswith(instead_of)):
            error.filename = str(path)
            if error.filename2 is not None:
                del error.filename2
        raise


def read(path: Path, most: int) -> bytes:
    """The content of a file of at most ``most`` bytes.

    Raises:
        OSError: the file cannot be read or is longer; a device may never end.
    """
    with naming(path), path.open("rb") as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a temporary file that only this user can read, flush it to the disk, and rename it to ``path``.

    Raises:
        OSError: the disk is full or the folder cannot be written. The old file stays, the temporary one is removed.
    """
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """A temporary file to write inside the block. After the block it is flushed to the disk and renamed to ``path``.

    Raises:
        OSError: as :func:`write_atomically`, or ``path`` is a folder, a device or a pipe.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(path))
    beginning = f".{path.name}-"
    with naming(path, instead_of=beginning):
        descriptor, temporary = tempfile.mkstemp(prefix=beginning, dir=path.parent)
        os.close(descriptor)
        try:
            yield Path(temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, path)
            _flush_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _flush_folder(folder: Path) -> None:
    """Flush a new name in a folder to the disk, or a power cut brings the old content back.

    Some file systems and unreadable folders do not allow it; the file is in place without it.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def free(folder: Path) -> int | None:
    """Free bytes on the disk of a folder, which may not exist yet; None if unknown."""
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def allocated(path: Path) -> int:
    """Bytes that a file takes on its disk; 0 if it does not exist."""
    with contextlib.suppress(OSError):
        return 512 * path.stat().st_blocks
    return 0


def user_folder(variable: str, otherwise: str) -> Path:
    """This program's folder among the user's, see the XDG Base Directory Specification.

    Args:
        variable: environment variable that names the parent folder.
        otherwise: the parent folder where the variable is not set.

    Raises:
        RuntimeError: the folder is in the user's home, and the user has none.
    """
    return Path(os.environ.get(variable) or otherwise).expanduser() / "td3-robot"
