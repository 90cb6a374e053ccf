"""Masks from seeds of few bits, and the search through all of them.

    Mersenne        NumPy's legacy generator, seeded with an integer: how a widely used framework expands mask seeds
                    that were folded to 32 bits
    CipherKeys      AES-256-CTR under keys that are small integers

The search asks of each seed whether the first number, once unmasked, is an integer within its bound: of 2^64 ring
elements 2e6 are, so that among 2^24 seeds a wrong one passes with chance 2e-6 a target; those that pass are checked
against all bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.prg import keystream
from secure_fvi.audits.protocol_contract import Words

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
