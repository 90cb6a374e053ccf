"""Simulated logistic regression whose columns are spread over silos (Hassan et al. 2024, section 5.1)."""

from __future__ import annotations

from typing import NamedTuple

import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor

RECORDS, COLUMNS = 500, 20


class Data(NamedTuple):
    x: Tensor  # (N, p)
    y: Tensor  # (N,)
    beta: Tensor  # (p,) truth

    def by_silo(self, silos: int) -> Tensor:
        """(J, N, p / J)."""
        return self.x.reshape(len(self.x), silos, -1).movedim(1, 0).contiguous()


def make_data(seed: int, records: int = RECORDS, columns: int = COLUMNS) -> Data:
    """Standard normal columns and coefficients; the linear predictor of each record has standard normal noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(records, columns, generator=rng, dtype=torch.float64)
    beta = torch.randn(columns, generator=rng, dtype=torch.float64)
    noise = torch.randn(records, generator=rng, dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(x @ beta + noise), generator=rng)
    return Data(x, y, beta)


def linear(x: Tensor) -> Tensor:
    """eta = x beta with beta ~ N(0, 1), x (N, D)."""
    beta = pyro.sample("beta", Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    return x @ beta
