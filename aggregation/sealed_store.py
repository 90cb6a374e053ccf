"""Values at rest that are not in clear: AES-256-GCM, alone or around another store."""

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


class Sealer:
    """Seals values under a name each, so that none passes for another's."""

    def __init__(self, secret: bytes, context: bytes) -> None:
        """`secret`: 32 bytes, of this party alone. `context`: names what is sealed among all that `secret` seals."""
        # 96-bit nonces at random: far below the 2^32 values of one context after which they could be feared to meet.
        self._cipher = AESGCM(derive_key(secret, LABEL_STORE, context))

    def __repr__(self) -> str:
        return "Sealer(...)"

    def seal(self, name: str, value: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """Raises InputError where the value was sealed with another key, under another name, or altered."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], name.encode())
        except (InvalidTag, ValueError):
            raise InputError(f"'{name}' was not sealed by this party for this place, or was altered") from None


class SealedStore:
    """Seals each value for its slot in this one store. Names of slots and sizes of values stay visible.

    Whoever can write to the disk can still take values away or put a slot's older value back, as with any store that
    is restored from a backup; he cannot read one, change one, or move one to another slot or store.
    """

    def __init__(self, inner: Store, secret: bytes, context: bytes) -> None:
        """See `Sealer`. What `get` and `claim` read raises InputError where it was altered."""
        self._inner, self._sealer = inner, Sealer(secret, context)

    def __repr__(self) -> str:
        return "SealedStore(...)"

    def claim(self, slot: str, value: bytes, settle: bool = True) -> bytes:
        return self._sealer.open(slot, self._inner.claim(slot, self._sealer.seal(slot, value), settle))

    def put(self, slots: Mapping[str, bytes]) -> None:
        self._inner.put({slot: self._sealer.seal(slot, value) for slot, value in slots.items()})

    def get(self, slot: str) -> bytes | None:
        sealed = self._inner.get(slot)
        return None if sealed is None else self._sealer.open(slot, sealed)

    def drop(self, slots: Iterable[str]) -> None:
        self._inner.drop(slots)
