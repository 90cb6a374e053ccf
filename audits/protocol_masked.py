"""Our masked sums as a subject of protocol audits: a server that has every message and asks as it likes.

All that it uses is public, came to it as bytes, or is handed over by a colluder: its store.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from secure_fvi import wire
from secure_fvi.aggregation import shamir
from secure_fvi.aggregation.base import Block, BlockTable, FloatArray, SumSilo, carry
from secure_fvi.aggregation.graph import COMPLETE_UP_TO
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.masked_server import MaskedServer, ServerBatch
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import (
    Activate,
    Contribution,
    Deposit,
    DepositRequest,
    KeyAdvert,
    KeySet,
    KeysRequest,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.onetime import (
    Asked,
    Setup,
    draw,
    mask_key,
    open_envelope,
    open_seeds,
    pair_seeds,
    whole_key,
)
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.ring import Ring, RingArray
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import Secret, Session, advert_statement, key_set_hash, nonce_commitment
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.audits.protocol_contract import Forgery, Signatures, Words
from secure_fvi.errors import InputError, ProtocolError

TABLE = BlockTable((Block("records", (1,), 1e6, integer=True), Block("gradient", (11,), 10.0)))
Apply = Callable[[RingArray, Sequence[Mask]], None]


class AuditStore(MemoryStore):
    """A store whose content can be copied: for a backup, or because a colluder hands it over."""

    def __init__(self, slots: Mapping[str, bytes] | None = None) -> None:
        super().__init__()
        self.put(slots or {})

    @property
    def slots(self) -> dict[str, bytes]:
        return self._slots


@dataclass(frozen=True)
class MaskedSubject:
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

    def open(self) -> MaskedSession:
        """A session with fresh identities, sum 0 prepared."""
        session = self.unprepared()
        session.prepare(0)
        return session

    def unprepared(self, identities: Mapping[str, Identity] | None = None) -> MaskedSession:
        """A session before its first exchange, of `identities` if they are given."""
        names = [f"silo-{j + 1}" for j in range(self.count)]
        return MaskedSession(self, identities or {name: Identity() for name in names})


@dataclass(frozen=True)
class BeforeSetUp:
    """A subject whose sessions are attacked from their first message on."""

    subject: MaskedSubject

    @property
    def name(self) -> str:
        return self.subject.name

    def open(self) -> MaskedSession:
        return self.subject.unprepared()


class MaskedSession:
    """`protocol_contract.CheatedServer`, `MaskedInside` and `Impersonated`, for masked sums of up to 32 silos."""

    def __init__(self, subject: MaskedSubject, identities: Mapping[str, Identity]) -> None:
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
        self._shares: dict[tuple[int, int, Secret], dict[int, bytes]] = defaultdict(dict)
        self._setups: dict[int, Setup] = {}  # of colluders; a session has one
        self._sent: dict[tuple[int, int], bytes] = {}  # contributions, by index and place
        self._signed: dict[bytes, RevealRequest] = {}  # by survivors: the latest request with all signatures

    def party(self, silo: str, roster: Roster, store: AuditStore) -> SumSilo:
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
        context = self.subject.context(context)
        message = self.parties[silo].contribute(index, self.silos, self.table, values, context)
        self._sent[index, self.roster.places[silo]] = message
        return message

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

    def _colluder_seed(self, colluder: int, victim: int, index: int) -> bytes:
        """The seed of `index` that a colluder shares with the victim, from the colluder's store."""
        name = self.roster.ids[colluder]
        setup = self._setups.get(colluder)
        if setup is None:
            stored = self.stores[name].slots["setup"]
            setup = Setup.restore(self.subject.believes(self.roster), colluder, self.identities[name], stored)
            self._setups[colluder] = setup
        session, number = self.batch(index).session, index // self.roster.batch
        seeds = pair_seeds(session, number, setup.pair_secrets[victim], victim, colluder)
        at = index % self.roster.batch
        return seeds[32 * at : 32 * at + 32]

    def left(self, victim: str, index: int, message: bytes, context: bytes) -> Words:
        place = self.roster.places[victim]
        others = [p for p in range(self.roster.size) if p != place]
        seeds = {p: self._colluder_seed(p, place, index) for p in others}
        return self._unmasked(place, index, message, context, None, seeds).astype(np.uint64)

    def _unmasked(
        self, victim: int, index: int, message: bytes, context: bytes, own: bytes | None, seeds: Mapping[int, bytes]
    ) -> RingArray:
        """The words of a contribution less its pairwise masks, and less its own where the seed is known."""
        words = self.words(message).astype(self.ring.dtype)
        batch = self.batch(index)
        inside = self.subject.context(context)

        def key(seed: bytes) -> bytes:
            return mask_key(batch.session, batch.digest, index, self.table.digest, inside, seed)

        masks = [Mask(key(seed), victim < other) for other, seed in sorted(seeds.items())]
        self._apply(words, [*([] if own is None else [Mask(key(own), True)]), *masks])
        return words

    # What a cheating server does

    def ask(
        self,
        index: int,
        survivors: Sequence[str],
        context: bytes,
        signatures: Signatures = "asked",
        holders: Collection[str] | None = None,
    ) -> list[str]:
        asked = [silo for silo in self.silos if holders is None or silo in holders]
        bitmap = self.roster.bitmap(frozenset(self.roster.places[s] for s in survivors))
        refusals: list[str] = []
        if signatures == "old":
            request = self._signed[bitmap]._replace(sum_index=index, context=self.subject.context(context))
        else:
            request = self._have_signed(index, bitmap, context, asked, refusals)
            if signatures == "short":
                few = self.roster.members_of(request.signers)[: self.roster.signatures_needed - 1]
                request = request._replace(
                    signers=self.roster.bitmap(frozenset(few)), signatures=request.signatures[: len(few)]
                )
            else:
                self._signed[bitmap] = request
        for holder in asked:
            self._keep_shares(holder, request, [survivors], refusals)
        return refusals

    def _have_signed(
        self, index: int, bitmap: bytes, context: bytes, asked: Sequence[str], refusals: list[str]
    ) -> RevealRequest:
        """A request for shares with the signatures of those of `asked` that sign."""
        everyone = self.roster.bitmap(frozenset(range(self.roster.size)))
        named = SignRequest(
            index, everyone, bitmap, self.table.digest, self.subject.context(context), b"", *self._proofs(index, bitmap)
        )
        signed: dict[int, SetSignature] = {}
        for silo in asked:
            try:
                reply = self.parties[silo].handle(pack(named))
            except ProtocolError as error:
                refusals.append(str(error))
                continue
            signed[self.roster.places[silo]] = unpack(reply, SetSignature)
        return RevealRequest(*named, self.roster.bitmap(frozenset(signed)), [s.signature for s in signed.values()])

    def _proofs(self, index: int, survivors: bytes) -> tuple[list[bytes], list[bytes]]:
        """What those of `survivors` whose contributions the server has signed of them."""
        sent = [self._sent.get((index, p)) for p in self.roster.members_of(survivors)]
        if not all(sent):
            return [], []
        known = [unpack(m, Contribution) for m in sent if m]
        return [hashlib.sha256(m.payload).digest() for m in known], [m.signature for m in known]

    def ask_both(self, index: int, victim: str, context: bytes) -> list[str]:
        everyone, rest = self.silos, [s for s in self.silos if s != victim]
        refusals: list[str] = []
        bitmaps = [self.roster.bitmap(frozenset(self.roster.places[s] for s in each)) for each in (everyone, rest)]
        request = self._have_signed(index, bitmaps[0], context, everyone, refusals)
        for holder in self.silos:
            self._keep_shares(holder, request._replace(survivors=b"".join(bitmaps)), [everyone, rest], refusals)
        return refusals

    def _keep_shares(
        self, holder: str, request: RevealRequest, sets: Sequence[Collection[str]], refusals: list[str]
    ) -> None:
        """Ask one silo; an answer has a row of shares for each of the `sets` of survivors."""
        try:
            reply = unpack(self.parties[holder].handle(pack(request)), Shares)
        except ProtocolError as error:
            refusals.append(str(error))
            return
        place, batch = self.roster.places[holder], self.batch(request.sum_index)
        rows = zip([(s, owner) for s in sets for owner in batch.held_by(place)], reply.shares, strict=False)
        for (survivors, owner), share in rows:
            kind = Secret.SELF if self.silos[owner] in survivors else Secret.PAIR
            if share:
                at = batch.session.position(owner, place)
                self._shares[owner, request.sum_index, kind][at] = share

    def _secret(self, owner: int, index: int, kind: Secret) -> bytes | None:
        """A secret of which enough shares came in."""
        shares, needed = self._shares[owner, index, kind], self.batch(index).session.threshold
        if len(shares) < needed:
            return None
        positions = tuple(sorted(shares))[:needed]
        rows = np.frombuffer(b"".join(shares[p] for p in positions), np.uint8).reshape(needed, 32)
        return shamir.recover(positions, rows).tobytes()

    def open(
        self, victim: str, index: int, message: bytes, context: bytes, colluders: Collection[str] = ()
    ) -> FloatArray | None:
        place, batch = self.roster.places[victim], self.batch(index)
        own, seeds = self._secret(place, index, Secret.SELF), self._opened(place, index)
        for other in range(self.roster.size):
            if other == place or other in seeds:
                continue
            if self.silos[other] in colluders:
                seeds[other] = self._colluder_seed(other, place, index)
                continue
            opened = self._opened(other, index)
            if opened:
                seeds[other] = opened[place]
        if own is None or seeds.keys() != set(batch.session.neighbours(place)):
            return None
        return self.ring.decode(self._unmasked(place, index, message, context, own, seeds))

    def _opened(self, owner: int, index: int) -> dict[int, bytes]:
        """The pairwise seeds of an owner whose e is known."""
        e, batch = self._secret(owner, index, Secret.PAIR), self.batch(index)
        return {} if e is None else open_seeds(batch.session, owner, index, e, batch.deposits[owner].sealed_seeds)

    def impersonate(self, victim: str, how: Forgery, values: FloatArray, context: bytes) -> FloatArray:
        return impersonate(self, victim, how, values, context)


