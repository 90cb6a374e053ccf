"""Whether ring elements look uniform: tests on words, their differences over coordinates, rounds and silos.

Under each mask that is missing, shared or reused some combination of contributions is a plain number, which shows once
inputs are constant. A view is one such combination. A battery of five tests gives a view a p-value (Bonferroni over the
five); a view counts as told apart below 1e-6, which is the false-alarm rate of one view. Views that share words depend
on each other; the union bound over them does not mind.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2, kstest, norm, poisson

from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control
from secure_fvi.audits.protocol_contract import Session, Subject, Tally, Words, rate_row
from secure_fvi.audits.scores import proportion
from secure_fvi.errors import InputError

FALSE_ALARM = 1e-6
_CONTEXT = bytes(range(32))
_SEED = 20_240_611

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
    rng = np.random.default_rng(_SEED)
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
