"""One-time secrets of a batch of indices: drawn, committed to, sealed and shared; opened by others.

For each index an owner draws b, the seed of its self mask, and e, under which it seals its pairwise seeds of
that index. Both are shared among its holders. Of one index and owner at most one of the two is ever revealed.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_fvi import wire
from secure_fvi.aggregation import shamir
from secure_fvi.aggregation.messages import Deposit, KeyAdvert, KeySet, KeysRequest, NonceReveal, Nonces, pack, unpack
from secure_fvi.aggregation.prg import (
    LABEL_ENVELOPE,
    LABEL_MASK,
    LABEL_OWN_MASK,
    LABEL_PAIR_SEEDS,
    LABEL_SEALED_SEEDS,
    LABEL_WHOLE_MASK,
    derive_key,
    digest,
    keystream,
)
from secure_fvi.aggregation.roster import MAX_ATTEMPTS, Identity, Roster
from secure_fvi.aggregation.session import (
    Secret,
    Session,
    advert_statement,
    graph_order,
    key_set_hash,
    nonce_commitment,
    number,
    secret_commitment,
)
from secure_fvi.errors import ProtocolError

Secrets = npt.NDArray[np.uint8]  # (indices, 2, 32): b, then e, of each index of a batch

LABEL_SEED = b"seed-commitment"
LABEL_SHARE = b"share-commitment"

SELF, PAIR = Secret.SELF.column, Secret.PAIR.column
#: Bytes of one commitment in a row.
ROW = 16
_TAG = 16
_NONCE = 12


class Drawn(NamedTuple):
    """What an owner keeps of a batch, and what it hands out. Everything but `deposit` is secret."""

    self_seeds: bytes  # b of each index, 32 bytes each; e is needed no more once it is shared
    own_shares: Secrets | None  # its share of its own secrets, where it is a holder of them
    deposit: Deposit

    def __repr__(self) -> str:
        return "Drawn(...)"


def mask_key(session: Session, batch_digest: bytes, index: int, table: bytes, context: bytes, seed: bytes) -> bytes:
    """The key of one mask of one sum; any party that differs in a field gets an unrelated one."""
    return derive_key(seed, LABEL_MASK, session.binding, batch_digest, number(index), table, context)


class Asked(NamedTuple):
    """What a whole sum is of: all that its masks depend on besides keys and past."""

    sum_index: int
    cohort: bytes  # a bitmap
    table: bytes
    context: bytes
    question: bytes


def whole_key(session: Session, pair_secret: bytes, one: int, other: int, asked: Asked, past: bytes) -> bytes:
    """The key of the one mask that two neighbours share in a whole sum: equal at both, secret.

    past: what both were asked before, by each one's own account. Whoever differs in a field gets an unrelated key. The
    places are among them: a colluder may give out another silo's public key as its own.
    """
    low, high = min(one, other), max(one, other)
    fields = asked.cohort, asked.table, asked.context, asked.question, past
    names = number(asked.sum_index), number(low), number(high)
    return derive_key(pair_secret, LABEL_WHOLE_MASK, session.binding, *names, *fields)


def own_key(session: Session, secret: bytes, asked: Asked) -> bytes:
    """The key of a mask that one silo alone has, from its own 32-byte `secret`, so that it stays in the total."""
    return derive_key(secret, LABEL_OWN_MASK, session.binding, number(asked.sum_index), *asked[1:])


def pair_seeds(session: Session, batch: int, pair_secret: bytes, one: int, other: int) -> bytes:
    """The seeds that two neighbours share, 32 bytes for each index of the batch: equal at both, secret.

    Blocks of one AES-CTR keystream, so that opening one index's seed says nothing about another's.
    """
    low, high = min(one, other), max(one, other)
    key = derive_key(pair_secret, LABEL_PAIR_SEEDS, session.binding, number(batch), number(low), number(high))
    return keystream(key, 32 * session.roster.batch)


def seed_row(session: Session, batch: int, one: int, other: int, seeds: bytes, first: int = 0) -> bytes:
    """Commitments to the seeds that two neighbours share, ROW bytes for each index of the batch: equal at both.

    first: number of the first entry, where `seeds` is a part.
    """
    low, high = min(one, other), max(one, other)
    return _row(digest(LABEL_SEED, session.binding, number(batch), number(low), number(high)), seeds, first)


def share_row(session: Session, batch: int, owner: int, holder: int, shares: bytes, first: int = 0) -> bytes:
    """Commitments to the shares that `holder` is dealt, of b and then of e for each index, ROW bytes each."""
    return _row(digest(LABEL_SHARE, session.binding, number(batch), number(owner), number(holder)), shares, first)


def _row(name: bytes, secrets: bytes, first: int) -> bytes:
    # What is committed to is 32 bytes that look random to all others. 16 bytes of a hash: to find another value for the
    # commitment of an honest party takes 2^128 tries.
    base, parts = hashlib.sha256(name), []
    for at in range(0, len(secrets), 32):
        state = base.copy()
        state.update((first + at // 32).to_bytes(4, "big") + secrets[at : at + 32])
        parts.append(state.digest()[:ROW])
    return b"".join(parts)


def draw(session: Session, me: int, batch: int, pair_secrets: Mapping[int, bytes]) -> Drawn:
    """Fresh secrets of `me` for all indices of `batch`, with the deposit, not yet signed, for the server."""
    count = session.roster.batch
    secrets = np.frombuffer(os.urandom(count * 64), np.uint8).reshape(count, 2, 32)
    holders = session.holders(me)
    rows = shamir.share(secrets.reshape(-1), len(holders), session.threshold)
    shares = dict(zip(holders, rows, strict=True))

    neighbours = session.neighbours(me)
    rows_of = {v: pair_seeds(session, batch, pair_secrets[v], me, v) for v in neighbours}
    by_index = np.frombuffer(b"".join(rows_of.values()), np.uint8).reshape(len(neighbours), count, 32).swapaxes(0, 1)
    commitments, sealed = [], []
    for at, (b, e) in enumerate(secrets):
        index = batch * count + at
        commitments.append(secret_commitment(session.binding, me, index, Secret.SELF, b.tobytes()))
        commitments.append(secret_commitment(session.binding, me, index, Secret.PAIR, e.tobytes()))
        sealed.append(_sealing(session, me, index, e.tobytes()).encrypt(bytes(_NONCE), by_index[at].tobytes(), b""))
    envelopes = [_seal_envelope(session, batch, me, v, pair_secrets[v], shares[v].tobytes()) for v in neighbours]
    own = shares.get(me)
    return Drawn(
        secrets[:, SELF].tobytes(),
        None if own is None else own.reshape(count, 2, 32),
        Deposit(
            batch,
            b"".join(commitments),
            b"".join(sealed),
            [seed_row(session, batch, me, v, seeds) for v, seeds in rows_of.items()],
            [share_row(session, batch, me, v, shares[v].tobytes()) for v in holders],
            envelopes,
            b"",
        ),
    )


def _sealing(session: Session, owner: int, index: int, e: bytes) -> AESGCM:
    """The cipher of one index's pairwise seeds; its key is used once, so the nonce may be constant."""
    return AESGCM(derive_key(e, LABEL_SEALED_SEEDS, session.binding, number(owner), number(index)))


