"""A witness: another party that remembers how long a ledger was, so that a cut tail or an old backup is found out.

    ledger                                   witness (any other party of the job)
    Ledger.statement(since)  <- since ------  Witness.length(public_key)
             ------ statement ------------->  Witness.countersign: does it continue what was seen?
    Ledger.add_receipt       <- receipt ----

A statement carries the digests of the rows after `since`; the witness folds them, from the head that it remembers to
the head that is stated, so it need not trust the silo that one continues the other. It learns the number of
rows, and digests of them; nothing of what was released. A receipt holds what the ledger's owner signed, so that it is
the owner's own word which it is held to: a witness that makes one up convicts itself alone. All messages are bytes of
fixed schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgpack

from secure_fvi import wire
from secure_fvi.aggregation.messages import Codec
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import Store
from secure_fvi.errors import ProtocolError
from secure_fvi.privacy.chain import NOTHING, ChainKind, link, signed
from secure_fvi.privacy.ledger_terms import LEDGER, check_name

_STATEMENT, _RECEIPT = "statement", "receipt"


class Statement(NamedTuple):
    """Ledger to witness: its length and head, signed, and the digests of its rows since + 1 .. length."""

    silo: str
    public_key: bytes
    length: int
    head: bytes
    time: int
    signature: bytes
    since: int
    links: list[bytes]


class Countersignature(NamedTuple):
    """A receipt, witness to ledger and to whoever verifies: the owner stated this, and the witness has seen it."""

    witness: str
    witness_key: bytes
    silo: str
    public_key: bytes
    length: int
    head: bytes
    time: int
    stated: bytes  # the owner's signature of its statement
    signature: bytes  # the witness's


class WitnessFault(ProtocolError):
    """A receipt whose owner never stated what it says: nobody but the witness can have made it."""


_name, _count, _is_32, _is_64 = wire.text(200, 1), wire.whole(), wire.binary(32), wire.binary(64)
_SEEN = wire.Row(_count, _is_32)
#: A ledger may have grown by as many rows since it was seen last.
_MOST_ROWS = wire.Limit(items=1 << 20)

_CODEC = Codec(
    {
        Statement: (1, (_name, _is_32, _count, _is_32, _count, _is_64, _count, wire.Listed(_is_32))),
        Countersignature: (3, (_name, _is_32, _name, _is_32, _count, _is_32, _count, _is_64, _is_64)),
    }
)


def make_statement(
    chain: ChainKind,
    silo: str,
    public_key: bytes,
    length: int,
    head: bytes,
    time: int,
    since: int,
    links: list[bytes],
    sign: Callable[[bytes], bytes],
) -> bytes:
    """The ledger's message. time: microseconds since 1970; links: the digests of rows since + 1 .. length."""
    unsigned = Statement(silo, public_key, length, head, time, b"", since, links)
    return _CODEC.pack(unsigned._replace(signature=sign(chain.label(_STATEMENT) + _stated(unsigned))))


def stated_key(statement: bytes) -> bytes:
    """The public key (32 bytes) of the ledger that `statement` says it is of; whether it is, `countersign` checks."""
    key: bytes = _CODEC.unpack(statement, Statement, _MOST_ROWS).public_key
    return key


def shown_length(data: bytes) -> int:
    """How many rows the receipt `data` says that its witness has seen: not checked."""
    return _CODEC.unpack(data, Countersignature).length


def witness_key(data: bytes) -> bytes:
    """The public key of the witness that the receipt `data` says it is by: not checked."""
    return _CODEC.unpack(data, Countersignature).witness_key


def covers(receipt: bytes, statement: bytes) -> bool:
    """Whether the `receipt` says that its witness has seen all that the `statement` states: neither is checked."""
    said, seen = _CODEC.unpack(statement, Statement, _MOST_ROWS), _CODEC.unpack(receipt, Countersignature)
    return (said.public_key, said.length, said.head) == (seen.public_key, seen.length, seen.head)


