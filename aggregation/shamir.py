"""Shamir secret sharing over GF(2^8), byte by byte and vectorised over many secrets (Shamir 1979).

Field arithmetic is galois'; a share belongs to a holder's position x = 1, 2, ..., at most 255 of them.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]

MAX_HOLDERS = 255
_POLYNOMIAL = 0x11D


@lru_cache(maxsize=1)
def _field() -> Any:
    """GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1, whatever galois takes by default: shares dealt under one polynomial and
    put together under another would convict their dealer. Importing galois takes seconds, so it waits until needed."""
    import numba

    # numba's OpenMP layer would reset the number of threads of the whole process, PyTorch's included.
    numba.config.THREADING_LAYER = "workqueue"
    import galois

    # galois evaluates polynomials over either field while it makes this one: in Python, or numba compiles for a second.
    galois.GF(2, compile="python-calculate")
    field = galois.GF(2**8, irreducible_poly=_POLYNOMIAL, primitive_element=2, compile="python-calculate")
    field.compile("auto")
    return field


def share(secrets: ByteArray, holders: int, threshold: int) -> ByteArray:
    """Shares of `secrets` (length,), shape (holders, length); `threshold` rows recover, fewer show nothing.

    The coefficients come from the operating system's randomness.
    """
    if not 1 <= threshold <= holders <= MAX_HOLDERS:
        raise ValueError(f"cannot share among {holders} holders with threshold {threshold}")
    field = _field()
    coefficients = np.empty((threshold, secrets.size), np.uint8)
    coefficients[0] = secrets
    noise = os.urandom((threshold - 1) * secrets.size)
    coefficients[1:] = np.frombuffer(noise, np.uint8).reshape(threshold - 1, secrets.size)
    # Horner's rule at all positions at once. Not a matrix product: galois runs that on a pool of threads, which
    # takes milliseconds to start where other work keeps the cores busy.
    terms = coefficients.view(field)
    x = field(np.arange(1, holders + 1, dtype=np.uint8))[:, None]
    values = field(np.tile(coefficients[-1], (holders, 1)))
    for row in terms[-2::-1]:
        np.multiply(values, x, out=values)
        np.add(values, row, out=values)
    return np.asarray(values).view(np.uint8)


@lru_cache(maxsize=4096)
def lagrange_at_zero(positions: tuple[int, ...]) -> Any:
    """Weights (t, 1) with which the shares at `positions` (distinct, 1..255) add up to the secret."""
    field = _field()
    x = field(np.array(positions, dtype=np.uint8))
    off_diagonal = ~np.eye(len(positions), dtype=bool)
    one = field(1)
    # In characteristic 2 subtraction is addition; the diagonal is replaced by the neutral element.
    differences = x[None, :] + x[:, None]
    numerators = np.where(off_diagonal, np.broadcast_to(x, differences.shape), one).view(field)
    denominators = np.where(off_diagonal, differences, one).view(field)
    weights: Any = np.multiply.reduce(numerators, axis=1) / np.multiply.reduce(denominators, axis=1)
    return weights[:, None]


def recover(positions: tuple[int, ...], shares: ByteArray) -> ByteArray:
    """The secrets (length,) from `shares` (t, length), row i held at `positions[i]`."""
    field = _field()
    recovered: ByteArray = np.asarray(np.add.reduce(lagrange_at_zero(positions) * shares.view(field))).view(np.uint8)
    return recovered
