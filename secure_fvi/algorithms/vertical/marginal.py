"""Likelihoods with the auxiliary variables integrated out: what the holder of the response can do alone.

Given theta, the sum of J auxiliary variables is normal around the sum f of the predictors with variance J rho^2, so
that p(y | f) = E p(y | f + sqrt(J) rho e). Silos then send eta_j in place of z_j: q(z | theta) is exact, whereas a q
that factorises over silos cannot say that the data fix the sum and little else (docs/vertical-poisson.md). Not in the
paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson
from secure_fvi.families.gaussian import LOG_2PI
from secure_fvi.trees import Params

_NEWTON_STEPS = 5


def marginal(likelihood: Likelihood, sd: float, nodes: int = 32) -> Likelihood | None:
    """`likelihood` over f with normal noise of standard deviation `sd` integrated out; None where there is no way."""
    for base, found in ((Gaussian, GaussianMarginal), (Poisson, PoissonMarginal), (Bernoulli, BernoulliMarginal)):
        if type(likelihood) is base:
            made: Likelihood = found(likelihood, sd, nodes)
            return made
    return None


@dataclass(frozen=True)
class _Marginal:
    """What does not change with the noise."""

    base: Likelihood
    sd: float
    nodes: int

    @property
    def columns(self) -> int:
        return self.base.columns

    @property
    def gamma_size(self) -> int:
        return self.base.gamma_size

    @property
    def slope_bound(self) -> float | None:
        return self.base.slope_bound  # a derivative of log E p is a mean of derivatives of log p

    def check(self, y: Tensor) -> None:
        self.base.check(y)

    def features(self, y: Tensor) -> Tensor:
        return self.base.features(y)

    def log_prior(self, gamma: Tensor) -> Tensor:
        return self.base.log_prior(gamma)

    def constrain(self, gamma: Tensor) -> Params:
        return self.base.constrain(gamma)

    def distribution(self, predictor: Tensor, gamma: Tensor) -> Distribution:
        """Given f + noise, not f: draws of the noise belong to whoever predicts."""
        return self.base.distribution(predictor, gamma)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        return self.base.curvature(predictor, gamma)


class BernoulliMarginal(_Marginal):
    """log E sigmoid(+-(f + sd e)), by Gauss-Hermite quadrature."""

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        nodes, log_weights = _quadrature(self.nodes, predictor)
        at = predictor[:, :1] + gamma[0] + self.sd * nodes
        return torch.logsumexp(log_weights + logsigmoid((2 * y - 1).unsqueeze(-1) * at), -1)


class GaussianMarginal(_Marginal):
    """Variance sigma^2 + sd^2."""

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return self.base.log_prob(y, predictor, self._wider(gamma))

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        return self.base.curvature(predictor, self._wider(gamma))

    def _wider(self, gamma: Tensor) -> Tensor:
        return torch.stack([gamma[0], 0.5 * ((2 * gamma[1]).exp() + self.sd**2).log()])


class PoissonMarginal(_Marginal):
    """Poisson-lognormal."""

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return log_marginal(y, predictor[:, 0] + gamma[0], self.sd, self.nodes)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        # Minus the second derivative is (1 - Var(t | y, f) / sd^2) / sd^2.
        return predictor.new_tensor(1 / self.sd**2)


def log_marginal(y: Tensor, f: Tensor, sd: float, nodes: int = 32) -> Tensor:
    """log E Poisson(y | exp(f + sd e)), e ~ N(0, 1), elementwise, by Gauss-Hermite quadrature around the mode.

    In t = f + sd e the integrand is log-concave; its mode has exp(t) = w / sd^2 with w + log w = f + sd^2 y + 2 log sd.
    Nodes are held fixed for derivatives: the integral does not depend on them.
    """
    at, log_weights = _quadrature(nodes, f)
    w = _omega(f.detach() + sd**2 * y + 2 * math.log(sd))
    width = sd / (1 + w).sqrt()
    t = (w.log() - 2 * math.log(sd)).unsqueeze(-1) + width.unsqueeze(-1) * at
    u = (t - f.unsqueeze(-1)) / sd
    log_joint = y.unsqueeze(-1) * t - t.exp() - 0.5 * u.square() + 0.5 * at.square() + log_weights
    return torch.logsumexp(log_joint, -1) + width.log() - math.log(sd) - torch.lgamma(y + 1)


def _quadrature(nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and log weights (nodes,) of expectations over a standard normal."""
    at, weights = (torch.from_numpy(a).to(like) for a in np.polynomial.hermite_e.hermegauss(nodes))
    return at, weights.log() - 0.5 * LOG_2PI


def _omega(c: Tensor) -> Tensor:
    """w > 0 with w + log w = c, by Newton's method from an approximation on either side."""
    w = torch.where(c > 1, c - c.clamp(min=1.0).log(), (c.clamp(max=1.0) - 0.4 * (c.clamp(max=1.0)).exp()).exp())
    for _ in range(_NEWTON_STEPS):
        w = (w * (1 + c - w.log()) / (1 + w)).clamp(min=1e-300)
    return w
