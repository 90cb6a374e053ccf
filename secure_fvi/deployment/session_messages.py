"""How a job begins and ends at a silo or key holder: MessagePack of a fixed schema, behind one byte that says which;
and what the sums of its session are bound to.

server                                silo
JOIN + signed job offer         ->    decides, reads its data
                                <-    Joined(schema of its data, 32 fresh bytes, session that it has)
MATCH + a message of matching   ->    of a vertical job alone: finds the people that all hold (`secure_fvi.alignment`)
                                <-    its answer
KNOWN + Known(response)         ->    of a vertical job whose response is shared
                                <-    Learned(its digest)
KNOWN + Wanted(silo, its key)   ->    to the silo that has the response, where the server is not to see it
                                <-    Told(the response, sealed for that silo)
KNOWN + Told                    ->    to that silo
                                <-    Learned(its digest)
OPEN + Open(all fresh bytes)    ->    opens the session
                                <-    Opened(session)
... rounds ...
END + End(posterior)            ->    keeps its own posterior, closes the job
                                <-    Ended()

A key holder has no data and gets no posterior: its schema is empty, and its fresh bytes are the hash of a new
encryption key. Between OPEN and END it is asked for that key and for totals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgpack
import torch
from safetensors.torch import save
from torch import Tensor

from secure_fvi import wire
from secure_fvi.aggregation.base import BlockTable, Seat, SecureSum, SumSilo
from secure_fvi.aggregation.messages import PROTOCOL, PROTOCOL_LIST, Codec
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import Store
from secure_fvi.deployment.consortium import ConsortiumRoster, Member, session_id
from secure_fvi.deployment.trail import BROADCAST
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.federated_model import Schema
from secure_fvi.messages import ROUND, SUM

#: First byte of what the server sends; `messages.ROUND` and `messages.SUM` are the others.
JOIN, OPEN, END, MATCH, KNOWN = b"J", b"O", b"E", b"M", b"K"
#: What each message is called in a paper trail.
STEPS = {
    JOIN: "join", MATCH: "matching", KNOWN: "response", OPEN: "open", END: "end", ROUND: BROADCAST, SUM: "secure sum",
}  # fmt: skip

_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)}
_PLAIN = (bool, int, float, str)


class Joined(NamedTuple):
    """last_index: the largest sum index that the silo's ledger has charged for the job, plus one; 0 for none.

    nonce: at a key holder, `key_holder.key_hash` of the encryption key that it offers. protocols: the versions that the
    site speaks. policy: `deciding.stated_policy`, for the server's report.
    """

    schema: bytes
    nonce: bytes
    session: bytes
    last_index: int
    protocols: Sequence[int] = wire.PROTOCOLS
    policy: bytes = bytes(32)


class Open(NamedTuple):
    """The session of these silos, each with its fresh bytes. decided: the last sum that the server knows.

    holder: the key holder's fresh bytes, nothing where the sums need none. min_cohort, max_missing: of the sums, for
    the key holder, who does not know the model from which it follows under differential privacy; signatures bind it.
    protocol: the version in which the job goes on, of those that the offer names the highest that all speak.
    """

    silos: list[str]
    nonces: list[bytes]
    schema: bytes
    decided: int
    holder: bytes = b""
    min_cohort: int = 0
    max_missing: int = 0
    protocol: int = wire.PROTOCOLS[-1]


class Opened(NamedTuple):
    session: bytes


class End(NamedTuple):
    """outcome: of `deciding.OUTCOMES`. accepted: the last sum used with this silo's term; posterior: safetensors,
    everyone may see it."""

    outcome: str
    accepted: int
    posterior: bytes


class Ended(NamedTuple):
    """Nothing more: the silo's own posterior stays there."""


class Known(NamedTuple):
    """response: safetensors of y and offset, (N,) each, of the people in their common order; all parties see it."""

    response: bytes


class Learned(NamedTuple):
    """digest: SHA-256 of the response as it was told; the session is bound to it (`columns_schema`)."""

    digest: bytes


class Wanted(NamedTuple):
    """silo: to whom the response is to be told; key: X25519, 32 bytes, for this job alone; signature: on it, of the
    silo's identity."""

    silo: str
    key: bytes
    signature: bytes


class Told(NamedTuple):
    """sealed: by HPKE, for one silo, what `Known` holds with 32 bytes at random, so that its digest says nothing of it;
    signature: on that digest, of the identity of the silo that has the response."""

    sealed: bytes
    signature: bytes


#: A schema describes one record and what all silos share; it is no place for data.
_LONGEST_SCHEMA = 64 << 20
_hash, _hash_or_none, _index, _text = wire.binary(32), wire.binary(0, 32), wire.whole(), wire.text(200, 1)
_signature = wire.binary(64)
_texts, _hashes = wire.Listed(_text), wire.Listed(_hash)
_SCHEMA = wire.Row(
    wire.Listed(wire.Row(_text, wire.Listed(wire.whole(2**40), 16), _text)), wire.Mapped(wire.plain), wire.binary()
)

CODEC = Codec(
    {
        Joined: (1, (wire.binary(most=_LONGEST_SCHEMA), _hash, _hash_or_none, _index, PROTOCOL_LIST, _hash)),
        Open: (2, (_texts, _hashes, _hash, _index, _hash_or_none, _index, _index, PROTOCOL)),
        Opened: (3, (_hash,)),
        End: (4, (_text, _index, wire.binary())),
        Ended: (5, ()),
        Known: (6, (wire.binary(),)),
        Learned: (7, (_hash,)),
        Wanted: (8, (_text, _hash, _signature)),
        Told: (9, (wire.binary(), _signature)),
    }
)


