"""A silo's half of the set-up of masked sums: signed ephemeral keys, the agreed key set, the graph."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

import msgpack
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from secure_fvi import wire
from secure_fvi.aggregation.messages import KeyAdvert, KeySet, KeysRequest, NonceReveal, Nonces, pack, unpack
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import (
    Session,
    advert_statement,
    graph_order,
    key_set_hash,
    nonce_commitment,
)
from secure_fvi.errors import ProtocolError

#: Set-ups that a silo takes part in: each gives a cheating server one try at the graph's seed.
MAX_ATTEMPTS = 8


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
        if self._key_set is not None and message != self._key_set:
            raise ProtocolError("another key set for this set-up was accepted already")
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
        self._fix(graph_order(self._hash, self._members, message.nonces))
        self._nonces = message

    def _fix(self, order: tuple[int, ...]) -> None:
        """Build the session and the secrets shared with each neighbour."""
        if self.session is not None:
            return
        assert self._key_set is not None
        session = Session(self.roster, self._hash, self._members, order)
        keys = dict(zip(self._members, self._key_set.public_keys, strict=True))
        for place in session.neighbours(self.me):
            try:
                secret = self._private.exchange(X25519PublicKey.from_public_bytes(keys[place]))
            except ValueError:  # a point of small order, whose shared secret would be all zeros
                raise ProtocolError(f"the key of silo '{self.roster.ids[place]}' is unusable") from None
            self.pair_secrets[place] = secret
        self.session = session
