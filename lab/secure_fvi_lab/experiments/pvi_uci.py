"""PVI on UCI adult, bank and credit: the PVI paper's section 5.1, Figure 4 (Ashman et al. 2022).

Mean-field logistic regression over ten silos, five small and five large: split A alike, split B with other sizes and
other shares of positive labels (Table 2). Test log-likelihood and error after every communication with a silo, for PVI,
for the methods it is compared with, and for global VI, which is computed without Monte Carlo.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.base import Algorithm, Posterior
from secure_fvi.algorithms.baselines import BCM, VCL, StreamingVB
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.models import uci_adult, uci_bank, uci_credit
from secure_fvi.models.base import Dataset
from secure_fvi.models.tabular import MODEL
from secure_fvi_lab.experiments import Request
from secure_fvi_lab.experiments.following import follow
from secure_fvi_lab.experiments.mean_field_logistic import MeanField, Optimum, bound, global_vi, scores
from secure_fvi_lab.experiments.partitions import PAPER_SPLITS, size_and_label, take
from secure_fvi_lab.experiments.pvi_uci_report import plot, summaries
from secure_fvi_lab.experiments.pvi_uci_report import table as table
from secure_fvi_lab.experiments.spread import spread
from secure_fvi_lab.machine import machine

SILOS = 10
#: Passes of sequential methods, rounds of synchronous ones: each silo is communicated with so many times.
PASSES = 10
TRAIN_SHARE = 0.8
#: Seeds by data set. A seed draws the test set, the partition and the local fits' noise.
SEEDS, QUICK_SEEDS = {"credit": 5, "adult": 2, "bank": 2}, {"credit": 2}
#: The design has ten columns of ones in effect (an intercept, and each category's indicators add up to one): natural
#: steps beyond 2 / 10 of a standard deviation swing from side to side.
_RATE = 0.1
_LOCAL_STEPS = {"credit": 500, "adult": 200, "bank": 200}

Row = dict[str, Any]


class Split(NamedTuple):
    """Training records and test records."""

    train: Dataset
    test: Dataset


class Method(NamedTuple):
    """One line of the figure."""

    algorithm: Algorithm
    sums: SecureSum
    asked: int  # silos communicated with in a round


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of pvi-uci.json, and the plot as PNG. Raises InputError where --data holds no adult or credit; bank
    is left out where it is missing."""
    began = time.monotonic()
    seeds = QUICK_SEEDS if request.quick else dict(SEEDS)
    if "bank" in seeds and not (request.data is not None and (request.data / "uci_bank").is_dir()):
        del seeds["bank"]
        request.tell("--data holds no uci_bank: bank is left out")
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
        "name": "pvi-uci",
        "paper": "converges to global VI after one round (A) or a few (B); BCM, VCL and streaming VB do not (5.1)",
        "ours": {
            **spread(ends),
            "seeds": max(seeds.values()),
            "what": "test log-likelihood of sequential and synchronous PVI after the last pass less that of global VI, "
            "nats a record",
        },
        "seconds": round(time.monotonic() - began, 1),
        "bytes": synchronous["bytes_up_per_silo"] + synchronous["bytes_down_per_silo"],
        "machine": machine(),
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
    if name == "bank":
        return uci_bank.load(data)
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
    """As JSON has it."""
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
