"""SFVI-Avg on six cities, over random splits into silos of 300 and 237, against global VI of the same family and bound.

Hassan et al. (2023, S3.1) report that SFVI-Avg "failed to produce reasonable results for this example". Global VI is
SFVI on one silo that holds all children; errors are in its posterior standard deviations.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import SFVIAvg
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.fitting import fit
from secure_fvi.models.six_cities import PROGRAM
from secure_fvi.results import Result
from secure_fvi_lab.experiments import Request, as_png, spread
from secure_fvi_lab.machine import machine

SIZES = (300, 237)
SPLITS, QUICK_SPLITS = 10, 1
#: Fewer local steps than the default, with more rounds: whether a run that says that it has converged is right.
FEW_STEPS, FEW_STEPS_ROUNDS = (20, 50, 100, 300), 60
NAMES = ("beta 1", "beta 2", "beta 3", "beta 4", "omega")
#: Global VI: iterations, learning rate and seeds of the runs that are averaged. One run's Monte-Carlo error in omega is
#: about .03 sd.
_ITERATIONS, _RATE, _SEEDS = 40_000, 0.02, (0, 1)
_QUICK_ITERATIONS, _QUICK_SEEDS = 5_000, (0,)

Row = dict[str, Any]


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


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of sfvi-six-cities.json, and the plot as PNG."""
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)  # a text's version that runs off is part of the table
        reference = pooled_reference(request)

        def kept(name: str, seed: int, algorithm: SFVI | SFVIAvg) -> Row:
            found: Row = request.once(
                f"{name}, split {seed + 1}", algorithm, lambda: row(name, seed, algorithm, reference)
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
        "name": "sfvi-six-cities",
        "paper": "failed to produce reasonable results (S3.1)",
        "ours": {
            **spread(worst),
            "what": "largest error of a posterior mean, in sds of global VI",
            "median": statistics.median(worst),
            "largest": max(worst),
        },
        "seconds": round(time.monotonic() - began, 1),
        "bytes": splits[0]["bytes_up_per_silo"] + splits[0]["bytes_down_per_silo"],
        "machine": machine(),
        "setting": (
            f"silos of {SIZES[0]} and {SIZES[1]} children, random splits, masked sums, full covariance, ELBO, weights "
            "N_j / N"
        ),
        "reference": reference.content(),
        "rows": [*splits, *beside],
    }
    colours = {"sfvi-avg": "#2563eb", "sfvi": "#d97706"}
    return content, dots(content["rows"], colours, "Six cities, two silos, against global VI")


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


def row(name: str, seed: int, algorithm: SFVI | SFVIAvg, reference: Reference) -> Row:
    """One fit beside the reference, with what it cost."""
    # Of two silos each learns the other's term from the total: fit for published data only.
    masked = Masked(min_cohort=2, consistency_check=False)
    return error_row(name, seed, fit(PROGRAM.model, split(seed), algorithm, masked, seed=seed), reference)


def error_row(name: str, seed: int, result: Result, reference: Reference) -> Row:
    """How far a fit is from the reference, and what it cost."""
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
    head = f"{'algorithm':<28}{'split':>6}{'error':>8}{'rounds':>8}{'exchanges':>11}{'bytes a silo':>14}{'s':>7}"
    lines = [f"{head}  converged"]
    said = {True: "yes", False: "no", None: "not assessed"}
    for row in content["rows"]:
        size = row["bytes_up_per_silo"] + row["bytes_down_per_silo"]
        lines.append(
            f"{row['algorithm']:<28}{row['split']:>6}{row['error']:>8.2f}{row['rounds']:>8}{row['exchanges']:>11}"
            f"{size:>14,}{row['seconds']:>7.0f}  {said[row['converged']]}"
        )
    ours = content["ours"]
    lines.append(f"median {ours['median']:.2f}, largest {ours['largest']:.2f}")
    lines.append(content["setting"])
    return "\n".join(lines)


def dots(rows: Sequence[Row], colours: Mapping[str, str], title: str) -> bytes:
    """Errors by coordinate as PNG, a dot a fit, an algorithm a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
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
    return as_png(figure)
