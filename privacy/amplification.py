"""Privacy amplification by Poisson sampling, for a mechanism that is known by its Renyi curve.

Each record joins the batch independently with probability q, and nobody who sees the output sees who joined. With P
the output without the record, Q with it, and M = (1 - q) P + q Q, both D_alpha(M || P) and D_alpha(P || M) count.
Where a reflection swaps P and Q (any symmetric noise that is added to a sum: y -> v - y) the second is never the
larger; docs/accounting.md has the proof, and the tests compare both directions with direct summation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

FloatArray = NDArray[np.float64]

_MOST_POINTS = 20_000
_SLACK = 1e-8  # far more than the quadrature's error


def poisson_amplified(curve: Callable[[FloatArray], FloatArray], rate: float, orders: FloatArray) -> FloatArray:
    """The curve at `orders` (n,), integers of at least 2, of a symmetric additive mechanism on a Poisson batch.

    curve: bounds D_alpha(Q || P) at every integer alpha from 2 to the largest order.
    exp((alpha - 1) D_alpha(M || P)) = sum_k binomial(alpha, k) (1 - q)^(alpha - k) q^k exp((k - 1) D_k(Q || P)).
    The terms k = 0 and 1 and the ones in the others sum to 1; without them nothing cancels at small q.
    """
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
