"""Fixed point in Z_p, p prime: the ring of BFV plaintexts, with masks that are uniform in it.

The scale follows from bound, number of terms and p, as in Z_2^w (ring.py). A mask element must be uniform in
[0, p), or a masked value would lean towards its input; hence rejection sampling from the keystream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.ring import Ring

#: The largest prime below 2^58 that is 1 modulo 2 * 8192, so that BFV of that degree packs one value a slot.
BFV_PRIME = 288230376150876161
BFV_HALF = BFV_PRIME // 2

ModularArray = npt.NDArray[np.uint64]
CentredArray = npt.NDArray[np.int64]  # representatives in [-(p-1)/2, (p-1)/2]

#: Residues below 2^58 added before a reduction is due: 32 of them stay below 2^64.
_LAZY_TERMS = 32


def uniform_residues(key: bytes, size: int, modulus: int) -> ModularArray:
    """`size` elements, uniform in [0, modulus), of the AES-256-CTR keystream of a one-time `key` (32 bytes).

    Each 64-bit word gives its leading bits, as many as the modulus has; words at or past it are passed over.
    """
    shift = np.uint64(64 - modulus.bit_length())
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    out = np.empty(size, np.uint64)
    filled = 0
    while filled < size:
        words = np.frombuffer(encryptor.update(bytes(8 * (size - filled))), "<u8") >> shift
        kept = words[words < modulus]
        out[filled : filled + kept.size] = kept
        filled += kept.size
    return out


def add_masks(values: ModularArray, masks: Sequence[Mask], modulus: int) -> None:
    """Add each mask to `values` (residues) in place, modulo `modulus` (below 2^59)."""
    pending = 1
    for key, negative in masks:
        mask = uniform_residues(key, values.size, modulus)
        if negative:
            np.subtract(np.uint64(modulus), mask, out=mask)
        values += mask
        pending += 1
        if pending == _LAZY_TERMS:
            values %= np.uint64(modulus)
            pending = 1
    if pending > 1:
        values %= np.uint64(modulus)


class PrimeRing:
    """Encoder and decoder of one block table for sums of at most `terms` contributions modulo a prime."""

    def __init__(self, table: BlockTable, terms: int, modulus: int = BFV_PRIME) -> None:
        """Raises InputError when an integer block's bound cannot fit."""
        self.modulus = modulus
        self._half = modulus // 2
        self._ring = Ring(table, 64, terms, limit=self._half)

    @property
    def resolution(self) -> FloatArray:
        """The step of each element, shape (size,); a sum of J terms is off by at most J/2 steps."""
        return self._ring.resolution

    def encode(self, values: FloatArray, masks: Sequence[Mask]) -> CentredArray:
        """Masked ring elements of `values`, (size,). Raises AggregationError as `Ring.encode` does."""
        signed = self._ring.encode(values).view(np.int64)
        if not masks:
            return signed
        return self._mask(signed, masks)

    def decode(self, total: CentredArray, masks: Sequence[Mask]) -> FloatArray:
        """The sum that `total` (size,) stands for once `masks` are applied to it, float64."""
        unmasked = self._mask(total, masks) if masks else total
        words: npt.NDArray[Any] = unmasked.view(np.uint64)
        return self._ring.decode(words)

    def _mask(self, signed: CentredArray, masks: Sequence[Mask]) -> CentredArray:
        residues = np.where(signed < 0, signed + self.modulus, signed).view(np.uint64)
        add_masks(residues, masks, self.modulus)
        elements = residues.view(np.int64)
        return np.where(elements > self._half, elements - self.modulus, elements)
