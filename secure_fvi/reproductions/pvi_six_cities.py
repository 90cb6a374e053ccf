"""Structured PVI on six cities, over random splits into silos of 300 and 237.

K = 1 against global VI of the same family and bound; K = 20 against NUTS on the pooled children. SFVI and SFVI-Avg of
the same family beside it, with what each costs. Errors are in posterior sds of the reference.
"""

from __future__ import annotations

import statistics
import time
import warnings
from functools import partial

import torch

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import SFVIAvg
from secure_fvi.cli.bench_step import machine
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.families import Conditional
from secure_fvi.fitting import fit
from secure_fvi.models.six_cities import PROGRAM
from secure_fvi.reproductions import Request
from secure_fvi.reproductions.six_cities import SIZES, Reference, Row, dots, error_row, pooled_reference, split, table
from secure_fvi.reproductions.spread import spread
from secure_fvi.runs.nuts import sample_nuts

ROUNDS, PASSES, SAMPLES = 8, 3, 20
SPLITS, QUICK_SPLITS = 5, 2
#: NUTS: draws a chain.
_DRAWS, _QUICK_DRAWS = 2000, 500
#: PVI's own choice, for the other algorithms too: a record's scale follows Z_G.
FAMILY = Conditional(varying_scale=True)
SYNCHRONOUS, SEQUENTIAL, WEIGHTED = "pvi, synchronous", "pvi, sequential", f"pvi, K = {SAMPLES}"

__all__ = ["reproduce", "table"]


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of pvi-six-cities.json, and the plot as PNG."""
    began, quick = time.monotonic(), request.quick
    splits = range(QUICK_SPLITS if quick else SPLITS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        pooled = pooled_reference(request, local_family=FAMILY)
        draws = _QUICK_DRAWS if quick else _DRAWS
        found = request.once("NUTS on the pooled children", draws, lambda: nuts_reference(draws).content())
        nuts = Reference.of(found)
        visits = PVI(rounds=PASSES * len(SIZES), schedule="sequential", reveal_changes=True)
        jobs: list[tuple[str, int, Algorithm, Reference]] = []
        for seed in splits:
            jobs += [(SYNCHRONOUS, seed, PVI(rounds=ROUNDS), pooled), (SEQUENTIAL, seed, visits, pooled)]
        jobs += [("sfvi-avg", 0, SFVIAvg(local_family=FAMILY), pooled), ("sfvi", 0, SFVI(local_family=FAMILY), pooled)]
        weighted = PVI(rounds=ROUNDS, importance_samples=SAMPLES)
        jobs += [(WEIGHTED, seed, weighted, nuts) for seed in splits[:2]]
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
            f"silos of {SIZES[0]} and {SIZES[1]} children, random splits; synchronous {ROUNDS} rounds, masked sums; "
            f"sequential {PASSES} passes, plain; full covariance, scales of children follow Z_G"
        ),
        "reference": pooled.content(),
        "nuts": nuts.content(),
        "rows": rows,
    }
    colours = {SYNCHRONOUS: "#2563eb", SEQUENTIAL: "#d97706", WEIGHTED: "#059669"}
    return content, dots(rows, colours, "Structured PVI, two silos: against global VI, and with K = 20 against NUTS")


def nuts_reference(draws: int) -> Reference:
    """Means and sds of the five coordinates on all children."""
    records = PROGRAM.load().records
    found = sample_nuts(lambda: PROGRAM.model.fn(**records), "child", ["beta", "omega"], draws=draws)
    z = torch.cat([found.sites["beta"], found.sites["omega"].unsqueeze(-1)], -1).reshape(-1, 5)
    return Reference(z.mean(0), z.std(0), round(found.seconds, 1))


def _row(name: str, seed: int, algorithm: Algorithm, reference: Reference) -> Row:
    """One fit beside the reference. Of two silos each learns the other's term from the total, and a sequential
    schedule shows each silo's change: for published data only."""
    aggregation = Plain() if name == SEQUENTIAL else Masked(min_cohort=2, consistency_check=False)
    result = fit(PROGRAM.model, split(seed), algorithm, aggregation, seed=seed)
    return error_row(name, seed, result, reference)
