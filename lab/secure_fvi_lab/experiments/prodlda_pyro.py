"""Pooled ProdLDA as a user of Pyro would fit it: the same model by Pyro's SVI, and the network of Pyro's tutorial."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import pyro
import torch
from pyro.distributions import Multinomial, Normal, constraints
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import ClippedAdam
from torch import Tensor, nn

from secure_fvi.models.prodlda import SCALE, Words
from secure_fvi.runs.marginals import seeded
from secure_fvi_lab.experiments import Tell


class Topics(NamedTuple):
    """What was learned."""

    topics: Tensor  # (V, K) whose largest entries name a topic's words
    logits: Tensor  # (V, K) of words, by which a document's shares mix them; the same but for batch normalisation


class Training(NamedTuple):
    """Of Pyro's SVI."""

    steps: int
    batch: int
    learning_rate: float
    last_rate: float = 1.0  # the rate falls to this share of itself
    start_spread: float = 0.0  # sd of the draw at which the means of the topics begin


def same_model(counts: Tensor, topics: int, training: Training, seed: int, tell: Tell) -> Topics:
    """Posterior means of the model of `prodlda(topics)` on all documents `counts` (N, V), by a guide of
    independent Gaussians with parameters for every document, on minibatches."""
    (documents, words), local = counts.shape, (len(counts), topics)

    def model() -> None:
        t = pyro.sample("topics", Normal(counts.new_zeros(words, topics), SCALE).to_event(2))
        with pyro.plate("document", documents, subsample_size=training.batch) as rows:
            w = pyro.sample("weights", Normal(counts.new_zeros(topics), SCALE).to_event(1))
            pyro.sample("counts", Words(torch.softmax(w, -1), t), obs=counts[rows])

    def guide() -> None:
        loc = pyro.param("topics_loc", lambda: training.start_spread * counts.new_zeros(words, topics).normal_())
        scale = pyro.param("topics_scale", lambda: counts.new_full((words, topics), 0.1), constraints.positive)
        pyro.sample("topics", Normal(loc, scale).to_event(2))
        means = pyro.param("weights_loc", lambda: counts.new_zeros(local))
        scales = pyro.param("weights_scale", lambda: counts.new_full(local, 0.1), constraints.positive)
        with pyro.plate("document", documents, subsample_size=training.batch) as rows:
            pyro.sample("weights", Normal(means[rows], scales[rows]).to_event(1))

    with seeded(seed), pyro.validation_enabled(False), pyro.get_param_store().scope():
        svi = SVI(model, guide, _optimiser(training), Trace_ELBO())
        _train(svi.step, training.steps, float(counts.sum()), tell)
        found = pyro.param("topics_loc").detach()
        return Topics(found, found)


def tutorial(counts: Tensor, topics: int, training: Training, seed: int, tell: Tell) -> Topics:
    """That of https://pyro.ai/examples/prodlda.html on `counts` (N, V): an amortised guide, batch
    normalisation and dropout, topics as weights without a prior. Its options: 50 epochs of 32 documents, rate 0.001."""
    documents, words = counts.shape
    with seeded(seed), pyro.validation_enabled(False), pyro.get_param_store().scope():
        encoder, decoder = _Encoder(words, topics).to(counts), _Decoder(words, topics).to(counts)

        def model(rows: Tensor) -> None:
            pyro.module("decoder", decoder)
            with pyro.plate("document", len(rows)):
                w = pyro.sample("weights", Normal(rows.new_zeros(topics), 1.0).to_event(1))
                p = decoder(torch.softmax(w, -1))
                pyro.sample("counts", Multinomial(int(rows.sum(-1).max()), p), obs=rows)

        def guide(rows: Tensor) -> None:
            pyro.module("encoder", encoder)
            loc, scale = encoder(rows)
            with pyro.plate("document", len(rows)):
                pyro.sample("weights", Normal(loc, scale).to_event(1))

        svi = SVI(model, guide, _optimiser(training), TraceMeanField_ELBO())

        def step() -> float:
            loss: float = svi.step(counts[torch.randint(documents, (training.batch,))])
            return loss

        _train(step, training.steps, float(counts.sum()) * training.batch / documents, tell)
        return decoder.found()


class _Encoder(nn.Module):
    def __init__(self, words: int, topics: int, hidden: int = 100, dropout: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(words, hidden), nn.Softplus(), nn.Linear(hidden, hidden), nn.Softplus(), nn.Dropout(dropout)
        )
        self.loc = nn.Sequential(nn.Linear(hidden, topics), nn.BatchNorm1d(topics, affine=False))
        self.log_variance = nn.Sequential(nn.Linear(hidden, topics), nn.BatchNorm1d(topics, affine=False))

    def forward(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(counts)
        return self.loc(h), (0.5 * self.log_variance(h)).exp()


class _Decoder(nn.Module):
    def __init__(self, words: int, topics: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.topics = nn.Linear(topics, words, bias=False)
        self.norm = nn.BatchNorm1d(words, affine=False)

    def forward(self, weights: Tensor) -> Tensor:
        return torch.softmax(self.norm(self.topics(self.dropout(weights))), -1)

    def found(self) -> Topics:
        """Shares sum to 1, so that the mean that is taken off the logits can be taken off each topic."""
        topics, norm = self.topics.weight.detach(), self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        sd = (norm.running_var + norm.eps).sqrt()
        return Topics(topics, (topics - norm.running_mean.unsqueeze(-1)) / sd.unsqueeze(-1))


def _optimiser(training: Training) -> ClippedAdam:
    return ClippedAdam({"lr": training.learning_rate, "lrd": training.last_rate ** (1 / training.steps)})


def _train(step: Callable[[], float], count: int, tokens: float, tell: Tell) -> None:
    """So many steps; tells the bound in nats a word. `tokens`: words of which `step` returns the loss."""
    losses: list[float] = []
    for _ in range(count):
        losses.append(step() / tokens)
        if not len(losses) % max(1, count // 5):
            tell(f"    step {len(losses)} of {count}: {-statistics.mean(losses[-count // 10 :]):.4f} nats a word")
