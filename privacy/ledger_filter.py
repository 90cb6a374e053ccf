"""The rule by which a data set's budget admits jobs that are chosen in view of earlier results: a Renyi DP filter.

Feldman and Zrnic 2021, Lecuyer 2021: as long as the declared curves at ONE order fixed beforehand sum to at
most what (epsilon, delta) allows there, everything released together is (epsilon, delta)-DP, however the jobs were
chosen. "Some order of a grid" is sound only when delta is split over the grid; docs/ledger.md has the argument. Most of
delta goes to the order at which the data set's first job would use up the whole budget, the rest to four
orders around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from secure_fvi.errors import InputError
from secure_fvi.privacy.events import (
    Composed,
    DiscreteGaussian,
    Event,
    Gaussian,
    Mechanism,
    PoissonSampled,
    Repeated,
    Skellam,
)
from secure_fvi.privacy.ledger_terms import Budget, Job, Term

FloatArray = NDArray[np.float64]

_MAIN_WEIGHT = 0.9
#: The other orders, as multiples of (main order - 1).
_OTHERS = (0.25, 0.5, 2.0, 4.0)


def term_curve(term: Term) -> FloatArray:
    """The Renyi DP curve of all `count` releases, over `accounting.ORDERS`, in nats."""
    # Accounting loads SciPy: a silo that only goes on with a job that is charged already does not need it.
    from secure_fvi.privacy.accounting import rdp

    return term.count * rdp(term.event)


def job_curve(job: Job) -> FloatArray:
    """The curve of all that `job` declared."""
    return sum_curves(term_curve(t) for t in job.terms)


def sum_curves(curves: Iterable[FloatArray]) -> FloatArray:
    from secure_fvi.privacy.accounting import ORDERS

    total = np.zeros(len(ORDERS))
    for curve in curves:
        total += curve
    return total


@dataclass(frozen=True, eq=False)
class Filter:
    """The filter of one data set under one budget.

    spent: the curve of all jobs charged so far. first: the curve of the first of them; where nothing was charged yet,
    of the job that asks. It is public before anything is released, so it may choose the orders.
    """

    budget: Budget
    spent: FloatArray
    first: FloatArray

    @cached_property
    def limits(self) -> FloatArray:
        """The largest total curve that may be spent, at each order of the filter; -inf at all other orders."""
        from secure_fvi.privacy.accounting import ORDERS

        orders = np.array(ORDERS)
        main = _main_order(self.budget, self.first, orders)
        near = {int(np.argmin(np.abs(np.log((orders - 1) / (m * (orders[main] - 1)))))) for m in _OTHERS} - {main}
        limits = np.full(len(orders), -np.inf)
        limits[main] = _allowed(self.budget.epsilon, _MAIN_WEIGHT * self.budget.delta, orders[[main]])[0]
        for other in near:
            share = (1 - _MAIN_WEIGHT) / len(near) * self.budget.delta
            limits[other] = _allowed(self.budget.epsilon, share, orders[[other]])[0]
        return limits

    def order_for(self, asked: FloatArray) -> float | None:
        """The order by which the budget admits the curve `asked` on top of what was spent; None if none does."""
        from secure_fvi.privacy.accounting import ORDERS

        room = self.limits - (self.spent + asked)
        best = int(np.argmax(room))
        return ORDERS[best] if room[best] >= 0 else None

    def remaining(self) -> float:
        """Epsilon, at the budget's delta, of the largest Gaussian release that still fits; 0 when none does."""
        from secure_fvi.privacy.accounting import ORDERS, epsilon_of_rdp

        orders = np.array(ORDERS)
        largest = float(np.max((self.limits - self.spent) / orders))
        return epsilon_of_rdp(largest * orders, self.budget.delta) if largest > 0 else 0.0


def filter_of(budget: Budget, charged: Iterable[Job], asked: FloatArray | None = None) -> Filter:
    """The filter after the jobs in `charged`, in the order of their charging, when a job of curve `asked` asks."""
    from secure_fvi.privacy.accounting import ORDERS

    curves = [job_curve(j) for j in charged]
    gaussian = np.array(ORDERS)  # up to a factor
    first = [*curves, gaussian if asked is None else asked][0]
    return Filter(budget, sum_curves(curves), first)


def smallest_budget(job: Job) -> Budget:
    """The smallest budget, to 0.1%, that admits `job` on a data set of which nothing was spent, at the job's delta.

    Raises InputError for a job without finite privacy.
    """
    from secure_fvi.privacy.accounting import epsilon_of_rdp

    asked = job_curve(job)
    low = epsilon_of_rdp(asked, job.delta)
    if not math.isfinite(low):
        raise InputError(f"job '{job.job}' has no finite epsilon at delta {job.delta:.3g}")
    epsilon = _smallest(
        lambda e: admitted(Budget(job.data_set, e, job.delta, job.unit), (), asked), max(low, 1e-3), 1.001
    )
    if epsilon is None:
        raise InputError(f"no order of the filter admits job '{job.job}' at delta {job.delta:.3g}")
    return Budget(job.data_set, epsilon, job.delta, job.unit)


