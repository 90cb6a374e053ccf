"""Private keys in files: PKCS8 PEM, readable by their owner only, encrypted where a passphrase is given.

A passphrase is stretched by PBKDF2 with 2,048 rounds, which is what PEM gives: it has to be long and random.

One place for every key that a site keeps: the Ed25519 identity that signs rosters, ledgers and logs, and the keys of
TLS certificates. Errors name files and never quote them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import InputError
from secure_fvi.files import sync_folder

PASSPHRASE_VARIABLE = "SECURE_FVI_PASSPHRASE"
_ENCRYPTED = b"BEGIN ENCRYPTED"

PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey


def is_encrypted(path: Path) -> bool:
    """Whether the key in `path` needs a passphrase. Raises InputError where there is no such file."""
    return _ENCRYPTED in _read(path)


def load_private(path: str | os.PathLike[str], passphrase: str | None = None) -> PrivateKey:
    """The key in `path`; passphrase: SECURE_FVI_PASSPHRASE unless given. Raises InputError when there is none."""
    path = Path(path)
    pem = _read(path)
    try:
        key = serialization.load_pem_private_key(pem, _secret(passphrase) if _ENCRYPTED in pem else None)
    except TypeError:
        raise InputError(f"the signing key '{path}' is encrypted; set {PASSPHRASE_VARIABLE}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"'{path}' is no private key in PEM form, or the passphrase is wrong") from None
    if not isinstance(key, PrivateKey):
        raise InputError(f"'{path}' holds a key of another kind than Ed25519 or an elliptic curve")
    return key


def store_private(path: Path, key: PrivateKey, passphrase: str | None = None) -> bool:
    """Write `key` to `path` for good; False, and nothing is changed, where a file was there before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = _secret(passphrase)
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
            sync_folder(path.parent)  # the name must last as long as what needs the key
            return True
    finally:
        part.unlink(missing_ok=True)
    return False


def load_key(path: str | os.PathLike[str], passphrase: str | None = None) -> Identity:
    """The identity in the key file. Raises InputError, which quotes nothing of the file, when there is none."""
    key = load_private(path, passphrase)
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"'{path}' holds a key of another kind; identities and ledgers sign with Ed25519")
    return Identity(key)


def create_key(path: str | os.PathLike[str], passphrase: str | None = None) -> Identity:
    """A new identity, written to `path` (and its public half beside it) for good; the one already there, if any."""
    path = Path(path)
    store_private(path, Ed25519PrivateKey.generate(), passphrase)
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the signing key '{path}': {error.strerror}") from None


def _secret(passphrase: str | None) -> bytes | None:
    if passphrase is None:
        passphrase = os.environ.get(PASSPHRASE_VARIABLE)
    return passphrase.encode() if passphrase else None
