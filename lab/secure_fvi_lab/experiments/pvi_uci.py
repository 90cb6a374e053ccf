"""PVI on UCI adult and credit: the PVI paper's section 5.1, Figure 4 (Ashman et al. 2022).

Mean-field logistic regression over ten silos, five small and five large: split A alike, split B with other sizes and
other shares of positive labels (Table 2). Test log-likelihood and error after every communication with a silo, for PVI,
for the methods it is compared with, and for global VI, which is computed without Monte Carlo.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import logsigmoid

import secure_fvi as sf
from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.base import Algorithm, Posterior
from secure_fvi.algorithms.baselines import BCM, VCL, StreamingVB
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.federated_model import Data, FederatedModel
from secure_fvi.models import uci_adult, uci_credit
from secure_fvi.models.base import Dataset
from secure_fvi.models.tabular import MODEL
from secure_fvi_lab.experiments import Experiment, Request, Row, legend, lines_of, panels, spread, with_sd
from secure_fvi_lab.experiments.partitions import PAPER_SPLITS, size_and_label, take

SILOS = 10
#: Passes of sequential methods, rounds of synchronous ones: each silo is communicated with so many times.
PASSES = 10
TRAIN_SHARE = 0.8
#: Seeds by data set. A seed draws the test set, the partition and the local fits' noise.
SEEDS, QUICK_SEEDS = {"credit": 5, "adult": 2}, {"credit": 2}
#: The design has ten columns of ones in effect (an intercept, and each category's indicators add up to one): natural
#: steps beyond 2 / 10 of a standard deviation swing from side to side.
_RATE = 0.1
_LOCAL_STEPS = {"credit": 500, "adult": 200}


class Split(NamedTuple):
    train: Dataset
    test: Dataset


class Method(NamedTuple):
    algorithm: Algorithm
    sums: SecureSum
    asked: int  # silos communicated with in a round


def _uci(request: Request) -> tuple[Row, Figure]:
    seeds = QUICK_SEEDS if request.quick else SEEDS
    pooled = {name: load(name, request.data) for name in seeds}
    rows = [
        row
        for name, dataset in pooled.items()
        for seed in range(seeds[name])
        for row in _rows(name, held_out(dataset, seed), seed, request)
    ]
    found = summaries(rows)
    ends = [row["difference"][-1] for row in rows if row["method"] in ("PVI, sequential", "PVI, synchronous")]
    synchronous = next(row for row in rows if row["method"] == "PVI, synchronous")
    content = {
        "paper": "converges to global VI after one round (A) or a few (B); BCM, VCL and streaming VB do not (5.1)",
        "ours": {
            **spread(ends),
            "seeds": max(seeds.values()),
            "what": "test log-likelihood of sequential and synchronous PVI after the last pass less that of global VI, "
            "nats a record",
        },
        "bytes": synchronous["bytes_up_per_silo"] + synchronous["bytes_down_per_silo"],
        "setting": (
            f"{SILOS} silos, mean-field q, prior N(0, I), a seeded {TRAIN_SHARE:.0%} of the records to train on "
            "(adult: adult.data and adult.test pooled; credit: the 653 complete rows, as in Table 2), masked sums for "
            f"synchronous methods, {PASSES} passes"
        ),
        "summaries": found,
        "rows": rows,
    }
    return content, plot(rows)


def load(name: str, data: Path | None) -> Dataset:
    """All records of a data set, label 1 as the paper has it: of credit, a refusal."""
    if name == "adult":
        return uci_adult.load(data, split="all")
    dataset = uci_credit.load(data)
    missing = [column.endswith("=?") for column in uci_credit.feature_names()]
    complete = torch.nonzero(dataset.records["x"][:, missing].sum(1) == 0).squeeze(1)
    x, y = dataset.records["x"][complete], dataset.records["y"][complete]
    return Dataset({"x": x, "y": 1 - y}, dataset.record_ids[complete])


def held_out(dataset: Dataset, seed: int) -> Split:
    """A fifth of the records, drawn, to test on."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    cut = math.floor(TRAIN_SHARE * len(dataset))

    def rows(at: Tensor) -> Dataset:
        return Dataset({name: v[at] for name, v in dataset.records.items()}, dataset.record_ids[at])

    return Split(rows(order[:cut].sort().values), rows(order[cut:].sort().values))


def partition(name: str, split: str, train: Dataset, seed: int) -> list[dict[str, Tensor]]:
    """The silos' data. The small silos come first: a sequential pass ends with the large ones."""
    beta, kappa = PAPER_SPLITS[name, split]
    return take(train, size_and_label(train.records["y"], SILOS, beta, kappa, seed))[0]


