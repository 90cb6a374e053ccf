"""Members countersign each other's records at the start of a job and before its end.

    server                                                site (silo or key holder)
    SEEN + Seen(its newest receipts for this site)   ->   are they in its own log and ledger?
                                                     <-   Stated(how far both are now, its receipts for the server)
    SEEN + Countersigned(receipts, how far the
           server's log is now)                      ->   keeps the receipts
                                                     <-   Receipt(for the server's log), which the server keeps

So a record that was restored from a backup, cut or begun anew is found before the job goes on: by its owner, who
refuses to write into it, and by the one who saw more of it. A site keeps how far its own records were beside what it
saw of others' (`seen.sqlite`), so that one of these files that is old is found whatever the server shows; and, while a
private job runs, how many of its answers were charged, so that its log and the silo's state are not old together. These
messages are not in the paper trail; receipts are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NamedTuple

from secure_fvi import wire
from secure_fvi.aggregation.messages import Codec
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.deployment.consortium import ConsortiumRoster, keys_of, read_succession
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.names import now
from secure_fvi.deployment.policy import SitePolicy
from secure_fvi.deployment.trail import TRAIL, Trail
from secure_fvi.errors import ProtocolError
from secure_fvi.files import read_bytes
from secure_fvi.privacy.chain import ChainKind
from secure_fvi.privacy.ledger import Chain, Ledger, read_ledger
from secure_fvi.privacy.ledger_terms import LEDGER
from secure_fvi.privacy.witness import (
    Witness,
    WitnessFault,
    check_receipt,
    covers,
    shown_length,
    stated_key,
    witness_key,
)

_log = logging.getLogger(__name__)
#: First byte of these messages, both of the server's.
SEEN = b"W"


class Seen(NamedTuple):
    """Receipts that the server has given for this site's logs and ledgers, under any of its identities."""

    trails: list[bytes]
    ledgers: list[bytes]


class Stated(NamedTuple):
    """The site's statements, the ledger's empty where it has none; and the receipts that it has given the server."""

    trail: bytes
    ledger: bytes
    receipts: list[bytes]


class Countersigned(NamedTuple):
    """The server's receipts for both statements, and how its own log continues what this site has seen of it."""

    trail: bytes
    ledger: bytes
    statement: bytes


class Receipt(NamedTuple):
    """For the server's log."""

    receipt: bytes


_receipt = wire.binary(most=1 << 16)
_few = wire.Listed(_receipt, 100)

_CODEC = Codec(
    {
        Seen: (1, (_few, _few)),
        Stated: (2, (wire.binary(), wire.binary(), _few)),
        Countersigned: (3, (_receipt, _receipt, wire.binary())),
        Receipt: (4, (_receipt,)),
    }
)

Exchange = Callable[[Mapping[str, bytes]], dict[str, bytes]]


def countersign(home: Home, roster: ConsortiumRoster, trail: Trail, sites: Iterable[str], exchange: Exchange) -> None:
    """The server's part, with those of `sites` that answer.

    Raises ProtocolError that names the site whose record, or says that its own, is not what was seen before.
    """
    keys = {site: records_keys(home, roster, site) for site in sites}
    with closing(SqliteStore(home.seen_file)) as store:
        trails, ledgers = (Witness(home.id, home.identity(), store, kind) for kind in (TRAIL, LEDGER))
        asked = {site: _pack(Seen(_receipts(trails, k), _receipts(ledgers, k))) for site, k in keys.items()}
        stated = {}
        for site, reply in exchange(asked).items():
            with answer_of(site):
                stated[site] = _CODEC.unpack(reply, Stated)
        since = {site: _check_own(trail, site, keys[site], s.receipts) for site, s in stated.items()}
        signed = {
            site: _pack(
                Countersigned(
                    _countersigned(trails, s.trail, keys[site], site),
                    _countersigned(ledgers, s.ledger, keys[site], site) if s.ledger else b"",
                    trail.statement(since[site]),
                )
            )
            for site, s in stated.items()
        }
    for site, reply in exchange(signed).items():
        with answer_of(site):
            receipt = _CODEC.unpack(reply, Receipt).receipt
        with _of(site):
            trail.add_receipt(receipt, keys[site][0])


def ends(stated: bytes, message: bytes) -> bool:
    """Whether this message, without its first byte, is the second of the server's, with receipts for all that the site
    stated in answer to the first. stated: that answer; empty where there was none."""
    if not stated or _CODEC.kind_of(message) is not Countersigned:
        return False
    said, given = _CODEC.unpack(stated, Stated), _CODEC.unpack(message, Countersigned)
    pairs = ((said.trail, given.trail), (said.ledger, given.ledger))
    return all(bool(record) == bool(receipt) for record, receipt in pairs) and all(
        covers(receipt, record) for record, receipt in pairs if record
    )


