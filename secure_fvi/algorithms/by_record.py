"""Under record privacy: what each record's numbers are, to the last bit, follows from that record alone.

Records are evaluated together, and a program can make the last bit of a rounding error count for anything. PyTorch may
round otherwise in batches of another shape, so that blocks have one shape whatever the data; where the program raises
on a record (a matrix that cannot be factorised), those on which it does are found and a made record stands in their
place in the same shape. To fail would tell of them without noise. Whether a function is traced, or cannot be evaluated
for many records at once, is seen on made records. docs/privacy-analysis.md, "To the last bit".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from secure_fvi.algorithms.kit import Rows


def evaluated(rows: Rows, step: Callable[[Rows], Any], spare: int) -> tuple[Any, Rows, int]:
    """What `step` gives for a block of rows, which rows these are, and on how many it failed.

    Where the program raises anything, the records on which it does are found and the block is evaluated again with the
    spare row in their place, which is what a zero is: in the same shape, so that no bit of another record's numbers
    moves. None where the spare row itself fails, as it then does in each block of every silo.
    """
    with contextlib.suppress(Exception):
        return step(rows), rows, 0
    bad = failing(rows[rows < spare], len(rows), step, spare)
    rest = np.where(np.isin(rows, bad), spare, rows)
    with contextlib.suppress(Exception):
        return step(rest), rest, len(bad)
    return None, rest, int((rows < spare).sum())


def failing(some: Rows, size: int, step: Callable[[Rows], Any], spare: int) -> list[int]:
    """Those rows on which `step` raises, each looked at in a block of the same shape."""
    try:
        step(np.append(some, np.full(size - len(some), spare, np.int64)))
        return []
    except Exception:
        if len(some) <= 1:
            return some.tolist()
    half = len(some) // 2
    return [row for part in (some[:half], some[half:]) for row in failing(part, size, step, spare)]
