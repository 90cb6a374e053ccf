"""Logistic regression over silos with different columns (Hassan et al. 2024, section 5.1), and the limit of small rho.

500 records of 20 columns, 2 silos of ten or 10 silos of two; the augmented-variable and the power-likelihood model at
rho = .5, 1 and 2 by mean-field VI, amortised VI and SOUL, beside NUTS on the same target and on the pooled model. The
power likelihood is not normalised, so its bounds are drawn but not compared with another model's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from pyro.distributions import Bernoulli as PyroBernoulli
from pyro.distributions import Normal
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.vertical import Amortised, Bernoulli, Integrated, MeanField, Vertical
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.compiled import Mode
from secure_fvi.models.vertical_programs import COLUMNS, RECORDS, Data, make_data
from secure_fvi.runs.marginals import density
from secure_fvi_lab.experiments import Experiment, Request, Row, lines_of, spread
from secure_fvi_lab.experiments.vertical_batched import POOLED, Fit, fit, sample, soul_mode
from secure_fvi_lab.references import default_dtype, seeded

SILOS, RHOS, SMALL_RHO = (2, 10), (0.5, 1.0, 2.0), 0.05
SHOWN = 0  # the coefficient whose marginal is drawn
MODELS: tuple[Literal["augmented", "power"], ...] = ("augmented", "power")
#: The paper's two families and SOUL; "integrated" is this package's own: z integrated out where the response is.
METHODS = ("mean field", "amortised", "integrated", "soul")
_FAMILIES: dict[str, Any] = {"mean field": MeanField(), "amortised": Amortised(), "integrated": Integrated()}


class Effort(NamedTuple):
    rounds: int
    soul_rounds: int
    chains: int
    warmup: int
    draws: int
    seeds: int  # data sets of the small-rho check
    mode: Mode
    silos: tuple[int, ...] = SILOS
    rhos: tuple[float, ...] = RHOS
    steps: int = 2_000  # that are timed


_FULL = Effort(6_000, 4_000, 2, 200, 600, 2, "compiled")
#: To see that it works: NUTS's own error is a few tenths of an sd.
_QUICK = Effort(500, 300, 1, 50, 100, 1, "traced", (2,), (1.0,), 100)


class Marginal(NamedTuple):
    """What is kept of a fit or of NUTS."""

    mean: Tensor  # (p,)
    sd: Tensor  # (p,)
    shown: Tensor  # (draws,) of one coefficient


def run(effort: Effort, request: Request) -> tuple[Row, Figure]:
    """The content of vertical-logistic.json, and the plot."""
    with default_dtype(torch.float64):
        data, same = make_data(0), effort._replace(seeds=0)  # more data sets for small rho make no other anew
        kept = request.once(
            "NUTS on the pooled model", same, lambda: _lists(nuts(effort, "pooled", 1.0, data, 1)._asdict())
        )
        pooled = Marginal(**{name: torch.tensor(value) for name, value in kept.items()})
        rows, bounds, shown = [], [], [("pooled", "nuts", 0, 0.0, pooled.shown)]
        jobs: list[tuple[str, int, float, Callable[[], list[Row]]]] = []
        for silos in effort.silos:
            jobs.append(("pooled", silos, 0.0, partial(_pooled, effort, data, silos, pooled)))
            jobs += [
                (model, silos, rho, partial(_methods, effort, model, rho, data, silos, pooled))
                for rho in effort.rhos
                for model in MODELS
            ]
        for name, silos, rho, make in jobs:
            for found in request.once(f"{silos} silos, rho {rho}, {name}", same, make):
                where = (name, found["row"]["method"], silos, rho)
                rows.append(found["row"])
                bounds.append((*where, torch.tensor(found["bounds"])))
                shown.append((*where, torch.tensor(found["shown"])))
        limit = [
            r
            for seed in range(effort.seeds)
            for r in request.once(f"rho {SMALL_RHO}, data set {seed + 1}", same, partial(small_rho, same, seed))
        ]
        speed = request.once(
            "milliseconds a step beside Pyro",
            effort.steps,
            lambda: step_times(data.by_silo(2), data.y, steps=effort.steps),
        )
    worst = [r["error"] for r in limit]
    content = {
        "paper": "the posteriors of both models tend to the pooled model's as rho goes to 0 (section 2.1; no number)",
        "ours": {
            **spread(worst),
            "seeds": effort.seeds,  # each gives several errors
            "what": f"largest error of a posterior mean at rho = {SMALL_RHO}, NUTS and amortised VI of both models, in "
            "sds of NUTS on the pooled model",
            "median": statistics.median(worst),
            "largest": max(worst),
        },
        "bytes": sum(8 * b.size for b in Vertical().blocks(RECORDS, 1, 1)["auxiliary"]),
        "setting": (
            f"{RECORDS} records, {COLUMNS} columns, {' and '.join(map(str, effort.silos))} silos; {effort.rounds} "
            f"rounds of VI, {effort.soul_rounds} of SOUL, {effort.chains} x {effort.draws} draws of NUTS; bytes: "
            "upload of a silo and sum at 8 bytes a number, whatever the number of silos"
        ),
        "rows": rows,
        "small_rho": limit,
        "ms_per_step": speed,
    }
    return content, png(bounds, shown, float(data.beta[SHOWN]), effort.silos, effort.rhos)


def _pooled(effort: Effort, data: Data, silos: int, pooled: Marginal) -> list[Row]:
    """VI of the pooled model, as `_methods` has its results."""
    fitted = fit_one(effort, "", "pooled", 0.0, data, silos)
    found = _marginal(fitted)
    line = row("pooled", "mean field", silos, 0.0, found, pooled, pooled, fitted)
    return [_lists({"row": line, "bounds": fitted.bounds, "shown": found.shown})]


def _methods(
    effort: Effort, model: Literal["augmented", "power"], rho: float, data: Data, silos: int, pooled: Marginal
) -> list[Row]:
    """NUTS and every method on one model at one rho: a `row` of the table each, and the curves that are drawn."""
    target = nuts(effort, model, rho, data, silos)
    results: list[Row] = [
        {"row": row(model, "nuts", silos, rho, target, target, pooled, None), "bounds": [], "shown": target.shown}
    ]
    for method in METHODS:
        if method == "integrated" and model == "power":
            continue  # the power likelihood has no such form
        fitted = fit_one(effort, method, model, rho, data, silos)
        found = _marginal(fitted)
        line = row(model, method, silos, rho, found, target, pooled, fitted)
        if method == "soul" and model == "augmented":
            # SOUL's own target: what it would find with infinitely many rounds.
            mode = soul_mode(data.x, data.y, math.sqrt(silos) * rho)
            line["error_of_mode"] = _error(found._replace(mean=mode), target)
            line["error_mode"] = float(((found.mean - mode) / target.sd).abs().max())
        bounds = fitted.bounds[fitted.bounds.isfinite()]  # none for SOUL
        results.append({"row": line, "bounds": bounds, "shown": found.shown})
    return [_lists(result) for result in results]


def _lists(values: Row) -> Row:
    """With tensors as lists, as JSON has them."""
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def nuts(effort: Effort, model: str, rho: float, data: Data, silos: int) -> Marginal:
    """NUTS on theta's exact posterior in one of the three models."""
    found = sample(model, rho, data.x, data.y, silos, effort.chains, effort.warmup, effort.draws)
    beta = found.sites["beta"].flatten(0, 1)
    return Marginal(beta.mean(0), beta.std(0), beta[:, SHOWN])


