"""Homomorphic sums as a subject of protocol audits, and probes of the key holder and of who has its key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from secure_fvi.aggregation.base import BlockTable, FloatArray, carry
from secure_fvi.aggregation.homomorphic import Homomorphic, HomomorphicServer, HomomorphicSilo, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import (
    BFV,
    BFV_PRIME,
    Ciphertexts,
    Decrypted,
    DecryptRequest,
    HolderKey,
    PrimeRing,
    PublicContext,
    SecretContext,
    pack,
)
from secure_fvi.aggregation.homomorphic_schemes import unpack as unpack_encrypted
from secure_fvi.aggregation.key_holder import KEY_HOLDER, KeyHolder
from secure_fvi.aggregation.messages import Contribution, unpack
from secure_fvi.aggregation.roster import Identity
from secure_fvi.audits.protocol_contract import REFUSALS, Attempt, Subject, Words, random_values
from secure_fvi.audits.protocol_masked import TABLE, AuditStore
from secure_fvi.audits.protocol_probes import Played, attempt, context_of
from secure_fvi.errors import AggregationError, InputError, ProtocolError

Asked = Literal["no signatures", "too few signatures", "all signatures", "after its sum"]

_SEED = 20_230_817
_COUNT = 4
#: Shorter bytes hold no key.
_KEY_BYTES = 10_000


@dataclass(frozen=True)
class HomomorphicSubject:
    """BFV sums. In weak copies `holder` is of another make, or silos are given the key pair (`shared_key`)."""

    name: str = "homomorphic"
    config: Homomorphic = field(default_factory=Homomorphic)
    table: BlockTable = TABLE
    holder: Callable[..., KeyHolder] = KeyHolder
    shared_key: bool = False

    def __post_init__(self) -> None:
        if self.config.scheme != "bfv":
            raise InputError(f"protocol audits of homomorphic sums are for scheme = 'bfv', not '{self.config.scheme}'")

    def open(self) -> HomomorphicSession:
        session = HomomorphicSession(self)
        session.prepare(0)
        return session


class HomomorphicSession:
    """`protocol_contract.Session`; the words are those that the key holder would see of a lone contribution."""

    def __init__(self, subject: HomomorphicSubject) -> None:
        self.table, self.modulus = subject.table, BFV_PRIME
        self.silos = tuple(f"silo-{j + 1}" for j in range(_COUNT))
        masks, holder_identity = subject.config.masked, Identity()
        identities = {silo: Identity() for silo in self.silos}
        self._key = SecretContext(BFV)
        self._reader = PublicContext(BFV, self._key.public_bytes)
        public_keys = {silo: identity.public_key for silo, identity in identities.items()}
        self.roster = subject.config.roster(public_keys, holder_identity.public_key, self._key.public_bytes)
        self._ring = PrimeRing(self.table, self.roster.size)
        self.stores = {party: AuditStore() for party in ("", KEY_HOLDER, *self.silos)}
        self._identities, self._masks = identities, masks
        self.parties = {silo: self._party(silo) for silo in self.silos}
        if subject.shared_key:
            for silo in self.silos:
                self.stores[silo].put({"key pair": self._key.to_bytes()})
        self._holder = subject.holder(self.roster, holder_identity, self._key, masks, self.stores[KEY_HOLDER])
        self._aggregator = HomomorphicServer(self.roster, BFV, masks, self.stores[""])
        self._server = WithHolder(self._aggregator, self._holder.handle)
        self.seen: dict[str, list[bytes]] = {party: [] for party in ("", *self.silos)}
        self._server.observe(lambda direction, body: self.seen[""].append(body))

    def prepare(self, index: int) -> None:
        carry(self._server.prepare(index), self._exchange)

    def contribute(self, silo: str, index: int, values: FloatArray, context: bytes) -> bytes:
        return self.parties[silo].contribute(index, self.silos, self.table, values, context)

    def parts(self, message: bytes) -> list[bytes]:
        """The ciphertexts of a contribution."""
        return unpack_encrypted(unpack(message, Contribution).payload, Ciphertexts).parts

    def words(self, message: bytes) -> Words:
        slots = self._key.decrypt(self._reader.read(self.parts(message), self.table.size))
        return np.asarray(slots % BFV_PRIME).astype(np.uint64)

    def decode(self, words: Words) -> FloatArray:
        slots = words.astype(np.int64)
        return self._ring.decode(np.where(slots > BFV_PRIME // 2, slots - BFV_PRIME, slots), ())

    def total(self, index: int, messages: Mapping[str, bytes], context: bytes) -> FloatArray:
        exchanges = self._server.total(index, self.silos, self.table, messages, context)
        return carry(exchanges, self._exchange).values

    def restart(self, silo: str) -> None:
        self.parties[silo] = self._party(silo)

    def _party(self, silo: str) -> HomomorphicSilo:
        identity, store = self._identities[silo], self.stores[silo]
        return HomomorphicSilo(self.roster, silo, identity, Homomorphic(masks=self._masks), store, unbound=True)

    def backup(self) -> dict[str, dict[str, bytes]]:
        return {party: dict(store.slots) for party, store in self.stores.items()}

    def restore(self, backup: dict[str, dict[str, bytes]], silos: Collection[str]) -> None:
        for silo in silos:
            self.stores[silo] = AuditStore(backup[silo])
            self.restart(silo)

    def _exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for silo, message in messages.items():
            self.seen[silo].append(message)
            try:
                replies[silo] = self.parties[silo].handle(message)
            except ProtocolError:
                continue
            self.seen[""].append(replies[silo])
        return replies

    # A cheating server, and whoever has a key

    def request(self, index: int, messages: Mapping[str, bytes], context: bytes) -> DecryptRequest:
        """What an honest server asks of the key holder, kept from it."""
        held: list[bytes] = []

        def withhold(message: bytes) -> bytes:
            held.append(message)
            return b""

        server = WithHolder(self._aggregator, withhold)
        with contextlib.suppress(AggregationError):  # for want of an answer
            carry(server.total(index, self.silos, self.table, messages, context), self._exchange)
        return unpack_encrypted(held[-1], DecryptRequest)

    def ask(self, request: DecryptRequest) -> FloatArray:
        """What the holder's answer says, no mask removed. Raises ProtocolError where it refuses."""
        reply = unpack_encrypted(self._holder.handle(pack(request)), Decrypted)
        return self._ring.decode(np.frombuffer(reply.values, "<i8"), ())

    def read_by(self, party: str, message: bytes) -> FloatArray | None:
        """A contribution opened by any key pair among what a party stored and was sent; None without one."""
        for data in [*self.stores[party].slots.values(), *map(_key_in, self.seen[party])]:
            if len(data) < _KEY_BYTES:
                continue
            try:
                key = SecretContext.from_bytes(BFV, data)
            except REFUSALS:
                continue
            reader = PublicContext(BFV, key.public_bytes)
            return self._ring.decode(key.decrypt(reader.read(self.parts(message), self.table.size)), ())
        return None


