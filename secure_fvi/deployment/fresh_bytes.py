"""A silo's fresh bytes from JOIN to OPEN, kept for a process that ends in between; they open one session, once."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from secure_fvi.deployment.holding import boot_id
from secure_fvi.files import sync_folder, write_atomically

_SIZE = 32


class FreshBytes:
    """In `path`, with the system's boot id: a file that a restart of the machine brought back is not used."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def draw(self) -> bytes:
        """32 bytes that no session has rested on."""
        fresh = os.urandom(_SIZE)
        write_atomically(self._path, fresh + boot_id())
        return fresh

    def take(self, named: bytes) -> bool:
        """Whether `named` are the bytes drawn last, which then are used up."""
        kept = self._path.read_bytes() if self._path.exists() else b""
        if not hmac.compare_digest(kept[:_SIZE], named) or kept[_SIZE:] != boot_id():
            return False
        self._path.unlink()
        sync_folder(self._path.parent)
        return True
