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

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.masked import Masked
from secure_fvi.audits import protocol_weak as weak
from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.protocol_contract import attempts_row
from secure_fvi.audits.protocol_homomorphic import (
    HomomorphicSubject,
    decrypted_alone,
    opened_by_others,
)
from secure_fvi.audits.protocol_masked import BeforeSetUp, MaskedSubject
from secure_fvi.audits.protocol_probes import (
    ALONE,
    NEIGHBOURS,
    ROUNDS,
    SILOS,
    CipherKeys,
    Mersenne,
    Rounds,
    Seeds,
    asked_twice,
    both_secrets,
    collisions_row,
    keys_of_its_own,
    repeats_row,
    search_row,
    two_broadcasts,
    uniformity_row,
)
from secure_fvi.errors import InputError

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
