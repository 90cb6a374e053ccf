"""A silo's half of masked sums: refuses whatever could open its contribution."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from secure_fvi import wire
from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.kdf import digest
from secure_fvi.aggregation.messages import (
    Contribution,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.prg import CHUNK_BYTES, Mask, MaskStream, apply_masks
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Identity, Roster, check_missing
from secure_fvi.aggregation.silo_batch import SiloBatch
from secure_fvi.aggregation.silo_state import CONTRIBUTED, SURVIVORS, USED, SiloState
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import InputError, ProtocolError

LABEL_USE = b"use-of-an-index"
LABEL_VALUES = b"values-of-an-index"
LABEL_QUESTION = b"survivors-of-a-question"

Seal = Callable[[BlockTable, FloatArray, Sequence[Mask]], bytes]


class _Record(NamedTuple):
    """What a silo remembers of its contribution to an index."""

    table: bytes
    context: bytes
    cohort: bytes
    question: bytes
    most_missing: int


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
        max_missing: int | None = None,
        questions: Store | None = None,
        unbound: bool = False,
    ) -> None:
        """`roster` is what this site agreed to; `min_cohort` the least it accepts (default: the roster's).

        `max_missing`: how many of a cohort it lets be missing from a total (default: the roster's; the smaller of both
        holds). `questions`: where it notes the survivors that it signed for a question, a store that outlives the
        session where questions do (default: `store`). `unbound`: whether sums may name no question, so that survivors
        are bound to their index alone and one question could be summed twice over other survivors: for parties of one
        process, which ask each index once.

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
        self._max_missing = roster.max_missing if max_missing is None else min(roster.max_missing, max_missing)
        self._questions = self._store if questions is None else questions
        # Where both are one, the next write to it settles what is claimed for a question.
        self._settle = self._questions is not self._store
        self._unbound = unbound
        self._rings: dict[bytes, Ring] = {}
        self._signed = (b"", b"")  # the set signed last and the signature, which need not be checked when it comes back
        self._seal = seal
        self._handlers: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            **self._state.handlers(),
            SignRequest: self._on_sign,
            RevealRequest: self._on_reveal,
        }

    def __repr__(self) -> str:
        return f"MaskedSilo({self.silo_id!r})"

    def handle(self, message: bytes) -> bytes:
        """Answer one message of the server. The same message gets the same answer."""
        request = unpack_any(message, self._roster.limit)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"a silo does not take {type(request).__name__}")
        return pack(handler(request))

    def contribute(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        values: FloatArray,
        context: bytes,
        question: bytes = b"",
        most_missing: int | None = None,
    ) -> bytes:
        """Masked ring elements of `values`; see `SumSilo.contribute`.

        Masks are shared with all neighbours of the batch, whoever is in the cohort: a server that names a
        smaller cohort to one silo removes no mask from it.
        """
        asked = self._check_cohort(index, cohort)
        if len(context) != 32 or len(question) not in (0, 32):
            raise ProtocolError("a context has 32 bytes, and so has a question that is named")
        self._check_bound(index, question)
        batch = self._state.batch_of(index)
        batch.session.check_survivors(asked)
        if index <= self._last_index():
            raise ProtocolError(f"sum index {index} was used already, or skipped")
        if self._store.get(f"{SURVIVORS}/{index}") is not None:
            raise ProtocolError(f"the survivors of sum {index} were named already; this silo is too late")
        masks = batch.masks(index, table.digest, context)
        payload = self._masked(table, values, masks) if self._seal is None else self._seal(table, values, masks)
        sent, bitmap = hashlib.sha256(payload).digest(), self._roster.bitmap(asked)
        # What a retry after a crash must repeat. Encryption is random: there it is the values themselves, keyed.
        inside = sent if self._seal is None else digest(LABEL_VALUES, batch.self_seed(index), values.tobytes())
        self._use(index, batch, digest(LABEL_USE, table.digest, context, bitmap, question, inside))
        signature = self._identity.sign(
            batch.session.contribution_statement(
                batch.digest, index, self._me, bitmap, table.digest, context, question, sent
            )
        )
        message = pack(Contribution(index, question, payload, signature))  # type: ignore[arg-type]
        most = self._max_missing if most_missing is None else min(self._max_missing, most_missing)
        record = _Record(table.digest, context, bitmap, question, most)
        kept: bytes = msgpack.packb(record)
        self._store.put({"outgoing": message, "last": index.to_bytes(8, "big"), f"{CONTRIBUTED}/{index}": kept})
        return message

    def _use(self, index: int, batch: SiloBatch, what: bytes) -> None:
        """Claim the masks of an index for what they cover, before it leaves; once claimed they cover nothing else.

        The claim binds at once, whatever else a store holds back: a process that was killed before its answer was
        written can repeat the same answer, and no other process over this store can make another. It is on the disk
        with the answer, before that leaves.
        """
        if self._store.claim(f"{USED}/{index}", what, settle=False) != what:
            raise ProtocolError(f"sum index {index} was used already, by another process or before a crash")
        self._state.check_live(batch)
        if index <= self._last_index():
            raise ProtocolError(f"sum index {index} was used already, or skipped")

    def _last_index(self) -> int:
        """The newest index contributed to; read from the store, over which another process may stand."""
        last = self._store.get("last")
        return -1 if last is None else int.from_bytes(last, "big")

    def outgoing(self, index: int) -> bytes:
        """The stored bytes of the latest contribution, for a retry; ProtocolError for another sum's."""
        message = self._store.get("outgoing")
        if message is None or index != self._last_index() or unpack(message, Contribution).sum_index != index:
            raise ProtocolError(f"no contribution to sum {index} is kept")
        return message

    def _check_cohort(self, index: int, cohort: Sequence[str]) -> frozenset[int]:
        """The places of the cohort. Raises ProtocolError where this silo is not to contribute to it."""
        members = set(cohort)
        if self.silo_id not in members:
            raise ProtocolError(f"silo '{self.silo_id}' is not in the cohort of sum {index}")
        if len(members) != len(cohort) or not members <= self._roster.places.keys():
            raise ProtocolError(f"the cohort of sum {index} does not fit the roster")
        if len(members) < self._roster.min_cohort:
            raise ProtocolError(
                f"the cohort of sum {index} has {len(members)} silos, below min_cohort = {self._roster.min_cohort}"
            )
        return frozenset(self._roster.places[silo] for silo in members)

    def _masked(self, table: BlockTable, values: FloatArray, masks: Sequence[Mask]) -> memoryview:
        ring = self._rings.get(table.digest)
        if ring is None:
            ring = self._rings[table.digest] = Ring(table, self._roster.bits, self._roster.size)
        return _masked(ring, values, masks).view(np.uint8).data

    def _named(self, request: SignRequest | RevealRequest, signed: bool) -> tuple[SiloBatch, tuple[int, ...], bytes]:
        """The batch, the survivors, and the statement that names them out of their cohort.

        signed: T silos of the roster have signed the statement, each after this same check.
        Raises ProtocolError for a set that this silo would not have named.
        """
        index, roster = request.sum_index, self._roster
        self._check_bound(index, request.question)
        batch = self._state.batch_of(index)
        survivors = roster.members_of(request.survivors)
        record = self._record(index)
        most = self._max_missing if record is None else min(self._max_missing, record.most_missing)
        check_missing(roster, index, request.cohort, survivors, most)
        if not batch.depositors.issuperset(survivors):
            raise ProtocolError(f"a survivor of sum {index} has no secrets for it")
        batch.session.check_survivors(survivors)
        if record is not None:
            if (record.table, record.context) != (request.table, request.context):
                raise ProtocolError(f"sum {index} is of another block table or another broadcast")
            if record.cohort != request.cohort:
                raise ProtocolError(f"sum {index} is of another cohort than the one that was asked")
            if record.question != request.question:
                raise ProtocolError(f"sum {index} answers another question")
            newest = self._newest(index)
            if newest is None or newest.question != record.question:
                # What a total lacks is counted when the next question comes; nothing may change after it.
                raise ProtocolError(f"sum {index} is over: silo '{self.silo_id}' has answered a later question")
        elif self._me in survivors:
            raise ProtocolError(f"silo '{self.silo_id}' did not contribute to sum {index}")
        elif not signed:
            self._check_proofs(request, batch, survivors)
        statement = batch.session.survivors_statement(
            batch.digest,
            index,
            request.cohort,
            request.survivors,
            request.table,
            request.context,
            request.question,
        )
        return batch, survivors, statement

    def _record(self, index: int) -> _Record | None:
        kept = self._store.get(f"{CONTRIBUTED}/{index}")
        return None if kept is None else _Record(*wire.own(kept, "what a silo remembers of its contribution"))

    def _newest(self, index: int) -> _Record | None:
        """Of the newest sum contributed to; `index` is one of them."""
        return self._record(max(index, self._last_index()))

    def _check_bound(self, index: int, question: bytes) -> None:
        if not question and not self._unbound:
            raise ProtocolError(f"sum {index} names no question, to which its survivors would be bound")

    def _check_proofs(self, request: SignRequest | RevealRequest, batch: SiloBatch, survivors: tuple[int, ...]) -> None:
        """A silo that was not asked, or did not answer, takes cohort and question from the survivors' own hands."""
        index, roster = request.sum_index, self._roster
        if not len(survivors) == len(request.payloads) == len(request.proofs):
            raise ProtocolError(f"sum {index} needs each survivor's own signature on what it sent")
        for place, payload, proof in zip(survivors, request.payloads, request.proofs, strict=True):
            statement = batch.session.contribution_statement(
                batch.digest,
                index,
                place,
                request.cohort,
                request.table,
                request.context,
                request.question,
                payload,
            )
            if not roster.verify(place, proof, statement):
                raise ProtocolError(f"silo '{roster.ids[place]}' did not sign that it contributed to this sum {index}")

    def _claim(self, request: SignRequest | RevealRequest, batch: SiloBatch, statement: bytes) -> None:
        """Write down the survivors before anything leaves; the first set named for an index is the only one, and so is
        the first for a question, over all its indices."""
        index, roster = request.sum_index, self._roster
        held = self._store.get(f"{SURVIVORS}/{index}")
        if held not in (None, statement):
            raise ProtocolError(f"other survivors of sum {index} were named before")
        if request.question and held is None:
            ids = [[roster.ids[p] for p in roster.members_of(m)] for m in (request.cohort, request.survivors)]
            missing = len(ids[0]) - len(ids[1])
            mine = digest(LABEL_QUESTION, msgpack.packb(ids)) + missing.to_bytes(4, "big")
            if self._questions.claim(_question_slot(request.question), mine, self._settle) != mine:
                raise ProtocolError(
                    f"sum {index}: other survivors of this question were named before, at another index"
                )
        if held is None and self._store.claim(f"{SURVIVORS}/{index}", statement) != statement:
            raise ProtocolError(f"other survivors of sum {index} were named before")
        self._state.check_live(batch)

    def missing_from(self, question: bytes) -> int | None:
        """How many of its cohort the survivors lacked that this silo signed for `question`; None if it signed none."""
        held = self._questions.get(_question_slot(question))
        return None if held is None else int.from_bytes(held[32:], "big")

    def shown(self, question: bytes) -> bool | None:
        """See `SumSilo.shown`; None without the consistency check."""
        return self._questions.get(_shown_slot(question)) is not None if self._roster.consistency_check else None

    def _on_sign(self, request: SignRequest) -> SetSignature:
        if not self._roster.consistency_check:
            raise ProtocolError("this session has no consistency check")
        batch, _, statement = self._named(request, signed=False)
        self._claim(request, batch, statement)
        self._signed = statement, self._identity.sign(statement)
        return SetSignature(request.sum_index, self._signed[1])

    def _on_reveal(self, request: RevealRequest) -> Shares:
        checked = self._roster.consistency_check
        batch, survivors, statement = self._named(request, signed=checked)
        if checked:
            signers = self._roster.members_of(request.signers)
            self._state.check_signatures(signers, request.signatures, statement, self._signed)
        # After the signatures: a request that nobody signed must not decide which set is the only one.
        self._claim(request, batch, statement)
        index, there = request.sum_index, frozenset(survivors)
        shares = batch.shares(index, there)
        if not checked or self._me not in there:
            return Shares(index, shares, b"", [])
        if request.question:
            self._questions.claim(_shown_slot(request.question), b"1", self._settle)
        # Signed by T silos, these survivors are the only ones: what t holders would open anyhow may be said at once.
        return Shares(index, shares, batch.self_seed(index), batch.seeds_with(index, there))


def _question_slot(question: bytes) -> str:
    return f"question/{question.hex()}"


def _shown_slot(question: bytes) -> str:
    return f"shown/{question.hex()}"


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
