"""A silo's half of masked sums: refuses whatever could open its contribution."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.masked_setup import Setup
from secure_fvi.aggregation.messages import (
    Activate,
    BatchSignature,
    Contribution,
    Deliver,
    DepositRequest,
    Done,
    KeySet,
    KeysRequest,
    Nonces,
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
from secure_fvi.aggregation.session import Session
from secure_fvi.aggregation.silo_batch import SiloBatch
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import InputError, ProtocolError

NOTHING = bytes(32)


class MaskedSilo:
    """One silo. `contribute` sees values; `handle` answers the server's requests or raises ProtocolError."""

    def __init__(
        self,
        roster: Roster,
        silo_id: str,
        identity: Identity,
        store: Store | None = None,
        min_cohort: int | None = None,
    ) -> None:
        """`roster` is what this site agreed to; `min_cohort` the least it accepts (default: the roster's)."""
        if silo_id not in roster.places:
            raise InputError(f"silo '{silo_id}' is not in the roster")
        if roster.members[roster.places[silo_id]][1] != identity.public_key:
            raise InputError(f"the roster holds another identity key for silo '{silo_id}'")
        if min_cohort is not None and roster.min_cohort < min_cohort:
            raise InputError(
                f"the roster's min_cohort {roster.min_cohort} is below this site's, {min_cohort}"
            )
        self.silo_id = silo_id
        self._roster = roster
        self._me = roster.places[silo_id]
        self._identity = identity
        self._store = store or MemoryStore()
        self._setup: Setup | None = None
        self._batches: dict[int, SiloBatch] = {}
        self._rings: dict[bytes, Ring] = {}
        self._last_index = -1
        self._handlers: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            KeysRequest: self._on_keys_request,
            KeySet: self._on_key_set,
            Nonces: self._on_nonces,
            DepositRequest: self._on_deposit_request,
            Deliver: self._on_deliver,
            Activate: self._on_activate,
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

    # Contribution

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
        batch = self._batch_of(index)
        if index <= self._last_index:
            raise ProtocolError(f"sum index {index} was used already, or skipped")
        if self._store.get(f"survivors/{index}") is not None:
            raise ProtocolError(
                f"the survivors of sum {index} were named already; it is too late for this silo"
            )
        ring = self._ring(table)
        masks = batch.masks(index, table.digest, context)
        payload = _masked(ring, values, masks).data.cast("B")
        message = pack(Contribution(index, payload))  # type: ignore[arg-type]
        contribution = hashlib.sha256(payload).digest() if self._roster.consistency_check else NOTHING
        record = table.digest + context + contribution
        self._store.put(
            {"outgoing": message, f"contributed/{index}": record, "last": index.to_bytes(8, "big")}
        )
        self._last_index = index
        return message

    def outgoing(self, index: int) -> bytes:
        """The stored bytes of the latest contribution, for a retry; ProtocolError if that was another sum's."""
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
                f"the cohort of sum {index} has {len(members)} silos, "
                f"below min_cohort = {self._roster.min_cohort}"
            )

    def _ring(self, table: BlockTable) -> Ring:
        ring = self._rings.get(table.digest)
        if ring is None:
            ring = self._rings[table.digest] = Ring(table, self._roster.bits, self._roster.size)
        return ring

    # Set-up and refill

    @property
    def _session(self) -> Session:
        if self._setup is None or self._setup.session is None:
            raise ProtocolError("keys are not exchanged yet")
        return self._setup.session

    def _on_keys_request(self, request: KeysRequest) -> tuple[Any, ...]:
        if self._setup is not None and request.attempt == self._setup.attempt:
            return self._setup.advert
        if self._setup is not None and request.attempt < self._setup.attempt:
            raise ProtocolError("an old set-up")
        self._setup = Setup(self._roster, self._me, self._identity, request)
        self._batches = {}
        return self._setup.advert

    def _on_key_set(self, request: KeySet) -> tuple[Any, ...]:
        if self._setup is None:
            raise ProtocolError("a key set before a request for keys")
        return self._setup.accept_keys(request)

    def _on_nonces(self, request: Nonces) -> tuple[Any, ...]:
        if self._setup is None:
            raise ProtocolError("nonces before a request for keys")
        self._setup.accept_nonces(request)
        return Done()

    def _on_deposit_request(self, request: DepositRequest) -> tuple[Any, ...]:
        session = self._session
        batch = self._batches.get(request.batch)
        if batch is None:
            if self._batches and request.batch < max(self._batches):
                raise ProtocolError("an old batch")
            assert self._setup is not None
            batch = SiloBatch(session, self._me, request.batch, self._setup.pair_secrets)
            self._batches[request.batch] = batch
            self._forget_old_batches()
        return batch.deposit

    def _forget_old_batches(self) -> None:
        """Keep the latest two batches; what is forgotten can be revealed to nobody."""
        for number in sorted(self._batches)[:-2]:
            del self._batches[number]
            first = number * self._roster.batch
            indices = range(first, first + self._roster.batch)
            self._store.drop(f"{kind}/{i}" for i in indices for kind in ("contributed", "survivors"))

    def _on_deliver(self, request: Deliver) -> tuple[Any, ...]:
        batch = self._numbered(request.batch)
        batch.accept(request)
        if not self._roster.consistency_check:
            batch.active = True
            return BatchSignature(request.batch, b"")
        return BatchSignature(request.batch, self._identity.sign(batch.statement))

    def _on_activate(self, request: Activate) -> tuple[Any, ...]:
        batch = self._numbered(request.batch)
        statement = batch.statement
        signers = self._roster.members_of(request.signers)
        self._check_signatures(signers, request.signatures, [statement] * len(signers))
        batch.active = True
        return Done()

    def _numbered(self, number: int) -> SiloBatch:
        batch = self._batches.get(number)
        if batch is None:
            raise ProtocolError(f"batch {number} is unknown here")
        return batch

    def _batch_of(self, index: int) -> SiloBatch:
        batch = self._numbered(index // self._roster.batch)
        if not batch.active:
            raise ProtocolError(f"batch {batch.number} is not agreed on yet")
        return batch

    def _check_signatures(
        self, signers: Sequence[int], signatures: Sequence[bytes], statements: Sequence[bytes]
    ) -> None:
        """Raise ProtocolError unless T members signed, each its statement, and all signatures are right."""
        if not len(signers) == len(signatures) == len(statements):
            raise ProtocolError("a signature of each signer is needed")
        if len(signers) < self._roster.signatures_needed:
            raise ProtocolError(
                f"{len(signers)} signatures; {self._roster.signatures_needed} of the roster are needed"
            )
        for place, signature, statement in zip(signers, signatures, statements, strict=True):
            if not self._roster.verify(place, signature, statement):
                raise ProtocolError(f"the signature of silo '{self._roster.ids[place]}' is not valid here")

    # Survivors

    def _agree(self, request: SignRequest | RevealRequest) -> tuple[SiloBatch, tuple[int, ...], bytes, bytes]:
        """Write down the survivors of an index before anything leaves; the first set named is the only one."""
        index = request.sum_index
        batch = self._batch_of(index)
        survivors = self._roster.members_of(request.survivors)
        if len(survivors) < self._roster.min_cohort:
            raise ProtocolError(
                f"sum {index} has {len(survivors)} survivors, below min_cohort = {self._roster.min_cohort}"
            )
        if not batch.depositors.issuperset(survivors):
            raise ProtocolError(f"a survivor of sum {index} has no secrets for it")
        record = self._store.get(f"contributed/{index}")
        if record is None and self._me in survivors:
            raise ProtocolError(f"silo '{self.silo_id}' did not contribute to sum {index}")
        if record is not None and record[:64] != request.table + request.context:
            raise ProtocolError(f"sum {index} is of another block table or another broadcast")
        statement = batch.session.survivors_statement(
            batch.digest, index, request.survivors, request.table, request.context
        )
        if self._store.claim(f"survivors/{index}", statement) != statement:
            raise ProtocolError(f"other survivors of sum {index} were named before")
        return batch, survivors, statement, record[64:] if record is not None else NOTHING

    def _on_sign(self, request: SignRequest) -> tuple[Any, ...]:
        if not self._roster.consistency_check:
            raise ProtocolError("this session has no consistency check")
        batch, _, statement, contribution = self._agree(request)
        signature = self._identity.sign(batch.session.set_statement(statement, contribution))
        return SetSignature(request.sum_index, contribution, signature)

    def _on_reveal(self, request: RevealRequest) -> tuple[Any, ...]:
        batch, survivors, statement, _ = self._agree(request)
        if self._roster.consistency_check:
            signers = self._roster.members_of(request.signers)
            if len(request.contributions) != len(signers):
                raise ProtocolError("a contribution's digest of each signer is needed")
            statements = [batch.session.set_statement(statement, c) for c in request.contributions]
            self._check_signatures(signers, request.signatures, statements)
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
