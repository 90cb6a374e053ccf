"""Where a silo's first local fit begins: at a public draw around q's mean, the same at all silos.

At the prior's mean all hidden units of a network are alike, and the gradient that would tell them apart is zero. Starts
that differed from silo to silo would number the units differently, and their average would be no network at all.
"""

from __future__ import annotations

from secure_fvi.algorithms.natural import Natural
from secure_fvi.randomness import start_draws


def first_start(q: Natural, spread: float, seed: int) -> Natural:
    """q with its mean moved by `spread` of its standard deviations times standard normal draws of the seed.

    Everyone may see it. Its covariance is q's; `spread` = 0 is q itself.
    """
    if not spread:
        return q
    moved = q.mean() + spread * q.stddev() * start_draws(seed, q.n)
    return q._replace(shift=q.precision @ moved if q.full else q.precision * moved)
