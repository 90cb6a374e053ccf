"""Bounds from several runs: values checked by hand, and coverage where the truth is known."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from secure_fvi.audits.epsilon import Rates, Scores, bound, bound_of_rates, epsilon_of_gaussian, normal_p
from secure_fvi.errors import InputError
from secure_fvi.privacy.accountants import epsilon
from secure_fvi.privacy.events import Gaussian

REPEATS = 400


def test_a_perfect_attack_proves_what_its_runs_can() -> None:
    """No error in 100 runs of each kind: both error rates are at most 1 - .025^(1/100) = 0.0362, by hand."""
    rates = Rates(100, 100, 0, 100)
    assert rates.upper(0.95) == pytest.approx((0.036217, 0.036217), abs=1e-6)
    found = bound_of_rates(rates, 0.0, "clopper-pearson")
    assert found.epsilon == pytest.approx(math.log((1 - 0.036217) / 0.036217), abs=1e-4)
    assert found.assumption == "none"
    # Phi^-1(1 - .036217) = 1.7963, so mu >= 3.5926.
    gaussian = bound_of_rates(rates, 1e-5, "gaussian")
    assert gaussian.mu == pytest.approx(3.5926, abs=1e-3)
    assert gaussian.epsilon > 15
    assert "Gaussian" in gaussian.assumption


def test_the_mirrored_test_counts() -> None:
    """Few runs are called out, all of them rightly: TPR / FPR is near 1, TNR / FNR is not."""
    found = bound_of_rates(Rates(1000, 1000, 800, 1000), 1e-5, "clopper-pearson")
    high_fnr = 1 - 0.025 ** (1 / 1000)
    low_tnr = 0.174  # Clopper-Pearson for 200 of 1000, one-sided at 97.5%: 0.1756
    assert found.epsilon > math.log(low_tnr / high_fnr)
    assert found.epsilon < math.log(0.2 / high_fnr)
    mirrored = bound_of_rates(Rates(200, 1000, 0, 1000), 1e-5, "clopper-pearson")
    assert found.epsilon == pytest.approx(mirrored.epsilon, rel=1e-12)


def test_delta_is_taken_off() -> None:
    """One hit in a hundred is what delta = 0.05 allows anything to do."""
    assert bound_of_rates(Rates(10, 1000, 0, 1000), 0.0, "clopper-pearson").epsilon > 0
    assert bound_of_rates(Rates(10, 1000, 0, 1000), 0.05, "clopper-pearson").epsilon == 0


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
def test_the_gaussian_formula_agrees_with_the_accountant(sigma: float) -> None:
    assert epsilon_of_gaussian(1 / sigma, 1e-5) == pytest.approx(epsilon(Gaussian(sigma), 1e-5, "pld"), rel=1e-3)


def test_no_difference_proves_nothing() -> None:
    rng = np.random.default_rng(1)
    for method in ("clopper-pearson", "gaussian"):
        assert bound(rng.standard_normal(500), rng.standard_normal(500), 1e-5, method).epsilon < 0.3  # type: ignore[arg-type]


def _above(truth: float, bounds: list[float]) -> tuple[int, int]:
    """How often the bound exceeds the truth, and how many that may be: P(more) < 1e-3 at a rate of 5%."""
    return sum(b > truth for b in bounds), int(binom.ppf(0.999, len(bounds), 0.05))


@pytest.mark.parametrize("method", ["clopper-pearson", "gaussian"])
def test_coverage_on_a_gaussian_mechanism(method: Literal["clopper-pearson", "gaussian"]) -> None:
    """mu = 1, 200 runs of each kind. False-alarm rate at most 5%; this test is wrong once in a thousand seeds."""
    rng = np.random.default_rng(2)
    truth = epsilon_of_gaussian(1.0, 1e-5)
    found = [
        bound(rng.standard_normal(200), 1 + rng.standard_normal(200), 1e-5, method).epsilon for _ in range(REPEATS)
    ]
    above, allowed = _above(truth, found)
    assert above <= allowed
    # Of a truth of 4.37; the first method cannot see far into the tails with 160 runs.
    assert np.median(found) > (1.7 if method == "gaussian" else 0.5)


@pytest.mark.parametrize(("sds", "paired"), [((1, 1), True), ((1, 1), False), ((1, 0.7), True), ((0.7, 1), False)])
def test_coverage_of_normal_scores(sds: tuple[float, float], paired: bool) -> None:
    """24 pairs of runs, also where the canary changes the spread: the truth is that of the best threshold. Pairs of the
    same noise prove most of it, others hardly anything."""
    rng, grid = np.random.default_rng(5), np.linspace(-30, 30, 60_001)

    def delta(epsilon: float) -> float:
        either = [
            norm.sf(sign * (grid - gap) / s) - math.exp(epsilon) * norm.sf(sign * (grid - other) / r)
            for (gap, s), (other, r) in itertools.permutations(((0.0, sds[0]), (1.0, sds[1])))
            for sign in (1, -1)
        ]
        return float(np.max(either))

    truth = brentq(lambda e: delta(e) - 1e-5, 0.1, 60)
    found = []
    for _ in range(REPEATS):
        noise = rng.standard_normal((2, 24))
        outside, inside = sds[0] * noise[0], 1 + sds[1] * noise[0 if paired else 1]
        found.append(bound(outside, inside, 1e-5, "normal").epsilon)
    above, allowed = _above(truth, found)
    assert above <= allowed
    if sds == (1, 1):
        assert (np.median(found) > 0.6 * truth) == paired


def test_scores_that_are_no_normals_prove_too_much_and_are_told() -> None:
    """Randomised response with epsilon = 1, one answer a run: what assumes normals is no bound there."""
    rng, right = np.random.default_rng(4), math.e / (1 + math.e)
    outside, inside = ((rng.random(500) < rate).astype(float) for rate in (1 - right, right))
    assert bound(outside, inside, 1e-5, "normal").epsilon > 1.5
    assert normal_p(Scores(outside, inside)) < 1e-6


def test_coverage_where_the_method_is_tight() -> None:
    """Randomised response with epsilon = 1 meets TPR = e^epsilon FPR, so that only the confidence is left."""
    rng, right = np.random.default_rng(3), math.e / (1 + math.e)
    found = []
    for _ in range(REPEATS):
        outside, inside = (rng.random(400) < rate for rate in (1 - right, right))
        found.append(bound(outside.astype(float), inside.astype(float), 0.0, "clopper-pearson").epsilon)
    above, allowed = _above(1.0, found)
    assert above <= allowed
    assert np.median(found) > 0.75


def test_the_gaussian_method_is_wrong_where_its_assumption_is() -> None:
    """Randomised response again: the same rates read as Gaussian claim more than the truth. Hence `assumption`."""
    rng, right = np.random.default_rng(4), math.e / (1 + math.e)
    outside, inside = ((rng.random(5000) < rate).astype(float) for rate in (1 - right, right))
    assert bound(outside, inside, 1e-5, "gaussian").epsilon > 1.5


@pytest.mark.parametrize(
    ("rates", "delta", "method", "message"),
    [
        (Rates(11, 10, 0, 10), 0.0, "gaussian", "cannot be"),
        (Rates(0, 0, 0, 10), 0.0, "gaussian", "needs runs"),
        (Rates(5, 10, 0, 10), 1.0, "clopper-pearson", "delta"),
        (Rates(5, 10, 0, 10), 0.1, "bayes", "unknown"),
    ],
)
def test_bad_counts(rates: Rates, delta: float, method: Literal["gaussian"], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bound_of_rates(rates, delta, method)


def test_too_few_runs() -> None:
    with pytest.raises(InputError, match="too few"):
        bound(np.zeros(5), np.ones(5), 1e-5, "gaussian")
