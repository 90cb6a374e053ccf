"""Splits of a data set over silos that differ in size and in content, seeded: the same call gives the same split.

Sizes and label shares after Ashman et al. (2022, Appendix E.1), who follow Sharma et al. (2019); shards of labels after
their MNIST experiment; silos of mostly one label after Hassan et al. (2023, section 4.1). Every function returns row
indices by silo, sorted, that use no row twice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset

#: (beta, kappa) of the paper's splits A and B (Table 2).
PAPER_SPLITS = {
    ("adult", "A"): (0.0, 0.0),
    ("adult", "B"): (0.7, -3.0),
    ("credit", "A"): (0.0, 0.0),
    ("credit", "B"): (0.3, -0.7),
}


def size_and_label(labels: Tensor, silos: int, beta: float, kappa: float, seed: int = 0) -> list[Tensor]:
    """Half the silos small, half large; the small ones with another share of positive labels.

    `labels` (N,) 0 or 1, with share eta of ones. Small silos have floor(N / silos (1 - beta)) rows, large ones
    floor(N / silos (1 + beta)). Small silos' share of the label 1 is eta (1 - kappa), as the paper's Table 2 has it
    (adult: .240 x 4 = .96; credit, where its label 1 is a refusal: .55 x 1.7 = .94); equation (76) as printed gives a
    negative share there. Raises InputError for a share outside [0, 1], or one that the rows do not allow.
    """
    _check(silos, len(labels))
    if silos % 2 or not 0 <= beta < 1:
        raise InputError(f"an even number of silos and beta in [0, 1) are needed, not {silos} and {beta}")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise InputError("labels must be 0 or 1")
    share = float(labels.double().mean()) * (1 - kappa)
    small, large = (math.floor(len(labels) / silos * (1 + sign * beta) + 1e-9) for sign in (-1, 1))
    positive_small = round(small * share)
    half = silos // 2
    positives, negatives = (_shuffled(torch.nonzero(labels == value).squeeze(1), seed + value) for value in (1, 0))
    if not 0 <= positive_small <= small or half * positive_small > len(positives):
        raise InputError(f"kappa = {kappa} asks small silos for a share {share:.3f} of positive labels")
    if half * (small - positive_small) > len(negatives):
        raise InputError(f"kappa = {kappa} leaves too few negative labels for the small silos")
    parts, used_positive, used_negative = [], 0, 0
    for _ in range(half):
        parts.append(
            torch.cat(
                [
                    positives[used_positive : used_positive + positive_small],
                    negatives[used_negative : used_negative + small - positive_small],
                ]
            )
        )
        used_positive, used_negative = used_positive + positive_small, used_negative + small - positive_small
    rest = _shuffled(torch.cat([positives[used_positive:], negatives[used_negative:]]), seed + 2)
    parts += [rest[j * large : (j + 1) * large] for j in range(half)]
    return [part.sort().values for part in parts]


def evenly(rows: int, silos: int, seed: int = 0) -> list[Tensor]:
    """Random parts of equal size; fewer than `silos` rows remain over."""
    _check(silos, rows)
    size = rows // silos
    order = _shuffled(torch.arange(rows), seed)[: size * silos]
    return [part.sort().values for part in order.split(size)]


def mostly_one_label(
    labels: Tensor, silos: int, share: float = 0.9, size: int | None = None, seed: int = 0
) -> list[Tensor]:
    """Silos of equal size: a `share` of the rows of silo j has label j, modulo the number of labels, and the rest has
    the others, as evenly as whole numbers allow.

    `size`: rows a silo; None: the most that there are enough rows of every label for. Raises InputError for a share
    outside [0, 1], and for a size that the labels do not allow.
    """
    _check(silos, len(labels))
    values, counts = labels.unique(return_counts=True)
    if len(values) < 2 or not 0 <= share <= 1:
        raise InputError(f"two labels and a share in [0, 1] are needed, not {len(values)} and {share}")

    def wanted(size: int) -> Tensor:
        return torch.stack([_one_and_others(j % len(values), len(values), share, size) for j in range(silos)])

    if size is None:
        fitting = (n for n in range(len(labels) // silos, 0, -1) if bool((wanted(n).sum(0) <= counts).all()))
        size = next(fitting, 0)
    if size < 1 or bool((wanted(size).sum(0) > counts).any()):
        raise InputError(f"there are not enough rows of each label for {silos} silos of {max(size, 1)}")
    pools = [_shuffled(torch.nonzero(labels == v).squeeze(1), seed + k) for k, v in enumerate(values.tolist())]
    dealt = [
        pool.split([*wanted(size)[:, k].tolist(), len(pool) - int(wanted(size)[:, k].sum())])
        for k, pool in enumerate(pools)
    ]
    return [torch.cat([dealt[k][j] for k in range(len(values))]).sort().values for j in range(silos)]


def _one_and_others(own: int, labels: int, share: float, size: int) -> Tensor:
    """Rows of each label (labels,) in a silo; what cannot be dealt evenly goes to the labels after its own."""
    first = round(share * size)
    each, rest = divmod(size - first, labels - 1)
    found = torch.full((labels,), each)
    found[[(own + 1 + k) % labels for k in range(rest)]] += 1
    found[own] = first
    return found


def label_shards(labels: Tensor, silos: int, shards: int = 2, seed: int = 0) -> list[Tensor]:
    """Rows sorted by label, cut into silos x shards pieces of equal size, `shards` random pieces to each silo.

    A silo sees at most about `shards` different labels; fewer rows than silos x shards remain over.
    """
    _check(silos * shards, len(labels))
    order = _shuffled(torch.arange(len(labels)), seed)
    order = order[torch.argsort(labels[order], stable=True)]
    size = len(labels) // (silos * shards)
    pieces = order[: size * silos * shards].split(size)
    drawn = torch.randperm(silos * shards, generator=torch.Generator().manual_seed(seed + 1)).tolist()
    return [torch.cat([pieces[k] for k in drawn[j::silos]]).sort().values for j in range(silos)]


def take(dataset: Dataset, parts: list[Tensor]) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Silos' data and record ids for row indices by silo: what `fit` takes."""
    silos = [{name: tensor[rows] for name, tensor in dataset.records.items()} for rows in parts]
    return silos, [dataset.record_ids[rows] for rows in parts]


def _shuffled(rows: Tensor, seed: int) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def _check(pieces: int, rows: int) -> None:
    if not 1 <= pieces <= rows:
        raise InputError(f"{rows} rows cannot be cut into {pieces} pieces")
