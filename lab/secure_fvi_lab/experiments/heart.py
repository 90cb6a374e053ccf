"""Split networks on heart disease, columns at two silos (Hassan et al. 2024, section 5.3 and table 3).

Ten folds, every patient tested once, for each of several assignments to folds. The split NN; the hierarchical Bayes
split NN as printed, its network fitted as points; the same network with every weight sampled; several local steps an
exchange; and a variant that each training set chooses among four by its own inner fold. Logistic regression on pooled
columns says what is in reach. z-scores come from the training folds, each silo's own columns alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import logsigmoid

import secure_fvi as sf
from secure_fvi.algorithms.vertical import Amortised, Bernoulli, Predictor, Vertical
from secure_fvi.algorithms.vertical.predictors import Program
from secure_fvi.algorithms.vertical.vertical import VerticalProgram
from secure_fvi.column_silo import VerticalLocalPosterior
from secure_fvi.driving import Run
from secure_fvi.models.heart import Heart, bayesian_network, load, split_network, standardise
from secure_fvi_lab.experiments import Experiment, Request, Row, lines_of
from secure_fvi_lab.experiments.vertical_batched import logistic_mode
from secure_fvi_lab.references import default_dtype

RHOS, SMALL_RHO, LOCAL_STEPS = (1.0, 5.0, 10.0), 0.2, 5
#: Means, sds over folds, and log-likelihoods of table 3: accuracy, all predictions, wrong predictions.
PAPER = {
    "split NN": (80.73, 3.65, -2.21, -10.95),
    "points, rho 1": (86.39, 4.20, -0.36, -1.99),
    "points, rho 5": (84.98, 4.92, -0.59, -3.53),
    "points, rho 10": (84.10, 5.23, -0.67, -3.89),
}
_OF_PAPER = ("accuracy", "sd", "log_likelihood", "wrong")
_POINTS = 20  # of the test log-likelihood over the exchanges
#: Adam's rates. The paper's is 1e-3, for 50,000 iterations.
_POINT_RATE, _SAMPLED_RATE = 5e-3, 2e-2
#: Weights start this many sds off their prior's mean, which is a saddle.
_SPREAD = 0.5


class Effort(NamedTuple):
    seeds: int  # assignments of patients to folds
    point_seeds: int  # of these, for networks fitted as points
    point_rounds: int
    rounds: int
    inner_rounds: int
    draws: int


_FULL = Effort(3, 1, 6_000, 1_000, 600, 200)
_QUICK = Effort(1, 1, 500, 300, 60, 50)


class Probabilities(NamedTuple):
    """Of y = 1, (R, N): with z_j at its mean eta_j, and with z_j ~ N(eta_j, rho^2) as the model has it."""

    still: Tensor
    noisy: Tensor


def _heart(request: Request) -> tuple[Row, Figure]:
    effort = _QUICK if request.quick else _FULL
    with default_dtype(torch.float32):
        data = {missing: load(request.data, missing) for missing in (False, True)}
        rows = list(_rows(effort, data, request))
    ours = next(r for r in rows if r["method"] == "sampled, rho 1")
    records = len(data[False].y) - len(data[False].y) // FOLDS
    content = {
        "paper": {method: dict(zip(_OF_PAPER, numbers, strict=True)) for method, numbers in PAPER.items()},
        "ours": {
            "mean": ours["accuracy"],
            "sd": ours["sd_over_seeds"],
            "seeds": effort.seeds,
            "what": "accuracy in % of the paper's network, every weight sampled, rho = 1, mean over folds and "
            "assignments, sd over assignments",
            "log_likelihood": ours["log_likelihood"],
            "log_likelihood_noisy": ours["log_likelihood_noisy"],
        },
        "bytes": sum(8 * b.size for b in Vertical().blocks(records, 1, 1)["auxiliary"]),
        "setting": (
            f"{len(data[False].y)} patients, {FOLDS} stratified folds; log-likelihood: nats a patient, of the "
            "mean probability over q(theta) with z at its mean; noisy: with the model's noise in z; bytes: upload a "
            "silo and exchange at 8 bytes a number"
        ),
        "rows": rows,
    }
    return content, png(rows, PAPER)


def _rows(effort: Effort, data: dict[bool, Heart], request: Request) -> Iterator[Row]:
    plain, y = data[False], data[False].y
    long, short = make_folds(y, effort.seeds), make_folds(y, effort.point_seeds)
    for missing, name in ((False, "pooled logistic"), (True, "pooled logistic, marked")):
        found = logistic(data[missing], long)
        yield _row(name, Probabilities(found, found), plain.y, long)
    yield request.once("split NN", effort, lambda: _split(effort, plain, short))
    every = effort.rounds // LOCAL_STEPS
    fits: list[tuple[str, _Hierarchical, Heart, Folds]] = [
        *((f"points, rho {rho:g}", _as_points(effort, rho), plain, short) for rho in RHOS),
        *((f"sampled, rho {rho:g}", _sampled(rho, effort.rounds), plain, long) for rho in RHOS),
        *(
            (f"sampled, rho 1, {LOCAL_STEPS} steps{share}", _sampled(1.0, rounds, LOCAL_STEPS), plain, short)
            for rounds, share in ((every, f", 1/{LOCAL_STEPS} of exchanges"), (effort.rounds, ""))
        ),
        # The fourth variant of `_chosen`, at the paper's rho.
        ("linear + 8 units, marked, rho 1", _sampled(1.0, effort.inner_rounds, program=_linear_and_units), data[True],
         long),
    ]  # fmt: skip
    for label, net, patients, folds in fits:
        yield request.once(label, effort, partial(_fit_row, label, net, effort, patients, folds))
    yield from _chosen(effort, data, long, request)


def _as_points(effort: Effort, rho: float) -> _Hierarchical:
    config = Vertical(
        rho=rho,
        rounds=effort.point_rounds,
        learning_rate=_POINT_RATE,
        schedule="constant",
        average_last=0.0,
        **_PRIVATE,
    )
    return _Hierarchical(config, lambda seed: split_network(seed=seed), 0.0)


def _fit_row(label: str, net: _Hierarchical, effort: Effort, data: Heart, folds: Folds) -> Row:
    return _row(label, *net.fit(effort, data, folds))


class Exchanges(NamedTuple):
    """What a federated fit cost and how it went."""

    rounds: int
    local_steps: int
    rho: float
    seconds: float
    at: list[int]
    log_likelihood: list[float]  # of the test records after so many exchanges


#: The response stays at the server. A network of four units maps eta to the moments of z.
_PRIVATE: dict[str, Any] = {"response": "private", "family": "diagonal", "auxiliary": Amortised((4,))}


class _Hierarchical(NamedTuple):
    """One variant of the hierarchical Bayes split NN. theta starts `spread` sds of noise off its prior's mean."""

    config: Vertical
    programs: Callable[[int], Program]  # a silo's, from a seed
    spread: float

    def fit(
        self, effort: Effort, data: Heart, folds: Folds, inner: bool = False
    ) -> tuple[Probabilities, Tensor, Folds, Exchanges]:
        """A run for each training set. With `inner`, the inner folds are left out of these as well."""
        began, rounds = time.monotonic(), self.config.rounds
        looks = [] if inner else _looks(rounds)
        curves: list[list[float]] = []
        found: list[Probabilities] = []
        for number, test in enumerate(folds.test):
            rows = columns_of(data, ~(test | folds.inner[number]) if inner else ~test)
            run = self.begun(rows, number)
            curves.append([])
            for progress in run:
                if progress.round in looks:
                    seen = probabilities(run, rows.whole, 50).still
                    curves[-1].append(mean_log_likelihood(seen[None], data.y, test[None]))
            found.append(probabilities(run, rows.whole, effort.draws))
        means = [statistics.mean(at) for at in zip(*curves, strict=True)]
        cost = Exchanges(rounds, self.config.local_steps, self.config.rho, time.monotonic() - began, looks, means)
        return Probabilities(*map(torch.stack, zip(*found, strict=True))), data.y, folds, cost

    def begun(self, rows: Rows, number: int) -> Run[Any]:
        """The run of training set `number`, before its first round."""
        silos, y = [{"x": x[rows.train]} for x in rows.whole], rows.y[rows.train]
        model = sf.Columns(Bernoulli(), y, [self.programs(1000 * j + number) for j in range(len(silos))])
        run = sf.run(
            model, silos, self.config, sf.Plain(), seed=number, dtype=torch.float32, compile=False, threads=1
        )  # fmt: skip
        rng = torch.Generator().manual_seed(number)
        for silo in run.engine.silos.values():
            loc = silo.local.params.shared["theta/loc"]
            loc += self.spread * torch.randn(len(loc), generator=rng, dtype=loc.dtype)
        return run


