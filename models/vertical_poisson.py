"""Multilevel Poisson counts of areas whose covariates two silos hold (Hassan et al. 2024, section 5.2), simulated.

    y_i ~ Poisson(pop_i RATE exp(b + sum_j s_ij)),  s_ij = eta_ij, or ~ N(eta_ij, rho^2) in the augmented-variable model
    eta_ij = x_ij' beta_j[level_i],  beta_j[r] ~ N(mu_j, sigma_j^2),  mu_j ~ N(0, SCALE^2),  sigma_j ~ HN(SCALE)
    b ~ N(0, SCALE^2);  x standard normal, pop uniform on 250, ..., 350, level uniform

The paper has SCALE = 1 and RATE = 1: at these priors an area of 300 people has 300 diagnoses in the median and above
10^8 in the worst of a few thousand areas. Here SCALE = .5 and RATE = .01, about three diagnoses in the median.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SILOS, COLUMNS, LEVELS, AREAS = 2, 2, 5, 2000
SMALLEST, LARGEST = 250, 350  # population of an area
SCALE, RATE = 0.5, 0.01


class Areas(NamedTuple):
    """One simulated data set and the truth behind it; float64 but for `level`."""

    x: Tensor  # (J, N, D) columns by silo
    level: Tensor  # (N,) 0 to LEVELS - 1, known to all
    offset: Tensor  # (N,) log of population times RATE, known to all
    y: Tensor  # (N,) counts
    b: Tensor  # ()
    mu: Tensor  # (J, D)
    sigma: Tensor  # (J, D)
    beta: Tensor  # (J, LEVELS, D)

    def eta(self) -> Tensor:
        """The silos' predictors at the truth, (J, N)."""
        return predictors(self.x, self.level, self.beta)


def predictors(x: Tensor, level: Tensor, beta: Tensor) -> Tensor:
    """eta (J, N) from columns (J, N, D), levels (N,) and slopes (J, LEVELS, D)."""
    return (x * beta[:, level]).sum(-1)


def simulate(seed: int, rho: float, areas: int = AREAS) -> Areas:
    """Truth from the prior; `rho` is the standard deviation of each auxiliary variable, 0 for the paper's own model."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    b, mu, sigma = SCALE * normal(1)[0], SCALE * normal(SILOS, COLUMNS), SCALE * normal(SILOS, COLUMNS).abs()
    beta = mu.unsqueeze(1) + sigma.unsqueeze(1) * normal(SILOS, LEVELS, COLUMNS)
    x, noise = normal(SILOS, areas, COLUMNS), normal(SILOS, areas)
    level = torch.randint(LEVELS, (areas,), generator=rng)
    population = torch.randint(SMALLEST, LARGEST + 1, (areas,), generator=rng)
    offset = population.to(x.dtype).log() + math.log(RATE)
    s = (predictors(x, level, beta) + rho * noise).sum(0)
    y = torch.poisson((offset + b + s).exp(), generator=rng)
    return Areas(x, level, offset, y, b, mu, sigma, beta)
