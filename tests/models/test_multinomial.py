"""The empirical-Bayes multinomial regression: its density and its predictions by hand, theta, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

import secure_fvi as sf
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError
from secure_fvi.federated_model import read_data
from secure_fvi.models.multinomial import class_log_probs, multinomial_regression
from secure_fvi.program_density import ProgramDensity


def _data(n: int = 7) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {"x": torch.randn(n, 3, generator=rng), "y": torch.randint(4, (n,), generator=rng)}


def test_the_density_by_hand() -> None:
    model, data = multinomial_regression(classes=4, scale=0.5), _data()
    schema, _ = read_data(data, "a", torch.float64)
    layout, start = read_layout(model, schema, torch.float64)
    z = torch.randn(16, generator=torch.Generator().manual_seed(1))
    theta = {"sigma_w": torch.tensor(0.7).log(), "sigma_b": torch.tensor(2.0).log()}
    found = ProgramDensity(model, layout, schema).evaluate(z, torch.zeros(0), torch.zeros(7, 0), theta, data)
    w, b = z[:12].reshape(3, 4), z[12:]
    assert float(found.shared) == pytest.approx(
        float(Normal(0, 0.7).log_prob(w).sum() + Normal(0, 2.0).log_prob(b).sum())
    )
    expected = torch.log_softmax(data["x"] @ w + b, -1)[torch.arange(7), data["y"]]
    torch.testing.assert_close(found.records, expected)
    assert {k: float(v) for k, v in start.theta.items()} == pytest.approx(dict.fromkeys(theta, math.log(0.5)))


def test_predictions_average_probabilities() -> None:
    x = torch.tensor([[1.0, -2.0]])
    draws = {"weights": torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [2.0, 0.0]]]), "bias": torch.zeros(2, 2)}
    each = torch.softmax(torch.tensor([[1.0, 0.0], [-4.0, 0.0]]), -1)
    torch.testing.assert_close(class_log_probs(draws, x).exp(), each.mean(0, keepdim=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_the_scale_of_the_prior_is_learned() -> None:
    """From 0.1; the weights that made the labels have sd 2.8, so the fitted scale has to grow tenfold."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(300, 3, generator=rng)
    w = torch.tensor([[4.0, -4.0], [-2.0, 2.0], [2.0, -2.0]])
    y = (torch.rand(300, generator=rng) > torch.softmax(x @ w, -1)[:, 0]).long()
    silos = [{"x": part, "y": label} for part, label in zip(x.split(100), y.split(100), strict=True)]
    result = sf.fit(multinomial_regression(classes=2), silos, sf.SFVI(iterations=150, learning_rate=0.1), sf.Plain())
    assert float(result.theta["sigma_w"]) > 1.0
    right = class_log_probs(result.sample(20), x).argmax(-1) == y
    assert float(right.double().mean()) > 0.9


def test_refusals() -> None:
    with pytest.raises(InputError, match="classes must be a whole number of at least 2"):
        multinomial_regression(classes=1)
    with pytest.raises(InputError, match="scale must be positive"):
        multinomial_regression(scale=0.0)
    with pytest.raises(InputError, match="at least one is needed"):
        class_log_probs({"weights": torch.zeros(0, 2, 2), "bias": torch.zeros(0, 2)}, torch.zeros(1, 2))