def sealed_length(session: Session, owner: int) -> int:
    """Bytes of one index's sealed seeds."""
    return 32 * len(session.neighbours(owner)) + _TAG


def open_seeds(session: Session, owner: int, index: int, e: bytes, sealed_seeds: bytes) -> dict[int, bytes]:
    """The seeds that `owner` shared with its neighbours at `index`; ProtocolError if they were altered."""
    length = sealed_length(session, owner)
    at = index % session.roster.batch
    try:
        plain = _sealing(session, owner, index, e).decrypt(
            bytes(_NONCE), sealed_seeds[at * length : (at + 1) * length], b""
        )
    except InvalidTag:
        raise ProtocolError(f"the sealed seeds of silo '{session.roster.ids[owner]}' do not open") from None
    return {v: plain[32 * i : 32 * i + 32] for i, v in enumerate(session.neighbours(owner))}


def _envelope_fields(session: Session, batch: int, sender: int, receiver: int) -> tuple[bytes, ...]:
    count = session.roster.batch
    return session.binding, number(batch * count), number(count), number(sender), number(receiver)


def _seal_envelope(
    session: Session, batch: int, sender: int, receiver: int, pair_secret: bytes, shares: bytes
) -> bytes:
    """`shares` encrypted end to end; index range, sender and receiver bound by key and associated data."""
    fields = _envelope_fields(session, batch, sender, receiver)
    nonce = os.urandom(_NONCE)
    cipher = AESGCM(derive_key(pair_secret, LABEL_ENVELOPE, *fields))
    return nonce + cipher.encrypt(nonce, shares, b"".join(fields))


