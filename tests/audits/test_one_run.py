"""The one-run bound: published check values, and its coverage on a mechanism of known epsilon."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from secure_fvi.audits.epsilon import GUESSES, OneRunMethod, epsilon_of_gaussian, guess, lower_bound
from secure_fvi.errors import InputError
from secure_fvi.privacy.accountants import epsilon
from secure_fvi.privacy.events import Gaussian

DELTA = 1e-5


@pytest.mark.parametrize(
    ("m", "r", "v", "pure", "approximate"),
    [(1000, 100, 100, 3.4930, 3.4654), (1000, 100, 95, 2.1724, 2.1652), (5000, 200, 190, 2.3979, 2.3760)],
)
def test_check_values(m: int, r: int, v: int, pure: float, approximate: float) -> None:
    assert lower_bound(m, r, v, 0.0).epsilon == pytest.approx(pure, abs=5e-5)
    assert lower_bound(m, r, v, 1e-5).epsilon == pytest.approx(approximate, abs=5e-5)


def bounds_of_a_gaussian(
    each_side: int = 100, seed: int = 1, method: OneRunMethod = "one run", mu: float = 1.0, canaries: int = 10_000
) -> npt.NDArray[np.float64]:
    """(200,) bounds on epsilon of a mechanism that releases each canary's bit times mu, plus N(0, 1)."""
    rng, bounds = np.random.default_rng(seed), np.empty(200)
    for k in range(len(bounds)):
        inside = rng.random(canaries) < 0.5
        scores = mu * (inside - 0.5) + rng.standard_normal(len(inside))
        bounds[k] = guess(scores, inside, each_side, DELTA, method).epsilon
    return bounds


def test_a_gaussian_mechanism_is_bounded_below_and_hardly_ever_above_the_truth() -> None:
    """sigma = 1, 10,000 canaries, 200 guesses, 200 repeats. Truth 4.37; more than 10 of 200 above it would be a
    false alarm at 5% each with probability below 0.42; the seed is fixed, and there are none."""
    found, truth = bounds_of_a_gaussian(), epsilon(Gaussian(1.0), DELTA, "pld")
    assert truth == pytest.approx(4.37, abs=0.02)
    assert np.median(found) >= 2.2
    assert (found > truth).mean() <= 0.05


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_curve_proves_half_again_as_much_and_hardly_ever_more_than_the_truth(epsilon: float) -> None:
    """5,000 canaries and 500 guesses, as audits have. 20 or more of 200 above the truth would be a false alarm with
    probability .004 at 5% each."""
    mu = brentq(lambda mu: epsilon_of_gaussian(mu, DELTA) - epsilon, 0.02, 5)
    curve = bounds_of_a_gaussian(250, 1, "one run, gaussian", mu, 5000)
    assert np.median(curve) > 0.53 * epsilon
    assert (curve > epsilon).sum() < 20
    assert np.median(curve) > 1.2 * np.median(bounds_of_a_gaussian(50, 1, "one run", mu, 5000))


def test_a_curve_that_is_no_gaussian_proves_too_much() -> None:
    """Randomised response of epsilon 1: what assumes a Gaussian's curve is no bound there. The other one is."""
    rng = np.random.default_rng(1)
    inside = rng.random(5000) < 0.5
    told = np.where(rng.random(5000) < 1 / (1 + np.exp(-1.0)), inside, ~inside) + 1e-9 * rng.standard_normal(5000)
    found = guess(told, inside, 2000, DELTA, "one run, gaussian")
    assert found.epsilon > 1 > guess(told, inside, 2000, DELTA).epsilon
    assert "Gaussian" in found.assumption


@pytest.mark.later
@pytest.mark.parametrize("claimed", [1.0, 4.0])
def test_canaries_that_are_told_apart_independently_prove_most_of_a_claim(claimed: float) -> None:
    """10,000 canaries and 3,000 guesses, as audits have. 20 or more of 200 above the truth would be a false alarm with
    probability .004 at 5% each; the tail is an equality there, so that some ten are."""
    mu = brentq(lambda mu: epsilon_of_gaussian(mu, DELTA) - claimed, 0.02, 5)
    found = bounds_of_a_gaussian(1500, 1, "one run, independent", mu)
    print(f"{claimed:g}: median {np.median(found):.2f}, {(found > claimed).sum()} of 200 above")
    assert np.median(found) > 0.8 * claimed
    assert (found > claimed).sum() < 20


@pytest.mark.later
def test_a_run_that_leaks_of_all_canaries_at_once_is_beyond_the_bound_for_independent_ones() -> None:
    """With probability .26 it tells each canary's bit with a chance of .6, else nothing: no canary's trade-off curve is
    below that of .25-Gaussian DP, and yet a fifth of runs and more contradict it where independence is taken for
    granted. Who assumes the curve alone is hardly ever wrong."""
    leaks, right, mu = 0.26, 0.6, 0.25
    for at in np.linspace(0, 1, 101):  # delta at each epsilon, of one canary's bit and of the Gaussian
        exact = norm.cdf(mu / 2 - at / mu) - np.exp(at) * norm.cdf(-mu / 2 - at / mu)
        assert leaks * max(0.0, right - np.exp(at) * (1 - right)) <= exact
    rng, truth = np.random.default_rng(3), epsilon_of_gaussian(mu, DELTA)
    above = dict.fromkeys(GUESSES, 0)
    for _ in range(200):
        inside = rng.random(10_000) < 0.5
        told = inside ^ (rng.random(10_000) > (right if rng.random() < leaks else 0.5))
        scores = (told - 0.5) * (1 + 1e-9 * rng.random(10_000))
        for method, sides in GUESSES.items():
            above[method] += (
                guess(scores, inside, 2500 if "independent" in method else sides["record"], DELTA, method).epsilon
                > truth
            )
    print(above)
    assert above["one run, independent"] > 40
    assert above["one run"] < 20
    assert above["one run, gaussian"] < 20


@pytest.mark.slow
@pytest.mark.parametrize("each_side", [50, 100, 150, 200])
def test_the_bound_for_100_to_400_guesses(each_side: int) -> None:
    found = bounds_of_a_gaussian(each_side, seed=2)
    above_truth = (found > epsilon(Gaussian(1.0), DELTA, "pld")).mean()
    print(f"{2 * each_side} guesses: median {np.median(found):.3f}, above the truth {above_truth:.1%}")
    assert np.median(found) >= 2.2
    assert above_truth <= 0.05


def test_guessing_at_random_proves_nothing() -> None:
    rng = np.random.default_rng(2)
    assert guess(rng.standard_normal(5000), rng.random(5000) < 0.5, 200, 1e-5).epsilon < 0.2
    assert guess(rng.standard_normal(5000), rng.random(5000) < 0.5, 250, 1e-5, "one run, gaussian").epsilon < 0.2
    for method in ("one run", "one run, gaussian"):
        assert lower_bound(100, 50, 20, 1e-5, method=method).epsilon == 0
        assert lower_bound(100, 50, 0, 1e-5, method=method).epsilon == 0


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be"):
        lower_bound(100, 50, 51, 0.0)
