"""What events cost: Renyi DP curves that add up, and (epsilon, delta) by five accountants.

Every number is for the adjacency of the unit, one record or silo added or removed.

- `rdp`: Mironov 2017, curves by `discrete` and `amplification`, equal to dp-accounting's at whole orders; conversion by
  Canonne, Kamath, Steinke 2020, Prop. 12. The only one whose cost may be added up over jobs chosen adaptively.
- `pld`: privacy loss distributions with pessimistic rounding, in both directions; the tightest, used in reports.
- `ledger`: the smallest budget whose filter admits the event as a data set's first job (`ledger_filter`), a little
  above `rdp`. A job for epsilon takes its noise from this one: plan, run and ledger then name one number.
- `prv`, `opacus-rdp`: Opacus' accountants, for comparison.

Skellam and discrete Gaussian noise have `rdp` and `ledger` only. GDP is not offered: it is no bound.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from secure_fvi.errors import InputError
from secure_fvi.privacy import discrete
from secure_fvi.privacy.amplification import fill_orders, poisson_amplified, sampled_gaussian
from secure_fvi.privacy.events import Composed, DiscreteGaussian, Event, Gaussian, PoissonSampled, Repeated, Skellam

FloatArray = NDArray[np.float64]
Single = Gaussian | Skellam | DiscreteGaussian | PoissonSampled

ACCOUNTANTS = ("rdp", "opacus-rdp", "prv", "pld", "ledger")

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
#: Epsilon up to which losses are laid out on a grid.
_MOST_ON_GRID = 1e8


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


def epsilon(event: Event, delta: float, accountant: str = "pld") -> float:
    """An epsilon such that `event` is (epsilon, delta)-DP. Raises InputError where the accountant has no bound."""
    check_delta(delta)
    check_accountant(accountant)
    if accountant == "rdp":
        return epsilon_of_rdp(rdp(event), delta)
    if accountant == "ledger":
        from secure_fvi.privacy.ledger_filter import charge

        return charge(event, delta)
    sampled = _gaussians(event, accountant)
    if not sampled:
        return 0.0
    whole = epsilon_of_rdp(rdp(event), delta)
    if whole > _MOST_ON_GRID:
        return whole  # a bound as well
    if accountant == "pld":
        from secure_fvi.privacy.losses import loss_distribution

        return float(loss_distribution(sampled, whole).get_epsilon_for_delta(delta))
    from secure_fvi.privacy import opacus_accounting

    if accountant == "prv":
        return opacus_accounting.prv_epsilon(sampled, delta, epsilon_of_rdp(rdp(event), delta / 8000))
    return opacus_accounting.rdp_epsilon(sampled, delta)


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
    from secure_fvi.privacy.losses import loss_distribution

    return float(loss_distribution(sampled, max(epsilon, 0.01)).get_delta_for_epsilon(epsilon))


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


def check_delta(delta: object) -> None:
    """Raises InputError unless 0 < delta < 1."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, both excluded, not {delta!r}")


def check_accountant(accountant: str) -> None:
    if accountant not in ACCOUNTANTS:
        raise InputError(f"unknown accountant '{accountant}'; known are {', '.join(ACCOUNTANTS)}")


def _plain(single: Single) -> Single:
    return single.event if isinstance(single, PoissonSampled) and single.rate == 1 else single


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

    def bound(orders: FloatArray) -> FloatArray:
        if isinstance(mechanism, Skellam):
            return discrete.skellam(mechanism, orders)
        return discrete.discrete_gaussian(mechanism, orders)

    if rate == 1 and isinstance(mechanism, DiscreteGaussian):
        return bound(_ORDERS)
    curve = np.full(len(ORDERS), np.inf)
    curve[_WHOLE] = poisson_amplified(bound, rate, _ORDERS[_WHOLE])
    return fill_orders(curve, _WHOLE, _ORDERS)


def _sampled_gaussian(rate: float, noise_multiplier: float) -> FloatArray:
    curve = np.empty(len(ORDERS))
    curve[_WHOLE] = poisson_amplified(lambda orders: orders / (2 * noise_multiplier**2), rate, _ORDERS[_WHOLE])
    curve[~_WHOLE] = sampled_gaussian(rate, noise_multiplier, _ORDERS[~_WHOLE])
    return fill_orders(curve, np.isfinite(curve), _ORDERS)


def _delta_of_rdp(curve: FloatArray, epsilon: float) -> float:
    with np.errstate(divide="ignore"):
        by_kl = 0.5 * np.log(-np.expm1(-curve))
    by_order = (_ORDERS - 1) * (curve - epsilon + np.log1p(-1 / _ORDERS)) - np.log(_ORDERS)
    return min(1.0, float(np.exp(np.minimum(by_kl, by_order).min())))
