"""Predictors from Pyro programs."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.distributions import Beta, HalfNormal, Normal, Poisson
from torch import Tensor

from secure_fvi.algorithms.vertical import Predictor, grouped_slopes, linear
from secure_fvi.errors import InputError

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
LEVEL = torch.tensor([0, 1, 0, 1, 1, 0])


def test_linear() -> None:
    predictor = Predictor(linear(scale=2.0), {"x": X})
    theta = torch.tensor([0.5, -1.0, 2.0])
    eta, log_prior = predictor.evaluate(theta, {}, {"x": X})
    torch.testing.assert_close(eta, (X @ theta)[:, None])
    torch.testing.assert_close(log_prior, Normal(0.0, 2.0).log_prob(theta).sum())


def test_linear_with_columns() -> None:
    predictor = Predictor(linear(4), {"x": X}, columns=4)
    theta = torch.arange(12.0)
    torch.testing.assert_close(predictor.evaluate(theta, {}, {"x": X})[0], X @ theta.reshape(3, 4))


def test_grouped_slopes() -> None:
    rows = {"x": X, "level": LEVEL}
    predictor = Predictor(grouped_slopes(2), rows)
    theta = 0.1 * torch.arange(float(predictor.n))
    values = predictor.constrain(theta, {})
    eta, log_prior = predictor.evaluate(theta, {}, rows)
    expected = torch.stack([X[i] @ values["beta"][LEVEL[i]] for i in range(6)])
    torch.testing.assert_close(eta[:, 0], expected)
    by_hand = (
        Normal(0.0, 1.0).log_prob(values["mu"]).sum()
        + (HalfNormal(1.0).log_prob(values["sigma"]) + values["sigma"].log()).sum()
        + Normal(values["mu"], values["sigma"]).log_prob(values["beta"]).sum()
    )
    torch.testing.assert_close(log_prior, by_hand)


def test_points_and_transforms() -> None:
    def program(x: Tensor) -> Tensor:
        weight = pyro.param("weight", torch.ones(3, 2))
        share = pyro.sample("share", Beta(2.0, 2.0))
        return torch.tanh(x @ weight) @ torch.stack([share, 1 - share])

    predictor = Predictor(program, {"x": X})
    assert predictor.n == 1
    assert set(predictor.points) == {"weight"}
    torch.testing.assert_close(predictor.constrain(predictor.start, predictor.points)["share"], torch.tensor(0.5))
    doubled = {"weight": 2 * predictor.points["weight"]}
    expected = torch.tanh(X @ torch.full((3, 2), 2.0)).mean(-1, keepdim=True)
    torch.testing.assert_close(predictor.evaluate(predictor.start, doubled, {"x": X})[0], expected)


def _by_record(x: Tensor) -> Tensor:
    return pyro.sample("u", Normal(torch.zeros(len(x)), 1.0).to_event(1))


def _observed(x: Tensor) -> Tensor:
    pyro.sample("y", Normal(0.0, 1.0), obs=x[0, 0])
    return x[:, 0]


def _discrete(x: Tensor) -> Tensor:
    return x[:, 0] * pyro.sample("k", Poisson(1.0))


def _wrong_shape(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("program", "word"),
    [(_by_record, "grows"), (_observed, "observed"), (_discrete, "discrete"), (_wrong_shape, "shape")],
)
def test_programs_that_are_no_predictors(program: object, word: str) -> None:
    with pytest.raises(InputError, match=word):
        Predictor(program, {"x": X})  # type: ignore[arg-type]
