"""Section 5.2 of the vertical paper: the simulator, the likelihood of a count, mu integrated out, the experiment."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pyro.distributions import HalfNormal, MultivariateNormal, Normal
from quick_run import is_picture, quick_run
from torch import Tensor

from secure_fvi.algorithms.vertical import Poisson, Predictor
from secure_fvi.algorithms.vertical.likelihoods import log_marginal
from secure_fvi.models import vertical_poisson as model
from secure_fvi_lab.experiments import vertical_poisson
from secure_fvi_lab.experiments.vertical_poisson import (
    INTEGRATED,
    PRIVATE,
    VARIANTS,
    Effort,
    Levels,
    fitted,
    png,
    poisson_lognormal,
)


def test_simulated_truths_have_the_priors_moments() -> None:
    sets = [model.simulate(seed, 1.0, 20) for seed in range(500)]
    mu, sigma = torch.stack([d.mu for d in sets]), torch.stack([d.sigma for d in sets])
    u = torch.stack([(d.beta - d.mu.unsqueeze(1)) / d.sigma.unsqueeze(1) for d in sets])
    # 2,000 draws of mu and sigma, 10,000 of u: four standard errors.
    assert abs(float(mu.mean())) < 4 * model.SCALE / math.sqrt(2000)
    assert abs(float(mu.std()) / model.SCALE - 1) < 4 / math.sqrt(4000)
    assert abs(float(sigma.square().mean().sqrt()) / model.SCALE - 1) < 4 / math.sqrt(4000)
    assert abs(float(u.std()) - 1) < 4 / math.sqrt(20_000)
    assert abs(float(torch.stack([d.b for d in sets]).std()) / model.SCALE - 1) < 4 / math.sqrt(1000)


def test_simulated_areas() -> None:
    plain, noisy = model.simulate(3, 0.0, 40_000), model.simulate(3, 0.5, 40_000)
    population = (noisy.offset - math.log(model.RATE)).exp()
    assert (round(float(population.min())), round(float(population.max()))) == (250, 350)
    assert torch.bincount(noisy.level, minlength=model.LEVELS).double().std() < 4 * math.sqrt(40_000 / model.LEVELS)
    assert torch.equal(plain.beta, noisy.beta)
    for data, sd in ((plain, 0.0), (noisy, math.sqrt(model.SILOS) * 0.5)):
        # Given the truth y has mean rate exp(sd^2 / 2); areas of high rates would make the sum too variable.
        rate = (data.offset + data.b + data.eta().sum(0)).exp()
        y, expected = data.y[rate < 30], rate[rate < 30] * math.exp(sd**2 / 2)
        variance = expected + expected.square() * math.expm1(sd**2)
        assert abs(float((y - expected).sum() / variance.sum().sqrt())) < 4


@pytest.mark.parametrize("sd", [math.sqrt(2), 2 * math.sqrt(2)])
def test_marginal_by_monte_carlo(sd: float) -> None:
    y = torch.tensor([0.0, 0.0, 1.0, 3.0, 12.0, 200.0])
    f = torch.tensor([-4.0, 2.0, 1.5, -1.0, 3.0, 3.5])
    e = torch.randn(400_000, 1, generator=torch.Generator().manual_seed(0))
    log_rate = f + sd * e
    draws = (y * log_rate - log_rate.exp() - torch.lgamma(y + 1)).exp()
    error = (draws.mean(0) - log_marginal(y, f, sd).exp()) / (draws.std(0) / math.sqrt(len(e)))
    assert float(error.abs().max()) < 4  # of 12 in all: a false alarm in 1,300 seeds


def test_marginal_is_right_to_six_digits_and_finite_far_out() -> None:
    f = torch.linspace(-6, 10, 33).unsqueeze(-1).expand(-1, 5)
    y = torch.tensor([0.0, 1.0, 4.0, 30.0, 3000.0]).expand(33, -1)
    g, sd = torch.linspace(-14, 14, 40_001), math.sqrt(2)
    t = f.unsqueeze(-1) + sd * g
    terms = y.unsqueeze(-1) * t - t.exp() - 0.5 * g.square() - 0.5 * math.log(2 * math.pi) + (g[1] - g[0]).log()
    exact = torch.logsumexp(terms, -1) - torch.lgamma(y + 1)
    torch.testing.assert_close(log_marginal(y, f, sd), exact, rtol=1e-6, atol=1e-5)
    far = torch.tensor([-60.0, 60.0, -60.0, 60.0]).requires_grad_()
    value = log_marginal(torch.tensor([0.0, 0.0, 1e6, 1e6]), far, sd)
    (slope,) = torch.autograd.grad(value.sum(), far)
    assert bool(torch.isfinite(value).all() & torch.isfinite(slope).all())


def test_marginal_has_the_right_slope() -> None:
    """Although its nodes are held fixed."""
    f, h = torch.linspace(-5.0, 8.0, 40, requires_grad=True), 1e-4
    for y in (0.0, 2.0, 50.0):
        count = torch.full((40,), y)
        (slope,) = torch.autograd.grad(log_marginal(count, f, math.sqrt(2)).sum(), f)
        up, down = log_marginal(count, f.detach() + h, math.sqrt(2)), log_marginal(count, f.detach() - h, math.sqrt(2))
        torch.testing.assert_close(slope, (up - down) / (2 * h), rtol=1e-4, atol=1e-4)


def test_likelihood_without_noise_is_poisson() -> None:
    y, predictor, gamma = torch.tensor([0.0, 2.0, 9.0]), torch.tensor([[-1.0], [0.3], [2.0]]), torch.tensor([0.2])
    narrow = poisson_lognormal(1e-4, 0.5)
    torch.testing.assert_close(
        narrow.log_prob(y, predictor, gamma), Poisson().log_prob(y, predictor, gamma), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(narrow.log_prior(gamma), Poisson(0.5).log_prior(gamma))


def test_mu_integrated_out_is_the_same_prior() -> None:
    rng = torch.Generator().manual_seed(0)
    rows = {"x": torch.randn(6, model.COLUMNS, generator=rng), "level": torch.tensor([0, 1, 2, 3, 4, 0])}
    predictor = Predictor(vertical_poisson.slopes_without_mu, rows)
    theta = torch.randn(predictor.n, generator=rng)
    eta, log_prior = predictor.evaluate(theta, {}, rows)
    sites = predictor.constrain(theta, {})
    sigma, beta = sites["sigma"], vertical_poisson.slopes(sites["mean"], sites["contrast"])
    torch.testing.assert_close(eta[:, 0], (rows["x"] * beta[rows["level"]]).sum(-1))
    one = torch.ones(model.LEVELS)
    expected = HalfNormal(torch.tensor(model.SCALE)).log_prob(sigma).sum() + sigma.log().sum()
    for d in range(model.COLUMNS):
        covariance = sigma[d] ** 2 * torch.diag(one) + model.SCALE**2 * torch.outer(one, one)
        expected = expected + MultivariateNormal(0 * one, covariance).log_prob(beta[:, d])
    # beta's first coordinate in the orthonormal basis is sqrt(LEVELS) times its mean.
    torch.testing.assert_close(log_prior - 0.5 * model.COLUMNS * math.log(model.LEVELS), expected)


def test_mu_has_its_exact_conditional() -> None:
    """p(mu, beta | sigma) / p(mu | beta, sigma) does not depend on mu."""
    sigma, beta = torch.tensor([0.3]), torch.tensor([[0.1], [0.5], [-0.2], [0.4], [0.3]])
    loc = vertical_poisson.mu_given(beta.mean(0), sigma, torch.zeros(1))
    sd = vertical_poisson.mu_given(beta.mean(0), sigma, torch.ones(1)) - loc

    def ratio(mu: Tensor) -> Tensor:
        joint = Normal(0.0, model.SCALE).log_prob(mu) + Normal(mu, sigma).log_prob(beta).sum(0)
        return joint - Normal(loc, sd).log_prob(mu)

    torch.testing.assert_close(ratio(torch.tensor([-1.0])), ratio(torch.tensor([0.7])))


@pytest.mark.later
def test_a_small_run_has_the_right_shapes() -> None:
    effort, rows = Effort(1, 1, 60, 6, 6, 1, 1, "traced"), []
    for number in range(2):
        data = model.simulate(number, 1.0, 60)
        for variant in VARIANTS if number == 0 else (PRIVATE, INTEGRATED):
            levels, found = fitted(effort, variant, data, 1.0)
            assert levels.mu.shape[1:] == (model.SILOS, model.COLUMNS)
            assert levels.beta.shape[1:] == (model.SILOS, model.LEVELS, model.COLUMNS)
            assert all(bool(torch.isfinite(v).all()) for v in (*levels, found.bounds))
            row = vertical_poisson.row("augmented", number, variant, 1.0, data, levels, levels, 0.0, 1.0)
            assert (row["mu"]["of"], row["beta"]["of"]) == (4, 20)
            rows.append(row)
    summary = vertical_poisson.summaries(rows)
    assert [(s["method"], s["data_sets"]) for s in summary][:2] == [(PRIVATE, 2), (VARIANTS[1], 1)]
    assert INTEGRATED in vertical_poisson.table({"summary": summary})
    curves = [(PRIVATE, 1.0, levels.mu[:, 0, 0], levels.beta[:, 0, 0, 0])]
    assert is_picture(png(curves, (0.0, 0.0), (1.0,), summary))


def test_coverage_counts_what_lies_inside() -> None:
    data = model.simulate(0, 1.0, 30)
    noise = 0.1 * torch.randn(4000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    off = data.beta.clone()
    off[0, :3] += 1.0  # six of twenty slopes ten sds away
    found = Levels(data.mu + noise[..., 0], off + noise)
    reference = Levels(data.mu + noise[..., 0], off + 2 * noise)
    row = vertical_poisson.row("augmented", 0, "m", 1.0, data, found, reference, None, 0.0)
    assert (row["mu"]["covered"], row["beta"]["covered"]) == (4, 14)
    assert row["mu"]["width_ratio"] == pytest.approx(1.0, abs=0.05)
    assert row["beta"]["width_ratio"] == pytest.approx(0.5, abs=0.03)
    (summary,) = vertical_poisson.summaries([row])
    assert summary["coverage"]["all"] == pytest.approx(18 / 24)
    assert summary["coverage"]["beta"] == pytest.approx(0.7)


@pytest.mark.slow
def test_the_quick_run_tells_the_methods_apart(tmp_path: Path) -> None:
    """z integrated out: the widths of NUTS; the amortised family: too narrow on its own model's data."""
    content = quick_run("vertical-poisson", "", tmp_path)
    assert 8 * 2000 < content["bytes"] <= 8 * 2010  # a number an area, and a few totals
    found = {s["method"]: s for s in content["summary"] if s["data"] == "augmented"}
    # NUTS's own quick draws are rough: its sds to some 15%.
    assert found[INTEGRATED]["width_ratio"]["beta"] == pytest.approx(1.0, abs=0.15)
    assert found[INTEGRATED]["coverage"]["beta"] > 0.8
    assert found[PRIVATE]["width_ratio"]["beta"] < 0.6
    assert found[PRIVATE]["coverage"]["beta"] < 0.6
