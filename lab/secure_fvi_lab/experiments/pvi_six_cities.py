"""Structured PVI on six cities, over random splits into silos of 300 and 237.

K = 1 against global VI of the same family and bound; K = 20 against NUTS on the pooled children. SFVI and SFVI-Avg of
the same family beside it, with what each costs. Errors are in posterior sds of the reference.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import SFVIAvg
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.families import Conditional
from secure_fvi.fitting import fit
from secure_fvi.models.six_cities import PROGRAM
from secure_fvi.runs.nuts import sample_nuts
from secure_fvi_lab.experiments import Request, spread
from secure_fvi_lab.experiments.six_cities import SIZES, Reference, Row, dots, error_row, pooled_reference, split, table
from secure_fvi_lab.machine import machine

SAMPLES = 20
#: PVI's own choice, for the other algorithms too: a record's scale follows Z_G.
FAMILY = Conditional(varying_scale=True)
SYNCHRONOUS, SEQUENTIAL, WEIGHTED = "pvi, synchronous", "pvi, sequential", f"pvi, K = {SAMPLES}"

__all__ = ["reproduce", "table"]


class Effort(NamedTuple):
    """How much of it is run."""

    splits: int
    rounds: int
    passes: int  # of the sequential schedule
    local_steps: int
    draws: int  # of NUTS, a chain
    warmup: int


FULL, QUICK = Effort(5, 8, 3, 1000, 2000, 300), Effort(1, 3, 1, 200, 60, 60)


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of pvi-six-cities.json, and the plot as PNG."""
    began, effort = time.monotonic(), QUICK if request.quick else FULL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        pooled = pooled_reference(request, local_family=FAMILY)
        found = request.once(
            "NUTS on the pooled children", (effort.draws, effort.warmup),
            lambda: nuts_reference(effort.draws, effort.warmup).content(),
        )  # fmt: skip
        nuts = Reference.of(found)
        visits = PVI(
            rounds=effort.passes * len(SIZES),
            local_steps=effort.local_steps,
            schedule="sequential",
            reveal_changes=True,
        )
        at_once = PVI(rounds=effort.rounds, local_steps=effort.local_steps)
        jobs: list[tuple[str, int, Algorithm, Reference]] = []
        for seed in range(effort.splits):
            jobs += [(SYNCHRONOUS, seed, at_once, pooled), (SEQUENTIAL, seed, visits, pooled)]
        if not request.quick:
            others = (("sfvi-avg", SFVIAvg(local_family=FAMILY)), ("sfvi", SFVI(local_family=FAMILY)))
            jobs += [(name, 0, algorithm, pooled) for name, algorithm in others]
        weighted = replace(at_once, importance_samples=SAMPLES)
        jobs += [(WEIGHTED, seed, weighted, nuts) for seed in range(effort.splits)[:2]]
        rows = [
            request.once(f"{name}, split {seed + 1}", algorithm, partial(_row, name, seed, algorithm, reference))
            for name, seed, algorithm, reference in jobs
        ]
    worst = {name: max(r["error"] for r in rows if r["algorithm"] == name) for name in (SEQUENTIAL, WEIGHTED)}
    errors = [r["error"] for r in rows if r["algorithm"] == SYNCHRONOUS]
    first = rows[0]
    content = {
        "name": "pvi-six-cities",
        "paper": "no local latent variables",
        "ours": {
            **spread(errors),
            "what": "largest error of a posterior mean, synchronous, in sds of global VI",
            "median": statistics.median(errors),
            "largest": max(errors),
            "largest_sequential": worst[SEQUENTIAL],
            "largest_against_nuts": worst[WEIGHTED],
        },
        "seconds": round(time.monotonic() - began, 1),
        "bytes": first["bytes_up_per_silo"] + first["bytes_down_per_silo"],
        "machine": machine(),
        "setting": (
            f"silos of {SIZES[0]} and {SIZES[1]} children, random splits; synchronous {effort.rounds} rounds, masked "
            f"sums; sequential {effort.passes} passes, plain; full covariance, scales of children follow Z_G"
        ),
        "reference": pooled.content(),
        "nuts": nuts.content(),
        "rows": rows,
    }
    colours = {SYNCHRONOUS: "#2563eb", SEQUENTIAL: "#d97706", WEIGHTED: "#059669"}
    return content, dots(rows, colours, "Structured PVI, two silos: against global VI, and with K = 20 against NUTS")


def nuts_reference(draws: int, warmup: int) -> Reference:
    """Means and sds of the five coordinates on all children."""
    records = PROGRAM.load().records
    sites = ["beta", "omega"]
    found = sample_nuts(lambda: PROGRAM.model.fn(**records), "child", sites, warmup=warmup, draws=draws)
    z = torch.cat([found.sites["beta"], found.sites["omega"].unsqueeze(-1)], -1).reshape(-1, 5)
    return Reference(z.mean(0), z.std(0), round(found.seconds, 1))


def _row(name: str, seed: int, algorithm: Algorithm, reference: Reference) -> Row:
    """One fit beside the reference. Of two silos each learns the other's term from the total, and a sequential
    schedule shows each silo's change: for published data only."""
    aggregation = Plain() if name == SEQUENTIAL else Masked(min_cohort=2, consistency_check=False)
    result = fit(PROGRAM.model, split(seed), algorithm, aggregation, seed=seed)
    return error_row(name, seed, result, reference)
