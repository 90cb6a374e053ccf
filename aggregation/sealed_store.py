"""A store that keeps nothing in clear: AES-256-GCM around another store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_fvi.aggregation.kdf import derive_key
from secure_fvi.aggregation.store import Store
from secure_fvi.errors import InputError

LABEL_STORE = b"sealed-store"
_NONCE = 12


class SealedStore:
    """Seals each value for its slot in this one store. Names of slots and sizes of values stay visible.

    Whoever can write to the disk can still take values away or put a slot's older value back, as with any store that
    is restored from a backup; he cannot read one, change one, or move one to another slot or store.
    """

    def __init__(self, inner: Store, secret: bytes, context: bytes) -> None:
        """`secret`: 32 bytes, of this party alone. `context`: names the store among those that `secret` seals."""
        self._inner = inner
        # 96-bit nonces at random: far below the 2^32 values of one store after which they could be feared to meet.
        self._cipher = AESGCM(derive_key(secret, LABEL_STORE, context))

    def __repr__(self) -> str:
        return "SealedStore(...)"

    def claim(self, slot: str, value: bytes) -> bytes:
        return self._open(slot, self._inner.claim(slot, self._seal(slot, value)))

    def put(self, slots: Mapping[str, bytes]) -> None:
        self._inner.put({slot: self._seal(slot, value) for slot, value in slots.items()})

    def get(self, slot: str) -> bytes | None:
        """Raises InputError where the value was sealed with another key, for another slot, or altered."""
        sealed = self._inner.get(slot)
        return None if sealed is None else self._open(slot, sealed)

    def drop(self, slots: Iterable[str]) -> None:
        self._inner.drop(slots)

    def _seal(self, slot: str, value: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value, slot.encode())

    def _open(self, slot: str, sealed: bytes) -> bytes:
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], slot.encode())
        except (InvalidTag, ValueError):
            raise InputError(f"slot '{slot}' of the store was not sealed by this party, or was altered") from None
