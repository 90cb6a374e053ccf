"""A site's ledger and paper trail, opened with the right key, and the site as a witness of others' records.

Records stay with the identity that began them. After a rotation the others know the former identity by the succession
that it signed (`successions/` in the site's folder).
"""

from __future__ import annotations

from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.names import read_bytes
from secure_fvi.deployment.policy import SitePolicy
from secure_fvi.deployment.rotation import read_succession
from secure_fvi.deployment.trail import Trail
from secure_fvi.deployment.trail_rows import TRAIL
from secure_fvi.privacy.chain import ChainKind
from secure_fvi.privacy.chain_file import ChainFile
from secure_fvi.privacy.ledger import Ledger
from secure_fvi.privacy.ledger_chain import LEDGER
from secure_fvi.privacy.ledger_state import read_chain
from secure_fvi.privacy.witness import Witness


def open_ledger(home: Home, policy: SitePolicy | None = None) -> Ledger:
    """The site's ledger, made where there is none; with a policy, the budgets that it states are set first."""
    path = home.ledger_file
    key = b""
    if path.exists():
        file = ChainFile(path, LEDGER, read_only=True)
        key = read_chain(file, home.id).public_key
        file.close()
    ledger = Ledger.open(path, home.id, _signer(home, key), create=True)
    for rule in policy.data.values() if policy is not None else ():
        if rule.budget is not None:
            ledger.set_budget(rule.budget)
    return ledger


def open_trail(home: Home) -> Trail:
    """The site's log, made where there is none."""
    return Trail.open(home.log_file, home.id, lambda key: _signer(home, key), create=True)


def open_witness(home: Home, kind: ChainKind = TRAIL) -> Witness:
    """This site as a witness of others' records of one kind, TRAIL or LEDGER."""
    return Witness(home.id, home.identity(), SqliteStore(home.seen_file), kind)


def records_keys(home: Home, roster: ConsortiumRoster, member: str) -> tuple[bytes, ...]:
    """The public keys under which `member` may keep records, its present identity first, then those before it."""
    keys = [roster.member(member).identity_key]
    paths = sorted((home.path / "successions").glob("*.toml"))
    known = [read_succession(read_bytes(p, "the succession"), f"'{p}'") for p in paths]
    while True:
        before = next((s.before for s in known if s.member == member and s.after == keys[-1]), None)
        if before is None or before in keys:
            return tuple(keys)
        keys.append(before)


def _signer(home: Home, key: bytes) -> Identity:
    return home.records_identity(key) if key else home.identity()
