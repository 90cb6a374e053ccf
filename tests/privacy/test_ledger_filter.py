"""The filter admits no more than the budget by exact accounting, and little less; its parts against dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from ledger_world import gaussian_job, job_of

from secure_fvi.privacy import accountants, accounting
from secure_fvi.privacy.accounting import filter_of, job_curve, scaled, smallest_budget
from secure_fvi.privacy.events import Composed, Event, Gaussian, PoissonSampled, Repeated, Skellam
from secure_fvi.privacy.ledger import Budget, Job

ORDERS = np.array(accounting.ORDERS)
BUDGETS = [Budget("adult", e, d) for e, d in ((0.2, 1e-5), (1.0, 1e-5), (1.0, 1e-8), (8.0, 1e-6))]


def kind_of_job(kind: str, noise: float) -> Job:
    event: Event = Gaussian(noise) if kind == "full batch" else PoissonSampled(0.02, Gaussian(noise))
    return job_of("job", ("gradient", event, 200))


def least_noise(budget: Budget, kind: str) -> Job:
    """The job with the least noise that an untouched budget admits, to 0.01%."""
    low, high = 0.3, 3000.0
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        asked = job_curve(kind_of_job(kind, middle))
        if filter_of(budget, [], asked).order_for(asked) is None:
            low = middle
        else:
            high = middle
    return kind_of_job(kind, high)


@pytest.mark.later
@pytest.mark.parametrize("kind", ["full batch", "sampled"])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_one_job_that_just_fits(budget: Budget, kind: str) -> None:
    job = least_noise(budget, kind)
    plain = accounting.epsilon_of_rdp(job_curve(job), budget.delta)
    assert plain <= budget.epsilon
    # The price of choosing jobs adaptively: less than 1% of epsilon against plain conversion (docs/ledger.md).
    assert plain > 0.99 * budget.epsilon
    exact = accountants.epsilon(Repeated(job.terms[0].event, 200), budget.delta, "pld")  # type: ignore[arg-type]
    assert exact <= budget.epsilon


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.later("epsilon 8 at delta 1e-06 (unit: record)")
def test_many_different_jobs_never_exceed_the_budget(budget: Budget) -> None:
    """Jobs of random kinds, each admitted while it fits; fixed seed. The exact epsilon of all of them stays within."""
    rng = np.random.default_rng(5)
    scale = least_noise(budget, "full batch").terms[0].event.noise_multiplier  # type: ignore[union-attr]
    jobs: list[Job] = []
    refused = 0
    for number in range(60):
        noise = scale * float(rng.uniform(0.4, 3.0))
        event: Event = Gaussian(noise) if rng.random() < 0.5 else PoissonSampled(0.1, Gaussian(max(0.5, noise / 10)))
        job = job_of(f"job {number}", ("gradient", event, int(rng.integers(1, 60))))
        asked = job_curve(job)
        if filter_of(budget, jobs, asked).order_for(asked) is None:
            refused += 1
        else:
            jobs.append(job)
    assert refused >= 3
    everything = Composed(tuple(Repeated(j.terms[0].event, j.terms[0].count) for j in jobs))  # type: ignore[arg-type]
    assert accountants.epsilon(everything, budget.delta, "pld") <= budget.epsilon
    assert accountants.epsilon(everything, budget.delta, "rdp") > 0.95 * budget.epsilon  # it was really used up


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_the_orders_share_delta(budget: Budget) -> None:
    """At the limit of each order dp-accounting gives epsilon at some share of delta; the shares add up to delta."""
    limits = filter_of(budget, []).limits
    used = np.flatnonzero(np.isfinite(limits))
    assert 3 <= len(used) <= 5
    shares = []
    for at in used:
        low, high = -60.0, 0.0  # log of the share at which the limit converts to epsilon
        for _ in range(80):
            middle = (low + high) / 2
            found = compute_epsilon([ORDERS[at]], [max(limits[at], 0.0)], math.exp(middle) * budget.delta)[0]
            low, high = (low, middle) if found < budget.epsilon else (middle, high)
        if limits[at] > 0:
            shares.append(math.exp(high))
    assert max(shares) == pytest.approx(0.9, rel=1e-6)
    assert sum(shares) <= 1 + 1e-6


def test_the_first_job_fixes_the_orders() -> None:
    first = job_of("one", ("gradient", PoissonSampled(0.01, Gaussian(0.9)), 500))
    budget = Budget("adult", 3.0, 1e-5)
    alone = filter_of(budget, [first]).limits
    later = gaussian_job("two", noise=500.0)
    np.testing.assert_array_equal(alone, filter_of(budget, [first], job_curve(later)).limits)
    np.testing.assert_array_equal(alone, filter_of(budget, [first, later]).limits)
    assert not np.array_equal(alone, filter_of(budget, [later, first]).limits)


@pytest.mark.parametrize("spent", [0, 1, 20])
def test_what_remains_is_what_a_gaussian_may_still_spend(spent: int) -> None:
    budget = Budget("adult", 1.0, 1e-5)
    jobs = [gaussian_job(f"{i}", noise=190.0) for i in range(spent)]
    left = filter_of(budget, jobs).remaining()
    for part, fits in ((0.999, True), (1.001, False)):
        low, high = 0.1, 1e5  # the noise of one Gaussian release of epsilon `part * left`
        for _ in range(80):
            middle = math.sqrt(low * high)
            enough = accounting.epsilon_of_rdp(accounting.rdp(Gaussian(middle)), 1e-5) < part * left
            low, high = (low, middle) if enough else (middle, high)
        asked = accounting.rdp(Gaussian(high))
        assert (filter_of(budget, jobs, asked).order_for(asked) is not None) == fits


@pytest.mark.parametrize("kind", ["full batch", "sampled"])
def test_the_smallest_budget_of_a_job_admits_it_and_hardly_less_does(kind: str) -> None:
    job = kind_of_job(kind, 20.0)
    asked = job_curve(job)
    budget = smallest_budget(job)
    assert filter_of(budget, [], asked).order_for(asked) is not None
    less = Budget(budget.data_set, budget.epsilon * 0.998, budget.delta)
    assert filter_of(less, [], asked).order_for(asked) is None


def test_an_epsilon_too_small_for_any_order_admits_nothing() -> None:
    budget = Budget("adult", 1e-4, 1e-9)
    asked = job_curve(gaussian_job(noise=1e5, count=1))
    assert filter_of(budget, [], asked).order_for(asked) is None
    assert filter_of(budget, []).remaining() == 0


@pytest.mark.parametrize(
    "event",
    [
        Gaussian(2.0),
        Skellam(400.0, 30.0, 10.0),
        PoissonSampled(0.1, Gaussian(2.0)),
        Repeated(PoissonSampled(0.1, Skellam(400.0, 30.0, 10.0)), 3),
        Composed((Gaussian(2.0), Repeated(Gaussian(3.0), 2))),
    ],
)
def test_more_noise_costs_less(event: Event) -> None:
    assert scaled(event, 1.0) == event
    less = accounting.rdp(scaled(event, 2.0))
    assert (less <= accounting.rdp(event)).all()
    # Ten times the noise is worth a hundredth at order 2, where sampling hardly bends the curve.
    at = accounting.ORDERS.index(2.0)
    ratio = accounting.rdp(scaled(event, 10.0))[at] / less[at]
    assert ratio == pytest.approx(0.04, rel=0.15)
