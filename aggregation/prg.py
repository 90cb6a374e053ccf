"""Masks from keys: the AES-256-CTR keystream, added to or subtracted from ring elements."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from secure_fvi.aggregation.ring import RingArray

#: Bytes of keystream at a time: accumulator, keystream and zeros stay in the second-level cache together.
CHUNK_BYTES = 1 << 17
_ZEROS = bytes(CHUNK_BYTES)
_START = modes.CTR(bytes(16))


class Mask(NamedTuple):
    """One keystream and its sign. A key is used for one sum only, so the counter starts at zero."""

    key: bytes  # 32 bytes, secret
    negative: bool

    def __repr__(self) -> str:
        return "Mask(...)"


def keystream(key: bytes, length: int) -> bytes:
    """`length` bytes of the AES-256-CTR keystream of a one-time `key` (32 bytes), counter from zero."""
    zeros = _ZEROS[:length] if length <= CHUNK_BYTES else bytes(length)
    return Cipher(algorithms.AES(key), _START).encryptor().update(zeros)


def apply_masks(values: RingArray, masks: Sequence[Mask]) -> None:
    """Add each mask to `values` (contiguous) in place, modulo 2^w."""
    if values.nbytes <= CHUNK_BYTES:
        zeros = _ZEROS[: values.nbytes]
        for key, negative in masks:
            stream = Cipher(algorithms.AES(key), _START).encryptor().update(zeros)
            (np.subtract if negative else np.add)(values, np.frombuffer(stream, values.dtype), out=values)
        return
    MaskStream(masks, values.dtype).apply_all(values)


class MaskStream:
    """Several keystreams, advanced together chunk by chunk over one long vector."""

    def __init__(self, masks: Sequence[Mask], dtype: np.dtype[np.generic]) -> None:
        self._encryptors = [
            (Cipher(algorithms.AES(m.key), _START).encryptor(), np.subtract if m.negative else np.add) for m in masks
        ]
        self._buffer = bytearray(CHUNK_BYTES + 15)
        self._stream = np.frombuffer(self._buffer, dtype, CHUNK_BYTES // dtype.itemsize)
        self.chunk = CHUNK_BYTES // dtype.itemsize

    def apply(self, part: RingArray) -> None:
        """Mask the next at most `chunk` elements in place."""
        zeros = _ZEROS if part.nbytes == CHUNK_BYTES else _ZEROS[: part.nbytes]
        stream = self._stream[: part.size]
        for encryptor, operation in self._encryptors:
            encryptor.update_into(zeros, self._buffer)
            operation(part, stream, out=part)

    def apply_all(self, values: RingArray) -> None:
        """Mask all of `values` in place."""
        for start in range(0, values.size, self.chunk):
            self.apply(values[start : start + self.chunk])


# ---- Key derivation: one labelled HKDF-SHA256 that both sides of every derivation call ----

_SALT = hashlib.sha256(b"secure-fvi/masked-sum/1").digest()
_SHA256 = hashes.SHA256()

#: Domain separation: what a derived key is for. Every label is used by one function only.
LABEL_MASK = b"mask"
LABEL_PAIR_SEEDS = b"pair-seeds"
LABEL_ENVELOPE = b"envelope"
LABEL_SEALED_SEEDS = b"sealed-seeds"
LABEL_WHOLE_MASK = b"whole-mask"
LABEL_OWN_MASK = b"own-mask"


def derive_key(secret: bytes, label: bytes, *fields: bytes) -> bytes:
    """A 32-byte key from a 32-byte `secret`, bound to `label` and to `fields`, each with its length."""
    parts = [len(label).to_bytes(2, "big"), label]
    for f in fields:
        parts.append(len(f).to_bytes(4, "big"))
        parts.append(f)
    return HKDF(_SHA256, 32, _SALT, b"".join(parts)).derive(secret)


def digest(label: bytes, *fields: bytes) -> bytes:
    """`hashed` for what masked sums sign and name."""
    return hashed(label, *fields, of=b"secure-fvi/masked-sum/1/")


def hashed(label: bytes, *fields: bytes, of: bytes = b"") -> bytes:
    """SHA-256 over `label` and `fields`, each with its length: 32 bytes, injective in its arguments."""
    state = hashlib.sha256(of + len(label).to_bytes(2, "big") + label)
    for f in fields:
        state.update(len(f).to_bytes(8, "big"))
        state.update(f)
    return state.digest()
