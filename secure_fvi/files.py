"""Writing files so that a crash leaves either the old content or the new."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """The file holds either its old content or all of the new, whatever happens in between. private: nobody else of the
    machine may read it, at any time."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


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
