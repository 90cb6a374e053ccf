"""Privacy loss distributions of composed Gaussian mechanisms, by dp-accounting (Doroshenko et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# Loss distributions live on a grid. A thousandth of the total loss would do for the answer; a fifth of one step's
# loss is needed where many small steps add up. The range of the grid is limited to some millions of points.
_FINEST, _COARSEST = 1e-7, 1e-4
_POINTS = 2e6


def loss_distribution(sampled: Mapping[tuple[float, float], int], scale: float) -> Any:
    """The composed dp_accounting PrivacyLossDistribution of {(rate, noise multiplier): count}; its estimates are upper.

    scale: roughly the epsilon of the whole, which sets the grid together with the loss of one step.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    step = min(_typical_loss(rate, noise) for rate, noise in sampled)
    interval = float(np.clip(step / 5, _FINEST, _COARSEST))
    interval = max(interval, scale / _POINTS)
    total = None
    for (rate, noise), count in sorted(sampled.items()):
        one = pld.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=interval, pessimistic_estimate=True
        )
        part = one.self_compose(count) if count > 1 else one
        total = part if total is None else total.compose(part)
    return total


def _typical_loss(rate: float, noise: float) -> float:
    """The standard deviation of one step's privacy loss, to leading order in the rate."""
    return rate * float(np.sqrt(np.expm1(min(noise**-2, 50.0))))
