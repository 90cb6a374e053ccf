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

#: Terms below 2^58 in size that a sum in int64 may have before a reduction is due.
_LAZY_TERMS = 31
#: Elements masked at a time: accumulator and keystream stay in the second-level cache together.
_CHUNK = 1 << 14
_ZEROS = bytes(8 * _CHUNK)


class ResidueStream:
    """Uniform elements of [0, modulus) from the AES-256-CTR keystream of a one-time key (32 bytes).

    Each 64-bit word gives its leading bits, as many as the modulus has; words at or past it are passed over.
    """

    def __init__(self, key: bytes, modulus: int) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._modulus = modulus
        self._shift = np.uint64(64 - modulus.bit_length())

    def __repr__(self) -> str:
        return "ResidueStream(...)"

    def take(self, size: int) -> ModularArray:
        """The next `size` elements."""
        parts: list[ModularArray] = []
        while size > 0:
            zeros = _ZEROS[: 8 * size]  # no more than a chunk at a time
            words = np.frombuffer(self._encryptor.update(zeros), "<u8") >> self._shift
            if int(words.max()) >= self._modulus:
                words = words[words < self._modulus]
            parts.append(words)
            size -= words.size
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def masked(values: CentredArray, masks: Sequence[Mask], modulus: int) -> CentredArray:
    """Centred residues of `values` (centred) plus each mask, modulo `modulus` (odd, below 2^58)."""
    streams = [(ResidueStream(m.key, modulus), np.subtract if m.negative else np.add) for m in masks]
    half = modulus // 2
    out = values.astype(np.int64)
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        terms = 1
        for stream, operation in streams:
            operation(part, stream.take(part.size).view(np.int64), out=part)
            terms += 1
            if terms == _LAZY_TERMS:
                np.remainder(part, modulus, out=part)
                terms = 1
        np.remainder(part, modulus, out=part)
        np.subtract(part, modulus, out=part, where=part > half)
    return out


class PrimeRing:
    """Encoder and decoder of one block table for sums of at most `terms` contributions modulo a prime."""

    def __init__(self, table: BlockTable, terms: int, modulus: int = BFV_PRIME) -> None:
        """Raises InputError when an integer block's bound cannot fit."""
        self.modulus = modulus
        self._ring = Ring(table, 64, terms, limit=modulus // 4)

    @property
    def resolution(self) -> FloatArray:
        """The step of each element, shape (size,); a sum of J terms is off by at most J/2 steps."""
        return self._ring.resolution

    def encode(self, values: FloatArray, masks: Sequence[Mask]) -> CentredArray:
        """Masked ring elements of `values`, (size,). Raises AggregationError as `Ring.encode` does."""
        return masked(self._ring.encode(values).view(np.int64), masks, self.modulus)

    def decode(self, total: CentredArray, masks: Sequence[Mask], survivors: int | None = None) -> FloatArray:
        """The sum that `total` (size,) stands for once `masks` are applied to it, float64; `survivors` as in `Ring`."""
        words: npt.NDArray[Any] = masked(total, masks, self.modulus).view(np.uint64)
        return self._ring.decode(words, survivors)
