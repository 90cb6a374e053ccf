"""What one silo keeps of a batch of indices: its own secrets, neighbours' seeds, the shares it holds."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping

import msgpack
import numpy as np

from secure_fvi import wire
from secure_fvi.aggregation.messages import Deliver, Deposit, pack, unpack
from secure_fvi.aggregation.onetime import (
    PAIR,
    SELF,
    Drawn,
    Secrets,
    mask_key,
    open_envelope,
    pair_seeds,
    share_row,
)
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.session import Session
from secure_fvi.errors import ProtocolError


class SiloBatch:
    """From the drawing of secrets to the last share revealed."""

    def __init__(self, session: Session, me: int, drawn: Drawn, pair_secrets: Mapping[int, bytes]) -> None:
        self.session = session
        self.me = me
        self.number = drawn.deposit.batch
        self.active = False
        self.depositors: frozenset[int] = frozenset()
        self.digest = b""
        self._pair_secrets = pair_secrets
        self._drawn = drawn
        self.deposit = drawn.deposit
        self._held: dict[int, Secrets] = {} if drawn.own_shares is None else {me: drawn.own_shares}
        # By neighbour, ascending: seeds of all indices; whether the mask is subtracted.
        self._peers: dict[int, tuple[bytes, bool]] = {}
        self._owners: list[int] = []  # whose shares this silo may be asked for, ascending
        self._delivery: Deliver | None = None

    def __repr__(self) -> str:
        return f"SiloBatch({self.number})"

    def to_bytes(self) -> bytes:
        """What was drawn, secrets included: for the store alone."""
        own = b"" if self._drawn.own_shares is None else self._drawn.own_shares.tobytes()
        return bytes(msgpack.packb([self._drawn.self_seeds, own, pack(self.deposit)]))

    @classmethod
    def restore(cls, session: Session, me: int, data: bytes, pair_secrets: Mapping[int, bytes]) -> SiloBatch:
        """The batch as it was drawn when `data` was made by `to_bytes`."""
        self_seeds, own, deposit = wire.own(data, "a batch of the silo")
        shares = np.frombuffer(own, np.uint8).reshape(-1, 2, 32) if own else None
        return cls(session, me, Drawn(self_seeds, shares, unpack(deposit, Deposit)), pair_secrets)

    def accept(self, delivery: Deliver, first: Callable[[], Deliver] | None = None) -> None:
        """Take in the shares. Raises ProtocolError for a delivery that does not fit or is a second one.

        first: claims this delivery, once it is found to fit, and returns the one that was claimed first.
        An envelope that is not authentic, or whose shares are not those that their owner committed to, is left out:
        this silo then holds no share of that owner.
        """
        if self._delivery is not None:
            if delivery != self._delivery:
                raise ProtocolError(f"batch {self.number} was delivered already, with other content")
            return
        session, roster = self.session, self.session.roster
        depositors = roster.members_of(delivery.depositors)
        if not set(session.members).issuperset(depositors) or self.me not in depositors:
            raise ProtocolError("the depositors of a batch must be members of the key set, this silo among them")
        needed = max(roster.min_cohort, roster.signatures_needed if roster.consistency_check else 0)
        if len(depositors) < needed:
            raise ProtocolError(f"a batch of {len(depositors)} silos; at least {needed} are needed")
        own = session.deposit_digest(self.me, self.deposit)
        if len(delivery.digests) != len(depositors) or own != delivery.digests[depositors.index(self.me)]:
            raise ProtocolError("the digests of a batch do not fit its depositors")
        present = frozenset(depositors)
        senders = [v for v in session.neighbours(self.me) if v in present]
        if not len(delivery.envelopes) == len(delivery.share_digests) == len(senders):
            raise ProtocolError("a batch needs one envelope, with its digest, from each neighbour that deposited")
        if first is not None and first() != delivery:
            raise ProtocolError(f"batch {self.number} was delivered already, with other content")
        for sender, envelope, named in zip(senders, delivery.envelopes, delivery.share_digests, strict=True):
            secret = self._pair_secrets[sender]
            shares = open_envelope(session, self.number, sender, self.me, secret, envelope)
            if shares is not None:
                row = share_row(session, self.number, sender, self.me, shares.tobytes())
                if hmac.compare_digest(hashlib.sha256(row).digest(), named):
                    self._held[sender] = shares
            seeds = pair_seeds(session, self.number, secret, self.me, sender)
            self._peers[sender] = seeds, self.me > sender
        self._owners = [v for v in session.holders(self.me) if v in present]
        self.depositors = present
        self.digest = session.batch_digest(self.number, delivery.depositors, delivery.digests)
        self._delivery = delivery

    @property
    def statement(self) -> bytes:
        """What this silo signs before the batch is used; ProtocolError before the shares are delivered."""
        if self._delivery is None:
            raise ProtocolError(f"batch {self.number} is not delivered yet")
        return self.session.batch_statement(self.digest)

    def masks(self, index: int, table: bytes, context: bytes) -> list[Mask]:
        """The self mask and one for each neighbour, which the later of the two in the roster subtracts."""
        at = index % self.session.roster.batch
        masks = [Mask(self._key(index, table, context, self.self_seed(index)), False)]
        for seeds, negative in self._peers.values():
            seed = seeds[32 * at : 32 * at + 32]
            masks.append(Mask(self._key(index, table, context, seed), negative))
        return masks

    def self_seed(self, index: int) -> bytes:
        """b of an index: secret."""
        at = index % self.session.roster.batch
        return self._drawn.self_seeds[32 * at : 32 * at + 32]

    def _key(self, index: int, table: bytes, context: bytes, seed: bytes) -> bytes:
        return mask_key(self.session, self.digest, index, table, context, seed)

    @property
    def unheld(self) -> frozenset[int]:
        """The owners of whom this silo should hold shares and holds none."""
        return frozenset(self._owners) - self._held.keys()

    def seeds_with(self, index: int, survivors: frozenset[int]) -> list[bytes]:
        """The seeds of an index shared with the neighbours that did not survive, ascending."""
        at = 32 * (index % self.session.roster.batch)
        return [seeds[at : at + 32] for v, (seeds, _) in self._peers.items() if v not in survivors]

    def shares(self, index: int, survivors: frozenset[int]) -> list[bytes]:
        """One share per owner: of b for a survivor, of e for a dropped one, never of both."""
        at = index % self.session.roster.batch
        out = []
        for owner in self._owners:
            held = self._held.get(owner)
            kind = SELF if owner in survivors else PAIR
            out.append(b"" if held is None else held[at, kind].tobytes())
        return out
