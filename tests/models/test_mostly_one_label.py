"""Silos of mostly one label, and even ones: sizes, shares, no row twice, the same call the same split, refusals."""

from __future__ import annotations

import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi_lab.experiments.partitions import evenly, mostly_one_label

LABELS = torch.arange(10).repeat(120)[torch.randperm(1200, generator=torch.Generator().manual_seed(0))]


def test_nine_tenths_have_one_label() -> None:
    parts = mostly_one_label(LABELS, 20, 0.9, size=50, seed=1)
    together = torch.cat(parts)
    assert len(together.unique()) == len(together) == 20 * 50
    for j, part in enumerate(parts):
        counts = torch.bincount(LABELS[part], minlength=10)
        assert int(counts[j % 10]) == 45
        others = torch.cat([counts[: j % 10], counts[j % 10 + 1 :]])
        assert (int(others.min()), int(others.max()), int(others.sum())) == (0, 1, 5)


def test_the_largest_size_that_the_labels_allow() -> None:
    """Twenty rows of a label are missing: of 10 silos each label is wanted n times in all, so that n is 100."""
    fewer = torch.cat([LABELS, torch.arange(1, 10).repeat_interleave(20)])
    fewer = fewer[(fewer != 0) | (torch.cumsum(fewer == 0, 0) <= 100)]
    parts = mostly_one_label(fewer, 10, 0.9)
    assert {len(part) for part in parts} == {100}
    assert len(torch.cat(parts).unique()) == 1000


def test_the_seed_is_the_split_into_mostly_one_label() -> None:
    first, again, other = (mostly_one_label(LABELS, 10, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_even_parts() -> None:
    parts = evenly(103, 10, seed=3)
    assert {len(part) for part in parts} == {10}
    assert len(torch.cat(parts).unique()) == 100
    assert not torch.equal(parts[0], evenly(103, 10, seed=4)[0])


def test_splits_into_mostly_one_label_that_cannot_be() -> None:
    with pytest.raises(InputError, match="not enough rows"):
        mostly_one_label(LABELS, 10, 0.9, size=121)
    with pytest.raises(InputError, match="share in"):
        mostly_one_label(LABELS, 10, 1.5)
    with pytest.raises(InputError, match="two labels"):
        mostly_one_label(torch.zeros(30, dtype=torch.int64), 3)
