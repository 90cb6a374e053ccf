"""SFVI on six cities from a cold start and after a few rounds of SFVI-Avg, in rounds and exchanges.

Hassan et al. (2023, S3.2, Figure S2): on MNIST, "as little as five communication rounds with 10^3 local steps" before
SFVI "can reduce the number of steps required to reach convergence by a factor of two".
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation import Masked
from secure_fvi.algorithms.sfvi import SFVI, SFVIState, WarmStart
from secure_fvi.algorithms.sfvi_avg import COUNT, MERGE
from secure_fvi.models.six_cities import PROGRAM
from secure_fvi.server import Server
from secure_fvi_lab.experiments import Request, as_png, spread
from secure_fvi_lab.experiments.six_cities import SIZES, Reference, pooled_reference, split
from secure_fvi_lab.machine import machine

#: Near: the mean of the last WINDOW iterates lies within NEAR posterior sds of global VI in every coordinate.
NEAR, WINDOW = 0.5, 100
WARM_ROUNDS, QUICK_WARM_ROUNDS, LOCAL_STEPS = (0, 1, 2, 3, 4, 5), (0, 3), 1000
SPLITS, QUICK_SPLITS = 3, 1
#: Warm starts after which the first split runs on until the stopping rule ends it.
TO_THE_END = (0, 5)

Row = dict[str, Any]


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of sfvi-warm-start.json, and the plot as PNG."""
    quick = request.quick
    began = time.monotonic()
    reference = pooled_reference(request)
    rows, options = [], (NEAR, WINDOW, LOCAL_STEPS)
    for warm_rounds in QUICK_WARM_ROUNDS if quick else WARM_ROUNDS:
        for seed in range(QUICK_SPLITS if quick else SPLITS):
            to_the_end = not quick and seed == 0 and warm_rounds in TO_THE_END
            make = partial(row, warm_rounds, seed, reference, to_the_end)
            rows.append(request.once(f"SFVI after {warm_rounds} rounds of SFVI-Avg, split {seed + 1}", options, make))
    cold, warm = ([r["rounds"] for r in rows if (r["warm_rounds"] > 0) == after] for after in (False, True))
    shares = [rounds / statistics.mean(cold) for rounds in warm]
    content = {
        "name": "sfvi-warm-start",
        "paper": "5 rounds of 10^3 local steps halve the steps to convergence (MNIST, S3.2)",
        "ours": {**spread(shares), "what": "rounds of SFVI until near, as a share of a cold start's"},
        "seconds": round(time.monotonic() - began, 1),
        "bytes": rows[-1]["bytes_up_per_silo"] + rows[-1]["bytes_down_per_silo"],
        "machine": machine(),
        "setting": (
            f"silos of {SIZES[0]} and {SIZES[1]} children, random splits, masked sums, full covariance, ELBO, "
            f"{LOCAL_STEPS} local steps a warm round; rounds of SFVI, at default options, until the mean of the last "
            f"{WINDOW} iterates is within {NEAR} sds of global VI"
        ),
        "reference": reference.content(),
        "rows": rows,
    }
    return content, _png(rows)


def row(warm_rounds: int, seed: int, reference: Reference, to_the_end: bool) -> Row:
    """One run of SFVI with its default options, until it is near, or until its stopping rule ends it."""
    algorithm = SFVI(warm_start=WarmStart(warm_rounds, LOCAL_STEPS))
    here = Row()
    # Of two silos each learns the other's term from the total: fit for published data only.
    masked = Masked(min_cohort=2, consistency_check=False)
    run = sf.run(PROGRAM.model, split(seed), algorithm, masked, seed=seed, threads=1)
    server, engine = run.server, run.engine
    window: deque[Tensor] = deque(maxlen=WINDOW)
    for progress in run:
        if progress.phase in (COUNT, MERGE):
            continue
        window.append(_sfvi(server).eta["loc"])
        error = float(((torch.stack(list(window)).mean(0) - reference.loc) / reference.sd).abs().max())
        if not here and len(window) == WINDOW and error < NEAR:
            here = {
                "rounds": _sfvi(server).round,
                "exchanges": engine.exchanges,
                "bytes_up_per_silo": max(engine.bytes_up.values()),
                "bytes_down_per_silo": max(engine.bytes_down.values()),
                "seconds": round(run.seconds, 1),
            }
            if not to_the_end:
                break
    end = server.program.posterior(server.state.algorithm).eta["loc"]
    return {
        "warm_rounds": warm_rounds,
        "split": seed,
        **here,
        "rounds_to_the_end": _sfvi(server).round if to_the_end else None,
        "exchanges_to_the_end": engine.exchanges if to_the_end else None,
        "error": float(((end - reference.loc) / reference.sd).abs().max()) if to_the_end else None,
    }


def _sfvi(server: Server) -> SFVIState:
    """SFVI's own state, behind a warm start or not."""
    state: Any = server.state.algorithm
    own: SFVIState = state if isinstance(state, SFVIState) else state.own
    return own


def table(content: Row) -> str:
    """A line a run: rounds and exchanges until near, and until the stopping rule, where the run went on to it."""
    lines = [f"{'warm rounds':>12}{'split':>7}{'rounds':>9}{'exchanges':>11}{'to the end':>12}{'error':>8}{'s':>7}"]
    for r in content["rows"]:
        end = f"{r['rounds_to_the_end']:>12}{r['error']:>8.2f}" if r["rounds_to_the_end"] else f"{'':>20}"
        lines.append(
            f"{r['warm_rounds']:>12}{r['split']:>7}{r['rounds']:>9}{r['exchanges']:>11}{end}{r['seconds']:>7.0f}"
        )
    lines.append(f"a warm start's rounds are {content['ours']['mean']:.2f} of a cold one's")
    lines.append(content["setting"])
    return "\n".join(lines)


def _png(rows: Sequence[Row]) -> bytes:
    """Exchanges until near against rounds of the warm start, a dot a split."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["warm_rounds"] for r in rows], [r["exchanges"] for r in rows], "o", color="#2563eb", alpha=0.7)
    axes.set(xlabel="rounds of SFVI-Avg beforehand", ylabel=f"exchanges until within {NEAR} sds", ylim=(0, None))
    axes.set_title("SFVI on six cities, two silos")
    return as_png(figure)
