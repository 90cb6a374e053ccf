"""A party's chain of rows: what a row is, how rows hang together, how a chain is read.

    content  = SHA-256(label, party, seq, time, kind, body)
    hash     = SHA-256(label, hash of the row before, content)
    signature = Ed25519 over (label, hash), by the key that row 1 (`genesis`) names

Rows are counted from 1. The head's signature therefore answers for every row before it, and a kind of chain may leave
all but the last row of a write unsigned; the contents' digests alone prove that one head continues another (`witness`).
A body is MessagePack, hashed as the bytes that are stored. The privacy ledger is one chain, the log of what was asked
and what left another: labels keep them apart under one key.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from secure_fvi import wire
from secure_fvi.aggregation.prg import hashed
from secure_fvi.errors import InputError, ProtocolError

#: What the first row follows.
NOTHING = bytes(32)
#: Kinds of row that every chain has: its first, and what a witness said of it.
GENESIS, RECEIPT = "genesis", "receipt"
_BODY = wire.Anything(1 << 17, 8)
_UNSIGNED = "its signature is not by this silo's key"


class ChainKind(NamedTuple):
    """What a chain is for. `name` enters every label, so that a row of one kind never passes for one of another."""

    name: str
    remedy: str  # said where a file is missing
    on_failure: str  # said where a row could not be written
    otherwise: str  # what to do where the newest rows are lost for good
    each_signed: bool = True  # otherwise only the last row of each write, which reaches the file as a whole

    def label(self, use: str) -> bytes:
        """The label under which `use` is hashed or signed."""
        return f"secure-fvi/{self.name}/1/{use}".encode()


class Row(NamedTuple):
    """One row of one party's chain. time: microseconds since 1970, UTC."""

    seq: int
    previous: bytes
    time: int
    kind: str
    body: bytes
    hash: bytes
    signature: bytes

    def content(self, chain: ChainKind, party: str) -> bytes:
        """The digest of what the row says: 32 bytes."""
        said = msgpack.packb([party, self.seq, self.time, self.kind, self.body])
        return hashed(chain.label("content"), said)

    def fields(self) -> dict[str, Any]:
        """What the row says. Raises ProtocolError when its body is no MessagePack table."""
        try:
            body = wire.decode(self.body, _BODY)
        except ProtocolError:
            body = None
        if not isinstance(body, dict):
            raise ProtocolError("its content is not well-formed")
        return body


def link(chain: ChainKind, previous: bytes, content: bytes) -> bytes:
    """The hash of the row whose content has this digest and which follows the row of hash `previous`."""
    return hashed(chain.label("link"), previous, content)


def make_row(
    chain: ChainKind, party: str, seq: int, previous: bytes, time: int, kind: str, body: dict[str, Any]
) -> Row:
    """The next row, not signed yet."""
    row = Row(seq, previous, time, kind, bytes(msgpack.packb(body)), b"", b"")
    return row._replace(hash=link(chain, previous, row.content(chain, party)))


