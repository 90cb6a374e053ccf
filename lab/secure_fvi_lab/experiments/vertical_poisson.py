"""Multilevel Poisson regression over two silos of columns (Hassan et al. 2024, section 5.2): coverage of intervals.

2,000 areas on five levels of remoteness; the model as fitted is in `models/vertical_poisson.py`. Data sets from the
augmented-variable model ask whether 95% intervals of mu and beta cover; data sets from the paper's own model how much
too wide they are. NUTS with the auxiliary variables integrated out is the positive control of either question.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from pyro.distributions import HalfNormal, Normal
from torch import Tensor

from secure_fvi.algorithms.vertical import (
    Amortised,
    Integrated,
    Likelihood,
    MeanField,
    Poisson,
    Vertical,
    grouped_slopes,
)
from secure_fvi.algorithms.vertical.likelihoods import marginal
from secure_fvi.algorithms.vertical.predictors import Program
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.compiled import Mode
from secure_fvi.models.vertical_poisson import (
    AREAS,
    COLUMNS,
    LEVELS,
    RATE,
    SCALE,
    SILOS,
    Areas,
    predictors,
    simulate,
)
from secure_fvi.runs.marginals import density
from secure_fvi_lab.experiments import Experiment, Request, Row, lines_of, spread
from secure_fvi_lab.experiments.vertical_batched import POOLED, Fit, fit
from secure_fvi_lab.references import Draws, default_dtype, sample_nuts

RHO, RHOS = 1.0, (1.0, 2.0)  # of the augmented data; of the fits to data from the paper's model
NUTS_AUGMENTED, NUTS_TRUE = "nuts, augmented", "nuts, true model"
_FIRST_SEED = {"augmented": 100, "paper": 200}


class Effort(NamedTuple):
    """How long each method runs, on how many data sets from either model."""

    augmented: int
    paper: int
    areas: int
    rounds: int  # of fits that send z
    rounds_pooled: int  # of fits that send eta
    warmup: int
    draws: int
    mode: Mode


_FULL = Effort(20, 5, AREAS, 5_000, 1_500, 150, 400, "compiled")
_QUICK = Effort(2, 1, AREAS, 400, 300, 40, 60, "traced")


def _poisson(request: Request) -> tuple[Row, Figure]:
    effort = _QUICK if request.quick else _FULL
    with default_dtype(torch.float64):
        rows: list[Row] = []
        curves: list[Curve] = []
        same = effort._replace(augmented=0, paper=0)  # more data sets make no other anew
        for source, made, sets in (("augmented", augmented, effort.augmented), ("paper's", paper, effort.paper)):
            for k in range(sets):
                found = request.once(f"data set {k + 1} from the {source} model", same, partial(made, same, k))
                request.tell("    " + ", ".join(f"{r['method']} {_share(r):.0%}" for r in found["rows"]))
                rows += found["rows"]
                curves += [
                    (method, rho, torch.tensor(mu), torch.tensor(beta)) for method, rho, mu, beta in found["curves"]
                ]
        truth = simulate(_FIRST_SEED["paper"], 0.0, effort.areas)
    summary = summaries(rows)
    per_set = [_share(r) for r in rows if r["data"] == "augmented" and r["method"] == INTEGRATED]
    content = {
        "paper": "reasonable estimates of mu; beta's shape captured by amortised VI, wide under MCMC (no number)",
        "ours": {
            **spread(per_set),
            "what": "coverage of 95% intervals of mu and beta, z integrated out at the server and mu at the silos",
            "median": statistics.median(per_set),
            "standard_error": statistics.stdev(per_set) / math.sqrt(len(per_set)),
        },
        "bytes": sum(8 * b.size for b in Vertical().blocks(effort.areas, 1, 1)["auxiliary"]),
        "setting": (
            f"{effort.areas} areas, {SILOS} silos of 2 columns, prior scale {SCALE}, base rate {RATE}, rho = {RHO:g}; "
            f"{effort.rounds} rounds where z is sent, {effort.rounds_pooled} where eta is; bytes: upload a silo and "
            "round at 8 bytes a number"
        ),
        "summary": summary,
        "rows": rows,
    }
    return content, png(curves, (float(truth.mu[0, 0]), float(truth.beta[0, 0, 0])), RHOS, summary)


def augmented(effort: Effort, number: int) -> Row:
    """All variants on one data set from the augmented-variable model, beside NUTS: `rows`, and no `curves`."""
    data = simulate(_FIRST_SEED["augmented"] + number, RHO, effort.areas)
    exact, seconds = nuts(effort, data, math.sqrt(SILOS) * RHO)
    rows = [row("augmented", number, NUTS_AUGMENTED, RHO, data, exact, exact, None, seconds)]
    for variant in VARIANTS:
        rows.append(_fit_row("augmented", number, variant, RHO, data, fitted(effort, variant, data, RHO), exact))
    return {"rows": rows, "curves": []}


def paper(effort: Effort, number: int) -> Row:
    """Fits of the augmented-variable model to data without auxiliary variables, beside NUTS on the true model: `rows`,
    and of the first data set, which is drawn, `curves`. NUTS at the larger rho runs on that one alone."""
    data = simulate(_FIRST_SEED["paper"] + number, 0.0, effort.areas)
    true, seconds = nuts(effort, data, 0.0)
    found = fitted(effort, TRUE_MODEL, data, RHO)
    rows = [
        row("paper", number, NUTS_TRUE, 0.0, data, true, true, None, seconds),
        _fit_row("paper", number, TRUE_MODEL, 0.0, data, found, true),
    ]
    shown = [(NUTS_TRUE, 0.0, true), (TRUE_MODEL, 0.0, found[0])]
    for rho in RHOS:
        if rho == RHO or number == 0:
            wide, seconds = nuts(effort, data, math.sqrt(SILOS) * rho)
            rows.append(row("paper", number, NUTS_AUGMENTED, rho, data, wide, true, None, seconds))
            shown.append((NUTS_AUGMENTED, rho, wide))
        for variant in (PRIVATE, INTEGRATED):
            found = fitted(effort, variant, data, rho)
            rows.append(_fit_row("paper", number, variant, rho, data, found, true))
            shown.append((variant, rho, found[0]))
    drawn = [(method, rho, x.mu[:, 0, 0].tolist(), x.beta[:, 0, 0, 0].tolist()) for method, rho, x in shown]
    return {"rows": rows, "curves": drawn if number == 0 else []}


def nuts(effort: Effort, data: Areas, sd: float) -> tuple[Levels, float]:
    levels, found = sample(data, sd, effort.warmup, effort.draws)
    return levels, found.seconds


def _fit_row(
    source: str, number: int, method: str, rho: float, data: Areas, found: tuple[Levels, Fit], reference: Levels
) -> Row:
    levels, ended = found
    bound = float(ended.bounds[-10:].mean())
    return row(source, number, method, rho, data, levels, reference, bound, ended.seconds)


def row(
    source: str,
    number: int,
    method: str,
    rho: float,
    data: Areas,
    found: Levels,
    reference: Levels,
    bound: float | None,
    seconds: float,
) -> Row:
    """One method on one data set: intervals of mu (4) and beta (20) beside the truth and the reference's widths."""
    result: Row = {"data": source, "data_set": number, "method": method, "rho": rho}
    for name, truth in (("mu", data.mu), ("beta", data.beta)):
        mine, theirs = getattr(found, name).flatten(1), getattr(reference, name).flatten(1)
        low, high = torch.quantile(mine, mine.new_tensor([0.025, 0.975]), dim=0)  # central 95%
        width = (high - low) / (theirs.std(0) * 2 * 1.959964)
        inside = (low < truth.flatten()) & (truth.flatten() < high)
        result[name] = {
            "truth": _rounded(truth.flatten()),
            "mean": _rounded(mine.mean(0)),
            "low": _rounded(low),
            "high": _rounded(high),
            "covered": int(inside.sum()),
            "of": len(inside),
            "width_ratio": float(width.mean()),
            "error": float(((mine.mean(0) - theirs.mean(0)) / theirs.std(0)).abs().mean()),
            "slope": float(mine.mean(0) @ truth.flatten() / truth.flatten().square().sum()),
        }
    return {**result, "bound": bound, "seconds": round(seconds, 1)}


