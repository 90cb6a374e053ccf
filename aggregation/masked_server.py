"""The server's half of masked sums: names survivors, has their masks opened, adds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from secure_fvi.aggregation.base import BlockTable, Exchanges, Total
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
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.server_state import ServerState
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.aggregation.unmask import ServerBatch, masks_left
from secure_fvi.errors import AggregationError, InputError, ProtocolError


class Agreed(NamedTuple):
    """Survivors of one index, as signed, and what each of them sent (by place)."""

    batch: ServerBatch
    request: RevealRequest
    payloads: dict[int, bytes]


class MaskedServer:
    """The aggregator. Holds no secret: what it sees is what docs/threat-model.md says it may see.

    With a durable store, a new object over the same store goes on where the old one was killed.
    """

    def __init__(self, roster: Roster, store: Store | None = None) -> None:
        self._roster = roster
        self._store = MemoryStore() if store is None else store
        self._state = ServerState(roster, self._store)
        self._rings: dict[bytes, Ring] = {}

    @property
    def neighbourhood(self) -> str:
        """Degree, threshold and failure probabilities of the graph, in words."""
        return str(self._roster.neighbourhood)

    @property
    def faults(self) -> Mapping[str, str]:
        """By silo id, why its latest bad reply was taken for a dropout."""
        return self._state.faults

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
        length = table.size * ring.dtype.itemsize
        agreed = yield from self.agree(index, cohort, table, contributions, context, length)
        masks = yield from self.masks_left(agreed)
        total = np.zeros(table.size, ring.dtype)
        for payload in agreed.payloads.values():
            np.add(total, np.frombuffer(payload, ring.dtype), out=total)
        apply_masks(total, masks)
        return Total(ring.decode(total), tuple(roster.ids[p] for p in agreed.payloads))

    def agree(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        length: int | None,
    ) -> Exchanges[Agreed]:
        """Name the survivors among those whose payload has `length` bytes (None: any), and have them signed."""
        roster = self._roster
        batch = self._state.batches.get(index // roster.batch)
        if batch is None:
            raise AggregationError(f"sum {index} was not prepared")
        payloads = self._payloads(index, cohort, length, contributions, batch)
        survivors = self._name_survivors(index, payloads)
        payloads = {p: payloads[p] for p in survivors}
        bitmap = roster.bitmap(frozenset(survivors))
        request = RevealRequest(index, bitmap, table.digest, context, b"", [], [])
        if roster.consistency_check:
            request = yield from self._sign(request, batch, payloads)
        return Agreed(batch, request, payloads)

    def masks_left(self, agreed: Agreed) -> Exchanges[list[Mask]]:
        """Have shares revealed; what is still to be applied to the sum of the payloads."""
        batch, request, payloads = agreed
        index = request.sum_index
        reveals = yield from self._state.ask(sorted(batch.active), request, Shares)
        shares = {place: reply.shares for place, reply in reveals.items() if reply.sum_index == index}
        return masks_left(batch, index, payloads, shares, request.table, request.context)

    def _payloads(
        self,
        index: int,
        cohort: Sequence[str],
        length: int | None,
        contributions: Mapping[str, bytes],
        batch: ServerBatch,
    ) -> dict[int, bytes]:
        """The well-formed contributions of the cohort, by place, ascending."""
        payloads: dict[int, bytes] = {}
        for silo in sorted(set(cohort) & contributions.keys() & self._roster.places.keys()):
            place = self._roster.places[silo]
            try:
                message = unpack(contributions[silo], Contribution)
            except ProtocolError as error:
                self._state.fault(place, str(error))
                continue
            right_length = length is None or len(message.payload) == length
            if message.sum_index != index or not right_length or place not in batch.present:
                self._state.fault(place, "a contribution of another sum or another length")
                continue
            payloads[place] = message.payload
        return payloads

    def _name_survivors(self, index: int, payloads: Mapping[int, bytes]) -> tuple[int, ...]:
        """Store the survivors, then go on with the stored ones: a second call cannot name others."""
        roster = self._roster
        if len(payloads) < roster.min_cohort:
            raise AggregationError(
                f"sum {index}: {len(payloads)} silos contributed, at least min_cohort = {roster.min_cohort} are needed"
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
        replies = yield from self._state.ask(sorted(batch.active), ask, SetSignature)
        signed: dict[int, SetSignature] = {}
        for place, reply in sorted(replies.items()):
            signs = session.set_statement(statement, reply.contribution)
            if reply.sum_index != request.sum_index or not roster.verify(place, reply.signature, signs):
                self._state.fault(place, "a wrong signature on the survivors")
                continue
            if place in payloads and hashlib.sha256(payloads[place]).digest() != reply.contribution:
                raise AggregationError(
                    f"sum {request.sum_index}: what came in for '{roster.ids[place]}' is not what it sent"
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
