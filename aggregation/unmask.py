"""The server's batch of deposits, and the removal of masks by what survivors and dropouts left."""

from __future__ import annotations

import hashlib
import hmac
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgpack
import numpy as np

from secure_fvi import wire
from secure_fvi.aggregation import shamir
from secure_fvi.aggregation.messages import Deliver, Deposit, Shares, pack, unpack
from secure_fvi.aggregation.onetime import ROW, mask_key, open_seeds, seed_row, share_row
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.session import Secret, Session, secret_commitment
from secure_fvi.errors import AggregationError, ProtocolError


class ServerBatch:
    """Deposits of one batch: public, but envelopes and sealed seeds are closed to the server."""

    def __init__(self, session: Session, number: int, deposits: Mapping[int, Deposit]) -> None:
        self.session = session
        self.number = number
        self.deposits = dict(deposits)
        self.depositors = tuple(sorted(deposits))
        self.present = frozenset(deposits)
        self._digests = [session.deposit_digest(p, deposits[p]) for p in self.depositors]
        self._bitmap = session.roster.bitmap(self.present)
        self.digest = session.batch_digest(number, self._bitmap, self._digests)
        self.statement = session.batch_statement(self.digest)
        self.signatures: dict[int, bytes] = {}
        self.active: set[int] = set()
        self.unheld: dict[int, frozenset[int]] = {}  # by holder, whose shares it says were dealt wrong or not at all
        self.left_out: set[int] = set()  # whose masks too few say they could open: no proof, so for this batch alone
        self._next_catch_up = number * session.roster.batch + 1

    def delivery(self, receiver: int) -> Deliver:
        """What `receiver` gets: the batch's digests, and its envelope from each neighbour that deposited."""
        session = self.session
        senders = [v for v in session.neighbours(receiver) if v in self.present]
        envelopes = [self.deposits[v].envelopes[session.neighbours(v).index(receiver)] for v in senders]
        rows = [self.deposits[v].share_rows[session.position(v, receiver) - 1] for v in senders]
        digests = [hashlib.sha256(row).digest() for row in rows]
        return Deliver(self.number, self._bitmap, self._digests, envelopes, digests)

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

    def opens(self, owner: int, index: int, kind: Secret, secret: bytes) -> bool:
        """Whether `secret` is the b or e of `index` that `owner` committed to."""
        made = secret_commitment(self.session.binding, owner, index, kind, secret)
        return bool(secret) and hmac.compare_digest(made, self.commitment(owner, index, kind))

    def is_share(self, owner: int, holder: int, index: int, kind: Secret, share: bytes) -> bool:
        """Whether `share` is the one of b or e that `owner` committed to for `holder`."""
        entry = 2 * (index % self.session.roster.batch) + kind.column
        row = self.deposits[owner].share_rows[self.session.position(owner, holder) - 1]
        made = share_row(self.session, self.number, owner, holder, share, entry)
        return hmac.compare_digest(made, row[ROW * entry : ROW * entry + ROW])

    def is_seed(self, member: int, neighbour: int, index: int, seed: bytes) -> bool:
        """Whether `member` committed to `seed` as the one of `index` that it shares with `neighbour`."""
        entry = index % self.session.roster.batch
        row = self.deposits[member].seed_rows[self.session.neighbours(member).index(neighbour)]
        made = seed_row(self.session, self.number, member, neighbour, seed, entry)
        return hmac.compare_digest(made, row[ROW * entry : ROW * entry + ROW])

    def at_odds(self) -> list[tuple[int, int]]:
        """Pairs of neighbours that committed to different seeds: one of each two is wrong."""
        rows = {
            (p, v): self.deposits[p].seed_rows[at]
            for p in self.depositors
            for at, v in enumerate(self.session.neighbours(p))
        }
        return [(p, v) for (p, v), row in rows.items() if p < v and (v, p) in rows and rows[v, p] != row]

    def commitment(self, owner: int, index: int, kind: Secret) -> bytes:
        """What `owner` committed to for its b or e of `index`."""
        at = 32 * (2 * (index % self.session.roster.batch) + kind.column)
        return self.deposits[owner].commitments[at : at + 32]


