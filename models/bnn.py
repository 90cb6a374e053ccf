"""A classifier that is a Bayesian neural network with one hidden layer (Ashman et al. 2022, section 5.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyro
import torch
from pyro.distributions import Categorical, Normal
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel

#: The global sites, in the order in which a network uses them.
SITES = ("hidden_weights", "hidden_bias", "output_weights", "output_bias")


def bayesian_network(hidden: int = 32, classes: int = 10, scale: float = 1.0) -> FederatedModel:
    """y ~ Categorical(softmax(relu(x W1 + b1) W2 + b2)); `hidden` units, labels 0 to `classes` - 1.

    Data: `x` (N, D), `y` (N,) int64. Global sites: `hidden_weights` (D, hidden), `hidden_bias` (hidden,),
    `output_weights` (hidden, classes), `output_bias` (classes,), all N(0, `scale`^2) a priori; 1 is the paper's.
    The prior's mean is a saddle, where all hidden units are alike: start elsewhere (`sf.PVI(start_spread=0.1)`).
    """
    check_counts(hidden=hidden, classes=classes)
    check_positive(scale=scale)

    def network(x: Tensor, y: Tensor) -> None:
        def layer(name: str, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
            weights = pyro.sample(f"{name}_weights", Normal(x.new_zeros(inputs, outputs), scale).to_event(2))
            return weights, pyro.sample(f"{name}_bias", Normal(x.new_zeros(outputs), scale).to_event(1))

        w1, b1 = layer("hidden", x.shape[-1], hidden)
        w2, b2 = layer("output", hidden, classes)
        logits = torch.relu(x @ w1 + b1) @ w2 + b2
        with pyro.plate("image", len(y)):
            pyro.sample("y", Categorical(logits=logits), obs=y)

    return FederatedModel(network, record_plate="image")


class Score(NamedTuple):
    """How well new records are predicted."""

    accuracy: float  # share of records whose most probable class is theirs
    log_likelihood: float  # mean log predictive probability of their classes, nats a record


def class_log_probs(draws: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Log predictive probabilities (N, classes) of `x` (N, D): the log of the mean over draws of the global sites, as
    `result.sample(n)` gives them, (n, *shape) each."""
    x = x.to(draws["hidden_bias"])
    weights = zip(*(draws[name] for name in SITES), strict=True)
    return mean_over_draws(torch.relu(x @ w1 + b1) @ w2 + b2 for w1, b1, w2, b2 in weights)


def check_counts(**counts: object) -> None:
    """Raises InputError for what is no count of units or classes."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_positive(**options: float) -> None:
    """Raise InputError for an option that is not a positive number."""
    for option, value in options.items():
        if not 0 < value < math.inf:
            raise InputError(f"{option} must be positive and finite, not {value}")


def mean_over_draws(logits: Iterable[Tensor]) -> Tensor:
    """Log of the mean of the probabilities that `logits` (N, classes) of each draw of the weights stand for."""
    total: Tensor | None = None
    count = 0
    for each in logits:  # one at a time: all together would take n times the memory
        count += 1
        log_probs = torch.log_softmax(each, -1)
        total = log_probs if total is None else torch.logaddexp(total, log_probs)
    if total is None:
        raise InputError("no draws of the weights; at least one is needed")
    return total - math.log(count)


def score(log_probs: Tensor, y: Tensor) -> Score:
    """Of log predictive probabilities (N, classes) against the classes `y` (N,)."""
    right = (log_probs.argmax(-1) == y).double().mean()
    return Score(float(right), float(log_probs.gather(-1, y.unsqueeze(-1)).mean()))
