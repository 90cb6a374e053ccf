"""The parties of a session's secure sums at server, silo and key holder, all bound to one roster of that session.

Homomorphic sums need the roster's one member with the role "holder". Each session has a fresh encryption key, made at
the holder; its hash is one of the fresh bytes that name the session, and the holder's identity, which the consortium's
signed roster names, signs the session's roster: a silo encrypts under no key that anybody else chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from secure_fvi.aggregation import Homomorphic, Masked
from secure_fvi.aggregation.base import BlockTable, SecureSum, SumServer, SumSilo
from secure_fvi.aggregation.homomorphic import HomomorphicServer, HomomorphicSilo, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import scheme_named
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.plain import PlainServer, PlainSilo
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
    """The 32 bytes that name the session which `opened` describes. offer: the job's hash.

    Raises ProtocolError for silos without fresh bytes, for homomorphic sums without a key, and for others with one.
    """
    if len(opened.silos) != len(opened.nonces):
        raise ProtocolError("a session needs 32 fresh bytes of each silo")
    if isinstance(aggregation, Homomorphic) != bool(opened.holder):
        raise ProtocolError("a session has an encryption key where its sums are homomorphic, and there alone")
    nonces = dict(zip(opened.silos, opened.nonces, strict=True))
    if opened.holder:
        nonces[key_holder_of(roster).id] = opened.holder
    return session_id(roster, offer, nonces, opened.protocol)


def session_roster(
    roster: ConsortiumRoster, session: bytes, silos: Sequence[str], aggregation: SecureSum, holder: bytes
) -> Roster:
    """What all signatures of the session are bound to. holder: hash of the session's encryption key, or nothing.

    Raises InputError where the consortium's [sums] are stricter.
    """
    if not isinstance(aggregation, Homomorphic):
        assert isinstance(aggregation, Masked)
        return roster.session(session, silos, aggregation)
    entry = key_holder_of(roster).identity_key + holder
    return roster.session(session, silos, aggregation.beneath(roster.sums.bits), entry)


class OpenSession(NamedTuple):
    """What both halves of a session's sums know. holder: hash of its encryption key, or nothing."""

    roster: ConsortiumRoster
    session: bytes
    silos: Sequence[str]
    aggregation: SecureSum
    holder: bytes


def server_sum(
    opened: OpenSession,
    store: Store,
    ask: Callable[[bytes], bytes],
) -> SumServer:
    """The server's half. ask: the way to the key holder."""
    aggregation = opened.aggregation
    if not isinstance(aggregation, Masked | Homomorphic):
        return PlainServer(opened.silos)
    found = session_roster(*opened)
    if isinstance(aggregation, Masked):
        return MaskedServer(found, store)
    return WithHolder(HomomorphicServer(found, scheme_named(aggregation.scheme), aggregation.masked, store), ask)


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
    aggregation = opened.aggregation
    if not isinstance(aggregation, Masked | Homomorphic):
        return PlainSilo(silo)
    found = session_roster(*opened)
    if isinstance(aggregation, Masked):
        return MaskedSilo(found, silo, identity, store, min_cohort, max_missing=max_missing, questions=questions)
    return HomomorphicSilo(found, silo, identity, aggregation, store, min_cohort, max_missing, questions)


def longest_message(tables: Iterable[BlockTable], silos: int, aggregation: SecureSum) -> int:
    """Bytes that no message of a job with these tables needs, either way: a broadcast holds a few vectors of a table's
    length, a contribution at most 96 bytes a value, a refill some seeds and shares of each neighbour and index."""
    widest = max((table.size for table in tables), default=0)
    return (4 << 20) + 512 * widest + silos * (1024 + 256 * (getattr(aggregation, "batch", None) or 64))


def least_silos(aggregation: SecureSum, silos: int, private: bool) -> int:
    """Silos without which no sum comes about. private: how many may be missing follows from noise, not known yet."""
    if not isinstance(aggregation, Masked | Homomorphic):
        return 1
    signed = isinstance(aggregation, Homomorphic) or aggregation.consistency_check
    present = 0 if private else silos - aggregation.max_missing
    return max(aggregation.min_cohort, present, 2 * silos // 3 + 1 if signed else 0)
