"""What events cost, as Renyi DP curves that add up, and the filter by which a ledger admits jobs.

Every number is for the adjacency of the unit, one record or silo added or removed. Curves: Mironov 2017, equal to
dp-accounting's at whole orders; conversion by Canonne, Kamath, Steinke 2020, Prop. 12. What a silo relies on is here;
`accountants` has other ways to an epsilon, for plans, results and reports.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from secure_fvi.errors import InputError
from secure_fvi.privacy.events import (
    Composed,
    Event,
    Gaussian,
    Mechanism,
    PoissonSampled,
    Repeated,
    Skellam,
)
from secure_fvi.privacy.ledger_terms import Budget, Job, Term, check_delta

FloatArray = NDArray[np.float64]
Single = Gaussian | Skellam | PoissonSampled


# One grid for every curve, because a ledger adds curves of different mechanisms. Fractional orders matter at high
# epsilon, hundreds and thousands below 0.5; the optimum is flat, so steps of 15% lose nothing.
ORDERS: tuple[float, ...] = (
    1.05,
    *(x / 10 for x in range(11, 110)),
    *(float(x) for x in range(11, 65)),
    *(float(x) for x in (72, 80, 88, 96, 112, 128, 144, 160, 192, 224, 256, 288, 320, 384, 448, 512)),
    *(float(x) for x in (576, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)),
)
_ORDERS = np.array(ORDERS)
_WHOLE = np.equal(_ORDERS, np.floor(_ORDERS))
#: Nats at an order beyond which it has no bound. Such a cost protects nothing; as a number it would be carried into
#: budgets, where it looks like privacy, and into grids and sums that it overflows.
_MOST_NATS = 1e12


def rdp(event: Event) -> FloatArray:
    """The Renyi DP curve (len(ORDERS),) in nats; np.inf where an order has no bound. Curves add over composition."""
    total = np.zeros(len(ORDERS))
    for single, count in grouped(event).items():
        total += count * _curve(single)
    return total


def epsilon_of_rdp(curve: FloatArray, delta: float) -> float:
    """The smallest epsilon over the orders at `delta`."""
    return best_order(curve, delta)[0]


def best_order(curve: FloatArray, delta: float) -> tuple[float, float]:
    """(epsilon, the order that gives it) for a curve (len(ORDERS),); epsilon is inf if no order is finite."""
    check_delta(delta)
    if curve.shape != _ORDERS.shape:
        raise InputError(f"a curve has {len(ORDERS)} orders, not {curve.shape}")
    values = curve + np.log1p(-1 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1)
    # delta <= sqrt(1 - exp(-KL)), and KL is at most D_alpha: nearly nothing was spent.
    values = np.where(delta**2 + np.expm1(-curve) > 0, 0.0, values)
    values = np.where(curve <= _MOST_NATS, values, np.inf)
    best = int(np.argmin(values))
    return max(0.0, float(values[best])), ORDERS[best]


def grouped(event: Event) -> Counter[Single]:
    """How often each mechanism acts in `event`, compositions unpacked and equal mechanisms counted together."""
    if isinstance(event, Composed):
        counts: Counter[Single] = Counter()
        for part in event.events:
            counts.update(grouped(part))
        return counts
    if isinstance(event, Repeated):
        return Counter({_plain(event.event): event.count})
    if isinstance(event, Single):
        return Counter({_plain(event): 1})
    raise InputError(f"unknown privacy event {type(event).__name__}; nothing is known about its cost")


def _plain(single: Single) -> Single:
    return single.event if isinstance(single, PoissonSampled) and single.rate == 1 else single


@lru_cache(maxsize=4096)
def _curve(single: Single) -> FloatArray:
    curve = _uncached_curve(single)
    curve = np.where(curve <= _MOST_NATS, curve, np.inf)
    curve.flags.writeable = False
    return curve


def _uncached_curve(single: Single) -> FloatArray:
    mechanism, rate = (single.event, single.rate) if isinstance(single, PoissonSampled) else (single, 1.0)
    if isinstance(mechanism, Gaussian):
        if rate == 1:
            return _ORDERS / (2 * mechanism.noise_multiplier**2)
        return _sampled_gaussian(rate, mechanism.noise_multiplier)
    curve = np.full(len(ORDERS), np.inf)
    curve[_WHOLE] = poisson_amplified(lambda orders: skellam(mechanism, orders), rate, _ORDERS[_WHOLE])
    return fill_orders(curve, _WHOLE, _ORDERS)


def _sampled_gaussian(rate: float, noise_multiplier: float) -> FloatArray:
    curve = np.empty(len(ORDERS))
    curve[_WHOLE] = poisson_amplified(lambda orders: orders / (2 * noise_multiplier**2), rate, _ORDERS[_WHOLE])
    curve[~_WHOLE] = sampled_gaussian(rate, noise_multiplier, _ORDERS[~_WHOLE])
    return fill_orders(curve, np.isfinite(curve), _ORDERS)


# ----
# The rule by which a data set's budget admits jobs that are chosen in view of earlier results: a Renyi DP filter
#
# Feldman and Zrnic 2021, Lecuyer 2021: as long as the declared curves at ONE order fixed beforehand sum to at
# most what (epsilon, delta) allows there, everything released together is (epsilon, delta)-DP, however the jobs were
# chosen. "Some order of a grid" is sound only when delta is split over the grid; docs/ledger.md has the argument. Most
# of
# delta goes to the order at which the data set's first job would use up the whole budget, the rest to four
# orders around it.


_MAIN_WEIGHT = 0.9
#: The other orders, as multiples of (main order - 1).
_OTHERS = (0.25, 0.5, 2.0, 4.0)


def term_curve(term: Term) -> FloatArray:
    """The Renyi DP curve of all `count` releases, over `ORDERS`, in nats."""
    return term.count * rdp(term.event)


def job_curve(job: Job) -> FloatArray:
    """The curve of all that `job` declared."""
    return sum_curves(term_curve(t) for t in job.terms)


def sum_curves(curves: Iterable[FloatArray]) -> FloatArray:
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
        room = self.limits - (self.spent + asked)
        best = int(np.argmax(room))
        return ORDERS[best] if room[best] >= 0 else None

    def remaining(self) -> float:
        """Epsilon, at the budget's delta, of the largest Gaussian release that still fits; 0 when none does."""
        orders = np.array(ORDERS)
        largest = float(np.max((self.limits - self.spent) / orders))
        return epsilon_of_rdp(largest * orders, self.budget.delta) if largest > 0 else 0.0


