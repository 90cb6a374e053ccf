"""The server's batch of deposits, and the removal of masks by what survivors and dropouts left."""

from __future__ import annotations

import hmac
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations, islice

import numpy as np

from secure_fvi.aggregation import shamir
from secure_fvi.aggregation.messages import Deliver, Deposit
from secure_fvi.aggregation.onetime import mask_key, open_seeds
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.session import Session, secret_commitment
from secure_fvi.errors import AggregationError, ProtocolError

#: Subsets of shares tried where the first does not match its commitment.
_TRIES = 256


class ServerBatch:
    """Deposits of one batch: public, but envelopes and sealed seeds are closed to the server."""

    def __init__(self, session: Session, number: int, deposits: Mapping[int, Deposit]) -> None:
        self.session = session
        self.number = number
        self.deposits = dict(deposits)
        self.depositors = tuple(sorted(deposits))
        self.present = frozenset(deposits)
        self._digests = [
            session.deposit_digest(number, p, deposits[p].commitments, deposits[p].sealed_seeds)
            for p in self.depositors
        ]
        self._bitmap = session.roster.bitmap(self.present)
        self.digest = session.batch_digest(number, self._bitmap, self._digests)
        self.statement = session.batch_statement(self.digest)
        self.signatures: dict[int, bytes] = {}
        self.active: set[int] = set()
        self._next_catch_up = number * session.roster.batch + 1

    def delivery(self, receiver: int) -> Deliver:
        """What `receiver` gets: the batch's digests, and its envelope from each neighbour that deposited."""
        session = self.session
        envelopes = [
            self.deposits[v].envelopes[session.neighbours(v).index(receiver)]
            for v in session.neighbours(receiver)
            if v in self.present
        ]
        return Deliver(self.number, self._bitmap, self._digests, envelopes)

    @property
    def lagging(self) -> list[int]:
        """Depositors that did not confirm the delivery yet."""
        return sorted(self.present - self.active)

    def catch_up_due(self, index: int) -> bool:
        """Whether to try the lagging ones again: after 1, 2, 4, ... sums, so that the lost cost little."""
        if len(self.active) == len(self.present) or index < self._next_catch_up:
            return False
        first = self.number * self.session.roster.batch
        self._next_catch_up = first + 2 * (index - first)
        return True

    def held_by(self, holder: int) -> list[int]:
        """The owners of the shares in `holder`'s answer, in its order."""
        return [v for v in self.session.holders(holder) if v in self.present]

    def commitment(self, owner: int, index: int, kind: bytes) -> bytes:
        """What `owner` committed to for its b or e of `index`."""
        at = 64 * (index % self.session.roster.batch) + (0 if kind == b"b" else 32)
        return self.deposits[owner].commitments[at : at + 32]


def masks_left(
    batch: ServerBatch,
    index: int,
    payloads: Mapping[int, bytes],
    shares: Mapping[int, list[bytes]],
    table: bytes,
    context: bytes,
) -> list[Mask]:
    """What is to be applied to the ring sum of the survivors' payloads to leave the sum of their values.

    `payloads` by survivor, `shares` by responding holder. Raises AggregationError when a secret cannot be
    recovered or does not match its commitment.
    """
    session = batch.session
    dropped = [d for d in batch.depositors if d not in payloads and any(v in payloads for v in session.neighbours(d))]
    wanted = {**dict.fromkeys(payloads, b"b"), **dict.fromkeys(dropped, b"e")}
    secrets = _recover(batch, index, wanted, shares)

    def key(seed: bytes) -> bytes:
        return mask_key(session, batch.digest, index, table, context, seed)

    # What a survivor added is subtracted, and the other way round.
    masks = [Mask(key(secrets[v]), True) for v in payloads]
    for d in dropped:
        try:
            seeds = open_seeds(session, d, index, secrets[d], batch.deposits[d].sealed_seeds)
        except ProtocolError as error:
            raise AggregationError(f"sum {index}: {error}") from None
        masks += [Mask(key(seeds[v]), v < d) for v in session.neighbours(d) if v in payloads]
    return masks


def _recover(
    batch: ServerBatch, index: int, wanted: Mapping[int, bytes], shares: Mapping[int, list[bytes]]
) -> dict[int, bytes]:
    """The wanted secret (b or e) of each owner, checked against its commitment."""
    session = batch.session
    found: dict[int, dict[int, bytes]] = defaultdict(dict)  # owner -> position -> share
    for holder, row in shares.items():
        owners = batch.held_by(holder)
        if len(owners) != len(row):
            continue
        for owner, one in zip(owners, row, strict=True):
            if one and owner in wanted:
                found[owner][session.position(owner, holder)] = one
    t = session.threshold
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for owner in wanted:
        if len(found[owner]) < t:
            raise AggregationError(
                f"sum {index}: {len(found[owner])} shares of silo '{session.roster.ids[owner]}' came in, {t} are needed"
            )
        groups[tuple(sorted(found[owner])[:t])].append(owner)
    secrets: dict[int, bytes] = {}
    for positions, owners in groups.items():
        rows = [b"".join(found[owner][p] for owner in owners) for p in positions]
        stacked = np.frombuffer(b"".join(rows), np.uint8).reshape(t, 32 * len(owners))
        recovered = shamir.recover(positions, stacked).tobytes()
        for at, owner in enumerate(owners):
            secret = recovered[32 * at : 32 * at + 32]
            if not _matches(batch, owner, index, wanted[owner], secret):
                secret = _recover_around(batch, owner, index, wanted[owner], found[owner])
            secrets[owner] = secret
    return secrets


def _matches(batch: ServerBatch, owner: int, index: int, kind: bytes, secret: bytes) -> bool:
    commitment = secret_commitment(batch.session.binding, owner, index, kind, secret)
    return hmac.compare_digest(commitment, batch.commitment(owner, index, kind))


def _recover_around(batch: ServerBatch, owner: int, index: int, kind: bytes, found: Mapping[int, bytes]) -> bytes:
    """Try other subsets of the shares, since some holder sent a wrong one."""
    for positions in islice(combinations(sorted(found, reverse=True), batch.session.threshold), _TRIES):
        stacked = np.frombuffer(b"".join(found[p] for p in positions), np.uint8)
        secret = shamir.recover(positions, stacked.reshape(len(positions), 32)).tobytes()
        if _matches(batch, owner, index, kind, secret):
            return secret
    raise AggregationError(
        f"sum {index}: the shares of silo '{batch.session.roster.ids[owner]}' do not fit its commitment"
    )
