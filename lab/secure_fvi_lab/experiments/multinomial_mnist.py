"""Empirical-Bayes multinomial regression on MNIST: Table S1 of the SFVI paper (Hassan et al. 2023, section S3.2).

25 silos of 200 images, and 5 of 10,000. SFVI, SFVI-Avg with one merge and with 50, PVI with 50 rounds, and silos on
their own. A silo takes 20 local steps a round where the paper takes 1,000, and SFVI 500 where it takes 50,000.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from secure_fvi.algorithms.base import Algorithm, Posterior, Problem
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import SFVIAvg
from secure_fvi.draws import draw_global
from secure_fvi.models.bnn import score
from secure_fvi.models.mnist import load
from secure_fvi.models.multinomial import class_log_probs, multinomial_regression
from secure_fvi_lab.experiments import Request, spread
from secure_fvi_lab.experiments.mnist_runs import Job, Look, each_seed, plot, run, summary
from secure_fvi_lab.experiments.mnist_runs import table as table
from secure_fvi_lab.experiments.partitions import evenly, take
from secure_fvi_lab.machine import machine

Row = dict[str, Any]
#: Table S1: accuracy on training and test images, %.
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    "25 x 200": {
        "independent": (73.0, 51.5), "SFVI-Avg, once": (65.7, 63.9), "SFVI-Avg": (71.3, 69.3), "SFVI": (83.8, 84.0),
    },
    "5 x 10000": {
        "independent": (88.7, 86.8), "SFVI-Avg, once": (90.4, 90.4), "SFVI-Avg": (90.1, 90.2), "SFVI": (90.7, 90.8),
    },
}  # fmt: skip
#: Draws of q(Z_G) for predictions.
_DRAWS = 20
#: Methods with so many steps that compiling them pays.
_COMPILED = ("SFVI-Avg", "PVI")
#: Local steps of PVI in one of SFVI-Avg's, chosen on seed 100: a round costs it no more bytes for them.
_PVI_STEPS = 3


class Size(NamedTuple):
    """One half of the table."""

    silos: int
    images: int  # a silo
    iterations: int  # of SFVI
    rounds: int
    local_steps: int
    sampling_rate: float
    seeds: int
    alone: int  # silos of which each is fitted alone
    compile: bool

    @property
    def name(self) -> str:
        return f"{self.silos} x {self.images}"


FULL = (Size(25, 200, 500, 50, 20, 1.0, 5, 5, True), Size(5, 10_000, 500, 50, 20, 0.1, 5, 5, True))
QUICK = (Size(25, 200, 100, 4, 10, 1.0, 1, 1, False),)


class Images(NamedTuple):
    """What a fit is scored on."""

    silos: list[dict[str, Tensor]]
    train: tuple[Tensor, Tensor]  # all silos'
    test: tuple[Tensor, Tensor]


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of multinomial-mnist.json, and the plot as PNG. Raises InputError where --data holds no `mnist`."""
    began, sizes = time.monotonic(), QUICK if request.quick else FULL
    rows: list[Row] = []
    for size, seed in each_seed(sizes):
        rows += _rows(size, seed, request)
    lines = summary(rows, ("setting", "method"))
    lines.sort(key=lambda line: list(PAPER).index(line["setting"]))
    for line in lines:
        line["paper"] = dict(zip(("train", "test"), PAPER[line["setting"]].get(line["method"], ()), strict=False))
    ours = [row for row in rows if row["setting"] == sizes[0].name and row["method"] == "SFVI"]
    content = {
        "name": "multinomial-mnist",
        "paper": "Table S1: test accuracy of SFVI 84.0% at 25 silos of 200 images, 90.8% at 5 silos of 10,000",
        "ours": {**spread([100 * row["test"] for row in ours]), "what": f"test accuracy of SFVI, %, {sizes[0].name}"},
        "lines": lines,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "seconds_since_start": round(time.monotonic() - began, 1),
        "bytes": ours[0]["bytes_up"] + ours[0]["bytes_down"],
        "machine": machine(),
        "setting": "; ".join(_said(size) for size in sizes)
        + f"; mean-field q, scales of the priors fitted from 0.1 on, plain sums, {_DRAWS} draws for a prediction, "
        f"10,000 test images; independent: the mean of {sizes[0].alone} silos",
        "rows": rows,
    }
    return content, plot(content)


def _said(size: Size) -> str:
    return (
        f"{size.silos} silos of {size.images} images of 28 x 28 pixels: {size.iterations} iterations of SFVI, "
        f"{size.rounds} rounds of {size.local_steps} local steps, PVI {_PVI_STEPS * size.local_steps}, on "
        f"{size.sampling_rate:.0%} of a silo's images"
    )


def methods(size: Size) -> Iterator[tuple[str, Algorithm]]:
    """What is fitted over all silos, by the table's names."""
    records = size.silos * size.images
    yield "SFVI", SFVI(iterations=size.iterations, schedule="cosine", sampling_rate=size.sampling_rate)
    for name, rounds, steps in (
        ("SFVI-Avg, once", 1, size.rounds * size.local_steps // 2),
        ("SFVI-Avg", size.rounds, size.local_steps),
    ):
        yield name, SFVIAvg(
            rounds=rounds, local_steps=steps, tolerance=0.0, decay=0.9, sampling_rate=size.sampling_rate,
            total_records=records,
        )  # fmt: skip
    yield "PVI", PVI(
        rounds=size.rounds, local_steps=_PVI_STEPS * size.local_steps, local_optimizer="adam", theta_learning_rate=0.03,
        sampling_rate=size.sampling_rate,
    )  # fmt: skip


def images(folder: Path | None, size: Size, seed: int) -> Images:
    """Silos of images drawn by the seed, and all test images. Raises InputError where there is no `mnist`."""
    data = load(folder, count=size.silos * size.images, seed=seed)
    test = load(folder, "test").records
    silos = take(data, evenly(len(data), size.silos, seed))[0]
    return Images(silos, _pair(data.records), _pair(test))


def _pair(records: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return records["x"].float(), records["y"]


def looking(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Look:
    """Accuracy on both, and the mean log predictive probability of test images, nats."""

    def look(problem: Problem, posterior: Posterior, local: object) -> Row:
        draws = draw_global(problem, posterior, _DRAWS, problem.seed)
        found = score(class_log_probs(draws, test[0]), test[1])
        scales = problem.density.constrain(posterior.eta["loc"], posterior.theta)[1]
        return {
            "test": found.accuracy,
            "train": score(class_log_probs(draws, train[0]), train[1]).accuracy,
            "log_likelihood": found.log_likelihood,
            **{name: float(value) for name, value in scales.items()},
        }

    return look


def _rows(size: Size, seed: int, request: Request) -> list[Row]:
    found, data, model = [], images(request.data, size, seed), multinomial_regression()
    for name, algorithm in methods(size):
        what = {"setting": size.name, "method": name, "seed": seed}
        job = Job(what, model, algorithm, data.silos, seed, size.compile and name in _COMPILED)
        found.append(run(job, looking(data.train, data.test), request))
    for k, silo in enumerate(data.silos[: size.alone]):
        what = {"setting": size.name, "method": "independent", "seed": seed, "silo": k}
        alone = SFVI(iterations=size.iterations, schedule="cosine", sampling_rate=size.sampling_rate)
        job = Job(what, model, alone, [silo], seed, looks=1)
        row = run(job, looking(_pair(silo), data.test), request)
        found.append({**row, "rounds": 0, "exchanges": 0, "bytes_up": 0, "bytes_down": 0})  # nothing leaves the silo
    return found
