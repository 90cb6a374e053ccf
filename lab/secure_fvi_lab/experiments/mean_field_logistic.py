"""Logistic regression under a mean-field Gaussian: predictive probabilities, and global VI without Monte Carlo.

The bound needs E[log sigma(a)] for Gaussian a alone, one integral a record. Gauss-Hermite quadrature has it to all
digits that matter, and L-BFGS finds the maximum: a reference that shares neither draws nor optimiser with the fits that
it is set beside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_NODES = 24
_RESTARTS, _ITERATIONS = 4, 2000
_START_LOG_SD = -2.0

Records = Mapping[str, Tensor]  # x (N, D), a column of ones included, and y (N,) 0 or 1


class MeanField(NamedTuple):
    """q(weights) = N(mean, diag(sd^2))."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)


class Optimum(NamedTuple):
    q: MeanField
    bound: float  # nats
    gradient: float  # largest absolute element at the end, in coordinates mean and log sd


def predictive_logits(q: MeanField, x: Tensor) -> Tensor:
    """(N,) logits of p(y = 1 | x): mu / sqrt(1 + pi v / 8) for x weights ~ N(mu, v) (Spiegelhalter and Lauritzen 1990;
    the PVI paper's formula lacks the 8)."""
    variance = x.square() @ q.sd.square()
    return (x @ q.mean) / (1 + math.pi * variance / 8).sqrt()


def scores(q: MeanField, records: Records) -> tuple[float, float]:
    """Mean predictive log-likelihood, nats a record, and the share of records on the wrong side of 1/2."""
    logits, y = predictive_logits(q, records["x"]), records["y"]
    right = torch.where(y > 0, logits, -logits)
    return float(logsigmoid(right).mean()), float((right <= 0).double().mean())


def bound(q: MeanField, records: Records) -> float:
    """E_q[log p(y | weights)] - KL(q || N(0, I)), nats."""
    return float(_bound(q.mean, q.sd.log(), records))


def global_vi(records: Records) -> Optimum:
    """The best mean-field Gaussian for all records together, prior N(0, I)."""
    width = records["x"].shape[1]
    at = torch.zeros(2, width, dtype=torch.float64)
    at[1] = _START_LOG_SD
    at.requires_grad_()
    for _ in range(_RESTARTS):  # L-BFGS forgets its curvature when it stops short
        search = torch.optim.LBFGS(
            [at], max_iter=_ITERATIONS, history_size=50, tolerance_grad=1e-6, tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure(search: torch.optim.LBFGS = search) -> Tensor:
            search.zero_grad()
            loss = -_bound(at[0], at[1], records)
            loss.backward()
            return loss

        search.step(closure)
    value = -float(closure().detach())
    assert at.grad is not None
    mean, log_sd = at.detach()
    return Optimum(MeanField(mean, log_sd.exp()), value, float(at.grad.abs().max()))


def _bound(mean: Tensor, log_sd: Tensor, records: Records) -> Tensor:
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(_NODES))
    x, sign = records["x"], 2 * records["y"] - 1
    variance = (2 * log_sd).exp()
    margin, spread = sign * (x @ mean), (x.square() @ variance).sqrt()
    expected = logsigmoid(margin.unsqueeze(1) + spread.unsqueeze(1) * nodes) @ (weights / weights.sum())
    kl = 0.5 * (variance + mean.square() - 1).sum() - log_sd.sum()
    return expected.sum() - kl
