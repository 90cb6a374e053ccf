"""A silo's half of masked sums: refuses whatever could open its contribution."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.messages import (
    Contribution,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack_any,
)
from secure_fvi.aggregation.prg import CHUNK_BYTES, Mask, MaskStream, apply_masks
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.silo_batch import SiloBatch
from secure_fvi.aggregation.silo_state import CONTRIBUTED, SURVIVORS, SiloState
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import InputError, ProtocolError

_NOTHING = bytes(32)

Seal = Callable[[BlockTable, FloatArray, Sequence[Mask]], bytes]


class MaskedSilo:
    """One silo. `contribute` sees values; `handle` answers the server's requests or raises ProtocolError.

    With a durable store, a new object over the same store goes on where the old one was killed.
    """

    def __init__(
        self,
        roster: Roster,
        silo_id: str,
        identity: Identity,
        store: Store | None = None,
        min_cohort: int | None = None,
        seal: Seal | None = None,
    ) -> None:
        """`roster` is what this site agreed to; `min_cohort` the least it accepts (default: the roster's).

        `seal` makes another kind's payload from table, values and masks; it replaces ring encoding and masking.
        """
        if silo_id not in roster.places:
            raise InputError(f"silo '{silo_id}' is not in the roster")
        self._me = roster.places[silo_id]
        if roster.members[self._me][1] != identity.public_key:
            raise InputError(f"the roster holds another identity key for silo '{silo_id}'")
        if min_cohort is not None and roster.min_cohort < min_cohort:
            raise InputError(f"the roster's min_cohort {roster.min_cohort} is below this site's, {min_cohort}")
        self.silo_id = silo_id
        self._roster = roster
        self._identity = identity
        self._store = MemoryStore() if store is None else store
        self._state = SiloState(roster, self._me, identity, self._store)
        self._rings: dict[bytes, Ring] = {}
        self._signed = (b"", b"")  # the set signed last and the signature, which need not be checked when it comes back
        self._seal = seal
        last = self._store.get("last")
        self._last_index = -1 if last is None else int.from_bytes(last, "big")
        self._handlers: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            **self._state.handlers(),
            SignRequest: self._on_sign,
            RevealRequest: self._on_reveal,
        }

    def __repr__(self) -> str:
        return f"MaskedSilo({self.silo_id!r})"

    def handle(self, message: bytes) -> bytes:
        """Answer one message of the server. The same message gets the same answer."""
        request = unpack_any(message)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"a silo does not take {type(request).__name__}")
        return pack(handler(request))

    def contribute(
        self, index: int, cohort: Sequence[str], table: BlockTable, values: FloatArray, context: bytes
    ) -> bytes:
        """Masked ring elements of `values`; see `SumSilo.contribute`.

        Masks are shared with all neighbours of the batch, whoever is in the cohort: a server that names a
        smaller cohort to one silo removes no mask from it.
        """
        self._check_cohort(index, cohort)
        if len(context) != 32:
            raise ProtocolError("a context has 32 bytes")
        batch = self._state.batch_of(index)
        if index <= self._last_index:
            raise ProtocolError(f"sum index {index} was used already, or skipped")
        if self._store.get(f"{SURVIVORS}/{index}") is not None:
            raise ProtocolError(f"the survivors of sum {index} were named already; this silo is too late")
        masks = batch.masks(index, table.digest, context)
        payload = self._masked(table, values, masks) if self._seal is None else self._seal(table, values, masks)
        message = pack(Contribution(index, payload))  # type: ignore[arg-type]
        own = hashlib.sha256(payload).digest() if self._roster.consistency_check else _NOTHING
        self._store.put(
            {
                "outgoing": message,
                "last": index.to_bytes(8, "big"),
                f"{CONTRIBUTED}/{index}": table.digest + context + own,
            }
        )
        self._last_index = index
        return message

    def outgoing(self, index: int) -> bytes:
        """The stored bytes of the latest contribution, for a retry; ProtocolError for another sum's."""
        message = self._store.get("outgoing")
        if message is None or index != self._last_index:
            raise ProtocolError(f"no contribution to sum {index} is kept")
        return message

    def _check_cohort(self, index: int, cohort: Sequence[str]) -> None:
        members = set(cohort)
        if self.silo_id not in members:
            raise ProtocolError(f"silo '{self.silo_id}' is not in the cohort of sum {index}")
        if len(members) != len(cohort) or not members <= self._roster.places.keys():
            raise ProtocolError(f"the cohort of sum {index} does not fit the roster")
        if len(members) < self._roster.min_cohort:
            raise ProtocolError(
                f"the cohort of sum {index} has {len(members)} silos, below min_cohort = {self._roster.min_cohort}"
            )

    def _masked(self, table: BlockTable, values: FloatArray, masks: Sequence[Mask]) -> memoryview:
        ring = self._rings.get(table.digest)
        if ring is None:
            ring = self._rings[table.digest] = Ring(table, self._roster.bits, self._roster.size)
        return _masked(ring, values, masks).view(np.uint8).data

    def _named(self, request: SignRequest | RevealRequest) -> tuple[SiloBatch, tuple[int, ...], bytes, bytes]:
        """The batch, the survivors, the statement that names them, and the digest of the own contribution.

        Raises ProtocolError for a set that this silo would not have named.
        """
        index = request.sum_index
        batch = self._state.batch_of(index)
        survivors = self._roster.members_of(request.survivors)
        if len(survivors) < self._roster.min_cohort:
            raise ProtocolError(
                f"sum {index} has {len(survivors)} survivors, below min_cohort = {self._roster.min_cohort}"
            )
        if not batch.depositors.issuperset(survivors):
            raise ProtocolError(f"a survivor of sum {index} has no secrets for it")
        record = self._store.get(f"{CONTRIBUTED}/{index}")
        if record is None and self._me in survivors:
            raise ProtocolError(f"silo '{self.silo_id}' did not contribute to sum {index}")
        if record is not None and record[:64] != request.table + request.context:
            raise ProtocolError(f"sum {index} is of another block table or another broadcast")
        statement = batch.session.survivors_statement(
            batch.digest, index, request.survivors, request.table, request.context
        )
        return batch, survivors, statement, _NOTHING if record is None else record[64:]

    def _claim(self, index: int, statement: bytes) -> None:
        """Write down the survivors of an index before anything leaves; the first set named is the only one."""
        if self._store.claim(f"{SURVIVORS}/{index}", statement) != statement:
            raise ProtocolError(f"other survivors of sum {index} were named before")

    def _on_sign(self, request: SignRequest) -> SetSignature:
        if not self._roster.consistency_check:
            raise ProtocolError("this session has no consistency check")
        batch, _, statement, own = self._named(request)
        self._claim(request.sum_index, statement)
        signs = batch.session.set_statement(statement, own)
        self._signed = signs, self._identity.sign(signs)
        return SetSignature(request.sum_index, own, self._signed[1])

    def _on_reveal(self, request: RevealRequest) -> Shares:
        batch, survivors, statement, _ = self._named(request)
        if self._roster.consistency_check:
            signers = self._roster.members_of(request.signers)
            statements = [batch.session.set_statement(statement, own) for own in request.contributions]
            self._state.check_signatures(signers, request.signatures, statements, self._signed)
        # After the signatures: a request that nobody signed must not decide which set is the only one.
        self._claim(request.sum_index, statement)
        return Shares(request.sum_index, batch.shares(request.sum_index, frozenset(survivors)))


def _masked(ring: Ring, values: FloatArray, masks: Sequence[Mask]) -> np.ndarray[Any, Any]:
    """Encoded and masked values; long vectors go through encoder and ciphers chunk by chunk, in the cache."""
    if values.nbytes <= CHUNK_BYTES or values.shape != (ring.table.size,):
        out = ring.encode(values)
        apply_masks(out, masks)
        return out
    out = np.empty(ring.table.size, ring.dtype)
    stream = MaskStream(masks, ring.dtype)
    for start in range(0, out.size, stream.chunk):
        part = slice(start, min(start + stream.chunk, out.size))
        ring.encode_part(values, part, out[part])
        stream.apply(out[part])
    return out