def fit_one(
    effort: Effort, method: str, model: Literal["augmented", "power", "pooled"], rho: float, data: Data, silos: int
) -> Fit:
    """One of the federated methods, or VI of the pooled model, q(theta) factorised over the silos as in the others."""
    config: Vertical | Soul
    if model == "pooled":
        config = replace(POOLED, rounds=effort.rounds)
    elif method == "soul":
        config = Soul(model=model, rho=rho, response="shared", rounds=effort.soul_rounds)
    else:
        # As in the paper, only the power likelihood's network is shown the response.
        config = Vertical(
            model=model,
            rho=rho,
            response="shared" if model == "power" else "private",
            auxiliary=_FAMILIES[method],
            rounds=effort.rounds,
        )
    response = Response(data.y, torch.zeros_like(data.y))
    return fit(config, Bernoulli(), {"x": data.by_silo(silos)}, response, effort.mode)


def small_rho(effort: Effort, seed: int) -> list[Row]:
    """NUTS and amortised VI at rho = .05 beside NUTS on the pooled model, on one fresh data set."""
    found, data = [], make_data(100 + seed)
    pooled = nuts(effort, "pooled", 1.0, data, 1)
    for silos in effort.silos:
        exact = fit_one(effort, "", "pooled", 0.0, data, silos)
        for model in MODELS:
            fitted = fit_one(effort, "amortised", model, SMALL_RHO, data, silos)
            both = {"nuts": nuts(effort, model, SMALL_RHO, data, silos), "amortised": _marginal(fitted)}
            found += [
                {
                    "data_set": seed,
                    "silos": silos,
                    "model": model,
                    "method": method,
                    "error": _error(theirs, pooled),
                    "pooled_vi_error": _error(_marginal(exact), pooled),
                }
                for method, theirs in both.items()
            ]
    return found


