"""Fixed point in Z_2^w: how real numbers become ring elements that can be masked and added exactly.

Each block has its own power-of-two scale, the largest with which the sum of `terms` contributions within the
block's bound cannot leave [-2^(w-2), 2^(w-2)): half of the ring stays empty. A total outside the survivors' number
times the bound is refused; a wrong mask makes it uniform, and each element then fails with a chance of a half or more.
The scale follows from the bound, the number of terms and w,
so that all parties derive the same one and nobody sends it. A sum of at most `terms` encodings never wraps.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.errors import AggregationError, InputError

RingArray = npt.NDArray[Any]  # uint32 or uint64, little endian

#: Integers above this are not all representable in float64, in which totals are handed out.
_EXACT = 2**53
_MAX_EXPONENT = 1000
#: Values encoded at a time: the temporaries stay in the second-level cache.
_CHUNK = 1 << 15
#: Up to here one pass over arrays of bounds and scales is faster than a pass a block.
_SHORT = 1 << 10


def scale_exponent(block: Block, bits: int, terms: int, limit: int | None = None) -> int:
    """The e for which values of `block` are multiplied by 2^e.

    `terms * ceil(bound * 2^e + 1) < 2^(bits-2)`: the 1 leaves room for rounding, and the bit that is not
    used shows totals that cannot be. `limit` is the largest sum where the ring is not Z_2^bits.
    Raises InputError for an integer block whose sum could not be exact.
    """
    limit = 2 ** (bits - 2) - 1 if limit is None else limit
    if block.integer:
        largest = terms * math.floor(block.bound)
        if largest > min(limit, _EXACT):
            allowed = min(limit, _EXACT) // terms
            raise InputError(
                f"integer block '{block.name}': bound {block.bound:g} does not fit, at most {allowed} for "
                f"{terms} silos in {bits} bits{'; take bits = 64' if bits == 32 else ''}"
            )
        return 0
    mantissa, exponent = math.frexp(block.bound)  # bound = mantissa * 2^exponent <= 2^exponent
    room = limit // terms - 1
    if room < 1:
        raise InputError(f"a sum of {terms} terms does not fit in {bits} bits")
    best: int = room.bit_length() - exponent
    # mantissa * 2^bit_length has as many bits as room, so that at most one step down is needed.
    if math.ldexp(mantissa, room.bit_length()) > room:
        best -= 1
    return max(min(best, _MAX_EXPONENT), -_MAX_EXPONENT)


def out_of_range(block: Block, survivors: int) -> str:
    """What is said of a total that cannot be."""
    return (
        f"block '{block.name}': the total lies outside {survivors} survivors x bound {block.bound:g}; a contribution, "
        "a mask or a share is wrong, or some silo's data could not answer, which its own site's log says alone"
    )


class Ring:
    """Encoder and decoder of one block table for sums of at most `terms` contributions."""

    def __init__(self, table: BlockTable, bits: int, terms: int, limit: int | None = None) -> None:
        """`bits` is 32 or 64; `limit` as in `scale_exponent`. Raises InputError when an integer block cannot fit."""
        if bits not in (32, 64):
            raise InputError(f"bits must be 32 or 64, not {bits}")
        self.table = table
        self.bits = bits
        self.terms = terms
        self.dtype = np.dtype("<u4" if bits == 32 else "<u8")
        self._signed = np.dtype("<i4" if bits == 32 else "<i8")
        self._exponents = [scale_exponent(b, bits, terms, limit) for b in table.blocks]
        # The largest element of one contribution; a real one may be rounded up by one step.
        self._largest = [
            math.floor(math.ldexp(b.bound, e)) + (not b.integer)
            for b, e in zip(table.blocks, self._exponents, strict=True)
        ]
        sizes = [b.size for b in table.blocks]
        self._ends = list(itertools.accumulate(sizes))
        self._scales = np.repeat([math.ldexp(1.0, e) for e in self._exponents], sizes)
        self._inverse = np.repeat([math.ldexp(1.0, -e) for e in self._exponents], sizes)
        self._bounds = table.bounds
        self._integer = np.repeat(np.array([b.integer for b in table.blocks], bool), sizes)
        self._any_integer = bool(self._integer.any())

    @property
    def resolution(self) -> FloatArray:
        """The step of each element, shape (size,); a sum of J terms is off by at most J/2 steps."""
        return self._inverse

    def encode(self, values: FloatArray) -> RingArray:
        """Ring elements of `values`, shape (size,), rounded to nearest.

        Raises AggregationError for a value that is not finite, past its bound, or not whole in an integer
        block; the message names the block and its bound, never the value.
        """
        size = self.table.size
        if values.shape != (size,):
            raise AggregationError(f"expected {size} values in one dimension, got shape {values.shape}")
        out = np.empty(size, self.dtype)
        for start in range(0, size, _CHUNK):
            part = slice(start, min(start + _CHUNK, size))
            self.encode_part(values, part, out[part])
        return out

    def encode_part(self, values: FloatArray, part: slice, out: RingArray) -> None:
        """Encode `values[part]` into `out`, of the part's length; errors as in `encode`."""
        x = values[part]
        at = bisect_right(self._ends, part.start)
        if x.size > _SHORT and part.stop <= self._ends[at]:
            self._encode_in_block(values, part, out, self.table.blocks[at], self._exponents[at])
            return
        # A comparison with NaN is false, so this refuses NaN and infinities too.
        if not (np.abs(x) <= self._bounds[part]).all():
            self._refuse(values)
        scaled = x * self._scales[part]
        rounded = np.rint(scaled)
        if self._any_integer and ((rounded != scaled) & self._integer[part]).any():
            self._refuse(values)
        out.view(self._signed)[:] = rounded

    def _encode_in_block(self, values: FloatArray, part: slice, out: RingArray, block: Block, exponent: int) -> None:
        """`encode_part` within one block: one bound and one scale for all, which spares memory traffic."""
        x = values[part]
        if not (x.max() <= block.bound and x.min() >= -block.bound):  # NaN goes through max and is refused
            self._refuse(values)
        scaled = x * math.ldexp(1.0, exponent)
        if block.integer and (np.rint(scaled) != scaled).any():
            self._refuse(values)
        np.rint(scaled, out=scaled)
        out.view(self._signed)[:] = scaled

    def decode(self, total: RingArray, survivors: int | None = None) -> FloatArray:
        """The sum that `total` (size,) stands for, float64, shape (size,).

        survivors: how many contributions are in it. Raises AggregationError, naming the block, for a total that so many
        cannot have; None looks at nothing.
        """
        if survivors is not None:
            self._check_range(total.view(self._signed), survivors)
        return self.table.told(np.asarray(total.view(self._signed) * self._inverse, dtype=np.float64))

    def _check_range(self, total: npt.NDArray[Any], survivors: int) -> None:
        for block, end, largest in zip(self.table.blocks, self._ends, self._largest, strict=True):
            part = total[end - block.size : end]
            if block.rows == "some":
                continue
            if part.size and not -survivors * largest <= int(part.min()) <= int(part.max()) <= survivors * largest:
                raise AggregationError(out_of_range(block, survivors))

    def _refuse(self, values: FloatArray) -> None:
        """Raise the AggregationError that names the first offending block."""
        for block, part in zip(self.table.blocks, self.table.split(values).values(), strict=True):
            if not np.isfinite(part).all():
                raise AggregationError(f"block '{block.name}' (bound {block.bound:g}) holds a value that is not finite")
            if not (np.abs(part) <= block.bound).all():
                raise AggregationError(f"block '{block.name}' holds a value past its bound {block.bound:g}")
            if block.integer and (part != np.rint(part)).any():
                raise AggregationError(f"integer block '{block.name}' (bound {block.bound:g}) holds a fraction")
        raise AggregationError("a value cannot be encoded")
