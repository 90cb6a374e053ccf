"""Simulation-based calibration (Talts et al. 2018) of `sf.fit` by default, under masked sums.

Data sets come from the model's own prior; where a fit's draws are the posterior's, the rank of the number that made the
data among them is uniform. Ranks among 99 draws are counted in ten bins, of every fit, converged or not: to leave out
those that were hard would bend the rest. A model is called off where for some global number chi-square's p is under .01
over the numbers of all models, so that right fits are in one of a hundred runs of this command.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from scipy.stats import chisquare
from torch import Tensor

import secure_fvi as sf
from secure_fvi.errors import InputError, SecureFVIError, SecureFVIWarning
from secure_fvi_lab.machine import commit, machine

DRAWS, BINS, ALARM = 99, 10, 0.01


class Model(NamedTuple):
    program: Callable[..., None]  # of x (N, d) and y (N,), or None to draw it
    columns: int
    sizes: tuple[int, ...]
    silo_sites: tuple[str, ...] = ()


def _normal(x: Tensor, y: Tensor | None) -> None:
    mu, sigma = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("sigma", dist.LogNormal(0.0, 0.5))
    with pyro.plate("r", len(x)):
        pyro.sample("y", dist.Normal(mu + 0 * x[:, 0], sigma), obs=y)


def _logistic(x: Tensor, y: Tensor | None) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.5).to_event(1))
    with pyro.plate("r", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def _counts(x: Tensor, y: Tensor | None) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    size = pyro.sample("size", dist.LogNormal(0.5, 0.5))
    with pyro.plate("r", len(x)):
        pyro.sample("y", dist.GammaPoisson(size, size * (-(x @ beta)).exp()), obs=y)


def _levels(x: Tensor, y: Tensor | None) -> None:
    """A level of each silo's own: how far apart these are eight silos hardly tell."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    level = pyro.sample("level", dist.Normal(0.0, tau))
    with pyro.plate("r", len(x)):
        pyro.sample("y", dist.Normal(mu + level + 0 * x[:, 0], 1.0), obs=y)


MODELS = {
    "mean and sd": Model(_normal, 1, (5, 4, 3)),
    "logistic regression": Model(_logistic, 3, (20, 12, 8)),
    "negative binomial": Model(_counts, 2, (16, 14, 10)),
    "levels of eight silos": Model(_levels, 1, (3, 4, 5, 6, 3, 4, 5, 6), ("level",)),
}


def measure(names: tuple[str, ...], sets: int, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Ranks by model and number. tell: hears of each model as it ends."""
    if unknown := [name for name in names if name not in MODELS]:
        raise InputError(f"no model '{unknown[0]}'; these are: {', '.join(MODELS)}")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names or tuple(MODELS):
        began, ranks, ended = time.process_time(), dict[str, list[int]](), list[bool | None]()
        refused: list[str] = []
        for k in range(sets):
            try:
                one, converged = _ranked(MODELS[name], 100_000 * seed + k)
            except SecureFVIError as error:
                refused.append(str(error))
                continue
            ended.append(converged)
            for number, rank in one.items():
                ranks.setdefault(number, []).append(rank)
        tests = {number: float(chisquare(counted(r)).pvalue) for number, r in ranks.items()}
        seconds = round((time.process_time() - began) / sets, 1)
        found[name] = {"sets": sets, "converged": sum(e is True for e in ended), "refused": refused, "p": tests}
        found[name] |= {"ranks": ranks, "seconds": seconds}
        tell(_line(name, found[name]))
    return {"machine": machine(), "commit": commit(), "seed": seed, "models": found}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For a terminal: which are off; the rows were told before."""
    tests = {f"{m}: {n}": p for m, row in found["models"].items() for n, p in row["p"].items()}
    off = off_of(tests)
    yield f"smallest p of {len(tests)} numbers: {min(tests.values()):.3f}; off: {', '.join(off) or 'none'}"
    yield f"{found['machine']}, commit {found['commit']}"


def off_of(tests: dict[str, float]) -> list[str]:
    """Numbers whose p, of all, is under `ALARM`."""
    return [name for name, p in tests.items() if p < ALARM / len(tests)]


def counted(ranks: list[int]) -> list[int]:
    """Ranks from 0 to `DRAWS` by bin."""
    return torch.bincount(torch.tensor(ranks) * BINS // (DRAWS + 1), minlength=BINS).tolist()


def _line(name: str, row: dict[str, Any]) -> str:
    tests = ", ".join(f"{number} {p:.2f}" for number, p in row["p"].items())
    refused = f", {len(row['refused'])} refused ({row['refused'][0]})" if row["refused"] else ""
    return f"{name}: {row['converged']} of {row['sets']} converged{refused}; p of {tests}; {row['seconds']} s a fit"


def _ranked(model: Model, seed: int) -> tuple[dict[str, int], bool | None]:
    """The rank of each global number that made a data set among draws of the fit, and whether that converged."""
    with torch.random.fork_rng():
        pyro.set_rng_seed(seed)
        x = torch.cat([torch.ones(sum(model.sizes), 1), torch.randn(sum(model.sizes), model.columns - 1)], 1).double()
        values, silos = _made(model, x)
    federated = sf.FederatedModel(model.program, "r", silo_sites=model.silo_sites)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        result = sf.fit(federated, silos, None, sf.Masked(), seed=seed, compile=False, threads=1)
    ranks: dict[str, int] = {}
    for site, drawn in result.sample(DRAWS, seed).items():
        below = (drawn < values[site]).sum(0).reshape(-1).tolist()
        ranks |= {site if len(below) == 1 else f"{site}[{i}]": rank for i, rank in enumerate(below)}
    return ranks, result.converged


def _made(model: Model, x: Tensor) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Global sites from the prior, and each silo's records by them, with its own sites drawn anew."""
    silos, values = list[dict[str, Tensor]](), dict[str, Tensor]()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for part in x.split(model.sizes):
            trace = pyro.poutine.trace(pyro.poutine.condition(model.program, values)).get_trace(part, None)
            drawn = {n: s["value"] for n, s in trace.nodes.items() if s["type"] == "sample" and n != "r"}
            silos.append({"x": part, "y": drawn.pop("y")})
            values = values or {n: v for n, v in drawn.items() if n not in model.silo_sites}
    finally:
        torch.set_default_dtype(before)
    return values, silos
