"""What a silo sends in place of numbers that are too large to tell, or are none.

Were they cut at a public constant, or left out, a server that asks at a point of its own, where all silos but one are
past it, would read that one's own number in the total. To refuse would end honest runs, which ask far out too. So the
silo sends a number drawn from a range that is `2**(WIDER - 1)` times as wide as what may be told, far below it: a total
with one such number says that some silo sent it, and the others' sum shifts it. Of k silos the numbers add up, so that
totals of many that are hidden together say k as well.

A float64 of that size has steps coarser than the ring's, so that on its own it would leave the ring's lowest bits to
the others' sum. So all that is sent in such a block, told or not, lies on one grid, that of the substitutes. What the
grid takes from a told number goes into a second one:

    sent[0]   its multiple of a unit                   or  uniform on the grid in [-bound, -bound / 2)
    sent[1]   what that leaves, times `_FINER`         or  the same, drawn apart

and a quarter of a grid's step is added to all. Ring and grid have steps that are powers of two. A finer ring then sees
the same residue of everything; in a coarser one the quarter keeps rounding from ties, and each of its numbers stands
for as many of the grid's. So a substitute is uniform over the ring's own steps, and at two sums of the others that are
d apart the total variation between totals is d / (bound / 2), in each. Of J silos, all others of which are as large as
may be told, or zero, that is at most (J - 1) 1.5 * 2**(1 - WIDER) a number told; over numbers it adds up at most.

The numbers follow from the silo's secret and its own count of questions: the same for the same question, fresh for
another.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import Block, FloatArray
from secure_fvi.algorithms.base import SiloView

#: A block's bound is so many times, as a power of two, what may be told.
WIDER = 24
#: The grid's steps in a block of bound 1: float64's below it are 2^-53, two bits less for the quarters.
_GRID = 2.0**-51
#: By how much the second number of a pair is finer than the first.
_FINER = 2.0**20
#: The share of the bound below which a total has a substitute.
_UNREADABLE = 0.25


def block(name: str, shape: tuple[int, ...], most: float) -> Block:
    """A block for numbers that are told up to `most`, or somewhat more: its bound is a power of two, and each of its
    numbers is sent as a pair, (2, *shape)."""
    return Block(name, (2, *shape), math.ldexp(1.0, math.ceil(math.log2(most)) + WIDER))


def told_up_to(block: Block) -> float:
    """The largest number that is told in this block."""
    return block.bound / 2.0**WIDER


def uniforms(view: SiloView, count: int) -> FloatArray:
    """(count,) numbers in (0, 1) for the answer to one question. Never leave the silo."""
    return view.hiding_draws.uniforms(view.turn, count)[0, 0]


def hidden(values: FloatArray, where: npt.NDArray[np.bool_], block: Block, uniforms: FloatArray) -> FloatArray:
    """(2 count,): `values` as they are sent, and substitutes from `uniforms`, (2 count,), wherever `where`."""
    grid, unit = block.bound * _GRID, told_up_to(block) / _FINER
    told = np.where(where, 0.0, values)
    whole = np.rint(told / unit) * unit
    rest = np.rint((told - whole) * _FINER / grid) * grid
    # Of 53 random bits the first 50 name a place of the grid: each as often as any other.
    drawn = -block.bound + np.floor(uniforms * 2.0**50) * grid
    return np.where(np.tile(where, 2), drawn, np.concatenate([whole, rest])) + grid / 4


def all_or_none(values: FloatArray, block: Block, view: SiloView, uniforms: FloatArray) -> FloatArray:
    """`block.shape`: `values` (count,) as they are sent; if one is out of range, or was in an earlier answer, all are
    hidden. uniforms: (2 count,)."""
    beyond = bool(past(values, told_up_to(block)).any())
    where = np.full(len(values), view.hides(beyond) or beyond)
    return hidden(values, where, block, uniforms).reshape(block.shape)


def read(total: FloatArray, block: Block, silos: int = 0) -> FloatArray:
    """What a total (2, *shape) says, (*shape); of no meaning where `unreadable`. silos: whose quarters of a step are
    taken out, so that whole numbers come back whole."""
    unit, quarters = told_up_to(block) / _FINER, silos * block.bound * _GRID / 4
    values: FloatArray = np.rint(total[0] / unit) * unit + (total[1] - quarters) / _FINER
    return values


def past(values: FloatArray, most: float | FloatArray) -> npt.NDArray[np.bool_]:
    """Which are larger than `most`, or no numbers."""
    found: npt.NDArray[np.bool_] = ~(np.abs(values) <= most)  # a comparison with NaN is false
    return found


def unreadable(total: FloatArray, block: Block) -> npt.NDArray[np.bool_]:
    """Which numbers of a total (2, *shape) have a substitute in them, (*shape)."""
    found: npt.NDArray[np.bool_] = np.asarray(total[0] < -_UNREADABLE * block.bound)
    return found
