"""The server's half of masked sums: carries messages between silos, names survivors, removes masks, adds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from secure_fvi.aggregation.base import BlockTable, Exchanges, Total
from secure_fvi.aggregation.messages import (
    Activate,
    BatchSignature,
    Contribution,
    Deposit,
    DepositRequest,
    Done,
    KeyAdvert,
    KeySet,
    KeysRequest,
    NonceReveal,
    Nonces,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.onetime import sealed_length
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.session import Session, graph_order, key_set_hash
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.aggregation.unmask import ServerBatch, unmask
from secure_fvi.errors import AggregationError, InputError, ProtocolError

M = TypeVar("M", bound=tuple[Any, ...])
_KEPT_BATCHES = 2
MAX_ATTEMPTS = 8


class MaskedServer:
    """The aggregator. Holds no secret: what it sees is what docs/threat-model.md says it may see.

    A reply that is missing, malformed or refused counts as a dropout; `faults` says why, by silo id.
    """

    def __init__(self, roster: Roster, store: Store | None = None) -> None:
        self._roster = roster
        self._store = store or MemoryStore()
        self._session: Session | None = None
        self._attempt = 0
        self._batches: dict[int, ServerBatch] = {}
        self._rings: dict[bytes, Ring] = {}
        self.faults: dict[str, str] = {}

    @property
    def neighbourhood(self) -> str:
        """Degree, threshold and failure probabilities of the graph, in words."""
        return str(self._roster.neighbourhood)

    # Preparation

    def prepare(self, index: int) -> Exchanges[None]:
        """Set-up before the first sum, a refill before the first index of each batch, otherwise nothing.

        Raises AggregationError when too few silos answer to go on.
        """
        if index < 0:
            raise InputError(f"a sum index cannot be negative: {index}")
        if self._session is None:
            yield from self._set_up()
        number = index // self._roster.batch
        batch = self._batches.get(number)
        if batch is None:
            if self._batches and number < max(self._batches):
                raise AggregationError(f"the secrets of sum {index} are of an old batch")
            batch = yield from self._refill(number)
        if batch.catch_up_due(index):
            yield from self._deliver(batch, batch.lagging)

    def _set_up(self) -> Exchanges[None]:
        """Exchange keys; on a k-regular graph also nonces, and anew unless all are revealed."""
        roster = self._roster
        while self._attempt < MAX_ATTEMPTS:
            attempt, self._attempt = self._attempt, self._attempt + 1
            adverts = yield from self._ask(range(roster.size), KeysRequest(attempt), KeyAdvert)
            members = tuple(sorted(adverts))
            self._require(len(members), "set-up")
            bitmap = roster.bitmap(frozenset(members))
            columns = [list(c) for c in zip(*(adverts[m][1:] for m in members), strict=True)]
            key_set = KeySet(attempt, bitmap, *columns)
            named = key_set_hash(roster, attempt, bitmap, key_set.public_keys, key_set.nonce_commitments)
            reveals = yield from self._ask(members, key_set, NonceReveal)
            reveals = {m: r for m, r in reveals.items() if r.key_set == named}
            if roster.neighbourhood.complete:
                self._require(len(reveals), "set-up")
                self._session = Session(roster, named, members, members)
                return
            if len(reveals) < len(members):
                continue
            nonces = [reveals[m].nonce for m in members]
            yield from self._ask(members, Nonces(attempt, nonces), Done)
            self._session = Session(roster, named, members, graph_order(named, members, nonces))
            return
        raise AggregationError(
            f"no set-up in {MAX_ATTEMPTS} attempts: silos dropped out between its exchanges"
        )

    def _refill(self, number: int) -> Exchanges[ServerBatch]:
        """Collect deposits of a batch, hand out the shares, have the batch signed, activate it."""
        session = self._session
        assert session is not None
        deposits = yield from self._ask(session.members, DepositRequest(number), Deposit)
        for place in list(deposits):
            if not _well_formed(session, place, number, deposits[place]):
                self._fault(place, "a deposit of the wrong form")
                del deposits[place]
        self._require(len(deposits), "refill")
        batch = ServerBatch(session, number, deposits)
        yield from self._deliver(batch, batch.depositors)
        self._batches[number] = batch
        for old in sorted(self._batches)[:-_KEPT_BATCHES]:
            del self._batches[old]
        return batch

    def _deliver(self, batch: ServerBatch, places: Iterable[int]) -> Exchanges[None]:
        """Hand each of `places` its shares; with the consistency check, then the signatures on the batch."""
        roster, number = self._roster, batch.number
        replies = yield from self._ask_each({p: batch.delivery(p) for p in places}, BatchSignature)
        if not roster.consistency_check:
            batch.active.update(replies)
            return
        for place, reply in replies.items():
            if roster.verify(place, reply.signature, batch.statement):
                batch.signatures[place] = reply.signature
            else:
                self._fault(place, "a wrong signature on the batch")
        signers = sorted(batch.signatures)[: roster.signatures_needed]
        self._require(len(signers), "refill")
        activate = Activate(number, roster.bitmap(frozenset(signers)), [batch.signatures[s] for s in signers])
        done = yield from self._ask([p for p in replies if p in batch.signatures], activate, Done)
        batch.active.update(done)

    def _require(self, present: int, stage: str) -> None:
        needed = self._roster.signatures_needed if self._roster.consistency_check else 0
        needed = max(needed, self._roster.min_cohort)
        if present < needed:
            raise AggregationError(
                f"{stage}: {present} of {self._roster.size} silos answered, {needed} are needed"
            )

    # The sum

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
        batch = self._batches.get(index // roster.batch)
        if batch is None:
            raise AggregationError(f"sum {index} was not prepared")
        ring = self._rings.get(table.digest)
        if ring is None:
            ring = self._rings[table.digest] = Ring(table, roster.bits, roster.size)
        payloads = self._payloads(index, cohort, ring, contributions, batch)
        survivors = self._name_survivors(index, payloads)
        payloads = {p: payloads[p] for p in survivors}
        bitmap = roster.bitmap(frozenset(survivors))
        request = RevealRequest(index, bitmap, table.digest, context, b"", [], [])
        if roster.consistency_check:
            request = yield from self._sign(request, batch, payloads)
        reveals = yield from self._ask(sorted(batch.active), request, Shares)
        shares = {place: reply.shares for place, reply in reveals.items() if reply.sum_index == index}
        total = unmask(batch, index, ring, payloads, shares, table.digest, context)
        return Total(ring.decode(total), tuple(roster.ids[p] for p in survivors))

    def _payloads(
        self,
        index: int,
        cohort: Sequence[str],
        ring: Ring,
        contributions: Mapping[str, bytes],
        batch: ServerBatch,
    ) -> dict[int, bytes]:
        """The well-formed contributions of the cohort, by place, ascending."""
        length = ring.table.size * ring.dtype.itemsize
        payloads: dict[int, bytes] = {}
        for silo in sorted(set(cohort) & contributions.keys() & self._roster.places.keys()):
            place = self._roster.places[silo]
            try:
                message = unpack(contributions[silo], Contribution)
            except ProtocolError as error:
                self._fault(place, str(error))
                continue
            if message.sum_index != index or len(message.payload) != length or place not in batch.present:
                self._fault(place, "a contribution of another sum or another length")
                continue
            payloads[place] = message.payload
        return payloads

    def _name_survivors(self, index: int, payloads: Mapping[int, bytes]) -> tuple[int, ...]:
        """Store the survivors, then go on with the stored ones: a second call cannot name others."""
        roster = self._roster
        if len(payloads) < roster.min_cohort:
            raise AggregationError(
                f"sum {index}: {len(payloads)} silos contributed, at least min_cohort = {roster.min_cohort} "
                "are needed"
            )
        bitmap = roster.bitmap(frozenset(payloads))
        survivors = roster.members_of(self._store.claim(f"survivors/{index}", bitmap))
        if not payloads.keys() >= set(survivors):
            raise AggregationError(f"sum {index}: a contribution of the survivors named before is missing")
        return survivors

    def _sign(
        self, request: RevealRequest, batch: ServerBatch, payloads: Mapping[int, bytes]
    ) -> Exchanges[RevealRequest]:
        """Collect signatures on the survivors; each also confirms the contribution received from its silo."""
        roster, session = self._roster, batch.session
        statement = session.survivors_statement(
            batch.digest, request.sum_index, request.survivors, request.table, request.context
        )
        ask = SignRequest(request.sum_index, request.survivors, request.table, request.context)
        replies = yield from self._ask(sorted(batch.active), ask, SetSignature)
        signed: dict[int, SetSignature] = {}
        for place, reply in sorted(replies.items()):
            signs = session.set_statement(statement, reply.contribution)
            if reply.sum_index != request.sum_index or not roster.verify(place, reply.signature, signs):
                self._fault(place, "a wrong signature on the survivors")
                continue
            if place in payloads and hashlib.sha256(payloads[place]).digest() != reply.contribution:
                raise AggregationError(
                    f"sum {request.sum_index}: what came in for silo '{roster.ids[place]}' is not what it sent"
                )
            signed[place] = reply
        needed = roster.signatures_needed
        if len(signed) < needed:
            raise AggregationError(
                f"sum {request.sum_index}: {len(signed)} of {roster.size} silos signed the survivors, "
                f"{needed} are needed"
            )
        signers = sorted(signed)[:needed]
        return request._replace(
            signers=roster.bitmap(frozenset(signers)),
            contributions=[signed[s].contribution for s in signers],
            signatures=[signed[s].signature for s in signers],
        )

    # Exchanges

    def _ask(self, places: Iterable[int], message: tuple[Any, ...], kind: type[M]) -> Exchanges[dict[int, M]]:
        """Send one message to several silos; the well-formed replies by place."""
        data = pack(message)
        return (yield from self._exchange(dict.fromkeys(places, data), kind))

    def _ask_each(self, messages: Mapping[int, tuple[Any, ...]], kind: type[M]) -> Exchanges[dict[int, M]]:
        """Send each silo its own message; the well-formed replies by place."""
        return (yield from self._exchange({p: pack(m) for p, m in messages.items()}, kind))

    def _exchange(self, messages: Mapping[int, bytes], kind: type[M]) -> Exchanges[dict[int, M]]:
        ids = self._roster.ids
        replies = yield {ids[place]: data for place, data in messages.items()}
        out: dict[int, M] = {}
        for place in messages:
            data = replies.get(ids[place])
            if data is None:
                continue
            try:
                out[place] = unpack(data, kind)
            except ProtocolError as error:
                self._fault(place, str(error))
        return out

    def _fault(self, place: int, reason: str) -> None:
        self.faults[self._roster.ids[place]] = reason


def _well_formed(session: Session, place: int, number: int, deposit: Deposit) -> bool:
    count = session.roster.batch
    return (
        deposit.batch == number
        and len(deposit.commitments) == 64 * count
        and len(deposit.sealed_seeds) == count * sealed_length(session, place)
        and len(deposit.envelopes) == len(session.neighbours[place])
    )
