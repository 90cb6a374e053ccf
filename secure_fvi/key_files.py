"""Private keys in files: PKCS8 PEM, readable by their owner only, encrypted unless somebody says otherwise.

A passphrase is stretched by PBKDF2 with 2,048 rounds, which is what PEM gives: it has to be long and random.

One place for every key that a site keeps: the Ed25519 identity that signs rosters, ledgers and logs, and the keys of
TLS certificates. Errors name files and never quote them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import InputError
from secure_fvi.files import sync_folder, write_atomically

PASSPHRASE_VARIABLE = "SECURE_FVI_PASSPHRASE"
#: Names a file that holds the passphrase, readable by its owner alone: a secret that the system mounts, say.
KEY_FILE_VARIABLE = "SECURE_FVI_KEY_FILE"
_ENCRYPTED = b"BEGIN ENCRYPTED"

PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey


class TlsFiles(NamedTuple):
    """PEM: private key, certificate, and the certificates of those who may stand at the other end. The key does not
    show in a repr."""

    private_key: bytes
    certificate: bytes
    trusted: bytes

    def __repr__(self) -> str:
        return "TlsFiles(...)"


def is_encrypted(path: Path) -> bool:
    """Whether the key in `path` needs a passphrase. Raises InputError where there is no such file."""
    return _ENCRYPTED in _read(path)


def load_private(path: str | os.PathLike[str], passphrase: str | None = None) -> PrivateKey:
    """The key in `path`; passphrase: the environment's unless given. Raises InputError when there is none."""
    path = Path(path)
    pem = _read(path)
    secret = _secret(passphrase) if _ENCRYPTED in pem else None  # a key file that cannot be read says so itself
    try:
        key = serialization.load_pem_private_key(pem, secret)
    except TypeError:
        raise InputError(
            f"the signing key '{path}' is encrypted; set {PASSPHRASE_VARIABLE} or {KEY_FILE_VARIABLE}"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"'{path}' is no private key in PEM form, or the passphrase is wrong") from None
    if not isinstance(key, PrivateKey):
        raise InputError(f"'{path}' holds a key of another kind than Ed25519 or an elliptic curve")
    return key


def store_private(path: Path, key: PrivateKey, passphrase: str | None = None, unsealed: bool = False) -> bool:
    """Write `key` to `path` for good; False, and nothing is changed, where a file was there before.

    Raises InputError where there is no passphrase, unless the key may lie there `unsealed`.
    """
    secret = check_sealed(passphrase, unsealed)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption() if secret is None else serialization.BestAvailableEncryption(secret),
    )
    # Written whole under another name, then linked: of two processes one wins, and no one reads half a key.
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
            sync_folder(path.parent)  # the name must last as long as what needs the key
            return True
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):  # of a folder that may not be entered
            part.unlink(missing_ok=True)
    return False


def check_sealed(passphrase: str | None, unsealed: bool) -> bytes | None:
    """What new keys are encrypted with. Raises InputError where there is nothing, unless they may lie `unsealed`."""
    secret = _secret(passphrase)
    if secret is None and not unsealed:
        raise InputError(
            f"new private keys need a passphrase: set {PASSPHRASE_VARIABLE} or {KEY_FILE_VARIABLE}, or ask for it with "
            "--ask-passphrase; --unsealed leaves them readable to whoever reads the disk or a backup"
        )
    return secret


def seal(path: Path, passphrase: str | None = None) -> bool:
    """Encrypt the key in `path`, which lies there unsealed, in place; False where it is encrypted already."""
    if is_encrypted(path):
        return False
    key, secret = load_private(path), check_sealed(passphrase, False)
    assert secret is not None
    encrypted = serialization.BestAvailableEncryption(secret)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)
    write_atomically(path, pem, private=True)
    return True


def load_key(path: str | os.PathLike[str], passphrase: str | None = None) -> Identity:
    """The identity in the key file. Raises InputError, which quotes nothing of the file, when there is none."""
    key = load_private(path, passphrase)
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"'{path}' holds a key of another kind; identities and ledgers sign with Ed25519")
    return Identity(key)


def create_key(path: str | os.PathLike[str], passphrase: str | None = None, unsealed: bool = False) -> Identity:
    """A new identity, written to `path` (and its public half beside it) for good; the one already there, if any."""
    path = Path(path)
    store_private(path, Ed25519PrivateKey.generate(), passphrase, unsealed)
    identity = load_key(path, passphrase)
    try:
        path.with_suffix(".pub").write_text(identity.public_key.hex() + "\n")
    except OSError as error:
        raise InputError(f"cannot write '{path.with_suffix('.pub')}': {error.strerror}") from None
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


def key_path(ledger: str | os.PathLike[str], silo: str) -> Path:
    """Where the private key of `silo` lies beside `ledger`. Characters that no file name should have are escaped."""
    ledger = Path(ledger)
    return ledger.with_name(ledger.name + ".keys") / (quote(silo, safe=" ") + ".pem")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the signing key '{path}': {error.strerror}") from None


def given_passphrase() -> str | None:
    """The environment's: the variable's, or what is in the key file that another names."""
    return os.environ.get(PASSPHRASE_VARIABLE) or _from_key_file(os.environ.get(KEY_FILE_VARIABLE))


def _secret(passphrase: str | None) -> bytes | None:
    if passphrase is None:
        passphrase = given_passphrase()
    return passphrase.encode() if passphrase else None


def _from_key_file(name: str | None) -> str | None:
    """The first line of the file `name`. Raises InputError where it is not there, is empty, or others may read it."""
    if not name:
        return None
    path = Path(name)
    try:
        if path.stat().st_mode & 0o077:
            raise InputError(f"{KEY_FILE_VARIABLE}: others than its owner may read '{path}'; run: chmod 600 '{path}'")
        found = path.read_text().partition("\n")[0].strip()
    except OSError as error:
        raise InputError(f"{KEY_FILE_VARIABLE}: cannot read '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        found = ""
    if not found:
        raise InputError(f"{KEY_FILE_VARIABLE}: the first line of '{path}' must be a passphrase, as text")
    return found
