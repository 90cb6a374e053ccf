"""What all parties agree on once keys are exchanged: key set, graph, signed statements."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from secure_fvi.aggregation.graph import complete_threshold, least_in_window, ring_neighbours
from secure_fvi.aggregation.messages import Deposit, RevealRequest, SignRequest
from secure_fvi.aggregation.prg import digest
from secure_fvi.aggregation.roster import Roster
from secure_fvi.errors import ProtocolError

if TYPE_CHECKING:
    from secure_fvi.aggregation.homomorphic_schemes import DecryptRequest

LABEL_ADVERT = b"key-advert"
LABEL_NONCE = b"nonce-commitment"
LABEL_KEY_SET = b"key-set"
LABEL_ORDER = b"graph-order"
LABEL_DEPOSIT = b"deposit"
LABEL_DEPOSIT_ROWS = b"deposit-rows"
LABEL_DEPOSIT_SIGNATURE = b"deposit-signature"
LABEL_BATCH = b"batch"
LABEL_BATCH_SIGNATURE = b"batch-signature"
LABEL_UNHELD = b"unheld"
LABEL_SURVIVORS = b"survivors"
LABEL_CONTRIBUTION = b"contribution"
LABEL_COMMITMENT = b"secret-commitment"


def number(value: int) -> bytes:
    """An index, a place or a batch as 8 bytes."""
    return value.to_bytes(8, "big")


def nonce_commitment(roster: Roster, attempt: int, place: int, nonce: bytes) -> bytes:
    """What a silo publishes before any nonce is revealed."""
    return digest(LABEL_NONCE, roster.hash, number(attempt), number(place), nonce)


def advert_statement(roster: Roster, attempt: int, place: int, public_key: bytes, commitment: bytes) -> bytes:
    """What a silo signs for its ephemeral key; with the roster's hash in it, this signs the roster too."""
    return digest(LABEL_ADVERT, roster.session, roster.hash, number(attempt), number(place), public_key, commitment)


def key_set_hash(
    roster: Roster, attempt: int, members: bytes, public_keys: Sequence[bytes], commitments: Sequence[bytes]
) -> bytes:
    """Names the keys in use; two silos with different key sets share no mask."""
    return digest(LABEL_KEY_SET, roster.hash, number(attempt), members, *public_keys, *commitments)


def graph_order(key_set: bytes, members: Sequence[int], nonces: Sequence[bytes]) -> tuple[int, ...]:
    """The members as all nonces together order them: unpredictable before the last is revealed."""
    seed = digest(LABEL_ORDER, key_set, *nonces)
    return tuple(sorted(members, key=lambda place: digest(LABEL_ORDER, seed, number(place))))


class Secret(Enum):
    """The one-time secrets of an owner and index, by the byte that names them. A third there is not."""

    SELF = b"b"  # the seed of the self mask
    PAIR = b"e"  # what the pairwise seeds are sealed with

    @property
    def column(self) -> int:
        """Its place where both stand together."""
        return int(self is Secret.PAIR)


def secret_commitment(binding: bytes, owner: int, index: int, kind: Secret, secret: bytes) -> bytes:
    """Commitment to a one-time secret of 32 random bytes."""
    return digest(LABEL_COMMITMENT, binding, number(owner), number(index), kind.value, secret)


