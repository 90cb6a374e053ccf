"""What FedVI is compared with (Vedadi et al. 2023, Tables 1 and 2), each in a few lines on the same network.

All baselines but FedAvg take labels of the client that they predict for; FedVI takes its unlabelled images. A method is
fitted once over the clients that take part, and then predicts each client's test images:

    FedAvg      one network for all
    FedAvg+     FedAvg's, then gradient steps on the client's own records
    DITTO       the same steps with a pull to FedAvg's weights (Li et al. 2021)
    KNN-Per     FedAvg's probabilities mixed with those of the nearest of the client's records in the embedding
                (Marfoq et al. 2022)
    FedRep      the embedding by averages, the head by each client alone (Collins et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from secure_fvi.algorithms.fedavg import FedAvg
from secure_fvi.models.fedvi import Network, common_logits, embed, personal_log_probs, start
from secure_fvi.models.fedvi_data import Client
from secure_fvi_lab.experiments import Tell

Weights = Mapping[str, Tensor]
#: Log predictive probabilities (N, classes) of a client's test images.
Predict = Callable[[Client], Tensor]
HEAD = ("head_weight", "head_bias")
BASELINES = ("FedAvg", "FedAvg+", "DITTO", "KNN-Per", "FedRep")


class Tuning(NamedTuple):
    """Of the steps on a client's own records, alike for all baselines that take some."""

    steps: int = 30
    learning_rate: float = 0.1
    pull: float = 0.1  # DITTO's, towards the common weights
    neighbours: int = 10
    share: float = 0.5  # of the neighbours' vote in KNN-Per


class Scores(NamedTuple):
    """Over all test images of some clients."""

    accuracy: float
    log_loss: float  # nats an image
    calibration: float  # expected calibration error, 15 equal bins of confidence


def scores(predict: Predict, clients: Sequence[Client]) -> Scores:
    """Clients count by their test images, as in the paper."""
    with torch.no_grad():
        log_probs = torch.cat([predict(c) for c in clients]).double()
    y = torch.cat([c.test_y for c in clients])
    confidence, guess = log_probs.exp().max(-1)
    right = (guess == y).double()
    bins = (confidence * 15).long().clamp(max=14)
    gap = torch.zeros(15, dtype=torch.float64).index_add_(0, bins, confidence - right).abs().sum() / len(y)
    loss = -log_probs.gather(-1, y.unsqueeze(-1)).mean()
    return Scores(float(right.mean()), float(loss), float(gap))


def fedvi(network: Network, w: Weights) -> Predict:
    """With the client's training images, their labels unseen, to infer beta from; the mean over draws of beta."""

    def predict(c: Client) -> Tensor:
        each = personal_log_probs(network, w, c.x, c.test_x)
        return torch.logsumexp(each, 0) - math.log(len(each))

    return predict


def from_fedavg(network: Network, w: Weights, tuning: Tuning) -> dict[str, Predict]:
    """What starts from FedAvg's weights."""

    def probs(v: Weights, c: Client) -> Tensor:
        return torch.log_softmax(common_logits(network, v, c.test_x), -1)

    def neighbours(c: Client) -> Tensor:
        near = torch.cdist(embed(network, w, c.test_x), embed(network, w, c.x))
        nearest = near.topk(min(tuning.neighbours, len(c.y)), largest=False)
        votes = torch.softmax(-nearest.values, -1)
        local = votes.new_zeros(len(near), network.classes).scatter_add_(1, c.y[nearest.indices], votes)
        return torch.log(tuning.share * local + (1 - tuning.share) * probs(w, c).exp())

    return {
        "FedAvg": lambda c: probs(w, c),
        "FedAvg+": lambda c: probs(_tuned(network, w, c, tuning), c),
        "DITTO": lambda c: probs(_tuned(network, w, c, tuning, tuning.pull), c),
        "KNN-Per": neighbours,
    }


def _tuned(
    network: Network, w: Weights, c: Client, tuning: Tuning, pull: float = 0.0, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Gradient steps on the client's mean loss plus pull / 2 |v - w|^2; of the weights `names`, or of all."""
    moving = {name: w[name] for name in names or w}

    def loss(v: dict[str, Tensor]) -> Tensor:
        away = sum(((v[name] - w[name]) ** 2).sum() for name in v) if pull else 0.0
        return functional.cross_entropy(common_logits(network, {**w, **v}, c.x), c.y) + pull / 2 * away

    return {**w, **_descended(loss, moving, tuning)}


def _own_head(network: Network, w: Weights, c: Client, tuning: Tuning) -> dict[str, Tensor]:
    """`_tuned` for the head alone, with the embedding, which stays as it is, computed once."""
    h = embed(network, w, c.x)

    def loss(v: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(functional.linear(h, v["head_weight"], v["head_bias"]), c.y)

    return {**w, **_descended(loss, {name: w[name] for name in HEAD}, tuning)}


def _descended(
    loss: Callable[[dict[str, Tensor]], Tensor], moving: dict[str, Tensor], tuning: Tuning
) -> dict[str, Tensor]:
    with torch.enable_grad():
        for _ in range(tuning.steps):
            gradient = torch.func.grad(loss)(moving)
            moving = {name: v - tuning.learning_rate * gradient[name] for name, v in moving.items()}
    return moving


def fedrep(
    network: Network, clients: Sequence[Client], tuning: Tuning, options: FedAvg, seed: int, tell: Tell
) -> Predict:
    """Clients keep their heads from round to round; one without fits a head to the final embedding. A simulation
    without secure sums: it is here for its numbers."""
    body = {name: v for name, v in start(network, personal=False).items() if name not in HEAD}
    first = {name: v for name, v in start(network, personal=False).items() if name in HEAD}
    velocity = {name: torch.zeros_like(v) for name, v in body.items()}
    heads: dict[int, dict[str, Tensor]] = {}
    local = tuning._replace(steps=options.local_steps, learning_rate=options.learning_rate)
    rng = np.random.default_rng([abs(seed), 3])
    for round_ in range(options.rounds):
        drawn = rng.choice(len(clients), max(1, round(options.participation * len(clients))), replace=False)
        change, total = {name: torch.zeros_like(v) for name, v in body.items()}, 0
        for k in drawn.tolist():
            w = {**body, **heads.get(k, first)}
            w = _own_head(network, w, clients[k], local)
            heads[k] = {name: w[name] for name in HEAD}
            moved = _tuned(network, w, clients[k], local, names=tuple(body))
            size = len(clients[k].y)
            change = {name: v + size * (moved[name] - body[name]) for name, v in change.items()}
            total += size
        velocity = {name: options.server_momentum * v + change[name] / total for name, v in velocity.items()}
        body = {name: v + velocity[name] for name, v in body.items()}
        if (round_ + 1) % 50 == 0:
            tell(f"    FedRep: round {round_ + 1} of {options.rounds}")
    mean = {name: torch.stack([h[name] for h in heads.values()]).mean(0) for name in HEAD}
    place = {id(c): k for k, c in enumerate(clients)}

    def predict(c: Client) -> Tensor:
        own = heads.get(place.get(id(c), -1), mean)
        w = _own_head(network, {**body, **own}, c, tuning)
        return torch.log_softmax(common_logits(network, w, c.test_x), -1)

    return predict
