"""Curves of integer noise and of its sampling, against sums over the support.

Nothing here is random. `_log_skellam` and `_log_discrete_gaussian` share no code with the library.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from secure_fvi.privacy import accounting
from secure_fvi.privacy.accounting import fill_orders, poisson_amplified, skellam
from secure_fvi.privacy.events import PoissonSampled, Skellam

FloatArray = NDArray[np.float64]
ORDERS = np.array([2.0, 3.0, 5.0, 8.0, 16.0, 64.0])


def _log_skellam(variance: float, reach: int) -> FloatArray:
    """log P(Z = -reach..reach), the sum over the second Poisson variable."""
    k = np.arange(reach + 1)[:, None]
    j = np.arange(int(variance / 2 + 12 * np.sqrt(variance / 2) + 60))[None]
    half = logsumexp(-variance + (2 * j + k) * np.log(variance / 2) - gammaln(j + 1) - gammaln(j + k + 1), axis=1)
    return np.concatenate([half[:0:-1], half])


def _log_discrete_gaussian(sigma: float, reach: int) -> FloatArray:
    k = np.arange(-reach, reach + 1)
    log = -(k**2) / (2 * sigma**2)
    return log - logsumexp(log)


def _renyi(log_p: FloatArray, log_q: FloatArray, order: float) -> float:
    """D_order(P || Q) by summation; the terms at the edge of the support must not matter."""
    terms = order * log_p + (1 - order) * log_q
    edges = [terms.take(i, axis).max() for axis in range(terms.ndim) for i in (0, -1)]
    assert max(edges) < terms.max() - 35
    return float(logsumexp(terms)) / (order - 1)


def _shifted(log: FloatArray, shift: int) -> tuple[FloatArray, FloatArray]:
    """(log P, log Q) on a common support, where Q is P moved by `shift`."""
    return log[shift:], log[: len(log) - shift]


@pytest.mark.parametrize("variance", [0.2, 1.0, 5.0, 40.0, 400.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_the_skellam_bound_covers_the_divergence_and_is_tight_in_large_noise(variance: float, shift: int) -> None:
    bound = skellam(Skellam(variance, shift, shift), ORDERS)
    log = _log_skellam(variance, int(64 * shift + 25 * np.sqrt(variance) + 150))
    exact = np.array([_renyi(*_shifted(log, shift)[::-1], order) for order in ORDERS])
    assert (bound >= exact).all()
    # Noise is large where the shift that the order magnifies stays well inside it.
    large = ORDERS * shift <= variance / 4
    assert (bound <= exact * 1.06)[large].all()
    assert large.any() == (variance / shift >= 8)


@pytest.mark.parametrize("shift", [(1, 1), (2, 1), (3, -2)])
@pytest.mark.parametrize("variance", [2.0, 50.0])
def test_the_skellam_bound_covers_vectors(variance: float, shift: tuple[int, int]) -> None:
    event = Skellam(variance, float(np.abs(shift).sum()), float(np.linalg.norm(shift)))
    log = _log_skellam(variance, 160)
    pairs = [_shifted(log, abs(s)) for s in shift]
    log_p = pairs[0][0][:, None] + pairs[1][0][None]
    log_q = pairs[0][1][:, None] + pairs[1][1][None]
    for order in (2.0, 4.0, 16.0):
        exact = _renyi(log_q, log_p, order)
        bound = float(skellam(event, np.array([order]))[0])
        assert exact <= bound
        assert order * np.abs(shift).max() > variance / 4 or bound <= exact * 1.06


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.5, 0.95])
@pytest.mark.parametrize("variance", [0.5, 4.0, 60.0])
@pytest.mark.parametrize("shift", [(1,), (3,), (1, 1), (2, -1)])
def test_sampling_in_both_directions(rate: float, variance: float, shift: tuple[int, ...]) -> None:
    event = Skellam(variance, float(np.abs(shift).sum()), float(np.linalg.norm(shift)))
    log = _log_skellam(variance, 150 if len(shift) == 1 else 110)
    log_p, log_q = np.zeros(()), np.zeros(())
    for p, q in (_shifted(log, abs(s)) for s in shift):
        log_p, log_q = np.add.outer(log_p, p), np.add.outer(log_q, q)
    mixture = np.logaddexp(np.log1p(-rate) + log_p, np.log(rate) + log_q)
    orders = np.array([2.0, 3.0, 8.0, 16.0])
    bound = poisson_amplified(lambda a: skellam(event, a), rate, orders)
    exact_curve = {a: _renyi(log_q, log_p, a) for a in np.arange(2.0, 17.0)}
    expansion = poisson_amplified(lambda a: np.array([exact_curve[x] for x in a]), rate, orders)
    for i, order in enumerate(orders):
        with_record, without = _renyi(mixture, log_p, order), _renyi(log_p, mixture, order)
        assert without <= with_record * (1 + 1e-9)  # docs/accounting.md proves it for symmetric noise
        assert with_record <= bound[i] * (1 + 1e-9)
        assert expansion[i] == pytest.approx(with_record, rel=1e-6)  # the expansion itself is exact


def test_without_symmetry_the_other_direction_can_be_larger() -> None:
    """The control: the claim above is about symmetric noise. Here Q is nearly empty where P is not."""
    log_p, log_q = np.log([0.5, 0.5]), np.log([1e-6, 1 - 1e-6])
    mixture = np.logaddexp(np.log(0.1) + log_p, np.log(0.9) + log_q)
    forward = float(logsumexp(8 * mixture - 7 * log_p)) / 7
    assert float(logsumexp(8 * log_p - 7 * mixture)) / 7 > 1.5 * forward


def test_sampled_noise_in_the_limit_is_the_sampled_gaussian() -> None:
    """Fine integers: the Skellam curve becomes dp-accounting's Gaussian one, at every whole order."""
    whole = [i for i, order in enumerate(accounting.ORDERS) if 2 <= order <= 64 and order == int(order)]
    ours = accounting.rdp(PoissonSampled(0.01, Skellam(1e10, 1e7, 1e5)))[whole]
    theirs = accounting.rdp(accounting.PoissonSampled(0.01, accounting.Gaussian(1.0)))[whole]
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)


