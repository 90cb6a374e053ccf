"""Epsilon and delta of events by five accountants, for plans, results and reports; ledgers admit by `accounting` alone.

- `rdp`: the smallest epsilon over the orders of the Renyi curve. The only one whose cost may be added up over jobs
  chosen adaptively.
- `pld`: privacy loss distributions with pessimistic rounding, in both directions; the tightest, used in reports.
- `ledger`: the smallest budget whose filter admits the event as a data set's first job, a little above `rdp`. A job for
  epsilon takes its noise from this one: plan, run and ledger then name one number.
- `prv`, `opacus-rdp`: Opacus' accountants, for comparison.

Skellam noise has `rdp` and `ledger` only. GDP is not offered: it is no bound.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from secure_fvi.errors import InputError
from secure_fvi.privacy.accounting import (
    _ORDERS,
    FloatArray,
    charge,
    epsilon_of_rdp,
    grouped,
    rdp,
)
from secure_fvi.privacy.events import (
    Event,
    Gaussian,
    PoissonSampled,
)
from secure_fvi.privacy.ledger_terms import check_delta

ACCOUNTANTS = ("rdp", "opacus-rdp", "prv", "pld", "ledger")
#: Epsilon up to which losses are laid out on a grid.
_MOST_ON_GRID = 1e8
# Loss distributions live on a grid. A thousandth of the total loss would do for the answer; a fifth of one step's
# loss is needed where many small steps add up. The range of the grid is limited to some millions of points. Where
# nothing is composed nothing adds up, and a ten-thousandth of the total loss raises epsilon by less than a millionth.
_FINEST, _COARSEST, _ALONE = 1e-7, 1e-4, 1e-4
_POINTS = 2e6
# Opacus' PRV looks at the removal of a record only, and its grid grows without bound with epsilon: it hangs, or
# overflows exp(709). Both are ruled out before it starts. What it returns is the upper end of its error interval.
_MOST_GRID_POINTS = 2**23
_LARGEST_LOSS = 300.0  # nats: exp(2 L) must stay finite
_DELTA_ERROR = 1e-3  # as a share of delta

Sampled = Mapping[tuple[float, float], int]


@functools.lru_cache(maxsize=64)
def epsilon(event: Event, delta: float, accountant: str = "pld") -> float:
    """An epsilon such that `event` is (epsilon, delta)-DP. Raises InputError where the accountant has no bound."""
    check_delta(delta)
    check_accountant(accountant)
    if accountant == "rdp":
        return epsilon_of_rdp(rdp(event), delta)
    if accountant == "ledger":
        return charge(event, delta)
    sampled = _gaussians(event, accountant)
    if not sampled:
        return 0.0
    whole = epsilon_of_rdp(rdp(event), delta)
    if whole > _MOST_ON_GRID:
        return whole  # a bound as well
    if accountant == "pld":
        return float(loss_distribution(sampled, whole).get_epsilon_for_delta(delta))

    if accountant == "prv":
        return prv_epsilon(sampled, delta, epsilon_of_rdp(rdp(event), delta / 8000))
    return rdp_epsilon(sampled, delta)


def delta(event: Event, epsilon: float, accountant: str = "pld") -> float:
    """A delta such that `event` is (epsilon, delta)-DP; Opacus' accountants offer no bound in this direction."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(f"epsilon must be a finite number of at least 0, not {epsilon!r}")
    check_accountant(accountant)
    if accountant == "rdp":
        return _delta_of_rdp(rdp(event), epsilon)
    if accountant != "pld":
        raise InputError(f"accountant '{accountant}' gives epsilon for a delta only; use pld or rdp")
    sampled = _gaussians(event, accountant)
    if not sampled:
        return 0.0
    if epsilon_of_rdp(rdp(event), 0.5) > _MOST_ON_GRID:
        return _delta_of_rdp(rdp(event), epsilon)  # a bound as well
    return float(loss_distribution(sampled, max(epsilon, 0.01)).get_delta_for_epsilon(epsilon))


