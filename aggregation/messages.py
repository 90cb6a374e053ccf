"""The messages of masked sums: MessagePack arrays [version, tag, fields...] of fixed schema.

Members are named by their place in the roster; a set of them is a bitmap of ceil(n/8) bytes, least
significant bit first. Digests and public keys have 32 bytes, signatures 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgpack

from secure_fvi.errors import ProtocolError

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 31

M = TypeVar("M", bound=tuple[Any, ...])
Check = Callable[[Any], bool]


class KeysRequest(NamedTuple):
    """Server to silo: make ephemeral keys for set-up number `attempt`."""

    attempt: int


class KeyAdvert(NamedTuple):
    """Silo to server: its ephemeral X25519 key and the commitment to its nonce, signed with its identity."""

    attempt: int
    public_key: bytes
    nonce_commitment: bytes
    signature: bytes


class KeySet(NamedTuple):
    """Server to silo: everybody's adverts, in roster order."""

    attempt: int
    members: bytes
    public_keys: list[bytes]
    nonce_commitments: list[bytes]
    signatures: list[bytes]


class NonceReveal(NamedTuple):
    """Silo to server: the nonce that its advert committed to, once the key set is fixed."""

    attempt: int
    key_set: bytes
    nonce: bytes


class Nonces(NamedTuple):
    """Server to silo: all members' nonces, which seed the order of the k-regular graph."""

    attempt: int
    nonces: list[bytes]


class DepositRequest(NamedTuple):
    """Server to silo: draw the one-time secrets of a batch of indices."""

    batch: int


class Deposit(NamedTuple):
    """Silo to server: commitments to each b and e, pair seeds sealed under e, shares for each holder; signed."""

    batch: int
    commitments: bytes
    sealed_seeds: bytes
    envelopes: list[bytes]
    signature: bytes


class Deliver(NamedTuple):
    """Server to silo: who deposited, the digest of each deposit, and the shares that the silo is to hold."""

    batch: int
    depositors: bytes
    digests: list[bytes]
    envelopes: list[bytes]


class BatchSignature(NamedTuple):
    """Silo to server: its signature over key set and deposits (empty without the consistency check)."""

    batch: int
    signature: bytes


class Activate(NamedTuple):
    """Server to silo: signatures of enough of the roster on the same batch."""

    batch: int
    signers: bytes
    signatures: list[bytes]


class Contribution(NamedTuple):
    """Silo to server: its masked ring elements."""

    sum_index: int
    payload: bytes


class SignRequest(NamedTuple):
    """Server to silo: sign the survivors of one index (consistency check)."""

    sum_index: int
    survivors: bytes
    table: bytes
    context: bytes


class SetSignature(NamedTuple):
    """Silo to server: its signature over the survivors and over its own contribution's digest."""

    sum_index: int
    contribution: bytes
    signature: bytes


class RevealRequest(NamedTuple):
    """Server to silo: reveal the shares of one index, given enough signatures on the survivors."""

    sum_index: int
    survivors: bytes
    table: bytes
    context: bytes
    signers: bytes
    contributions: list[bytes]
    signatures: list[bytes]


class Shares(NamedTuple):
    """Silo to server: per owner whose shares it holds, one share (32 bytes), or nothing where it has none."""

    sum_index: int
    shares: list[bytes]


class Done(NamedTuple):
    """Silo to server: understood."""


def _uint(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _fixed(length: int) -> Check:
    return lambda value: type(value) is bytes and len(value) == length


def _any_bytes(value: Any) -> bool:
    return type(value) is bytes


def _either(*lengths: int) -> Check:
    return lambda value: type(value) is bytes and len(value) in lengths


def _list(check: Check) -> Check:
    return lambda value: type(value) is list and all(check(v) for v in value)


_32, _64 = _fixed(32), _fixed(64)
_32s, _64s, _bytes_list = _list(_32), _list(_64), _list(_any_bytes)

_SCHEMAS: dict[type[tuple[Any, ...]], tuple[int, tuple[Check, ...]]] = {
    KeysRequest: (1, (_uint,)),
    KeyAdvert: (2, (_uint, _32, _32, _64)),
    KeySet: (3, (_uint, _any_bytes, _32s, _32s, _64s)),
    NonceReveal: (4, (_uint, _32, _32)),
    Nonces: (5, (_uint, _32s)),
    DepositRequest: (6, (_uint,)),
    Deposit: (7, (_uint, _any_bytes, _any_bytes, _bytes_list, _64)),
    Deliver: (8, (_uint, _any_bytes, _32s, _bytes_list)),
    BatchSignature: (9, (_uint, _either(0, 64))),
    Activate: (10, (_uint, _any_bytes, _64s)),
    Contribution: (11, (_uint, _any_bytes)),
    SignRequest: (12, (_uint, _any_bytes, _32, _32)),
    SetSignature: (13, (_uint, _32, _64)),
    RevealRequest: (14, (_uint, _any_bytes, _32, _32, _any_bytes, _32s, _64s)),
    Shares: (15, (_uint, _list(_either(0, 32)))),
    Done: (16, ()),
}


class Codec:
    """Packs and reads the messages of one protocol: `schemas` gives the tag and the field checks of each."""

    def __init__(self, schemas: Mapping[type[tuple[Any, ...]], tuple[int, tuple[Check, ...]]]) -> None:
        self._schemas = schemas
        self._kinds = {tag: kind for kind, (tag, _) in schemas.items()}

    def pack(self, message: tuple[Any, ...]) -> bytes:
        """The bytes of one of the protocol's messages."""
        return bytes(msgpack.packb((VERSION, self._schemas[type(message)][0], *message)))

    def unpack_any(self, data: bytes) -> tuple[Any, ...]:
        """The message that `data` holds; raises ProtocolError, which quotes nothing of it, when it holds none."""
        if not isinstance(data, bytes | bytearray | memoryview) or len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError("a message must be bytes of at most 2 GiB")
        try:
            fields = msgpack.unpackb(data)
        except (ValueError, RecursionError):  # msgpack's own errors are ValueErrors too, and may hold the content
            raise ProtocolError("a message is not well-formed MessagePack") from None
        if type(fields) is not list or len(fields) < 2:
            raise ProtocolError("a message must be an array of version, tag and fields")
        version, tag, *values = fields
        if type(version) is not int or version != VERSION:
            raise ProtocolError(f"a message of another version; this side speaks version {VERSION}")
        kind = self._kinds.get(tag) if type(tag) is int else None
        if kind is None:
            raise ProtocolError("a message of unknown kind")
        checks = self._schemas[kind][1]
        if len(values) != len(checks):
            raise ProtocolError(f"{kind.__name__} needs {len(checks)} fields, got {len(values)}")
        for name, check, value in zip(kind._fields, checks, values, strict=True):  # type: ignore[attr-defined]
            if not check(value):
                raise ProtocolError(f"{kind.__name__}: field '{name}' has the wrong type or length")
        return kind(*values)

    def unpack(self, data: bytes, kind: type[M]) -> M:
        """The message of `kind` that `data` holds; raises ProtocolError otherwise."""
        message = self.unpack_any(data)
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message


_CODEC = Codec(_SCHEMAS)
pack, unpack_any, unpack = _CODEC.pack, _CODEC.unpack_any, _CODEC.unpack
