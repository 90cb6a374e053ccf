"""All parties of a sum: the server's half of each kind, and both halves for an engine that has all in its process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from secure_fvi.aggregation.base import BlockTable, Exchanges, SecureSum, SumServer, SumSilo, Total, check_silo_ids
from secure_fvi.aggregation.homomorphic import Homomorphic, HomomorphicServer, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import scheme_named
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.plain import SALT, WIRE, Plain, PlainSilo
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import AggregationError, InputError

_log = logging.getLogger(__name__)


def server_half(
    aggregation: SecureSum, silo_ids: Sequence[str], roster: Roster | None, store: Store, ask: Callable[[bytes], bytes]
) -> SumServer:
    """The server's half. roster: of the session, None of plain sums. ask: the way to the key holder."""
    if isinstance(aggregation, Plain):
        return PlainServer(silo_ids)
    assert roster is not None
    if isinstance(aggregation, Homomorphic):
        return WithHolder(HomomorphicServer(roster, scheme_named(aggregation.scheme), aggregation.masked, store), ask)
    return MaskedServer(roster, store)


def local_parties(
    aggregation: SecureSum,
    silo_ids: Sequence[str],
    store: Callable[[str], Store] | None = None,
    check_once: bool = False,
) -> tuple[SumServer, dict[str, SumSilo]]:
    """Both halves with fresh keys; the server's reaches the key holder.

    `store` makes the store of each party, by silo id ("" for the server); in memory by default. check_once: a signature
    that one party of a masked sum found right, none of them checks again.
    """
    if isinstance(aggregation, Plain):
        ids = check_silo_ids(silo_ids)
        return PlainServer(ids), {silo: PlainSilo(silo) for silo in ids}
    if isinstance(aggregation, Homomorphic):
        server, encrypting, holder = aggregation.parties(silo_ids, store)
        return WithHolder(server, holder.handle), encrypting
    if not isinstance(aggregation, Masked):
        raise InputError(f"aggregation '{aggregation.kind}' has no parties; give sf.Plain(), Masked() or Homomorphic()")
    make = store or (lambda _: MemoryStore())
    identities = {silo: Identity() for silo in check_silo_ids(silo_ids)}
    roster = aggregation.roster({silo: identity.public_key for silo, identity in identities.items()})
    roster = replace(roster, checked=set() if check_once else None)
    silos: dict[str, SumSilo] = {
        silo: MaskedSilo(roster, silo, identity, make(silo), unbound=True) for silo, identity in identities.items()
    }
    return MaskedServer(roster, make("")), silos


# ---- The server's half of plain sums ----


class PlainServer:
    """The server's half: adds in the order of the silo ids, so that the float total is deterministic."""

    def __init__(self, silo_ids: Sequence[str]) -> None:
        self._ids = frozenset(silo_ids)

    def prepare(self, index: int) -> Exchanges[None]:
        """Nothing to prepare."""
        yield from ()

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        question: bytes | None = None,
    ) -> Exchanges[Total]:
        """Add what arrived from the cohort; raises AggregationError when nothing did."""
        yield from ()
        survivors, left_out = list[str](), list[str]()
        values = np.zeros(table.size)
        for silo in sorted(set(cohort) & self._ids):
            data = contributions.get(silo)
            if data is None:
                continue
            wrong = _misfit(data, table)
            if wrong:
                left_out.append(silo)
                _log.warning("sum %d: silo '%s' is left out: %s", index, silo, wrong)
                continue
            values += np.frombuffer(data, WIRE, table.size)
            survivors.append(silo)
        if not survivors:
            named = "".join(f"; silo '{silo}' sent what does not fit" for silo in left_out[:3])
            raise AggregationError(f"sum {index}: no silo answered{named}")
        return Total(table.told(values), tuple(survivors))


def _misfit(data: bytes, table: BlockTable) -> str:
    """Why `data` is no contribution by this table; empty where it is one. Quotes none of it."""
    if len(data) != (expected := table.size * WIRE.itemsize + SALT):
        return f"{len(data)} bytes, where {expected} are expected"
    values = np.frombuffer(data, WIRE, table.size)
    for name, inside in table.split((np.abs(values) <= table.bounds).astype(np.float64)).items():
        if not inside.all():
            return f"its part of '{name}' is not finite or past the bound"
    return ""
