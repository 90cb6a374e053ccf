"""The messages that homomorphic sums add to those of masked sums: between server, key holder and silos."""

from __future__ import annotations

from typing import NamedTuple

from secure_fvi import wire
from secure_fvi.aggregation.messages import (
    Codec,
    Done,
    _32,
    _64,
    _64s,
    _any_bytes,
    _either,
    _list,
    _uint,
)

#: A public context has about 0.54 MB.
MAX_KEY_BYTES = 1 << 20


class HolderKeyRequest(NamedTuple):
    """Server to key holder: send your public key."""


class HolderKey(NamedTuple):
    """Key holder to server, and on to each silo: its public encryption key, signed with its identity."""

    public_key: bytes
    signature: bytes


class Ciphertexts(NamedTuple):
    """A vector over as many ciphertexts as it needs: the payload of a contribution."""

    parts: list[bytes]


class DecryptRequest(NamedTuple):
    """Server to key holder: decrypt the total of one index, given enough signatures on its survivors."""

    sum_index: int
    key_set: bytes
    batch: bytes
    cohort: bytes
    survivors: bytes
    table: bytes
    context: bytes
    question: bytes
    signers: bytes
    signatures: list[bytes]
    size: int
    parts: list[bytes]


class Decrypted(NamedTuple):
    """Key holder to server: the total's slots as little-endian int64, signed with its identity."""

    sum_index: int
    values: bytes
    signature: bytes


#: Each far below a megabyte; so many hold 33 million values.
_ciphertexts = _list(wire.binary(most=1 << 20), 4096)

_CODEC = Codec(
    {
        Done: (16, ()),
        HolderKeyRequest: (32, ()),
        HolderKey: (33, (wire.binary(most=MAX_KEY_BYTES), _64)),
        Ciphertexts: (34, (_ciphertexts,)),
        DecryptRequest: (
            35,
            (
                *(_uint, _32, _32, _any_bytes, _any_bytes, _32, _32, _either(0, 32)),
                *(_any_bytes, _64s, _uint, _ciphertexts),
            ),
        ),
        Decrypted: (36, (_uint, _any_bytes, _64)),
    }
)
pack, unpack_any, unpack, kind_of = _CODEC.pack, _CODEC.unpack_any, _CODEC.unpack, _CODEC.kind_of