def _key_in(message: bytes) -> bytes:
    try:
        return unpack_encrypted(message, HolderKey).public_key
    except ProtocolError:
        return message


def decrypted_alone(subject: Subject[HomomorphicSession], trials: int, asked: Asked) -> Played:
    """The server hands the key holder one silo's ciphertexts in place of the sum. Success: the silo's input."""
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(trials):
        session.prepare(index)
        victim, context = session.silos[index % len(session.silos)], context_of(index)
        values = {silo: random_values(rng, session.table) for silo in session.silos}
        messages = {silo: session.contribute(silo, index, v, context) for silo, v in values.items()}
        request = session.request(index, messages, context)
        if asked == "after its sum":
            session.ask(request)
        keep = {"no signatures": 0, "too few signatures": session.roster.signatures_needed - 1}.get(asked)
        signers = session.roster.members_of(request.signers)[:keep]
        lone = request._replace(
            parts=session.parts(messages[victim]),
            signers=session.roster.bitmap(frozenset(signers)),
            signatures=request.signatures[:keep],
        )
        attempts.append(attempt(partial(session.ask, lone), values[victim], random_values(rng, session.table)))
    return attempts, session.table.bounds


def opened_by_others(subject: Subject[HomomorphicSession], sums: int) -> Played:
    """Every party but the key holder looks through all it has for a key pair.

    Success: what is inside a silo's ciphertexts, masked or not.
    """
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(sums):
        session.prepare(index)
        values = {silo: random_values(rng, session.table) for silo in session.silos}
        messages = {silo: session.contribute(silo, index, v, context_of(index)) for silo, v in values.items()}
        session.total(index, messages, context_of(index))
        for at, party in enumerate(("", *session.silos)):
            victim = session.silos[at % len(session.silos)]
            read = session.read_by(party, messages[victim])
            inside = session.decode(session.words(messages[victim]))
            attempts.append(Attempt(read, inside, random_values(rng, session.table)))
    return attempts, session.table.bounds
