"""What fits a budget: the noise, the number of rounds or the sampling rate that an epsilon allows.

Every answer lies on the safe side: the accountant, asked again, gives at most the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from secure_fvi.errors import InputError
from secure_fvi.privacy import accounting
from secure_fvi.privacy.accountants import best_guess, check_accountant
from secure_fvi.privacy.accountants import epsilon as epsilon_of
from secure_fvi.privacy.accounting import check_target, last_within
from secure_fvi.privacy.events import Event, Gaussian, PoissonSampled, Repeated

#: From a noise multiplier, a sampling rate and a number of rounds to the whole job.
MakeJob = Callable[[float, float, int], Event]

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
    """As `accounting.solve_noise`, by any accountant."""
    check_accountant(accountant)
    if accountant == "ledger":
        return accounting.solve_noise(make_event, epsilon, delta, tolerance)
    check_target(epsilon, delta, tolerance)

    def cost(by: str) -> Callable[[float], float]:
        return lru_cache(maxsize=None)(lambda noise: epsilon_of(make_event(noise), delta, by))

    return _searched(cost, accountant, 1.0, epsilon, +1, tolerance)


def _searched(
    cost: Callable[[str], Callable[[float], float]], accountant: str, start: float, epsilon: float, direction: int,
    tolerance: float,
) -> float:  # fmt: skip
    """`last_within` of the cost by an accountant, begun where Renyi DP's is: it is fast and close, and the tighter ones
    are slow where epsilon is far off."""
    if accountant not in ("rdp", "ledger"):
        start = last_within(cost("rdp"), start, epsilon, direction, 0.02)
    return last_within(cost(accountant), start, epsilon, direction, tolerance)


def solve_rate(make_event: Callable[[float], Event], epsilon: float, delta: float, accountant: str = "pld") -> float:
    """The largest sampling rate, to one part in 1,000 and at most 1, at which make_event(rate) fits."""
    check_accountant(accountant)
    check_target(epsilon, delta, 1e-3)

    def cost(by: str) -> Callable[[float], float]:
        return lru_cache(maxsize=None)(lambda rate: epsilon_of(make_event(min(rate, 1.0)), delta, by))

    if cost(accountant)(1.0) <= epsilon:
        return 1.0
    rate = _searched(cost, accountant, 0.5, epsilon, -1, 1e-3)
    if rate < _SMALLEST_RATE:
        raise InputError(f"no sampling rate keeps this within epsilon {epsilon:g}; add noise or do fewer rounds")
    return min(rate, 1.0)


def solve_rounds(make_event: Callable[[int], Event], epsilon: float, delta: float, accountant: str = "pld") -> int:
    """The largest number of rounds at which make_event(rounds) fits; above 1,000, to one part in 1,000."""
    check_accountant(accountant)
    check_target(epsilon, delta, 1e-3)

    def cost(by: str) -> Callable[[float], float]:
        whole = lru_cache(maxsize=None)(lambda rounds: epsilon_of(make_event(rounds), delta, by))
        return lambda rounds: whole(max(1, int(rounds)))

    ours = cost(accountant)
    if ours(1) > epsilon:
        raise InputError(f"one round alone costs epsilon {ours(1):.4g}, above {epsilon:g}; add noise or sample less")
    start = 1.0
    if accountant not in ("rdp", "ledger") and cost("rdp")(1) <= epsilon:
        start = last_within(cost("rdp"), 1.0, epsilon, -1, 0.02)
    rounds = int(last_within(ours, start, epsilon, -1, 1e-3))
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
        """See `accountants.best_guess`."""
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
            + ("; where a round takes all records, the sampling rate is 1" if "sampling_rate" in unknown else "")
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
