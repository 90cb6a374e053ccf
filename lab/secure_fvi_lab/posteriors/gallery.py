"""Models that nobody here wrote, made-up ones that are known for trouble, and their exact posteriors.

`python -m secure_fvi_lab.posteriors.gallery` computes `exact.json` again, means and sds of the pooled posterior by
quadrature, and `quantiles.json`, of some, by weighted draws (minutes). The log density there is Pyro's own, of the
program as it stands, or, where records have latents, of `marginal`, the same model with those integrated out; none of
it is this package's. Posteriordb's data and the moments of its reference draws are in `posteriordb.json`
(`diamonds.json`: 400 of its rows, to five digits).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to

import secure_fvi as sf

HERE = Path(__file__).parent
POSTERIORDB: dict[str, Any] = json.loads((HERE / "posteriordb.json").read_text())["posteriors"]
_FLAT = 1e4  # sd of what is flat in the Stan programs, a hundred times any posterior sd there
Rows = dict[str, Tensor]
Program = Callable[..., None]


class Entry(NamedTuple):
    """rows: all records. deal: the rows of each silo. marginal: the program without latents of records.
    nodes: of the quadrature, a dimension; 0: a grid, where the posterior is nowhere near normal. stated: moments of
    reference draws in `posteriordb.json`."""

    program: Program | sf.FederatedModel
    rows: Rows
    deal: list[Tensor]
    marginal: Program | None = None
    nodes: int = 24
    stated: str = ""
    linear: tuple[float, float] | None = None  # sds of the priors of beta and of a half-normal sigma: a sum over sigma

    @property
    def silos(self) -> list[Rows]:
        return [{name: value[part] for name, value in self.rows.items()} for part in self.deal]

    @property
    def pooled(self) -> Program:
        """The program of all records together, without latents that are not everybody's."""
        if self.marginal is not None:
            return self.marginal
        return self.program.fn if isinstance(self.program, sf.FederatedModel) else self.program


# ---- programs ----


def linear(width: float = _FLAT, scale: float = _FLAT, prior: Any = dist.HalfNormal) -> Program:
    def program(x: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(x.shape[1]), width).to_event(1))
        sigma = pyro.sample("sigma", prior(scale))
        with pyro.plate("r", len(y)):
            pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    return program


def _glm(observe: Callable[[Tensor, Any], Any], width: float = 2.5, size: bool = False) -> Program:
    """A regression whose likelihood is `observe(linear predictor, positive parameter)`."""

    def program(x: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(x.shape[1]), width).to_event(1))
        phi = pyro.sample("phi", dist.LogNormal(0.0, 1.0)) if size else None
        with pyro.plate("r", len(y)):
            pyro.sample("y", observe(x @ beta, phi), obs=y)

    return program


def _negative_binomial(eta: Tensor, phi: Any) -> Any:
    return dist.GammaPoisson(phi, phi * (-eta).exp())


def _schools(y: Tensor, sigma: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("r", len(y)):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * theta, sigma), obs=y)


