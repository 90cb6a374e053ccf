"""A server that stands between one silo of a masked sum and all others, with X25519 keys of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from secure_fvi import wire
from secure_fvi.aggregation import shamir
from secure_fvi.aggregation.base import FloatArray, SumSilo
from secure_fvi.aggregation.messages import (
    Activate,
    Deposit,
    DepositRequest,
    KeyAdvert,
    KeySet,
    KeysRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.onetime import draw, mask_key, open_envelope, pair_seeds
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import Session, advert_statement, key_set_hash, nonce_commitment
from secure_fvi.aggregation.unmask import ServerBatch
from secure_fvi.audits.protocol_contract import Forgery

if TYPE_CHECKING:
    from secure_fvi.audits.protocol_masked import MaskedSession

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
    """Set-up, refill and one contribution of the victim, whose peers are all invented."""

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
        deposit = unpack(self._party.handle(pack(DepositRequest(0))), Deposit)
        batch = self._agree(session, deposit, secrets)
        message = self._party.contribute(0, self._of.silos, self._of.table, values, context)
        seeds = [(pair_seeds(session, 0, secrets[p], self._place, p)[:32], self._place < p) for p in secrets]
        masks = [
            Mask(mask_key(session, batch.digest, 0, self._of.table.digest, context, seed), negative)
            for seed, negative in [(self._self_seed(session, deposit, secrets), True), *seeds]
        ]
        words = self._of.words(message).astype(self._of.ring.dtype)
        apply_masks(words, masks)
        return self._of.ring.decode(words)

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
