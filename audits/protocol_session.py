"""Masked sums in an auditor's hands: honest parties whose stores can be copied, and copies of them made weaker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray, SumSilo, carry
from secure_fvi.aggregation.graph import COMPLETE_UP_TO
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import Contribution, Deposit, KeySet, unpack, unpack_any
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.ring import Ring, RingArray
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import Session, key_set_hash
from secure_fvi.aggregation.unmask import ServerBatch
from secure_fvi.audits.protocol_contract import Words
from secure_fvi.errors import InputError, ProtocolError

TABLE = BlockTable((Block("records", (1,), 1e6, integer=True), Block("gradient", (11,), 10.0)))
Apply = Callable[[RingArray, Sequence[Mask]], None]


class AuditStore:
    """A store whose content can be copied: for a backup, or because a colluder hands it over."""

    def __init__(self, slots: Mapping[str, bytes] | None = None) -> None:
        self.slots = dict(slots or {})

    def claim(self, slot: str, value: bytes, settle: bool = True) -> bytes:
        return self.slots.setdefault(slot, value)

    def put(self, slots: Mapping[str, bytes]) -> None:
        self.slots.update(slots)

    def get(self, slot: str) -> bytes | None:
        return self.slots.get(slot)

    def drop(self, slots: Iterable[str]) -> None:
        for slot in slots:
            self.slots.pop(slot, None)


@dataclass(frozen=True)
class Copy:
    """Masked sums as they are; each field that is set otherwise makes a weaker copy (protocol_weak.py).

    store, silo: what a silo is made of. colluders: how many, the last by name, are in league with the server; colluder:
    what they are made of. durable: whether a silo is started again over what it stored. believes: the roster as silos
    see it. masking: makes, once a silo, what adds masks to ring elements. context: what parties make of a broadcast's
    hash.
    """

    name: str = "masked"
    config: Masked = field(default_factory=lambda: Masked(max_missing=4))  # so that a server may name others dropped
    count: int = 4
    table: BlockTable = TABLE
    store: Callable[[Mapping[str, bytes] | None], AuditStore] = AuditStore
    silo: Callable[..., SumSilo] = MaskedSilo
    colluders: int = 0
    colluder: Callable[..., SumSilo] = MaskedSilo
    durable: bool = True
    believes: Callable[[Roster], Roster] = lambda roster: roster
    masking: Callable[[], Apply] | None = None
    context: Callable[[bytes], bytes] = lambda context: context

    def __post_init__(self) -> None:
        if not 4 <= self.count <= COMPLETE_UP_TO:
            raise InputError(f"protocol audits take 4 to {COMPLETE_UP_TO} silos, not {self.count}")
        if not 0 <= self.colluders < self.count:
            raise InputError(f"{self.colluders} colluders of {self.count} silos leave nobody to attack")


class HonestSession:
    """`protocol_contract.Session` for masked sums of up to 32 silos."""

    def __init__(self, subject: Copy, identities: Mapping[str, Identity]) -> None:
        self.subject, self.identities, self.table = subject, dict(identities), subject.table
        self.silos = tuple(sorted(identities))
        self.colluders = self.silos[len(self.silos) - subject.colluders :]
        self.roster = subject.config.roster({s: i.public_key for s, i in identities.items()})
        self.ring = Ring(self.table, self.roster.bits, self.roster.size)
        self.modulus = 2**self.roster.bits
        self.stores = {silo: subject.store(None) for silo in self.silos}
        self.parties = {silo: self.party(silo, self.roster, self.stores[silo]) for silo in self.silos}
        self.key_set: KeySet | None = None
        self._server_store = AuditStore()
        self._server = MaskedServer(self.roster, self._server_store)
        self._deposits: dict[int, dict[int, Deposit]] = defaultdict(dict)
        self._batches: dict[int, ServerBatch] = {}
        self._apply = apply_masks if subject.masking is None else subject.masking()

    def party(self, silo: str, roster: Roster, store: AuditStore) -> SumSilo:
        """A silo over `store`, as the subject makes them."""
        seal = None
        if self.subject.masking is not None:
            apply = self.subject.masking()

            def seal(table: BlockTable, values: FloatArray, masks: Sequence[Mask]) -> bytes:
                words = Ring(table, roster.bits, roster.size).encode(values)
                apply(words, masks)
                return words.tobytes()

        make = self.subject.colluder if silo in self.colluders else self.subject.silo
        return make(self.subject.believes(roster), silo, self.identities[silo], store, seal=seal, unbound=True)

    # What every session can do

    def prepare(self, index: int) -> None:
        carry(self._server.prepare(index), self._exchange)

    def contribute(self, silo: str, index: int, values: FloatArray, context: bytes) -> bytes:
        return self.parties[silo].contribute(index, self.silos, self.table, values, self.subject.context(context))

    def words(self, message: bytes) -> Words:
        return np.frombuffer(unpack(message, Contribution).payload, self.ring.dtype).astype(np.uint64)

    def decode(self, words: Words) -> FloatArray:
        return self.ring.decode(words.astype(self.ring.dtype))

    def total(self, index: int, messages: Mapping[str, bytes], context: bytes) -> FloatArray:
        exchanges = self._server.total(index, self.silos, self.table, messages, self.subject.context(context))
        return carry(exchanges, self._exchange).values

    def restart(self, silo: str) -> None:
        self.restore({silo: dict(self.stores[silo].slots)}, [silo])

    def backup(self) -> dict[str, dict[str, bytes]]:
        """By silo; the server's under the empty name."""
        stores = {"": self._server_store, **self.stores}
        return {party: dict(store.slots) for party, store in stores.items()}

    def restore(self, backup: dict[str, dict[str, bytes]], silos: Collection[str]) -> None:
        """Where all silos are set back, so is the server, which could not go on with them otherwise."""
        for silo in silos:
            self.stores[silo] = self.subject.store(backup[silo] if self.subject.durable else None)
            self.parties[silo] = self.party(silo, self.roster, self.stores[silo])
        if set(silos) == set(self.silos) and "" in backup:
            self._server_store = AuditStore(backup[""])
            self._server = MaskedServer(self.roster, self._server_store)

    def _exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for silo, message in messages.items():
            try:
                replies[silo] = self.parties[silo].handle(message)
            except ProtocolError:
                continue
            request, reply = unpack_any(message), unpack_any(replies[silo])
            if isinstance(request, KeySet):
                self.key_set = request
            if isinstance(reply, Deposit):
                self._deposits[reply.batch][self.roster.places[silo]] = reply
                self._batches.pop(reply.batch, None)
        return replies

    def batch(self, index: int) -> ServerBatch:
        """The deposits of the batch that `index` belongs to."""
        number = index // self.roster.batch
        if number not in self._batches:
            assert self.key_set is not None
            members = self.roster.members_of(self.key_set.members)
            _, bitmap, keys, commitments, _ = self.key_set
            named = key_set_hash(self.roster, self.key_set.attempt, bitmap, keys, commitments)
            session = Session(self.roster, named, members, members)
            self._batches[number] = ServerBatch(session, number, self._deposits[number])
        return self._batches[number]