def signed(public_key: bytes, label: bytes, statement: bytes, signature: bytes) -> bool:
    """Whether the holder of `public_key` (32 bytes) signed `statement` under `label`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, label + statement)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


class ChainReader(ABC):
    """One party's chain up to its row `length`: takes in row after row and checks how they hang together."""

    def __init__(self, kind: ChainKind, silo: str) -> None:
        self.kind, self.silo = kind, silo
        self.public_key = b""
        self.length, self.head, self.time = 0, NOTHING, 0
        self.receipts: list[bytes] = []
        self._head_signature = b""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(silo={self.silo!r}, length={self.length}, head={self.head.hex()[:16]})"

    @abstractmethod
    def apply(self, row: Row, fields: dict[str, Any]) -> None:
        """Take in what a row says that not every chain has. Raises ProtocolError, or InputError for an unknown kind."""

    def follow(self, row: Row, public_key: bytes | None = None, each_signature: bool = False) -> None:
        """Take in the next row.

        public_key: pins the key that the chain must have been created with. each_signature: check this row's
        signature too, where its kind of chain asks for one. `check_head` must follow the last row. Raises ProtocolError
        (InputError for a kind or event that this version does not know), naming the row and what is wrong with it.
        """
        try:
            self._check(row)
            if row.seq == 1:
                self._genesis(row, public_key)
            asked = row.signature or self.kind.each_signed
            if each_signature and asked and not self._signed(row.hash, row.signature):
                raise ProtocolError(_UNSIGNED)
            fields = row.fields()
            if row.kind == RECEIPT:
                self._receipt(fields)
            elif row.kind != GENESIS:
                self.apply(row, fields)
        except InputError as error:
            raise InputError(f"{self.where(row.seq)}: {error}") from None
        except ProtocolError as error:
            raise ProtocolError(f"{self.where(row.seq)}: {error}") from None
        self.length, self.head, self.time, self._head_signature = row.seq, row.hash, row.time, row.signature

    def check_head(self) -> None:
        """Raises ProtocolError unless the party signed the head, and with it every row before."""
        if self.length and not self._signed(self.head, self._head_signature):
            raise ProtocolError(f"{self.where(self.length)}: {_UNSIGNED}")

    def where(self, seq: int) -> str:
        """The row, for messages."""
        return f"{self.kind.name} of silo '{self.silo}', row {seq}"

    def _signed(self, digest: bytes, signature: bytes) -> bool:
        return signed(self.public_key, self.kind.label("row"), digest, signature)

    def _check(self, row: Row) -> None:
        if row.seq != self.length + 1:
            raise ProtocolError(f"row {self.length + 1} is missing: a row was removed")
        if row.previous != self.head:
            raise ProtocolError("it does not follow the row before: rows were altered, removed or reordered")
        if link(self.kind, self.head, row.content(self.kind, self.silo)) != row.hash:
            raise ProtocolError("its content is not what was hashed: it was altered or moved")
        if (type(row.time), type(row.kind), type(row.body)) != (int, str, bytes):  # SQLite keeps any type in any column
            raise ProtocolError("its content is not well-formed")
        if not is_time(row.time):
            raise ProtocolError("its time is no date")
        if row.time < self.time:
            raise ProtocolError("its time is before that of the row before")
        if (row.kind == GENESIS) != (row.seq == 1):
            raise ProtocolError("a chain has one genesis row, its first")

    def _genesis(self, row: Row, public_key: bytes | None) -> None:
        fields = row.fields()
        check_keys(fields, "silo", "public_key")
        key = fields["public_key"]
        if fields["silo"] != self.silo or type(key) is not bytes or len(key) != 32:
            raise ProtocolError("a genesis row names its silo and a public key of 32 bytes")
        if public_key is not None and key != public_key:
            raise ProtocolError(f"the chain belongs to key {key.hex()[:16]}..., not to {public_key.hex()[:16]}...")
        self.public_key = key

    def _receipt(self, fields: dict[str, Any]) -> None:
        check_keys(fields, "receipt")
        if type(fields["receipt"]) is not bytes:
            raise ProtocolError("a receipt is bytes")
        self.receipts.append(fields["receipt"])


def check_keys(body: object, *names: str) -> None:
    """Raises InputError unless `body` is a table of exactly `names`."""
    if not isinstance(body, Mapping) or set(body) != set(names):
        raise InputError(f"a row's content must have the fields {', '.join(names)}")


def is_time(microseconds: object) -> bool:
    """Whether a row may be of this time: from 1970 to the last year that dates have."""
    return type(microseconds) is int and 0 <= microseconds < 253_402_300_800_000_000  # of the year 10000


def timestamp(microseconds: int) -> str:
    """The time of a row, for people: UTC, to the second."""
    if not is_time(microseconds):  # of a row that nobody has checked
        return f"{'no date':23}"
    return datetime.datetime.fromtimestamp(microseconds / 1e6, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
