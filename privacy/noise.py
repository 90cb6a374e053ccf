"""Noise from a cryptographic generator.

Every release draws from a ChaCha20 generator of its own, keyed afresh by the operating system: there is no state
that a checkpoint could keep or a fork could copy, and `torch.manual_seed` has no say. A test may give a key
instead; noise under a key that anyone else knows protects nothing, and the report of such a run says so.
"""

from __future__ import annotations

import hashlib
import math
import os

import numpy as np
import numpy.typing as npt
from randomgen import ChaCha
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.privacy.terms import Terms

#: Binary logarithm of the grid's step over the noise's standard deviation, rounded down to a power of two.
_GRID_BITS = -20
#: What a report calls the source.
SYSTEM_SOURCE = "ChaCha20, keyed by the operating system for each release"
TEST_SOURCE = "TEST KEY: the noise can be replayed and protects nothing"
KEPT_SOURCE = "ChaCha20, keyed by a secret of the job and by what is released"


class NoiseSource:
    """Makes the generator of each release. `test_key` replaces the operating system's randomness, in tests only."""

    def __init__(self, test_key: bytes | None = None) -> None:
        self._test_key = test_key

    def __repr__(self) -> str:
        return f"NoiseSource({self.status!r})"

    @property
    def status(self) -> str:
        return SYSTEM_SOURCE if self._test_key is None else TEST_SOURCE

    def generator(self, party: str, number: int, *purpose: str) -> np.random.Generator:
        """A fresh generator; under a test key, the one of this party, number and purpose."""
        if self._test_key is None:
            key = os.urandom(32)
        else:
            key = hashlib.sha256(self._test_key + repr((party, number, *purpose)).encode()).digest()
        return np.random.Generator(ChaCha(key=int.from_bytes(key, "little"), rounds=20))


class KeptNoise(NoiseSource):
    """Noise that a party makes again as it was, where it was killed once a release was charged: it follows from a
    secret of 32 bytes, which the party keeps, and from the numbers to which it is added, so that others get others."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._key = secret
        #: Of the numbers named last; it tells nothing of them to who has not the secret.
        self.digest = b""

    @property
    def status(self) -> str:
        return KEPT_SOURCE

    def name(self, *values: Tensor) -> int:
        """The number under which `generator` is asked for noise of these: of numbers that follow from somebody's
        values, with all else that they follow from, so that whether two releases are equal says nothing of anybody.
        """
        found = hashlib.blake2b(key=self._key, digest_size=32, person=b"released")
        for value in values:
            found.update(repr((tuple(value.shape), value.dtype)).encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        self.digest = found.digest()
        return int.from_bytes(self.digest, "big")


def skellam(generator: np.random.Generator, variance: float, size: int) -> npt.NDArray[np.int64]:
    """Independent symmetric Skellam integers, (size,): the difference of two Poisson variables of mean variance / 2.

    Sums of independent shares are Skellam again, with the variances added.
    """
    draws = generator.poisson(variance / 2, (2, size))
    difference: npt.NDArray[np.int64] = draws[0] - draws[1]
    return difference


def with_gaussian(values: FloatArray, generator: np.random.Generator, sd: float) -> FloatArray:
    """`values` (n,) with independent normals of this sd, rounded to a power of two of 2^-21 to 2^-20 sd.

    Normals made in floating point have gaps and favoured numbers in their last bits, which tell 0 + noise from 1e-9 +
    noise (Mironov 2012). A cell of the grid holds 6e8 of the sampler's points, so that the last bits are nowhere to be
    seen, and rounding is post-processing of the noised numbers.
    """
    if sd == 0:  # of an audit's control
        return values.copy()
    step = math.ldexp(1.0, math.floor(math.log2(sd)) + _GRID_BITS)
    noised: FloatArray = np.rint((values + generator.standard_normal(len(values)) * sd) / step) * step
    return noised


# ----
# The aggregator's part in privacy: it reads totals off the lattice and, where it is trusted to, adds the noise


def curated(total: FloatArray, terms: Terms, clip: float, noise: NoiseSource, index: int) -> FloatArray:
    """The total (table.size,) of sum `index` in natural units. With noise = "server" nobody else may see `total`."""
    values = total.copy()
    if terms.settings.noise == "server":
        noised = terms.extent.shared + terms.extent.side
        sd = terms.noise_multiplier * clip
        values[:noised] = with_gaussian(values[:noised], noise.generator("server", index), sd)
    return terms.in_clear(values, clip)
