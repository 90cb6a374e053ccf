"""What a silo sends in place of numbers that are too large to tell, or are none.

Were they cut at a public constant, or left out, a server that asks at a point of its own, where all silos but one are
past it, would read that one's own number in the total. To refuse would end honest runs, which ask far out too. So the
silo sends a number drawn from a range that is `2**WIDER` times as wide as what may be told, far below it: a total with
one such number says that some silo sent it. What the others sent shifts that number: of totals at two values of theirs
the total variation is at most their difference over the range's width. Of J silos, all others of which are as large as
may be told, that is (J - 1) * 2**-WIDER / 0.45.

The numbers follow from the silo's secret and its own count of questions: the same for the same question, fresh for
another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import SiloView

#: A block's bound is so many times, as a power of two, what may be told.
WIDER = 16
#: Shares of the bound between which a substitute lies, and the one below which a total has one.
_FAR, _UNREADABLE = (0.9, 0.45), 0.25


def bound_over(most: float) -> float:
    """The bound of a block whose numbers are told up to `most`."""
    return most * 2.0**WIDER


def told_up_to(bound: float) -> float:
    """The largest number that is told in a block of this bound."""
    return bound / 2.0**WIDER


def uniforms(view: SiloView, count: int) -> FloatArray:
    """(count,) numbers in (0, 1) for the answer to one question. Never leave the silo."""
    return view.hiding_draws.uniforms(view.turn, count)[0, 0]


def hidden(values: FloatArray, where: npt.NDArray[np.bool_], bound: float, uniforms: FloatArray) -> FloatArray:
    """`values`, and a substitute from `uniforms` wherever `where`; all (count,)."""
    most, least = _FAR
    return np.where(where, -bound * (least + (most - least) * uniforms), values)


def past(values: FloatArray, most: float | FloatArray) -> npt.NDArray[np.bool_]:
    """Which are larger than `most`, or no numbers."""
    found: npt.NDArray[np.bool_] = ~(np.abs(values) <= most)  # a comparison with NaN is false
    return found


def unreadable(total: FloatArray, bound: float) -> npt.NDArray[np.bool_]:
    """Which numbers of a total have a substitute in them."""
    found: npt.NDArray[np.bool_] = total < -_UNREADABLE * bound
    return found
