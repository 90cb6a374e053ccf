"""A classifier of small images that is a Bayesian convolutional network: far fewer weights than a dense one needs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pyro
import torch
from pyro.distributions import Categorical, Normal
from torch import Tensor
from torch.nn.functional import conv2d

from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.bnn import check_counts, check_positive, mean_over_draws

#: The global sites, in the order in which the network uses them.
SITES = ("first_filters", "first_bias", "second_filters", "second_bias", "output_weights", "output_bias")
#: Pixels a side of a filter, and by which filters are moved on.
_KERNEL, _STRIDE = 5, 2


def convolutional_network(
    side: int = 28, filters: tuple[int, int] = (8, 16), classes: int = 10, scale: float = 1.0
) -> FederatedModel:
    """y ~ Categorical(softmax(W relu(second(relu(first(x)))) + b)), `first` and `second` layers of `filters` 5 x 5
    filters each, moved on by 2 pixels.

    Data: `x` (N, side^2), grey images row by row, `y` (N,) int64. Global sites: `SITES`, all N(0, `scale`^2) a priori.
    As for `bnn.bayesian_network`, the prior's mean is a saddle: start elsewhere (`sf.PVI(start_spread=0.1)`).
    """
    check_counts(side=side, filters=min(filters), classes=classes)
    check_positive(scale=scale)
    left = _after(_after(side))
    if left < 1:
        raise InputError(f"side = {side} is too small for two layers of {_KERNEL} x {_KERNEL} filters; 13 is the least")
    first, second = filters
    shapes = (
        (first, 1, _KERNEL, _KERNEL), (first,), (second, first, _KERNEL, _KERNEL), (second,),
        (second * left * left, classes), (classes,),
    )  # fmt: skip

    def network(x: Tensor, y: Tensor) -> None:
        weights = [
            pyro.sample(name, Normal(x.new_zeros(shape), scale).to_event(len(shape)))
            for name, shape in zip(SITES, shapes, strict=True)
        ]
        with pyro.plate("image", len(y)):
            pyro.sample("y", Categorical(logits=_logits(x, *weights)), obs=y)

    return FederatedModel(network, record_plate="image")


def class_log_probs(draws: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Log predictive probabilities (N, classes) of images `x` (N, side^2): the log of the mean over draws of the global
    sites, (n, *shape) each."""
    x = x.to(draws["output_bias"])
    weights = zip(*(draws[name] for name in SITES), strict=True)
    return mean_over_draws(_logits(x, *each) for each in weights)


def _logits(x: Tensor, f1: Tensor, b1: Tensor, f2: Tensor, b2: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """(N, side^2) to (N, classes)."""
    side = math.isqrt(x.shape[-1])
    hidden = torch.relu(conv2d(x.reshape(-1, 1, side, side), f1, b1, _STRIDE))
    hidden = torch.relu(conv2d(hidden, f2, b2, _STRIDE))
    return hidden.flatten(1) @ w + b


def _after(side: int) -> int:
    """Places of a filter along a side."""
    return (side - _KERNEL) // _STRIDE + 1
