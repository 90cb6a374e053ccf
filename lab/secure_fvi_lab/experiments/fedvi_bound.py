"""The PAC-Bayes bound of FedVI (Vedadi et al. 2023, Corollary 1), where its slack is finite.

    true risk <= empirical risk + (KL(q || prior) + log 1 / delta) / eta + log E_prior E_data exp(eta (...)) / eta

The last term, the slack, is finite for a loss within [0, b]: at most eta b^2 / (8 n) over n independent records
(Hoeffding). A log loss is not bounded, and the slack of the text's own loss need not be finite; here probabilities are
mixed with a share `floor` of equal ones, -log((1 - floor) p + floor / C), which is at most log(C / floor).
KL is that of everything the records at hand have moved. For a client that took no part this is KL(q(beta_k) || r)
alone: theta is fixed before its records are drawn. For the clients that took part theta counts, and under a point
estimate of theta KL is infinite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.errors import InputError


class Bound(NamedTuple):
    """In nats a record."""

    value: float  # of the true risk, with probability at least 1 - delta over the records
    empirical: float
    complexity: float  # (KL + log 1 / delta) / eta
    slack: float


def smoothed_loss(log_probs: Tensor, y: Tensor, floor: float = 0.05) -> Tensor:
    """-log((1 - floor) p(y) + floor / C) (N,) in nats, from log probabilities (N, C): at most log(C / floor)."""
    if not 0 < floor < 1:
        raise InputError(f"floor must lie in (0, 1), not {floor}")
    p = log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).exp()
    return -torch.log((1 - floor) * p + floor / log_probs.shape[-1])


def largest_loss(classes: int, floor: float = 0.05) -> float:
    """b of `smoothed_loss`, nats."""
    return math.log(classes / floor)


def pac_bayes_bound(
    empirical: float, divergence: float, records: int, largest: float, delta: float = 0.05
) -> Bound | None:
    """The bound for n = `records` with losses in [0, `largest`]; None where it is not finite.

    empirical: mean of E_q[loss] over the records. divergence: KL(q || prior), nats, inf for a point. eta is the best of
    a grid of powers of two, whose size delta is shared over.
    """
    if records < 1 or not 0 < delta < 1 or divergence < 0:
        raise InputError("at least one record, delta in (0, 1) and a divergence of at least 0 are needed")
    if not (math.isfinite(divergence) and math.isfinite(largest)):
        return None
    grid = [2.0**k for k in range(-4, 33)]

    def at(eta: float) -> Bound:
        complexity = (divergence + math.log(len(grid) / delta)) / eta
        slack = eta * largest**2 / (8 * records)
        return Bound(empirical + complexity + slack, empirical, complexity, slack)

    return min(map(at, grid))
