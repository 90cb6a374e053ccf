"""Files: written so that a crash leaves either the old content or the new, read with an error in a line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from secure_fvi.errors import InputError, ProtocolError, RecordError


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """The file holds either its old content or all of the new, whatever happens in between. private: nobody else of the
    machine may read it, at any time."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    # Closed as it is made: whoever opens it before its mode is changed would go on reading.
    opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # as on a full disk, where what was begun would take room as well
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole. Raises InputError where that is impossible."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror}") from None


def read_bytes(path: Path, what: str, most: int = 1 << 20, makes: str = "") -> bytes:
    """The content of a file of at most `most` bytes. Raises InputError that calls it `what`; makes: what makes one."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        hint = f"; {makes} makes one" if makes and isinstance(error, FileNotFoundError) else ""
        raise InputError(f"cannot read {what} '{path}': {error.strerror}{hint}") from None
    if len(content) > most:
        raise InputError(f"{what} '{path}' has more than {most} bytes")
    return content


@contextlib.contextmanager
def own_file(path: Path, remedy: str = "put its newest copy back, or begin another job") -> Iterator[None]:
    """What is wrong with a file of this party's own is no fault of a message, nor of its data: where it is not what the
    party wrote, as one that is empty, raises RecordError, which names the file and what to do."""
    try:
        yield
    except (InputError, ProtocolError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error) if isinstance(error, InputError) else "it is empty or damaged"
        raise RecordError(f"'{path}' is not what was written there: {why}; {remedy}") from error


def own_bytes(path: Path, length: int) -> bytes:
    """A file of this party's own, of so many bytes. Raises RecordError, as `own_file` does, for others."""
    with own_file(path):
        found = path.read_bytes()
        if len(found) != length:
            raise ValueError(f"{len(found)} bytes")
    return found


@contextlib.contextmanager
def own_files() -> Iterator[None]:
    """Likewise of a party's own files whose readers raise InputError that names them and says what to do, as of rosters
    and keys."""
    try:
        yield
    except InputError as error:
        raise RecordError(str(error)) from error


def make_private(folder: Path) -> None:
    """A folder that its owner alone may enter, and so each that is missing above it. One that is there, and this
    user's, is closed to all others. Raises OSError."""
    if not folder.exists():
        if not folder.parent.exists():
            make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        folder.chmod(mode & 0o700)


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