def row(
    model: str,
    method: str,
    silos: int,
    rho: float,
    found: Marginal,
    target: Marginal,
    pooled: Marginal,
    fitted: Fit | None,
) -> Row:
    """One combination beside NUTS on its own target and on the pooled model."""
    return {
        "model": model,
        "method": method,
        "silos": silos,
        "rho": rho,
        "error": _error(found, target),
        "sd_ratio": float((found.sd / target.sd).mean()),
        "error_pooled": _error(found, pooled),
        "sd_ratio_pooled": float((found.sd / pooled.sd).mean()),
        "bound": float(fitted.bounds[-10:].mean()) if fitted is not None and method != "soul" else None,
        "mean": found.mean.tolist(),
        "sd": found.sd.tolist(),
        "seconds": round(fitted.seconds, 1) if fitted is not None else 0.0,
    }


def table(content: Row) -> str:
    """The rows, narrow enough for a terminal, and the summary."""
    rows = []
    for r in content["rows"]:
        bound = f"{r['bound']:.1f}" if r["bound"] is not None else ""
        found = (f"{r['error']:.2f}", f"{r['sd_ratio']:.2f}", bound, f"{r['seconds']:.0f}")
        rows.append((r["model"], r["method"], r["silos"], r["rho"], *found))
    lines = lines_of(("model", "method", "silos", "rho", "error", "sd", "bound", "s"), rows, left=2)
    lines.append("error: largest, in sds of NUTS on the same target; sd: mean ratio to it; bound in nats")
    ours, ms = content["ours"], content["ms_per_step"]
    lines.append(
        f"rho {SMALL_RHO} against the pooled model: median {ours['median']:.2f}, largest {ours['largest']:.2f}"
    )
    lines.append("ms a step: " + ", ".join(f"{name} {value:.2f}" for name, value in ms.items()))
    return "\n".join(lines)


def _marginal(fitted: Fit) -> Marginal:
    beta = fitted.sites["beta"].flatten(1)
    return Marginal(beta.mean(0), beta.std(0), beta[:, SHOWN])


def _error(found: Marginal, reference: Marginal) -> float:
    return float(((found.mean - reference.mean) / reference.sd).abs().max())


# ----
# Figures 2 and 3 of Hassan et al. (2024): bounds over the rounds, one coefficient's marginal by model and method

#: Model, method, silos, rho and the curve or the draws.
Entry = tuple[str, str, int, float, Tensor]

_COLOURS = {"pooled": "#111827", "augmented": "#2563eb", "power": "#d97706"}
_DASHES = {"nuts": "-", "mean field": "--", "amortised": "-", "integrated": "-.", "soul": ":"}
_RHO_COLOURS = ("#1d4ed8", "#059669", "#dc2626")


def png(
    bounds: Sequence[Entry], shown: Sequence[Entry], truth: float, silos: Sequence[int], rhos: Sequence[float]
) -> Figure:
    """For each number of silos a row of bounds, one of NUTS and one of the approximations."""
    figure = Figure(figsize=(11, 7.6 * len(silos)), layout="constrained")
    blocks: Any = figure.subfigures(len(silos), 1, squeeze=False)[:, 0]
    for block, count in zip(blocks, silos, strict=True):
        block.suptitle(f"{count} silos")
        upper, lower = block.subfigures(2, 1, height_ratios=(1, 2))
        _bounds(upper, [b for b in bounds if b[2] == count], rhos)
        _densities(lower, [s for s in shown if s[2] in (0, count)], truth, rhos)
    return figure