def filter_of(budget: Budget, charged: Iterable[Job], asked: FloatArray | None = None) -> Filter:
    """The filter after the jobs in `charged`, in the order of their charging, when a job of curve `asked` asks."""
    curves = [job_curve(j) for j in charged]
    gaussian = np.array(ORDERS)  # up to a factor
    first = [*curves, gaussian if asked is None else asked][0]
    return Filter(budget, sum_curves(curves), first)


def smallest_budget(job: Job) -> Budget:
    """The smallest budget, to 0.1%, that admits `job` on a data set of which nothing was spent, at the job's delta.

    Raises InputError for a job without finite privacy.
    """
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
    asked = rdp(event)
    low = epsilon_of_rdp(asked, delta)
    if not math.isfinite(low):
        return math.inf
    found = _smallest(lambda e: admitted(Budget("any", e, delta), (), asked), max(low, 1e-9), 1 + 1e-6)
    return math.inf if found is None else found


def refusal(budget: Budget, charged: Iterable[Job], job: Job) -> str:
    """Why `job` does not fit, in numbers, and what would."""
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
    if isinstance(event, Skellam):
        return replace(event, variance=event.variance * factor**2)
    if isinstance(event, Composed):
        return Composed(tuple(scaled(e, factor) for e in event.events))
    if isinstance(event, PoissonSampled):
        return PoissonSampled(event.rate, cast(Mechanism, scaled(event.event, factor)))
    return Repeated(cast(Mechanism | PoissonSampled, scaled(event.event, factor)), event.count)