def test_sampling_stays_accurate_at_tiny_rates_and_extreme_orders() -> None:
    orders = np.array([2.0, 4096.0])
    curve = poisson_amplified(lambda a: a / 2e8, 1e-6, orders)
    # At order 2: log(1 + q^2 (exp(D_2) - 1)), here 1e-20.
    assert curve[0] == pytest.approx(1e-12 * np.expm1(1e-8), rel=1e-9)
    assert np.isfinite(curve).all()
    loud = poisson_amplified(lambda a: a * 50, 0.5, orders)
    assert np.isfinite(loud).all()
    assert (loud <= orders * 50).all()


def test_filled_orders_lie_above_the_curve() -> None:
    orders = np.array([1.5, 2.0, 2.5, 3.0, 3.7, 4.0])
    exact = np.array([_renyi(*_shifted(_log_skellam(3.0, 80), 2)[::-1], a) for a in orders])
    known = orders == np.floor(orders)
    filled = fill_orders(np.where(known, exact, np.inf), known, orders)
    assert (filled >= exact * (1 - 1e-12)).all()
    np.testing.assert_array_equal(filled[known], exact[known])
    assert np.isinf(fill_orders(np.full(6, np.inf), np.zeros(6, dtype=bool), orders)).all()


def test_every_pair_of_settings_costs_less_with_more_noise_and_a_lower_rate() -> None:
    for rate, variance in itertools.product((0.01, 0.2, 1.0), (4.0, 50.0)):
        here = accounting.rdp(PoissonSampled(rate, Skellam(variance, 4.0, 2.0)))
        assert (accounting.rdp(PoissonSampled(rate, Skellam(variance * 1.5, 4.0, 2.0))) <= here).all()
        assert (accounting.rdp(PoissonSampled(rate / 2, Skellam(variance, 4.0, 2.0))) <= here).all()