def methods(local: dict[str, Any]) -> dict[str, Method]:
    """The lines of the figure by name, with these options of the local fit."""
    visits: dict[str, Any] = {"reveal_changes": True, **local}
    masked, plain = Masked(), Plain()
    return {
        "PVI, sequential": Method(PVI(rounds=PASSES * SILOS, schedule="sequential", **visits), plain, 1),
        "PVI, synchronous": Method(PVI(rounds=PASSES, **local), masked, SILOS),
        "PVI, synchronous, damping 0.2": Method(PVI(rounds=PASSES, damping=0.2, **local), masked, SILOS),
        "BCM, same": Method(BCM(**local), masked, SILOS),
        "BCM, split": Method(BCM(prior="split", **local), masked, SILOS),
        "VCL": Method(VCL(**visits), plain, 1),
        "streaming VB": Method(StreamingVB(passes=PASSES, **visits), plain, 1),
    }


def _rows(name: str, data: Split, seed: int, request: Request) -> Iterator[Row]:
    """Of one seed: global VI, then every method on both splits."""
    kept = request.once(f"{name}, seed {seed}: global VI", TRAIN_SHARE, lambda: _listed(global_vi(data.train.records)))
    best = Optimum(MeanField(*torch.tensor(kept["q"], dtype=torch.float64)), kept["bound"], kept["gradient"])
    yield _reference(name, data, seed, best)
    local: dict[str, Any] = {"family": "diagonal", "learning_rate": _RATE, "local_steps": _LOCAL_STEPS[name]}
    alone = Method(PVI(rounds=3, damping=1.0, **local), Plain(), 1)
    runs = [("one silo", [data.train.records], {"global VI by the local fit": alone})]
    runs += [(split, partition(name, split, data.train, seed), methods(local)) for split in ("A", "B")]
    for split, silos, chosen in runs:
        for label, method in chosen.items():
            make = partial(_row, name, split, label, silos, method, data, best, seed)
            yield request.once(f"{name}, seed {seed}, split {split}: {label}", method.algorithm, make)


def _listed(found: Optimum) -> Row:
    return {"q": torch.stack(found.q).tolist(), "bound": found.bound, "gradient": found.gradient}


def _reference(name: str, data: Split, seed: int, best: Optimum) -> Row:
    log_likelihood, error = scores(best.q, data.test.records)
    return {
        "data": name,
        "split": "one silo",
        "method": "global VI",
        "seed": seed,
        "log_likelihood": log_likelihood,
        "error": error,
        "bound": best.bound,
        "gradient": best.gradient,
    }


def _row(
    name: str, split: str, label: str, silos: list[dict[str, Tensor]], method: Method, data: Split, best: Optimum,
    seed: int,
) -> Row:  # fmt: skip
    """One run: scores after each round, and what it cost."""
    seen, run = follow(
        MODEL, silos, method.algorithm, method.sums, seed, lambda q: scores(_mean_field(q), data.test.records)
    )
    at_best, _ = scores(best.q, data.test.records)
    return {
        "data": name,
        "split": split,
        "method": label,
        "seed": seed,
        "communications": [method.asked * (k + 1) for k in range(len(seen))],
        "log_likelihood": [s[0] for s in seen],
        "difference": [s[0] - at_best for s in seen],
        "error": [s[1] for s in seen],
        "bound_gap": best.bound - bound(_mean_field(run.posterior), data.train.records),
        "exchanges": run.exchanges,
        "bytes_up_per_silo": run.bytes_up,
        "bytes_down_per_silo": run.bytes_down,
        "seconds": round(run.seconds, 1),
    }


def _mean_field(posterior: Posterior) -> MeanField:
    return MeanField(posterior.eta["loc"].double(), posterior.family.stddev(posterior.eta).double())


# ----
# Logistic regression under a mean-field Gaussian: predictive probabilities, and global VI without Monte Carlo
#
# The bound needs E[log sigma(a)] for Gaussian a alone, one integral a record. Gauss-Hermite quadrature has it to all
# digits that matter, and L-BFGS finds the maximum: a reference that shares neither draws nor optimiser with the fits
# that it is set beside.

_NODES = 24
_RESTARTS, _ITERATIONS = 4, 2000
_START_LOG_SD = -2.0

Records = Mapping[str, Tensor]  # x (N, D), a column of ones included, and y (N,) 0 or 1


