"""Mixed models by `sf.glmm` over sites of 13 to 200 records, beside NUTS on the pooled rows and meta-analysis.

Made-up tables: patients with one to six visits, a treatment, a time. NUTS samples the marginal posterior too, with
twice the fit's nodes: with patients' effects as latents it mixes badly (effective sample sizes of 200 in 2,000 draws),
and `tests/test_formula.py` holds the quadrature against brute force. Meta-analysis is what is done today: each site
maximises its own likelihood, and estimates are averaged by inverse variance. Its failures are sites whose maximum is
not there (a curvature that is no covariance, or an estimate that runs off).
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fvi import quadrature
from secure_fvi.aggregation import Masked
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.building import Machine, build_problem
from secure_fvi.dictionary import Column, Dictionary
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.federated_model import read_data
from secure_fvi.fitting import fit
from secure_fvi.formula import FAMILIES, Design
from secure_fvi.mixed_model import MixedModel, glmm, user_draws
from secure_fvi.runs.nuts import pooled_program, sample_nuts
from secure_fvi_lab.machine import commit, machine

#: Records of the smallest and the largest site.
SMALLEST, LARGEST = 13, 200
_MOST_VISITS = 6
#: Of a site's maximum: an estimate of a standardised coefficient beyond this has run off.
_FARTHEST = 8.0
_TRUE = {"b": (0.3, 0.5, -0.4), "sd": 0.8}

Table = dict[str, np.ndarray[Any, Any]]


def dictionary(family: str) -> Dictionary:
    wide = Column("number", low=-200, high=200, centre=0, scale=2)
    response = {
        "gaussian": wide, "bernoulli": Column("boolean"), "student": wide, "binomial": Column("integer", low=0, high=9),
        "ordinal": Column("category", levels=("none", "mild", "severe", "worst")),
    }.get(family, Column("integer", low=0))  # fmt: skip
    return Dictionary({
        "y": response, "time": Column("number", low=-2, high=2, unit="years", centre=0, scale=1),
        "arm": Column("category", levels=("usual", "new")), "patient": Column("id"),
        "n": Column("integer", low=1, high=9),
    })  # fmt: skip


def formula(family: str) -> str:
    return f"y{' | trials(n)' if family == 'binomial' else ''} ~ time + arm + (1 | patient)"


def tables(family: str, sites: int, seed: int = 0) -> list[Table]:
    """Rows by site, in a long table."""
    rng = np.random.default_rng([seed, sites, sorted(FAMILIES).index(family)])
    sizes = np.geomspace(SMALLEST, LARGEST, sites).round().astype(int)
    return [_table(family, int(size), rng) for size in sizes]


def _table(family: str, patients: int, rng: np.random.Generator) -> Table:
    visits = rng.integers(1, _MOST_VISITS + 1, patients)
    patient = np.repeat(np.arange(patients), visits)
    rows = len(patient)
    arm, when = rng.integers(0, 2, patients)[patient], rng.uniform(-2, 2, rows)
    b, sd = _TRUE["b"], _TRUE["sd"]
    eta = b[0] + b[1] * when + b[2] * arm + sd * rng.standard_normal(patients)[patient]  # type: ignore[index,operator]
    n = rng.integers(1, 10, rows)
    y = _drawn(family, eta, n, rng)
    return {"y": y, "time": when, "arm": np.array(["usual", "new"])[arm], "patient": patient, "n": n}


def _drawn(family: str, eta: Any, n: Any, rng: np.random.Generator) -> Any:
    p = 1 / (1 + np.exp(-eta))
    if family == "ordinal":
        u = np.log(1 / rng.uniform(size=len(eta)) - 1) + eta
        return np.array(["none", "mild", "severe", "worst"])[np.searchsorted([-0.5, 0.8, 2.0], u)]
    return {
        "gaussian": lambda: eta + rng.standard_normal(len(eta)),
        "student": lambda: eta + 0.8 * rng.standard_t(4, len(eta)),
        "bernoulli": lambda: rng.uniform(size=len(eta)) < p,
        "binomial": lambda: rng.binomial(n, p),
        "poisson": lambda: rng.poisson(np.exp(eta)),
        "negbinomial": lambda: rng.negative_binomial(2.0, 2.0 / (2.0 + np.exp(eta))),
    }[family]()


# ---- the three ways ----

Moments = dict[str, tuple[float, float]]


def moments(draws: dict[str, Tensor]) -> Moments:
    """Mean and sd by parameter, sds on the scale of their logarithms as well as their own."""
    return {name: (float(d.mean()), float(d.std())) for name, d in draws.items()}


def by_nuts(model: MixedModel, silos: list[Table], draws: int, warmup: int) -> tuple[Moments, dict[str, Any]]:
    """The posterior from all rows together."""
    ids = [f"silo-{j}" for j in range(len(silos))]
    laid = model.prepared(dict(zip(ids, silos, strict=True)))
    problem = _problem(model, laid)
    sites = [s.name for s in problem.layout.of("global")]
    rows = [read_data(laid[i], i, torch.float64)[1].rows for i in ids]
    with _finer():
        program = pooled_program(model, rows, ids, {})
        found = sample_nuts(program, model.record_plate, sites, warmup=warmup, draws=draws)
    flat = {name: v.reshape(-1, *v.shape[2:]) for name, v in found.sites.items()}
    said = {"seconds": round(found.seconds, 1), "r_hat": found.r_hat, "ess": found.ess}
    return moments(user_draws(model, flat)), said


@contextlib.contextmanager
def _finer() -> Iterator[None]:
    nodes = dict(quadrature.NODES)
    quadrature.NODES.update({size: 2 * n + 1 for size, n in nodes.items()})
    try:
        yield
    finally:
        quadrature.NODES.update(nodes)


def _problem(model: MixedModel, laid: dict[str, Any]) -> Any:
    schema = read_data(next(iter(laid.values())), "a", torch.float64)[0]
    return build_problem(model, schema, PVI(), ["a", "b"], 0, None, Machine(compile=False))


def by_fit(model: MixedModel, silos: list[Table], seed: int) -> tuple[Moments, dict[str, Any]]:
    """The default of `sf.fit`, under masked sums."""
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        result = fit(model, silos, None, Masked(), seed=seed)
    said = {"seconds": round(time.monotonic() - began, 1), "rounds": result.rounds, "converged": result.converged}
    return moments(user_draws(model, result.sample(20_000))), said


def by_meta_analysis(model: MixedModel, silos: list[Table]) -> tuple[Moments, int]:
    """Fixed effects by inverse variance over the sites' own maxima, and how many sites had none."""
    ids = [f"silo-{j}" for j in range(len(silos))]
    laid = model.prepared(dict(zip(ids, silos, strict=True)))
    problem = _problem(model, laid)
    found = [_maximum(problem, read_data(data, name, torch.float64)[1].rows) for name, data in laid.items()]
    good = [f for f in found if f is not None]
    if not good:
        return {}, len(found)
    precision = torch.stack([1 / f[1] for f in good]).sum(0)
    mean = torch.stack([f[0] / f[1] for f in good]).sum(0) / precision
    # The design is centred at 0 and scaled by 1: these are the user's units, an ordinal's without its intercept.
    names = [model.of.fixed.names[k] for k in model.of.kept]
    scale = model.of.response.scale
    pairs = zip(names, mean.tolist(), precision.rsqrt().tolist(), strict=True)
    return {n: (m * scale, s * scale) for n, m, s in pairs}, len(found) - len(good)