def masks_left(
    batch: ServerBatch,
    index: int,
    payloads: Mapping[int, bytes],
    reveals: Mapping[int, Shares],
    table: bytes,
    context: bytes,
    fault: Callable[[int, str], None] = lambda place, reason: None,
) -> list[Mask]:
    """What is to be applied to the ring sum of the survivors' payloads to leave the sum of their values.

    `payloads` by survivor, `reveals` by who answered. `fault` hears of those that sent what they had not committed to.
    Raises Convicted for a silo whose shares do not open its own commitment, AggregationError when a secret cannot be
    recovered or does not match its commitment.
    """
    session = batch.session
    dropped = [d for d in batch.depositors if d not in payloads and any(v in payloads for v in session.neighbours(d))]
    own = {v: reveals[v].own for v in payloads if v in reveals and reveals[v].own}
    for v in [v for v in own if not batch.opens(v, index, Secret.SELF, own[v])]:
        fault(v, "a seed of its self mask that it did not commit to")
        del own[v]
    seeds = _told_seeds(batch, index, payloads.keys(), reveals, fault)
    needed = {d: [v for v in session.neighbours(d) if v in payloads and (v, d) not in seeds] for d in dropped}
    wanted = dict.fromkeys([v for v in payloads if v not in own], Secret.SELF)
    wanted |= {d: Secret.PAIR for d, lacking in needed.items() if lacking}
    secrets = _recover(batch, index, wanted, reveals, fault)

    def key(seed: bytes) -> bytes:
        return mask_key(session, batch.digest, index, table, context, seed)

    # What a survivor added is subtracted, and the other way round.
    masks = [Mask(key(own.get(v) or secrets[v]), True) for v in payloads]
    for d, lacking in needed.items():
        if lacking:
            seeds |= _sealed_seeds(batch, index, d, secrets[d], lacking)
        masks += [Mask(key(seeds[v, d]), v < d) for v in session.neighbours(d) if v in payloads]
    return masks


def _told_seeds(
    batch: ServerBatch,
    index: int,
    survivors: Collection[int],
    reveals: Mapping[int, Shares],
    fault: Callable[[int, str], None],
) -> dict[tuple[int, int], bytes]:
    """By survivor and dropped neighbour, the seeds that survivors told themselves, as they had committed to them.

    Whatever the dropped one sealed: a survivor knows best which masks it has put on.
    """
    found: dict[tuple[int, int], bytes] = {}
    for v in sorted(set(survivors) & reveals.keys()):
        away = [d for d in batch.session.neighbours(v) if d in batch.present and d not in survivors]
        told = reveals[v].seeds
        if told and len(told) != len(away):
            fault(v, "seeds that do not fit the survivors")
            continue
        for d, seed in zip(away, told, strict=False):
            if batch.is_seed(v, d, index, seed):
                found[v, d] = seed
            else:
                fault(v, f"a seed, shared with '{batch.session.roster.ids[d]}', that it did not commit to")
    return found


def _sealed_seeds(
    batch: ServerBatch, index: int, dropped: int, e: bytes, lacking: Sequence[int]
) -> dict[tuple[int, int], bytes]:
    """The seeds that `dropped` sealed and shares with `lacking`, who are silent; each as the latter committed to it."""
    session, ids = batch.session, batch.session.roster.ids
    try:
        sealed = open_seeds(session, dropped, index, e, batch.deposits[dropped].sealed_seeds)
    except ProtocolError as error:
        raise AggregationError(f"sum {index}: {error}") from None
    for v in lacking:
        if not batch.is_seed(v, dropped, index, sealed[v]):
            raise AggregationError(
                f"sum {index}: the seed that silo '{ids[dropped]}' sealed is not the one that '{ids[v]}' committed to, "
                "and both are silent"
            )
    return {(v, dropped): sealed[v] for v in lacking}


class Convicted(AggregationError):
    """A silo dealt shares, each as it had committed to, that do not open its own commitment. `proof` shows it."""

    def __init__(self, message: str, place: int, proof: bytes) -> None:
        super().__init__(message)
        self.place, self.proof = place, proof


#: A deposit, the index, which of its two secrets, and so many positions with the shares that were dealt to them.
_PROOF = wire.Row(
    wire.binary(),
    wire.whole(),
    wire.one_of(*(kind.value for kind in Secret)),
    wire.Listed(wire.whole(shamir.MAX_HOLDERS + 1, 1)),
    wire.Listed(wire.binary(32)),
)


