"""Key derivation: one labelled HKDF-SHA256 that both sides of every derivation call."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_SALT = hashlib.sha256(b"secure-fvi/masked-sum/1").digest()
_SHA256 = hashes.SHA256()

#: Domain separation: what a derived key is for. Every label is used by one function only.
LABEL_MASK = b"mask"
LABEL_PAIR_SEEDS = b"pair-seeds"
LABEL_ENVELOPE = b"envelope"
LABEL_SEALED_SEEDS = b"sealed-seeds"


def derive_key(secret: bytes, label: bytes, *fields: bytes) -> bytes:
    """A 32-byte key from a 32-byte `secret`, bound to `label` and to `fields`, each with its length."""
    parts = [len(label).to_bytes(2, "big"), label]
    for f in fields:
        parts.append(len(f).to_bytes(4, "big"))
        parts.append(f)
    return HKDF(_SHA256, 32, _SALT, b"".join(parts)).derive(secret)


def digest(label: bytes, *fields: bytes) -> bytes:
    """SHA-256 over `label` and `fields`, each with its length: 32 bytes, injective in its arguments."""
    state = hashlib.sha256(b"secure-fvi/masked-sum/1/" + len(label).to_bytes(2, "big") + label)
    for f in fields:
        state.update(len(f).to_bytes(8, "big"))
        state.update(f)
    return state.digest()