def _maximum(problem: Any, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Maximum and variances of the fixed effects from one site's likelihood; None where there is none."""
    size = len(next(iter(rows.values())))
    none = torch.zeros(0, dtype=torch.float64), torch.zeros(size, 0, dtype=torch.float64)

    def loss(z: Tensor) -> Tensor:
        return -problem.density.evaluate(z, none[0], none[1], {}, rows).records.sum()

    z = problem.start.z_global.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([z], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(z)
        value.backward()
        return value

    optimizer.step(closure)
    at = z.detach()
    slope = torch.func.grad(loss)
    curvature = torch.stack([(slope(at + 1e-4 * e) - slope(at - 1e-4 * e)) / 2e-4 for e in torch.eye(len(at)).double()])
    curvature = (curvature + curvature.mT) / 2
    lower, wrong = torch.linalg.cholesky_ex(curvature)
    p = problem.layout.of("global")[0].size
    if wrong or not torch.isfinite(at).all() or float(at.abs().max()) > _FARTHEST:
        return None
    return at[:p], torch.cholesky_inverse(lower).diagonal()[:p]


# ---- the command ----


def compare(family: str, sites: int, draws: int, warmup: int, seed: int = 0) -> dict[str, Any]:
    """One family at so many sites: largest error of a mean in reference sds, and ratios of sds."""
    model = glmm(formula(family), family, dictionary=dictionary(family))
    silos = tables(family, sites, seed)
    fitted, how = by_fit(model, silos, seed)
    reference, sampled = by_nuts(model, silos, draws, warmup)
    meta, failures = by_meta_analysis(model, silos)
    chosen = [n for n in reference if n in model.of.fixed.names or n.startswith("sd(") or "|" in n]
    errors = {n: (fitted[n][0] - reference[n][0]) / reference[n][1] for n in chosen}
    ratios = {n: fitted[n][1] / reference[n][1] for n in chosen}
    theirs = {n: (m - reference[n][0]) / reference[n][1] for n, (m, _) in meta.items()}
    return {
        "family": family, "sites": sites, "rows": sum(len(s["y"]) for s in silos),
        "error": max(map(abs, errors.values())), "ratio": [min(ratios.values()), max(ratios.values())],
        "errors": errors, "ratios": ratios, "fit": how, "nuts": sampled,
        "meta_analysis": max(map(abs, theirs.values()), default=math.nan), "meta_analysis_failures": failures,
    }  # fmt: skip


def time_design(rows: int, columns: int) -> dict[str, float]:
    """Seconds and additional memory of a design of numbers and levels."""
    import resource

    numbers = columns - 1 - 9
    named = {f"x{k}": Column("number", low=-3, high=3) for k in range(numbers)}
    named["place"] = Column("category", levels=tuple(f"p{k}" for k in range(10)))
    given = Dictionary(named)
    design = Design(" + ".join(named), "y ~ ...", given)
    rng = np.random.default_rng(0)
    frame: Table = {name: rng.uniform(-3, 3, rows) for name in named if name != "place"}
    frame["place"] = rng.integers(0, 10, rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.monotonic(), time.process_time()
    found = design.matrix(frame, rows)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    if found.shape != (rows, columns):
        raise InputError(f"the design has {found.shape[1]} columns, not {columns}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = {"gb_more": round((after - before) / 1e6, 2), "gb_in_all": round(after / 1e6, 2)}
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), **memory}


def measure(families: tuple[str, ...], sites: tuple[int, ...], draws: int, quick: bool) -> dict[str, Any]:
    """Rows of families and numbers of sites, none where `quick`, and a design."""
    rows = [] if quick else [compare(f, j, draws, max(100, draws // 3)) for f in families for j in sites]
    design = {"rows": 100_000 if quick else 1_000_000, **time_design(100_000 if quick else 1_000_000, 50)}
    return {"rows": rows, "design": design, "machine": machine(), "commit": commit()}


def lines(found: dict[str, Any]) -> list[str]:
    out = []
    for row in found["rows"]:
        low, high = row["ratio"]
        out.append(
            f"{row['family']:12} {row['sites']:3} sites {row['rows']:6} rows: error {row['error']:.3f} sds, sd ratio "
            f"{low:.2f} to {high:.2f}, {row['fit']['rounds']} rounds, converged {row['fit']['converged']}, "
            f"{row['fit']['seconds']:.0f} s; meta-analysis {row['meta_analysis']:.2f} sds, "
            f"{row['meta_analysis_failures']} sites without a fit; NUTS {row['nuts']['seconds']:.0f} s, R-hat "
            f"{row['nuts']['r_hat']:.3f}, ESS {row['nuts']['ess']:.0f}, by which its own standard errors are "
            f"{row['nuts']['ess'] ** -0.5:.2f} sds of a mean and {50 * (2 / row['nuts']['ess']) ** 0.5:.0f}% of an sd"
        )
    design = found["design"]
    cost = f"{design['seconds']} s ({design['cpu_seconds']} s of a processor), {design['gb_in_all']} GB"
    return [*out, f"design of {design['rows']} rows x 50: {cost}"]
