"""Mixed models by `sf.glmm` over sites of 13 to 200 records, beside NUTS on the pooled rows and meta-analysis.

Made-up tables: patients with one to six visits, a treatment, a time. The reference shares no code with the product:
NumPyro's NUTS on the formula written down again in JAX, patients' effects integrated out by quadrature around modes
of its own (with them as latents it has effective sample sizes of 200 in 2,000 draws). Meta-analysis is what is done
today: each site maximises its own likelihood, and estimates are averaged by inverse variance. Its failures are sites
whose maximum is not there (a curvature that is no covariance, or a coefficient that runs off); a group sd that goes to
0 is none, as lme4 has it ("singular").
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation import Masked
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.building import Machine, build_problem
from secure_fvi.dictionary import Column, Dictionary
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.federated_model import read_data
from secure_fvi.files import write_atomically
from secure_fvi.fitting import fit
from secure_fvi.formula import FAMILIES, Design
from secure_fvi.mixed_model import MixedModel, glmm, user_draws
from secure_fvi_lab.machine import commit, machine

#: Records of the smallest and the largest site.
SMALLEST, LARGEST = 13, 200
_MOST_VISITS = 6
#: Of a site's maximum: an estimate of a standardised coefficient beyond this has run off.
_FARTHEST = 8.0
#: Of the logarithm of an sd, beyond which it is taken for 0.
_EDGE = 3.0
_TRUE_B, _TRUE_SD = (0.3, 0.5, -0.4), 0.8
_OWN = {
    "gaussian": {"sigma": 1.0}, "student": {"sigma": 0.8, "nu": 4.0}, "negbinomial": {"shape": 2.0},
    "ordinal": {"none|mild": -0.5, "first gap": 1.3, "second gap": 1.2},
}  # fmt: skip
_GAPS = ("first gap", "second gap")
#: Of a measured response in the dictionary; levels of an ordinal.
_SCALE, LEVELS = 2.0, ("none", "mild", "severe", "worst")

Table = dict[str, np.ndarray[Any, Any]]


def dictionary(family: str) -> Dictionary:
    wide = Column("number", low=-200, high=200, centre=0, scale=_SCALE)
    response = {
        "gaussian": wide, "bernoulli": Column("boolean"), "student": wide, "binomial": Column("integer", low=0, high=9),
        "ordinal": Column("category", levels=LEVELS),
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
    b, sd = _TRUE_B, _TRUE_SD
    eta = b[0] + b[1] * when + b[2] * arm + sd * rng.standard_normal(patients)[patient]
    n = rng.integers(1, 10, rows)
    y = _drawn(family, eta, n, rng)
    return {"y": y, "time": when, "arm": np.array(["usual", "new"])[arm], "patient": patient, "n": n}


def _drawn(family: str, eta: Any, n: Any, rng: np.random.Generator) -> Any:
    p, own = 1 / (1 + np.exp(-eta)), _OWN.get(family, {})
    if family == "ordinal":
        u = np.log(1 / rng.uniform(size=len(eta)) - 1) + eta
        return np.array(LEVELS)[np.searchsorted(np.cumsum(list(own.values())), u)]
    return {
        "gaussian": lambda: eta + own["sigma"] * rng.standard_normal(len(eta)),
        "student": lambda: eta + own["sigma"] * rng.standard_t(own["nu"], len(eta)),
        "bernoulli": lambda: rng.uniform(size=len(eta)) < p,
        "binomial": lambda: rng.binomial(n, p),
        "poisson": lambda: rng.poisson(np.exp(eta)),
        "negbinomial": lambda: rng.negative_binomial(own["shape"], own["shape"] / (own["shape"] + np.exp(eta))),
    }[family]()


# ---- the three ways ----

Moments = dict[str, tuple[float, float]]


def moments(draws: dict[str, Tensor]) -> Moments:
    """Mean and sd by parameter, sds on the scale of their logarithms as well as their own."""
    return {name: (float(d.mean()), float(d.std())) for name, d in draws.items()}


def by_nuts(family: str, silos: list[Table], draws: int, warmup: int) -> dict[str, Any]:
    """The posterior from all rows together: "moments" by parameter, and how well they are known."""
    try:
        import jax
        import numpyro
        from numpyro import diagnostics
        from numpyro.infer import MCMC, NUTS, init_to_value
    except ModuleNotFoundError as error:
        raise InputError(f"the reference needs {error.name}: pip install './lab[benchmark]' in a checkout") from error
    jax.config.update("jax_enable_x64", True)
    began, cpu = time.monotonic(), time.process_time()
    program, start = _jax_program(family, silos)
    sampler = MCMC(
        NUTS(program, dense_mass=True, init_strategy=init_to_value(values=start)),
        num_warmup=warmup, num_samples=draws, num_chains=2, chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    sampler.run(jax.random.PRNGKey(0))
    found = {name: np.asarray(v) for name, v in sampler.get_samples(group_by_chain=True).items() if name != _SIGNED}
    return {
        "moments": {n: (float(v.mean()), float(v.std())) for n, v in found.items()},
        "ess": min(float(diagnostics.effective_sample_size(v)) for v in found.values()),
        "r_hat": max(float(diagnostics.split_gelman_rubin(v)) for v in found.values()),
        "draws": 2 * draws, "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1), "numpyro": numpyro.__version__,
    }  # fmt: skip


#: Nodes of the reference's quadrature, how much wider than a patient's effect they lie, and a grid to place them by.
_NODES, _WIDER, _GRID = 15, 1.25, np.linspace(-6, 6, 241)
_SD, _SIGNED = "sd(patient) (Intercept)", "sd or its negative"


def _jax_program(family: str, silos: list[Table]) -> tuple[Callable[[], None], dict[str, Any]]:
    """NumPyro's program of the formula under the priors that docs/formula.md has, in the user's units, and where to
    begin: at what the rows were drawn from. A patient's nodes lie where the effect is by these values, and stay."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from jax.scipy.special import logsumexp
    from numpyro import distributions as dist

    x, y, n, patient = _rows(family, silos)
    names = ["(Intercept)", "time", "arm[T.new]"]
    start = {**dict(zip(names, _TRUE_B, strict=True)), _SD: _TRUE_SD, **_OWN.get(family, {})}
    start |= {_SIGNED: _TRUE_SD}
    if family == "ordinal":  # thresholds are its intercepts
        names, x = names[1:], x[:, 1:]
        start |= {"none|mild": start["none|mild"] - start.pop("(Intercept)")}
    unit = _SCALE if family in ("gaussian", "student") else 1.0
    even = np.log([1 / 3, 1.0, 3.0])  # thresholds between four levels that are as likely

    def joint(eps: Any, values: Any) -> Any:
        """(patients, Q): log density of each one's rows and standardised effect."""
        eta = (x @ jnp.stack([values[name] for name in names]))[:, None] + values[_SD] * eps[patient]
        term = _log_density(family, y[:, None], n[:, None], eta, values)
        return jax.ops.segment_sum(term, patient, len(eps), indices_are_sorted=True) - 0.5 * eps**2

    heights = np.asarray(joint(np.tile(_GRID, (patient[-1] + 1, 1)), start))
    share = np.exp(heights - heights.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    centre = share @ _GRID
    width = _WIDER * np.sqrt(share @ _GRID**2 - centre**2)
    at, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    eps = centre[:, None] + width[:, None] * at
    log_weights = np.log(weights / weights.sum()) + 0.5 * at**2 + np.log(width)[:, None]

    def half_t() -> Any:
        return dist.FoldedDistribution(dist.StudentT(3.0, 0.0, 2.5 * unit))

    def program() -> None:
        values = {name: numpyro.sample(name, dist.Normal(0.0, 2.5 * unit)) for name in names}
        # Its sign changes nothing, and lets a chain pass through 0: by a logarithm 0 is infinitely far.
        signed = numpyro.sample(_SIGNED, dist.StudentT(3.0, 0.0, 2.5 * unit))
        values[_SD] = numpyro.deterministic(_SD, jnp.abs(signed))
        if family in ("gaussian", "student"):
            values["sigma"] = numpyro.sample("sigma", half_t())
        if family == "student":
            values["nu"] = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
        if family == "negbinomial":
            values["shape"] = numpyro.sample("shape", dist.InverseGamma(0.4, 0.3))
        if family == "ordinal":
            values["none|mild"] = cut = numpyro.sample("none|mild", dist.Normal(even[0], 2.5))
            for k, name in enumerate(_GAPS):
                values[name] = numpyro.sample(name, dist.LogNormal(np.log(even[k + 1] - even[k]), 1.0))
                cut = numpyro.deterministic(f"{LEVELS[k + 1]}|{LEVELS[k + 2]}", cut + values[name])
        numpyro.factor("y", logsumexp(joint(eps, values) + log_weights, 1).sum())

    return program, start


def _rows(family: str, silos: list[Table]) -> tuple[Any, Any, Any, Any]:
    """Design, response, trials and the patient's number of all rows."""
    first = np.cumsum([0, *(int(s["patient"].max()) + 1 for s in silos[:-1])])
    y, when, n, arm = (np.concatenate([s[name] for s in silos]) for name in ("y", "time", "n", "arm"))
    y = np.array([LEVELS.index(v) for v in y]) if family == "ordinal" else y.astype(float)
    patient = np.concatenate([s["patient"] + k for s, k in zip(silos, first, strict=True)])
    return np.stack([np.ones(len(y)), when, arm == "new"], -1), y, n, patient


def _log_density(family: str, y: Any, n: Any, eta: Any, values: Any) -> Any:
    """Of a row, but for what no parameter changes."""
    import jax.numpy as jnp
    from jax.nn import log_sigmoid, softplus
    from jax.scipy.special import gammaln

    if family == "gaussian":
        return -0.5 * ((y - eta) / values["sigma"]) ** 2 - jnp.log(values["sigma"])
    if family == "student":
        nu, r = values["nu"], (y - eta) / values["sigma"]
        size = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * jnp.log(nu) - jnp.log(values["sigma"])
        return size - (nu + 1) / 2 * jnp.log1p(r**2 / nu)
    if family == "poisson":
        return y * eta - jnp.exp(eta)
    if family == "negbinomial":
        r, both = values["shape"], jnp.logaddexp(jnp.log(values["shape"]), eta)
        return gammaln(y + r) - gammaln(r) + r * (jnp.log(r) - both) + y * (eta - both)
    if family == "ordinal":
        first, second, third = (values[name] for name in ("none|mild", *_GAPS))
        ends = jnp.stack([first - 1e3, first, first + second, first + second + third, first + 1e3])
        low, high = ends[y] - eta, ends[y + 1] - eta
        return log_sigmoid(high) + log_sigmoid(-low) + jnp.log(-jnp.expm1(low - high))
    return y * eta - (n if family == "binomial" else 1.0) * softplus(eta)


def _problem(model: MixedModel, laid: dict[str, Any]) -> Any:
    schema = read_data(next(iter(laid.values())), "a", torch.float64)[0]
    return build_problem(model, schema, PVI(), ["a", "b"], 0, None, Machine(compile=False))


def by_fit(model: MixedModel, silos: list[Table], seed: int) -> dict[str, Any]:
    """The default of `sf.fit`, under masked sums: "moments" by parameter, and how it went."""
    began, cpu = time.monotonic(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        result = fit(model, silos, None, Masked(), seed=seed)
    took = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    said = {"rounds": result.rounds, "converged": result.converged, "reason": result.convergence["reason"]}
    return {"moments": moments(user_draws(model, result.sample(20_000))), **took, **said}


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
    names = [site.name for site in problem.layout.of("global") for _ in range(site.size)]
    p = names.count("b")
    if not torch.isfinite(at).all() or float(at[[n == "b" for n in names]].abs().max()) > _FARTHEST:
        return None
    # Logarithms that ran off, as a group's sd that is 0, are where they are.
    free = torch.tensor([k for k, n in enumerate(names) if n == "b" or abs(float(at[k])) < _EDGE])
    slope = torch.func.grad(loss)
    steps = [1e-4 * e for e in torch.eye(len(at)).double()[free]]
    curvature = torch.stack([(slope(at + e) - slope(at - e)) / 2e-4 for e in steps])[:, free]
    lower, wrong = torch.linalg.cholesky_ex((curvature + curvature.mT) / 2)
    return None if wrong else (at[:p], torch.cholesky_inverse(lower).diagonal()[:p])


# ---- the command ----


def compare(family: str, sites: int, draws: int, folder: Path | None = None, seed: int = 0) -> dict[str, Any]:
    """One family at so many sites: largest error of a mean in reference sds, and ratios of sds, of fixed effects and
    group sds. `folder`: where the reference lies, or is put, and the comparison too."""
    return _once(folder, f"{family}-{sites}", lambda: _compared(family, sites, draws, folder, seed))


def _once(folder: Path | None, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns, or did: each part of a cell takes minutes, and is kept as soon as it is there."""
    kept = folder / f"{name}.json" if folder else None
    if kept and kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    found = make()
    if kept:
        write_atomically(kept, json.dumps(found, indent=1).encode())
    return found


def _compared(family: str, sites: int, draws: int, folder: Path | None, seed: int) -> dict[str, Any]:
    model = glmm(formula(family), family, dictionary=dictionary(family))
    silos = tables(family, sites, seed)
    fitted = _once(folder, f"fit-{family}-{sites}-{commit()}", lambda: by_fit(model, silos, seed))
    warmup = max(200, draws // 4)
    nuts = _once(folder, f"nuts-{family}-{sites}-{draws}", lambda: by_nuts(family, silos, draws, warmup))
    meta, failures = by_meta_analysis(model, silos)
    reference = nuts["moments"]
    chosen = [n for n in reference if n in model.of.fixed.names or n.startswith("sd(") or "|" in n]
    errors = {n: (fitted["moments"][n][0] - reference[n][0]) / reference[n][1] for n in chosen}
    ratios = {n: fitted["moments"][n][1] / reference[n][1] for n in chosen}
    theirs = {n: (m - reference[n][0]) / reference[n][1] for n, (m, _) in meta.items()}
    return {
        "family": family, "sites": sites, "rows": sum(len(s["y"]) for s in silos),
        "error": max(map(abs, errors.values())), "ratio": [min(ratios.values()), max(ratios.values())],
        "errors": errors, "ratios": ratios, "fit": fitted, "nuts": nuts,
        "meta_analysis": max(map(abs, theirs.values()), default=math.nan), "meta_analysis_failures": failures,
        "machine": machine(), "commit": commit(),
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


def measure(
    families: Sequence[str],
    sites: Sequence[int],
    draws: int,
    design: int,
    folder: Path | None,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """A row for each family and number of sites, and a design of so many rows, where any."""
    rows = []
    for j in sites:
        for family in families:
            rows.append(compare(family, j, draws, folder))
            say(_line(rows[-1]))
    found = {"rows": rows, "machine": machine(), "commit": commit()}
    return found | ({"design": {"rows": design, **time_design(design, 50)}} if design else {})


_HEADS = (
    "family       sites   rows   error  sd ratio     rounds  ends as        cpu s   meta-analysis      NUTS\n"
    "                             sds                                               sds  no fit    ESS  cpu s"
)


def _line(row: dict[str, Any]) -> str:
    (low, high), of, nuts = row["ratio"], row["fit"], row["nuts"]
    state = {True: "converged", False: "NOT converged", None: "not assessed"}[of["converged"]]
    return (
        f"{row['family']:12} {row['sites']:5} {row['rows']:6}   {row['error']:5.3f}  {low:.2f} to {high:.2f}  "
        f"{of['rounds']:5}  {state:13} {of['cpu_seconds']:6.0f}  {row['meta_analysis']:5.2f}  "
        f"{row['meta_analysis_failures']:6}  {nuts['ess']:5.0f}  {nuts['cpu_seconds']:5.0f}"
    )


def lines(found: dict[str, Any]) -> list[str]:
    out = []
    if rows := found["rows"]:
        least = min(row["nuts"]["ess"] for row in rows)
        out += [*_HEADS.splitlines(), *map(_line, rows)]
        known = f"{least**-0.5:.2f} sds of a mean, {50 * (2 / least) ** 0.5:.0f}% of an sd"
        out.append(
            f"NUTS: R-hat at most {max(r['nuts']['r_hat'] for r in rows):.3f}, own standard errors at most {known}"
        )
        out += sorted({f"{row['machine']}; commit {row['commit']}" for row in rows})
    if design := found.get("design"):
        cost = f"{design['seconds']} s ({design['cpu_seconds']} s of a processor), {design['gb_in_all']} GB"
        out.append(f"design of {design['rows']} rows x 50: {cost}")
    return out
