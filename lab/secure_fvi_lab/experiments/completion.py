"""How well topics predict: the second half of a document's words from the first (Wallach et al. 2009, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi.models.prodlda import SCALE, Words

_STEPS, _RATE = 150, 0.1


def completion(topics: Tensor, counts: Tensor, seed: int = 0) -> float:
    """Mean log probability, nats a word, of one half of the words of documents `counts` (N, V) under logits of words
    `topics` (V, K), each document's weights being the most probable given the other half.

    Every occurrence of a word falls into either half by a fair coin of `seed`. Topics that are all alike predict
    no better than frequencies of words, whatever their coherence.
    """
    topics = topics.to(counts)
    seen = torch.binomial(counts, torch.full_like(counts, 0.5), generator=torch.Generator().manual_seed(seed))
    weights = counts.new_zeros(len(counts), topics.shape[1], requires_grad=True)
    optimiser = torch.optim.Adam([weights], lr=_RATE)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        loss = (weights / SCALE).square().sum() / 2 - Words(torch.softmax(weights, -1), topics).log_prob(seen).sum()
        loss.backward()
        optimiser.step()
    held_out = counts - seen
    with torch.no_grad():
        return float(Words(torch.softmax(weights, -1), topics).log_prob(held_out).sum() / held_out.sum())