def columns_schema(people: int, order: bytes, response: bytes = b"") -> Schema:
    """What stands for a schema in a vertical job, whose silos have none in common: how many people, the digest of their
    order, and that of a response that all silos know."""
    return Schema((), {"people": people, "order": order.hex(), "response": response.hex()})


def pack_schema(schema: Schema) -> bytes:
    """Names, types and shapes of one record's tensors, and the values that all silos share. No number of records.

    Raises InputError for a shared value that is neither a tensor nor a plain value.
    """
    plain, tensors = {}, {}
    for name, value in sorted(schema.constants.items()):
        if isinstance(value, Tensor):
            tensors[name] = value.detach().cpu().contiguous()
        elif type(value) in _PLAIN or value is None:
            plain[name] = value
        else:
            raise InputError(
                f"shared value '{name}' is a {type(value).__name__}; between silos it must be a tensor, "
                "a number, a truth value or text"
            )
    fields = [[name, list(shape), str(dtype)] for name, shape, dtype in schema.fields]
    packed: bytes = msgpack.packb([fields, plain, save(tensors)])
    return packed


def unpack_schema(packed: bytes) -> Schema:
    """The inverse of `pack_schema`. Raises ProtocolError for anything else."""
    fields, plain, packed_tensors = wire.decode(packed, _SCHEMA, wire.Limit(_LONGEST_SCHEMA), "a schema")
    if any(dtype not in _DTYPES for _, _, dtype in fields):
        raise ProtocolError("a malformed schema")
    read = tuple((name, tuple(shape), _DTYPES[dtype]) for name, shape, dtype in fields)
    constants = {**plain, **wire.tensors(packed_tensors, "a schema")}
    return Schema(read, constants)


def schema_digest(schema: Schema) -> bytes:
    """32 bytes by which silos compare their schemas."""
    return hashlib.sha256(b"secure-fvi/schema/1/" + pack_schema(schema)).digest()


# ---- What binds the parties of a session's sums, server, silos and key holder, to one roster of that session ----
#
# Homomorphic sums need the roster's one member with the role "holder". Each session has a fresh encryption key, made at
# the holder; its hash is one of the fresh bytes that name the session, and the holder's identity, which the
# consortium's signed roster names, signs the session's roster: a silo encrypts under no key that anybody else chose.


def key_holder_of(roster: ConsortiumRoster) -> Member:
    """The consortium's key holder. Raises InputError unless there is one and no more."""
    found = roster.of_role("holder")
    if len(found) != 1:
        raise InputError(
            f"homomorphic sums need one member with the role 'holder'; roster {roster.serial} has {len(found)}"
        )
    return found[0]


def session_of(roster: ConsortiumRoster, offer: bytes, opened: Open, aggregation: SecureSum) -> bytes:
    """The 32 bytes that name the session which `opened` describes. offer: `JobOffer.within`.

    Raises ProtocolError for silos without fresh bytes, for homomorphic sums without a key, and for others with one.
    """
    if len(opened.silos) != len(opened.nonces):
        raise ProtocolError("a session needs 32 fresh bytes of each silo")
    if (aggregation.kind == "homomorphic") != bool(opened.holder):
        raise ProtocolError("a session has an encryption key where its sums are homomorphic, and there alone")
    nonces = dict(zip(opened.silos, opened.nonces, strict=True))
    if opened.holder:
        nonces[key_holder_of(roster).id] = opened.holder
    return session_id(roster, offer, nonces, opened.protocol)


def session_roster(
    roster: ConsortiumRoster, session: bytes, silos: Sequence[str], aggregation: SecureSum, holder: bytes
) -> Roster | None:
    """What all signatures of the session are bound to; None of plain sums. holder: hash of the session's encryption
    key, or nothing.

    Raises InputError where the consortium's [sums] are stricter.
    """
    masks = aggregation.beneath(roster.sums.bits)
    if masks is None:
        return None
    entry = key_holder_of(roster).identity_key + holder if aggregation.kind == "homomorphic" else b""
    return roster.session(session, silos, masks, entry)


class OpenSession(NamedTuple):
    """What both halves of a session's sums know. holder: hash of its encryption key, or nothing."""

    roster: ConsortiumRoster
    session: bytes
    silos: Sequence[str]
    aggregation: SecureSum
    holder: bytes


def silo_sum(
    opened: OpenSession,
    store: Store,
    silo: str,
    identity: Identity,
    min_cohort: int,
    max_missing: int | None = None,
    questions: Store | None = None,
) -> SumSilo:
    """The half of `silo`. min_cohort, max_missing: what its site insists on, whatever the roster says. questions: see
    `MaskedSilo`."""
    seat = Seat(session_roster(*opened), silo, identity, store, min_cohort, max_missing, questions)
    return opened.aggregation.at_silo(seat)


def longest_message(tables: Iterable[BlockTable], silos: int, aggregation: SecureSum) -> int:
    """Bytes that no message of a job with these tables needs, either way: a broadcast holds a few vectors of a table's
    length, a contribution at most 96 bytes a value, a refill some seeds and shares of each neighbour and index."""
    widest = max((table.size for table in tables), default=0)
    return (4 << 20) + 512 * widest + silos * (1024 + 256 * (getattr(aggregation, "batch", None) or 64))
