"""The probes that try to read a silo's numbers: each attacks a subject of `protocol_contract` and counts successes.

Every function gives the attempts at one subject and the bounds of the numbers that were tried for; `protocol` sets
beside them what the same gives against a weak copy.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import chi2, kstest, norm, poisson

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.prg import keystream
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control
from secure_fvi.audits.protocol_contract import (
    REFUSALS,
    Attempt,
    CheatedServer,
    Forgery,
    Impersonated,
    MaskedInside,
    Session,
    Signatures,
    Subject,
    Tally,
    Words,
    misread,
    random_values,
    rate_row,
    tally,
)
from secure_fvi.audits.scores import proportion
from secure_fvi.errors import InputError

# ---- Whether ring elements look uniform: tests on words, their differences over coordinates, rounds and silos ----
#
# Under each mask that is missing, shared or reused some combination of contributions is a plain number, which shows
# once inputs are constant. A view is one such combination. A battery of five tests gives a view a p-value (Bonferroni
# over the five); a view counts as told apart below 1e-6, which is the false-alarm rate of one view. Views that share
# words depend on each other; the union bound over them does not mind.

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


# ---- Probes of where masks come from: whether they repeat, and whether their seeds can be searched ----
#
# Repeats are looked for where randomness that is not the operating system's would repeat: over sessions whose process
# was seeded alike, over forks of one process, over stores restored from a backup, and among many masks of one session.

Again = Literal["sessions seeded alike", "forks of one process", "a backup restored"]

_SEED_of_randomness = 20_240_229
#: No batch of one-time secrets is longer, so that sums this far apart draw theirs anew.
_STEP = 4096
#: -ln(.05): with that many repeats expected, none is seen with 5% chance.
_EXPECTED = 3.0
#: A child that hangs, on a lock that a thread held when it was forked, is ended.
_FORK_SECONDS = 60.0


def repeats_row(subject: Subject[Session], weak: Subject[Session], again: Again, trials: int) -> AuditRow:
    """Whether contributions of equal inputs come out equal when all but true randomness is the same."""
    found, caught = (_repeats(one, again, trials) for one in (subject, weak))
    negative = misread(found, caught, "the same contributions, compared one coordinate apart")
    return rate_row(f"masks that repeat: {again}", subject.name, found, caught, weak.name, negative)


def _repeats(subject: Subject[Session], again: Again, trials: int) -> Tally:
    pairs = [pair for row in _pairs(subject, again, trials) for pair in zip(*row, strict=True)]
    hits = sum(_alike(one, two) for one, two in pairs)
    return Tally(hits, sum(_alike(one, np.roll(two, 1)) for one, two in pairs), len(pairs), Counter())


def _alike(one: Words, two: Words) -> bool:
    return bool((one == two).mean() > 0.5)


def _pairs(subject: Subject[Session], again: Again, trials: int) -> Iterator[tuple[list[Words], list[Words]]]:
    """Contributions of all silos, twice."""
    if again == "sessions seeded alike":
        yield from ((_seeded(subject, trial), _seeded(subject, trial)) for trial in range(trials))
        return
    session = subject.open()
    for trial in range(1, trials + 1):
        if again == "forks of one process":
            yield in_fork(session, trial * _STEP), in_fork(session, trial * _STEP)
        else:
            backup = session.backup()
            yield _restored(session, backup, trial * _STEP), _restored(session, backup, trial * _STEP)


def zeros(session: Session, index: int) -> list[Words]:
    """What all silos send for zeros."""
    session.prepare(index)
    nothing = np.zeros(session.table.size)
    return [session.words(session.contribute(s, index, nothing, context_of(index))) for s in session.silos]


def _restored(session: Session, backup: Any, index: int) -> list[Words]:
    session.restore(backup, session.silos)
    return zeros(session, index)


def _seeded(subject: Subject[Session], seed: int) -> list[Words]:
    """A whole session after all generators that a program may seed were given `seed`; their state is put back."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return zeros(subject.open(), 0)
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def in_fork(session: Session, index: int) -> list[Words]:
    """`zeros` in a child process; this process's session stays as it is. Needs a system that forks."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(np.stack(zeros(session, index)).astype("<u8").tobytes())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        if not select.select([pipe], [], [], _FORK_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a forked process that was to contribute ended with status {status}")
    return list(np.frombuffer(data, "<u8").astype(np.uint64).reshape(len(session.silos), -1))


def collisions_row(subject: Subject[MaskedInside], weak: Subject[MaskedInside], masks: int) -> AuditRow:
    """Whether any of many own masks of silos come twice, the birthday bound on the bits of their seeds."""
    found, caught = (_collisions(one, masks) for one in (subject, weak))
    rng = np.random.default_rng(_SEED_of_randomness)
    drawn = rng.integers(0, 2**64, found.attempts, np.uint64)
    repeated = found.attempts - len(np.unique(drawn))
    negative = Control(proportion(repeated, found.attempts, CONTROL_CONFIDENCE), "words that are drawn uniformly")
    return rate_row(
        "masks that repeat: many of one session",
        subject.name,
        found,
        caught,
        weak.name,
        negative,
        # Fewer bits than this would have shown a repeat with probability .95.
        bits_excluded=math.log2(found.attempts * (found.attempts - 1) / 2 / _EXPECTED),
    )


def _collisions(subject: Subject[MaskedInside], masks: int) -> Tally:
    session = subject.open()
    nothing, first = np.zeros(session.table.size), []
    for at in range(masks):
        index, silo = divmod(at, len(session.silos))
        session.prepare(index)
        context, name = context_of(index), session.silos[silo]
        message = session.contribute(name, index, nothing, context)
        first.append(int(session.left(name, index, message, context)[0]))
    return Tally(masks - len(set(first)), 0, masks, Counter())


def search_row(subject: Subject[MaskedInside], weak: Subject[MaskedInside], seeds: Seeds, trials: int) -> AuditRow:
    """All seeds of a small space are tried on contributions of both, in one pass; all other silos collude.

    Success: the silo's input.
    """
    targets, tried = [], []
    for one in (subject, weak):
        session, rng = one.open(), np.random.default_rng(_SEED_of_randomness)
        for index in range(trials):
            session.prepare(index)
            silo, context = session.silos[index % len(session.silos)], context_of(index)
            values = random_values(rng, session.table)
            message = session.contribute(silo, index, values, context)
            targets.append(session.left(silo, index, message, context))
            tried.append((values, random_values(rng, session.table)))
    began = time.perf_counter()
    read = search(seeds, targets, session.decode, session.table.bounds)
    seconds = time.perf_counter() - began
    attempts = [Attempt(r, *pair) for r, pair in zip(read, tried, strict=True)]
    found, caught = (tally(part, session.table.bounds) for part in (attempts[:trials], attempts[trials:]))
    negative = misread(found, caught, "the numbers read, compared with numbers that were never put in")
    name = f"seeds searched: {seeds.name}"
    return rate_row(name, subject.name, found, caught, weak.name, negative, bits=seeds.bits, search_seconds=seconds)


# ---- Masks from seeds of few bits, and the search through all of them ----
#
#     Mersenne        NumPy's legacy generator, seeded with an integer: how a widely used framework expands mask seeds
#                     that were folded to 32 bits
#     CipherKeys      AES-256-CTR under keys that are small integers
#
# The search asks of each seed whether the first number, once unmasked, is an integer within its bound: of 2^64 ring
# elements 2e6 are, so that among 2^24 seeds a wrong one passes with chance 2e-6 a target; those that pass are checked
# against all bounds.

Words32 = npt.NDArray[np.uint32]

_CHUNK = 1 << 13
_UPPER, _LOWER, _TWIST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_SHIFT = 397  # of the Mersenne Twister's recurrence


class Seeds(Protocol):
    """A way from a seed to a mask in Z_2^64."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> int: ...

    def first(self, seeds: Words) -> Words:
        """The first word of each seed's mask."""
        ...

    def stream(self, seed: int, size: int) -> Words:
        """The mask of one seed."""
        ...