def check_receipt(
    data: bytes, witness_keys: frozenset[bytes] | None = None, chain: ChainKind = LEDGER
) -> Countersignature:
    """The receipt in `data`, whose owner and witness both signed it; that the owner's is the key expected, see to it.

    Raises ProtocolError if it is malformed, forged, or by none of `witness_keys`; WitnessFault where the witness signed
    what the owner did not.
    """
    receipt = _CODEC.unpack(data, Countersignature)
    if witness_keys is not None and receipt.witness_key not in witness_keys:
        raise ProtocolError(f"a receipt of witness '{receipt.witness}' is by a key that is not accepted here")
    if not signed(receipt.witness_key, chain.label(_RECEIPT), _received(receipt), receipt.signature):
        raise ProtocolError(f"a receipt of witness '{receipt.witness}' has a wrong signature")
    if not signed(receipt.public_key, chain.label(_STATEMENT), _stated(receipt), receipt.stated):
        raise WitnessFault(
            f"a receipt of witness '{receipt.witness}' (key {receipt.witness_key.hex()[:16]}...) shows "
            f"{receipt.length} rows that silo '{receipt.silo}' never signed: the witness made it up"
        )
    return receipt


class Witness:
    """Countersigns chains of one kind and remembers the longest state of each. One process a store."""

    def __init__(self, name: str, identity: Identity, store: Store, chain: ChainKind = LEDGER) -> None:
        self.name, self._chain = check_name("witness", name), chain
        self._identity, self._store = identity, store

    def __repr__(self) -> str:
        return f"Witness({self.name!r})"

    def length(self, public_key: bytes) -> int:
        """How many rows this witness has seen of the ledger of that key; 0 if it has not met it."""
        return self.seen(public_key)[0]

    def receipt(self, public_key: bytes) -> bytes:
        """The newest receipt for the ledger of that key, by which its owner can check it; empty before any."""
        return self._store.get(self._slot(public_key) + "/receipt") or b""

    def key_of(self, member: str) -> bytes:
        """The key of the ledger that was countersigned last for `member`; empty before any."""
        return self._store.get(self._member(member)) or b""

    def countersign(self, statement: bytes, public_key: bytes, member: str = "") -> bytes:
        """A receipt for `statement` by the ledger of `public_key` (32 bytes, as pinned in the roster); member: whose
        `key_of` that is from now on, where named.

        Raises ProtocolError, and remembers nothing, if it is forged, shorter than what was seen, or does not
        continue it. The new length is on disk before the receipt exists.
        """
        stated = _CODEC.unpack(statement, Statement, _MOST_ROWS)
        who = f"the {self._chain.name} of silo '{stated.silo}'"
        label = self._chain.label(_STATEMENT)
        if stated.public_key != public_key or not signed(public_key, label, _stated(stated), stated.signature):
            raise ProtocolError(f"a statement by {who} is not signed with the key that the roster names")
        length, head = self.seen(public_key)
        if stated.length < length:
            raise ProtocolError(f"{who} was rolled back: it has {stated.length} rows, {length} were seen")
        given = self.receipt(public_key)
        if given and (stated.length, stated.head) == (length, head):  # a statement that comes again
            return given
        if stated.since != length or len(stated.links) != stated.length - length:
            raise ProtocolError(f"a statement by {who} must say how it continues the {length} rows that were seen")
        for content in stated.links:
            head = link(self._chain, head, content)
        if head != stated.head:
            raise ProtocolError(f"{who} contradicts what was seen: it does not continue those {length} rows")
        unsigned = Countersignature(
            self.name,
            self._identity.public_key,
            stated.silo,
            public_key,
            stated.length,
            head,
            stated.time,
            stated.signature,
            b"",
        )
        signature = self._identity.sign(self._chain.label(_RECEIPT) + _received(unsigned))
        receipt = _CODEC.pack(unsigned._replace(signature=signature))
        slot, seen = self._slot(public_key), msgpack.packb([stated.length, head])
        named = {self._member(member): public_key} if member else {}
        self._store.put({slot: bytes(seen), f"{slot}/receipt": receipt, **named})
        return receipt

    def keep(self, public_key: bytes, length: int, head: bytes) -> None:
        """Remember how far the ledger of that key is, which is this party's own: no receipt, `seen` alone."""
        self._store.put({self._slot(public_key): msgpack.packb([length, head])})

    def seen(self, public_key: bytes) -> tuple[int, bytes]:
        """`length`, and the hash of that row."""
        stored = self._store.get(self._slot(public_key))
        if stored is None:
            return 0, NOTHING
        length, head = wire.own(stored, "what this witness saw", _SEEN)
        return length, head

    def _member(self, member: str) -> str:
        return f"{self._chain.name}/of/{member}"

    def _slot(self, public_key: bytes) -> str:
        return f"{self._chain.name}/{public_key.hex()}"


def _stated(s: Statement | Countersignature) -> bytes:
    return bytes(msgpack.packb([s.silo, s.public_key, s.length, s.head, s.time]))


def _received(r: Countersignature) -> bytes:
    return bytes(msgpack.packb(list(r[:-1])))
