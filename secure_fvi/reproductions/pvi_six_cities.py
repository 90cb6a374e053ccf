"""Structured PVI on six cities, over random splits into silos of 300 and 237.

K = 1 against global VI of the same family and bound; K = 20 against NUTS on the pooled children. SFVI and SFVI-Avg of
the same family beside it, with what each costs. Errors are in posterior sds of the reference.
"""

from __future__ import annotations

import statistics
import time
import warnings

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
from secure_fvi.reproductions.six_cities import SIZES, Reference, Row, dots, error_row, global_vi, split, table
from secure_fvi.runs.nuts import sample_nuts

ROUNDS, PASSES, SAMPLES = 8, 3, 20
SPLITS, QUICK_SPLITS = 5, 2
#: Global VI: iterations and seeds; NUTS: draws a chain.
_ITERATIONS, _SEEDS, _DRAWS = 40_000, (0, 1), 2000
_QUICK_ITERATIONS, _QUICK_SEEDS, _QUICK_DRAWS = 20_000, (0,), 500
#: PVI's own choice, for the other algorithms too: a record's scale follows Z_G.
FAMILY = Conditional(varying_scale=True)
SYNCHRONOUS, SEQUENTIAL, WEIGHTED = "pvi, synchronous", "pvi, sequential", f"pvi, K = {SAMPLES}"

__all__ = ["reproduce", "table"]


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of pvi-six-cities.json, and the plot as PNG."""
    began, quick, tell = time.monotonic(), request.quick, request.tell
    splits = range(QUICK_SPLITS if quick else SPLITS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        tell("global VI on the pooled children")
        pooled = global_vi(
            _QUICK_ITERATIONS if quick else _ITERATIONS, _QUICK_SEEDS if quick else _SEEDS, local_family=FAMILY
        )
        rows = []
        for seed in splits:
            tell(f"PVI, split {seed + 1}")
            rows.append(_row(SYNCHRONOUS, seed, PVI(rounds=ROUNDS), pooled))
            visits = PVI(rounds=PASSES * len(SIZES), schedule="sequential", reveal_changes=True)
            rows.append(_row(SEQUENTIAL, seed, visits, pooled))
        tell("SFVI-Avg and SFVI on the first split")
        rows.append(_row("sfvi-avg", 0, SFVIAvg(local_family=FAMILY), pooled))
        rows.append(_row("sfvi", 0, SFVI(local_family=FAMILY), pooled))
        tell("NUTS on the pooled children")
        nuts = nuts_reference(_QUICK_DRAWS if quick else _DRAWS)
        for seed in splits[:2]:
            tell(f"PVI with K = {SAMPLES}, split {seed + 1}")
            rows.append(_row(WEIGHTED, seed, PVI(rounds=ROUNDS, importance_samples=SAMPLES), nuts))
    worst = {name: max(r["error"] for r in rows if r["algorithm"] == name) for name in (SEQUENTIAL, WEIGHTED)}
    errors = [r["error"] for r in rows if r["algorithm"] == SYNCHRONOUS]
    first = rows[0]
    content = {
        "name": "pvi-six-cities",
        "paper": "no local latent variables",
        "ours": {
            "mean": statistics.mean(errors),
            "sd": statistics.stdev(errors),
            "seeds": len(errors),
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
            f"sequential {PASSES} passes, plain; full covariance, scales of children follow Z_G; ours: largest error "
            "of a posterior mean, synchronous, in sds of global VI"
        ),
        "reference": {"mean": pooled.loc.tolist(), "sd": pooled.sd.tolist(), "seconds": pooled.seconds},
        "nuts": {"mean": nuts.loc.tolist(), "sd": nuts.sd.tolist(), "seconds": nuts.seconds},
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