@dataclass(frozen=True)
class Mersenne:
    """MT19937 as `numpy.random.RandomState(seed)` seeds it; `bits` of at most 32."""

    bits: int

    @property
    def name(self) -> str:
        return f"Mersenne Twister, seeds of {self.bits} bits"

    def stream(self, seed: int, size: int) -> Words:
        return np.frombuffer(np.random.RandomState(seed).bytes(8 * size), "<u8").astype(np.uint64)

    def first(self, seeds: Words) -> Words:
        """Two outputs a seed: the recurrence is run as far as they reach, for all seeds at once."""
        state = seeds.astype(np.uint32)
        kept = {0: state.copy()}
        scratch = np.empty_like(state)
        for at in range(1, _SHIFT + 2):
            np.right_shift(state, np.uint32(30), out=scratch)
            np.bitwise_xor(state, scratch, out=state)
            np.multiply(state, np.uint32(1812433253), out=state)
            np.add(state, np.uint32(at), out=state)
            if at in (1, 2, _SHIFT, _SHIFT + 1):
                kept[at] = state.copy()
        low, high = (self._output(kept[k], kept[k + 1], kept[k + _SHIFT]) for k in (0, 1))
        return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))

    @staticmethod
    def _output(one: Words32, two: Words32, far: Words32) -> Words32:
        joined = (one & _UPPER) | (two & _LOWER)
        y: Words32 = far ^ (joined >> np.uint32(1)) ^ (joined & np.uint32(1)) * _TWIST
        y = y ^ (y >> np.uint32(11))
        y = y ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
        y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
        return np.bitwise_xor(y, y >> np.uint32(18))


@dataclass(frozen=True)
class CipherKeys:
    """AES-256-CTR with the seed as its key, big-endian."""

    bits: int

    @property
    def name(self) -> str:
        return f"AES-256-CTR, keys of {self.bits} bits"

    def stream(self, seed: int, size: int) -> Words:
        return np.frombuffer(keystream(seed.to_bytes(32, "big"), 8 * size), "<u8").astype(np.uint64)

    def first(self, seeds: Words) -> Words:
        return np.array([self.stream(int(s), 1)[0] for s in seeds], np.uint64)


def search(
    seeds: Seeds, targets: Sequence[Words], decode: Callable[[Words], FloatArray], bounds: FloatArray
) -> list[FloatArray | None]:
    """Unmask each of `targets` (words of Z_2^64 under one mask) by the first seed that leaves numbers within `bounds`.

    The first number must be an integer block's.
    """
    found: list[FloatArray | None] = [None] * len(targets)
    limit = np.int64(bounds[0])
    for chunk, first in _chunks(seeds):
        for at, target in enumerate(targets):
            rest = (target[0] - first).view(np.int64)
            for seed in chunk[(rest <= limit) & (rest >= -limit)] if found[at] is None else ():
                values = decode(target - seeds.stream(int(seed), target.size))
                if (np.abs(values) <= bounds).all():
                    found[at] = values
                    break
    return found


def _chunks(seeds: Seeds) -> Iterator[tuple[Words, Words]]:
    for start in range(0, 2**seeds.bits, _CHUNK):
        chunk = np.arange(start, min(start + _CHUNK, 2**seeds.bits), dtype=np.uint64)
        yield chunk, seeds.first(chunk)