def probabilities(run: Run[Any], whole: Sequence[Tensor], draws: int) -> Probabilities:
    """Of all patients (N,), by q as the run has it now."""
    server, engine, program = run.server, run.engine, cast(VerticalProgram, run.server.program)
    engine.silo_states(server.state.accepted)  # silos learn which of their states count
    silos = [VerticalLocalPosterior(engine.silos[name]) for name in sorted(engine.silos)]
    with torch.no_grad():
        parts = zip(silos, whole, strict=True)
        eta = torch.stack([silo.eta({"x": x}, draws, j) for j, (silo, x) in enumerate(parts)]).sum(0)
        gamma = program.posterior(server.state.algorithm).draws(draws, len(silos))
        noise_sd = math.sqrt(len(silos)) * program.config.rho
        noise = noise_sd * torch.randn(eta.shape, generator=torch.Generator().manual_seed(1), dtype=eta.dtype)
        of = server.problem.likelihood.distribution
        return Probabilities(*(of(s, gamma).probs.mean(0) for s in (eta, eta + noise)))


def _sampled(
    rho: float, rounds: int, local_steps: int = 1, program: Callable[[], Program] = bayesian_network
) -> _Hierarchical:
    config = Vertical(
        rho=rho, local_steps=local_steps, rounds=rounds, learning_rate=_SAMPLED_RATE, average_last=0.0, **_PRIVATE
    )
    return _Hierarchical(config, lambda seed: program(), _SPREAD)


