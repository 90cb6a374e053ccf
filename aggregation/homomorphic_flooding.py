"""What the key holder does to a decrypted CKKS total before anyone sees it: flooding, then rounding.

A CKKS decryption is not the exact sum but the sum plus e, an affine function of the secret key whose
coefficients are in the ciphertext. Whoever knows the ciphertext and the exact sum solves for the key (Li and
Micciancio 2021). So Gaussian noise far above e is added, as Li, Micciancio, Schultz and Sorrell (2022) bound it:

    sd = 8 sqrt(DECRYPTIONS) 2^(STATISTICAL_BITS / 2) E,        E >= |e|_2 over the slots of one ciphertext

for STATISTICAL_BITS bits of statistical security over DECRYPTIONS ciphertexts, past which the holder refuses.
Rounding to a multiple of the largest power of two below sd follows: it costs nothing beside the noise, keeps
bits of no meaning out of the release, and makes the precision of the total plain.

E: a fresh ciphertext loses its key's last prime, so that its error is that of rounding, (r0 + r1 s) with
variance (1 + 2N/3)/12 a coefficient (ternary s). J of them have J times that, an embedding N times, of which the
real part is half: |e|_2 is near N/2 sqrt(J (1 + 2N/3)/12) / scale. To twice that comes what decoding in float64
may add, 2^-49 of the vector's length, which is at most J sqrt(N/2), since each silo's slots lie in [-1, 1].
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.homomorphic_schemes import CKKS_SCALE, DEGREE
from secure_fvi.aggregation.prg import keystream
from secure_fvi.aggregation.ring import Ring, out_of_range
from secure_fvi.errors import AggregationError, InputError

STATISTICAL_BITS = 30
#: Ciphertexts decrypted under one key.
DECRYPTIONS = 1 << 14

#: Integer totals are rounded to whole numbers; this many sds must fit in a half (8e-11 to be off by one).
_SURE = 6.5


def error_bound(terms: int) -> float:
    """E for a sum of `terms` fresh ciphertexts, in the slots' unit."""
    encryption = DEGREE / 2 * math.sqrt(terms * (1 + 2 * DEGREE / 3) / 12) / CKKS_SCALE
    return 2 * encryption + 2**-49 * terms * math.sqrt(DEGREE / 2)


def flooding_sd(terms: int) -> float:
    """Standard deviation of the noise in each slot, as a share of the element's bound."""
    return 8 * math.sqrt(DECRYPTIONS) * 2 ** (STATISTICAL_BITS / 2) * error_bound(terms)


def step_exponent(terms: int) -> int:
    """A released slot is a multiple of 2 to this power."""
    return math.frexp(flooding_sd(terms))[1] - 1


def secure_normal(size: int) -> FloatArray:
    """Standard normal variates (size,) by Box and Muller, from a fresh AES-256-CTR keystream; |x| < 8.6."""
    words = np.frombuffer(keystream(os.urandom(32), 16 * size), "<u8").reshape(2, size)
    # In (0, 1], so that the logarithm is finite.
    uniforms = ((words >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    normal: FloatArray = np.sqrt(-2 * np.log(uniforms[0])) * np.cos(2 * np.pi * uniforms[1])
    return normal


def flood(slots: FloatArray, terms: int) -> npt.NDArray[np.int64]:
    """Decrypted `slots` (size,) of a sum of at most `terms`, flooded and rounded: multiples of the step."""
    noisy = slots + flooding_sd(terms) * secure_normal(slots.size)
    return np.rint(np.ldexp(noisy, -step_exponent(terms))).astype(np.int64)


class RealSlots:
    """Values as CKKS slots: each divided by its bound; totals come back flooded."""

    def __init__(self, table: BlockTable, terms: int) -> None:
        """Raises InputError for an integer block whose total would not be sure to be exact."""
        for block in table.blocks:
            if block.integer and _SURE * flooding_sd(terms) * block.bound > 0.5:
                raise InputError(
                    f"integer block '{block.name}': bound {block.bound:g} is too large for exact totals by CKKS, "
                    f"at most {0.5 / _SURE / flooding_sd(terms):.4g}; use scheme = 'bfv'"
                )
        self._bounds = table.bounds
        self._checks = Ring(table, 64, terms)
        self._step = 2.0 ** step_exponent(terms)
        # A total is off by the noise, which is below 8.6 sds, and by rounding.
        self._slack = 10 * flooding_sd(terms) + self._step
        self._table = table
        self._integer = np.repeat([b.integer for b in table.blocks], [b.size for b in table.blocks]).astype(bool)

    def encode(self, values: FloatArray, masks: Any = ()) -> FloatArray:
        """Slots of `values` (size,), in [-1, 1]. Raises AggregationError as `Ring.encode` does."""
        self._checks.encode(values)
        return values / self._bounds

    def decode(self, total: npt.NDArray[np.int64], masks: Any = (), survivors: int | None = None) -> FloatArray:
        """The sum that the holder's multiples of the step stand for, float64; `survivors` as in `Ring`."""
        if survivors is not None:
            end = 0
            for block in self._table.blocks:
                part = total[end : end + block.size] * self._step
                end += block.size
                if part.size and not np.abs(part).max() <= survivors + self._slack:
                    raise AggregationError(out_of_range(block, survivors))
        values: FloatArray = total * self._step * self._bounds
        return np.where(self._integer, np.rint(values), values)