# ---- Privacy amplification by Poisson sampling, for a mechanism that is known by its Renyi curve ----
#
# Each record joins the batch independently with probability q, and nobody who sees the output sees who joined. With P
# the output without the record, Q with it, and M = (1 - q) P + q Q, both D_alpha(M || P) and D_alpha(P || M) count.
# Where a reflection swaps P and Q (any symmetric noise that is added to a sum: y -> v - y) the second is never the
# larger; docs/accounting.md has the proof, and the tests compare both directions with direct summation.


_MOST_POINTS = 20_000
_SLACK = 1e-8  # far more than the quadrature's error


def poisson_amplified(curve: Callable[[FloatArray], FloatArray], rate: float, orders: FloatArray) -> FloatArray:
    """The curve at `orders` (n,), integers of at least 2, of a symmetric additive mechanism on a Poisson batch.

    curve: bounds D_alpha(Q || P) at every integer alpha from 2 to the largest order.
    exp((alpha - 1) D_alpha(M || P)) = sum_k binomial(alpha, k) (1 - q)^(alpha - k) q^k exp((k - 1) D_k(Q || P)).
    The terms k = 0 and 1 and the ones in the others sum to 1; without them nothing cancels at small q.
    """
    from scipy.special import gammaln, logsumexp

    whole = curve(orders)
    if rate == 1:
        return whole
    k = np.arange(2, int(orders.max()) + 1, dtype=np.float64)
    moments = _log_expm1((k - 1) * curve(k))
    log_factorials = gammaln(np.arange(int(orders.max()) + 2, dtype=np.float64) + 1)
    result = np.empty_like(orders)
    for i, order in enumerate(orders):
        alpha = int(order)
        used = slice(0, alpha - 1)
        binomials = log_factorials[alpha] - log_factorials[2 : alpha + 1] - log_factorials[alpha - 2 :: -1]
        terms = binomials + (alpha - k[used]) * np.log1p(-rate) + k[used] * np.log(rate) + moments[used]
        result[i] = np.logaddexp(0.0, logsumexp(terms)) / (alpha - 1)
    return np.minimum(result, whole)


def sampled_gaussian(rate: float, noise_multiplier: float, orders: FloatArray) -> FloatArray:
    """The curve at any `orders` above 1 of Gaussian noise on a Poisson batch; inf where a moment overflows.

    The moment E_P[(M / P)^alpha] - 1 of Mironov, Talwar, Zhang 2019 by the trapezoidal rule, which converges
    geometrically for these integrands. Less the term of mean 0 they are positive, so that nothing cancels. The series
    for fractional orders in common use stops early and comes out up to 40% too high.
    """
    sigma = noise_multiplier
    width = min(sigma / 8, sigma**2 / 3)
    if (float(orders.max()) + 28 * sigma) / width > _MOST_POINTS:
        return np.full(len(orders), np.inf)
    z = np.arange(-14 * sigma, orders.max() + 14 * sigma, width)
    weights = np.exp(-(z**2) / (2 * sigma**2)) * width / (sigma * np.sqrt(2 * np.pi))
    loss = (2 * z - 1) / (2 * sigma**2)
    a = orders[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        x = rate * np.expm1(loss)  # M / P - 1
        log_ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + loss)
        far = np.exp(a * log_ratio - z**2 / (2 * sigma**2)) * width / (sigma * np.sqrt(2 * np.pi))
        far -= weights * (1 + a * x)
        series = 1 + (a - 2) / 3 * x * (1 + (a - 3) / 4 * x * (1 + (a - 4) / 5 * x))
        near = weights * a * (a - 1) / 2 * x**2 * series
        moments = np.where(np.abs(x) < 1e-3, near, far).sum(axis=1)
    curve = np.log1p(moments) / (orders - 1) * (1 + _SLACK)
    return np.where(np.isfinite(curve), curve, np.inf)


