"""Whole runs through secure sums, against posteriors known in closed form."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from gaussian import fit, joint, make, means, sds
from torch import Tensor

from secure_fvi.algorithms.vertical import (
    Amortised,
    Bernoulli,
    Categorical,
    Gaussian,
    MeanField,
    Poisson,
    Vertical,
    grouped_slopes,
    linear,
)
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.columns import VerticalResult

#: Runs of hundreds of rounds each; what they are compared with says more than the rule for settling.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")]

WIDTHS = [2, 2]
PROBLEM = make(WIDTHS, 30)


def _run(rounds: int = 1000, rate: float = 0.05, **options: Any) -> VerticalResult:
    config = Vertical(rounds=rounds, learning_rate=rate, **options)
    return fit(PROBLEM.silos, PROBLEM.response, config)


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ("augmented", 1),
        ("power", 1),
        pytest.param("augmented", 3, marks=pytest.mark.slow),
        pytest.param("power", 3, marks=pytest.mark.slow),
    ],
)
def test_mean_field_finds_the_closed_form(model: Any, steps: int) -> None:
    """The best mean field has the joint posterior's mean and conditional variances; so do several damped local steps.

    theta_j and z_j pull at each other, so that a mean is a few hundredths to .15 sd short after 800 rounds of one step
    and .2 sd after those of three; a wrong pull is off by 1 sd and more.
    """
    exact = joint(PROBLEM, 1.0, model == "power")
    found = _run(800, model=model, auxiliary=MeanField(), local_steps=steps, family="full")
    error = (means(found) - exact.theta_mean()) / exact.theta_sd()
    assert float(error.abs().max()) < 0.25
    ratio = sds(found) / exact.mean_field_sd(WIDTHS)
    assert float((ratio - 1).abs().max()) < 0.1


@pytest.mark.parametrize("model", ["augmented", pytest.param("power", marks=pytest.mark.slow)])
def test_small_rho_gives_the_pooled_posterior(model: Any) -> None:
    """Amortised VI at rho = .05, beside regression on all columns: means within .1 sd, the issue's number."""
    x = torch.cat([s["x"] for s in PROBLEM.silos], 1)
    precision = torch.eye(x.shape[1]) + x.T @ x / 0.8**2
    mean = torch.linalg.solve(precision, x.T @ PROBLEM.response.y / 0.8**2)
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    found = _run(700, model=model, rho=0.05, family="full")
    assert float(((means(found) - mean) / sd).abs().max()) < 0.1


def test_batches_by_a_shared_seed() -> None:
    full = _run(500, rho=0.1, family="full")
    half = _run(500, 0.03, rho=0.1, family="full", batch_size=15)
    exact = joint(PROBLEM, 0.1, False)
    # Half of the records a round add noise, .1 sd at this rate; unweighted records would halve the data.
    assert float(((means(half) - means(full)) / exact.theta_sd()).abs().max()) < 0.3
    assert 0.8 < float((sds(half) / sds(full)).mean()) < 1.2


@pytest.mark.slow
def test_private_response_with_local_steps() -> None:
    """Bernoulli, the response at the server alone: several local steps agree with one, .15 sd."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(80, 4, generator=rng)
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -1.0, 0.5, 0.0])), generator=rng)
    silos, response = [{"x": x[:, :2]}, {"x": x[:, 2:]}], Response(y, torch.zeros(80))
    one, three = (
        fit(
            silos,
            response,
            Vertical(rho=0.3, response="private", local_steps=m, family="full", rounds=800, learning_rate=0.05),
            Bernoulli(),
        )
        for m in (1, 3)
    )
    assert float(((means(one) - means(three)) / sds(one)).abs().max()) < 0.15
    assert float(means(one)[0]) > 0.5


def test_gamma_is_learned() -> None:
    """Unknown variance: at small rho its posterior mean lies near the residual variance of the fit."""
    problem = make([2, 2], 200)
    config = Vertical(rho=0.1, family="full", rounds=500, learning_rate=0.05)
    found = fit(problem.silos, problem.response, config, Gaussian())
    x = torch.cat([*(s["x"] for s in problem.silos), torch.ones(200, 1)], 1)
    rest = problem.response.y - x @ torch.linalg.lstsq(x, problem.response.y.unsqueeze(1)).solution[:, 0]
    # What is left after five coefficients, less the noise of z; sigma's own posterior sd is .035.
    expected = (rest.square().sum() / 195 - 2 * 0.1**2).sqrt()
    assert float(found.posterior["sigma"].mean) == pytest.approx(float(expected), abs=0.03)


def test_silos_choose_their_own_structure() -> None:
    """Poisson counts with exposure; one silo has slopes by level, the other one slope: both recover their truth."""
    rng = torch.Generator().manual_seed(4)
    n, levels = 400, 3
    level = torch.randint(levels, (n,), generator=rng)
    a, b = torch.randn(n, 1, generator=rng), torch.randn(n, 1, generator=rng)
    by_level = torch.tensor([[0.6], [0.2], [-0.4]])
    offset = torch.log(torch.full((n,), 50.0))
    y = torch.poisson((offset - 1.0 + (a * by_level[level]).sum(-1) + 0.5 * b[:, 0]).exp(), generator=rng)
    silos = [{"x": a, "level": level}, {"x": b}]
    config = Vertical(rho=0.1, response="private", family="full", rounds=800, learning_rate=0.03)
    found = fit(silos, Response(y, offset), config, Poisson(), predictors=[grouped_slopes(levels), linear()])
    sites = found.local["silo-1"].posterior
    # Augmented noise of rho sqrt(2) adds to Poisson noise of .23 a record: slopes are known to about .025.
    torch.testing.assert_close(sites["beta"].mean, by_level, rtol=0, atol=0.1)
    assert float(found.local["silo-2"].posterior["beta"].mean[0]) == pytest.approx(0.5, abs=0.1)
    assert float(found.posterior["intercept"].mean) == pytest.approx(-1.0, abs=0.1)


def test_categorical_and_a_network_as_predictor() -> None:
    """Classes split along one silo's first column; the other silo's network has point weights that are fitted."""
    rng = torch.Generator().manual_seed(5)
    x, noise = torch.randn(150, 2, generator=rng), torch.randn(150, 2, generator=rng)
    y = (x[:, 0] > -0.5).double() + (x[:, 0] > 0.5).double()

    def network(x: Tensor) -> Tensor:
        start = torch.tensor([[0.5, -0.5, 0.2], [0.1, 0.3, -0.4]], dtype=x.dtype)
        hidden = torch.tanh(x @ pyro.param("weight", start))
        w = pyro.sample("w", pyro.distributions.Normal(x.new_zeros(3, 3), 1.0).to_event(2))
        return hidden @ w

    config = Vertical(rho=0.5, auxiliary=Amortised((8,)), rounds=250, learning_rate=0.05)
    silos = [{"x": noise}, {"x": x}]
    found = fit(silos, Response(y, torch.zeros(150)), config, Categorical(3), predictors=[linear(3), network])
    weight = found.local["silo-2"].q["point/weight"]
    start = torch.tensor([[0.5, -0.5, 0.2], [0.1, 0.3, -0.4]])
    assert float((weight - start).abs().max()) > 0.1
    by_class = torch.stack(
        [
            found.log_predictive(dict(zip(found.silos, silos, strict=True)), torch.full((150,), float(c)))
            for c in range(3)
        ]
    )
    torch.testing.assert_close(by_class.logsumexp(0), torch.zeros(150), rtol=0, atol=1e-9)
    assert float((by_class.argmax(0) == y).double().mean()) > 0.8  # guessing the largest class gives .4
