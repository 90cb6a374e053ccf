"""ProdLDA: log densities against direct formulas, the encoder, coherence by hand, and the simulated documents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import secure_fvi as sf
from secure_fvi.density import LogDensity
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError
from secure_fvi.families.conditional import ENCODER
from secure_fvi.federated_model import FederatedModel, read_data
from secure_fvi.models.prodlda import PROGRAM, TOPICS, encoder, load, prodlda
from secure_fvi.program_density import ProgramDensity
from secure_fvi_lab.experiments.prodlda_20news import completion, diversity, top_words, umass

DATA = load(None, documents=4, words=7, length=9).records


def _density(model: FederatedModel) -> tuple[LogDensity, dict[str, Tensor]]:
    schema, records = read_data(DATA, "a", torch.float64)
    layout, _ = read_layout(model, schema, torch.float64)
    return ProgramDensity(model, layout, schema), records.rows


def _normals(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_log_density() -> None:
    density, rows = _density(PROGRAM.model)
    topics, weights = _normals(7, TOPICS), _normals(4, TOPICS)
    assert density.layout.size("global") == topics.numel()
    terms = density.evaluate(topics.reshape(-1), topics.new_zeros(0), weights, {}, rows)
    p = torch.softmax(torch.softmax(weights, -1) @ topics.T, -1)
    expected = Normal(0.0, 2.0).log_prob(weights).sum(1) + (DATA["counts"] * p.log()).sum(1)
    torch.testing.assert_close(terms.records, expected)


def test_encoder_sees_shares_of_words() -> None:
    """Twice the same document has the same topics; a document without words is no division by zero."""
    family = encoder(7, 3, hidden=4).build(3, 21, 1)
    theta = family.init_theta(torch.float64)
    assert set(theta) == {f"{ENCODER}{i}.{name}" for i in (0, 2, 4) for name in ("weight", "bias")}
    rows = {"counts": torch.stack([DATA["counts"][0], 2 * DATA["counts"][0], 0 * DATA["counts"][0]])}
    found = family.moments({}, theta, rows, torch.zeros(21), torch.zeros(21))
    assert found["loc"].shape == found["log_scale"].shape == (3, 3)
    torch.testing.assert_close(found["loc"][0], found["loc"][1])
    assert not torch.allclose(found["loc"][0], found["loc"][2])
    assert bool(torch.isfinite(found["loc"]).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
@pytest.mark.parametrize("amortised", [False, True])
def test_topics_explain_simulated_documents(amortised: bool) -> None:
    """Bits beyond the documents' common word frequencies, from 3 silos; the truth explains 0.5 nats a word more."""
    counts = load(None, documents=300, words=30, length=60).records["counts"]
    local = encoder(30, TOPICS, hidden=20) if amortised else sf.Conditional(scale="diagonal", coupling=False)
    chosen = sf.SFVI(family="diagonal", iterations=600, learning_rate=0.05, local_family=local, start_spread=0.5)
    result = sf.fit(prodlda(TOPICS), [{"counts": c} for c in counts.chunk(3)], chosen, sf.Plain(), seed=0)
    common = counts.sum(0) / counts.sum()
    assert result.elbo is not None
    assert result.elbo / float(counts.sum()) > float((common * common.log()).sum()) + 0.2


def test_umass_by_hand() -> None:
    """Word 0 in 4 documents, 1 in 3, 2 in 2; together 0-1: 2, 0-2: 1, 1-2: 2."""
    has = torch.tensor([[5, 1, 0], [1, 2, 1], [1, 0, 0], [1, 0, 0], [0, 1, 1]])
    by_hand = (math.log(3 / 4) + math.log(2 / 4) + math.log(3 / 3)) / 3
    other_way = (math.log(3 / 2) + math.log(2 / 2) + math.log(3 / 3)) / 3  # words 2, 1, 0: 2-1, 2-0, 1-0
    found = umass(torch.tensor([[0, 1, 2], [2, 1, 0]]), has)
    assert found.tolist() == pytest.approx([by_hand, other_way])


def test_umass_needs_the_words() -> None:
    with pytest.raises(InputError, match="no document has 1 of the topics' words"):
        umass(torch.tensor([[0, 1]]), torch.tensor([[1, 0], [2, 0]]))


def test_top_words_and_diversity() -> None:
    tops = top_words(torch.tensor([[0.1, 0.0], [3.0, 1.0], [2.0, 4.0], [-1.0, 2.0]]), 2)
    assert tops.tolist() == [[1, 2], [2, 3]]
    assert diversity(tops) == 0.75
    with pytest.raises(InputError, match="between 2 and the 4 words"):
        top_words(torch.zeros(4, 2), 5)


def test_completion_prefers_the_topics_that_made_the_documents() -> None:
    """By 0.3 nats a word over equal topics, and those are the same as the words' frequencies."""
    topics = 3 * _normals(20, TOPICS)
    shares = torch.softmax(3 * _normals(80, TOPICS), -1)
    drawn = torch.multinomial(
        torch.softmax(shares @ topics.T, -1), 50, True, generator=torch.Generator().manual_seed(2)
    )
    counts = torch.nn.functional.one_hot(drawn, 20).sum(1).double()
    frequencies = (counts.sum(0) / counts.sum()).clamp(min=1e-6).log()
    alike = completion(frequencies.unsqueeze(-1).expand(-1, TOPICS), counts)
    assert alike == pytest.approx(float(frequencies.exp() @ frequencies), abs=0.02)
    assert completion(topics, counts) > alike + 0.3


def test_topics_are_counted() -> None:
    with pytest.raises(InputError, match="topics must be a whole number"):
        prodlda(0)


def test_documents_are_drawn_from_the_model_with_a_fixed_seed() -> None:
    counts = load(None, documents=20, words=15, length=30, seed=3).records["counts"]
    assert counts.shape == (20, 15)
    assert (counts.sum(1) == 30).all()
    assert torch.equal(counts, load(None, documents=20, words=15, length=30, seed=3).records["counts"])
    with pytest.raises(InputError, match="at least 1"):
        load(None, words=0)