def answer(home: Home, trail: Trail, server: str, message: bytes) -> bytes:
    """The site's part: the answer to either message, without its first byte, of the member `server`.

    Raises ProtocolError where the site's own records, or the server's, are not what was seen before, and where the
    server shows less of them than it has countersigned: it has lost what it saw, or hides it.
    """
    keys = records_keys(home, home.roster(now()), server)
    with closing(SqliteStore(home.seen_file)) as store:
        witness = Witness(home.id, home.identity(), store, TRAIL)
        if _CODEC.kind_of(message) is not Seen:
            signed = _CODEC.unpack(message, Countersigned)
            receipt = _countersigned(witness, signed.statement, keys, server)
            with _of(server):
                trail.add_receipt(signed.trail, keys[0])
                if signed.ledger:
                    with closing(open_ledger(home)) as ledger:
                        ledger.add_receipt(signed.ledger, keys[0])
            return _CODEC.pack(Receipt(receipt))
        seen = _CODEC.unpack(message, Seen)
        stated = _stated(trail, witness, server, keys, seen.trails)
        return _CODEC.pack(Stated(stated, _ledger(home, server, keys, seen.ledgers, store), _receipts(witness, keys)))


def _ledger(home: Home, server: str, keys: tuple[bytes, ...], receipts: list[bytes], store: SqliteStore) -> bytes:
    """The statement of the site's ledger; empty where there never was one."""
    witness = Witness(home.id, home.identity(), store, LEDGER)
    if not home.ledger_file.exists():
        own = records_keys(home, home.roster(now()), home.id)
        with _of(server):
            seen = [check_receipt(r, frozenset(keys)) for r in receipts]
        if any(receipt.public_key in own for receipt in seen):
            raise ProtocolError(f"the ledger of '{home.id}' is gone: the server has seen one; restore its newest copy")
        _check_not_gone(home, witness)
        return b""
    with closing(open_ledger(home)) as ledger:
        return _stated(ledger, witness, server, keys, receipts)


def check_seen(home: Home, trail: Trail) -> None:
    """Raise ProtocolError where this site's own log or ledger lacks rows that it has kept of it: one of them was put
    back, which a server need not ask about where a job goes on."""
    with closing(SqliteStore(home.seen_file)) as store:
        own = {kind: Witness(home.id, home.identity(), store, kind) for kind in (TRAIL, LEDGER)}
        trail.check_holds(*own[TRAIL].seen(trail.chain.public_key))
        if home.ledger_file.exists():
            with closing(open_ledger(home)) as ledger:
                ledger.check_holds(*own[LEDGER].seen(ledger.chain.public_key))
        else:
            _check_not_gone(home, own[LEDGER])


def _check_not_gone(home: Home, own: Witness) -> None:
    if any(map(own.length, records_keys(home, home.roster(now()), home.id))):
        raise ProtocolError(f"the ledger of '{home.id}' is gone: this site had one; restore its newest copy")


def _stated(
    record: Trail | Ledger, own: Witness, peer: str, peer_keys: tuple[bytes, ...], receipts: list[bytes]
) -> bytes:
    """The statement of this site's `record`, for the `peer`. Raises ProtocolError where the site, its `own` witness,
    knows of rows that it lacks, which no peer can hide, or where the receipts of the peer do not fit it."""
    record.check_holds(*own.seen(record.chain.public_key))
    stated = record.statement(_check_shown(record, peer, peer_keys, receipts))
    chain = record.chain
    own.keep(chain.public_key, chain.length, chain.head)  # after the statement, with which all rows are on the disk
    return stated


def _check_shown(record: Trail | Ledger, peer: str, witness_keys: tuple[bytes, ...], receipts: list[bytes]) -> int:
    """`_check_own`, where the `peer` may not show less than this record says that its present identity has seen."""
    since = _check_own(record, peer, witness_keys, receipts)
    shown = max(map(shown_length, receipts), default=0)
    given = (r for r in reversed(record.chain.receipts) if witness_key(r) == witness_keys[0])
    before = next(map(shown_length, given), 0)
    if shown < before:
        raise ProtocolError(
            f"'{peer}' shows {shown} rows of the {record.chain.kind.name}, of which it has countersigned {before}: "
            "what it saw of others' records (seen.sqlite) was lost, or it hides it; let it restore the newest copy, or "
            "have another identity in the next roster"
        )
    return since


def _check_own(record: Trail | Ledger, peer: str, witness_keys: tuple[bytes, ...], receipts: list[bytes]) -> int:
    """How many rows of this party's `record` the `peer` says it has seen; raises where its receipts prove some missing.

    A receipt that this party never signed is the peer's fault, and the record stays usable.
    """
    with _of(peer):
        record.check_receipts(receipts, witness_keys)
    return max(map(shown_length, receipts), default=0)


@contextmanager
def _of(peer: str) -> Iterator[None]:
    """Names the `peer` that sent a receipt which nobody but it can have made up; the name in it is what it likes."""
    try:
        yield
    except WitnessFault as error:
        raise ProtocolError(f"'{peer}' sent a receipt that it made up, so the fault is its own: {error}") from None