# ---- A server that stands between one silo of a masked sum and all others, with X25519 keys of its own ----

#: Signs a statement as the silo in this place of the roster, as well as the server can.
Sign = Callable[[int, bytes], bytes]


class _Peer(NamedTuple):
    """What the server passes off as another silo's."""

    private: X25519PrivateKey
    commitment: bytes
    signature: bytes

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()


def impersonate(session: MaskedSession, victim: str, how: Forgery, values: FloatArray, context: bytes) -> FloatArray:
    """See `protocol_contract.Impersonated`. For "old set-up" and "other roster" the victim has met its peers before."""
    if how in ("old set-up", "other roster"):
        session.prepare(0)
    place = session.roster.places[victim]
    others = [p for p in range(session.roster.size) if p != place]
    roster, party = session.roster, session.parties[victim]
    if how == "other roster":
        roster, party, sign = _under_another_roster(session, victim)
    elif how == "borrowed":
        colluder = session.identities[session.silos[others[0]]]
        sign = lambda _, statement: colluder.sign(statement)  # noqa: E731
    else:
        sign = lambda _, statement: bytes(64)  # noqa: E731
    if how == "old session":
        old = session.subject.unprepared(session.identities)
        old.prepare(0)
        peers = {p: _stolen(old, p) for p in others}
    elif how == "old set-up":
        peers = {p: _stolen(session, p) for p in others}
    else:
        peers = {p: _invented(roster, p, sign) for p in others}
    attempt = 1 if how == "old set-up" else 0
    return _Between(session, roster, party, place, peers, sign, attempt).read(values, context)


