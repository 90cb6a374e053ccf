"""The Ed25519 keys that sign ledgers: one PKCS8 PEM file per silo, readable by its owner only.

The private key lies in `<ledger>.keys/<silo>.pem`, encrypted when a passphrase is given; its public half (32 bytes in
hex) lies beside it in `<silo>.pub`, for those who verify.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from urllib.parse import quote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import InputError

PASSPHRASE_VARIABLE = "SECURE_FVI_PASSPHRASE"


def key_path(ledger: str | os.PathLike[str], silo: str) -> Path:
    """Where the private key of `silo` lies beside `ledger`. Characters that no file name should have are escaped."""
    ledger = Path(ledger)
    return ledger.with_name(ledger.name + ".keys") / (quote(silo, safe=" ") + ".pem")


def load_key(path: str | os.PathLike[str], passphrase: str | None = None) -> Identity:
    """The identity in the key file. Raises InputError, which quotes nothing of the file, when there is none."""
    path = Path(path)
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the signing key '{path}': {error.strerror}") from None
    try:
        key = serialization.load_pem_private_key(pem, _secret(passphrase) if b"BEGIN ENCRYPTED" in pem else None)
    except TypeError:
        raise InputError(f"the signing key '{path}' is encrypted; set {PASSPHRASE_VARIABLE}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"'{path}' is no private key in PEM form, or the passphrase is wrong") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"'{path}' holds a key of another kind; ledgers are signed with Ed25519")
    return Identity(key)


def create_key(path: str | os.PathLike[str], passphrase: str | None = None) -> Identity:
    """A new identity, written to `path` (and its public half beside it) for good; the one already there, if any."""
    path = Path(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, secret = Ed25519PrivateKey.generate(), _secret(passphrase)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption() if secret is None else serialization.BestAvailableEncryption(secret),
    )
    # Written whole under another name, then linked: of two processes one wins, and no one reads half a key.
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
            _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)
    identity = load_key(path, passphrase)
    path.with_suffix(".pub").write_text(identity.public_key.hex() + "\n")
    return identity


def load_public_key(path: str | os.PathLike[str]) -> bytes:
    """The 32 bytes in a .pub file (hex). Raises InputError when they are not there."""
    try:
        key = bytes.fromhex(Path(path).read_text().strip())
    except (OSError, ValueError):
        key = b""
    if len(key) != 32:
        raise InputError(f"'{path}' is no public key: 64 hexadecimal digits, as in '<ledger>.keys/<silo>.pub'")
    return key


def _sync(folder: Path) -> None:
    # The name of the file must last as long as the chain that needs the key.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _secret(passphrase: str | None) -> bytes | None:
    if passphrase is None:
        passphrase = os.environ.get(PASSPHRASE_VARIABLE)
    return passphrase.encode() if passphrase else None