def summaries(rows: Iterable[Row]) -> list[Row]:
    """Coverage and widths by origin of the data, rho and method, over the data sets."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((r["data"], r["rho"], r["method"]), []).append(r)
    found = []
    for (source, rho, method), members in groups.items():
        shares = [_share(r) for r in members]
        entry: Row = {"data": source, "rho": rho, "method": method, "data_sets": len(members)}
        entry["coverage"] = {
            "all": statistics.mean(shares),
            # Intervals of one data set hang together; data sets do not.
            "standard_error": statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None,
            **{n: sum(r[n]["covered"] for r in members) / sum(r[n]["of"] for r in members) for n in ("mu", "beta")},
        }
        for key in ("width_ratio", "error", "slope"):
            entry[key] = {n: statistics.mean(r[n][key] for r in members) for n in ("mu", "beta")}
        entry["seconds"] = statistics.median(r["seconds"] for r in members)
        found.append(entry)
    return found


def table(content: Row) -> str:
    rows = []
    for s in content["summary"]:
        c, w, e = s["coverage"], s["width_ratio"], s["error"]
        se = f"{100 * c['standard_error']:.1f}" if c["standard_error"] is not None else ""
        cover = (f"{100 * c['all']:.1f}", se, f"{100 * c['mu']:.0f}", f"{100 * c['beta']:.0f}")
        beside = (f"{of[name]:.2f}" for of in (w, e) for name in ("mu", "beta"))
        rows.append((s["data"], s["method"], f"{s['rho']:g}", *cover, *beside, f"{s['seconds']:.0f}"))
    head = (
        "data", "method", "rho", "cover, %", "se", "mu", "beta", "width mu", "beta", "error mu", "beta", "s",
    )  # fmt: skip
    lines = lines_of(head, rows, left=2)
    lines.append("width: 95% intervals beside NUTS (of the augmented model above, of the true model below, its own sd)")
    lines.append("error: mean distance of posterior means from NUTS's, in its sds; s: median seconds of one data set")
    return "\n".join(lines)


def _share(r: Row) -> float:
    """Of a row's 24 intervals, those that cover."""
    return float(r["mu"]["covered"] + r["beta"]["covered"]) / (r["mu"]["of"] + r["beta"]["of"])


