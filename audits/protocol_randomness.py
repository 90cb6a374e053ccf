"""Probes of where masks come from: whether they repeat, and whether their seeds can be searched.

Repeats are looked for where randomness that is not the operating system's would repeat: over sessions whose process
was seeded alike, over forks of one process, over stores restored from a backup, and among many masks of one session.
"""

from __future__ import annotations

import math
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.prg import keystream
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control
from secure_fvi.audits.protocol_contract import (
    Attempt,
    MaskedInside,
    Session,
    Subject,
    Tally,
    Words,
    misread,
    random_values,
    rate_row,
    tally,
)
from secure_fvi.audits.protocol_probes import context_of
from secure_fvi.audits.scores import proportion

Again = Literal["sessions seeded alike", "forks of one process", "a backup restored"]

_SEED = 20_240_229
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
    rng = np.random.default_rng(_SEED)
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
        session, rng = one.open(), np.random.default_rng(_SEED)
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
