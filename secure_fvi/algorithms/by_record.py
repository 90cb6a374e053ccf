"""Under record privacy: what each record's numbers are, to the last bit, follows from that record alone.

Records are evaluated together, and a program can make the last bit of a rounding error count for anything. PyTorch may
round otherwise in batches of another shape, so that blocks have one shape whatever the data; where the program raises
on a record (a matrix that cannot be factorised), those on which it does are found and a made record stands in their
place in the same shape. To fail would tell of them without noise. Whether a function is traced, or cannot be evaluated
for many records at once, is seen on made records. docs/privacy-analysis.md, "To the last bit".
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fvi.algorithms.kit import Rows
from secure_fvi.compiled import Mode, TracedOnMade, flatten, structure, threads
from secure_fvi.errors import SecureFVIWarning, one_line
from secure_fvi.privacy.gate import MOST_ROWS


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


class ByRecord:
    """A function of shared values and a batch of records that evaluates each record alone (`each_alone`).

    function: (shared, records) -> found, both nested; records and found have an axis (B, ...) of records throughout.
    made: so many made records, which hold nobody's values. what: of whom a warning speaks.
    """

    def __init__(self, function: Callable[[Any, Any], Any], made: Callable[[int], Any], mode: Mode, what: str) -> None:
        self.function, self.made, self.what = function, made, what
        self.traced = TracedOnMade(function, lambda shared, records: (shared, records), mode)
        self._like, self._build = list[Tensor](), structure([])  # what is found of made records
        self._warned = False

    def check(self, shared: Any) -> None:
        """Evaluate made records; raises what the function raises. Call it before any record is evaluated."""
        found = self.function(shared, self.made(2))
        self._like, self._build = flatten(found), structure(found)

    def __call__(self, shared: Any, records: Any) -> Any:
        """What is found of each record (B, ...), not a number where the function raises on it."""
        with threads(1):  # several would cut a block into parts at places of their own
            count = len(flatten(records)[0])
            ways = self._together if self.traced.traced or self._can_be_together(shared) else self._one_by_one
            step, blocks = ways(shared, records, count)
            found: list[Tensor] = [v.new_full((count, *v.shape[1:]), math.nan) for v in self._like]
            for block in blocks:
                new, rows, _ = evaluated(block, step, count)
                if new is not None:
                    kept = np.flatnonzero(rows < count)
                    for into, value in zip(found, flatten(new), strict=True):
                        into[rows[kept]] = value.detach()[kept]
            return self._build(iter(found))

    def _can_be_together(self, shared: Any) -> bool:
        """Whether made records can, with what is shared now."""
        try:
            self.check(shared)
            return True
        except Exception as error:  # the program is the user's
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.what} fails on made records ({type(error).__name__}: {one_line(error)}): under record "
                    "privacy those of people are then evaluated one by one, which is slow. Write it with other "
                    "operations",
                    SecureFVIWarning,
                    stacklevel=2,
                )
            return False

    def _together(self, shared: Any, records: Any, count: int) -> tuple[Callable[[Rows], Any], Iterator[Rows]]:
        """Blocks of one shape; the last one is filled up with the spare record, of number `count`."""
        blocks = -(-count // MOST_ROWS)
        size = -(-count // blocks)
        run, take = self.traced.ready(shared, self.made(size)), _places(records, self.made(1))
        filled = np.append(np.arange(count), np.full(blocks * size - count, count)).reshape(blocks, size)
        return lambda rows: run(shared, take(rows)), iter(filled)

    def _one_by_one(self, shared: Any, records: Any, count: int) -> tuple[Callable[[Rows], Any], Iterator[Rows]]:
        take = _places(records, self.made(1))
        return lambda rows: self.function(shared, take(rows)), iter(np.arange(count).reshape(count, 1))


def _places(records: Any, spare: Any) -> Callable[[Rows], Any]:
    """Records by number, with the spare one after the last: copies, which lie in memory alike whoever they are."""
    leaves = [torch.cat([own, made.to(own)]) for own, made in zip(flatten(records), flatten(spare), strict=True)]
    build = structure(records)

    def take(rows: Rows) -> Any:
        at = torch.from_numpy(rows)
        return build(iter([leaf[at.to(leaf.device)] for leaf in leaves]))

    return take
