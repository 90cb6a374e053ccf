"""A silo's own latents after a fit: exact where the model is conjugate, resampled where K > 1."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_clinics, make_intercepts
from torch import Tensor

import secure_fvi as sf


@pytest.mark.slow
def test_draws_of_local_latents_are_the_conjugate_posterior() -> None:
    """Means of b_i against the closed form; 4,000 draws, 4.5 standard errors for 40 records: false alarm 3e-4."""
    problem = make_intercepts()
    result = sf.fit(problem.model, problem.silos, sf.SFVI(iterations=1200, schedule="cosine"), sf.Plain())
    draws = result.local["silo-2"].sample(4000)["b"]
    assert draws.shape == (4000, 40)
    rows = problem.silos[1]["y"]
    shrink = 0.49 / (0.49 + 0.25 / 3)
    mean = shrink * (rows.mean(1) - problem.mean["mu"])
    variance = 0.49 * (1 - shrink) + (shrink * problem.sd["mu"]) ** 2
    assert ((draws.mean(0) - mean).abs() < 4.5 * (variance / 4000).sqrt() + 0.02 * variance.sqrt()).all()
    assert ((draws.var(0) / variance - 1).abs() < 0.2).all()


@pytest.mark.later
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_silo_sites_are_drawn_too() -> None:
    problem = make_clinics()
    result = sf.fit(problem.model, problem.silos, sf.SFVI(iterations=50, average_last=1.0), sf.Plain())
    draws = result.local["silo-1"].sample(5)
    assert draws["u"].shape == (5,)
    assert draws["b"].shape == (5, 7)


def _skewed(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 0.01))
    with pyro.plate("person", y.shape[0]):
        b = pyro.sample("b", dist.Exponential(1.0))
        pyro.sample("y", dist.Normal(mu + b, 1.0), obs=y)


@pytest.mark.slow
def test_importance_samples_correct_the_shape() -> None:
    """b | y is a normal cut at zero: with K = 50 its mean comes out right, with K = 1 it does not.

    Exact mean for y = 0: 1/r(1) - 1 = .5251, r the Mills ratio of 1. Over 20 equal records and 1,000 draws each the
    standard error is .003; the Gaussian family on log b alone is off by more than .01.
    """
    silo = {"y": torch.zeros(20)}
    exact = torch.tensor(1.0)
    density = torch.exp(-0.5 * exact**2) / (2 * torch.pi) ** 0.5
    truth = density / torch.special.ndtr(-exact) - exact
    means = {}
    for samples in (1, 50):
        algorithm = sf.SFVI(iterations=1200, schedule="cosine", importance_samples=samples)
        result = sf.fit(sf.FederatedModel(_skewed, "person"), [silo], algorithm, sf.Plain())
        means[samples] = result.local["silo-1"].sample(1000)["b"].mean()
    assert (means[50] - truth).abs() < 0.015
    assert (means[1] - truth).abs() > (means[50] - truth).abs()