def charge(event: Event, delta: float) -> float:
    """The epsilon of the smallest budget, to a millionth, that admits a job of cost `event` as a data set's first; inf
    where none does. What `budget plan` and a run's own noise count with."""
    from secure_fvi.privacy.accounting import epsilon_of_rdp, rdp

    asked = rdp(event)
    low = epsilon_of_rdp(asked, delta)
    if not math.isfinite(low):
        return math.inf
    found = _smallest(lambda e: admitted(Budget("any", e, delta), (), asked), max(low, 1e-9), 1 + 1e-6)
    return math.inf if found is None else found


def refusal(budget: Budget, charged: Iterable[Job], job: Job) -> str:
    """Why `job` does not fit, in numbers, and what would."""
    from secure_fvi.privacy.accounting import epsilon_of_rdp

    charged = tuple(charged)
    asked = job_curve(job)
    spent = filter_of(budget, charged).spent
    at = budget.delta
    fits = [_most(budget, charged, job, term) for term in job.terms]
    offers = [
        f"{n} of {t.count} releases of '{t.phase}'" for t, n in zip(job.terms, fits, strict=True) if 0 < n < t.count
    ]
    noise = _noise_factor(budget, charged, job)
    if noise is not None:
        offers.append(f"all of it with noise {noise:.4g} times as large")
    return (
        f"the budget of data set '{budget.data_set}' is {budget}; {epsilon_of_rdp(spent, at):.4g} is spent by "
        f"{len(charged)} {'job' if len(charged) == 1 else 'jobs'} and job '{job.job}' asks for "
        f"{epsilon_of_rdp(asked, at):.4g}, which makes {epsilon_of_rdp(spent + asked, at):.4g}; "
        + (f"what would still fit: {', or '.join(offers)}" if offers else "nothing of this kind fits any more")
    )


def _allowed(epsilon: float, delta: float, orders: FloatArray) -> FloatArray:
    """The largest Renyi divergence that gives (epsilon, delta) at each order: Canonne et al. 2020, Prop. 12."""
    return epsilon - np.log1p(-1 / orders) + np.log(delta * orders) / (orders - 1)


def _main_order(budget: Budget, curve: FloatArray, orders: FloatArray) -> int:
    # Where a job of this shape, made as long as the budget allows, would be converted.
    allowed = _allowed(budget.epsilon, _MAIN_WEIGHT * budget.delta, orders)
    times = np.where(allowed > 0, allowed / np.maximum(curve, 1e-300), -np.inf)
    return int(np.argmax(times if np.isfinite(times).any() and times.max() > 0 else allowed))


def _fits(budget: Budget, charged: tuple[Job, ...], terms: tuple[Term, ...]) -> bool:
    return admitted(budget, charged, sum_curves(term_curve(t) for t in terms))


def admitted(budget: Budget, charged: Iterable[Job], asked: FloatArray) -> bool:
    """Whether `budget` admits the curve `asked` after the jobs in `charged`."""
    return filter_of(budget, charged, asked).order_for(asked) is not None


def _most(budget: Budget, charged: tuple[Job, ...], job: Job, term: Term) -> int:
    """How many releases of `term` fit beside the rest of the job, 0 if none do."""
    rest = tuple(t for t in job.terms if t is not term)
    low, high = 0, term.count
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(budget, charged, (*rest, replace(term, count=middle))):
            low = middle
        else:
            high = middle
    return low


def _noise_factor(budget: Budget, charged: tuple[Job, ...], job: Job) -> float | None:
    """A factor on the noise of every event with which the job fits, at most 1% above the smallest; None above 1000."""
    factor = _smallest(
        lambda f: _fits(budget, charged, tuple(replace(t, event=scaled(t.event, f)) for t in job.terms)), 1.0, 1.01
    )
    if factor is None:
        return None
    # Rounded up, so that the number as it is printed fits.
    digits = 3 - math.floor(math.log10(factor))
    return math.ceil(factor * 10**digits) / 10**digits


def _smallest(fits: Callable[[float], bool], low: float, within: float) -> float | None:
    """A value that fits and is at most `within` times the smallest at or above `low`; None beyond 1024 times, of a
    thousandth at least: a split delta leaves less to no job, however little it costs."""
    high, limit = low, 1024 * max(low, 1e-3)
    while not fits(high):
        low, high = high, 2 * high
        if high > limit:
            return None
    while high / low > within:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def scaled(event: Event, factor: float) -> Event:
    """`event` with noise of `factor` times the standard deviation."""
    if isinstance(event, Gaussian):
        return Gaussian(event.noise_multiplier * factor)
    if isinstance(event, DiscreteGaussian):
        return replace(event, sigma=event.sigma * factor)
    if isinstance(event, Skellam):
        return replace(event, variance=event.variance * factor**2)
    if isinstance(event, Composed):
        return Composed(tuple(scaled(e, factor) for e in event.events))
    if isinstance(event, PoissonSampled):
        return PoissonSampled(event.rate, cast(Mechanism, scaled(event.event, factor)))
    return Repeated(cast(Mechanism | PoissonSampled, scaled(event.event, factor)), event.count)
