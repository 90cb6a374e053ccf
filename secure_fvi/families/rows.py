"""What every local family shares: a Gaussian a row, given its moments.

Moments are a dict: `loc` and `log_scale` (N, n), and optionally `lower` (N, n, n), a unit lower triangular
factor within each record, or `dense` (N n, N n), one over all records.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi.families.gaussian import LOG_2PI, Params


def transform(moments: Params, eps: Tensor) -> Tensor:
    """Z_L (..., N, n) = loc + exp(log_scale) * (T eps)."""
    if "dense" in moments:
        eps = (moments["dense"] @ eps.flatten(-2).unsqueeze(-1)).reshape(eps.shape)
    elif "lower" in moments:
        eps = (moments["lower"] * eps.unsqueeze(-2)).sum(-1)
    return moments["loc"] + moments["log_scale"].exp() * eps


def log_prob(moments: Params, z: Tensor) -> Tensor:
    """log q(z_i) of each row (..., N), in nats."""
    u = (z - moments["loc"]) * (-moments["log_scale"]).exp()
    if "dense" in moments:
        u = _solve(moments["dense"], u.flatten(-2)).reshape(u.shape)
    elif "lower" in moments:
        u = _solve(moments["lower"], u)
    return (-0.5 * (u.square() + LOG_2PI) - moments["log_scale"]).sum(-1)


def _solve(lower: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(lower, x.unsqueeze(-1), upper=False, unitriangular=True).squeeze(-1)
