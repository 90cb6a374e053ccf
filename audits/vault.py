"""Transcripts at rest: ChaCha20-Poly1305 under a key that lies in a file of its own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from secure_fvi.audits.transcript import Transcript
from secure_fvi.errors import InputError
from secure_fvi.files import write_atomically

_LABEL = b"secure-fvi/transcript/1\n"
_NONCE = 12


def new_key(path: Path) -> None:
    """Write a fresh key that only its owner can read. Raises InputError where the file exists."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"'{path}' exists; a key is never written over") from None
    with os.fdopen(handle, "wb") as file:
        file.write(ChaCha20Poly1305.generate_key())


def save(transcript: Transcript, path: Path, key_file: Path) -> None:
    """Encrypt and write, whole or not at all."""
    nonce = os.urandom(_NONCE)
    sealed = _cipher(key_file).encrypt(nonce, transcript.pack(), _LABEL)
    write_atomically(path, _LABEL + nonce + sealed)


def load(path: Path, key_file: Path) -> Transcript:
    """Raises InputError for another key, a changed file, or no transcript at all."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the transcript '{path}': {error.strerror}") from error
    if not raw.startswith(_LABEL):
        raise InputError(f"'{path}' is no transcript")
    nonce, sealed = raw[len(_LABEL) :][:_NONCE], raw[len(_LABEL) + _NONCE :]
    try:
        packed = _cipher(key_file).decrypt(nonce, sealed, _LABEL)
    except (InvalidTag, ValueError):
        raise InputError(f"'{path}' cannot be opened: another key, or a changed file") from None
    return Transcript.unpack(packed)


def _cipher(key_file: Path) -> ChaCha20Poly1305:
    try:
        key = key_file.read_bytes()
        mode = key_file.stat().st_mode
    except OSError as error:
        raise InputError(f"cannot read the key '{key_file}': {error.strerror}; `new_key` makes one") from error
    if len(key) != 32:
        raise InputError(f"'{key_file}' holds {len(key)} bytes, not a key of 32")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"others than its owner can use the key '{key_file}'; set its mode to 600")
    return ChaCha20Poly1305(key)