def _invented(roster: Roster, place: int, sign: Sign) -> _Peer:
    private, commitment = X25519PrivateKey.generate(), nonce_commitment(roster, 0, place, bytes(32))
    statement = advert_statement(roster, 0, place, private.public_key().public_bytes_raw(), commitment)
    return _Peer(private, commitment, sign(place, statement))


def _stolen(old: MaskedSession, place: int) -> _Peer:
    """An advert of an earlier set-up, with the private key from a store that leaked since."""
    assert old.key_set is not None
    private = wire.own(old.stores[old.silos[place]].slots["setup"], "the set-up")[1]
    found = _Peer(
        X25519PrivateKey.from_private_bytes(private),
        old.key_set.nonce_commitments[place],
        old.key_set.signatures[place],
    )
    assert found.public == old.key_set.public_keys[place]
    return found


def _under_another_roster(session: MaskedSession, victim: str) -> tuple[Roster, SumSilo, Sign]:
    """The victim started anew, with identities of the server's own for all its peers."""
    identities = {s: session.identities[s] if s == victim else Identity() for s in session.silos}
    members = tuple((s, identities[s].public_key) for s in session.silos)
    roster = replace(session.roster, members=members)
    kept = dict(session.stores[victim].slots) if session.subject.durable else None
    party = session.party(victim, roster, session.subject.store(kept))
    return roster, party, lambda place, statement: identities[session.silos[place]].sign(statement)


