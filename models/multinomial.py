"""Multinomial regression with the scales of its priors fitted: empirical Bayes (Hassan et al. 2023, section S3.2)."""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import torch
from pyro.distributions import Categorical, Normal
from torch import Tensor
from torch.distributions import constraints

from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.bnn import check_positive, mean_over_draws


def multinomial_regression(classes: int = 10, scale: float = 0.1) -> FederatedModel:
    """y ~ Categorical(softmax(x W + b)), labels 0 to `classes` - 1.

    Data: `x` (N, D), `y` (N,) int64. Global sites: `weights` (D, classes), N(0, sigma_w^2), and `bias` (classes,),
    N(0, sigma_b^2). theta: `sigma_w` and `sigma_b`, positive, which both begin at `scale`.
    """
    if type(classes) is not int or classes < 2:
        raise InputError(f"classes must be a whole number of at least 2, not {classes!r}")
    check_positive(scale=scale)

    def regression(x: Tensor, y: Tensor) -> None:
        def spread(name: str) -> Tensor:
            start = torch.tensor(scale, dtype=x.dtype)
            found: Tensor = pyro.param(name, start, constraint=constraints.positive)
            return found

        weights = pyro.sample("weights", Normal(x.new_zeros(x.shape[-1], classes), spread("sigma_w")).to_event(2))
        bias = pyro.sample("bias", Normal(x.new_zeros(classes), spread("sigma_b")).to_event(1))
        with pyro.plate("record", len(y)):
            pyro.sample("y", Categorical(logits=x @ weights + bias), obs=y)

    return FederatedModel(regression, record_plate="record")


def class_log_probs(draws: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Log predictive probabilities (N, classes) of `x` (N, D): the log of the mean over draws of the global sites, as
    `result.sample(n)` gives them, (n, *shape) each."""
    x = x.to(draws["bias"])
    return mean_over_draws(x @ w + b for w, b in zip(draws["weights"], draws["bias"], strict=True))
