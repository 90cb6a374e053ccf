"""Weights of the silos' likelihood contributions in the power-likelihood model, under a Dirichlet prior.

The bound is linear in w on the simplex, so that without a prior all weight goes to one silo; log Dirichlet(w; a) =
(a - 1) sum_j log w_j + const keeps them apart from zero. Silo j holds a number u_j, w_j = exp(u_j) / sum_k exp(u_k).
Neither u_j nor the silo's log-likelihood l_j leaves it: the normaliser and sum_k w_k l_k are totals of secure sums.
"""

from __future__ import annotations

from torch import Tensor

_RATE, _MOST = 0.5, 0.2  # of a step on u_j


def share(logit: Tensor, mass: Tensor) -> Tensor:
    """w_j () from u_j and the total of exp(u_k)."""
    return logit.exp() / mass


def weight_gradient(weight: Tensor, log_likelihood: Tensor, mean: Tensor, concentration: float, silos: int) -> Tensor:
    """Gradient in u_j of sum_k w_k l_k + (a - 1) sum_k log w_k, ().

    `log_likelihood` is l_j, nats, seen by the silo only; `mean` the total of w_k l_k. The fixed point has
    l_j + (a - 1) / w_j equal at all silos.
    """
    return weight * (log_likelihood - mean) + (concentration - 1) * (1 - silos * weight)


def logit_step(
    logit: Tensor, weight: Tensor, own: Tensor, mean: Tensor, concentration: float, silos: int, scale: Tensor
) -> Tensor:
    """u_j after a gradient step of limited length; log-likelihoods are on the scale of the number of records."""
    found = weight_gradient(weight, own, mean, concentration, silos)
    return logit + scale * (_RATE * found / (concentration - 1 + 10)).clamp(-_MOST, _MOST)