class _Between:
    """Set-up, refill where sums recover, and one contribution of the victim, whose peers are all invented."""

    def __init__(
        self,
        session: MaskedSession,
        roster: Roster,
        party: SumSilo,
        place: int,
        peers: dict[int, _Peer],
        sign: Sign,
        attempt: int,
    ) -> None:
        self._of, self._roster, self._party = session, roster, party
        self._place, self._peers, self._sign, self._attempt = place, peers, sign, attempt

    def read(self, values: FloatArray, context: bytes) -> FloatArray:
        """The victim's numbers; raises where it refuses."""
        advert = unpack(self._party.handle(pack(KeysRequest(self._attempt))), KeyAdvert)
        session = self._exchange_keys(advert)
        own = X25519PublicKey.from_public_bytes(advert.public_key)
        secrets = {p: peer.private.exchange(own) for p, peer in self._peers.items()}
        if self._roster.whole:
            message, masks = self._whole(session, secrets, values, context)
        else:
            message, masks = self._recovering(session, secrets, values, context)
        words = self._of.words(message).astype(self._of.ring.dtype)
        apply_masks(words, masks)
        return self._of.ring.decode(words)

    def _whole(
        self, session: Session, secrets: dict[int, bytes], values: FloatArray, context: bytes
    ) -> tuple[bytes, list[Mask]]:
        """The victim's contribution, and the masks that come off it."""
        message = self._party.contribute(0, self._of.silos, self._of.table, values, context)
        everyone = self._roster.bitmap(frozenset(range(self._roster.size)))
        asked, me = Asked(0, everyone, self._of.table.digest, context, b""), self._place
        return message, [Mask(whole_key(session, s, me, p, asked, b""), me < p) for p, s in secrets.items()]

    def _recovering(
        self, session: Session, secrets: dict[int, bytes], values: FloatArray, context: bytes
    ) -> tuple[bytes, list[Mask]]:
        """The same, after a batch of which the server has made all else."""
        deposit = unpack(self._party.handle(pack(DepositRequest(0))), Deposit)
        batch = self._agree(session, deposit, secrets)
        message = self._party.contribute(0, self._of.silos, self._of.table, values, context)
        seeds = [(pair_seeds(session, 0, secrets[p], self._place, p)[:32], self._place < p) for p in secrets]
        return message, [
            Mask(mask_key(session, batch.digest, 0, self._of.table.digest, context, seed), negative)
            for seed, negative in [(self._self_seed(session, deposit, secrets), True), *seeds]
        ]

    def _exchange_keys(self, advert: KeyAdvert) -> Session:
        roster = self._roster
        everyone = range(roster.size)
        rows = [self._peers[p][1:] if p != self._place else advert[2:] for p in everyone]
        keys = [self._peers[p].public if p != self._place else advert.public_key for p in everyone]
        bitmap = roster.bitmap(frozenset(everyone))
        columns = [list(c) for c in zip(*rows, strict=True)]
        self._party.handle(pack(KeySet(self._attempt, bitmap, keys, *columns)))
        return Session(roster, key_set_hash(roster, self._attempt, bitmap, keys, columns[0]), everyone, everyone)

    def _agree(self, session: Session, deposit: Deposit, secrets: dict[int, bytes]) -> ServerBatch:
        """Deliver a batch in which all other deposits are invented, with all signatures that are needed."""
        filler = dict.fromkeys(session.members, bytes(32))
        deposits = {p: draw(session, p, 0, filler | {self._place: secrets[p]}).deposit for p in secrets}
        batch = ServerBatch(session, 0, {**deposits, self._place: deposit})
        self._party.handle(pack(batch.delivery(self._place)))
        signers = sorted(secrets)[: self._roster.signatures_needed]
        signatures = [self._sign(p, batch.statement) for p in signers]
        self._party.handle(pack(Activate(0, self._roster.bitmap(frozenset(signers)), signatures)))
        return batch

    def _self_seed(self, session: Session, deposit: Deposit, secrets: dict[int, bytes]) -> bytes:
        """b of index 0, from the shares that the victim sealed for its peers."""
        shares = {}
        for p, envelope in zip(session.neighbours(self._place), deposit.envelopes, strict=True):
            opened = open_envelope(session, 0, self._place, p, secrets[p], envelope)
            assert opened is not None
            shares[session.position(self._place, p)] = opened[0, 0].tobytes()
        positions = tuple(sorted(shares))[: session.threshold]
        rows = np.frombuffer(b"".join(shares[p] for p in positions), np.uint8).reshape(-1, 32)
        return shamir.recover(positions, rows).tobytes()
