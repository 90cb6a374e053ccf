"""The key holder of homomorphic sums: the third party that can decrypt, and decrypts totals only.

It is neither the aggregator nor a silo. It decrypts one total for each index, once, and only when T silos of the
roster signed the survivors of that index. It cannot see that a ciphertext is the sum of the survivors' own: with
masks (the default) it need not, since whatever it opens is uniform to it and to the server unless the survivors
open the masks of exactly that sum; without them the aggregator is trusted to add honestly.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from secure_fvi.aggregation.base import size_of
from secure_fvi.aggregation.homomorphic_schemes import (
    CKKS,
    DECRYPTIONS,
    Decrypted,
    DecryptRequest,
    HolderKey,
    HolderKeyRequest,
    PublicContext,
    Scheme,
    SecretContext,
    flood,
    pack,
    unpack_any,
)
from secure_fvi.aggregation.prg import digest
from secure_fvi.aggregation.roster import Identity, Roster, check_missing
from secure_fvi.aggregation.session import Session, number
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import InputError, ProtocolError

LABEL_HOLDER_KEY = b"holder-key"
LABEL_HOLDER_ADVERT = b"holder-advert"
LABEL_REQUEST = b"decrypt-request"
LABEL_DECRYPTED = b"decrypted"

#: The peer to which the server's exchanges address the key holder; no silo may have this id.
KEY_HOLDER = "key-holder"


def key_hash(scheme: Scheme, masks: bool, public_key: bytes) -> bytes:
    """32 bytes that name an encryption key and what it is used for."""
    return digest(LABEL_HOLDER_KEY, scheme.name.encode(), bytes([masks]), public_key)


def holder_entry(identity_key: bytes, scheme: Scheme, masks: bool, public_key: bytes) -> bytes:
    """What the roster says of the key holder, 64 bytes: its identity key, and the hash of its encryption key."""
    return identity_key + key_hash(scheme, masks, public_key)


def check_holder_key(roster: Roster, scheme: Scheme, masks: bool, message: HolderKey) -> PublicContext:
    """The key that the roster names; ProtocolError for any other, before a byte of it is parsed as a key."""
    if holder_entry(roster.key_holder[:32], scheme, masks, message.public_key) != roster.key_holder:
        raise ProtocolError("the roster names another encryption key of the key holder")
    if not holder_signed(roster, message.signature, digest(LABEL_HOLDER_ADVERT, roster.hash)):
        raise ProtocolError("the encryption key is not signed by the roster's key holder")
    return PublicContext(scheme, message.public_key)


def holder_signed(roster: Roster, signature: bytes, statement: bytes) -> bool:
    """Whether the key holder that the roster names signed `statement`."""
    try:
        Ed25519PublicKey.from_public_bytes(roster.key_holder[:32]).verify(signature, statement)
    except InvalidSignature:
        return False
    return True


def request_digest(request: DecryptRequest) -> bytes:
    """Names what is to be decrypted. Not who signed it: a retry may bring other signatures on the same."""
    r = request
    fields = (r.key_set, r.batch, r.cohort, r.survivors, r.table, r.context, r.question, r.blocks, *r.parts)
    return digest(LABEL_REQUEST, number(r.sum_index), *fields)


def decrypted_statement(roster: Roster, request: DecryptRequest, values: bytes) -> bytes:
    """What the holder signs: its answer and the sum that it belongs to."""
    r = request
    fields = (r.key_set, r.batch, number(r.sum_index), r.cohort, r.survivors, r.table, r.context, r.question)
    return digest(LABEL_DECRYPTED, roster.hash, *fields, hashlib.sha256(values).digest())


class KeyWornOut(ProtocolError):
    """A CKKS key has decrypted as many ciphertexts as its flooding is made for; a new session brings a new one."""


class KeyHolder:
    """Holds the secret key. `handle` answers the server's requests or raises ProtocolError.

    With a durable store, a new object over the same store (and the same keys) remembers what was decrypted.
    """

    def __init__(
        self, roster: Roster, identity: Identity, key: SecretContext, masks: bool, store: Store | None = None
    ) -> None:
        """`roster` is what this party agreed to; InputError unless it names this identity and this key."""
        if roster.key_holder != holder_entry(identity.public_key, key.scheme, masks, key.public_bytes):
            raise InputError("the roster names another key holder, another key or other settings")
        if identity.public_key in {k for _, k in roster.members}:
            raise InputError("the key holder must not be a silo of the roster")
        self._roster = roster
        self._identity = identity
        self._key = key
        self._reader = PublicContext(key.scheme, key.public_bytes)
        self._store = MemoryStore() if store is None else store
        if self._store.claim("roster", roster.hash) != roster.hash:
            raise InputError("the store holds the state of another session; a new session needs its own")

    def __repr__(self) -> str:
        return "KeyHolder(...)"

    def handle(self, message: bytes) -> bytes:
        """Answer one message of the server. The latest decryption is sent again for the same request."""
        request = unpack_any(message)
        if isinstance(request, HolderKeyRequest):
            signature = self._identity.sign(digest(LABEL_HOLDER_ADVERT, self._roster.hash))
            return pack(HolderKey(self._key.public_bytes, signature))
        if isinstance(request, DecryptRequest):
            return self._decrypt(request)
        raise ProtocolError(f"the key holder does not take {type(request).__name__}")

    def _decrypt(self, request: DecryptRequest) -> bytes:
        index, named = request.sum_index, request_digest(request)
        self._check_signatures(request)
        done = self._store.get(f"decrypted/{index}")
        kept = self._store.get(f"answer/{index}")
        if done not in (None, named) or kept == b"":
            raise ProtocolError(f"sum {index} was decrypted already")
        if kept is not None:
            return kept
        # Claimed and yet without an answer: this party was killed in between, and nothing has left.
        vectors = self._reader.read(request.parts, size_of(request.blocks, request.table))
        self._count(len(vectors))
        if self._store.claim(f"decrypted/{index}", named) != named:
            raise ProtocolError(f"sum {index} was decrypted already")
        slots = self._key.decrypt(vectors)
        if self._key.scheme is CKKS:
            slots = flood(slots, self._roster.size)
        values = slots.astype(np.dtype("<i8"), copy=False).tobytes()
        signature = self._identity.sign(decrypted_statement(self._roster, request, values))
        # Claimed too: of two processes over one store, both send what the first has written.
        answer = self._store.claim(f"answer/{index}", pack(Decrypted(index, values, signature)))
        latest = self._store.get("latest")
        emptied = {f"answer/{int.from_bytes(latest, 'big')}": b""} if latest and latest != number(index) else {}
        self._store.put({**emptied, "latest": number(index)})
        return answer

    def _check_signatures(self, request: DecryptRequest) -> None:
        """Raise ProtocolError unless T silos signed these survivors of this index, and no more are missing than may be.

        Each honest signer has checked cohort and question against what it was asked, or against the survivors' own
        signatures, and the survivors against the graph of masks, which the holder does not know.
        """
        roster = self._roster
        check_missing(
            roster, request.sum_index, request.cohort, roster.members_of(request.survivors), roster.max_missing
        )
        # Statements name the key set by its hash; who is in it does not matter to them.
        everyone = range(roster.size)
        session = Session(roster, request.key_set, everyone, everyone)
        statement = session.survivors_statement(request.batch, request)
        roster.check_signed(request.signers, request.signatures, statement)

    def _count(self, ciphertexts: int) -> None:
        """Charge CKKS decryptions before they happen: the flooding is made for DECRYPTIONS of them."""
        if self._key.scheme is not CKKS:
            return
        at = int.from_bytes(self._store.get("spent") or b"", "big")
        mine = os.urandom(16) + number(ciphertexts)
        # Claimed, each from where the one before ended: two processes over one store count each other's as well.
        while True:
            if at + ciphertexts > DECRYPTIONS:
                raise KeyWornOut(f"more than {DECRYPTIONS} ciphertexts under one CKKS key; a new session is needed")
            held = self._store.claim(f"spent/{at}", mine)
            at += int.from_bytes(held[16:], "big")
            if held == mine:
                break
        self._store.put({"spent": number(at)})
