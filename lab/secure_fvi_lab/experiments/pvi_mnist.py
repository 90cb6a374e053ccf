"""PVI on MNIST: the PVI paper's section 5.3 (Ashman et al. 2022), all 60,000 training images.

Ten silos that are alike, and a hundred silos of two digits each. The network is convolutional, with 5,994 weights; the
paper's is dense, with 200 hidden units and 159,010 weights. Local fits take natural gradients with slow scales, where
the paper takes Adam.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from secure_fvi.algorithms.base import Posterior, Problem
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.draws import draw_global
from secure_fvi.models.base import Dataset
from secure_fvi.models.bnn import score
from secure_fvi.models.convolutional import class_log_probs, convolutional_network
from secure_fvi.models.mnist import load
from secure_fvi_lab.experiments import Request, as_png, spread
from secure_fvi_lab.experiments.mnist_runs import Job, Look, each_seed, run
from secure_fvi_lab.experiments.pvi_mnist_shards import alike, shards
from secure_fvi_lab.machine import machine

Row = dict[str, Any]
#: Draws of the network's weights for its predictions.
_DRAWS = 10
SPLITS: dict[str, Callable[[Dataset, int, int], list[dict[str, Tensor]]]] = {"alike": alike, "two digits": shards}
#: The largest test errors that were asked for.
AIMS = {"alike": 0.020, "two digits": 0.030}


class Size(NamedTuple):
    """One split, and how it is fitted."""

    split: str
    silos: int
    rounds: int
    local_steps: int
    batch: int  # images of a silo in a local step
    damping: float
    learning_rate: float
    scale_rate: float
    decay: float  # of the learning rate, by round
    scale: float  # sd of the prior
    seeds: int
    images: int | None = None  # None: all

    @property
    def name(self) -> str:
        return f"{self.silos} silos, {self.split}"


FULL = (
    Size("alike", 10, 180, 20, 100, 0.1, 0.25, 0.1, 0.985, 0.5, 5),
    Size("two digits", 100, 160, 5, 50, 0.06, 0.2, 0.1, 0.992, 1.0, 5),
)
QUICK = (
    Size("alike", 10, 10, 10, 100, 0.1, 0.25, 0.1, 0.985, 0.5, 1, 10_000),
    Size("two digits", 20, 20, 4, 50, 0.1, 0.2, 0.1, 0.99, 1.0, 1, 10_000),
)


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of pvi-mnist.json, and the plot as PNG. Raises InputError where --data holds no `mnist`."""
    began, sizes = time.monotonic(), QUICK if request.quick else FULL
    test = load(request.data, "test").records
    look = looking(test["x"].float(), test["y"])
    rows: list[Row] = []
    for size, seed in each_seed(sizes):
        rows.append(_row(size, seed, request.data, look, request))
    lines = [_line(size, [row for row in rows if row["setting"] == size.name]) for size in sizes]
    ours = lines[-1]
    content = {
        "name": "pvi-mnist",
        "paper": "5.3.2: test error of 3% for 100 silos of two digits; 5.3.1: for 10 silos that are alike only a plot",
        "ours": {**ours["error"], "what": f"test error after the last round, {ours['setting']}"},
        "lines": lines,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "seconds_since_start": round(time.monotonic() - began, 1),
        "bytes": ours["bytes"],
        "machine": machine(),
        "setting": "; ".join(_said(size) for size in sizes)
        + f"; 28 x 28 pixels, two convolutional layers of 8 and 16 filters, 5,994 weights, mean-field q, plain sums, "
        f"{_DRAWS} draws for a prediction, 10,000 test images; communications: rounds times silos, as the paper counts",
        "rows": rows,
    }
    return content, curves(rows, AIMS)


def pvi(size: Size, images: int) -> PVI:
    """For silos of so many images."""
    return PVI(
        rounds=size.rounds, damping=size.damping, local_steps=size.local_steps, family="diagonal",
        learning_rate=size.learning_rate, scale_rate=size.scale_rate, decay=size.decay, start_spread=0.1,
        sampling_rate=min(1.0, size.batch / images),
    )  # fmt: skip


