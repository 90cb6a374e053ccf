"""The exact marginal likelihoods that NUTS reads from a table, and the batched rounds of the experiments."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pytest
import torch
from gaussian import make
from pyro.distributions import Normal
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical import Amortised, Bernoulli, Gaussian, MeanField, Soul, Vertical
from secure_fvi.algorithms.vertical.steps import Incoming, Response
from secure_fvi.models.vertical_programs import make_data
from secure_fvi_lab.experiments.vertical_batched import SoulRound, VerticalRound, log_marginal, sample, soul_mode
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
            value = sum(logsigmoid(sign * (b + eta[j] + z.sum(0) - z[j])).sum() / silos for j in range(silos))
        pyro.factor("y", value)

    long = sample_nuts(program, "records", ["b", "beta"], chains=2, draws=2000).sites["beta"].flatten(0, 1)
    short = sample(model, 1.0, data.x, data.y, silos, 2, 300, 2000).sites["beta"].flatten(0, 1)
    # 2,000 effective draws a side: .03 sd each.
    assert float(((long.mean(0) - short.mean(0)) / short.std(0)).abs().max()) < 0.15
    assert float((long.std(0) / short.std(0) - 1).abs().max()) < 0.1


@pytest.mark.parametrize("model", ["augmented", "power"])
@pytest.mark.parametrize("auxiliary", [Amortised((3,)), MeanField()], ids=["amortised", "mean-field"])
def test_batched_rounds_are_the_silos_one_by_one(model: Any, auxiliary: Any) -> None:
    problem = make([2, 2, 2], 12, seed=3)
    rows, weights = problem.silos, torch.ones(12)
    x = torch.stack([s["x"] for s in rows])
    config = Vertical(model=model, rho=0.5, auxiliary=auxiliary, family="full")
    batched = VerticalRound(config, Gaussian(), {"x": x}, problem.response, 0.05, "eager")
    generator = torch.Generator().manual_seed(0)
    state, scale, silo, known = batched.init(generator), torch.tensor(0.7), batched.silo, problem.response
    own = [silo.init(12, generator)[1] for _ in rows]
    for noise, eps in batched.noises(2, generator):
        params = [_nth(state.params, j) for j in range(3)]
        noises = [_nth(noise, j) for j in range(3)]
        gamma = batched.server.gamma(state.server.eta, eps)
        draws = [silo.draw(p, r, known, weights, e) for p, r, e in zip(params, rows, noises, strict=True)]
        s = torch.stack([d.z for d in draws]).sum(0)
        h = batched.server.curvature(known.offset, s, gamma)
        if config.is_power:
            slopes = [silo.slope(d, known, weights, s, gamma, torch.tensor(1 / 3))[0] for d in draws]
            pulls = [torch.stack(slopes).sum(0) - c for c in slopes]
        else:
            pulls = [batched.server.respond(known, s, gamma, weights).pull] * 3
        new = []
        for j, pull in enumerate(pulls):
            incoming = Incoming(pull, h, s - draws[j].z, gamma, torch.tensor(1 / 3))
            p, own[j] = silo.update(params[j], own[j], rows[j], known, weights, noises[j], incoming, scale)
            new.append(p)
        state, _ = batched.step(state, noise, eps, scale)
        for j, expected in enumerate(new):
            for mine, theirs in zip(_nth(state.params, j), expected, strict=True):
                for name in theirs:
                    torch.testing.assert_close(mine[name], theirs[name])


def _nth(stacked: Any, j: int) -> Any:
    """One silo's part of what is stacked."""
    if isinstance(stacked, dict):
        return {name: value[j] for name, value in stacked.items()}
    if isinstance(stacked, torch.Tensor):
        return stacked[j]
    return type(stacked)(*(_nth(part, j) for part in stacked))


@pytest.mark.slow
def test_pooled_rounds_are_vi_of_the_pooled_model() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 80, 2, generator=rng)
    y = torch.bernoulli(torch.sigmoid(x.sum((0, 2))), generator=rng)
    response = Response(y, torch.zeros(80))
    fit = VerticalRound(Vertical(), Bernoulli(), {"x": x}, response, 0.05, "traced", pooled=True).fit(500)
    near = VerticalRound(Vertical(rho=0.02), Bernoulli(), {"x": x}, response, 0.05, "traced").fit(500)
    assert float(((fit.mean - near.mean) / fit.sd).abs().max()) < 0.15
    assert float((fit.sd / near.sd - 1).abs().max()) < 0.15
    assert float(fit.bounds[-20:].mean()) >= float(near.bounds[-20:].mean()) - 0.5


@pytest.mark.slow
def test_soul_ends_at_its_mode() -> None:
    """Logistic regression: the mean of SOUL's draws and Newton's method, to .3 posterior sds of some .3."""
    data = make_data(2, 60, 4)
    response = Response(data.y, torch.zeros(60))
    fit = SoulRound(Soul(rho=1.0), Bernoulli(), data.by_silo(2), response, 0.02, "traced").fit(1500)
    mode = soul_mode(data.x, data.y, math.sqrt(2))
    assert float((fit.mean - mode).abs().max()) < 0.1