def _rounded(values: Tensor) -> list[float]:
    return [round(v, 5) for v in values.tolist()]


# ---- The variational fits of section 5.2 beside each other, each for silos of equal shape in one process ----
#
# In the first three the silos send z_j, drawn from q(z_j | theta_j). In the last two they send eta_j at a draw of
# theta_j, and the server, which holds the response, integrates the auxiliary variables out: what it answers is still
# one derivative a record. That mu is integrated out as well is a choice of each silo's own program.

PRIVATE, SHARED, MEAN_FIELD = "amortised", "amortised, response", "mean field"
MARGINAL, INTEGRATED = "z integrated", "z and mu integrated"
TRUE_MODEL = "true model, mean field"
VARIANTS = (PRIVATE, SHARED, MEAN_FIELD, MARGINAL, INTEGRATED)


def fitted(effort: Effort, variant: str, data: Areas, rho: float) -> tuple[Levels, Fit]:
    """`rho` has no meaning for TRUE_MODEL."""
    config = Vertical(
        rho=rho,
        response="shared" if variant == SHARED else "private",
        auxiliary=MeanField() if variant == MEAN_FIELD else Amortised(),
        rounds=effort.rounds,
    )
    if variant == TRUE_MODEL:
        config = replace(POOLED, family="diagonal", rounds=effort.rounds_pooled)
    elif variant in (MARGINAL, INTEGRATED):
        config = replace(config, auxiliary=Integrated(_NODES), rounds=effort.rounds_pooled)
    program: Program = slopes_without_mu if variant == INTEGRATED else grouped_slopes(LEVELS, SCALE)
    rows = {"x": data.x, "level": data.level.expand(SILOS, -1).contiguous()}
    found = fit(config, Poisson(SCALE), rows, Response(data.y, data.offset), effort.mode, program)
    sites = found.sites
    if "mu" in sites:
        return Levels(sites["mu"], sites["beta"]), found
    return with_mu(sites["sigma"], sites["mean"], sites["contrast"], seed=0), found


