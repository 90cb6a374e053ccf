"""Renyi DP curves of integer-valued noise, at any order above 1. docs/accounting.md has the statements and sources."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from secure_fvi.privacy.events import DiscreteGaussian, Skellam

FloatArray = NDArray[np.float64]


def skellam(event: Skellam, orders: FloatArray) -> FloatArray:
    """A bound on D_alpha between Skellam vectors shifted by integers, at integer orders of at least 2.

    Agarwal, Kairouz, Liu 2021, Thm 3.5 and its corollary for vectors: with v the change of the integer sum,
    alpha |v|_2^2 / 2 mu + min(((2 alpha - 1) |v|_2^2 + 6 |v|_1) / 4 mu^2, 3 |v|_1 / 2 mu), where mu is the variance of
    the noise (each Poisson part has mean mu / 2). Increasing in both norms, so their largest values bound every v.
    """
    mu, l1, squared = event.variance, event.l1, event.l2**2
    correction = np.minimum(((2 * orders - 1) * squared + 6 * l1) / (4 * mu**2), 3 * l1 / (2 * mu))
    return orders * squared / (2 * mu) + correction


def discrete_gaussian(event: DiscreteGaussian, orders: FloatArray) -> FloatArray:
    """D_alpha of one discrete Gaussian a coordinate: alpha l2^2 / 2 sigma^2, every order above 1.

    Canonne, Kamath, Steinke 2020, Prop. 5. It does not hold for a sum of several parties' discrete Gaussians, which
    is no discrete Gaussian; shares that are added up use Skellam noise.
    """
    return orders * event.l2**2 / (2 * event.sigma**2)
