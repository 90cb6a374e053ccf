"""All parties of a sum: the server's half of each kind, and both halves for an engine that has all in its process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from secure_fvi.aggregation.base import SecureSum, SumServer, SumSilo, check_silo_ids
from secure_fvi.aggregation.homomorphic import Homomorphic, HomomorphicServer, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import scheme_named
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.plain import Plain, PlainServer, PlainSilo
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import InputError


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
    aggregation: SecureSum, silo_ids: Sequence[str], store: Callable[[str], Store] | None = None
) -> tuple[SumServer, dict[str, SumSilo]]:
    """Both halves with fresh keys; the server's reaches the key holder.

    `store` makes the store of each party, by silo id ("" for the server); in memory by default.
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
    silos: dict[str, SumSilo] = {
        silo: MaskedSilo(roster, silo, identity, make(silo), unbound=True) for silo, identity in identities.items()
    }
    return MaskedServer(roster, make("")), silos
