"""Opacus' own accountants, for comparison with ours.

Its PRV looks at the removal of a record only, and its grid grows without bound with epsilon: it hangs, or overflows
exp(709). Both are ruled out before it starts. What it returns is the upper end of its error interval.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

from secure_fvi.errors import InputError

_MOST_POINTS = 2**23
_LARGEST_LOSS = 300.0  # nats: exp(2 L) must stay finite
_DELTA_ERROR = 1e-3  # as a share of delta

Sampled = Mapping[tuple[float, float], int]


def rdp_epsilon(sampled: Sampled, delta: float) -> float:
    """Epsilon by Opacus' RDP over its default orders, for {(rate, noise multiplier): count}."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, rate, count) for (rate, noise), count in sampled.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is at the edge of its grid
        return float(accountant.get_epsilon(delta))


def prv_epsilon(sampled: Sampled, delta: float, largest_loss: float) -> float:
    """Epsilon by Opacus' PRV accountant, its upper end.

    largest_loss: epsilon by RDP at delta / 8000, the range that the grid must cover. Raises InputError where the
    grid would not fit; pld has no such limit.
    """
    from opacus.accountants import PRVAccountant

    steps = sum(sampled.values())
    if largest_loss > _LARGEST_LOSS:
        raise InputError(f"Opacus' PRV cannot represent privacy losses near {largest_loss:.0f}; use pld")
    spread = math.sqrt(steps * math.log(12 / (_DELTA_ERROR * delta)) / 2)
    error = max(min(0.01, 0.001 * largest_loss), 2 * (largest_loss + 3) * spread / _MOST_POINTS)
    if error > 0.02 * largest_loss:
        raise InputError(f"Opacus' PRV would need more than {_MOST_POINTS} grid points for {steps} steps; use pld")
    accountant = PRVAccountant()
    accountant.history = [(noise, rate, count) for (rate, noise), count in sampled.items()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return max(0.0, float(accountant.get_epsilon(delta, eps_error=error, delta_error=_DELTA_ERROR * delta)))
    except (RuntimeError, ValueError) as failure:
        raise InputError(f"Opacus' PRV cannot account for this: {failure}; use pld") from failure
