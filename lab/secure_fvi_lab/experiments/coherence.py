"""How well the words of a topic go together: UMass coherence (Mimno, Wallach, Talley, Leenders and McCallum 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi.errors import InputError


def top_words(topics: Tensor, count: int = 10) -> Tensor:
    """(K, count) int64: the words of largest logit in each column of `topics` (V, K), the largest first."""
    if not 2 <= count <= len(topics):
        raise InputError(f"count = {count}: must lie between 2 and the {len(topics)} words")
    return topics.topk(count, dim=0).indices.T


def umass(tops: Tensor, counts: Tensor) -> Tensor:
    """(K,) coherence of the words `tops` (K, M) of each topic in documents `counts` (N, V); at most about 0, larger is
    better.

    The mean over pairs m > l of log (D(v_m, v_l) + 1) / D(v_l), with v_1 a topic's first word and D the number of
    documents that have the words. Mimno et al. take the sum, M (M - 1) / 2 times as much; gensim the mean. Raises
    InputError where no document has one of the words.
    """
    size = tops.shape[1]
    used, place = tops.unique(return_inverse=True)
    has = (counts[:, used] > 0).double()
    together = has.T @ has
    alone = together.diagonal()
    if not bool((alone > 0).all()):
        raise InputError(f"no document has {int((alone == 0).sum())} of the topics' words")
    later, earlier = torch.tril_indices(size, size, -1)
    pairs = (together[place[:, later], place[:, earlier]] + 1) / alone[place[:, earlier]]
    return pairs.log().mean(1)


def diversity(tops: Tensor) -> float:
    """Share of different words among the topics' words `tops` (K, M): 1 where topics share none, 1/K where all are
    alike (Dieng, Ruiz and Blei 2020). Alike topics of common words have a high coherence: read the two together."""
    return len(tops.unique()) / tops.numel()
