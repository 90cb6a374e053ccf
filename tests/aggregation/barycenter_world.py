"""Secure Wasserstein barycenters of full Gaussians: the two halves, over a secure sum of any kind.

    server                                   silo
    Step(index, cohort, last total)   ->     derives S from the total, contributes its term at S
    total of the iteration            <-     messages of the secure sum

The silo follows S by itself from the totals: the server never tells it at which S to answer, and the sum's
context, the digest of the step, sees to it that all silos that get one answer were told the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from secure_fvi import wire
from secure_fvi.aggregation.barycenter import (
    Barycenter,
    Bounds,
    Gaussian,
    check_start,
    full_blocks,
    full_contribution,
    mean_from_total,
    next_covariance,
    relative_change,
)
from secure_fvi.aggregation.base import BlockTable, Exchanges, FloatArray, SumServer, SumSilo
from secure_fvi.aggregation.messages import Codec, _any_bytes, _list, _uint
from secure_fvi.errors import AggregationError, InputError, ProtocolError

#: Sums of one barycenter, unless the caller says otherwise: each is a release.
MAX_ITERATIONS = 20


class Step(NamedTuple):
    """Server to silo: contribute to sum `sum_index`, of iteration `iteration`; `total` is the one before's."""

    sum_index: int
    iteration: int
    cohort: list[str]
    total: bytes  # little-endian float64; empty in iteration 0


_CODEC = Codec({Step: (48, (_uint, _uint, _list(wire.text(200)), _any_bytes))})


class BarycenterSilo:
    """A silo's half: answers steps with contributions, hands other messages on to its half of the sum."""

    def __init__(
        self,
        sum_silo: SumSilo,
        own: Gaussian,
        start: FloatArray,
        bounds: Bounds,
        weight: int = 1,
        max_iterations: int = MAX_ITERATIONS,
    ) -> None:
        """`start`, `bounds`, `max_iterations` are agreed on beforehand; `own` and `weight` (n_j) stay here."""
        check_start(start)
        if own.mean.shape != start.shape[:1] or own.covariance.shape != start.shape:
            raise InputError("the silo's Gaussian has another dimension than the start")
        self._sum = sum_silo
        self._own = own
        self._weight = weight
        self._bounds = bounds
        self._left = max_iterations
        self._covariance = start
        self._table: BlockTable | None = None  # of the iteration last answered
        self._iteration = 0
        # A step holds a total of its table, and names the cohort.
        self._limit = wire.Limit(8 * (start.size + start.shape[0] + 64) + (1 << 22))

    def __repr__(self) -> str:
        return "BarycenterSilo(...)"

    def handle(self, message: bytes) -> bytes:
        """Raises ProtocolError for a step out of turn or past the cap, and what the sum's half refuses."""
        if _CODEC.kind_of(message) is not Step:
            return self._sum.handle(message)
        step = _CODEC.unpack(message, Step, self._limit)
        if step.iteration != self._iteration:
            raise ProtocolError(f"iteration {step.iteration} of a barycenter, when {self._iteration} is due")
        if self._left == 0:
            raise ProtocolError("a barycenter past the iterations agreed on")
        covariance = self._follow(step)
        first = step.iteration == 0
        table = full_blocks(covariance, self._bounds, first)
        values = full_contribution(self._own, self._weight, covariance, first)
        context = hashlib.sha256(message).digest()
        answer = self._sum.contribute(step.sum_index, step.cohort, table, values, context)
        self._covariance, self._table = covariance, table
        self._iteration += 1
        self._left -= 1
        return answer

    def _follow(self, step: Step) -> FloatArray:
        if self._table is None:
            if step.total:
                raise ProtocolError("a total before the first iteration of a barycenter")
            return self._covariance
        if len(step.total) != 8 * self._table.size:
            raise ProtocolError("the total of a barycenter's iteration has the wrong length")
        total = np.frombuffer(step.total, "<f8")
        if not np.isfinite(total).all():
            raise ProtocolError("the total of a barycenter's iteration is not finite")
        try:
            return next_covariance(self._covariance, self._table, total)
        except AggregationError as error:
            raise ProtocolError(str(error)) from None


def secure_barycenter(
    server: SumServer,
    cohort: Sequence[str],
    first_index: int,
    start: FloatArray,
    bounds: Bounds,
    tolerance: float = 1e-8,
    max_iterations: int = MAX_ITERATIONS,
) -> Exchanges[Barycenter]:
    """The barycenter over `cohort` from totals alone, in sums `first_index`, `first_index` + 1, ...

    `start` (d, d) is known to all: the last round's covariance, say. Stops when the covariance changes by less
    than `tolerance` (relative, Frobenius), or at the cap. A silo lost in one iteration is out of those after it.
    Raises AggregationError when a sum fails.
    """
    check_start(start)
    if max_iterations < 1:
        raise InputError(f"max_iterations must be at least 1, not {max_iterations}")
    covariance, change, told = start, float("inf"), b""
    mean = np.zeros(start.shape[0])
    here = sorted(cohort)
    for iteration in range(max_iterations):
        index = first_index + iteration
        yield from server.prepare(index)
        table = full_blocks(covariance, bounds, first=iteration == 0)
        message = _CODEC.pack(Step(index, iteration, here, told))
        contributions = yield dict.fromkeys(here, message)
        context = hashlib.sha256(message).digest()
        total = yield from server.total(index, here, table, contributions, context)
        if iteration == 0:
            mean = mean_from_total(table, total.values)
        following = next_covariance(covariance, table, total.values)
        change = relative_change(covariance, following)
        covariance, told = following, total.values.astype("<f8").tobytes()
        here = list(total.survivors)
        if change < tolerance:
            break
    return Barycenter(Gaussian(mean, covariance), iteration + 1, change, change < tolerance)
