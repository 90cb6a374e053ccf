"""Networks of which each silo has its own version (Hassan et al. 2023, section 4.1).

A network has one hidden layer of relu units and no biases, as in the paper. In

- `hierarchical_network` the first layer of a silo scatters around a common mean, and its last layer is its own;
- `fedpop`, a fully Bayesian version of FedPop (Kotelevskii et al. 2022), the first layer is common, and the last one
  the silo's own, independent of the others';
- `mixed_network` the first layer is common, and the last one scatters around a common mean.

Scatter is written in offsets that are N(0, 1) a priori, as in the paper, and their sd is half normal.
`mixed_network(scatter=s)` fixes the sd: a silo by itself sees no variation between silos, so that SFVI-Avg's local runs
would let it shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyro
import torch
from pyro.distributions import Categorical, HalfNormal, Normal
from torch import Tensor

from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.bnn import check_counts, check_positive, mean_over_draws

#: First layer (D, hidden) and last (hidden, classes) of a silo's network, from the values of its sites and the global
#: ones by name.
Layers = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


class PersonalNetwork(NamedTuple):
    """y ~ Categorical(softmax(relu(x W1) W2)) with W1 and W2 of a silo. Data: `x` (N, D), `y` (N,) int64."""

    model: FederatedModel
    layers: Layers


def hierarchical_network(hidden: int = 64, classes: int = 10, start: float | None = None) -> PersonalNetwork:
    """W1 = mean + spread x offsets. Global sites: `mean` (D, hidden), N(0, 1), and `spread` (), half normal. Silo
    sites: `offsets` (D, hidden) and `output_weights` (hidden, classes), N(0, 1). `start`: where a fit's spread begins;
    at its prior's centre, .8, the first layer drowns in the offsets' own variance (docs/sfvi-mnist.md)."""
    if start is not None:
        check_positive(start=start)

    def layers(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return values["mean"] + values["spread"] * values["offsets"], values["output_weights"]

    begin = {} if start is None else {"spread": start}
    return _personal(hidden, classes, layers, ("spread", "mean"), ("offsets", "output_weights"), begin)


def fedpop(hidden: int = 64, classes: int = 10) -> PersonalNetwork:
    """Global site: `hidden_weights` (D, hidden). Silo site: `output_weights` (hidden, classes). N(0, 1) all."""

    def layers(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return values["hidden_weights"], values["output_weights"]

    return _personal(hidden, classes, layers, ("hidden_weights",), ("output_weights",))


def mixed_network(hidden: int = 64, classes: int = 10, scatter: float | None = None) -> PersonalNetwork:
    """W2 = output_mean + spread x output_offsets. Global sites: `hidden_weights` (D, hidden) and `output_mean`
    (hidden, classes), N(0, 1), and `spread` (), half normal, unless it is fixed at `scatter`. Silo site:
    `output_offsets` (hidden, classes), N(0, 1)."""
    if scatter is not None:
        check_positive(scatter=scatter)

    def layers(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        spread = values["spread"] if scatter is None else scatter
        return values["hidden_weights"], values["output_mean"] + spread * values["output_offsets"]

    spread = ("spread",) if scatter is None else ()
    return _personal(hidden, classes, layers, (*spread, "hidden_weights", "output_mean"), ("output_offsets",))


def _personal(
    hidden: int, classes: int, layers: Layers, shared: tuple[str, ...], own: tuple[str, ...],
    start: Mapping[str, float] | None = None,
) -> PersonalNetwork:  # fmt: skip
    """The program: weights N(0, 1), of an `output` layer (hidden, classes), and the scatter where there is any."""
    check_counts(hidden=hidden, classes=classes)

    def network(x: Tensor, y: Tensor) -> None:
        one = x.new_ones(())
        values = {}
        for name in (*shared, *own):
            shape = (hidden, classes) if name.startswith("output") else (x.shape[-1], hidden)
            prior = Normal(x.new_zeros(shape), 1.0).to_event(2)
            if name == "spread":
                prior = HalfNormal(one)
            values[name] = pyro.sample(name, prior)
        first, last = layers(values)
        with pyro.plate("image", len(y)):
            pyro.sample("y", Categorical(logits=torch.relu(x @ first) @ last), obs=y)

    model = FederatedModel(network, record_plate="image", silo_sites=own, start=start or {})
    return PersonalNetwork(model, layers)


def class_log_probs(network: PersonalNetwork, draws: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Log predictive probabilities (N, classes) of a silo's images `x` (N, D): the log of the mean over joint draws of
    the global sites and the silo's own, (n, *shape) each."""

    def logits(k: int) -> Tensor:
        first, last = network.layers({name: values[k] for name, values in draws.items()})
        return torch.relu(x.to(first) @ first) @ last

    return mean_over_draws(logits(k) for k in range(min(len(values) for values in draws.values())))
