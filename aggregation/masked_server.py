"""The server's half of masked sums: names survivors, has their masks opened, adds."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from secure_fvi.aggregation.base import BlockTable, Exchanges, FloatArray, Total
from secure_fvi.aggregation.messages import (
    Contribution,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    unpack,
)
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Roster, check_missing
from secure_fvi.aggregation.server_state import ServerState
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.aggregation.unmask import Convicted, ServerBatch, masks_left
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi.wire import Limit


class Sent(NamedTuple):
    """One silo's contribution, its signature verified."""

    payload: bytes
    digest: bytes  # of the payload
    signature: bytes


class Admitted(NamedTuple):
    """The contributions to one index that count, by place, ascending, and the question that all of them answer."""

    cohort: bytes
    question: bytes
    sent: dict[int, Sent]


class Agreed(NamedTuple):
    """Survivors of one index, as signed, and what each of them sent (by place)."""

    batch: ServerBatch
    request: RevealRequest
    payloads: dict[int, bytes]
    sent: dict[int, Sent]


class MaskedServer:
    """The aggregator. Holds no secret: what it sees is what docs/threat-model.md says it may see.

    With a durable store, a new object over the same store goes on where the old one was killed.
    """

    def __init__(self, roster: Roster, store: Store | None = None) -> None:
        self._roster = roster
        self._store = MemoryStore() if store is None else store
        self._state = ServerState(roster, self._store)
        self._rings: dict[bytes, Ring] = {}
        self._unshown: dict[int, RevealRequest] = {}

    @property
    def neighbourhood(self) -> str:
        """Degree, threshold and failure probabilities of the graph, in words."""
        return str(self._roster.neighbourhood)

    @property
    def faults(self) -> Mapping[str, str]:
        """By silo id, why its latest bad reply was taken for a dropout."""
        return self._state.faults

    @property
    def proofs(self) -> Mapping[str, bytes]:
        """By silo id, what shows to anyone that it dealt wrong shares (`unmask.convicts`)."""
        return {self._roster.ids[place]: proof for place, proof in self._state.left_out.items()}

    def prepare(self, index: int) -> Exchanges[None]:
        """Set-up before the first sum, a refill before the first index of each batch, otherwise nothing.

        Raises AggregationError when too few silos answer to go on.
        """
        if index < 0:
            raise InputError(f"a sum index cannot be negative: {index}")
        state = self._state
        if state.session is None:
            yield from state.set_up()
        number = index // self._roster.batch
        batch = state.batches.get(number)
        if batch is None:
            if state.batches and number < max(state.batches):
                raise AggregationError(f"the secrets of sum {index} are of an old batch")
            batch = yield from state.refill(number)
        if not state.active_enough(batch) or batch.catch_up_due(index):
            yield from state.deliver(batch, batch.lagging)
        if self._unshown:
            # A silo takes no further question before it has seen who signed the sum with its term in it.
            replies = yield from state.ask_each(self._unshown, Shares)
            self._unshown = {place: request for place, request in self._unshown.items() if place not in replies}

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
    ) -> Exchanges[Total]:
        """The sum over those whose contribution arrived; one exchange, or two with the consistency check.

        Raises AggregationError when fewer than min_cohort contributed, too few signed, or too few revealed.
        """
        roster = self._roster
        ring = self._rings.get(table.digest)
        if ring is None:
            ring = self._rings[table.digest] = Ring(table, roster.bits, roster.size)
        admitted = self.admit(index, cohort, table, contributions, context, table.size * ring.dtype.itemsize)
        agreed = yield from self.agree(index, table, context, admitted)
        masks = yield from self.masks_left(agreed)
        total = np.zeros(table.size, ring.dtype)
        for payload in agreed.payloads.values():
            np.add(total, np.frombuffer(payload, ring.dtype), out=total)
        apply_masks(total, masks)
        values = decoded(index, lambda: ring.decode(total, len(agreed.payloads)))
        return Total(values, tuple(roster.ids[p] for p in agreed.payloads))

    def admit(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        length: int | None,
    ) -> Admitted:
        """The contributions of the cohort that their silos signed, with payloads of `length` bytes (None: any).

        The others count as dropouts; `faults` says why.
        """
        roster, batch = self._roster, self._batch(index)
        places = sorted(roster.places[silo] for silo in set(cohort) & roster.places.keys())
        asked = roster.bitmap(frozenset(places))
        limit = None if length is None else Limit(length + 4096)
        found: dict[int, tuple[bytes, Sent]] = {}
        left_out = self._state.left_out.keys() | batch.left_out
        for place in places:
            if roster.ids[place] not in contributions or place in left_out:
                continue
            try:
                message = unpack(contributions[roster.ids[place]], Contribution, limit)
            except ProtocolError as error:
                self._state.fault(place, str(error))
                continue
            right_length = length is None or len(message.payload) == length
            if message.sum_index != index or not right_length or place not in batch.present:
                self._state.fault(place, "a contribution of another sum or another length")
                continue
            sent = Sent(message.payload, hashlib.sha256(message.payload).digest(), message.signature)
            statement = batch.session.contribution_statement(
                batch.digest, index, place, asked, table.digest, context, message.question, sent.digest
            )
            if not roster.verify(place, sent.signature, statement):
                self._state.fault(place, f"a contribution that it did not sign, or not for this sum {index}")
                continue
            found[place] = message.question, sent
        # All answer one broadcast, and so one question; a silo that names another is alone with it.
        counts = Counter(question for question, _ in found.values())
        asks = max(sorted(counts), key=lambda question: counts[question], default=b"")
        for place in [p for p, (question, _) in found.items() if question != asks]:
            self._state.fault(place, "a contribution to another question than the others'")
            del found[place]
        return Admitted(asked, asks, {place: sent for place, (_, sent) in found.items()})

    def agree(self, index: int, table: BlockTable, context: bytes, admitted: Admitted) -> Exchanges[Agreed]:
        """Name the survivors among those who sent something, and have them signed."""
        roster, batch = self._roster, self._batch(index)
        survivors = self._name_survivors(index, admitted, batch)
        sent = {p: admitted.sent[p] for p in survivors}
        request = RevealRequest(
            index,
            admitted.cohort,
            roster.bitmap(frozenset(survivors)),
            table.digest,
            context,
            admitted.question,
            [],
            [],
            b"",
            [],
        )
        if roster.consistency_check:
            request = yield from self._sign(request, batch, sent)
        return Agreed(batch, request, {p: s.payload for p, s in sent.items()}, sent)

    def _batch(self, index: int) -> ServerBatch:
        batch = self._state.batches.get(index // self._roster.batch)
        if batch is None:
            raise AggregationError(f"sum {index} was not prepared")
        return batch

    def masks_left(self, agreed: Agreed) -> Exchanges[list[Mask]]:
        """Have shares revealed; what is still to be applied to the sum of the payloads."""
        batch, request, payloads, _ = agreed
        reveals = yield from self.show(agreed)
        try:
            return masks_left(
                batch, request.sum_index, payloads, reveals, request.table, request.context, self._state.fault
            )
        except Convicted as found:
            self._state.leave_out(found.place, str(found), found.proof)
            raise

    def show(self, agreed: Agreed) -> Exchanges[dict[int, Shares]]:
        """Show all silos who signed the survivors, so that those know that their answers were used; their shares."""
        batch, request, _, sent = agreed
        index = request.sum_index
        asked: dict[int, RevealRequest] = dict.fromkeys(sorted(batch.active), request)
        if not self._roster.consistency_check:
            asked = _with_proofs(asked, sent)
        reveals = yield from self._state.ask_each(asked, Shares)
        reveals = {place: reply for place, reply in reveals.items() if reply.sum_index == index}
        late = sent.keys() - reveals.keys() if self._roster.consistency_check else ()
        self._unshown = dict.fromkeys(sorted(late), request)
        return reveals

    def _name_survivors(self, index: int, admitted: Admitted, batch: ServerBatch) -> tuple[int, ...]:
        """Store the survivors, then go on with the stored ones: a second call cannot name others."""
        roster, sent = self._roster, admitted.sent
        if len(sent) < roster.min_cohort:
            raise AggregationError(
                f"sum {index}: {len(sent)} silos contributed, at least min_cohort = {roster.min_cohort} are needed"
            )
        slot, bitmap = f"survivors/{index}", roster.bitmap(frozenset(sent))
        if self._store.get(slot) is None:
            # Silos would refuse these; before they are stored there can still be others.
            try:
                check_missing(roster, index, admitted.cohort, tuple(sent), roster.max_missing)
                batch.session.check_survivors(sent.keys())
            except ProtocolError as error:
                absent = [roster.ids[p] for p in roster.members_of(admitted.cohort) if p not in sent]
                told = str(error).removeprefix(f"sum {index}: ")
                raise AggregationError(f"sum {index}: {told}; nothing usable of {_some(absent)}") from None
        survivors = roster.members_of(self._store.claim(slot, bitmap))
        if not sent.keys() >= set(survivors):
            raise AggregationError(f"sum {index}: a contribution of the survivors named before is missing")
        return survivors

    def _sign(self, request: RevealRequest, batch: ServerBatch, sent: Mapping[int, Sent]) -> Exchanges[RevealRequest]:
        """Collect signatures on the survivors."""
        roster, session = self._roster, batch.session
        statement = session.survivors_statement(
            batch.digest,
            request.sum_index,
            request.cohort,
            request.survivors,
            request.table,
            request.context,
            request.question,
        )
        ask = SignRequest(*request[:8])
        replies = yield from self._state.ask_each(
            _with_proofs(dict.fromkeys(sorted(batch.active), ask), sent), SetSignature
        )
        signed: dict[int, bytes] = {}
        for place, reply in sorted(replies.items()):
            if reply.sum_index != request.sum_index or not roster.verify(place, reply.signature, statement):
                self._state.fault(place, "a wrong signature on the survivors")
                continue
            signed[place] = reply.signature
        needed = roster.signatures_needed
        if len(signed) < needed:
            raise AggregationError(
                f"sum {request.sum_index}: {len(signed)} of {roster.size} silos signed the survivors, "
                f"{needed} are needed"
            )
        signers = sorted(signed)[:needed]
        return request._replace(signers=roster.bitmap(frozenset(signers)), signatures=[signed[s] for s in signers])


R = TypeVar("R", SignRequest, RevealRequest)


def _with_proofs(requests: Mapping[int, R], sent: Mapping[int, Sent]) -> dict[int, R]:
    """The requests by place; to a silo that sent nothing itself, with what the survivors signed."""
    proofs = [sent[p].digest for p in sorted(sent)], [sent[p].signature for p in sorted(sent)]
    return {
        place: request if place in sent else request._replace(payloads=proofs[0], proofs=proofs[1])
        for place, request in requests.items()
    }


def decoded(index: int, decode: Callable[[], FloatArray]) -> FloatArray:
    """The decoded total; AggregationError, which names the sum, for one that cannot be."""
    try:
        return decode()
    except AggregationError as error:
        raise AggregationError(f"sum {index}: {error}") from None


def _some(silos: Sequence[str]) -> str:
    """A few names of many."""
    names = ", ".join(f"'{silo}'" for silo in silos[:3])
    return names if len(silos) <= 3 else f"{names} and {len(silos) - 3} others"