def open_envelope(
    session: Session, batch: int, sender: int, receiver: int, pair_secret: bytes, envelope: bytes
) -> Secrets | None:
    """The shares that `sender` addressed to `receiver`, (indices, 2, 32); None unless authentic."""
    fields = _envelope_fields(session, batch, sender, receiver)
    cipher = AESGCM(derive_key(pair_secret, LABEL_ENVELOPE, *fields))
    count = session.roster.batch
    if len(envelope) != _NONCE + count * 64 + _TAG:
        return None
    try:
        plain = cipher.decrypt(envelope[:_NONCE], envelope[_NONCE:], b"".join(fields))
    except InvalidTag:
        return None
    return np.frombuffer(plain, np.uint8).reshape(count, 2, 32)


# ---- A silo's half of the set-up of masked sums: signed ephemeral keys, the agreed key set, the graph ----


class Setup:
    """Keys of one set-up attempt, from advert to session. Holds the ephemeral private key."""

    def __init__(
        self, roster: Roster, me: int, identity: Identity, attempt: int, private_key: bytes, nonce: bytes
    ) -> None:
        self.roster = roster
        self.me = me
        self.attempt = attempt
        self._private = X25519PrivateKey.from_private_bytes(private_key)
        self._nonce = nonce
        public_key = self._private.public_key().public_bytes_raw()
        commitment = nonce_commitment(roster, attempt, me, nonce)
        statement = advert_statement(roster, attempt, me, public_key, commitment)
        self.advert = KeyAdvert(attempt, public_key, commitment, identity.sign(statement))
        self._key_set: KeySet | None = None
        self._nonces: Nonces | None = None
        self._members: tuple[int, ...] = ()
        self._hash = b""
        self.pair_secrets: dict[int, bytes] = {}
        self.session: Session | None = None

    def __repr__(self) -> str:
        return f"Setup(attempt={self.attempt})"

    @classmethod
    def fresh(cls, roster: Roster, me: int, identity: Identity, request: KeysRequest) -> Setup:
        """New ephemeral keys; raises ProtocolError after MAX_ATTEMPTS of them."""
        if request.attempt >= MAX_ATTEMPTS:
            raise ProtocolError(f"more than {MAX_ATTEMPTS} set-ups in one session")
        private_key = X25519PrivateKey.generate().private_bytes_raw()
        return cls(roster, me, identity, request.attempt, private_key, os.urandom(32))

    def to_bytes(self) -> bytes:
        """Everything that `restore` needs, the private key included: for the store alone."""
        messages = [b"" if m is None else pack(m) for m in (self._key_set, self._nonces)]
        return bytes(msgpack.packb([self.attempt, self._private.private_bytes_raw(), self._nonce, *messages]))

    @classmethod
    def restore(cls, roster: Roster, me: int, identity: Identity, data: bytes) -> Setup:
        """The set-up as it was when `data` was made by `to_bytes`."""
        attempt, private_key, nonce, key_set, nonces = wire.own(data, "the silo's set-up")
        setup = cls(roster, me, identity, attempt, private_key, nonce)
        if key_set:
            setup.accept_keys(unpack(key_set, KeySet))
        if nonces:
            setup.accept_nonces(unpack(nonces, Nonces))
        return setup

    def accept_keys(self, message: KeySet, first: Callable[[], KeySet] | None = None) -> NonceReveal:
        """Check everybody's advert and fix the key set; the nonce is revealed for the first key set only.

        first: claims this key set, once it is found good, and returns the one that was claimed first.
        """
        if message.attempt != self.attempt:
            raise ProtocolError("a key set of another set-up")
        roster = self.roster
        members = roster.members_of(message.members)
        columns = (message.public_keys, message.nonce_commitments, message.signatures)
        if any(len(column) != len(members) for column in columns):
            raise ProtocolError("a key set needs one key, commitment and signature for each member")
        self._check_size(members)
        for place, public_key, commitment, signature in zip(members, *columns, strict=True):
            if place == self.me:
                if (public_key, commitment) != (self.advert.public_key, self.advert.nonce_commitment):
                    raise ProtocolError("the key set holds another key of this silo")
                continue
            statement = advert_statement(roster, self.attempt, place, public_key, commitment)
            if not roster.verify(place, signature, statement):
                raise ProtocolError(f"the key of silo '{roster.ids[place]}' is not signed with its identity")
        if first is not None and first() != message:
            raise ProtocolError("another key set for this set-up was accepted already")
        self._key_set, self._members = message, members
        self._hash = key_set_hash(roster, self.attempt, message.members, message.public_keys, message.nonce_commitments)
        if roster.neighbourhood.complete:
            self._fix(members)
        return NonceReveal(self.attempt, self._hash, self._nonce)

    def _check_size(self, members: tuple[int, ...]) -> None:
        roster = self.roster
        if self.me not in members:
            raise ProtocolError("the key set leaves this silo out")
        needed = max(roster.min_cohort, roster.signatures_needed if roster.consistency_check else 0)
        if roster.whole:
            needed = roster.size
        if len(members) < needed:
            raise ProtocolError(f"a key set of {len(members)} silos; at least {needed} are needed")

    def accept_nonces(self, message: Nonces) -> None:
        """Check every nonce against its commitment, all of which were fixed before; derive the graph."""
        if self._key_set is None or message.attempt != self.attempt:
            raise ProtocolError("nonces before the key set, or of another set-up")
        if len(message.nonces) != len(self._members):
            raise ProtocolError("a nonce of each member is needed")
        rows = zip(self._members, message.nonces, self._key_set.nonce_commitments, strict=True)
        for place, nonce, commitment in rows:
            if not hmac.compare_digest(nonce_commitment(self.roster, self.attempt, place, nonce), commitment):
                raise ProtocolError(f"the nonce of silo '{self.roster.ids[place]}' is not what it committed to")
        self._fix(_order(self._hash, self._members, tuple(message.nonces)))
        self._nonces = message

    def _fix(self, order: tuple[int, ...]) -> None:
        """Build the session and the secrets shared with each neighbour."""
        if self.session is not None:
            return
        assert self._key_set is not None
        session = _session(self.roster, self._hash, self._members, order)
        keys = dict(zip(self._members, self._key_set.public_keys, strict=True))
        for place in session.neighbours(self.me):
            try:
                secret = self._private.exchange(X25519PublicKey.from_public_bytes(keys[place]))
            except ValueError:  # a point of small order, whose shared secret would be all zeros
                raise ProtocolError(f"the key of silo '{self.roster.ids[place]}' is unusable") from None
            self.pair_secrets[place] = secret
        self.session = session


#: Public, and the same at all silos of one process.
_order, _session = functools.lru_cache(maxsize=1)(graph_order), functools.lru_cache(maxsize=1)(Session)
