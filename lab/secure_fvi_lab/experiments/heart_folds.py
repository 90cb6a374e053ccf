"""Ten-fold training sets of the heart disease data, scores on their test folds, and pooled logistic regression."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.models.heart import Heart, standardise
from secure_fvi_lab.experiments.heart_batched import Task
from secure_fvi_lab.experiments.vertical_targets import logistic_mode

FOLDS = 10
_DTYPE = torch.float32


class Folds(NamedTuple):
    """R training sets, ten an assignment."""

    test: Tensor  # (R, N) bool
    inner: Tensor  # (R, N) bool: another fold, held out of the training set for the choice of a variant


def task_of(data: Heart, train: Tensor) -> Task:
    """One run for each training set of `train` (R, N) bool; z-scores from it alone, by silo."""
    rows = tuple(
        {"x": torch.stack([standardise(x, numeric, t) for t in train]).to(_DTYPE)}
        for x, numeric in zip(data.x, data.numeric, strict=True)
    )
    y = data.y.to(_DTYPE)
    return Task(rows, train.to(_DTYPE), Response(y, torch.zeros_like(y)))


def make_folds(y: Tensor, seeds: int) -> Folds:
    """Stratified by the response; assignment s is drawn from seed s."""
    test, inner = [], []
    for seed in range(seeds):
        generator, fold = torch.Generator().manual_seed(seed), torch.empty(len(y), dtype=torch.long)
        order = torch.cat([at[torch.randperm(len(at), generator=generator)] for at in _classes(y)])
        fold[order] = torch.arange(len(y)) % FOLDS
        test += [fold == k for k in range(FOLDS)]
        inner += [fold == (k + 1) % FOLDS for k in range(FOLDS)]
    return Folds(torch.stack(test), torch.stack(inner))


def _classes(y: Tensor) -> list[Tensor]:
    return [torch.nonzero(y == value).squeeze(1) for value in (0.0, 1.0)]


def logistic(data: Heart, folds: Folds, steps: int = 20) -> Tensor:
    """Probabilities (R, N) at the mode of logistic regression on the pooled columns, beta ~ N(0, 1), by Newton."""
    found = []
    for test in folds.test:
        parts = [standardise(x, n, ~test) for x, n in zip(data.x, data.numeric, strict=True)]
        x = torch.cat([torch.ones_like(parts[0][:, :1]), *parts], 1)
        found.append(torch.sigmoid(x @ logistic_mode(x[~test], data.y[~test], steps)[0]))
    return torch.stack(found)


def by_fold(probability: Tensor, y: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accuracy in % (R,), mean log-likelihood in nats (R,), and log-likelihoods of the wrong predictions (W,)."""
    logits = torch.logit(probability.double().clamp(1e-30, 1 - 1e-16))
    log_p, right = logsigmoid((2 * y - 1) * logits), (2 * y - 1) * logits > 0
    size = held.sum(1)
    return 100 * (right & held).sum(1) / size, (log_p * held).sum(1) / size, log_p[held & ~right]


def mean_log_likelihood(probability: Tensor, y: Tensor, held: Tensor) -> float:
    return float(by_fold(probability, y, held)[1].mean())
