"""The gallery's programs in NumPyro's words, for its guides and NUTS on all records in one place.

Written as NumPyro's users write them, with records' latents and the sites' names of the gallery, so that moments
compare. `secure_fvi_lab.bench.posteriors` alone imports this, where NumPyro is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from secure_fvi_lab.posteriors.gallery import ENTRIES

numpyro.enable_x64()
Program = Callable[..., None]


def twin(name: str) -> Callable[[], None] | None:
    """The entry's program with its records; None: it is not among these."""
    entry = ENTRIES[name]
    program = PROGRAMS.get(name) or (linear(*entry.linear) if entry.linear else None)
    return program and functools.partial(program, **{k: jnp.asarray(v.numpy()) for k, v in entry.rows.items()})


def linear(width: float = 1e4, scale: float = 1e4, prior: Any = dist.HalfNormal) -> Program:
    def program(x: Any, y: Any) -> None:
        beta = numpyro.sample("beta", dist.Normal(jnp.zeros(x.shape[1]), width).to_event(1))
        sigma = numpyro.sample("sigma", prior(scale))
        with numpyro.plate("r", len(y)):
            numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    return program


def _glm(observe: Callable[[Any, Any], Any], width: float = 2.5, size: bool = False) -> Program:
    def program(x: Any, y: Any) -> None:
        beta = numpyro.sample("beta", dist.Normal(jnp.zeros(x.shape[1]), width).to_event(1))
        phi = numpyro.sample("phi", dist.LogNormal(0.0, 1.0)) if size else None
        with numpyro.plate("r", len(y)):
            numpyro.sample("y", observe(x @ beta, phi), obs=y)

    return program


def _schools(y: Any, sigma: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("r", len(y)):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * theta, sigma), obs=y)


def _schools_centred(y: Any, sigma: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("r", len(y)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def _counties(county: Any, floor: Any, y: Any) -> None:
    mu, slope = numpyro.sample("mu", dist.Normal(0.0, 10.0)), numpyro.sample("slope", dist.Normal(0.0, 10.0))
    tau, sigma = numpyro.sample("tau", dist.HalfNormal(1.0)), numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("counties", 85):
        own = numpyro.sample("own", dist.Normal(mu, tau))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(own[county.astype(int) - 1] + slope * floor, sigma), obs=y)


def _funnel(y: Any) -> None:
    v = numpyro.sample("v", dist.Normal(0.0, 3.0))
    with numpyro.plate("r", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, jnp.exp(v / 2)))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def _shared_groups(g: Any, y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(2.0))
    with numpyro.plate("group", 4):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(theta[g.astype(int)], 2.0), obs=y)


def _poisson_glmm(year: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(4), 10.0).to_event(1))
    sigma = numpyro.sample("sigma", dist.Uniform(0.0, 5.0))
    with numpyro.plate("r", len(y)):
        eps = numpyro.sample("eps", dist.Normal(0.0, sigma))
        eta = beta[0] + beta[1] * year + beta[2] * year**2 + beta[3] * year**3 + eps
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def _surgical(n: Any, r: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 1000.0))
    sigmasq = numpyro.sample("sigmasq", dist.InverseGamma(0.001, 0.001))
    with numpyro.plate("r_", len(r)):
        b = numpyro.sample("b", dist.Normal(mu, jnp.sqrt(sigmasq)))
        numpyro.sample("r", dist.Binomial(n.astype(int), logits=b), obs=r)


def _mixture(y: Any) -> None:
    low = numpyro.sample("low", dist.Normal(0.0, 2.0))
    gap = numpyro.sample("gap", dist.LogNormal(1.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(jnp.full(2, 2.0)).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5.0, 5.0))
    weights = dist.Categorical(probs=jnp.stack([theta, 1 - theta]))
    with numpyro.plate("r", len(y)):
        parts = dist.Normal(jnp.stack([low, low + gap]), sigma)
        numpyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y)


def _six_cities(smoke: Any, wheeze: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(4), 10.0).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0.0, 10.0))
    with numpyro.plate("child", len(wheeze)):
        b = numpyro.sample("b", dist.Normal(0.0, jnp.exp(-omega)))
        intercept, slope = beta[0] + beta[1] * smoke + b, beta[2] + beta[3] * smoke
        logits = intercept[:, None] + slope[:, None] * jnp.arange(-2.0, 2.0)
        numpyro.sample("wheeze", dist.Bernoulli(logits=logits).to_event(1), obs=wheeze)


