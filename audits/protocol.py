"""Audits of the secure sums' protocols: every probe beside a copy that it must break.

    masks repeat, seeds are searched    are masks as random as their keys claim
    uniformity                          does what a server receives look like noise
    asked twice, two broadcasts         can a server replay its way to an input
    both secrets                        can it have a silo's own mask and its pairwise ones opened
    keys of its own                     can it stand between a silo and the others
    key holder                          can it have one silo's ciphertext decrypted; has anybody else the key

Rows say how many attempts succeeded. Those that leak are limits that docs/threat-model.md names. For an implementation
of your own, wrap it as `protocol_contract` says and give it to the probes in place of ours (docs/audits-protocol.md).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray, carry
from secure_fvi.aggregation.homomorphic import Homomorphic, HomomorphicServer, HomomorphicSilo, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import (
    BFV,
    BFV_PRIME,
    Ciphertexts,
    Decrypted,
    DecryptRequest,
    HolderKey,
    PrimeRing,
    PublicContext,
    SecretContext,
    pack,
)
from secure_fvi.aggregation.homomorphic_schemes import unpack as unpack_encrypted
from secure_fvi.aggregation.key_holder import KEY_HOLDER, KeyHolder
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.messages import Contribution, unpack
from secure_fvi.aggregation.roster import Identity
from secure_fvi.audits import protocol_weak as weak
from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.protocol_contract import REFUSALS, Attempt, Subject, Words, attempts_row, random_values
from secure_fvi.audits.protocol_masked import TABLE, AuditStore, BeforeSetUp, MaskedSubject
from secure_fvi.audits.protocol_probes import (
    ALONE,
    NEIGHBOURS,
    ROUNDS,
    SILOS,
    CipherKeys,
    Mersenne,
    Played,
    Rounds,
    Seeds,
    asked_twice,
    attempt,
    both_secrets,
    collisions_row,
    context_of,
    keys_of_its_own,
    repeats_row,
    search_row,
    two_broadcasts,
    uniformity_row,
)
from secure_fvi.errors import AggregationError, InputError, ProtocolError

Told = Callable[[str], None]
_Row = tuple[str, Callable[[], AuditRow]]

#: Long enough for the tests of uniformity.
_LONG = BlockTable((Block("records", (1,), 1e6, integer=True), Block("gradient", (4095,), 10.0)))
_BACKUP = "a limit: a store restored from a backup has forgotten what it answered; start a new session instead"
_TRUSTED = "a limit: without masks the aggregator is trusted to add honestly"
#: Kinds of sums, and how many rows each has.
KINDS = ("plain", "masked", "homomorphic")


def protocol_rows(told: Told, kinds: Collection[str], trials: int = 40) -> list[AuditRow]:
    """Rows for the sums of these kinds, as `SecureSum.kind` names them; plain sums promise nothing and have none.

    `trials` attempts each at masked sums, fewer where an attempt is a session or encrypts. `told` hears what is being
    done, before each row. Raises InputError for an unknown kind.
    """
    found = []
    for what, row in _rows(kinds, trials):
        told(what)
        found.append(row())
    return found


def work(kinds: Collection[str]) -> int:
    return len(_rows(kinds, 1))


def _rows(kinds: Collection[str], trials: int) -> list[_Row]:
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"there is no kind of sum '{kind}' to audit; choose {', '.join(KINDS)}")
    if trials < 1:
        raise InputError(f"a protocol audit needs at least one trial, not {trials}")
    rows: list[_Row] = []
    if "masked" in kinds:
        ours, whole = MaskedSubject(), MaskedSubject("whole", Masked())
        rows += _randomness(trials) + _secrets(trials)
        for subject in (ours, whole):
            rows += _uniformity(subject) + _replays(subject, trials) + _keys(subject, max(trials // 4, 1))
    if "homomorphic" in kinds:
        rows += _holder(max(trials // 5, 1))
    return rows


def _randomness(trials: int) -> list[_Row]:
    ours = MaskedSubject()
    pairs = max(trials // 4, 1)
    rows: list[_Row] = [
        ("sessions seeded alike",
         lambda: repeats_row(ours, weak.global_generator(ours), "sessions seeded alike", pairs)),
        ("backups", lambda: repeats_row(ours, weak.counted(ours), "a backup restored", pairs)),
        ("repeated masks", lambda: collisions_row(ours, weak.few_bits(ours, CipherKeys(16)), 2048)),
    ]  # fmt: skip
    if hasattr(os, "fork"):
        rows.append(("forks", lambda: repeats_row(ours, weak.global_generator(ours), "forks of one process", pairs)))
    spaces: tuple[Seeds, ...] = (CipherKeys(16), Mersenne(16), Mersenne(24))
    return rows + [
        (f"search: {s.name}", partial(search_row, ours, weak.few_bits(ours, s), s, min(trials, 20))) for s in spaces
    ]


def _uniformity(subject: MaskedSubject) -> list[_Row]:
    ours, seen = replace(subject, table=_LONG), dict[str, tuple[Rounds, int]]()
    pairs = ((ALONE, weak.unmasked), (NEIGHBOURS, weak.scalar), (ROUNDS, weak.reused), (SILOS, weak.same_for_all))
    return [
        (f"uniformity: {kind.name}", partial(uniformity_row, kind, ours, weaken(ours), 16, seen))
        for kind, weaken in pairs
    ]


def _replays(ours: MaskedSubject, trials: int) -> list[_Row]:
    forgetful, blind = weak.forgetful(ours), weak.blind(ours)
    both = weak.forgetful_and_blind(ours)
    one = partial(asked_twice, trials=trials)
    plays: list[tuple[str, Any, Any, dict[str, str]]] = [
        ("asked twice for one sum", forgetful, partial(one, between="nothing", same_broadcast=True), {}),
        ("asked again after a later sum", forgetful, partial(one, between="a later sum", same_broadcast=True), {}),
        ("asked twice, around a restart", forgetful, partial(one, between="restart", same_broadcast=True), {}),
        ("asked twice, by two broadcasts, around a backup", both,
         partial(one, between="backup of the silo", same_broadcast=False), {}),
        ("asked twice, by one broadcast, around a backup", forgetful,
         partial(one, between="backup of the silo", same_broadcast=True), {"note": _BACKUP}),
        ("two broadcasts for one sum", blind, partial(two_broadcasts, trials=trials), {}),
    ]  # fmt: skip
    return [(name, partial(attempts_row, name, ours, copy, play, **detail)) for name, copy, play, detail in plays]


def _secrets(trials: int) -> list[_Row]:
    ours = MaskedSubject()
    forgetful, credulous = weak.forgetful(ours), weak.credulous(ours)
    plans: list[tuple[Any, MaskedSubject, dict[str, str]]] = [
        ("in one request", weak.talkative(ours), {}),
        ("in two requests", forgetful, {}),
        ("around a restart", forgetful, {}),
        ("around a backup of one", forgetful, {}),
        ("around a backup of all", forgetful, {"note": _BACKUP}),
        ("too few signatures", credulous, {}),
        ("old signatures", credulous, {}),
        ("survivors below min_cohort", weak.small_cohorts(ours), {}),
    ]
    # Below a third of the silos; the control is the same with a third and more.
    seven = replace(ours, count=7)
    pair, three = weak.in_league(seven, 2), weak.in_league(seven, 3)
    halves = "both secrets, each half told another set"
    play = partial(both_secrets, trials=trials, plan="each half told another set")
    below = replace(pair, name=ours.name)
    rows: list[_Row] = [
        (halves, partial(attempts_row, halves, below, three, play, silos=seven.count, colluders=pair.colluders))
    ]
    return rows + [
        (f"both secrets, {plan}",
         partial(attempts_row, f"both secrets, {plan}", ours, copy, partial(both_secrets, trials=trials, plan=plan),
                 **detail))
        for plan, copy, detail in plans
    ]  # fmt: skip


def _keys(ours: MaskedSubject, trials: int) -> list[_Row]:
    ways: list[tuple[Any, str, MaskedSubject]] = [
        ("forged", "unsigned", weak.credulous(ours)),
        ("borrowed", "signed by a colluder", weak.credulous(ours)),
        ("old session", "of an old session", weak.credulous(ours)),
        ("old set-up", "of an old set-up", weak.credulous(ours)),
        ("other roster", "under another roster at a restart", weak.without_durable_state(ours)),
    ]
    return [
        (f"keys of its own, {words}",
         partial(attempts_row, f"keys of its own, {words}", BeforeSetUp(ours), BeforeSetUp(copy),
                 partial(keys_of_its_own, trials=trials, how=how)))
        for how, words, copy in ways
    ]  # fmt: skip


def _holder(trials: int) -> list[_Row]:
    ours = HomomorphicSubject()
    open_sums = HomomorphicSubject("homomorphic, no masks", Homomorphic(masks=False))
    obliging = replace(
        open_sums, name="a key holder that decrypts whatever it is sent, no masks", holder=weak.ObligingHolder
    )
    long, seen = replace(ours, table=_LONG), dict[str, tuple[Rounds, int]]()
    bare = replace(open_sums, name="no masks", table=_LONG)
    rows: list[_Row] = [
        (f"uniformity: {kind.name}", partial(uniformity_row, kind, long, bare, 3, seen))
        for kind in (ALONE, NEIGHBOURS, ROUNDS, SILOS)
    ]
    for subject in (ours, open_sums):
        for asked in ("no signatures", "too few signatures", "all signatures", "after its sum"):
            name = f"one ciphertext to the key holder, {asked}"
            play = partial(decrypted_alone, trials=trials, asked=asked)
            leaks = subject is open_sums and asked == "all signatures"
            detail = {"note": _TRUSTED} if leaks else {}
            rows.append((name, partial(attempts_row, name, subject, obliging, play, **detail)))
        shared = replace(subject, name="one key pair for all silos", shared_key=True)
        name = "key pair found with others than the key holder"
        rows.append((name, partial(attempts_row, name, subject, shared, partial(opened_by_others, sums=2))))
    return rows


# ---- Homomorphic sums as a subject of protocol audits, and probes of the key holder and of who has its key ----

Asked = Literal["no signatures", "too few signatures", "all signatures", "after its sum"]

_SEED = 20_230_817
_COUNT = 4
#: Shorter bytes hold no key.
_KEY_BYTES = 10_000


@dataclass(frozen=True)
class HomomorphicSubject:
    """BFV sums. In weak copies `holder` is of another make, or silos are given the key pair (`shared_key`)."""

    name: str = "homomorphic"
    config: Homomorphic = field(default_factory=Homomorphic)
    table: BlockTable = TABLE
    holder: Callable[..., KeyHolder] = KeyHolder
    shared_key: bool = False

    def __post_init__(self) -> None:
        if self.config.scheme != "bfv":
            raise InputError(f"protocol audits of homomorphic sums are for scheme = 'bfv', not '{self.config.scheme}'")

    def open(self) -> HomomorphicSession:
        session = HomomorphicSession(self)
        session.prepare(0)
        return session


class HomomorphicSession:
    """`protocol_contract.Session`; the words are those that the key holder would see of a lone contribution."""

    def __init__(self, subject: HomomorphicSubject) -> None:
        self.table, self.modulus = subject.table, BFV_PRIME
        self.silos = tuple(f"silo-{j + 1}" for j in range(_COUNT))
        masks, holder_identity = subject.config.masked, Identity()
        identities = {silo: Identity() for silo in self.silos}
        self._key = SecretContext(BFV)
        self._reader = PublicContext(BFV, self._key.public_bytes)
        public_keys = {silo: identity.public_key for silo, identity in identities.items()}
        self.roster = subject.config.roster(public_keys, holder_identity.public_key, self._key.public_bytes)
        self._ring = PrimeRing(self.table, self.roster.size)
        self.stores = {party: AuditStore() for party in ("", KEY_HOLDER, *self.silos)}
        self._identities, self._masks = identities, masks
        self.parties = {silo: self._party(silo) for silo in self.silos}
        if subject.shared_key:
            for silo in self.silos:
                self.stores[silo].put({"key pair": self._key.to_bytes()})
        self._holder = subject.holder(self.roster, holder_identity, self._key, masks, self.stores[KEY_HOLDER])
        self._aggregator = HomomorphicServer(self.roster, BFV, masks, self.stores[""])
        self._server = WithHolder(self._aggregator, self._holder.handle)
        self.seen: dict[str, list[bytes]] = {party: [] for party in ("", *self.silos)}
        self._server.observe(lambda direction, body: self.seen[""].append(body))

    def prepare(self, index: int) -> None:
        carry(self._server.prepare(index), self._exchange)

    def contribute(self, silo: str, index: int, values: FloatArray, context: bytes) -> bytes:
        return self.parties[silo].contribute(index, self.silos, self.table, values, context)

    def parts(self, message: bytes) -> list[bytes]:
        """The ciphertexts of a contribution."""
        return unpack_encrypted(unpack(message, Contribution).payload, Ciphertexts).parts

    def words(self, message: bytes) -> Words:
        slots = self._key.decrypt(self._reader.read(self.parts(message), self.table.size))
        return np.asarray(slots % BFV_PRIME).astype(np.uint64)

    def decode(self, words: Words) -> FloatArray:
        slots = words.astype(np.int64)
        return self._ring.decode(np.where(slots > BFV_PRIME // 2, slots - BFV_PRIME, slots), ())

    def total(self, index: int, messages: Mapping[str, bytes], context: bytes) -> FloatArray:
        exchanges = self._server.total(index, self.silos, self.table, messages, context)
        return carry(exchanges, self._exchange).values

    def restart(self, silo: str) -> None:
        self.parties[silo] = self._party(silo)

    def _party(self, silo: str) -> HomomorphicSilo:
        identity, store = self._identities[silo], self.stores[silo]
        return HomomorphicSilo(self.roster, silo, identity, Homomorphic(masks=self._masks), store, unbound=True)

    def backup(self) -> dict[str, dict[str, bytes]]:
        return {party: dict(store.slots) for party, store in self.stores.items()}

    def restore(self, backup: dict[str, dict[str, bytes]], silos: Collection[str]) -> None:
        for silo in silos:
            self.stores[silo] = AuditStore(backup[silo])
            self.restart(silo)

    def _exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for silo, message in messages.items():
            self.seen[silo].append(message)
            try:
                replies[silo] = self.parties[silo].handle(message)
            except ProtocolError:
                continue
            self.seen[""].append(replies[silo])
        return replies

    # A cheating server, and whoever has a key

    def request(self, index: int, messages: Mapping[str, bytes], context: bytes) -> DecryptRequest:
        """What an honest server asks of the key holder, kept from it."""
        held: list[bytes] = []

        def withhold(message: bytes) -> bytes:
            held.append(message)
            return b""

        server = WithHolder(self._aggregator, withhold)
        with contextlib.suppress(AggregationError):  # for want of an answer
            carry(server.total(index, self.silos, self.table, messages, context), self._exchange)
        return unpack_encrypted(held[-1], DecryptRequest)

    def ask(self, request: DecryptRequest) -> FloatArray:
        """What the holder's answer says, no mask removed. Raises ProtocolError where it refuses."""
        reply = unpack_encrypted(self._holder.handle(pack(request)), Decrypted)
        return self._ring.decode(np.frombuffer(reply.values, "<i8"), ())

    def read_by(self, party: str, message: bytes) -> FloatArray | None:
        """A contribution opened by any key pair among what a party stored and was sent; None without one."""
        for data in [*self.stores[party].slots.values(), *map(_key_in, self.seen[party])]:
            if len(data) < _KEY_BYTES:
                continue
            try:
                key = SecretContext.from_bytes(BFV, data)
            except REFUSALS:
                continue
            reader = PublicContext(BFV, key.public_bytes)
            return self._ring.decode(key.decrypt(reader.read(self.parts(message), self.table.size)), ())
        return None


