"""One-time secrets of a batch of indices: drawn, committed to, sealed and shared; opened by others.

For each index an owner draws b, the seed of its self mask, and e, under which it seals its pairwise seeds of
that index. Both are shared among its holders. Of one index and owner at most one of the two is ever revealed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_fvi.aggregation import shamir
from secure_fvi.aggregation.kdf import (
    LABEL_ENVELOPE,
    LABEL_MASK,
    LABEL_PAIR_SEEDS,
    LABEL_SEALED_SEEDS,
    derive_key,
    digest,
)
from secure_fvi.aggregation.messages import Deposit
from secure_fvi.aggregation.prg import keystream
from secure_fvi.aggregation.session import Secret, Session, number, secret_commitment
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
