"""Likelihoods of a summed predictor against torch.distributions, their slopes against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, HalfNormal, Normal
from torch.distributions import Poisson as TorchPoisson

from secure_fvi.algorithms.vertical import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from secure_fvi.algorithms.vertical.likelihoods import slopes
from secure_fvi.errors import InputError

N = 7
KINDS = [Bernoulli(1.5), Gaussian(2.0, 0.7), Poisson(), Categorical(3)]


def make(likelihood: Likelihood, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A predictor (N, C), gamma and a response that fits the kind."""
    rng = torch.Generator().manual_seed(seed)
    predictor = torch.randn(N, likelihood.columns, generator=rng)
    gamma = 0.5 * torch.randn(likelihood.gamma_size, generator=rng)
    if isinstance(likelihood, Gaussian):
        y = torch.randn(N, generator=rng)
    else:
        top = {Bernoulli: 2, Poisson: 9, Categorical: 3}[type(likelihood)]
        y = torch.randint(top, (N,), generator=rng).double()
    return predictor, gamma, y


def distribution(likelihood: Likelihood, predictor: Tensor, gamma: Tensor) -> Distribution:
    first = predictor[:, 0] + gamma[0]
    if isinstance(likelihood, Bernoulli):
        return TorchBernoulli(logits=first)
    if isinstance(likelihood, Gaussian):
        return Normal(first, gamma[1].exp())
    if isinstance(likelihood, Poisson):
        return TorchPoisson(first.exp())
    return TorchCategorical(logits=predictor + gamma)


@pytest.mark.parametrize("likelihood", KINDS, ids=lambda k: type(k).__name__)
def test_log_prob_is_the_distribution_s(likelihood: Likelihood) -> None:
    predictor, gamma, y = make(likelihood)
    likelihood.check(y)
    expected = distribution(likelihood, predictor, gamma).log_prob(y)
    torch.testing.assert_close(likelihood.log_prob(y, predictor, gamma), expected)


@pytest.mark.parametrize("likelihood", KINDS, ids=lambda k: type(k).__name__)
def test_slopes_match_finite_differences(likelihood: Likelihood) -> None:
    predictor, gamma, y = make(likelihood)
    offset, weights = torch.linspace(-1, 1, N), torch.linspace(0.5, 2, N)

    def value(predictor: Tensor, gamma: Tensor) -> Tensor:
        return likelihood.log_prob(y, predictor + offset[:, None], gamma)

    found = slopes(likelihood, y, offset, predictor, gamma, weights)
    step = 1e-6  # central differences of smooth functions: error about 1e-9 relative
    for c in range(likelihood.columns):
        move = torch.zeros_like(predictor)
        move[:, c] = step
        numeric = (value(predictor + move, gamma) - value(predictor - move, gamma)) / (2 * step)
        torch.testing.assert_close(found.predictor[:, c], numeric, rtol=1e-6, atol=1e-7)
    for k in range(likelihood.gamma_size):
        move = torch.zeros_like(gamma)
        move[k] = step
        numeric = (weights * (value(predictor, gamma + move) - value(predictor, gamma - move))).sum() / (2 * step)
        torch.testing.assert_close(found.gamma[k], numeric, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.value, (weights * value(predictor, gamma)).sum())
    if likelihood.slope_bound is not None:
        assert float(found.predictor.abs().max()) <= likelihood.slope_bound


@pytest.mark.later
@pytest.mark.parametrize("likelihood", KINDS, ids=lambda k: type(k).__name__)
def test_curvature_bounds_the_hessian(likelihood: Likelihood) -> None:
    for seed in range(20):
        predictor, gamma, y = make(likelihood, seed)
        bound = float(likelihood.curvature(predictor, gamma))
        for i in range(N):
            hessian = torch.func.hessian(
                lambda p, y=y, i=i, g=gamma: likelihood.log_prob(y[i : i + 1], p[None], g).sum()
            )
            assert float(torch.linalg.eigvalsh(-hessian(predictor[i])).max()) <= bound * (1 + 1e-9)


def test_prior_of_gamma_integrates_to_one() -> None:
    grid = torch.linspace(-12, 6, 4001)
    likelihood = Gaussian(2.0, 0.7)
    values = torch.stack([likelihood.log_prior(torch.stack([torch.tensor(0.3), g])) for g in grid])
    intercept = Normal(0.0, 2.0).log_prob(torch.tensor(0.3))
    mass = torch.trapezoid((values - intercept).exp(), grid)
    assert float(mass) == pytest.approx(1.0, abs=1e-4)  # cut at log sigma = -12
    log_sigma = torch.tensor(-0.4)
    expected = HalfNormal(0.7).log_prob(log_sigma.exp()) + log_sigma + intercept
    torch.testing.assert_close(likelihood.log_prior(torch.stack([torch.tensor(0.3), log_sigma])), expected)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (Bernoulli(), [0.0, 2.0]),
        (Poisson(), [1.0, -1.0]),
        (Poisson(), [0.5, 1.0]),
        (Categorical(3), [0.0, 3.0]),
        (Gaussian(), [0.0, math.nan]),
    ],
)
def test_wrong_responses_are_refused(likelihood: Likelihood, y: list[float]) -> None:
    with pytest.raises(InputError):
        likelihood.check(torch.tensor(y))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InputError, match="number of classes"):
        Categorical(1)
    with pytest.raises(InputError, match="sigma_scale"):
        Gaussian(sigma_scale=0.0)
