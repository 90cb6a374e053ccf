"""ProdLDA (Srivastava and Sutton 2017): topics as products of experts (Hassan et al. 2023, section 4.2).

The paper prints softmax(T W_k) with T's columns on the simplex, whose entries near 1/V hardly move the logits. Here T
is unconstrained and the weights are mixed on the simplex: softmax(T softmax(W_k)).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pyro
import torch
from pyro.distributions import Multinomial, Normal, TorchDistribution, constraints
from torch import Tensor, nn

from secure_fvi.errors import InputError
from secure_fvi.families import Amortised
from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.base import Dataset, Program
from secure_fvi.randomness import seeded

#: Of the simulated documents.
TOPICS = 5
#: Prior standard deviation of T and W.
SCALE = 2.0


def prodlda(topics: int) -> FederatedModel:
    """The model for documents over V words, `counts` (N, V), with so many topics K.

    Global site `topics` (V, K), logits of the words in each topic; local site `weights` (K,) of a document, logits of
    its topics. Both N(0, 2^2).
    """
    if type(topics) is not int or topics < 1:
        raise InputError(f"topics must be a whole number of at least 1, not {topics!r}")

    def model(counts: Tensor) -> None:
        size = (counts.shape[1], topics)
        t = pyro.sample("topics", Normal(counts.new_zeros(size), SCALE).to_event(2))
        with pyro.plate("document", len(counts)):
            w = pyro.sample("weights", Normal(counts.new_zeros(topics), SCALE).to_event(1))
            pyro.sample("counts", Words(torch.softmax(w, -1), t), obs=counts)

    return FederatedModel(model, record_plate="document")


def encoder(words: int, topics: int, hidden: int = 100, seed: int = 0) -> Amortised:
    """q(weights | counts) by a network of two layers of softplus units, as in Srivastava and Sutton 2017, on the roots
    of the document's shares of words. Its weights are theta and travel with it; no document has parameters."""
    with seeded(seed):
        network = nn.Sequential(
            nn.Linear(words, hidden), nn.Softplus(), nn.Linear(hidden, hidden), nn.Softplus(),
            nn.Linear(hidden, 2 * topics),
        )  # fmt: skip
    return Amortised(network, lambda rows: _shares(rows["counts"]))


def _shares(counts: Tensor) -> Tensor:
    """Square roots, whose sum of squares is 1 for documents of any length."""
    return (counts / counts.sum(-1, keepdim=True).clamp(min=1)).sqrt()


class Words(TorchDistribution):  # type: ignore[misc]
    """A document's words in their order, as counts (..., V): the multinomial's coefficient, which depends on the counts
    alone, is left out. Logits are `weights` (..., K) @ `topics`.T, of `topics` (V, K).

    The sum over words is taken before that over topics, which leaves one exponential for each of B x V numbers.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.independent(constraints.nonnegative, 1)

    def __init__(self, weights: Tensor, topics: Tensor) -> None:
        self.weights, self.topics = weights, topics
        super().__init__(weights.shape[:-1], topics.shape[:1], validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> Words:
        return Words(self.weights.expand(*batch_shape, -1), self.topics)

    def log_prob(self, value: Tensor) -> Tensor:
        logits = self.weights @ self.topics.transpose(-1, -2)
        explained = (self.weights * (value @ self.topics)).sum(-1)
        return explained - value.sum(-1) * torch.logsumexp(logits, -1)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008  # torch's own signature
        """Documents of one word."""
        return Multinomial(logits=self.weights @ self.topics.transpose(-1, -2)).sample(sample_shape)


def load(
    data_dir: Path | None = None, documents: int = 600, words: int = 40, length: int = 60, seed: int = 0
) -> Dataset:
    """Documents drawn from the model itself, each `length` words long; `data_dir` is not needed. `counts` (N, V)."""
    if min(documents, words, length) < 1:
        raise InputError("documents, words and length must be at least 1")
    rng = torch.Generator().manual_seed(seed)
    topics = 2 * torch.randn(words, TOPICS, generator=rng, dtype=torch.float64)
    weights = 2 * torch.randn(documents, TOPICS, generator=rng, dtype=torch.float64)
    p = torch.softmax(torch.softmax(weights, -1) @ topics.T, -1)
    drawn = torch.multinomial(p, length, replacement=True, generator=rng)
    counts = torch.zeros(documents, words, dtype=torch.float64).scatter_add(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
    return Dataset({"counts": counts}, torch.arange(documents))


PROGRAM = Program(
    name="prodlda-simulated",
    description=f"ProdLDA with {TOPICS} topics on simulated documents",
    model=prodlda(TOPICS),
    load=load,
)
