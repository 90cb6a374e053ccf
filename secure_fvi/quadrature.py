"""Effects of a record integrated out of its likelihood, by adaptive Gauss-Hermite quadrature (Pinheiro and Bates 1995).

Pure functions of tensors: they run inside a Pyro program, traced and differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.formula import ADDITIONS

#: Nodes an effect by the number of effects of a record; with more, they are latents.
NODES = {1: 19, 2: 9, 3: 7}
STEPS = 4
#: Of those whose curvature changes fast, as a count's does, or is not the expected one.
MORE_STEPS = 7


class Given(NamedTuple):
    """`density(eta, data)` of y. `slopes(eta, y, data)`: the first derivative of its logarithm in eta, and its expected
    curvature, which is positive."""

    density: Callable[[Tensor, Mapping[str, Any]], Any]
    slopes: Callable[[Tensor, Tensor, Mapping[str, Any]], tuple[Tensor, Tensor]]
    steps: int = STEPS
    information: Tensor | float = 0.2  # about, of a row in eta


def binomial_slopes(eta: Tensor, y: Tensor, data: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    p, n = torch.sigmoid(eta), data.get("trials", 1.0)
    return y - n * p, n * p * (1 - p)


def count_slopes(eta: Tensor, y: Tensor, shape: Tensor) -> tuple[Tensor, Tensor]:
    mu = eta.exp()
    return (y - mu) / (1 + mu / shape), mu / (1 + mu / shape)


def ordinal_logits(eta: Tensor, cuts: Tensor) -> Tensor:
    """(..., K) log p of each level: sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - e^(b - a)) does not cancel.

    Nothing is written in place, as in Pyro's OrderedLogistic, which PyTorch cannot map over draws.
    """
    at = cuts - eta.unsqueeze(-1)
    below, above = torch.nn.functional.logsigmoid(at), torch.nn.functional.logsigmoid(-at)
    gaps = torch.log(-torch.expm1(cuts[:-1] - cuts[1:]))
    return torch.cat([below[..., :1], below[..., 1:] + above[..., :-1] + gaps, above[..., -1:]], -1)


def ordinal_slopes(eta: Tensor, y: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.cat([cuts.new_full((1,), -_FAR), cuts, cuts.new_full((1,), _FAR)])
    below, above = torch.sigmoid(ends[y] - eta), torch.sigmoid(ends[y + 1] - eta)
    return below + above - 1, below * (1 - below) + above * (1 - above)


def student_slopes(eta: Tensor, y: Tensor, sigma: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    r = y - eta
    return (nu + 1) * r / (nu * sigma**2 + r**2), torch.ones_like(eta) * (nu + 1) / ((nu + 3) * sigma**2)


_FAR = 1e6
#: Longest Newton step, in prior sds of the effects.
_LONGEST = 3.0


def marginal(eta: Tensor, design: Tensor, y: Tensor, present: Tensor, data: Mapping[str, Any], given: Given) -> Tensor:
    """log of the integral of p(y_i | eta_i + design_i eps) N(eps; 0, 1) over eps (d,), (N,), by adaptive Gauss-Hermite
    quadrature (Pinheiro and Bates 1995): nodes around the mode of each record's integrand, as wide as its curvature.

    eta, y, present (N, M); design (N, M, d). Centre and width only say where nodes lie: no gradient goes through them.
    """
    size = design.shape[-1]
    weights = torch.where(present > 0, data.get("weights", torch.ones_like(present)), torch.zeros_like(present))
    centre, width = _around(eta.detach(), design.detach(), y, weights, data, given)
    x, log_w = _nodes(size, eta)
    eps = centre.unsqueeze(-2) + (width.unsqueeze(-3) * x.unsqueeze(-2)).sum(-1)  # (N, Q, d)
    moved = eta.unsqueeze(-2) + (design.unsqueeze(-3) * eps.unsqueeze(-2)).sum(-1)  # (N, Q, M)
    spread = {name: value.unsqueeze(-2) if name in ADDITIONS else value for name, value in data.items()}
    term = given.density(moved, spread).log_prob(y.unsqueeze(-2).expand(moved.shape))
    term = (torch.where(present.unsqueeze(-2) > 0, term, torch.zeros_like(term)) * weights.unsqueeze(-2)).sum(-1)
    term = term + 0.5 * (x.square().sum(-1) - eps.square().sum(-1)) + log_w
    return torch.logsumexp(term, -1) + width.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _nodes(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(Q, d) nodes of a standard normal and the logarithms of their weights (Q,)."""
    at, w = np.polynomial.hermite_e.hermegauss(NODES[size])
    grid = np.stack([g.reshape(-1) for g in np.meshgrid(*[at] * size, indexing="ij")], -1)
    log_w = np.add.reduce(np.meshgrid(*[np.log(w / w.sum())] * size, indexing="ij")).reshape(-1)
    return torch.tensor(grid).to(like), torch.tensor(log_w).to(like)


def _around(
    eta: Tensor, design: Tensor, y: Tensor, weights: Tensor, data: Mapping[str, Any], given: Given
) -> tuple[Tensor, Tensor]:
    """Mode (N, d) of each record's integrand by Newton steps, and the factor (N, d, d) of the inverse curvature."""
    eye = torch.eye(design.shape[-1], dtype=design.dtype, device=design.device)
    eps = design.new_zeros((*design.shape[:-2], design.shape[-1]))
    for _ in range(given.steps):
        slope, lower = _curved(eps, eta, design, y, weights, data, given)
        move = _solved(lower, slope)
        eps = eps + move * (_LONGEST / move.norm(dim=-1, keepdim=True).clamp(min=_LONGEST))
    lower = _curved(eps, eta, design, y, weights, data, given)[1]
    if design.shape[-1] == 1:
        return eps, 1 / lower
    return eps, torch.linalg.solve_triangular(lower, eye.expand(lower.shape), upper=False).mT


def _curved(
    eps: Tensor, eta: Tensor, design: Tensor, y: Tensor, weights: Tensor, data: Mapping[str, Any], given: Given
) -> tuple[Tensor, Tensor]:
    """Slope (N, d) of the integrand's logarithm, and the factor (N, d, d) of its expected curvature."""
    slope, curve = (
        part.detach() * weights for part in given.slopes(eta + (design * eps.unsqueeze(-2)).sum(-1), y, data)
    )
    down = (design * slope.unsqueeze(-1)).sum(-2) - eps
    if design.shape[-1] == 1:
        return down, (1 + (curve.unsqueeze(-1) * design.square()).sum(-2, keepdim=True)).sqrt()
    eye = torch.eye(design.shape[-1], dtype=design.dtype, device=design.device)
    return down, torch.linalg.cholesky_ex(eye + design.mT @ (curve.unsqueeze(-1) * design))[0]


def _solved(lower: Tensor, right: Tensor) -> Tensor:
    if right.shape[-1] == 1:
        return right / lower.squeeze(-1).square()
    return torch.cholesky_solve(right.unsqueeze(-1), lower).squeeze(-1)