def _key_in(message: bytes) -> bytes:
    try:
        return unpack_encrypted(message, HolderKey).public_key
    except ProtocolError:
        return message


def decrypted_alone(subject: Subject[HomomorphicSession], trials: int, asked: Asked) -> Played:
    """The server hands the key holder one silo's ciphertexts in place of the sum. Success: the silo's input."""
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(trials):
        session.prepare(index)
        victim, context = session.silos[index % len(session.silos)], context_of(index)
        values = {silo: random_values(rng, session.table) for silo in session.silos}
        messages = {silo: session.contribute(silo, index, v, context) for silo, v in values.items()}
        request = session.request(index, messages, context)
        if asked == "after its sum":
            session.ask(request)
        keep = {"no signatures": 0, "too few signatures": session.roster.signatures_needed - 1}.get(asked)
        signers = session.roster.members_of(request.signers)[:keep]
        lone = request._replace(
            parts=session.parts(messages[victim]),
            signers=session.roster.bitmap(frozenset(signers)),
            signatures=request.signatures[:keep],
        )
        attempts.append(attempt(partial(session.ask, lone), values[victim], random_values(rng, session.table)))
    return attempts, session.table.bounds


def opened_by_others(subject: Subject[HomomorphicSession], sums: int) -> Played:
    """Every party but the key holder looks through all it has for a key pair.

    Success: what is inside a silo's ciphertexts, masked or not.
    """
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(sums):
        session.prepare(index)
        values = {silo: random_values(rng, session.table) for silo in session.silos}
        messages = {silo: session.contribute(silo, index, v, context_of(index)) for silo, v in values.items()}
        session.total(index, messages, context_of(index))
        for at, party in enumerate(("", *session.silos)):
            victim = session.silos[at % len(session.silos)]
            read = session.read_by(party, messages[victim])
            inside = session.decode(session.words(messages[victim]))
            attempts.append(Attempt(read, inside, random_values(rng, session.table)))
    return attempts, session.table.bounds