def fill_orders(curve: FloatArray, known: NDArray[np.bool_], orders: FloatArray) -> FloatArray:
    """The curve with bounds where it is not `known`, orders ascending.

    (alpha - 1) D_alpha is convex in alpha and 0 at alpha = 1, so a chord between known orders lies above it.
    """
    anchors = np.concatenate([[0.0], (orders[known] - 1) * curve[known]])
    chord = np.interp(orders, np.concatenate([[1.0], orders[known]]), anchors, right=np.inf)
    return np.where(known, curve, chord / (orders - 1))


def _log_expm1(x: FloatArray) -> FloatArray:
    return np.where(x > 30, x, np.log(np.expm1(np.minimum(x, 30))))


# ----
# Renyi DP curves of integer-valued noise, at any order above 1. docs/accounting.md has the statements and sources


def skellam(event: Skellam, orders: FloatArray) -> FloatArray:
    """A bound on D_alpha between Skellam vectors shifted by integers, at integer orders of at least 2.

    Agarwal, Kairouz, Liu 2021, Thm 3.5 and its corollary for vectors: with v the change of the integer sum,
    alpha |v|_2^2 / 2 mu + min(((2 alpha - 1) |v|_2^2 + 6 |v|_1) / 4 mu^2, 3 |v|_1 / 2 mu), where mu is the variance of
    the noise (each Poisson part has mean mu / 2). Increasing in both norms, so their largest values bound every v.
    """
    mu, l1, squared = event.variance, event.l1, event.l2**2
    correction = np.minimum(((2 * orders - 1) * squared + 6 * l1) / (4 * mu**2), 3 * l1 / (2 * mu))
    return orders * squared / (2 * mu) + correction


# ---- The noise that an epsilon asks for: on the safe side, the cost, asked again, is at most the target ----

_EXTREME = 2.0**40  # beyond it no noise multiplier and no count is a plan


def check_target(epsilon: float, delta: float, tolerance: float) -> None:
    """Raises InputError for numbers out of range."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise InputError(f"epsilon must be a positive finite number, not {epsilon!r}")
    check_delta(delta)
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must lie between 0 and 1, not {tolerance!r}")


def solve_noise(make_event: Callable[[float], Event], epsilon: float, delta: float, tolerance: float = 1e-3) -> float:
    """The least noise, to a relative `tolerance`, at which a budget of `epsilon` at `delta` admits make_event(noise).

    make_event: from a noise multiplier to the whole job, never costlier with more noise. Raises InputError if no
    amount of noise is enough (sensitivities that grow with the noise, a job that pays for something else as well).
    """
    check_target(epsilon, delta, tolerance)
    cost = lru_cache(maxsize=None)(lambda noise: charge(make_event(noise), delta))
    return last_within(cost, 1.0, epsilon, +1, tolerance)


def last_within(cost: Callable[[float], float], start: float, target: float, better: int, tolerance: float) -> float:
    """The last x with cost(x) <= target on the way from better values to worse, within a factor exp(tolerance).

    better: +1 where larger x cost less (noise), -1 where smaller do (rates).
    """

    from scipy.optimize import brentq

    def excess(t: float) -> float:
        value = cost(math.exp(t))
        return math.log(value / target) if 0 < value < math.inf else math.copysign(50.0, value - target)

    here = math.log(start)
    fits = excess(here) <= 0
    # Epsilon is roughly proportional to 1 / noise and to the rate, and to the square root of the rounds.
    step = min(max(1.3 * abs(excess(here)), 0.02), 1.0)
    away, limit = (-better if fits else better), math.log(_EXTREME)
    there = here + away * step
    while (excess(there) <= 0) == fits:
        if abs(there) > limit:
            if fits:
                return math.exp(there)
            raise InputError(f"nothing keeps this within epsilon {target:g} at the given delta")
        step *= 2
        here, there = there, there + away * step
    low, high = sorted((here, there))
    found = float(brentq(excess, low, high, xtol=tolerance / 4, rtol=1e-12))
    while excess(found) > 0:
        found += better * tolerance / 4
    return math.exp(found)