@contextmanager
def answer_of(party: str) -> Iterator[None]:
    """Names the `party` whose answer is not of the form that was expected."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"the answer of '{party}': {error}") from None


def _receipts(witness: Witness, keys: tuple[bytes, ...]) -> list[bytes]:
    return [receipt for key in keys if (receipt := witness.receipt(key))]


def _countersigned(witness: Witness, statement: bytes, keys: tuple[bytes, ...], member: str) -> bytes:
    """The receipt for what `member` states of its records, under one of its `keys`, the newest first.

    Records stay with the key that began them, and may begin anew under a later one alone, for which all have signed a
    roster: of a member whose records were seen, none under an earlier key are countersigned, nor under one of which
    nothing says that it is later.
    """
    key = stated_key(statement)
    if key not in keys:
        raise ProtocolError("a statement about records that are not under an identity of the member that made it")
    seen = witness.key_of(member) or next((k for k in keys if witness.length(k)), key)
    if keys.index(key) > (keys.index(seen) if seen in keys else 0):
        raise ProtocolError(
            f"'{member}' states records under key {key.hex()[:16]}..., which did not follow {seen.hex()[:16]}..., "
            "under which this site has seen its records"
        )
    if key != seen:
        _log.warning("'%s' has begun its records anew under its key %s...", member, key.hex()[:16])
    return witness.countersign(statement, key, member)


def _pack(message: Seen | Countersigned) -> bytes:
    return SEEN + _CODEC.pack(message)


# ---- A site's ledger and paper trail, opened with the right key, and the site as a witness of others' records ----
#
# Records stay with the identity that began them. After a rotation the others know the former identity by the succession
# that it signed (`successions/` in the site's folder).


def open_ledger(home: Home, policy: SitePolicy | None = None) -> Ledger:
    """The site's ledger, made where there is none; with a policy, the budgets that it states are set first."""
    ledger = Ledger.open(home.ledger_file, home.id, lambda key: _signer(home, key), create=True)
    for rule in policy.data.values() if policy is not None else ():
        if rule.budget is not None:
            ledger.set_budget(rule.budget)
    return ledger


def own_ledger(home: Home) -> Chain | None:
    """What the site's ledger says, where it has one. Needs no key."""
    return read_ledger(home.ledger_file, home.id)[home.id] if home.ledger_file.exists() else None


def hold_to_seen(home: Home, ledger: Ledger) -> None:
    """Keep how far this site's own ledger is, beside what it saw of others' records. Raises ProtocolError where it has
    been further: a copy was restored."""
    with closing(SqliteStore(home.seen_file)) as store:
        own, key = Witness(home.id, home.identity(), store, LEDGER), ledger.chain.public_key
        ledger.check_holds(*own.seen(key))
        own.keep(key, ledger.chain.length, ledger.chain.head)


def keep_charged(home: Home, job: str, answers: int) -> None:
    """Keep how many answers of a job the ledger was charged for, beside what this site saw of others' records: rows of
    its log are on the disk later, and nobody else has seen them before the job ends."""
    with closing(SqliteStore(home.seen_file)) as store:
        store.put({}, {_charged(job): answers})


def kept_charged(home: Home, job: str) -> int:
    """What `keep_charged` has kept of a job; 0 for nothing."""
    with closing(SqliteStore(home.seen_file)) as store:
        return max(store.risen(_charged(job)), 0)


def _charged(job: str) -> str:
    return f"charged/{job}"


def open_trail(home: Home) -> Trail:
    """The site's log, made where there is none."""
    return Trail.open(home.log_file, home.id, lambda key: _signer(home, key), create=True)


def seen_heads(home: Home, roster: ConsortiumRoster, kind: ChainKind) -> dict[str, tuple[int, bytes]]:
    """By member, how far this site has seen its chain of one kind, TRAIL or LEDGER: rows, and the hash of the last."""
    with closing(SqliteStore(home.seen_file)) as store:
        witness = Witness(home.id, home.identity(), store, kind)
        given = {name: witness.receipt(witness.key_of(name)) for name in roster.members if witness.key_of(name)}
        seen = {name: check_receipt(data, None, kind) for name, data in given.items() if data}
        return {name: (receipt.length, receipt.head) for name, receipt in seen.items()}


def records_keys(home: Home, roster: ConsortiumRoster, member: str) -> tuple[bytes, ...]:
    """The public keys under which `member` may keep records, its present identity first, then those before it."""
    paths = sorted((home.path / "successions").glob("*.toml"))
    known = [read_succession(read_bytes(p, "the succession"), f"'{p}'") for p in paths]
    return keys_of(roster.member(member), known)


def _signer(home: Home, key: bytes) -> Identity:
    return home.records_identity(key) if key else home.identity()