def convicts(session: Session, place: int, proof: bytes) -> bool:
    """Whether `proof` shows that the silo at `place` dealt wrong shares: anyone can tell from its signed deposit.

    Raises ProtocolError for what is no proof of that form.
    """
    packed, index, named, positions, shares = wire.decode(proof, _PROOF, what="a proof")
    kind = Secret(named)
    deposit = unpack(packed, Deposit)
    batch = ServerBatch(session, deposit.batch, {place: deposit})
    holders = session.holders(place)
    return (
        session.roster.verify(place, deposit.signature, session.deposit_statement(place, deposit))
        and index // session.roster.batch == deposit.batch
        and len(set(positions)) == len(positions) == len(shares) == session.threshold
        and max(positions) <= len(holders)
        and all(
            batch.is_share(place, holders[at - 1], index, kind, share)
            for at, share in zip(positions, shares, strict=True)
        )
        and not batch.opens(place, index, kind, _combined(positions, shares))
    )


def _combined(positions: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """The secrets, one after another, of which the holder at each position has one row of shares."""
    stacked = np.frombuffer(b"".join(shares), np.uint8).reshape(len(positions), -1)
    return shamir.recover(tuple(positions), stacked).tobytes()


def _recover(
    batch: ServerBatch,
    index: int,
    wanted: Mapping[int, Secret],
    reveals: Mapping[int, Shares],
    fault: Callable[[int, str], None],
) -> dict[int, bytes]:
    """The wanted secret (b or e) of each owner, checked against its commitment."""
    if not wanted:
        return {}
    session, ids = batch.session, batch.session.roster.ids
    found: dict[int, dict[int, bytes]] = defaultdict(dict)  # owner -> position -> share
    for holder, reply in reveals.items():
        owners = batch.held_by(holder)
        if len(owners) != len(reply.shares):
            fault(holder, "shares that do not fit those it holds")
            continue
        for owner, one in zip(owners, reply.shares, strict=True):
            if one and owner in wanted:
                found[owner][session.position(owner, holder)] = one
    secrets = _combined_by_owner(batch, index, wanted, found)
    # Only where shares do not open what their owner committed to is it worth knowing whose they are.
    for owner in [o for o in wanted if not batch.opens(o, index, wanted[o], secrets[o])]:
        holders, kind = session.holders(owner), wanted[owner]
        right: dict[int, bytes] = {}
        for at, one in sorted(found[owner].items()):
            if batch.is_share(owner, holders[at - 1], index, kind, one):
                right[at] = one
            else:
                fault(holders[at - 1], f"a share of '{ids[owner]}' that is not the one it was dealt")
        secrets |= _combined_by_owner(batch, index, [owner], {owner: right})
        if not batch.opens(owner, index, kind, secrets[owner]):
            positions = sorted(right)[: session.threshold]
            shares = [right[p] for p in positions]
            proof: bytes = msgpack.packb([pack(batch.deposits[owner]), index, kind.value, positions, shares])
            raise Convicted(
                f"sum {index}: the shares that silo '{ids[owner]}' dealt do not open its commitment; it is left "
                "out from now on",
                owner,
                proof,
            )
    return secrets


def _combined_by_owner(
    batch: ServerBatch, index: int, owners: Iterable[int], found: Mapping[int, Mapping[int, bytes]]
) -> dict[int, bytes]:
    """What the first t shares of each owner, by position, add up to. AggregationError where there are fewer."""
    t = batch.session.threshold
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for owner in owners:
        shares = found.get(owner, {})
        if len(shares) < t:
            silo = batch.session.roster.ids[owner]
            raise AggregationError(f"sum {index}: {len(shares)} shares of silo '{silo}' came in, {t} are needed")
        groups[tuple(sorted(shares)[:t])].append(owner)
    secrets: dict[int, bytes] = {}
    for positions, together in groups.items():
        rows = [b"".join(found[owner][p] for owner in together) for p in positions]
        recovered = _combined(positions, rows)
        secrets |= {owner: recovered[32 * at : 32 * at + 32] for at, owner in enumerate(together)}
    return secrets
