"""ProdLDA (Srivastava and Sutton 2017): topics as products of experts (Hassan et al. 2023, section 4.2).

The paper prints softmax(T W_k) with T's columns on the simplex, whose entries near 1/V hardly move the logits. Here T
is unconstrained and the weights are mixed on the simplex: softmax(T softmax(W_k)).
"""

from __future__ import annotations

from pathlib import Path

import pyro
import torch
from pyro.distributions import Multinomial, Normal
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.base import Dataset, Program

TOPICS = 5


def prodlda(counts: Tensor) -> None:
    """The model for N documents over V words, `counts` (N, V).

    Global site `topics` (V, K), logits of the words in each topic; local site `weights` (K,) of a document, logits of
    its topics. Both N(0, 2^2).
    """
    documents, words = counts.shape
    topics = pyro.sample("topics", Normal(counts.new_zeros(words, TOPICS), 2.0).to_event(2))
    with pyro.plate("document", documents):
        weights = pyro.sample("weights", Normal(counts.new_zeros(TOPICS), 2.0).to_event(1))
        logits = torch.softmax(weights, -1) @ topics.transpose(-1, -2)
        pyro.sample("counts", _Words(logits=logits, validate_args=False), obs=counts)


class _Words(Multinomial):  # type: ignore[misc]
    """Of documents of any length. torch's own density indexes with a mask, which `vmap` cannot map."""

    def log_prob(self, value: Tensor) -> Tensor:
        ways = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
        return ways + (value * torch.log_softmax(self.logits, -1)).sum(-1)


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
    model=FederatedModel(prodlda, record_plate="document"),
    load=load,
)
