"""What fits a budget: the noise, the number of rounds or the sampling rate that an epsilon allows.

Every answer lies on the safe side: the accountant, asked again, gives at most the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from scipy.optimize import brentq

from secure_fvi.errors import InputError
from secure_fvi.privacy.accounting import best_guess, check_accountant, check_delta
from secure_fvi.privacy.accounting import epsilon as epsilon_of
from secure_fvi.privacy.events import Event, Gaussian, PoissonSampled, Repeated

#: From a noise multiplier, a sampling rate and a number of rounds to the whole job.
MakeJob = Callable[[float, float, int], Event]

_EXTREME = 2.0**40  # beyond it no noise multiplier and no count is a plan
_MOST_ROUNDS = 10**9
_SMALLEST_RATE = 1e-9


def gaussian_job(noise_multiplier: float, sampling_rate: float, rounds: int) -> Event:
    """`rounds` Gaussian sums, each over a Poisson batch where the rate is below 1."""
    return Repeated(PoissonSampled(sampling_rate, Gaussian(noise_multiplier)), rounds)


def solve_noise(
    make_event: Callable[[float], Event],
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    tolerance: float = 1e-3,
) -> float:
    """The least noise, to a relative `tolerance`, at which make_event(noise) costs at most `epsilon` at `delta`.

    make_event: from a noise multiplier to the whole job, never costlier with more noise. Raises InputError if no
    amount of noise is enough (sensitivities that grow with the noise, a job that pays for something else as well).
    """
    _check(epsilon, delta, accountant, tolerance)

    def cost(by: str) -> Callable[[float], float]:
        return lru_cache(maxsize=None)(lambda noise: epsilon_of(make_event(noise), delta, by))

    start = 1.0
    if accountant not in ("rdp", "ledger"):
        # Renyi DP is fast and close, and the tighter accountants are slow where epsilon is far off.
        start = _edge(cost("rdp"), 1.0, epsilon, +1, 0.02)
    return _edge(cost(accountant), start, epsilon, +1, tolerance)


def solve_rate(
    make_event: Callable[[float], Event],
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    tolerance: float = 1e-3,
) -> float:
    """The largest sampling rate, to a relative `tolerance` and at most 1, at which make_event(rate) fits."""
    _check(epsilon, delta, accountant, tolerance)

    def cost(by: str) -> Callable[[float], float]:
        return lru_cache(maxsize=None)(lambda rate: epsilon_of(make_event(min(rate, 1.0)), delta, by))

    if cost(accountant)(1.0) <= epsilon:
        return 1.0
    start = 0.5
    if accountant not in ("rdp", "ledger"):
        start = _edge(cost("rdp"), 0.5, epsilon, -1, 0.02)
    rate = _edge(cost(accountant), start, epsilon, -1, tolerance)
    if rate < _SMALLEST_RATE:
        raise InputError(f"no sampling rate keeps this within epsilon {epsilon:g}; add noise or do fewer rounds")
    return min(rate, 1.0)


def solve_rounds(make_event: Callable[[int], Event], epsilon: float, delta: float, accountant: str = "pld") -> int:
    """The largest number of rounds at which make_event(rounds) fits; above 1,000, to one part in 1,000."""
    _check(epsilon, delta, accountant, 1e-3)

    def cost(by: str) -> Callable[[float], float]:
        whole = lru_cache(maxsize=None)(lambda rounds: epsilon_of(make_event(rounds), delta, by))
        return lambda rounds: whole(max(1, int(rounds)))

    ours = cost(accountant)
    if ours(1) > epsilon:
        raise InputError(f"one round alone costs epsilon {ours(1):.4g}, above {epsilon:g}; add noise or sample less")
    start = 1.0
    if accountant not in ("rdp", "ledger") and cost("rdp")(1) <= epsilon:
        start = _edge(cost("rdp"), 1.0, epsilon, -1, 0.02)
    rounds = int(_edge(ours, start, epsilon, -1, 1e-3))
    if rounds > _MOST_ROUNDS:
        raise InputError(f"more than {_MOST_ROUNDS:,} rounds fit; there is nothing to plan")
    rounds = max(rounds, 1)
    while rounds < 1000 and ours(rounds + 1) <= epsilon:
        rounds += 1
    return rounds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job that fits. epsilon: what it costs, at most the one asked for.

    noise_multiplier: sd of the noise that is counted on, over the clipping norm.
    """

    epsilon: float
    delta: float
    accountant: str
    noise_multiplier: float
    sampling_rate: float
    rounds: int
    release_epsilon: float  # of one round alone, at the same delta

    @property
    def best_guess(self) -> float:
        """See `accounting.best_guess`."""
        return best_guess(self.epsilon, self.delta)


