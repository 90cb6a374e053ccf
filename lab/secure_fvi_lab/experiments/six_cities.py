"""Fits of six cities over random splits into silos of 300 and 237, beside a reference on all children.

sfvi-six-cities   SFVI-Avg against global VI of the same family and bound, which is SFVI on one silo that holds all
                  children. Hassan et al. (2023, S3.1) report that SFVI-Avg "failed to produce reasonable results for
                  this example"
pvi-six-cities    structured PVI, K = 1 against global VI of the same family and bound, K = 20 against NUTS on the
                  pooled children; SFVI and SFVI-Avg of the same family beside it
sfvi-warm-start   SFVI from a cold start and after a few rounds of SFVI-Avg, in rounds and exchanges. The same paper
                  (S3.2, Figure S2), on MNIST: "as little as five communication rounds with 10^3 local steps" before
                  SFVI "can reduce the number of steps required to reach convergence by a factor of two"

Errors are in posterior standard deviations of the reference.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI, SFVIState, WarmStart
from secure_fvi.algorithms.sfvi_avg import COUNT, MERGE, SFVIAvg
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.families import Conditional
from secure_fvi.fitting import fit
from secure_fvi.models.six_cities import PROGRAM
from secure_fvi.server import Server
from secure_fvi_lab.experiments import Experiment, Request, Row, lines_of, panels, spread
from secure_fvi_lab.references import sample_nuts

SIZES = (300, 237)
NAMES = ("beta 1", "beta 2", "beta 3", "beta 4", "omega")
#: Of two silos each learns the other's term from the total: fit for published data only.
_MASKED = Masked(min_cohort=2, consistency_check=False)
#: Global VI: iterations, learning rate and seeds of the runs that are averaged. One run's Monte-Carlo error in omega is
#: about .03 sd.
_ITERATIONS, _RATE, _SEEDS = 40_000, 0.02, (0, 1)
_QUICK_ITERATIONS, _QUICK_SEEDS = 5_000, (0,)


class Reference(NamedTuple):
    loc: Tensor  # (5,)
    sd: Tensor  # (5,)
    seconds: float

    def content(self) -> Row:
        """As JSON has it."""
        return {"mean": self.loc.tolist(), "sd": self.sd.tolist(), "seconds": self.seconds}

    @classmethod
    def of(cls, content: Row) -> Reference:
        """The reverse of `content`, in double precision."""
        mean, sd = (torch.tensor(content[key], dtype=torch.float64) for key in ("mean", "sd"))
        return cls(mean, sd, content["seconds"])


def pooled_reference(request: Request, **options: Any) -> Reference:
    """Global VI at the length that a reproduction takes it at, with these options of SFVI."""
    iterations, seeds = (_QUICK_ITERATIONS, _QUICK_SEEDS) if request.quick else (_ITERATIONS, _SEEDS)
    found = request.once(
        "global VI on the pooled children", (iterations, seeds, options),
        lambda: global_vi(iterations, seeds, **options).content(),
    )  # fmt: skip
    return Reference.of(found)


def global_vi(iterations: int, seeds: Sequence[int], **options: Any) -> Reference:
    """The mean of long runs of SFVI at falling learning rates, on one silo that holds all children."""
    began, loc, sd = time.monotonic(), [], []
    for seed in seeds:
        algorithm = SFVI(iterations=iterations, learning_rate=_RATE, schedule="linear", **options)
        result = fit(PROGRAM.model, [PROGRAM.load().records], algorithm, Plain(), seed=seed)
        loc.append(result.variational.eta["loc"])
        sd.append(result.variational.family.stddev(result.variational.eta))
    return Reference(torch.stack(loc).mean(0), torch.stack(sd).mean(0), round(time.monotonic() - began, 1))


def split(seed: int) -> list[dict[str, Tensor]]:
    """All children, shuffled and dealt to two silos."""
    records = PROGRAM.load().records
    order = torch.randperm(sum(SIZES), generator=torch.Generator().manual_seed(seed))
    return [{name: value[at] for name, value in records.items()} for at in torch.split(order, list(SIZES))]


def error_row(
    name: str, seed: int, algorithm: Algorithm, reference: Reference, aggregation: SecureSum = _MASKED
) -> Row:
    """How far a fit is from the reference, and what it cost."""
    result = fit(PROGRAM.model, split(seed), algorithm, aggregation, seed=seed)
    eta = result.variational.eta
    errors = (eta["loc"] - reference.loc) / reference.sd
    ratio = result.variational.family.stddev(eta) / reference.sd
    return {
        "algorithm": name,
        "split": seed,
        "error": float(errors.abs().max()),
        "errors": errors.tolist(),
        "sd_ratio": ratio.tolist(),
        "rounds": result.rounds,
        "converged": result.converged,
        "exchanges": result.aggregation["exchanges"],
        "bytes_up_per_silo": result.aggregation["bytes_up_per_silo"],
        "bytes_down_per_silo": result.aggregation["bytes_down_per_silo"],
        "seconds": round(result.seconds, 1),
    }


def table(content: Row) -> str:
    """The rows, narrow enough for a terminal, and the summary."""
    said = {True: "yes", False: "no", None: "not assessed"}
    rows = []
    for row in content["rows"]:
        cost = (row["rounds"], row["exchanges"], f"{row['bytes_up_per_silo'] + row['bytes_down_per_silo']:,}")
        ended = (f"{row['seconds']:.0f}", said[row["converged"]])
        rows.append((row["algorithm"], row["split"], f"{row['error']:.2f}", *cost, *ended))
    head = ("algorithm", "split", "error", "rounds", "exchanges", "bytes a silo", "s", "converged")
    lines = lines_of(head, rows)
    ours = content["ours"]
    lines.append(f"median {ours['median']:.2f}, largest {ours['largest']:.2f}")
    lines.append(content["setting"])
    return "\n".join(lines)


def dots(rows: Sequence[Row], colours: Mapping[str, str], title: str) -> Figure:
    """Errors by coordinate, a dot a fit, an algorithm a colour."""
    figure, axes = panels(1, 1, 6.4, 3.2)
    for offset, (name, colour) in enumerate(colours.items()):
        chosen = [r["errors"] for r in rows if r["algorithm"] == name]
        at = [i + 0.15 * offset for i in range(len(NAMES))]
        for k, errors in enumerate(chosen):
            axes.plot(at, errors, "o", color=colour, alpha=0.7, ms=5, label=name if k == 0 else None)
    axes.axhspan(-0.2, 0.2, color="#e5e7eb", zorder=0)
    axes.axhline(0.0, color="#6b7280", lw=0.8)
    axes.set_xticks(range(len(NAMES)), NAMES)
    axes.set(ylabel="error, posterior sds", ylim=(-0.6, 0.6))
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, loc="upper left", ncols=len(colours))
    return figure


# ---- sfvi-six-cities ----

SPLITS, QUICK_SPLITS = 10, 1
#: Fewer local steps than the default, with more rounds: whether a run that says that it has converged is right.
FEW_STEPS, FEW_STEPS_ROUNDS = (20, 50, 100, 300), 60


def _sfvi_avg(request: Request) -> tuple[Row, Figure]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)  # a text's version that runs off is part of the table
        reference = pooled_reference(request)

        def kept(name: str, seed: int, algorithm: SFVI | SFVIAvg) -> Row:
            found: Row = request.once(
                f"{name}, split {seed + 1}", algorithm, partial(error_row, name, seed, algorithm, reference)
            )
            return found

        splits = [kept("sfvi-avg", seed, SFVIAvg()) for seed in range(QUICK_SPLITS if request.quick else SPLITS)]
        others: dict[str, SFVI | SFVIAvg] = {
            "sfvi": SFVI(),
            "sfvi-avg, the paper's text": SFVIAvg(rounds=8, scale_entropy=False),
            "sfvi-avg, equal weights": SFVIAvg(weights="equal"),
        }
        for steps in FEW_STEPS:
            others[f"sfvi-avg, {steps} local steps"] = SFVIAvg(rounds=FEW_STEPS_ROUNDS, local_steps=steps)
        beside = [] if request.quick else [kept(name, 0, algorithm) for name, algorithm in others.items()]
    worst = [r["error"] for r in splits]
    content = {
        "paper": "failed to produce reasonable results (S3.1)",
        "ours": {
            **spread(worst),
            "what": "largest error of a posterior mean, in sds of global VI",
            "median": statistics.median(worst),
            "largest": max(worst),
        },
        "bytes": splits[0]["bytes_up_per_silo"] + splits[0]["bytes_down_per_silo"],
        "setting": (
            f"silos of {SIZES[0]} and {SIZES[1]} children, random splits, masked sums, full covariance, ELBO, weights "
            "N_j / N"
        ),
        "reference": reference.content(),
        "rows": [*splits, *beside],
    }
    colours = {"sfvi-avg": "#2563eb", "sfvi": "#d97706"}
    return content, dots(content["rows"], colours, "Six cities, two silos, against global VI")


# ---- pvi-six-cities ----

SAMPLES = 20
#: PVI's own choice, for the other algorithms too: a record's scale follows Z_G.
FAMILY = Conditional(varying_scale=True)
SYNCHRONOUS, SEQUENTIAL, WEIGHTED = "pvi, synchronous", "pvi, sequential", f"pvi, K = {SAMPLES}"


class Effort(NamedTuple):
    splits: int
    rounds: int
    passes: int  # of the sequential schedule
    local_steps: int
    draws: int  # of NUTS, a chain
    warmup: int


FULL, QUICK = Effort(5, 8, 3, 1000, 2000, 300), Effort(1, 3, 1, 200, 60, 60)


def _pvi(request: Request) -> tuple[Row, Figure]:
    effort = QUICK if request.quick else FULL
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
            request.once(
                f"{name}, split {seed + 1}",
                algorithm,
                # A sequential schedule shows each silo's change: for published data only.
                partial(error_row, name, seed, algorithm, reference, Plain() if name == SEQUENTIAL else _MASKED),
            )
            for name, seed, algorithm, reference in jobs
        ]
    worst = {name: max(r["error"] for r in rows if r["algorithm"] == name) for name in (SEQUENTIAL, WEIGHTED)}
    errors = [r["error"] for r in rows if r["algorithm"] == SYNCHRONOUS]
    first = rows[0]
    content = {
        "paper": "no local latent variables",
        "ours": {
            **spread(errors),
            "what": "largest error of a posterior mean, synchronous, in sds of global VI",
            "median": statistics.median(errors),
            "largest": max(errors),
            "largest_sequential": worst[SEQUENTIAL],
            "largest_against_nuts": worst[WEIGHTED],
        },
        "bytes": first["bytes_up_per_silo"] + first["bytes_down_per_silo"],
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


# ---- sfvi-warm-start ----

#: Near: the mean of the last WINDOW iterates lies within NEAR posterior sds of global VI in every coordinate.
NEAR, WINDOW = 0.5, 100
WARM_ROUNDS, QUICK_WARM_ROUNDS, LOCAL_STEPS = (0, 1, 2, 3, 4, 5), (0, 3), 1000
WARM_SPLITS, QUICK_WARM_SPLITS = 3, 1
#: Warm starts after which the first split runs on until the stopping rule ends it.
TO_THE_END = (0, 5)


def _warm_start(request: Request) -> tuple[Row, Figure]:
    quick = request.quick
    reference = pooled_reference(request)
    rows, options = [], (NEAR, WINDOW, LOCAL_STEPS)
    for warm_rounds in QUICK_WARM_ROUNDS if quick else WARM_ROUNDS:
        for seed in range(QUICK_WARM_SPLITS if quick else WARM_SPLITS):
            to_the_end = not quick and seed == 0 and warm_rounds in TO_THE_END
            make = partial(warm_row, warm_rounds, seed, reference, to_the_end)
            rows.append(request.once(f"SFVI after {warm_rounds} rounds of SFVI-Avg, split {seed + 1}", options, make))
    cold, warm = ([r["rounds"] for r in rows if (r["warm_rounds"] > 0) == after] for after in (False, True))
    shares = [rounds / statistics.mean(cold) for rounds in warm]
    content = {
        "paper": "5 rounds of 10^3 local steps halve the steps to convergence (MNIST, S3.2)",
        "ours": {**spread(shares), "what": "rounds of SFVI until near, as a share of a cold start's"},
        "bytes": rows[-1]["bytes_up_per_silo"] + rows[-1]["bytes_down_per_silo"],
        "setting": (
            f"silos of {SIZES[0]} and {SIZES[1]} children, random splits, masked sums, full covariance, ELBO, "
            f"{LOCAL_STEPS} local steps a warm round; rounds of SFVI, at default options, until the mean of the last "
            f"{WINDOW} iterates is within {NEAR} sds of global VI"
        ),
        "reference": reference.content(),
        "rows": rows,
    }
    return content, _exchanges(rows)


def warm_row(warm_rounds: int, seed: int, reference: Reference, to_the_end: bool) -> Row:
    """One run of SFVI with its default options, until it is near, or until its stopping rule ends it."""
    algorithm = SFVI(warm_start=WarmStart(warm_rounds, LOCAL_STEPS))
    here = Row()
    run = sf.run(PROGRAM.model, split(seed), algorithm, _MASKED, seed=seed, threads=1)
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
                **engine.traffic,
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


def warm_table(content: Row) -> str:
    """A line a run: rounds and exchanges until near, and until the stopping rule, where the run went on to it."""
    rows = []
    for r in content["rows"]:
        end = (r["rounds_to_the_end"], f"{r['error']:.2f}") if r["rounds_to_the_end"] else ("", "")
        rows.append((r["warm_rounds"], r["split"], r["rounds"], r["exchanges"], *end, f"{r['seconds']:.0f}"))
    lines = lines_of(("warm rounds", "split", "rounds", "exchanges", "to the end", "error", "s"), rows, left=0)
    lines.append(f"a warm start's rounds are {content['ours']['mean']:.2f} of a cold one's")
    lines.append(content["setting"])
    return "\n".join(lines)


def _exchanges(rows: Sequence[Row]) -> Figure:
    """Exchanges until near against rounds of the warm start, a dot a split."""
    figure, axes = panels(1, 1, 5.0, 3.2)
    axes.plot([r["warm_rounds"] for r in rows], [r["exchanges"] for r in rows], "o", color="#2563eb", alpha=0.7)
    axes.set(xlabel="rounds of SFVI-Avg beforehand", ylabel=f"exchanges until within {NEAR} sds", ylim=(0, None))
    axes.set_title("SFVI on six cities, two silos")
    return figure


EXPERIMENTS = {
    "pvi-six-cities": Experiment(_pvi, table),
    "sfvi-six-cities": Experiment(_sfvi_avg, table),
    "sfvi-warm-start": Experiment(_warm_start, warm_table),
}
