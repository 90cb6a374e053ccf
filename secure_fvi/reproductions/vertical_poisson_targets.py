"""Poisson counts with the auxiliary variables integrated out.

Given theta, the sum of J auxiliary variables is normal around the sum f of the predictors with variance J rho^2, so
that a count's likelihood is Poisson-lognormal in f. NUTS samples it in 25 dimensions, mu
integrated out as well, instead of 4,029; and a server
that holds the response can use it in place of the Poisson likelihood, from the sum of eta_j instead of that of z_j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily
from torch.distributions import Poisson as TorchPoisson

from secure_fvi.algorithms.vertical import Poisson
from secure_fvi.models.vertical_poisson import SCALE, Areas, mu_given, multilevel, slopes
from secure_fvi.runs.draws import Draws
from secure_fvi.runs.nuts import sample_nuts
from secure_fvi.trees import Params

_NODES, _NEWTON_STEPS = 16, 5
_PREDICTIVE_NODES = 64  # not placed around a mode


def log_marginal(y: Tensor, f: Tensor, sd: float) -> Tensor:
    """log E Poisson(y | exp(f + sd e)), e ~ N(0, 1), elementwise, by Gauss-Hermite quadrature around the mode.

    The integrand in t = f + sd e is log-concave; its mode has exp(t) = w / sd^2 with w + log w = f + sd^2 y + 2 log sd.
    Nodes are held fixed for derivatives: the integral does not depend on them.
    """
    nodes, weights = (torch.from_numpy(a).to(f) for a in np.polynomial.hermite_e.hermegauss(_NODES))
    w = _omega(f.detach() + sd**2 * y + 2 * math.log(sd))
    width = sd / (1 + w).sqrt()
    t = (w.log() - 2 * math.log(sd)).unsqueeze(-1) + width.unsqueeze(-1) * nodes
    u = (t - f.unsqueeze(-1)) / sd
    log_joint = y.unsqueeze(-1) * t - t.exp() - 0.5 * u.square() + 0.5 * nodes.square() + weights.log()
    constant = width.log() - math.log(sd) - 0.5 * math.log(2 * math.pi) - torch.lgamma(y + 1)
    return torch.logsumexp(log_joint, -1) + constant


def _omega(c: Tensor) -> Tensor:
    """w > 0 with w + log w = c, by Newton's method from an approximation on either side."""
    w = torch.where(c > 1, c - c.clamp(min=1.0).log(), (c.clamp(max=1.0) - 0.4 * (c.clamp(max=1.0)).exp()).exp())
    for _ in range(_NEWTON_STEPS):
        w = (w * (1 + c - w.log()) / (1 + w)).clamp(min=1e-300)
    return w


@dataclass(frozen=True)
class PoissonLognormal:
    """`Poisson` over f = sum_j eta_j with normal noise of standard deviation `sd` integrated out."""

    sd: float
    intercept_scale: float = 1.0
    columns = 1
    gamma_size = 1
    slope_bound: float | None = None

    @property
    def _poisson(self) -> Poisson:
        return Poisson(self.intercept_scale)

    def check(self, y: Tensor) -> None:
        self._poisson.check(y)

    def features(self, y: Tensor) -> Tensor:
        return self._poisson.features(y)

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return log_marginal(y, predictor[:, 0] + gamma[0], self.sd)

    def distribution(self, predictor: Tensor, gamma: Tensor) -> Distribution:
        """As a mixture of Poisson distributions over the nodes of a quadrature."""
        nodes, weights = (
            torch.from_numpy(a).to(predictor) for a in np.polynomial.hermite_e.hermegauss(_PREDICTIVE_NODES)
        )
        rates = (predictor[..., :1] + gamma[..., None, :1] + self.sd * nodes).exp()
        return MixtureSameFamily(Categorical(weights.expand_as(rates)), TorchPoisson(rates))

    def log_prior(self, gamma: Tensor) -> Tensor:
        return self._poisson.log_prior(gamma)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        # Minus the second derivative is (1 - Var(t | y, f) / sd^2) / sd^2.
        return predictor.new_tensor(1 / self.sd**2)

    def constrain(self, gamma: Tensor) -> Params:
        return self._poisson.constrain(gamma)


class Levels(NamedTuple):
    """Draws of what the experiment is judged by, in its own space."""

    mu: Tensor  # (draws, J, D)
    beta: Tensor  # (draws, J, LEVELS, D)


def sample(data: Areas, sd: float, warmup: int, draws: int, seed: int = 0) -> tuple[Levels, Draws]:
    """One chain of NUTS on all silos; `sd` is that of the sum of auxiliary variables, 0 without them."""
    likelihood = PoissonLognormal(sd, SCALE) if sd > 0 else Poisson(SCALE)

    def log_likelihood(y: Tensor, at: Tensor, b: Tensor) -> Tensor:
        return likelihood.log_prob(y, at.unsqueeze(-1), b.unsqueeze(-1))

    sites = ["b", "sigma", "mean", "contrast"]
    program = multilevel(data, log_likelihood)
    found = sample_nuts(program, "records", sites, data.x.dtype, 1, warmup, draws, seed)
    sigma, mean, contrast = (found.sites[name].flatten(0, 1) for name in sites[1:])
    return with_mu(sigma, mean, contrast, seed), found


def with_mu(sigma: Tensor, mean: Tensor, contrast: Tensor, seed: int) -> Levels:
    """mu drawn from its exact conditional, from draws (n, J, D) and (n, J, LEVELS - 1, D)."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(mean.shape, generator=rng, dtype=mean.dtype)
    return Levels(mu_given(mean, sigma, noise), slopes(mean, contrast))
