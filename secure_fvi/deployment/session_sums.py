"""What binds the parties of a session's secure sums, server, silos and key holder to one roster of that session.

Homomorphic sums need the roster's one member with the role "holder". Each session has a fresh encryption key, made at
the holder; its hash is one of the fresh bytes that name the session, and the holder's identity, which the consortium's
signed roster names, signs the session's roster: a silo encrypts under no key that anybody else chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from secure_fvi.aggregation.base import BlockTable, Seat, SecureSum, SumSilo
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import Store
from secure_fvi.deployment.consortium import ConsortiumRoster, Member, session_id
from secure_fvi.deployment.session_messages import Open
from secure_fvi.errors import InputError, ProtocolError


def key_holder_of(roster: ConsortiumRoster) -> Member:
    """The consortium's key holder. Raises InputError unless there is one and no more."""
    found = roster.of_role("holder")
    if len(found) != 1:
        raise InputError(
            f"homomorphic sums need one member with the role 'holder'; roster {roster.serial} has {len(found)}"
        )
    return found[0]


def session_of(roster: ConsortiumRoster, offer: bytes, opened: Open, aggregation: SecureSum) -> bytes:
    """The 32 bytes that name the session which `opened` describes. offer: `JobOffer.within`.

    Raises ProtocolError for silos without fresh bytes, for homomorphic sums without a key, and for others with one.
    """
    if len(opened.silos) != len(opened.nonces):
        raise ProtocolError("a session needs 32 fresh bytes of each silo")
    if (aggregation.kind == "homomorphic") != bool(opened.holder):
        raise ProtocolError("a session has an encryption key where its sums are homomorphic, and there alone")
    nonces = dict(zip(opened.silos, opened.nonces, strict=True))
    if opened.holder:
        nonces[key_holder_of(roster).id] = opened.holder
    return session_id(roster, offer, nonces, opened.protocol)


def session_roster(
    roster: ConsortiumRoster, session: bytes, silos: Sequence[str], aggregation: SecureSum, holder: bytes
) -> Roster | None:
    """What all signatures of the session are bound to; None of plain sums. holder: hash of the session's encryption
    key, or nothing.

    Raises InputError where the consortium's [sums] are stricter.
    """
    masks = aggregation.beneath(roster.sums.bits)
    if masks is None:
        return None
    entry = key_holder_of(roster).identity_key + holder if aggregation.kind == "homomorphic" else b""
    return roster.session(session, silos, masks, entry)


class OpenSession(NamedTuple):
    """What both halves of a session's sums know. holder: hash of its encryption key, or nothing."""

    roster: ConsortiumRoster
    session: bytes
    silos: Sequence[str]
    aggregation: SecureSum
    holder: bytes


def silo_sum(
    opened: OpenSession,
    store: Store,
    silo: str,
    identity: Identity,
    min_cohort: int,
    max_missing: int | None = None,
    questions: Store | None = None,
) -> SumSilo:
    """The half of `silo`. min_cohort, max_missing: what its site insists on, whatever the roster says. questions: see
    `MaskedSilo`."""
    seat = Seat(session_roster(*opened), silo, identity, store, min_cohort, max_missing, questions)
    return opened.aggregation.at_silo(seat)


def longest_message(tables: Iterable[BlockTable], silos: int, aggregation: SecureSum) -> int:
    """Bytes that no message of a job with these tables needs, either way: a broadcast holds a few vectors of a table's
    length, a contribution at most 96 bytes a value, a refill some seeds and shares of each neighbour and index."""
    widest = max((table.size for table in tables), default=0)
    return (4 << 20) + 512 * widest + silos * (1024 + 256 * (getattr(aggregation, "batch", None) or 64))