def plan(
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    sampling_rate: float | None = None,
    rounds: int | None = None,
    accountant: str = "ledger",
    retries: int = 0,
    make: MakeJob = gaussian_job,
) -> Plan:
    """Solve for the one of the four that is None. Raises InputError unless exactly one is, and for bad numbers.

    retries: sums held in reserve beside the rounds, which a job is charged for like rounds.
    """
    asked = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "sampling_rate": sampling_rate,
        "rounds": rounds,
    }
    unknown = [name for name, value in asked.items() if value is None]
    if len(unknown) != 1:
        raise InputError(
            "leave out exactly one of epsilon, noise multiplier, sampling rate and rounds, the one to solve for; "
            f"{'none is' if not unknown else ' and '.join(unknown).replace('_', ' ') + ' are'} left out"
        )
    z = 1.0 if noise_multiplier is None else noise_multiplier
    q = 1.0 if sampling_rate is None else sampling_rate
    t = 1 if rounds is None else rounds
    gaussian_job(z, q, t)  # checks the numbers that were given
    if epsilon is not None:
        if noise_multiplier is None:
            z = solve_noise(lambda x: make(x, q, t + retries), epsilon, delta, accountant)
        elif sampling_rate is None:
            q = solve_rate(lambda x: make(z, x, t + retries), epsilon, delta, accountant)
        else:
            t = solve_rounds(lambda x: make(z, q, x + retries), epsilon, delta, accountant)
    return Plan(
        epsilon=epsilon_of(make(z, q, t + retries), delta, accountant),
        delta=delta,
        accountant=accountant,
        noise_multiplier=z,
        sampling_rate=q,
        rounds=t,
        release_epsilon=epsilon_of(make(z, q, 1), delta, accountant),
    )


def _check(epsilon: float, delta: float, accountant: str, tolerance: float) -> None:
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise InputError(f"epsilon must be a positive finite number, not {epsilon!r}")
    check_delta(delta)
    check_accountant(accountant)
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must lie between 0 and 1, not {tolerance!r}")


def _edge(cost: Callable[[float], float], start: float, target: float, better: int, tolerance: float) -> float:
    """The last x with cost(x) <= target on the way from better values to worse, within a factor exp(tolerance).

    better: +1 where larger x cost less (noise), -1 where smaller do (rates).
    """

    def excess(t: float) -> float:
        value = cost(math.exp(t))
        return math.log(value / target) if 0 < value < math.inf else math.copysign(50.0, value - target)

    here = math.log(start)
    fits = excess(here) <= 0
    # Epsilon is roughly proportional to 1 / noise and to the rate, and to the square root of the rounds.
    step = min(max(1.3 * abs(excess(here)), 0.02), 1.0)
    away, limit = (-better if fits else better), math.log(_EXTREME)
    there = here + away * step
    while (excess(there) <= 0) == fits:
        if abs(there) > limit:
            if fits:
                return math.exp(there)
            raise InputError(f"nothing keeps this within epsilon {target:g} at the given delta")
        step *= 2
        here, there = there, there + away * step
    low, high = sorted((here, there))
    edge = float(brentq(excess, low, high, xtol=tolerance / 4, rtol=1e-12))
    while excess(edge) > 0:
        edge += better * tolerance / 4
    return math.exp(edge)
