"""Poisson counts with the auxiliary variables integrated out.

Given theta, the sum of J auxiliary variables is normal around the sum f of the predictors with variance J rho^2, so
that a count's likelihood is Poisson-lognormal in f. NUTS samples it in 25 dimensions, mu
integrated out as well, instead of 4,029; and a server
that holds the response can use it in place of the Poisson likelihood, from the sum of eta_j instead of that of z_j.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.algorithms.vertical import Likelihood, Poisson
from secure_fvi.algorithms.vertical.marginal import marginal
from secure_fvi.models.vertical_poisson import SCALE, Areas, mu_given, multilevel, slopes
from secure_fvi.runs.marginals import Draws
from secure_fvi.runs.nuts import sample_nuts

_NODES = 16


def poisson_lognormal(sd: float, intercept_scale: float = 1.0) -> Likelihood:
    """`Poisson` over f = sum_j eta_j with normal noise of standard deviation `sd` integrated out."""
    found = marginal(Poisson(intercept_scale), sd, _NODES)
    assert found is not None
    return found


class Levels(NamedTuple):
    """Draws of what the experiment is judged by, in its own space."""

    mu: Tensor  # (draws, J, D)
    beta: Tensor  # (draws, J, LEVELS, D)


def sample(data: Areas, sd: float, warmup: int, draws: int, seed: int = 0) -> tuple[Levels, Draws]:
    """One chain of NUTS on all silos; `sd` is that of the sum of auxiliary variables, 0 without them."""
    likelihood = poisson_lognormal(sd, SCALE) if sd > 0 else Poisson(SCALE)

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
