"""The messages of masked sums: MessagePack arrays [version, tag, fields...] of fixed schema.

Members are named by their place in the roster; a set of them is a bitmap of ceil(n/8) bytes, least
significant bit first. Digests and public keys have 32 bytes, signatures 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgpack

from secure_fvi import wire
from secure_fvi.errors import ProtocolError
from secure_fvi.wire import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from secure_fvi.wire import Check, Limit

#: Which all messages begin with: the version of the protocol in which the form of one last changed. It does not follow
#: `wire.PROTOCOLS`: a release that speaks a version more, and has the forms of this one still, says to who knows this
#: one alone what it understands.
VERSION = 10
_MOST_FIELDS = 64

M = TypeVar("M", bound=tuple[Any, ...])


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
    """Silo to server: the one-time secrets of a batch, closed, and commitments to them; signed.

    commitments: to each b and e. sealed_seeds: pair seeds, under e. seed_rows: for each neighbour, commitments to the
    seeds shared with it, which it commits to as well. share_rows: for each holder, commitments to the shares dealt to
    it. envelopes: for each neighbour, its shares.
    """

    batch: int
    commitments: bytes
    sealed_seeds: bytes
    seed_rows: list[bytes]
    share_rows: list[bytes]
    envelopes: list[bytes]
    signature: bytes


class Deliver(NamedTuple):
    """Server to silo: who deposited, the digest of each deposit, and the shares that the silo is to hold, with the
    digests of the commitments to them."""

    batch: int
    depositors: bytes
    digests: list[bytes]
    envelopes: list[bytes]
    share_digests: list[bytes]


class BatchSignature(NamedTuple):
    """Silo to server: its signature over key set and deposits (empty without the consistency check).

    unheld: the owners of whom it was dealt no shares that fit their commitments, which `complaint` signs in any case.
    """

    batch: int
    unheld: bytes
    signature: bytes
    complaint: bytes


class Activate(NamedTuple):
    """Server to silo: signatures of enough of the roster on the same batch."""

    batch: int
    signers: bytes
    signatures: list[bytes]


class Contribution(NamedTuple):
    """Silo to server: its masked ring elements, signed for this sum, cohort and question (32 bytes, or none)."""

    sum_index: int
    question: bytes
    payload: bytes
    signature: bytes


class SignRequest(NamedTuple):
    """Server to silo: sign the survivors of one index (consistency check).

    A silo that did not contribute knows of cohort and question by the survivors' own signatures alone: `payloads` are
    the digests of what they sent, `proofs` their signatures on it; both are empty for those that contributed.
    """

    sum_index: int
    cohort: bytes
    survivors: bytes
    table: bytes
    context: bytes
    question: bytes
    payloads: list[bytes]
    proofs: list[bytes]


class SetSignature(NamedTuple):
    """Silo to server: its signature over the survivors of one index."""

    sum_index: int
    signature: bytes


class RevealRequest(NamedTuple):
    """Server to silo: reveal the shares of one index, given enough signatures on the survivors.

    Without the consistency check there are none of these, and `payloads` and `proofs` are those of `SignRequest`.
    """

    sum_index: int
    cohort: bytes
    survivors: bytes
    table: bytes
    context: bytes
    question: bytes
    payloads: list[bytes]
    proofs: list[bytes]
    signers: bytes
    signatures: list[bytes]


class Shares(NamedTuple):
    """Silo to server: per owner whose shares it holds, one share (32 bytes), or nothing where it has none.

    With the consistency check a survivor adds what its holders could give together: own, its b, and seeds, those that
    it shares with neighbours that are not among the survivors. The secrets of one that falls silent come from shares.
    """

    sum_index: int
    shares: list[bytes]
    own: bytes
    seeds: list[bytes]


class Done(NamedTuple):
    """Silo to server: understood."""


_uint, _any_bytes = wire.whole(), wire.binary()
_list = wire.Listed


def _fixed(length: int) -> wire.Shape:
    return wire.binary(length)


def _either(*lengths: int) -> wire.Shape:
    return wire.binary(*lengths)


_32, _64 = _fixed(32), _fixed(64)
_32s, _64s, _bytes_list = _list(_32), _list(_64), _list(_any_bytes)

#: Index, cohort, survivors, table, context, question, and what survivors signed of it.
_NAMED: tuple[Check, ...] = (_uint, _any_bytes, _any_bytes, _32, _32, _either(0, 32), _32s, _64s)

_SCHEMAS: dict[type[tuple[Any, ...]], tuple[int, tuple[Check, ...]]] = {
    KeysRequest: (1, (_uint,)),
    KeyAdvert: (2, (_uint, _32, _32, _64)),
    KeySet: (3, (_uint, _any_bytes, _32s, _32s, _64s)),
    NonceReveal: (4, (_uint, _32, _32)),
    Nonces: (5, (_uint, _32s)),
    DepositRequest: (6, (_uint,)),
    Deposit: (7, (_uint, _any_bytes, _any_bytes, _bytes_list, _bytes_list, _bytes_list, _64)),
    Deliver: (8, (_uint, _any_bytes, _32s, _bytes_list, _32s)),
    BatchSignature: (9, (_uint, _any_bytes, _either(0, 64), _64)),
    Activate: (10, (_uint, _any_bytes, _64s)),
    Contribution: (11, (_uint, _either(0, 32), _any_bytes, _64)),
    SignRequest: (12, _NAMED),
    SetSignature: (13, (_uint, _64)),
    RevealRequest: (14, (*_NAMED, _any_bytes, _64s)),
    Shares: (15, (_uint, _list(_either(0, 32)), _either(0, 32), _32s)),
    Done: (16, ()),
}


#: A version of the protocol, and those that a party speaks.
PROTOCOL = wire.whole(2**16, 1)
PROTOCOL_LIST = wire.Listed(PROTOCOL, 16, 1)


class Codec:
    """Packs and reads the messages of one protocol: `schemas` gives the tag and the field checks of each."""

    def __init__(
        self, schemas: Mapping[type[tuple[Any, ...]], tuple[int, tuple[Check, ...]]], version: int = VERSION
    ) -> None:
        """version: which all messages begin with."""
        self._version = version
        self._schemas = {kind: (tag, tuple(map(wire.shape, checks))) for kind, (tag, checks) in schemas.items()}
        self._tests = {kind: tuple(check.test() for check in checks) for kind, (_, checks) in self._schemas.items()}
        self._kinds = {tag: kind for kind, (tag, _) in schemas.items()}

    def pack(self, message: tuple[Any, ...]) -> bytes:
        """The bytes of one of the protocol's messages."""
        return bytes(msgpack.packb((self._version, self._schemas[type(message)][0], *message)))

    def kind_of(self, data: bytes) -> type[tuple[Any, ...]] | None:
        """What kind of message `data` begins as; None for none of this protocol's. Nothing more of it is read."""
        if not isinstance(data, bytes):
            return None
        walk = wire.begun(data[:16], Limit())
        version, tag = (_number(walk) for _ in range(2)) if wire.array(walk) else (-1, -1)
        return self._kinds.get(tag) if version == self._version else None

    def unpack_any(self, data: bytes, limit: Limit | None = None) -> tuple[Any, ...]:
        """The message that `data` holds; raises ProtocolError, which quotes nothing of it, when it holds none.

        limit: what the receiver knows of its length beforehand. What is out of shape is refused before it is built.
        """
        return self._unpacked(data, tuple, limit or Limit())

    def unpack(self, data: bytes, kind: type[M], limit: Limit | None = None) -> M:
        """The message of `kind` that `data` holds; raises ProtocolError otherwise."""
        message: M = self._unpacked(data, kind, limit or Limit())  # type: ignore[assignment]
        return message

    def _unpacked(self, data: bytes, wanted: type[tuple[Any, ...]], limit: Limit) -> tuple[Any, ...]:
        walk = wire.begun(data, limit)
        long = len(data) > wire.SHORT
        fields = self._begun(walk) if long else _built(data)
        if type(fields) is not list or len(fields) < 2:
            raise ProtocolError("a message must be an array of version, tag and fields")
        version, tag, *values = fields
        if type(version) is not int or version != self._version:
            said = f"version {version}" if type(version) is int else "no version"
            raise ProtocolError(f"a message of {said}; this side speaks version {self._version}")
        kind = self._kinds.get(tag) if type(tag) is int else None
        if kind is None:
            raise ProtocolError("a message of unknown kind")
        if not issubclass(kind, wanted):
            raise ProtocolError(f"expected {wanted.__name__}, got {kind.__name__}")
        checks, names = self._schemas[kind][1], kind._fields  # type: ignore[attr-defined]
        if len(values) != len(checks):
            raise ProtocolError(f"{kind.__name__} needs {len(checks)} fields, got {len(values)}")
        if long:
            for name, check in zip(names, checks, strict=True):
                if not wire.fits(walk, check):
                    raise _wrong(kind, name)
            if not wire.ended(walk):
                raise ProtocolError("a message is not well-formed MessagePack")
            values = _built(data)[2:]
        for name, test, value in zip(names, self._tests[kind], values, strict=True):
            if not test(value) or (type(value) is list and len(value) > limit.items):
                raise _wrong(kind, name)
        return kind(*values)

    def _begun(self, walk: wire.Walk) -> Any:
        """Version and tag of a long message, and nothing in the place of its fields; the walk is before these."""
        count = wire.array(walk)
        if count is None or not 2 <= count <= _MOST_FIELDS:
            return None
        return [_number(walk), _number(walk), *[None] * (count - 2)]


def _built(data: bytes) -> Any:
    try:
        return wire.built(data)
    except (
        ValueError,
        RecursionError,
        TypeError,
    ):  # msgpack's own errors may hold the content
        raise ProtocolError("a message is not well-formed MessagePack") from None


def _wrong(kind: type[tuple[Any, ...]], name: str) -> ProtocolError:
    return ProtocolError(f"{kind.__name__}: field '{name}' has the wrong type or length")


def _number(walk: wire.Walk) -> int:
    """The small whole number that stands next; -1 for anything else, such as one written longer than it has to be."""
    at = walk.at
    return walk.data[at] if wire.fits(walk, _uint) and walk.at == at + 1 and walk.data[at] < 128 else -1


_CODEC = Codec(_SCHEMAS)
pack, unpack_any, unpack = _CODEC.pack, _CODEC.unpack_any, _CODEC.unpack
