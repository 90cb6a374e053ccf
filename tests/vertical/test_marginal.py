"""Auxiliary variables integrated out at the holder of the response."""

from __future__ import annotations

import math

import pytest
import torch
from gaussian import SIGMA, fit, make
from torch import Tensor

from secure_fvi.algorithms.vertical import (
    Amortised,
    Auto,
    Bernoulli,
    Categorical,
    Gaussian,
    Integrated,
    Likelihood,
    Poisson,
    Vertical,
)
from secure_fvi.algorithms.vertical.likelihoods import GaussianMarginal, marginal
from secure_fvi.errors import InputError


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (Bernoulli(), torch.tensor([0.0, 1.0, 1.0, 0.0])),
        (Gaussian(), torch.tensor([0.3, -1.0, 4.0, 0.0])),
        (Poisson(), torch.tensor([0.0, 1.0, 5.0, 30.0])),
    ],
)
@pytest.mark.parametrize("sd", [0.1, 1.4, 2.8])
def test_marginal_is_the_mean_over_the_noise(likelihood: Likelihood, y: Tensor, sd: float) -> None:
    """Against 2,001 nodes of the trapezoidal rule over ten standard deviations to each side."""
    found = marginal(likelihood, sd)
    assert found is not None
    gamma = torch.full((likelihood.gamma_size,), 0.2)
    predictor = torch.tensor([[-1.0], [0.5], [2.0], [3.0]])
    e = torch.linspace(-10, 10, 2_001)
    log_weights = -0.5 * e.square() - 0.5 * math.log(2 * math.pi) + math.log(20 / 2_000)
    by_node = torch.stack([likelihood.log_prob(y, predictor + sd * v, gamma) for v in e])
    exact = torch.logsumexp(by_node + log_weights[:, None], 0)
    torch.testing.assert_close(found.log_prob(y, predictor, gamma), exact, rtol=0, atol=1e-4)
    h = 1e-4
    curvature = found.curvature(predictor, gamma)
    up, middle, down = (found.log_prob(y, predictor + d, gamma) for d in (h, 0.0, -h))
    assert bool((-(up - 2 * middle + down) / h**2 <= curvature * (1 + 1e-4) + 1e-4).all())


def test_what_integrates_and_what_does_not() -> None:
    assert isinstance(Vertical().resolved(Bernoulli()).auxiliary, Integrated)
    assert isinstance(Vertical(model="power").resolved(Bernoulli()).auxiliary, Amortised)
    assert isinstance(Vertical().resolved(Categorical(3)).auxiliary, Amortised)
    assert isinstance(Vertical().auxiliary, Auto)
    with pytest.raises(InputError, match="Categorical"):
        Vertical(auxiliary=Integrated()).resolved(Categorical(3))
    with pytest.raises(InputError, match="power"):
        Vertical(model="power", auxiliary=Integrated())
    with pytest.raises(InputError, match="nodes"):
        Integrated(nodes=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_the_posterior_is_that_of_the_augmented_model() -> None:
    """Gaussian, rho = .5 over three silos, known noise: the best q that factorises over silos, means exact."""
    problem, rho = make([2, 2, 2], 40), 0.5

    class Known(Gaussian):
        def log_prior(self, gamma: Tensor) -> Tensor:  # a narrow prior holds gamma at the truth
            at = torch.stack([gamma.new_zeros(()), gamma.new_tensor(SIGMA).log()])
            return -0.5 * ((gamma - at) / 1e-3).square().sum()

    class Wide(GaussianMarginal):
        log_prior = Known.log_prior

    known = Known()
    config = Vertical(rho=rho, family="full", rounds=1500, learning_rate=0.05, auxiliary=Integrated())
    wide = Wide(sd=math.sqrt(3) * rho)
    patched = pytest.MonkeyPatch()
    patched.setattr(Vertical, "resolved", lambda self, likelihood: self)
    patched.setattr(Vertical, "seen_by_holder", lambda self, likelihood, silos: wide)
    try:
        found = fit(problem.silos, problem.response, config, known)
    finally:
        patched.undo()
    x = torch.cat([s["x"] for s in problem.silos], 1)
    variance = SIGMA**2 + 3 * rho**2
    precision = torch.eye(6) + x.T @ x / variance
    mean = torch.linalg.solve(precision, x.T @ problem.response.y / variance)
    conditional = [torch.linalg.inv(precision[i : i + 2, i : i + 2]).diagonal().sqrt() for i in (0, 2, 4)]
    means = torch.cat([found.local[s].posterior["beta"].mean for s in found.silos])
    sds = torch.cat([found.local[s].posterior["beta"].sd for s in found.silos])
    assert float(((means - mean) / torch.cat(conditional)).abs().max()) < 0.15
    torch.testing.assert_close(sds, torch.cat(conditional), rtol=0.1, atol=0)