def best_guess(epsilon: float, delta: float) -> float:
    """How often, at most, whoever sees all of an (epsilon, delta)-private release is right who guesses at even odds
    whether a unit is in the data: errors of both kinds keep to the region of Kairouz, Oh, Viswanath 2015."""
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))


def of_group(epsilon: float, delta: float, records: int) -> tuple[float, float]:
    """(epsilon, delta) of so many records that change together, where one has these (Vadhan 2017, Lemma 2.2)."""
    if epsilon == 0:
        return 0.0, min(1.0, records * delta)
    if records * epsilon > _LARGEST_LOSS:
        return records * epsilon, 1.0
    return records * epsilon, min(1.0, delta * math.expm1(records * epsilon) / math.expm1(epsilon))


def of_each(epsilon: float, delta: float, records: int) -> tuple[float, float]:
    """What a record alone may have, so that `of_group` of so many is (epsilon, delta)."""
    shares = math.expm1(-epsilon / records) / math.expm1(-epsilon)  # without an exponential that may be too large
    return epsilon / records, delta * math.exp(epsilon / records - epsilon) * shares


def check_accountant(accountant: str) -> None:
    if accountant not in ACCOUNTANTS:
        raise InputError(f"unknown accountant '{accountant}'; known are {', '.join(ACCOUNTANTS)}")


def _gaussians(event: Event, accountant: str) -> dict[tuple[float, float], int]:
    """{(sampling rate, noise multiplier): count}; Gaussians on the full batch compose to one of rate 1."""
    precision = 0.0
    sampled: dict[tuple[float, float], int] = {}
    for single, count in grouped(event).items():
        if isinstance(single, Gaussian):
            precision += count / single.noise_multiplier**2
        elif isinstance(single, PoissonSampled) and isinstance(single.event, Gaussian):
            sampled[single.rate, single.event.noise_multiplier] = count
        else:
            noise = single.event if isinstance(single, PoissonSampled) else single
            raise InputError(
                f"accountant '{accountant}' has no bound for {type(noise).__name__} noise on vectors; use rdp"
            )
    if precision:
        sampled[1.0, 1 / math.sqrt(precision)] = 1
    return sampled


def _delta_of_rdp(curve: FloatArray, epsilon: float) -> float:
    with np.errstate(divide="ignore"):
        by_kl = 0.5 * np.log(-np.expm1(-curve))
    by_order = (_ORDERS - 1) * (curve - epsilon + np.log1p(-1 / _ORDERS)) - np.log(_ORDERS)
    return min(1.0, float(np.exp(np.minimum(by_kl, by_order).min())))


def loss_distribution(sampled: Mapping[tuple[float, float], int], scale: float) -> Any:
    """The composed dp_accounting PrivacyLossDistribution of {(rate, noise multiplier): count}; its estimates are upper.

    scale: roughly the epsilon of the whole, which sets the grid together with the loss of one step.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    # The standard deviation of one step's privacy loss, to leading order in the rate.
    step = min(rate * float(np.sqrt(np.expm1(min(noise**-2, 50.0)))) for rate, noise in sampled)
    interval = float(np.clip(step / 5, _FINEST, _COARSEST))
    interval = max(interval, scale * _ALONE if sum(sampled.values()) == 1 else scale / _POINTS)
    total = None
    for (rate, noise), count in sorted(sampled.items()):
        one = pld.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=interval, pessimistic_estimate=True
        )
        part = one.self_compose(count) if count > 1 else one
        total = part if total is None else total.compose(part)
    return total


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
    error = max(min(0.01, 0.001 * largest_loss), 2 * (largest_loss + 3) * spread / _MOST_GRID_POINTS)
    if error > 0.02 * largest_loss:
        raise InputError(f"Opacus' PRV would need more than {_MOST_GRID_POINTS} grid points for {steps} steps; use pld")
    accountant = PRVAccountant()
    accountant.history = [(noise, rate, count) for (rate, noise), count in sampled.items()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return max(0.0, float(accountant.get_epsilon(delta, eps_error=error, delta_error=_DELTA_ERROR * delta)))
    except (RuntimeError, ValueError) as failure:
        raise InputError(f"Opacus' PRV cannot account for this: {failure}; use pld") from failure
