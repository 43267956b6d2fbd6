"""Writing files so that a crash at any instant leaves the old content or the new, never half of it."""

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
    """Errors of the operating system inside the block name this file if they name none: those of a write do not.

    Or if they name one beside it whose name begins like ``instead_of``, which no person has given.
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
    """A file of ``most`` bytes, or of fewer.

    Raises:
        OSError: it cannot be read, or is longer (a device may never end).
    """
    with naming(path), path.open("rb") as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, f"more than the {most:,} bytes that are allowed", str(path))
    return content


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write beside the target (readable by nobody else until it is there), flush to the disk, rename over it.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old file is untouched and nothing is left over.
    """
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """A file beside the target, to be written inside the block; then it is flushed to the disk and renamed over it.

    Raises:
        OSError: as :func:`write_atomically`; or there is something under that name which is no file.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # it must not become one
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
    """Have a file's new name on the disk: until then a power cut brings the old content back.

    Where that cannot be done (some file systems, a folder that may not be read) the file is in place all the same.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def free(folder: Path) -> int | None:
    """Bytes that a user may still write to the disk of a folder (which need not be there yet); None if not known."""
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def allocated(path: Path) -> int:
    """Bytes of disk that a file has taken already; 0 for none."""
    with contextlib.suppress(OSError):
        return 512 * path.stat().st_blocks
    return 0


def user_folder(variable: str, otherwise: str) -> Path:
    """``td3-robot`` in the folder of the user's that this environment variable names, or else in the other one.

    (XDG Base Directory Specification.)

    Raises:
        RuntimeError: that is in a home, and there is none.
    """
    return Path(os.environ.get(variable) or otherwise).expanduser() / "td3-robot"
