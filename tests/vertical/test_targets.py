"""The exact marginal likelihoods that NUTS reads from a table, and what the experiments fit beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pytest
import torch
from pyro.distributions import Normal
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical import Bernoulli
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.models.vertical_programs import make_data
from secure_fvi_lab.experiments.vertical_batched import POOLED, fit, log_marginal, sample, soul_mode
from secure_fvi_lab.references import sample_nuts


@pytest.mark.parametrize("silos", [2, 10])
@pytest.mark.parametrize("model", ["augmented", "power"])
def test_marginals_by_monte_carlo(model: str, silos: int) -> None:
    rho, f = 1.0, torch.tensor([-6.0, -1.5, 0.03, 2.0, 9.0])
    e = rho * torch.randn(200_000, silos, generator=torch.Generator().manual_seed(0))
    if model == "augmented":
        draws = torch.sigmoid(f[:, None] + e.sum(1))
    else:
        draws = logsigmoid(f[:, None, None] + e.sum(1, keepdim=True) - e).mean(-1).exp()
    found = log_marginal(model, rho, silos)(f).exp()
    error = (draws.mean(1) - found) / (draws.std(1) / math.sqrt(200_000))
    assert float(error.abs().max()) < 4  # of five and four cases: a false alarm in 700 seeds


def test_small_rho_is_the_pooled_likelihood() -> None:
    f = torch.linspace(-20, 20, 333)
    for model in ("augmented", "power"):
        assert float((log_marginal(model, 1e-3, 2)(f) - logsigmoid(f)).abs().max()) < 1e-5


def test_the_table_can_be_differentiated() -> None:
    f = torch.linspace(-9.0, 9.0, 50, requires_grad=True)
    (found,) = torch.autograd.grad(log_marginal("augmented", 1e-4, 2)(f).sum(), f)
    torch.testing.assert_close(found, torch.sigmoid(-f.detach()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["augmented", "power"])
def test_nuts_on_all_latents_agrees(model: str) -> None:
    """NUTS over theta and every z, as the paper runs it, against NUTS with z integrated out."""
    data = make_data(1, 60, 4)
    x, silos = data.by_silo(2), 2

    def program() -> None:
        b = pyro.sample("b", Normal(torch.tensor(0.0), 1.0))
        beta = pyro.sample("beta", Normal(torch.zeros(4), 1.0).to_event(1))
        eta = torch.stack([x[j] @ beta[2 * j : 2 * j + 2] for j in range(silos)])
        z = eta + pyro.sample("e", Normal(torch.zeros(silos, 60), 1.0).to_event(2))
        sign = 2 * data.y - 1
        if model == "augmented":
            value = logsigmoid(sign * (b + z.sum(0))).sum()
        else:
            value = logsigmoid(sign * (b + eta + z.sum(0) - z)).sum() / silos
        pyro.factor("y", value)

    long = sample_nuts(program, "records", ["b", "beta"], chains=2, draws=2000).sites["beta"].flatten(0, 1)
    short = sample(model, 1.0, data.x, data.y, silos, 2, 300, 2000).sites["beta"].flatten(0, 1)
    # 2,000 effective draws a side: .03 sd each.
    assert float(((long.mean(0) - short.mean(0)) / short.std(0)).abs().max()) < 0.15
    assert float((long.std(0) / short.std(0) - 1).abs().max()) < 0.1


@pytest.mark.slow
def test_a_rho_that_nobody_could_see_is_the_pooled_model() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 80, 2, generator=rng)
    y = torch.bernoulli(torch.sigmoid(x.sum((0, 2))), generator=rng)
    found = fit(
        replace(POOLED, rounds=500, learning_rate=0.05), Bernoulli(), {"x": x}, Response(y, torch.zeros(80)), "traced"
    )
    beta = found.sites["beta"].flatten(1)
    exact = sample("pooled", 1.0, torch.cat([*x], 1), y, 1, 2, 300, 2000).sites["beta"].flatten(0, 1)
    assert float(((beta.mean(0) - exact.mean(0)) / exact.std(0)).abs().max()) < 0.15
    assert float((beta.std(0) / exact.std(0) - 1).abs().max()) < 0.2  # q factorises over silos


@pytest.mark.slow
def test_soul_ends_at_its_mode() -> None:
    """Logistic regression: the mean of SOUL's draws and Newton's method, to .3 posterior sds of some .3."""
    data = make_data(2, 60, 4)
    response = Response(data.y, torch.zeros(60))
    found = fit(Soul(rho=1.0, rounds=1500), Bernoulli(), {"x": data.by_silo(2)}, response, "traced")
    mode = soul_mode(data.x, data.y, math.sqrt(2))
    assert float((found.sites["beta"].flatten(1).mean(0) - mode).abs().max()) < 0.1