def _bounds(figure: Any, entries: Sequence[Entry], rhos: Sequence[float]) -> None:
    for axis, model in zip(figure.subplots(1, 2), ("augmented", "power"), strict=True):
        final = []
        for name, method, _, rho, curve in entries:
            if name not in ("pooled", model) or len(curve) == 0:
                continue
            colour = _COLOURS["pooled"] if name == "pooled" else _RHO_COLOURS[rhos.index(rho)]
            label = "pooled" if name == "pooled" else f"{method}, rho {rho:g}"
            x = np.linspace(0, 100, len(curve))
            axis.plot(x, curve.numpy(), color=colour, ls=_DASHES[method], lw=1.1, label=label)
            final.append(float(curve[len(curve) // 2 :].min()))
        top = max(float(e[4].max()) for e in entries if len(e[4]))
        axis.set(ylim=(min(final) - 40, top + 10), xlabel="% of rounds", title=f"{model}: bound, nats")
        axis.legend(frameon=False, fontsize=7, ncols=2, loc="lower right")


def _densities(figure: Any, entries: Sequence[Entry], truth: float, rhos: Sequence[float]) -> None:
    axes = figure.subplots(2, len(rhos), sharex=True, squeeze=False)
    for column, rho in enumerate(rhos):
        for name, method, _, at, draws in entries:
            if at not in (0.0, rho):
                continue
            axis = axes[0 if method == "nuts" else 1, column]
            curve = density(draws.numpy())
            label = f"{name}, {method}"
            axis.plot(curve["x"], curve["density"], color=_COLOURS[name], ls=_DASHES[method], lw=1.2, label=label)
        for axis in axes[:, column]:
            axis.axvline(truth, color="#60a5fa", lw=3, alpha=0.6, zorder=0)
            axis.set(yticks=[], ylim=(0, 8))
        axes[0, column].set_title(f"rho = {rho:g}")
    axes[0, 0].set_ylabel("NUTS")
    axes[1, 0].set_ylabel("VI and SOUL")
    for axis in axes[:, 0]:
        axis.legend(frameon=False, fontsize=7, loc="upper right")


# ----
# Milliseconds a round: a server and two silos in one process, plain sums, beside Pyro's SVI on the same augmented model

_WARM = 50


def step_times(x: Tensor, y: Tensor, steps: int, rho: float = 1.0) -> dict[str, float]:
    """From columns x (J, N, D). Compilation and the first rounds are not counted; SVI has a mean-field guide."""
    found = {"pyro_svi": _pyro(x, y, steps, rho)}
    model, silos = sf.Columns(Bernoulli(), y), [{"x": columns} for columns in x]
    for name, config in (
        ("vertical_mean_field", Vertical(rho=rho, response="private", family="diagonal", auxiliary=MeanField())),
        ("vertical_amortised", Vertical(rho=rho, response="private", auxiliary=Amortised())),
        ("vertical_power_amortised", Vertical(model="power", rho=rho, auxiliary=Amortised())),
    ):
        run = iter(sf.run(model, silos, replace(config, rounds=_WARM + steps + 1), sf.Plain(), compile=True))
        began = [time.perf_counter() for _ in islice(run, _WARM + steps)][_WARM - 1]
        found[name] = 1000 * (time.perf_counter() - began) / steps
    return found


def _pyro(x: Tensor, y: Tensor, steps: int, rho: float) -> float:
    """The same model in Pyro: latents b, beta_j and z_j, observed y."""

    def model() -> None:
        total: Any = pyro.sample("b", Normal(x.new_zeros(()), 1.0))
        for j, columns in enumerate(x):
            beta = pyro.sample(f"beta_{j}", Normal(x.new_zeros(x.shape[2]), 1.0).to_event(1))
            with pyro.plate(f"records_{j}", len(y)):
                total = total + pyro.sample(f"z_{j}", Normal(columns @ beta, rho))
        with pyro.plate("records", len(y)):
            pyro.sample("y", PyroBernoulli(logits=total), obs=y)

    with seeded(0), pyro.validation_enabled(False), pyro.get_param_store().scope():
        svi = SVI(model, AutoNormal(model), Adam({"lr": 0.02}), Trace_ELBO())
        for _ in range(_WARM):
            svi.step()
        began = time.perf_counter()
        for _ in range(steps):
            svi.step()
        return 1000 * (time.perf_counter() - began) / steps


EXPERIMENTS = {"vertical-logistic": Experiment(lambda request: run(_QUICK if request.quick else _FULL, request), table)}