def _split(effort: Effort, data: Heart, folds: Folds) -> Row:
    """Split NN (section 5.3): each silo's network is a part of one, whose gradient is that of the server's pull on the
    slopes: to fit it, no party need be apart."""
    began, looks = time.monotonic(), _looks(effort.point_rounds)
    curves, found = [], []
    for number, test in enumerate(folds.test):
        seen = split_fit(columns_of(data, ~test), number, effort.point_rounds, looks)
        curves.append([mean_log_likelihood(p[None], data.y, test[None]) for p in seen])
        found.append(seen[-1])
    means = [statistics.mean(at) for at in zip(*curves, strict=True)]
    cost = Exchanges(effort.point_rounds, 1, 0.0, time.monotonic() - began, looks, means)
    whole = torch.stack(found)
    return _row("split NN", Probabilities(whole, whole), data.y, folds, cost)


def split_fit(rows: Rows, number: int, rounds: int, looks: Collection[int]) -> list[Tensor]:
    """Probabilities (N,) of all patients after the rounds in `looks`, by Adam at a constant rate."""
    networks = [
        Predictor(split_network(seed=1000 * j + number, bayesian=False), {"x": x}) for j, x in enumerate(rows.whole)
    ]
    points = [{name: value.clone().requires_grad_() for name, value in n.points.items()} for n in networks]
    adam = torch.optim.Adam([value for of in points for value in of.values()], lr=_POINT_RATE)

    def logits(patients: Tensor) -> Tensor:
        parts = zip(networks, points, rows.whole, strict=True)
        return torch.stack([n.evaluate(n.start, p, {"x": x[patients]})[0][:, 0] for n, p, x in parts]).sum(0)

    seen = []
    for at in range(1, rounds + 1):
        adam.zero_grad()
        (-logsigmoid((2 * rows.y[rows.train] - 1) * logits(rows.train)).sum()).backward()
        adam.step()
        if at in looks:
            with torch.no_grad():
                seen.append(torch.sigmoid(logits(torch.ones_like(rows.train))))
    return seen