class MeanField(NamedTuple):
    """q(weights) = N(mean, diag(sd^2))."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)


class Optimum(NamedTuple):
    q: MeanField
    bound: float  # nats
    gradient: float  # largest absolute element at the end, in coordinates mean and log sd


def predictive_logits(q: MeanField, x: Tensor) -> Tensor:
    """(N,) logits of p(y = 1 | x): mu / sqrt(1 + pi v / 8) for x weights ~ N(mu, v) (Spiegelhalter and Lauritzen 1990;
    the PVI paper's formula lacks the 8)."""
    variance = x.square() @ q.sd.square()
    return (x @ q.mean) / (1 + math.pi * variance / 8).sqrt()


def scores(q: MeanField, records: Records) -> tuple[float, float]:
    """Mean predictive log-likelihood, nats a record, and the share of records on the wrong side of 1/2."""
    logits, y = predictive_logits(q, records["x"]), records["y"]
    right = torch.where(y > 0, logits, -logits)
    return float(logsigmoid(right).mean()), float((right <= 0).double().mean())


def bound(q: MeanField, records: Records) -> float:
    """E_q[log p(y | weights)] - KL(q || N(0, I)), nats."""
    return float(_bound(q.mean, q.sd.log(), records))


def global_vi(records: Records) -> Optimum:
    """The best mean-field Gaussian for all records together, prior N(0, I)."""
    width = records["x"].shape[1]
    at = torch.zeros(2, width, dtype=torch.float64)
    at[1] = _START_LOG_SD
    at.requires_grad_()
    for _ in range(_RESTARTS):  # L-BFGS forgets its curvature when it stops short
        search = torch.optim.LBFGS(
            [at], max_iter=_ITERATIONS, history_size=50, tolerance_grad=1e-6, tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure(search: torch.optim.LBFGS = search) -> Tensor:
            search.zero_grad()
            loss = -_bound(at[0], at[1], records)
            loss.backward()
            return loss

        search.step(closure)
    value = -float(closure().detach())
    assert at.grad is not None
    mean, log_sd = at.detach()
    return Optimum(MeanField(mean, log_sd.exp()), value, float(at.grad.abs().max()))


def _bound(mean: Tensor, log_sd: Tensor, records: Records) -> Tensor:
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(_NODES))
    x, sign = records["x"], 2 * records["y"] - 1
    variance = (2 * log_sd).exp()
    margin, spread = sign * (x @ mean), (x.square() @ variance).sqrt()
    expected = logsigmoid(margin.unsqueeze(1) + spread.unsqueeze(1) * nodes) @ (weights / weights.sum())
    kl = 0.5 * (variance + mean.square() - 1).sum() - log_sd.sum()
    return expected.sum() - kl


# ---- A fit that is looked at after every round, as learning curves need it ----

T = TypeVar("T")


class Followed(NamedTuple):
    """What a run cost, and where it ended."""

    posterior: Posterior
    seconds: float
    exchanges: int
    bytes_up: int  # of the silo that sent most
    bytes_down: int


def follow(
    model: FederatedModel,
    silos: Sequence[Data],
    algorithm: Algorithm,
    aggregation: SecureSum,
    seed: int,
    look: Callable[[Posterior], T],
) -> tuple[list[T], Followed]:
    """`fit`, with a `look` at the posterior after each round, phases that count records aside."""
    run, seen, done = sf.run(model, silos, algorithm, aggregation, seed=seed), [], 0
    server, engine = run.server, run.engine
    for progress in run:
        if progress.round > done:
            seen.append(look(server.program.posterior(server.state.algorithm)))
        done = progress.round
    posterior = server.program.posterior(server.state.algorithm)
    up, down = max(engine.bytes_up.values()), max(engine.bytes_down.values())
    return seen, Followed(posterior, run.seconds, engine.exchanges, up, down)


# ---- The numbers of pvi-uci over seeds, its lines for a terminal, and its plot ----

#: Nats a record within which a method counts as having reached global VI.
WITHIN = 0.003
_COLOURS = {
    "PVI, sequential": "#2563eb",
    "PVI, synchronous": "#059669",
    "PVI, synchronous, damping 0.2": "#84cc16",
    "BCM, same": "#d97706",
    "BCM, split": "#b45309",
    "VCL": "#7c3aed",
    "streaming VB": "#dc2626",
}
#: The plot's lowest difference; lines below it are cut.
_LOWEST, _HIGHEST = -0.1, 0.03
_WIDTH = 10  # communications with each of ten silos are one pass


def summaries(rows: Sequence[Row]) -> list[Row]:
    """By data set, split and method: mean and sd over seeds of the difference from global VI after one pass and at the
    end, the pass after which the mean stays within `WITHIN`, and what it cost a silo."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if "difference" in row:
            groups.setdefault((row["data"], row["split"], row["method"]), []).append(row)
    return [_summary(*key, group) for key, group in groups.items()]


def _summary(data: str, split: str, method: str, group: Sequence[Row]) -> Row:
    first = [_after_passes(row, 1) for row in group]
    last = [row["difference"][-1] for row in group]
    passes = max(1, group[0]["communications"][-1] // _WIDTH)
    within = [abs(statistics.mean(_after_passes(row, k) for row in group)) <= WITHIN for k in range(1, passes + 1)]
    stays = next((k + 1 for k in range(passes) if all(within[k:])), None)
    return {
        "data": data,
        "split": split,
        "method": method,
        "seeds": len(group),
        "first_pass": spread(first),
        "end": spread(last),
        "error": statistics.mean(row["error"][-1] for row in group),
        "within_from_pass": stays,
        "bound_gap": statistics.mean(row["bound_gap"] for row in group),
        "exchanges": group[0]["exchanges"],
        "bytes_per_silo": group[0]["bytes_up_per_silo"] + group[0]["bytes_down_per_silo"],
        "seconds": statistics.mean(row["seconds"] for row in group),
    }


def _after_passes(row: Row, passes: int) -> float:
    """The difference from global VI once every silo was communicated with so many times, or at the end."""
    at = row["communications"]
    value: float = row["difference"][at.index(passes * _WIDTH) if passes * _WIDTH in at else -1]
    return value


def table(content: Row) -> str:
    """Differences from global VI in thousandths of a nat, mean (sd over seeds), narrow enough for a terminal."""
    rows = []
    for row in content["summaries"]:
        within = "-" if row["within_from_pass"] is None else f"pass {row['within_from_pass']}"
        found = (with_sd(row[k], 1e3) for k in ("first_pass", "end"))
        where = (f"{row['data']}, {row['split']}", row["method"])
        rows.append((*where, *found, within, f"{row['bound_gap']:.1f}", row["exchanges"]))
    head = ("data, split", "method", "first pass", "end", "within from", "gap", "exchanges")
    lines = ["test log-likelihood less that of global VI, 1e-3 nats a record", *lines_of(head, rows, left=2)]
    lines.append("gap: nats of the bound, all records together, below global VI at the end")
    lines.append(content["setting"])
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> Figure:
    """As the paper's Figure 4: a panel a data set and split, the mean over seeds, a band of one sd."""
    shown = sorted({(row["data"], row["split"]) for row in rows if row["split"] in ("A", "B")}, reverse=True)
    shown.sort(key=lambda panel: panel[1])
    columns = len({data for data, _ in shown})
    figure, grid = panels(2, columns, 4.4 * columns + 1.5, 6.4)
    for axes, (data, split) in zip(grid.flat, shown, strict=True):
        for method, colour in _COLOURS.items():
            chosen = [r for r in rows if (r["data"], r["split"], r["method"]) == (data, split, method)]
            _line(axes, chosen, method, colour)
        axes.axhspan(-WITHIN, WITHIN, color="#e5e7eb", zorder=0)
        axes.axhline(0.0, color="#111827", lw=0.8, ls="--", label="global VI")
        axes.set(title=f"{data}, split {split}", ylim=(_LOWEST, _HIGHEST))
    figure.supxlabel("communications with a silo")
    figure.supylabel("test log-likelihood less that of global VI, nats")
    legend(figure, grid.flat[0], loc="outside lower center", ncols=2 * columns)
    return figure


def _line(axes: Any, chosen: Sequence[Row], method: str, colour: str) -> None:
    at = chosen[0]["communications"]
    by_round = list(zip(*(row["difference"] for row in chosen), strict=True))
    mean = [statistics.mean(values) for values in by_round]
    sd = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_round]
    marker = "o" if len(at) == 1 else ("." if len(at) <= _WIDTH and method != "VCL" else None)
    axes.plot(at, mean, color=colour, lw=1.4, marker=marker, ms=5, label=method)
    band = ([m - s for m, s in zip(mean, sd, strict=True)], [m + s for m, s in zip(mean, sd, strict=True)])
    axes.fill_between(at, *band, color=colour, alpha=0.12, lw=0)


EXPERIMENTS = {"pvi-uci": Experiment(_uci, table)}
