"""ProdLDA: the log density against a direct formula, and the simulated documents."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Multinomial, Normal

from secure_fvi.density import LogDensity
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError
from secure_fvi.federated_model import read_data
from secure_fvi.models.prodlda import PROGRAM, TOPICS, load


def test_log_density() -> None:
    data = load(None, documents=4, words=7, length=9).records
    schema, records = read_data(data, "a", torch.float64)
    layout, _ = read_layout(PROGRAM.model, schema, torch.float64)
    assert (layout.size("global"), layout.size("record")) == (7 * TOPICS, TOPICS)
    rng = torch.Generator().manual_seed(1)
    topics = torch.randn(7, TOPICS, generator=rng, dtype=torch.float64)
    weights = torch.randn(4, TOPICS, generator=rng, dtype=torch.float64)
    terms = LogDensity(PROGRAM.model, layout, schema).evaluate(
        topics.reshape(-1), topics.new_zeros(0), weights, {}, records.rows
    )
    p = torch.softmax(torch.softmax(weights, -1) @ topics.T, -1)
    expected = Normal(0.0, 2.0).log_prob(weights).sum(1)
    expected = expected + torch.stack([Multinomial(9, q).log_prob(c) for q, c in zip(p, data["counts"], strict=True)])
    torch.testing.assert_close(terms.records, expected)


def test_documents_are_drawn_from_the_model_with_a_fixed_seed() -> None:
    counts = load(None, documents=20, words=15, length=30, seed=3).records["counts"]
    assert counts.shape == (20, 15)
    assert (counts.sum(1) == 30).all()
    assert torch.equal(counts, load(None, documents=20, words=15, length=30, seed=3).records["counts"])
    with pytest.raises(InputError, match="at least 1"):
        load(None, words=0)
