"""Bayesian logistic regression of a binary response on a table of features."""

from __future__ import annotations

import pyro
from pyro.distributions import Bernoulli, Normal
from torch import Tensor

from secure_fvi.federated_model import FederatedModel


def logistic_regression(x: Tensor, y: Tensor) -> None:
    """The model for N records: `x` (N, D), a column of ones included, `y` (N,) 0 or 1. Global site `weights` (D,)."""
    weights = pyro.sample("weights", Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("record", len(y)):
        pyro.sample("y", Bernoulli(logits=x @ weights), obs=y)


MODEL = FederatedModel(logistic_regression, record_plate="record")
