"""Income of 30,000 people whose census answers five silos hold, beside the pooled model (UCI Adult).

Not an experiment of the paper: the size at which batches matter. Every round takes 512 people, the same at all silos,
by a shared seed; each silo uploads one number a person of the batch. The same federation over 2 silos shows that a
silo's upload does not depend on how many there are.
"""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import logsigmoid

import secure_fvi as sf
from secure_fvi.algorithms.vertical import Bernoulli, Vertical
from secure_fvi.columns import VerticalResult
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.models.vertical_programs import VerticalDataset, load_adult
from secure_fvi_lab.experiments import Experiment, Request, Row, lines_of, panels, spread
from secure_fvi_lab.experiments.vertical_batched import logistic_mode
from secure_fvi_lab.references import default_dtype

RECORDS, BATCH, SILOS, RHO = 30_000, 512, 5, 0.1
TARGET = 0.003  # nats a person below the pooled model
_NEWTON_STEPS, _DRAWS = 25, 200


def _adult(request: Request) -> tuple[Row, Figure]:
    rounds, seeds = (600, 1) if request.quick else (3000, 3)
    with default_dtype(torch.float64):
        test = load_adult(request.data, split="test")
        request.tell("the pooled model")
        pooled = _pooled(load_adult(request.data, records=RECORDS), test)
        rows = []
        for silos in (SILOS, 2):
            train = load_adult(request.data, "train", RECORDS, silos)
            held_out = load_adult(request.data, "test", None, silos)
            for seed in range(seeds if silos == SILOS else 1):
                make = partial(_row, train, held_out, rounds, seed)
                rows.append(request.once(f"{silos} silos, seed {seed}", rounds, make))
    shortfalls = [pooled - row["log_likelihood"] for row in rows if row["silos"] == SILOS]
    content = {
        "paper": "none: the paper's data sets are small",
        "ours": {
            **spread(shortfalls),
            "what": f"nats a test person below the pooled model's {pooled:.5f}",
        },
        "bytes": round(rows[0]["bytes_up_per_round"]),
        "setting": (
            f"{RECORDS} people, {SILOS} silos, batches of {BATCH}, augmented model at rho = {RHO}, response at the "
            f"server, masked sums, {rounds} rounds"
        ),
        "target": TARGET,
        "pooled": pooled,
        "rows": rows,
    }
    return content, _figure(content)


def table(content: Row) -> str:
    rows = []
    for r in content["rows"]:
        found = (f"{r['log_likelihood']:.5f}", f"{content['pooled'] - r['log_likelihood']:.5f}")
        rows.append((r["silos"], r["seed"], *found, f"{r['bytes_up_per_round']:.0f}", f"{r['seconds']:.0f}"))
    lines = lines_of(("silos", "seed", "test log-lik.", "below pooled", "B up a round", "s"), rows, left=0)
    lines.append(f"pooled model {content['pooled']:.5f} nats a person; target: at most {content['target']} below it")
    return "\n".join(lines)


def _row(train: VerticalDataset, test: VerticalDataset, rounds: int, seed: int) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)  # the test set says more than the rule for settling
        result = _fit(train, rounds, seed)
    found = result.log_predictive(test.silos, test.response, n=_DRAWS)
    return {
        "silos": len(train.silos),
        "seed": seed,
        "log_likelihood": float(found.mean()),
        "bytes_up_per_round": result.aggregation["bytes_up_per_silo"] / result.rounds,
        "settled": result.converged,
        "seconds": round(result.seconds, 1),
    }


def _fit(train: VerticalDataset, rounds: int, seed: int) -> VerticalResult:
    ids = list(train.silos)
    return sf.fit(
        sf.Columns(Bernoulli(), train.response, [train.predictors[n] for n in ids], train.offset),
        [train.silos[n] for n in ids],
        Vertical(response="private", rho=RHO, rounds=rounds, batch_size=BATCH, learning_rate=0.02),
        sf.Masked(min_cohort=min(3, len(ids))),
        seed=seed,
        silo_ids=ids,
    )


def _pooled(train: VerticalDataset, test: VerticalDataset) -> float:
    """Test log-likelihood of the pooled posterior, nats a person: Laplace, which 30,000 people make exact enough."""
    w, hessian = logistic_mode(_design(train), train.response, _NEWTON_STEPS)
    noise = torch.randn(_DRAWS, len(w), generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    draws = w + torch.linalg.solve_triangular(torch.linalg.cholesky(hessian).T, noise.T, upper=True).T
    terms = logsigmoid((2 * test.response - 1) * (draws @ _design(test).T))
    return float((torch.logsumexp(terms, 0) - math.log(_DRAWS)).mean())


def _design(data: VerticalDataset) -> Tensor:
    """All silos' columns and a column of ones."""
    return torch.cat([*(rows["x"] for rows in data.silos.values()), torch.ones(len(data.response), 1)], 1)


def _figure(content: Row) -> Figure:
    figure, axis = panels(1, 1, 5.6, 2.6)
    labels = [f"{r['silos']} silos, seed {r['seed']}" for r in content["rows"]]
    below = [content["pooled"] - r["log_likelihood"] for r in content["rows"]]
    axis.axvspan(-content["target"], content["target"], color="#9ca3af", alpha=0.25, lw=0)
    axis.axvline(0, color="#6b7280", lw=0.8)
    axis.scatter(below, range(len(below)), color="#2563eb", zorder=3)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_xlabel("nats a test person below the pooled model (band: target)")
    return figure


EXPERIMENTS = {"vertical-adult": Experiment(_adult, table)}
