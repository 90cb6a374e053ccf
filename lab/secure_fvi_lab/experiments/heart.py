"""Split networks on heart disease, columns at two silos (Hassan et al. 2024, section 5.3 and table 3).

Ten folds, every patient tested once, for each of several assignments to folds. The split NN; the hierarchical Bayes
split NN as printed, its network fitted as points; the same network with every weight sampled; several local steps an
exchange; and a variant that each training set chooses among four by its own inner fold. Logistic regression on pooled
columns says what is in reach. z-scores come from the training folds, each silo's own columns alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secure_fvi.algorithms.vertical import Amortised, Bernoulli, Vertical
from secure_fvi.compiled import Mode
from secure_fvi.models.heart import Heart, bayesian_network, load, split_network
from secure_fvi.optimizers import Optimizer
from secure_fvi.runs.marginals import default_dtype
from secure_fvi_lab.experiments import Request
from secure_fvi_lab.experiments.heart_batched import HierarchicalRound, Programs, SplitRound
from secure_fvi_lab.experiments.heart_folds import (
    FOLDS,
    Folds,
    by_fold,
    logistic,
    make_folds,
    mean_log_likelihood,
    task_of,
)
from secure_fvi_lab.experiments.heart_report import png
from secure_fvi_lab.experiments.heart_report import table as table
from secure_fvi_lab.machine import machine

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
#: Compilation takes 25 s and saves a sixth of a step that works on so much data.
_MODE: Mode = "traced"
#: Weights start this many sds off their prior's mean, which is a saddle.
_SPREAD = 0.5

Row = dict[str, Any]


class Effort(NamedTuple):
    """How long each method runs."""

    seeds: int  # assignments of patients to folds
    point_seeds: int  # of these, for networks fitted as points
    point_rounds: int
    rounds: int
    inner_rounds: int
    draws: int


_FULL = Effort(3, 1, 6_000, 1_000, 600, 200)
_QUICK = Effort(1, 1, 500, 300, 200, 50)


class Probabilities(NamedTuple):
    """Of y = 1, (R, N): with z_j at its mean eta_j, and with z_j ~ N(eta_j, rho^2) as the model has it."""

    still: Tensor
    noisy: Tensor


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of heart.json, and the plot as PNG. Raises InputError where --data holds no such data set."""
    return run(_QUICK if request.quick else _FULL, request)


def run(effort: Effort, request: Request) -> tuple[Row, bytes]:
    """`reproduce` at any effort."""
    began = time.monotonic()
    with default_dtype(torch.float32):
        data = {missing: load(request.data, missing) for missing in (False, True)}
        rows = list(_rows(effort, data, request))
    ours = next(r for r in rows if r["method"] == "sampled, rho 1")
    records = len(data[False].y) - len(data[False].y) // FOLDS
    content = {
        "name": "heart",
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
        "seconds": round(time.monotonic() - began, 1),
        "bytes": Vertical().tables(records, 1, 1)["auxiliary"].size * 8,
        "machine": machine(),
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
    return _Hierarchical(Vertical(rho=rho, **_PRIVATE), _points, effort.point_rounds, _POINT_RATE, 0.0, False)


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


def _points(seed: int) -> Any:
    return split_network(seed=seed)


class _Hierarchical(NamedTuple):
    """One variant of the hierarchical Bayes split NN."""

    config: Vertical
    programs: Programs
    rounds: int
    rate: float
    spread: float
    decay: bool

    def fit(
        self, effort: Effort, data: Heart, folds: Folds, inner: bool = False
    ) -> tuple[Probabilities, Tensor, Folds, Exchanges]:
        """With `inner`, the inner folds are left out of the training sets as well."""
        began, at, seen = time.monotonic(), list[int](), list[float]()
        task = task_of(data, ~(folds.test | folds.inner) if inner else ~folds.test)
        parties = HierarchicalRound(
            self.config, Bernoulli(), self.programs, task, Optimizer("adam", self.rate), _MODE, self.spread
        )

        def see(r: int, state: Any) -> None:
            at.append(r)
            seen.append(mean_log_likelihood(parties.predict(state, 50)[0], data.y, folds.test))

        state = parties.fit(self.rounds, decay=self.decay, at=[] if inner else _looks(self.rounds), see=see)
        cost = Exchanges(self.rounds, self.config.local_steps, self.config.rho, time.monotonic() - began, at, seen)
        return Probabilities(*parties.predict(state, effort.draws)), data.y, folds, cost


def _sampled(
    rho: float, rounds: int, local_steps: int = 1, program: Callable[[], Any] = bayesian_network
) -> _Hierarchical:
    config = Vertical(rho=rho, local_steps=local_steps, **_PRIVATE)
    return _Hierarchical(config, lambda seed: program(), rounds, _SAMPLED_RATE, _SPREAD, True)


def _split(effort: Effort, data: Heart, folds: Folds) -> Row:
    began, at, seen = time.monotonic(), list[int](), list[float]()
    parties = SplitRound(
        Bernoulli(),
        lambda seed: split_network(seed=seed, bayesian=False),
        task_of(data, ~folds.test),
        Optimizer("adam", _POINT_RATE),
        _MODE,
    )

    def see(r: int, points: Any) -> None:
        at.append(r)
        seen.append(mean_log_likelihood(parties.predict(points), data.y, folds.test))

    found = parties.predict(parties.fit(effort.point_rounds, _looks(effort.point_rounds), see))
    cost = Exchanges(effort.point_rounds, 1, 0.0, time.monotonic() - began, at, seen)
    return _row("split NN", Probabilities(found, found), data.y, folds, cost)


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
        "bytes_up_per_silo_and_exchange": Vertical().tables(int((~folds.test[0]).sum()), 1, 1)["auxiliary"].size * 8,
        "seconds": round(cost.seconds, 1),
        "curve": {"exchanges": cost.at, "log_likelihood": cost.log_likelihood},
    }