def _looks(rounds: int) -> list[int]:
    """Rounds after which the test folds are looked at, for the plot alone: evenly spaced on a logarithmic axis."""
    return sorted({max(1, round(rounds ** (k / _POINTS))) for k in range(_POINTS // 3, _POINTS + 1)})


def _chosen(effort: Effort, data: dict[bool, Heart], folds: Folds, request: Request) -> list[Row]:
    """Each of four variants at a small rho, and for each training set the one that predicts its inner fold best."""
    y, kept = data[False].y, []
    for missing in (False, True):
        for name, program in (("paper's network", bayesian_network), ("linear + 8 units", _linear_and_units)):
            label = f"{name}{', marked' if missing else ''}, rho {SMALL_RHO:g}"
            net = _sampled(SMALL_RHO, effort.inner_rounds, program=program)
            kept.append(request.once(label, effort, partial(_variant, label, net, effort, data[missing], folds)))
    best = torch.stack([torch.tensor(found["scores"]) for found in kept]).argmax(0)
    runs = torch.arange(len(best))
    each = (torch.stack([torch.tensor(found[key]) for found in kept])[best, runs] for key in Probabilities._fields)
    chosen = _row(f"chosen by inner folds, rho {SMALL_RHO:g}", Probabilities(*each), y, folds)
    rows: list[Row] = [found["row"] for found in kept]
    return [*rows, chosen | {"chosen": torch.bincount(best, minlength=len(kept)).tolist()}]


def _variant(label: str, net: _Hierarchical, effort: Effort, data: Heart, folds: Folds) -> Row:
    """A `row` of the table, the `scores` of the inner folds, and the probabilities, `still` and `noisy`."""
    inner, y, _, _ = net.fit(effort, data, folds, inner=True)
    scores = by_fold(inner.still, y, folds.inner)[1]
    found, y, _, cost = net.fit(effort, data, folds)
    return {
        "row": _row(label, found, y, folds, cost) | {"inner_log_likelihood": float(scores.mean())},
        "scores": scores.tolist(),
        **{key: value.tolist() for key, value in found._asdict().items()},
    }


def _linear_and_units() -> Any:
    return bayesian_network((8,), linear=True)


def _row(name: str, found: Probabilities, y: Tensor, folds: Folds, cost: Exchanges | None = None) -> Row:
    accuracy, log_p, wrong = by_fold(found.still, y, folds.test)
    noisy_accuracy, noisy_log_p, noisy_wrong = by_fold(found.noisy, y, folds.test)
    by_seed: Sequence[float] = accuracy.reshape(-1, FOLDS).mean(1).tolist()
    row = {
        "method": name,
        "seeds": len(by_seed),
        "accuracy": float(accuracy.mean()),
        "sd_over_folds": float(accuracy.std()),
        "sd_over_seeds": statistics.stdev(by_seed) if len(by_seed) > 1 else 0.0,
        "log_likelihood": float(log_p.mean()),
        "wrong": float(wrong.mean()),
        "accuracy_noisy": float(noisy_accuracy.mean()),
        "log_likelihood_noisy": float(noisy_log_p.mean()),
        "wrong_noisy": float(noisy_wrong.mean()),
    }
    if cost is None:
        return row
    return row | {
        "rho": cost.rho,
        "local_steps": cost.local_steps,
        "exchanges": cost.rounds,
        "bytes_up_per_silo_and_exchange": sum(
            8 * b.size for b in Vertical().blocks(int((~folds.test[0]).sum()), 1, 1)["auxiliary"]
        ),
        "seconds": round(cost.seconds, 1),
        "curve": {"exchanges": cost.at, "log_likelihood": cost.log_likelihood},
    }


# ----
# Ten-fold training sets of the heart disease data, scores on their test folds, and pooled logistic regression

FOLDS = 10
_DTYPE = torch.float32


class Folds(NamedTuple):
    """R training sets, ten an assignment."""

    test: Tensor  # (R, N) bool
    inner: Tensor  # (R, N) bool: another fold, held out of the training set for the choice of a variant


class Rows(NamedTuple):
    """One training set, z-scores from it alone, by silo."""

    whole: tuple[Tensor, ...]  # (N, D_j) of all patients
    y: Tensor  # (N,)
    train: Tensor  # (N,) bool


def columns_of(data: Heart, train: Tensor) -> Rows:
    """`train` (N,) bool: the patients that are fitted to."""
    parts = zip(data.x, data.numeric, strict=True)
    return Rows(tuple(standardise(x, n, train).to(_DTYPE) for x, n in parts), data.y.to(_DTYPE), train)


def make_folds(y: Tensor, seeds: int) -> Folds:
    """Stratified by the response; assignment s is drawn from seed s."""
    test, inner = [], []
    for seed in range(seeds):
        generator, fold = torch.Generator().manual_seed(seed), torch.empty(len(y), dtype=torch.long)
        order = torch.cat([at[torch.randperm(len(at), generator=generator)] for at in _classes(y)])
        fold[order] = torch.arange(len(y)) % FOLDS
        test += [fold == k for k in range(FOLDS)]
        inner += [fold == (k + 1) % FOLDS for k in range(FOLDS)]
    return Folds(torch.stack(test), torch.stack(inner))


def _classes(y: Tensor) -> list[Tensor]:
    return [torch.nonzero(y == value).squeeze(1) for value in (0.0, 1.0)]


def logistic(data: Heart, folds: Folds, steps: int = 20) -> Tensor:
    """Probabilities (R, N) at the mode of logistic regression on the pooled columns, beta ~ N(0, 1), by Newton."""
    found = []
    for test in folds.test:
        parts = [standardise(x, n, ~test) for x, n in zip(data.x, data.numeric, strict=True)]
        x = torch.cat([torch.ones_like(parts[0][:, :1]), *parts], 1)
        found.append(torch.sigmoid(x @ logistic_mode(x[~test], data.y[~test], steps)[0]))
    return torch.stack(found)


def by_fold(probability: Tensor, y: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accuracy in % (R,), mean log-likelihood in nats (R,), and log-likelihoods of the wrong predictions (W,)."""
    logits = torch.logit(probability.double().clamp(1e-30, 1 - 1e-16))
    log_p, right = logsigmoid((2 * y - 1) * logits), (2 * y - 1) * logits > 0
    size = held.sum(1)
    return 100 * (right & held).sum(1) / size, (log_p * held).sum(1) / size, log_p[held & ~right]


def mean_log_likelihood(probability: Tensor, y: Tensor, held: Tensor) -> float:
    return float(by_fold(probability, y, held)[1].mean())


# ---- The lines of `secure-fvi reproduce heart` for a terminal, and its plot ----

#: Methods whose test log-likelihood is drawn over the exchanges.
_CURVES = (
    "split NN", "points, rho 1", "points, rho 5", "points, rho 10", "sampled, rho 1", "sampled, rho 10",
    "sampled, rho 1, 5 steps", "linear + 8 units, marked, rho 0.2",
)  # fmt: skip
_COLOURS = ("#dc2626", "#d97706", "#f59e0b", "#fcd34d", "#2563eb", "#93c5fd", "#059669", "#7c3aed")


def table(content: Row) -> str:
    """Accuracy in %, log-likelihoods in nats, narrow enough for a terminal; the paper's beside ours."""
    rows = []
    for r in content["rows"]:
        paper = content["paper"].get(r["method"].replace("sampled", "points"))
        beside = f"{paper['accuracy']:.2f} / {paper['log_likelihood']:.2f}" if paper else ""
        found = (f"{r['accuracy']:.2f} ({r['sd_over_folds']:.2f})", f"{r['log_likelihood']:.3f}", f"{r['wrong']:.2f}")
        rows.append((r["method"], r["seeds"], *found, f"{r['log_likelihood_noisy']:.3f}", beside))
    lines = lines_of(("method", "seeds", "accuracy (sd)", "log-lik", "wrong", "noisy", "paper"), rows)
    lines.append("sd over folds; log-likelihoods in nats a patient; noisy: with the model's noise in z")
    return "\n".join(lines)


def png(rows: Sequence[Row], paper: Mapping[str, tuple[float, float, float, float]]) -> Figure:
    """Accuracy and log-likelihood by method beside the paper's, and the log-likelihood over the exchanges."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    upper, lower = halves
    left, right = upper.subplots(1, 2, sharey=True)
    for y, row in enumerate(rows):
        known = paper.get(row["method"].replace("sampled", "points"))
        left.errorbar(row["accuracy"], y, xerr=row["sd_over_folds"], fmt="o", color="#2563eb", ms=5, lw=1)
        right.plot(row["log_likelihood"], y, "o", color="#2563eb", ms=5)
        if known:
            left.errorbar(known[0], y + 0.25, xerr=known[1], fmt="s", color="#9ca3af", ms=4, lw=1)
            right.plot(known[2], y + 0.25, "s", color="#9ca3af", ms=4)
    left.set(yticks=range(len(rows)), yticklabels=[r["method"] for r in rows], xlabel="accuracy, %, sd over folds")
    left.invert_yaxis()
    right.set(
        xlabel="test log-likelihood, nats a patient", xlim=(min(-1.0, *(p[2] for p in paper.values())) - 0.1, -0.25)
    )
    right.plot([], [], "o", color="#2563eb", label="ours")
    right.plot([], [], "s", color="#9ca3af", label="paper, table 3 (its model)")
    right.legend(frameon=False, fontsize=8, loc="lower left")
    _curves(lower.subplots(1, 1), rows)
    return figure


def _curves(axis: Any, rows: Sequence[Row]) -> None:
    by_name = {r["method"]: r for r in rows if "curve" in r}
    drawn = [by_name[name] for name in _CURVES if name in by_name]
    for row, colour in zip(drawn, _COLOURS, strict=False):
        curve = row["curve"]
        axis.plot(curve["exchanges"], curve["log_likelihood"], color=colour, lw=1.4, label=row["method"])
    axis.set(xscale="log", ylim=(-1.2, -0.3), xlabel="exchanges", ylabel="test log-likelihood, nats a patient")
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left")


EXPERIMENTS = {"heart": Experiment(_heart, table)}
