"""The probes that try to read a silo's numbers: each attacks a subject of `protocol_contract` and counts successes.

Every function gives the attempts at one subject and the bounds of the numbers that were tried for; `protocol` sets
beside them what the same gives against a weak copy.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from scipy.stats import chi2, kstest, norm, poisson

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control
from secure_fvi.audits.protocol_contract import (
    REFUSALS,
    Attempt,
    CheatedServer,
    Forgery,
    Impersonated,
    Session,
    Signatures,
    Subject,
    Tally,
    Words,
    random_values,
    rate_row,
)
from secure_fvi.audits.scores import proportion
from secure_fvi.errors import InputError

# ---- Whether ring elements look uniform: tests on words, their differences over coordinates, rounds and silos ----
#
# Under each mask that is missing, shared or reused some combination of contributions is a plain number, which shows
# once
# inputs are constant. A view is one such combination. A battery of five tests gives a view a p-value (Bonferroni over
# the
# five); a view counts as told apart below 1e-6, which is the false-alarm rate of one view. Views that share words
# depend
# on each other; the union bound over them does not mind.

FALSE_ALARM = 1e-6
_CONTEXT = bytes(range(32))
_UNIFORMITY_SEED = 20_240_611

#: What is combined: words by round and silo, to views.
Rounds = Sequence[Sequence[Words]]
Combine = Callable[[Rounds, int], Iterator[Words]]


class Kind(NamedTuple):
    """A way to combine contributions, and what it finds."""

    name: str
    combine: Combine


def _alone(rounds: Rounds, modulus: int) -> Iterator[Words]:
    for row in rounds:
        yield from row


def _neighbours(rounds: Rounds, modulus: int) -> Iterator[Words]:
    for words in _alone(rounds, modulus):
        yield difference(words[1::2], words[:-1:2], modulus)


def _over_rounds(rounds: Rounds, modulus: int) -> Iterator[Words]:
    for earlier, later in itertools.pairwise(rounds):
        yield from (difference(b, a, modulus) for a, b in zip(earlier, later, strict=True))


def _over_silos(rounds: Rounds, modulus: int) -> Iterator[Words]:
    for row in rounds:
        for a, b in itertools.combinations(row, 2):
            yield difference(a, b, modulus)
            yield difference(a, difference(np.zeros_like(b), b, modulus), modulus)


ALONE = Kind("contributions on their own", _alone)
NEIGHBOURS = Kind("differences of neighbouring coordinates", _neighbours)
ROUNDS = Kind("differences between rounds", _over_rounds)
SILOS = Kind("sums and differences of two silos", _over_silos)


def difference(a: Words, b: Words, modulus: int) -> Words:
    """a - b in the ring of `modulus` (at most 2^64) elements."""
    if modulus == 2**64:
        return a - b
    m = np.uint64(modulus)  # below 2^63, so that a + m - b does not wrap
    return (a + (m - b)) % m


def p_values(words: Words, modulus: int) -> dict[str, float]:
    """Of each test, under uniform and independent words in 0 .. modulus - 1."""
    n, size = words.size, modulus.bit_length() - 1 if modulus.bit_count() == 1 else modulus.bit_length()
    whole = (size - 1) // 8  # bytes whose values are equally likely, up to 2^-50 where modulus is a prime of 58 bits
    if n < 500 or size < 17:
        raise InputError(f"{n} words of {size} bits are too few for these tests; use 500 and more, of 17 bits and more")
    unit = words.astype(np.float64) / float(modulus)
    low = words.astype("<u8").view(np.uint8).reshape(n, 8)[:, :whole]
    columns = [*low.T, np.minimum((unit * 256).astype(np.uint8), 255)]
    statistic = sum(float(((np.bincount(c, minlength=256) - n / 256) ** 2).sum()) / (n / 256) for c in columns)
    ones = np.unpackbits(low, axis=1).sum(0, dtype=np.float64)
    one, two = (part - part.mean() for part in (unit[:-1], unit[1:]))
    spread = float(np.sqrt((one @ one) * (two @ two)))
    correlation = float(one @ two) / spread if spread > 0 else 1.0
    pairs = n * (n - 1) / 2 / modulus
    twice = n - len(np.unique(words))
    return {
        "bits": float(chi2.sf((((ones - n / 2) ** 2) / (n / 4)).sum(), ones.size)),
        "bytes": float(chi2.sf(statistic, 255 * len(columns))),
        "distribution": float(kstest(unit, "uniform").pvalue),
        "serial correlation": float(2 * norm.sf(abs(correlation) * np.sqrt(n - 2))),
        "repeated words": float(poisson.sf(twice - 1, pairs)) if twice else 1.0,
    }


def p_value(words: Words, modulus: int) -> float:
    """One p-value for a view: the smallest, times the number of tests."""
    found = p_values(words, modulus)
    return min(1.0, min(found.values()) * len(found))


def watch(session: Session, rounds: int) -> list[list[Words]]:
    """Words of `rounds` sums to which the silos give constants: zero, the bound, half of it, in turn."""
    out = []
    for index in range(rounds):
        session.prepare(index)
        row = []
        for at, silo in enumerate(session.silos):
            values = session.table.bounds * (0.0, 1.0, -0.5)[(index + at) % 3]
            row.append(session.words(session.contribute(silo, index, values, _CONTEXT)))
        out.append(row)
    return out


def uniformity_row(
    kind: Kind, subject: Subject[Session], weak: Subject[Session], rounds: int, seen: dict[str, tuple[Rounds, int]]
) -> AuditRow:
    """Views of one kind of `subject` and of its weak copy. `seen` keeps what was watched, by name."""
    found, smallest = _told_apart(kind, *_seen(subject, rounds, seen))
    caught, _ = _told_apart(kind, *_seen(weak, rounds, seen))
    words, modulus = _seen(subject, rounds, seen)
    rng = np.random.default_rng(_UNIFORMITY_SEED)
    fresh = [[rng.integers(0, modulus, w.size, np.uint64) for w in row] for row in words]
    views = found.attempts
    alarms, _ = _told_apart(kind, fresh, modulus)
    return rate_row(
        f"uniformity: {kind.name}",
        subject.name,
        found,
        caught,
        weak.name,
        Control(proportion(alarms.hits, views, CONTROL_CONFIDENCE), "words that are drawn uniformly"),
        false_alarm=views * FALSE_ALARM,
        smallest_p=min(1.0, smallest * views),
        words=words[0][0].size,
    )


def _seen(subject: Subject[Session], rounds: int, seen: dict[str, tuple[Rounds, int]]) -> tuple[Rounds, int]:
    if subject.name not in seen:
        session = subject.open()
        seen[subject.name] = watch(session, rounds), session.modulus
    return seen[subject.name]


def _told_apart(kind: Kind, rounds: Rounds, modulus: int) -> tuple[Tally, float]:
    """How many views are told from uniform ones, and the smallest p-value."""
    found = np.array([p_value(view, modulus) for view in kind.combine(rounds, modulus)])
    return Tally(int((found < FALSE_ALARM).sum()), 0, len(found), Counter()), float(found.min())


Between = Literal["nothing", "a later sum", "restart", "backup of the silo", "backups of all"]
Played = tuple[list[Attempt], FloatArray]

_SEED = 20_231_127


def context_of(number: int) -> bytes:
    """The hash of an imagined broadcast."""
    return hashlib.sha256(b"secure-fvi/audit/broadcast" + number.to_bytes(8, "big")).digest()


def attempt(action: Callable[[], FloatArray | None], truth: FloatArray, decoy: FloatArray) -> Attempt:
    """What `action` reads; a refusal reads nothing."""
    try:
        return Attempt(action(), truth, decoy)
    except REFUSALS as error:
        return Attempt(None, truth, decoy, _plain(str(error)))


def _plain(refusal: str) -> str:
    """A refusal without the numbers and names in it, so that equal ones are counted together."""
    return " ".join("..." if any(c.isdigit() for c in word) else word for word in refusal.split())


def asked_twice(subject: Subject[Session], trials: int, between: Between, same_broadcast: bool) -> Played:
    """One silo is asked twice for one sum; the server subtracts what it got.

    Success: the difference of the two inputs. `between` the two answers the silo is started again, from what it
    stored, or from a backup that was taken before the first.
    """
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(0, 2 * trials, 2):
        session.prepare(index)
        victim = session.silos[index // 2 % len(session.silos)]
        one, two, decoy = (random_values(rng, session.table) for _ in range(3))
        backup = session.backup()
        first = session.contribute(victim, index, one, context_of(2 * index))
        if between == "restart":
            session.restart(victim)
        elif between == "a later sum":
            session.prepare(index + 1)
            session.contribute(victim, index + 1, decoy, context_of(2 * index + 2))
        elif between != "nothing":
            session.restore(backup, session.silos if between == "backups of all" else [victim])
        again = context_of(2 * index + (not same_broadcast))
        attempts.append(
            attempt(partial(_difference, session, victim, index, first, two, again), one - two, one - decoy)
        )
    return attempts, 2 * session.table.bounds


def _difference(
    session: Session, victim: str, index: int, first: bytes, values: FloatArray, context: bytes
) -> FloatArray:
    second = session.contribute(victim, index, values, context)
    return session.decode(difference(session.words(first), session.words(second), session.modulus))


def two_broadcasts(subject: Subject[Session], trials: int) -> Played:
    """One silo is shown another broadcast than all others. Success: a total with its answer in it."""
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(trials):
        session.prepare(index)
        victim = session.silos[index % len(session.silos)]
        values = {silo: random_values(rng, session.table) for silo in session.silos}
        messages = {
            silo: session.contribute(silo, index, v, context_of(2 * index + (silo == victim)))
            for silo, v in values.items()
        }
        truth = np.sum(list(values.values()), axis=0)
        decoy = truth - values[victim] + random_values(rng, session.table)
        attempts.append(attempt(partial(session.total, index, messages, context_of(2 * index)), truth, decoy))
    return attempts, len(session.silos) * session.table.bounds


Plan = Literal[
    "in one request", "in two requests", "around a restart", "around a backup of all", "around a backup of one",
    "too few signatures", "old signatures", "survivors below min_cohort", "each half told another set",
]  # fmt: skip


def both_secrets(subject: Subject[CheatedServer], trials: int, plan: Plan) -> Played:
    """The server asks for what opens a silo's own mask and what opens its pairwise ones, then opens its contribution.

    Success: the victim's input. Below min_cohort one colluder gives its seeds, too. Around a backup silos forget what
    they answered in between. So they do where signatures are too few, or those of an earlier sum that the victim
    missed: signatures are then all that stands in the way. Told different things, each half is joined by the colluders.
    """
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(1, 2 * trials, 2):
        session.prepare(index)
        honest = [silo for silo in session.silos if silo not in session.colluders]
        victim = honest[index // 2 % len(honest)]
        rest = [silo for silo in session.silos if silo != victim]
        if plan == "old signatures":
            for silo in rest:
                session.contribute(silo, index - 1, random_values(rng, session.table), context_of(index - 1))
            session.ask(index - 1, rest, context_of(index - 1))
        values, decoy = ({s: random_values(rng, session.table) for s in session.silos} for _ in range(2))
        messages = {s: session.contribute(s, index, values[s], context_of(index)) for s in session.silos}
        refusals = _ask_for_both(session, index, victim, rest, plan)
        colluders = rest[:1] if plan == "survivors below min_cohort" else []
        read = session.open(victim, index, messages[victim], context_of(index), colluders)
        attempts.append(Attempt(read, values[victim], decoy[victim], _plain(refusals[-1]) if refusals else ""))
    return attempts, session.table.bounds


def _ask_for_both(session: CheatedServer, index: int, victim: str, rest: list[str], plan: Plan) -> list[str]:
    """One plan's requests; the refusals."""
    context, everyone = context_of(index), session.silos
    if plan == "in one request":
        return session.ask_both(index, victim, context)
    if plan == "survivors below min_cohort":
        return session.ask(index, [victim, *rest[:1]], context)
    if plan == "each half told another set":
        honest = [silo for silo in everyone if silo not in session.colluders]
        middle = (len(honest) + 1) // 2
        refusals = session.ask(index, everyone, context, holders={*honest[:middle], *session.colluders})
        return refusals + session.ask(index, rest, context, holders={*honest[middle:], *session.colluders})
    first: Signatures = "short" if plan == "too few signatures" else "asked"
    backup = session.backup()
    refusals = session.ask(index, everyone, context, first)
    if plan == "around a restart":
        for silo in everyone:
            session.restart(silo)
    elif plan != "in two requests":
        session.restore(backup, rest[:1] if plan == "around a backup of one" else everyone)
    return refusals + session.ask(index, rest, context, "old" if plan == "old signatures" else first)


def keys_of_its_own(subject: Subject[Impersonated], trials: int, how: Forgery) -> Played:
    """The server shows a silo keys of its own for all its peers. Success: the silo's input."""
    rng = np.random.default_rng(_SEED)
    attempts = []
    for at in range(trials):
        session = subject.open()
        victim = session.silos[at % len(session.silos)]
        values, decoy = random_values(rng, session.table), random_values(rng, session.table)
        attempts.append(attempt(partial(session.impersonate, victim, how, values, context_of(at)), values, decoy))
    return attempts, session.table.bounds