# ---- Poisson counts with the auxiliary variables integrated out ----
#
# Given theta, the sum of J auxiliary variables is normal around the sum f of the predictors with variance J rho^2, so
# that a count's likelihood is Poisson-lognormal in f. NUTS samples it in 25 dimensions, mu
# integrated out as well, instead of 4,029; and a server
# that holds the response can use it in place of the Poisson likelihood, from the sum of eta_j instead of that of z_j.

_NODES = 16


def poisson_lognormal(sd: float, intercept_scale: float = 1.0) -> Likelihood:
    """`Poisson` over f = sum_j eta_j with normal noise of standard deviation `sd` integrated out."""
    found = marginal(Poisson(intercept_scale), sd, _NODES)
    assert found is not None
    return found


def contrasts(x: Tensor) -> Tensor:
    """Rows (LEVELS - 1, LEVELS) orthonormal and orthogonal to the constant, of x's type (Helmert)."""
    rows = [[1.0] * k + [-float(k)] + [0.0] * (LEVELS - 1 - k) for k in range(1, LEVELS)]
    return torch.stack([x.new_tensor(row) / math.sqrt(k * (k + 1)) for k, row in enumerate(rows, 1)])


def slopes(mean: Tensor, contrast: Tensor) -> Tensor:
    """beta (..., LEVELS, D) from its mean over the levels (..., D) and its contrasts (..., LEVELS - 1, D)."""
    return mean.unsqueeze(-2) + contrasts(mean).T @ contrast


def slopes_without_mu(x: Tensor, level: Tensor) -> Tensor:
    """A silo's predictor with mu integrated out: x (N, D), level (N,) -> eta (N,).

    beta's mean over the levels and its contrasts are independent given sigma, so that the prior needs no matrix:
    mean ~ N(0, SCALE^2 + sigma^2 / LEVELS), each contrast ~ N(0, sigma^2).
    """
    zero = x.new_zeros(x.shape[-1])
    sigma = pyro.sample("sigma", HalfNormal(zero + SCALE).to_event(1))
    mean = pyro.sample("mean", Normal(zero, (SCALE**2 + sigma.square() / LEVELS).sqrt()).to_event(1))
    spread = Normal(x.new_zeros(LEVELS - 1, x.shape[-1]), sigma)
    beta = slopes(mean, pyro.sample("contrast", spread.to_event(2)))
    return (x * beta[level]).sum(-1)