def _schools_centred(y: Tensor, sigma: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("r", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def _schools_marginal(y: Tensor, sigma: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    pyro.sample("y", dist.Normal(mu, (tau**2 + sigma**2).sqrt()).to_event(1), obs=y)


def _counties(floor: Tensor, y: Tensor, present: Tensor) -> None:
    """A record is a county with its houses, of any number."""
    mu, slope = pyro.sample("mu", dist.Normal(0.0, 10.0)), pyro.sample("slope", dist.Normal(0.0, 10.0))
    tau, sigma = pyro.sample("tau", dist.HalfNormal(1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("counties", len(y)):
        own = pyro.sample("own", dist.Normal(mu, tau))
        mean = own[..., None] + slope * floor
        pyro.sample("y", dist.Normal(mean, sigma).mask(present > 0).to_event(1), obs=y)


def _county(county: Tensor, floor: Tensor, y: Tensor) -> None:
    """Of a silo that is one of them."""
    mu, slope = pyro.sample("mu", dist.Normal(0.0, 10.0)), pyro.sample("slope", dist.Normal(0.0, 10.0))
    tau, sigma = pyro.sample("tau", dist.HalfNormal(1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
    own = pyro.sample("own", dist.Normal(mu, tau))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(own + slope * floor, sigma), obs=y)


def _counties_marginal(county: Tensor, floor: Tensor, y: Tensor) -> None:
    mu, slope = pyro.sample("mu", dist.Normal(0.0, 10.0)), pyro.sample("slope", dist.Normal(0.0, 10.0))
    tau, sigma = pyro.sample("tau", dist.HalfNormal(1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
    which = torch.nn.functional.one_hot(county.long() - 1).double()
    n, left = which.sum(0), y - mu - slope * floor
    total, square = left @ which, left.square().sum()
    shrunk = (total.square() / (n + (sigma / tau) ** 2)).sum()
    log_det = (1 + n * (tau / sigma) ** 2).log().sum()
    pyro.factor("y", -len(y) * sigma.log() - 0.5 * log_det - 0.5 * (square - shrunk) / sigma**2)


def _funnel(y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    with pyro.plate("r", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, (v / 2).exp()))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def _funnel_marginal(y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    pyro.sample("y", dist.Normal(torch.zeros(len(y)), (v.exp() + 1).sqrt()).to_event(1), obs=y)


def _shared_groups(g: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(2.0))
    with pyro.plate("group", 4):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(theta[g.long()], 2.0), obs=y)


def _shared_groups_marginal(g: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(2.0))
    means = torch.stack([y[g == k].mean() for k in range(4)])
    pyro.sample("y", dist.Normal(mu.expand(4), (tau**2 + 16 / len(y)).sqrt()).to_event(1), obs=means)


def _poisson_glmm(year: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 5.0))
    with pyro.plate("r", len(y)):
        eps = pyro.sample("eps", dist.Normal(0.0, sigma))
        eta = beta[0] + beta[1] * year + beta[2] * year**2 + beta[3] * year**3 + eps
        pyro.sample("y", dist.Poisson(eta.exp()), obs=y)


def _poisson_glmm_marginal(year: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 5.0))
    node, weight = _hermite(16)
    eta = beta[0] + beta[1] * year + beta[2] * year**2 + beta[3] * year**3
    log = dist.Poisson((eta[:, None] + sigma * node).exp()).log_prob(y[:, None])
    pyro.factor("y", (log + weight.log()).logsumexp(1).sum())


def _surgical(n: Tensor, r: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    sigmasq = pyro.sample("sigmasq", dist.InverseGamma(0.001, 0.001))
    with pyro.plate("r_", len(r)):
        b = pyro.sample("b", dist.Normal(mu, sigmasq.sqrt()))
        pyro.sample("r", dist.Binomial(n, logits=b), obs=r)


def _surgical_marginal(n: Tensor, r: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    sigmasq = pyro.sample("sigmasq", dist.InverseGamma(0.001, 0.001))
    node, weight = _hermite(40)
    logits = mu + sigmasq.sqrt() * node
    log = r[:, None] * logits - n[:, None] * torch.nn.functional.softplus(logits)
    pyro.factor("r", (log + weight.log()).logsumexp(1).sum())


def _six_cities_marginal(smoke: Tensor, wheeze: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 10.0).to_event(1))
    omega = pyro.sample("omega", dist.Normal(0.0, 10.0))
    node, weight = _hermite(24)
    kinds, copies = torch.unique(torch.cat([smoke[:, None], wheeze], 1), dim=0, return_counts=True)
    smoke, wheeze = kinds[:, 0], kinds[:, 1:]
    age = torch.arange(-2.0, 2.0)
    logits = (beta[0] + beta[1] * smoke)[:, None] + (beta[2] + beta[3] * smoke)[:, None] * age
    logits = logits[:, None] + ((-omega).exp() * node)[:, None]
    log = (wheeze[:, None] * logits - torch.nn.functional.softplus(logits)).sum(2)
    pyro.factor("wheeze", (copies * (log + weight.log()).logsumexp(1)).sum())


def _mixture(y: Tensor) -> None:
    """posteriordb's low_dim_gauss_mix: the means in order."""
    low = pyro.sample("low", dist.Normal(0.0, 2.0))
    gap = pyro.sample("gap", dist.LogNormal(1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(torch.full((2,), 2.0)).to_event(1))
    theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
    weights = dist.Categorical(torch.stack([theta, 1 - theta]))
    with pyro.plate("r", len(y)):
        parts = dist.Normal(torch.stack([low, low + gap]), sigma)
        pyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y)


def _ordinal(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(0.0, 2.5))
    first = pyro.sample("first", dist.Normal(0.0, 2.5))
    gap = pyro.sample("gap", dist.LogNormal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        above = (beta * x[..., None] - torch.stack([first, first + gap])).sigmoid()  # P(y > 0), P(y > 1)
        edge = torch.ones_like(above[..., :1])
        probs = torch.cat([edge, above], -1) - torch.cat([above, 0 * edge], -1)
        pyro.sample("y", dist.Categorical(probs), obs=y)


def _beta_binomial(n: Tensor, r: Tensor) -> None:
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    size = pyro.sample("size", dist.LogNormal(2.0, 1.0))
    with pyro.plate("r_", len(r)):
        pyro.sample("r", dist.BetaBinomial(share * size, (1 - share) * size, n), obs=r)


def _censored(x: Tensor, time: Tensor, seen: Tensor) -> None:
    """Weibull survival: a death counts its density, a censored time its survival."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    hazard = (time.log() - beta[0] - beta[1] * x) * shape
    with pyro.plate("r", len(time)):
        pyro.factor("life", seen * (shape.log() + hazard - time.log()) - hazard.exp())


def _two_signs(y: Tensor) -> None:
    """The posterior of a is the same at a and -a: two modes, mean 0."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(a**2, 1.0), obs=y)


def _product(y: Tensor) -> None:
    """The posterior is a cross: either factor may be near zero, and both may change sign."""
    a, b = pyro.sample("a", dist.Normal(0.0, 1.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(a * b, 1.0), obs=y)


def _banana(y: Tensor) -> None:
    a, b = pyro.sample("a", dist.Normal(0.0, 2.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(a + b**2, 0.7), obs=y)


def _labels(y: Tensor) -> None:
    """Two components in no order: which is which may change."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("r", len(y)):
        second = pyro.sample("second", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(torch.where(second == 1, mean[..., 1], mean[..., 0]), 1.0), obs=y)


def _labels_marginal(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    pyro.factor("y", torch.logaddexp(*(dist.Normal(mean[k], 1.0).log_prob(y) for k in range(2))).sum())


def _two_camps(y: Tensor) -> None:
    """A Cauchy's location between two groups of records: two modes."""
    at = pyro.sample("at", dist.Normal(0.0, 10.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Cauchy(at, 1.0), obs=y)


def _against_the_prior(y: Tensor) -> None:
    """Beside where the records are, a mode where the prior is, with a scale that takes them for noise."""
    mu, sigma = pyro.sample("mu", dist.Cauchy(0.0, 1.0)), pyro.sample("sigma", dist.HalfCauchy(1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def _mostly_zeros(x: Tensor, y: Tensor) -> None:
    """Zero-inflated counts, by a factor."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    with pyro.plate("r", len(y)):
        seen = (1 - gate).log() + dist.Poisson((x @ beta).exp()).log_prob(y)
        pyro.factor("counts", torch.where(y == 0, torch.logaddexp(seen, gate.log()), seen))


def _autoregression(y: Tensor, present: Tensor) -> None:
    """A short series a record, of its own length: each value follows from the one before it."""
    phi, sigma = pyro.sample("phi", dist.Uniform(-1.0, 1.0)), pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("r", len(y)):
        step = dist.Normal(phi * y[..., :-1], sigma).mask(present[..., 1:].bool())
        pyro.sample("y", step.to_event(1), obs=y[..., 1:])


def _autoregression_marginal(y: Tensor, present: Tensor) -> None:
    phi, sigma = pyro.sample("phi", dist.Uniform(-1.0, 1.0)), pyro.sample("sigma", dist.HalfNormal(2.0))
    pyro.factor("y", (dist.Normal(phi * y[:, :-1], sigma).log_prob(y[:, 1:]) * present[:, 1:]).sum())


def _weighted(x: Tensor, w: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("r", len(y)), pyro.poutine.scale(scale=w):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def _dirichlet_multinomial(y: Tensor) -> None:
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    size = pyro.sample("size", dist.LogNormal(1.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.DirichletMultinomial(size * share, total_count=12), obs=y)


def _shares(x: Tensor, y: Tensor) -> None:
    """Beta regression."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    size, mean = pyro.sample("size", dist.Gamma(2.0, 0.1)), (x @ beta).sigmoid()
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Beta(mean * size, (1 - mean) * size), obs=y)


def _tails(y: Tensor) -> None:
    """How heavy a Student-t's tails are is to be found as well."""
    mu, sigma = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("sigma", dist.HalfNormal(3.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.StudentT(nu, mu, sigma), obs=y)


def _visits(y: Tensor) -> None:
    """Three visits a record, in a plate of their own, around the record's level."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("r", len(y), dim=-2):
        level = pyro.sample("level", dist.Normal(mu, tau))
        with pyro.plate("visits", y.shape[-1], dim=-1):
            pyro.sample("y", dist.Normal(level, sigma), obs=y)


def _visits_marginal(y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    mean, visits = y.mean(1), y.shape[1]
    within = -len(y) * (visits - 1) * sigma.log() - (y - mean[:, None]).square().sum() / (2 * sigma**2)
    pyro.factor("y", dist.Normal(mu, (tau**2 + sigma**2 / visits).sqrt()).log_prob(mean).sum() + within)


def _inflated(x: Tensor, y: Tensor) -> None:
    """Zero-inflated negative binomial counts, by the library's own distribution."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    gate, size = pyro.sample("gate", dist.Beta(2.0, 2.0)), pyro.sample("size", dist.Gamma(2.0, 1.0))
    with pyro.plate("r", len(y)):
        logits = x @ beta - size.log()
        pyro.sample("y", dist.ZeroInflatedNegativeBinomial(size, logits=logits, gate=gate), obs=y)


def _hazards(x: Tensor, time: Tensor, died: Tensor) -> None:
    """Piecewise exponential survival: the rate changes at 1 and at 3."""
    rate = pyro.sample("rate", dist.Normal(-torch.ones(3), 2.0).to_event(1))
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
    start, width = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 1e6])
    spent = torch.minimum((time[..., None] - start).clamp(min=0.0), width)
    last = (time[..., None] >= start) & (time[..., None] < start + width)
    with pyro.plate("r", len(time)):
        hazard = (last * rate).sum(-1) + beta * x
        pyro.factor("life", died * hazard - (spent * rate.exp()).sum(-1) * (beta * x).exp())


def _frailty(x: Tensor, time: Tensor, died: Tensor) -> None:
    """A record is a family of three, whose rates share a Gamma frailty."""
    beta, rate = pyro.sample("beta", dist.Normal(0.0, 2.0)), pyro.sample("rate", dist.LogNormal(-1.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("r", len(time)):
        frail = pyro.sample("frail", dist.Gamma(1 / spread, 1 / spread))
        hazard = frail[..., None] * rate * (beta * x).exp()
        pyro.factor("life", (died * hazard.log() - hazard * time).sum(-1))


def _frailty_marginal(x: Tensor, time: Tensor, died: Tensor) -> None:
    beta, rate = pyro.sample("beta", dist.Normal(0.0, 2.0)), pyro.sample("rate", dist.LogNormal(-1.0, 1.0))
    k = 1 / pyro.sample("spread", dist.HalfNormal(1.0))
    deaths, exposed = died.sum(1), (rate * (beta * x).exp() * time).sum(1)
    log = (died * (rate.log() + beta * x)).sum(1) + torch.lgamma(k + deaths) - torch.lgamma(k)
    pyro.factor("life", (log + k * k.log() - (k + deaths) * (k + exposed).log()).sum())


def _abundance(y: Tensor) -> None:
    """Animals at a site, of which each of three visits sees a share: only their product is well known."""
    size, seen = pyro.sample("size", dist.Gamma(2.0, 0.2)), pyro.sample("seen", dist.Beta(1.0, 1.0))
    with pyro.plate("r", len(y)):
        n = torch.arange(41.0)[:, None]
        possible = torch.maximum(n, y[..., None, :])  # where fewer are there than were seen, a number for the gradient
        log = dist.Binomial(possible, seen, validate_args=False).log_prob(y[..., None, :]).sum(-1)
        there = (n >= y[..., None, :]).all(-1)
        log = torch.where(there, log + dist.Poisson(size).log_prob(n[:, 0]), -1e30)
        pyro.factor("visits", log.logsumexp(-1))


def _shared_labs(y: Tensor) -> None:
    """A record is a laboratory with a precision of its own, four measurements."""
    mu, spread = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("spread", dist.HalfNormal(1.0))
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    with pyro.plate("r", len(y)):
        log_sd = pyro.sample("log_sd", dist.Normal(level, spread))
        pyro.sample("y", dist.Normal(mu, log_sd.exp()[..., None].expand(y.shape)).to_event(1), obs=y)


def _shared_labs_marginal(y: Tensor) -> None:
    mu, spread = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("spread", dist.HalfNormal(1.0))
    node, weight = _hermite(40)
    log_sd = pyro.sample("level", dist.Normal(0.0, 2.0)) + spread * node
    log = -4 * log_sd - 0.5 * (y - mu).square().sum(1)[:, None] * (-2 * log_sd).exp()
    pyro.factor("y", (log + weight.log()).logsumexp(1).sum())


def _shares_of_kinds(y: Tensor) -> None:
    kinds = pyro.sample("kinds", dist.Dirichlet(torch.full((4,), 0.5)))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Categorical(kinds), obs=y)


def _measured_badly(w: Tensor, y: Tensor) -> None:
    """Errors in variables: x is seen with noise, and y follows x."""
    a, b = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 5.0))
    centre, spread = pyro.sample("centre", dist.Normal(0.0, 5.0)), pyro.sample("spread", dist.HalfNormal(2.0))
    with pyro.plate("r", len(y)):
        x = pyro.sample("x", dist.Normal(centre, spread))
        pyro.sample("w", dist.Normal(x, 0.5), obs=w)
        pyro.sample("y", dist.Normal(a + b * x, 0.3), obs=y)


def _measured_badly_marginal(w: Tensor, y: Tensor) -> None:
    a, b = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 5.0))
    centre, spread = pyro.sample("centre", dist.Normal(0.0, 5.0)), pyro.sample("spread", dist.HalfNormal(2.0))
    of_w = spread**2 + 0.25
    slope, left = b * spread**2 / of_w, 0.09 + b**2 * spread**2 * 0.25 / of_w
    log = dist.Normal(centre, of_w.sqrt()).log_prob(w)
    log = log + dist.Normal(a + b * centre + slope * (w - centre), left.sqrt()).log_prob(y)
    pyro.factor("both", log.sum())


def _bound(x: Tensor, y: Tensor) -> None:
    """A correlation close to 1."""
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(rho * x, (1 - rho**2).sqrt()), obs=y)


def _normal(y: Tensor) -> None:
    mu, sigma = pyro.sample("mu", dist.Normal(0.0, 100.0)), pyro.sample("sigma", dist.HalfCauchy(5.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def _angle(y: Tensor) -> None:
    """Where the ends of the interval meet: part of the mass is across the cut."""
    mu, k = pyro.sample("mu", dist.Uniform(-math.pi, math.pi)), pyro.sample("k", dist.Gamma(2.0, 0.5))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.VonMises(mu, k), obs=y)


# ---- records ----


def _db(name: str) -> Rows:
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in POSTERIORDB[name]["data"].items()}


def _design(*columns: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(columns[0]), *columns], 1)


def _nes() -> Rows:
    d = _db("nes1996")
    ages = [(d["age_discrete"] == k).double() for k in (2, 3, 4)]
    return {
        "x": _design(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"]),
        "y": d["partyid7"],
    }


def _radon(counties: int) -> Rows:
    """Intercepts of the first counties, and floor: posteriordb's radon_county_intercept, reduced."""
    d = _db("radon_mn")
    d = {name: value[d["county_idx"] <= counties] for name, value in d.items()}
    county = torch.nn.functional.one_hot(d["county_idx"].long() - 1, counties).double()
    return {"x": torch.cat([county, d["floor_measure"][:, None]], 1), "y": d["log_radon"]}


def _diamonds() -> Rows:
    d = json.loads((HERE / "diamonds.json").read_text())
    return {"x": torch.tensor(d["X"], dtype=torch.float64), "y": torch.tensor(d["Y"], dtype=torch.float64)}


def _every(n: int, silos: int) -> list[Tensor]:
    return [torch.arange(j, n, silos) for j in range(silos)]


def _sizes(*sizes: int) -> list[Tensor]:
    return list(torch.arange(sum(sizes)).split(list(sizes)))


def _cut(values: Tensor, silos: int) -> list[Tensor]:
    """By value: no silo has seen what another has."""
    return list(values.argsort().tensor_split(silos))


def _six_cities() -> Rows:
    from secure_fvi.models.six_cities import load

    order = torch.randperm(537, generator=torch.Generator().manual_seed(1))
    return {name: value[order] for name, value in load().records.items()}


def _made(seed: int, n: int, d: int) -> tuple[torch.Generator, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return rng, torch.cat([torch.ones(n, 1), torch.randn(n, d - 1, generator=rng, dtype=torch.float64)], 1).double()


def _random(seed: int, family: Any) -> Tensor:
    """A draw, whatever the state of torch's own generator, which is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return family.sample()


def _entries() -> dict[str, Entry]:
    kidiq, mesquite, counts = _db("kidiq_interaction_raw"), _db("mesquite_raw"), _db("glmm_poisson")
    schools, surgical, mixture = _db("eight_schools_noncentred"), _db("surgical"), _db("low_dim_gauss_mix")
    hs, iq, score = kidiq["mom_hs"], kidiq["mom_iq"], kidiq["kid_score"]
    names = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
    logs = {name: mesquite[name].log() for name in names[:-1]}
    volume, log_weight = logs["diam1"] + logs["diam2"] + logs["canopy_height"], mesquite["weight"].log()
    four, three = _sizes(200, 134, 70, 30), _sizes(16, 15, 15)
    nes = _nes()
    ages = (nes["x"][:, 3:6] @ torch.tensor([1.0, 2.0, 3.0]).double()).long()
    radon, diamonds = _radon(12), _diamonds()

    def line(x: Tensor, y: Tensor, deal: list[Tensor], width: float = _FLAT, scale: float = _FLAT) -> Entry:
        return Entry(linear(width, scale), {"x": x, "y": y}, deal, linear=(width, scale))

    made: dict[str, Entry] = {
        "kidiq, raw": Entry(
            linear(_FLAT, 2.5, dist.HalfCauchy),
            {"x": _design(hs, iq, hs * iq), "y": score},
            four,
            stated="kidiq_interaction_raw",
        ),
        "kidscore_momhs": line(_design(hs), score, four),
        "kidscore_momiq": line(_design(iq), score, four),
        "mesquite, raw": Entry(
            linear(),
            {"x": _design(*(mesquite[n] for n in names)), "y": mesquite["weight"]},
            three,
            stated="mesquite_raw",
        ),
        "logmesquite": line(_design(*logs.values(), mesquite["group"]), log_weight, three),
        "logmesquite_logvolume": line(_design(volume), log_weight, three),
        "nes1996, by age": Entry(
            linear(100.0), nes, [torch.nonzero(ages == k)[:, 0] for k in range(4)], stated="nes1996"
        ),
        "diamonds, reduced": line(diamonds["x"], diamonds["y"], _every(len(diamonds["y"]), 4), 1.0, 10.0),
        "radon, reduced": line(radon["x"], radon["y"], _cut(radon["x"][:, :12].argmax(1), 4), 10.0, 1.0),
        "eight schools": Entry(_schools, schools, _sizes(3, 3, 2), _schools_marginal, 80),
        "eight schools, centred": Entry(_schools_centred, schools, _sizes(3, 3, 2), _schools_marginal, 80),
        "surgical": Entry(_surgical, surgical, _sizes(4, 4, 4), _surgical_marginal, 60),
        "poisson GLMM": Entry(_poisson_glmm, counts, _sizes(14, 13, 13), _poisson_glmm_marginal, 9, "glmm_poisson"),
        "normal mixture, cut by value": Entry(_mixture, mixture, _cut(mixture["y"], 3), None, 9),
    }
    d, grouped = _db("radon_mn"), sf.FederatedModel(_counties, "counties", group="county", most_rows=116)
    single = sf.FederatedModel(_county, "r", silo_sites=("own",))
    homes = {"county": d["county_idx"], "floor": d["floor_measure"], "y": d["log_radon"]}
    for name, program, silos in (
        ("radon, 85 counties in 8 silos", grouped, 8), ("radon, a silo a county", single, 85)
    ):  # fmt: skip
        deal = [torch.nonzero((d["county_idx"] - 1) % silos == j)[:, 0] for j in range(silos)]
        made[name] = Entry(program, homes, deal, _counties_marginal, 12)
    sizes = (5 + (7 * torch.arange(200)) % 26).tolist()
    _, x = _made(13, sum(sizes), 3)
    y = _random(82, dist.Bernoulli(logits=x @ torch.tensor([-0.5, 0.7, 0.3]).double()))
    made["200 silos of 5 to 30"] = Entry(
        _glm(lambda eta, _: dist.Bernoulli(logits=eta)), {"x": x, "y": y}, _sizes(*sizes), nodes=12
    )
    from secure_fvi.models.six_cities import six_cities

    cities = _six_cities()
    made["six cities, 10 silos"] = Entry(six_cities, cities, _every(537, 10), _six_cities_marginal, 9)

    rng, x = _made(1, 60, 3)
    x = torch.cat([x, x[:, 1:2] + 0.03 * torch.randn(60, 1, generator=rng)], 1)
    made["collinear columns"] = line(x, _random(11, dist.Normal(x[:, 0] + 2 * x[:, 1], 0.5)), _every(60, 3), 5.0, 2.0)
    rng, x = _made(2, 60, 4)
    x = x * torch.tensor([1.0, 1e-3, 1.0, 1e4]) + torch.tensor([0.0, 0.02, 50.0, 3e4])
    made["raw scales"] = line(
        x, _random(12, dist.Normal(500 * x[:, 1] + 1e-4 * x[:, 3], 1.0)), _every(60, 3), 1e3, 10.0
    )
    z = _random(13, dist.Normal(torch.zeros(30), 1.5))
    made["funnel"] = Entry(
        _funnel, {"y": z + _random(14, dist.Normal(torch.zeros(30), 1.0))}, _every(30, 3), _funnel_marginal, 80
    )
    _, x = _made(3, 60, 2)
    y = x @ torch.tensor([1.0, -0.5]) + 0.3 * _random(15, dist.StudentT(2.0, torch.zeros(60)))
    student = _glm(lambda eta, phi: dist.StudentT(4.0, eta, phi), size=True)
    made["Student-t regression"] = Entry(student, {"x": x, "y": y}, _sizes(35, 15, 10))
    _, x = _made(4, 80, 2)
    y = _random(16, _negative_binomial(x @ torch.tensor([1.0, 0.5]), torch.tensor(2.0)))
    made["negative binomial"] = Entry(_glm(_negative_binomial, size=True), {"x": x, "y": y}, _every(80, 4))
    u = _random(17, dist.Normal(torch.zeros(80), 1.0))
    y = _random(18, dist.OrderedLogistic(u, torch.tensor([-0.7, 0.8]))).double()
    made["ordinal"] = Entry(_ordinal, {"x": u, "y": y}, _cut(y + 0.01 * u, 3))
    n = torch.arange(24) % 7 + 4.0
    made["beta-binomial"] = Entry(
        _beta_binomial, {"n": n, "r": _random(19, dist.BetaBinomial(3.0, 5.0, n))}, _every(24, 3), nodes=40
    )
    _, x = _made(5, 60, 2)
    gamma = _glm(lambda eta, phi: dist.Gamma(phi, phi * (-eta).exp()), size=True)
    y = _random(20, dist.Gamma(3.0, 3.0 * (-(x @ torch.tensor([1.0, 0.4]))).exp()))
    made["Gamma GLM"] = Entry(gamma, {"x": x, "y": y}, _sizes(30, 20, 10))
    u, life = _random(21, dist.Normal(torch.zeros(60), 1.0)), _random(22, dist.Weibull(torch.ones(60), 1.5))
    life, end = life * (0.5 * u).exp(), 0.3 + 0.03 * torch.arange(60)
    seen = (life <= end).double()
    rows = {"x": u, "time": torch.minimum(life, end), "seen": seen}
    made["censored by factor"] = Entry(_censored, rows, _every(60, 3))
    y = 2.0 + _random(23, dist.Normal(torch.zeros(12), 1.0))
    made["two modes"] = Entry(_two_signs, {"y": y}, _every(12, 3), nodes=0)
    _, x = _made(6, 26, 2)
    poisson = _glm(lambda eta, _: dist.Poisson(eta.exp()))
    y = _random(24, dist.Poisson((x @ torch.tensor([1.0, 0.5])).exp()))
    made["tiny silos"] = Entry(poisson, {"x": x, "y": y}, _sizes(2, 3, 1, 2, 4, 2, 3, 1, 5, 3))
    y = y.clone()
    y[:6] = 0
    made["a silo of zeros"] = Entry(poisson, {"x": x, "y": y}, _sizes(6, 10, 10))
    _, x = _made(8, 50, 2)
    probit = _glm(lambda eta, _: dist.Bernoulli(0.5 * torch.erfc(-eta / 2**0.5)))
    y = _random(25, dist.Bernoulli(logits=1.5 * x @ torch.tensor([0.5, 1.0])))
    made["probit"] = Entry(probit, {"x": x, "y": y}, _cut(x[:, 1], 3))
    _, x = _made(9, 40, 3)
    waiting = _glm(lambda eta, _: dist.Exponential((-eta).exp()), width=5.0)
    y = _random(26, dist.Exponential((-(x @ torch.tensor([2.0, 0.5, -0.5]))).exp()))
    made["waiting times"] = Entry(waiting, {"x": x, "y": y}, _sizes(20, 15, 5))
    _, x = _made(7, 40, 2)
    logistic = _glm(lambda eta, _: dist.Bernoulli(logits=eta))
    made["separation"] = Entry(logistic, {"x": x, "y": (x[:, 1] > 0).double()}, _every(40, 3), nodes=60)
    for value in (*_other_kinds().items(), *_of_a_statistician().items()):
        made.setdefault(*value)
    return {k: v._replace(rows={name: value.double() for name, value in v.rows.items()}) for k, v in made.items()}


def _other_kinds() -> dict[str, Entry]:
    """Posteriors far from a normal's, and programs with what the others have not: factors, masks, weights, plates."""
    made, unit = {}, lambda seed, n: _random(seed, dist.Normal(torch.zeros(n), 1.0))
    made["product of two"] = Entry(_product, {"y": 0.8 + unit(31, 9)}, _every(9, 3), nodes=0)
    made["banana"] = Entry(_banana, {"y": 0.5 + unit(32, 9)}, _every(9, 3), nodes=0)
    y = torch.cat([unit(33, 15) - 1.5, unit(34, 15) + 1.5])
    made["labels switch"] = Entry(_labels, {"y": y}, _cut(y, 3), _labels_marginal, nodes=0)
    y = torch.tensor([-6.0, -5.5, -5.0, 5.0, 5.5, 6.1])
    made["two camps"] = Entry(_two_camps, {"y": y}, _every(6, 3), nodes=0)
    y = torch.tensor([10.0, 10.5, 9.8, 10.2])
    made["against the prior"] = Entry(_against_the_prior, {"y": y}, _every(4, 4), nodes=0)
    _, x = _made(10, 60, 2)
    y = _random(35, dist.Poisson((x @ torch.tensor([0.8, 0.5])).exp())) * _random(
        36, dist.Bernoulli(torch.full((60,), 0.7))
    )
    made["zero-inflated by factor"] = Entry(_mostly_zeros, {"x": x, "y": y}, _cut(y + 0.01 * x[:, 1], 4))
    steps = unit(37, 100).reshape(20, 5)
    for t in range(1, 5):
        steps[:, t] += 0.6 * steps[:, t - 1]
    present = (torch.arange(5) < (2 + torch.arange(20) % 4)[:, None]).double()
    rows = {"y": steps * present, "present": present}
    made["autoregression, ragged"] = Entry(_autoregression, rows, _every(20, 3), _autoregression_marginal)
    _, x = _made(11, 30, 2)
    w = _random(38, dist.Uniform(torch.full((30,), 0.2), 3.0))
    made["weights"] = Entry(_weighted, {"x": x, "w": w, "y": x.sum(1) + unit(39, 30)}, _every(30, 3))
    chance = _random(40, dist.Dirichlet(torch.tensor([0.8, 1.2, 2.0]).expand(30, 3)))
    y = _random(41, dist.Categorical(chance).expand([12, 30])).T
    y = torch.nn.functional.one_hot(y, 3).sum(1)
    made["Dirichlet-multinomial"] = Entry(_dirichlet_multinomial, {"y": y}, _every(30, 4))
    mean = (x @ torch.tensor([0.5, 0.8])).sigmoid()
    y = _random(42, dist.Beta(8 * mean, 8 * (1 - mean))).clamp(1e-4, 1 - 1e-4)
    made["beta regression"] = Entry(_shares, {"x": x, "y": y}, _cut(x[:, 1], 3))
    made["Student-t, its tails unknown"] = Entry(
        _tails, {"y": 1 + _random(43, dist.StudentT(3.0, torch.zeros(40)))}, _every(40, 4)
    )
    y = 1 + 0.8 * unit(44, 18)[:, None] + unit(45, 54).reshape(18, 3)
    made["visits in a plate"] = Entry(_visits, {"y": y}, _every(18, 3), _visits_marginal)
    return made


def _of_a_statistician() -> dict[str, Entry]:
    """Survival, abundance, errors in variables, precisions, and what is next to a bound."""
    made, unit = {}, lambda seed, n: _random(seed, dist.Normal(torch.zeros(n), 1.0))
    _, x = _made(12, 90, 2)
    y = _random(51, _negative_binomial(x @ torch.tensor([1.2, 0.6]), torch.tensor(2.0)))
    y = y * _random(52, dist.Bernoulli(torch.full((90,), 0.7)))
    made["zero-inflated negative binomial"] = Entry(_inflated, {"x": x, "y": y}, _every(90, 3), nodes=20)
    u = _random(53, dist.Bernoulli(torch.full((80,), 0.5)))
    life, end = _random(54, dist.Exponential(0.4 * (0.7 * u).exp())), 1 + 0.05 * torch.arange(80)
    rows = {"x": u, "time": torch.minimum(life, end), "died": (life <= end).double()}
    made["piecewise hazards"] = Entry(_hazards, rows, _sizes(40, 30, 10), nodes=20)
    u, frail = unit(55, 90).reshape(30, 3), _random(56, dist.Gamma(torch.full((30, 1), 1.5), 1.5))
    life, end = _random(57, dist.Exponential(frail * 0.5 * (0.8 * u).exp())), 1 + 0.03 * torch.arange(90).reshape(30, 3)
    rows = {"x": u, "time": torch.minimum(life, end), "died": (life <= end).double()}
    made["gamma frailty"] = Entry(_frailty, rows, _every(30, 3), _frailty_marginal, 40)
    n = _random(58, dist.Poisson(torch.full((25, 1), 6.0))).expand(25, 3)
    made["abundance"] = Entry(
        _abundance, {"y": _random(59, dist.Binomial(n, torch.tensor(0.4)))}, _every(25, 3), nodes=80
    )
    y = 3 + (0.2 + 0.7 * unit(60, 24)).exp()[:, None] * unit(61, 96).reshape(24, 4)
    made["precisions of laboratories"] = Entry(_shared_labs, {"y": y}, _every(24, 4), _shared_labs_marginal, 40)
    y = torch.cat([torch.full((n,), float(k)) for k, n in enumerate((30, 9, 2))])
    made["an empty cell"] = Entry(_shares_of_kinds, {"y": y}, _sizes(30, 9, 2), nodes=60)
    u = 1 + 0.8 * unit(62, 40)
    rows = {"w": u + 0.5 * unit(63, 40), "y": 0.5 + 1.2 * u + 0.3 * unit(64, 40)}
    made["errors in variables"] = Entry(_measured_badly, rows, _every(40, 4), _measured_badly_marginal, 20)
    u = unit(65, 20)
    made["next to a bound"] = Entry(_bound, {"x": u, "y": 0.999 * u + 0.0447 * unit(66, 20)}, _every(20, 3))
    groups = torch.arange(40) % 4
    rows = {"g": groups, "y": 1 + 0.3 * unit(71, 4)[groups] + 2 * unit(72, 40)}
    made["shared groups of a funnel"] = Entry(
        _shared_groups, rows, _sizes(20, 10, 10), _shared_groups_marginal, nodes=0
    )
    made["five records"] = Entry(_normal, {"y": torch.tensor([-0.3, 0.1, 0.4, -0.9, 1.2])}, _sizes(2, 2, 1), nodes=0)
    y = unit(67, 15)
    y = (2.9 + 0.6 * (y - y.mean()) + math.pi) % (2 * math.pi) - math.pi
    made["an angle at its cut"] = Entry(_angle, {"y": y}, _every(15, 3), nodes=0)
    return made


def _in_double() -> dict[str, Entry]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _entries()
    finally:
        torch.set_default_dtype(before)


ENTRIES = _in_double()
_EXACT, _QUANTILES = HERE / "exact.json", HERE / "quantiles.json"


def reference(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and sds by site: of posteriordb's reference draws, or of `exact`, as they are kept."""
    if stated := ENTRIES[name].stated:
        both = POSTERIORDB[stated]
        kept = {site: {"mean": both["mean"][site], "sd": both["sd"][site]} for site in both["mean"]}
    else:
        kept = json.loads(_EXACT.read_text())[name]
    double = functools.partial(torch.tensor, dtype=torch.float64)
    return {site: (double(m["mean"]), double(m["sd"])) for site, m in kept.items()}


def quantiles(name: str) -> Moments:
    """5 and 95% quantiles by site, of `WITH_QUANTILES`."""
    kept, double = json.loads(_QUANTILES.read_text())[name], functools.partial(torch.tensor, dtype=torch.float64)
    return {site: (double(low), double(high)) for site, (low, high) in kept.items()}


def wrong_by(name: str, found: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of `found`, a mean and an sd by site: the largest error of a mean, in posterior sds; the smallest and the largest
    ratio of sds."""
    error, ratios = 0.0, []
    for site, (mean, sd) in reference(name).items():
        error = max(error, float(((found[site].mean - mean) / sd).abs().max()))
        ratios.append((found[site].sd / sd).reshape(-1))
    ratio = torch.cat(ratios)
    return error, float(ratio.min()), float(ratio.max())


# ---- exact moments ----

Moments = dict[str, tuple[Tensor, Tensor]]  # mean and sd by site
#: Of these the 5 and 95% quantiles are kept as well.
WITH_QUANTILES = (
    "eight schools", "eight schools, centred", "normal mixture, cut by value", "surgical", "poisson GLMM",
    "six cities, 10 silos",
)  # fmt: skip


def _hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes of a standard normal, and weights that add up to 1."""
    node, weight = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(node), torch.from_numpy(weight / weight.sum())


def _linear_moments(rows: Rows, width: float, scale: float) -> Moments:
    """beta given sigma is normal; sigma by a fine sum over its logarithm."""
    x, y = rows["x"], rows["y"]
    n, d = x.shape
    gram, cross, square = x.T @ x, x.T @ y, y @ y
    unit = gram.diagonal().sqrt()  # columns on one scale, for raw ones
    gram, cross = gram / torch.outer(unit, unit), cross / unit
    prior = 1 / (width * unit) ** 2
    rest = (y - x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]).square().sum()
    centre = 0.5 * (rest / (n - d)).log()
    logs = torch.linspace(-1.5, 1.5, 1201).double() + centre
    log_w, means, seconds = [], [], []
    for s in logs.exp():
        precision = gram / s**2 + prior.diag()
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve((cross / s**2)[:, None], factor)[:, 0]
        residual = (square - 2 * mean @ cross + mean @ gram @ mean) / s**2 + (prior * mean**2).sum()
        evidence = -n * s.log() - factor.diagonal().log().sum() - 0.5 * residual
        log_w.append(evidence + s.log() - 0.5 * (s / scale) ** 2)
        means.append(mean)
        seconds.append(torch.cholesky_inverse(factor).diagonal() + mean**2)
    weight = torch.stack(log_w).softmax(0)
    beta = weight @ torch.stack(means)
    sd = (weight @ torch.stack(seconds) - beta**2).sqrt()
    sigma = weight @ logs.exp()
    return {"beta": (beta / unit, sd / unit), "sigma": (sigma, (weight @ logs.exp() ** 2 - sigma**2).sqrt())}


class _Density(NamedTuple):
    """A program's, of all records, at unconstrained z (d,)."""

    unpack: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    log_joint: Callable[[Tensor], Tensor]
    d: int

    def around(self) -> tuple[Tensor, Tensor]:
        """The mode (d,) and the root of the inverse curvature there."""
        mode = _mode(self.log_joint, self.d)
        return mode, torch.linalg.cholesky(torch.linalg.inv(-torch.func.hessian(self.log_joint)(mode)))


def _density(program: Program, rows: Rows) -> _Density:
    with torch.random.fork_rng():
        trace = pyro.poutine.trace(program).get_trace(**rows)
    sites = {
        name: (biject_to(site["fn"].support), site["value"])
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and type(site["fn"]).__name__ != "_Subsample"
    }
    shapes = {name: to.inv(value).shape for name, (to, value) in sites.items()}
    sizes = [shape.numel() for shape in shapes.values()]

    def unpack(z: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values, log_det = {}, z.new_zeros(())
        for (name, (to, _)), part in zip(sites.items(), z.split(sizes), strict=True):
            u = part.reshape(shapes[name])
            values[name] = to(u)
            log_det = log_det + to.log_abs_det_jacobian(u, values[name]).sum()
        return values, log_det

    def log_joint(z: Tensor) -> Tensor:
        values, log_det = unpack(z)
        return pyro.poutine.trace(pyro.poutine.condition(program, values)).get_trace(**rows).log_prob_sum() + log_det

    return _Density(unpack, log_joint, sum(sizes))


def _quadrature(program: Program, rows: Rows, nodes: int) -> Moments:
    """Gauss-Hermite in whitened unconstrained coordinates around the mode; over a fine grid in one dimension, and, with
    `nodes` 0, in two."""
    density = _density(program, rows)
    unpack, log_joint, d = density
    if d == 1 or not nodes:
        axis = torch.linspace(-12, 12, {1: 4801, 2: 961}[d]).double()
        z = torch.cartesian_prod(*[axis] * d).reshape(-1, d)
        log_w = torch.func.vmap(log_joint, chunk_size=20_000)(z).detach()
    else:
        mode, factor = density.around()
        node, weight = _hermite(nodes)
        keep = weight > 1e-22
        node, weight = node[keep], weight[keep].log()
        eps = torch.cartesian_prod(*[node] * d).double()
        base = torch.cartesian_prod(*[weight] * d).sum(1)
        wide = 1.25
        z = mode + wide * eps @ factor.T
        kept = base > base.max() - 40
        z, base, eps = z[kept], base[kept], eps[kept]
        log_w = torch.func.vmap(log_joint, chunk_size=500)(z).detach() + base + 0.5 * eps.square().sum(1)
    share = log_w.softmax(0)
    values = torch.func.vmap(lambda one: unpack(one)[0])(z)
    found: Moments = {}
    for name, value in values.items():
        mean = torch.tensordot(share, value, 1)
        found[name] = mean, (torch.tensordot(share, value**2, 1) - mean**2).sqrt()
    return found


def _tail_points(program: Program, rows: Rows, draws: int = 200_000) -> Moments:
    """5 and 95% quantiles by site, of draws of a Student-t around the mode, weighed by the posterior. Standard errors
    are some .01 posterior sds."""
    density = _density(program, rows)
    mode, factor = density.around()
    z, log_w = list[Tensor](), list[Tensor]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = dist.MultivariateStudentT(4.0, mode, 1.4 * factor)
        for _ in range(draws // 20_000):
            z.append(drawn.sample((20_000,)))
            log_w.append(torch.func.vmap(density.log_joint, chunk_size=500)(z[-1]).detach() - drawn.log_prob(z[-1]))
    share = torch.cat(log_w).nan_to_num(-math.inf).softmax(0)
    values, found = (
        torch.func.vmap(lambda one: density.unpack(one)[0])(torch.cat(z)),
        dict[str, tuple[Tensor, Tensor]](),
    )
    for name, value in values.items():
        ordered, order = value.reshape(len(share), -1).sort(0)
        below = share[order].cumsum(0)
        low, high = (ordered.gather(0, (below < p).sum(0, keepdim=True))[0] for p in (0.05, 0.95))
        found[name] = low.reshape(value.shape[1:]), high.reshape(value.shape[1:])
    return found


def _mode(log_joint: Callable[[Tensor], Tensor], d: int) -> Tensor:
    z = torch.zeros(d, requires_grad=True, dtype=torch.float64)
    optimizer = torch.optim.LBFGS([z], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -log_joint(z)
        loss.backward()
        return loss

    optimizer.step(closure)
    return z.detach()


def exact(name: str) -> Moments:
    """Means and sds of the posterior of all records together, by site."""
    entry = ENTRIES[name]
    with pyro.validation_enabled(False):
        if entry.linear:
            return _linear_moments(entry.rows, *entry.linear)
        return _quadrature(entry.pooled, entry.rows, entry.nodes)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    table = {}
    for key, value in ENTRIES.items():
        if not value.stated:
            table[key] = {site: {"mean": m.tolist(), "sd": s.tolist()} for site, (m, s) in exact(key).items()}
    _EXACT.write_text(json.dumps(table, indent=1) + "\n")
    points = {}
    with pyro.validation_enabled(False):
        for key in WITH_QUANTILES:
            of_sites = _tail_points(ENTRIES[key].pooled, ENTRIES[key].rows)
            points[key] = {site: [low.tolist(), high.tolist()] for site, (low, high) in of_sites.items()}
    _QUANTILES.write_text(json.dumps(points, indent=1) + "\n")