def looking(x: Tensor, y: Tensor) -> Look:
    """Scores on test images `x` (N, 784) of the digits `y` (N,)."""

    def look(problem: Problem, posterior: Posterior, local: object) -> Row:
        found = score(class_log_probs(draw_global(problem, posterior, _DRAWS, problem.seed), x), y)
        return {"test": found.accuracy, "log_likelihood": found.log_likelihood}

    return look


def _row(size: Size, seed: int, folder: Path | None, look: Look, request: Request) -> Row:
    train = load(folder, count=size.images, seed=seed)
    silos = SPLITS[size.split](train, size.silos, seed)
    images = len(silos[0]["y"])
    what = {"setting": size.name, "split": size.split, "silos": size.silos, "images": images, "seed": seed}
    job = Job(what, convolutional_network(scale=size.scale), pvi(size, images), silos, seed, looks=15)
    return run(job, look, request)


def _line(size: Size, rows: Sequence[Row]) -> Row:
    return {
        "setting": size.name,
        "error": spread([1 - row["test"] for row in rows]),
        "log_likelihood": spread([row["log_likelihood"] for row in rows]),
        "aim": AIMS[size.split],
        "rounds": size.rounds,
        "communications": size.rounds * size.silos,
        "aim_met_at": _met(rows, AIMS[size.split]),
        "bytes": rows[0]["bytes_up"] + rows[0]["bytes_down"],
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def _met(rows: Sequence[Row], aim: float) -> int | None:
    """Communications after which all seeds' errors were first seen at or under the aim; None where one never was."""
    first = [next((p["round"] for p in row["curve"] if 1 - p["test"] <= aim), None) for row in rows]
    met = [rounds for rounds in first if rounds is not None]
    return max(met) * rows[0]["silos"] if len(met) == len(rows) else None


def _said(size: Size) -> str:
    images = (size.images or 60_000) // size.silos
    return (
        f"{size.name}, {images} images each: {size.rounds} rounds of {size.local_steps} local steps on {size.batch} "
        f"images, damping {size.damping}, prior sd {size.scale}"
    )


# ----
# The lines of pvi-mnist for a terminal, and its plot: test error by communications, as the paper's figures 6 and 8

_COLOURS = ("#2563eb", "#d97706", "#059669")


def table(content: Row) -> str:
    """A line a split: error over seeds, the aim, and what it took."""
    lines = [
        f"{'setting':<24}{'test error':>12}{'sd':>8}{'seeds':>7}{'aim':>7}{'log lik':>9}{'rounds':>8}"
        f"{'communications':>16}{'aim met at':>12}{'MB a silo':>11}{'seconds':>9}"
    ]
    for line in content["lines"]:
        error = line["error"]
        sd = f"{error['sd']:.4f}" if error["seeds"] > 1 else ""
        lines.append(
            f"{line['setting']:<24}{error['mean']:>12.4f}{sd:>8}{error['seeds']:>7}{line['aim']:>7.3f}"
            f"{line['log_likelihood']['mean']:>9.3f}{line['rounds']:>8}{line['communications']:>16}"
            f"{line['aim_met_at'] or 'not met':>12}{line['bytes'] / 1e6:>11.1f}{line['seconds']:>9.0f}"
        )
    return "\n".join(
        [
            *lines,
            "log lik: nats an image; communications: rounds times silos; aim met at: communications",
            content["setting"],
        ]
    )


def curves(rows: Sequence[Row], aims: Mapping[str, float]) -> bytes:
    """Test error and log-likelihood by communications; a line a seed, dotted what was aimed at."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(aims, _COLOURS, strict=False))
    for row in rows:
        at = [point["round"] * row["silos"] for point in row["curve"]]
        colour = colours[row["split"]]
        left.plot(at, [1 - point["test"] for point in row["curve"]], color=colour, lw=1.2, label=row["setting"])
        right.plot(at, [-point["log_likelihood"] for point in row["curve"]], color=colour, lw=1.2)
        left.axhline(aims[row["split"]], color=colour, lw=0.8, ls=":")
    left.set(xlabel="communications", ylabel="test error", xscale="log", yscale="log")
    right.set(xlabel="communications", ylabel="minus test log-likelihood, nats an image", xscale="log", yscale="log")
    handles, labels = left.get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    left.legend(one_each.values(), one_each.keys(), frameon=False, fontsize=8)
    return as_png(figure)