def mu_given(mean: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """Draws of mu from its exact conditional, from beta's mean over the levels, sigma and standard normal noise."""
    precision = 1 / SCALE**2 + LEVELS / sigma.square()
    return LEVELS / sigma.square() * mean / precision + noise / precision.sqrt()


def multilevel(data: Areas, log_likelihood: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """The Pyro program of all silos together, mu integrated out: sites `b`, `sigma`, `mean`, `contrast`, over silos.

    `log_likelihood(y, sum_j eta_j + offset, b)` (N,) integrates the auxiliary variables out, if there are any.
    """

    def program() -> None:
        zero = data.x.new_zeros(SILOS, COLUMNS)
        b = pyro.sample("b", Normal(data.x.new_zeros(()), SCALE))
        sigma = pyro.sample("sigma", HalfNormal(zero + SCALE).to_event(2))
        mean = pyro.sample("mean", Normal(zero, (SCALE**2 + sigma.square() / LEVELS).sqrt()).to_event(2))
        spread = Normal(data.x.new_zeros(SILOS, LEVELS - 1, COLUMNS), sigma.unsqueeze(1))
        beta = slopes(mean, pyro.sample("contrast", spread.to_event(3)))
        at = predictors(data.x, data.level, beta).sum(0) + data.offset
        pyro.factor("y", log_likelihood(data.y, at, b).sum())

    return program


class Levels(NamedTuple):
    """Draws of what the experiment is judged by, in its own space."""

    mu: Tensor  # (draws, J, D)
    beta: Tensor  # (draws, J, LEVELS, D)


def sample(data: Areas, sd: float, warmup: int, draws: int, seed: int = 0) -> tuple[Levels, Draws]:
    """One chain of NUTS on all silos; `sd` is that of the sum of auxiliary variables, 0 without them."""
    likelihood = poisson_lognormal(sd, SCALE) if sd > 0 else Poisson(SCALE)

    def log_likelihood(y: Tensor, at: Tensor, b: Tensor) -> Tensor:
        return likelihood.log_prob(y, at.unsqueeze(-1), b.unsqueeze(-1))

    sites = ["b", "sigma", "mean", "contrast"]
    program = multilevel(data, log_likelihood)
    found = sample_nuts(program, "records", sites, data.x.dtype, 1, warmup, draws, seed)
    sigma, mean, contrast = (found.sites[name].flatten(0, 1) for name in sites[1:])
    return with_mu(sigma, mean, contrast, seed), found


def with_mu(sigma: Tensor, mean: Tensor, contrast: Tensor, seed: int) -> Levels:
    """mu drawn from its exact conditional, from draws (n, J, D) and (n, J, LEVELS - 1, D)."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(mean.shape, generator=rng, dtype=mean.dtype)
    return Levels(mu_given(mean, sigma, noise), slopes(mean, contrast))


# ---- Figure 4 of Hassan et al. (2024), and the coverage and width of every method's intervals ----

#: Method, rho (0 for the true model) and draws of one mu and one beta.
Curve = tuple[str, float, Tensor, Tensor]

_STYLES = {
    "nuts, true model": ("#111827", "-"),
    "true model, mean field": ("#6b7280", "--"),
    "nuts, augmented": ("#2563eb", "-"),
    "amortised": ("#d97706", "-"),
    "z and mu integrated": ("#059669", "--"),
}


def png(
    curves: Sequence[Curve], truth: tuple[float, float], rhos: Sequence[float], summary: Sequence[dict[str, Any]]
) -> Figure:
    """Rows mu and beta, a column each rho; to the right the coverage on data from the augmented model."""
    figure = Figure(figsize=(4.2 * len(rhos) + 4.6, 6.4), layout="constrained")
    blocks: Any = figure.subfigures(1, 2, width_ratios=(4.2 * len(rhos), 4.6))
    left, right = blocks
    axes: Any = left.subplots(2, len(rhos), sharex="row", squeeze=False)
    for column, rho in enumerate(rhos):
        for row, name in enumerate(("mu", "beta")):
            axis, top = axes[row, column], []
            for method, at, *draws in curves:
                if at not in (0.0, rho) or method not in _STYLES:
                    continue
                curve, (colour, dash) = density(draws[row].numpy()), _STYLES[method]
                axis.plot(curve["x"], curve["density"], color=colour, ls=dash, lw=1.3, label=method)
                top.append(max(curve["density"]))
            axis.axvline(truth[row], color="#60a5fa", lw=3, alpha=0.6, zorder=0)
            # Fits of the true model are so narrow that their tops would hide the others.
            axis.set(yticks=[], ylim=(0, min(max(top), 4 * sorted(top)[0]) * 1.05), xlabel=name)
        axes[0, column].set_title(f"data from the true model, rho = {rho:g}", fontsize=10)
    axes[0, 0].legend(frameon=False, fontsize=7)
    _coverage(right.subplots(), [s for s in summary if s["data"] == "augmented"])
    return figure


def _coverage(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    y = list(range(len(rows)))[::-1]
    for name, marker, colour in (("mu", "s", "#9333ea"), ("beta", "o", "#2563eb")):
        axis.plot([100 * r["coverage"][name] for r in rows], y, marker, color=colour, label=name)
    axis.axvspan(92, 98, color="#d1d5db", alpha=0.6, zorder=0)
    axis.set_yticks(y, [r["method"] for r in rows], fontsize=8)
    axis.set(xlim=(-3, 103), xlabel="coverage of 95% intervals, %", title="data from the augmented model, rho = 1")
    axis.title.set_fontsize(10)
    axis.legend(frameon=False, fontsize=8, loc="lower left")


EXPERIMENTS = {"vertical-poisson": Experiment(_poisson, table)}