class Session:
    """A fixed key set with its graph. Public; the same object serves both halves of the protocol."""

    def __init__(self, roster: Roster, key_set: bytes, members: Sequence[int], order: Sequence[int]) -> None:
        """`members` (ascending places) exchanged keys; `order` is `members` as the nonces arranged them."""
        self.roster = roster
        self.key_set = key_set
        self.members = tuple(members)
        self.binding = roster.session + roster.hash + key_set
        hood = roster.neighbourhood
        complete = hood.complete or hood.k >= len(self.members) - 1
        self._complete = complete
        self._degree = len(self.members) if complete else hood.k
        self._order = tuple(order)
        self._place_in_order = {member: at for at, member in enumerate(order)}
        self._held: frozenset[int] | None = None  # the set that was found good last: all silos of a process ask of one
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._positions: dict[int, dict[int, int]] = {}
        self.threshold = complete_threshold(len(self.members)) if complete else hood.threshold

    def check_survivors(self, survivors: Collection[int]) -> None:
        """Raise ProtocolError for survivors (places) whom their masks may not hold together, whoever chose them.

        On the ring each window of k/2 consecutive places must keep more of them than colluders may fill.
        """
        if self._complete or survivors is self._held:
            return
        width = self._degree // 2
        there = np.fromiter((member in survivors for member in self._order), np.int64, len(self._order))
        counts = np.cumsum(np.concatenate([[0], there, there[: width - 1]]))
        thinnest = int((counts[width:] - counts[:-width]).min())
        if thinnest < self.least_in_window:
            raise ProtocolError(
                f"the {len(survivors)} survivors named leave {thinnest} of {width} neighbouring places of the graph of "
                f"masks, at least {self.least_in_window} are needed: they could be taken apart"
            )
        self._held = survivors if isinstance(survivors, frozenset) else None

    @cached_property
    def least_in_window(self) -> int:
        """Survivors that each k/2 consecutive places must keep; 0 in a complete graph."""
        if self._complete:
            return 0
        # The colluders are those of the roster, all of whom may be members.
        colluders = min(math.floor(self.roster.corrupt * self.roster.size), len(self.members))
        return least_in_window(len(self.members), colluders, self._degree // 2, self.roster.orders)

    def neighbours(self, member: int) -> tuple[int, ...]:
        """With whom `member` shares masks, ascending."""
        known = self._neighbours.get(member)
        if known is None:
            known = ring_neighbours(self._order, self._place_in_order[member], self._degree)
            self._neighbours[member] = known
        return known

    def holders(self, owner: int) -> tuple[int, ...]:
        """Who holds shares of `owner`'s secrets, ascending: its neighbours.

        In a complete graph `owner` itself holds one too, so that three silos can lose one.
        """
        return self.members if self._complete else self.neighbours(owner)

    def position(self, owner: int, holder: int) -> int:
        """The point 1, 2, ... at which `holder`'s shares of `owner`'s secrets are taken."""
        key = 0 if self._complete else owner
        known = self._positions.get(key)
        if known is None:
            known = {member: at for at, member in enumerate(self.holders(owner), 1)}
            self._positions[key] = known
        return known[holder]

    def deposit_digest(self, owner: int, deposit: Deposit) -> bytes:
        """Names the public part of one silo's deposit."""
        rows = digest(LABEL_DEPOSIT_ROWS, number(len(deposit.seed_rows)), *deposit.seed_rows, *deposit.share_rows)
        fields = (number(deposit.batch), number(owner), deposit.commitments, deposit.sealed_seeds, rows)
        return digest(LABEL_DEPOSIT, self.binding, *fields)

    def deposit_statement(self, owner: int, deposit: Deposit) -> bytes:
        """What an owner signs, so that a deposit damaged on its way counts as none."""
        return digest(LABEL_DEPOSIT_SIGNATURE, self.deposit_digest(owner, deposit), *deposit.envelopes)

    def batch_digest(self, batch: int, depositors: bytes, digests: Sequence[bytes]) -> bytes:
        """Names a batch: who deposited what."""
        return digest(LABEL_BATCH, self.binding, number(batch), depositors, *digests)

    def batch_statement(self, batch_digest: bytes) -> bytes:
        """What is signed before a batch is used."""
        return digest(LABEL_BATCH_SIGNATURE, self.binding, batch_digest)

    def unheld_statement(self, batch_digest: bytes, unheld: bytes) -> bytes:
        """What a holder signs of the owners (a bitmap) who dealt it no shares that fit; of none, as of some."""
        return digest(LABEL_UNHELD, self.binding, batch_digest, unheld)

    def contribution_statement(
        self,
        batch_digest: bytes,
        index: int,
        owner: int,
        cohort: bytes,
        table: bytes,
        context: bytes,
        question: bytes,
        payload: bytes,
    ) -> bytes:
        """What a silo signs of what it sends: for which sum, asked with whom, and the digest of its payload.

        batch_digest: of a whole sum, which has no batch, nothing.
        """
        fields = (number(owner), cohort, table, context, question, payload)
        return digest(LABEL_CONTRIBUTION, self.binding, batch_digest, number(index), *fields)

    def survivors_statement(self, batch_digest: bytes, named: SignRequest | RevealRequest | DecryptRequest) -> bytes:
        """What a silo signs: the survivors of one index, out of which cohort, under one block table and broadcast."""
        fields = (named.cohort, named.survivors, named.table, named.context, named.question)
        return digest(LABEL_SURVIVORS, self.binding, batch_digest, number(named.sum_index), *fields)