def _beta_binomial(n: Any, r: Any) -> None:
    share = numpyro.sample("share", dist.Beta(1.0, 1.0))
    size = numpyro.sample("size", dist.LogNormal(2.0, 1.0))
    with numpyro.plate("r_", len(r)):
        numpyro.sample("r", dist.BetaBinomial(share * size, (1 - share) * size, n), obs=r)


def _censored(x: Any, time: Any, seen: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    hazard = (jnp.log(time) - beta[0] - beta[1] * x) * shape
    numpyro.factor("life", (seen * (jnp.log(shape) + hazard - jnp.log(time)) - jnp.exp(hazard)).sum())


def _two_signs(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(a**2, 1.0), obs=y)


def _product(y: Any) -> None:
    a, b = numpyro.sample("a", dist.Normal(0.0, 1.0)), numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(a * b, 1.0), obs=y)


def _banana(y: Any) -> None:
    a, b = numpyro.sample("a", dist.Normal(0.0, 2.0)), numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(a + b**2, 0.7), obs=y)


def _labels(y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 3.0).to_event(1))
    with numpyro.plate("r", len(y)):
        numpyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(probs=jnp.full(2, 0.5)), dist.Normal(mean, 1.0)), obs=y
        )


def _two_camps(y: Any) -> None:
    at = numpyro.sample("at", dist.Normal(0.0, 10.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Cauchy(at, 1.0), obs=y)


def _against_the_prior(y: Any) -> None:
    mu, sigma = numpyro.sample("mu", dist.Cauchy(0.0, 1.0)), numpyro.sample("sigma", dist.HalfCauchy(1.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def _mostly_zeros(x: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    gate = numpyro.sample("gate", dist.Beta(1.0, 1.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(x @ beta)), obs=y)


def _autoregression(y: Any, present: Any) -> None:
    phi, sigma = numpyro.sample("phi", dist.Uniform(-1.0, 1.0)), numpyro.sample("sigma", dist.HalfNormal(2.0))
    step = dist.Normal(phi * y[:, :-1], sigma).mask(present[:, 1:].astype(bool))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", step.to_event(1), obs=y[:, 1:])


def _weighted(x: Any, w: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(2), 5.0).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("r", len(y)), numpyro.handlers.scale(scale=w):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def _shares(x: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    size, mean = numpyro.sample("size", dist.Gamma(2.0, 0.1)), jax.nn.sigmoid(x @ beta)
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Beta(mean * size, (1 - mean) * size), obs=y)


def _tails(y: Any) -> None:
    mu, sigma = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("sigma", dist.HalfNormal(3.0))
    nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.StudentT(nu, mu, sigma), obs=y)


def _visits(y: Any) -> None:
    mu, tau = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("r", len(y), dim=-2):
        level = numpyro.sample("level", dist.Normal(mu, tau))
        with numpyro.plate("visits", y.shape[-1], dim=-1):
            numpyro.sample("y", dist.Normal(level, sigma), obs=y)


def _hazards(x: Any, time: Any, died: Any) -> None:
    rate = numpyro.sample("rate", dist.Normal(-jnp.ones(3), 2.0).to_event(1))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0))
    start, width = jnp.array([0.0, 1.0, 3.0]), jnp.array([1.0, 2.0, 1e6])
    spent = jnp.minimum(jnp.maximum(time[:, None] - start, 0.0), width)
    last = (time[:, None] >= start) & (time[:, None] < start + width)
    hazard = (last * rate).sum(-1) + beta * x
    numpyro.factor("life", (died * hazard - (spent * jnp.exp(rate)).sum(-1) * jnp.exp(beta * x)).sum())


def _frailty(x: Any, time: Any, died: Any) -> None:
    beta, rate = numpyro.sample("beta", dist.Normal(0.0, 2.0)), numpyro.sample("rate", dist.LogNormal(-1.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("r", len(time)):
        frail = numpyro.sample("frail", dist.Gamma(1 / spread, 1 / spread))
    hazard = frail[:, None] * rate * jnp.exp(beta * x)
    numpyro.factor("life", (died * jnp.log(hazard) - hazard * time).sum())


def _shared_labs(y: Any) -> None:
    mu, spread = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("spread", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("r", len(y)):
        log_sd = numpyro.sample("log_sd", dist.Normal(level, spread))
        numpyro.sample("y", dist.Normal(mu, jnp.exp(log_sd)[:, None] + 0 * y).to_event(1), obs=y)


def _shares_of_kinds(y: Any) -> None:
    kinds = numpyro.sample("kinds", dist.Dirichlet(jnp.full(4, 0.5)))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Categorical(kinds), obs=y.astype(int))


def _measured_badly(w: Any, y: Any) -> None:
    a, b = numpyro.sample("a", dist.Normal(0.0, 5.0)), numpyro.sample("b", dist.Normal(0.0, 5.0))
    centre, spread = numpyro.sample("centre", dist.Normal(0.0, 5.0)), numpyro.sample("spread", dist.HalfNormal(2.0))
    with numpyro.plate("r", len(y)):
        x = numpyro.sample("x", dist.Normal(centre, spread))
        numpyro.sample("w", dist.Normal(x, 0.5), obs=w)
        numpyro.sample("y", dist.Normal(a + b * x, 0.3), obs=y)


def _bound(x: Any, y: Any) -> None:
    rho = numpyro.sample("rho", dist.Uniform(-1.0, 1.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(rho * x, jnp.sqrt(1 - rho**2)), obs=y)


def _normal(y: Any) -> None:
    mu, sigma = numpyro.sample("mu", dist.Normal(0.0, 100.0)), numpyro.sample("sigma", dist.HalfCauchy(5.0))
    with numpyro.plate("r", len(y)):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


_poisson = _glm(lambda eta, _: dist.Poisson(jnp.exp(eta)))
#: By the gallery's name; of those of `Entry.linear` the program follows from that.
PROGRAMS: dict[str, Program] = {
    "kidiq, raw": linear(scale=2.5, prior=dist.HalfCauchy),
    "mesquite, raw": linear(),
    "nes1996, by age": linear(100.0),
    "eight schools": _schools,
    "eight schools, centred": _schools_centred,
    "surgical": _surgical,
    "poisson GLMM": _poisson_glmm,
    "normal mixture, cut by value": _mixture,
    "six cities, 10 silos": _six_cities,
    "radon, 85 counties in 8 silos": _counties,
    "radon, a silo a county": _counties,
    "200 silos of 5 to 30": _glm(lambda eta, _: dist.Bernoulli(logits=eta)),
    "funnel": _funnel,
    "Student-t regression": _glm(lambda eta, phi: dist.StudentT(4.0, eta, phi), size=True),
    "negative binomial": _glm(lambda eta, phi: dist.GammaPoisson(phi, phi * jnp.exp(-eta)), size=True),
    "beta-binomial": _beta_binomial,
    "Gamma GLM": _glm(lambda eta, phi: dist.Gamma(phi, phi * jnp.exp(-eta)), size=True),
    "censored by factor": _censored,
    "two modes": _two_signs,
    "tiny silos": _poisson,
    "a silo of zeros": _poisson,
    "probit": _glm(lambda eta, _: dist.Bernoulli(0.5 * jax.scipy.special.erfc(-eta / 2**0.5))),
    "waiting times": _glm(lambda eta, _: dist.Exponential(jnp.exp(-eta)), width=5.0),
    "separation": _glm(lambda eta, _: dist.Bernoulli(logits=eta)),
    "product of two": _product,
    "banana": _banana,
    "labels switch": _labels,
    "two camps": _two_camps,
    "against the prior": _against_the_prior,
    "zero-inflated by factor": _mostly_zeros,
    "autoregression, ragged": _autoregression,
    "weights": _weighted,
    "beta regression": _shares,
    "Student-t, its tails unknown": _tails,
    "visits in a plate": _visits,
    "piecewise hazards": _hazards,
    "gamma frailty": _frailty,
    "precisions of laboratories": _shared_labs,
    "an empty cell": _shares_of_kinds,
    "errors in variables": _measured_badly,
    "next to a bound": _bound,
    "shared groups of a funnel": _shared_groups,
    "five records": _normal,
}
