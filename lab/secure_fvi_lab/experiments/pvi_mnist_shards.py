"""PVI on MNIST over 100 silos of two digits each: the PVI paper's section 5.3.2 (Ashman et al. 2022), made smaller.

A Bayesian neural network with 32 hidden units on 14 x 14 pixels, 10,000 images, 100 a silo. The paper searched for its
damping (0.025 for these shards, 0.2 for ten like silos); here it is found during the run. Beside it runs with a fixed,
larger damping, as controls, ten silos that are alike, and global VI on the pooled images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.pvi import PVI, PVIState
from secure_fvi.compiled import threads
from secure_fvi.draws import draw_global
from secure_fvi.models.base import Dataset
from secure_fvi.models.bnn import Score, class_log_probs, score
from secure_fvi.models.mnist import PROGRAM, load
from secure_fvi_lab.experiments import Request, as_png, spread
from secure_fvi_lab.experiments.partitions import label_shards, take
from secure_fvi_lab.machine import machine

Row = dict[str, Any]
#: Draws of the network's weights for its predictions.
_DRAWS = 20
#: The local fits: the paper's Adam, with a larger rate for fewer steps. Its rate is in standard deviations of q.
_LOCAL: Row = {"family": "diagonal", "local_optimizer": "adam", "learning_rate": 0.02, "start_spread": 0.1}


class Size(NamedTuple):
    """How much is run."""

    silos: int
    images: int
    rounds: int
    control_rounds: int
    local_steps: int
    seeds: int
    alike: int  # silos of the homogeneous split; 0: left out
    controls: tuple[float, ...]  # fixed dampings


FULL = Size(100, 10_000, 30, 12, 40, 3, 10, (0.1, 0.3, 1.0))
QUICK = Size(30, 3_000, 20, 8, 30, 1, 0, (1.0,))


class Data(NamedTuple):
    """Training images, and the test images to predict."""

    train: Dataset
    x: Tensor  # (N, 196)
    y: Tensor  # (N,)


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of pvi-mnist-shards.json, and the plot as PNG. Raises InputError where --data holds no `mnist`."""
    began, size = time.monotonic(), QUICK if request.quick else FULL
    rows = []
    for seed in range(size.seeds):
        data = images(request.data, size.images, seed)
        silos = shards(data.train, size.silos, seed)
        jobs = [("label shards", silos, pvi(size, "auto"))]
        if not seed:  # the controls
            jobs += [("label shards", silos, pvi(size, damping)) for damping in size.controls]
        if size.alike:
            jobs.append(("alike", alike(data.train, size.alike, seed), pvi(size, "auto", 0.1)))
        if not seed:
            jobs.append(("pooled", [data.train.records], pooled(size)))
        for split, parts, algorithm in jobs:
            what = f"seed {seed}: {split}, {len(parts)} silos, damping {algorithm.damping}"
            rows.append(request.once(what, algorithm, partial(run, split, parts, algorithm, data, seed)))
    ours = [row for row in rows if row["split"] == "label shards" and row["asked_damping"] == "auto"]
    errors = [row["error"][-1] for row in ours]
    content = {
        "name": "pvi-mnist-shards",
        "paper": "test error 3% with a damping of 0.025 that was searched for; larger ones diverge (5.3, E.3)",
        "ours": {
            **spread(errors),
            "what": "share of the test images that is misclassified after the last round",
            "diverged": sum(diverged(row) for row in ours),
        },
        "seconds": round(time.monotonic() - began, 1),
        "bytes": ours[0]["bytes_up_per_silo"] + ours[0]["bytes_down_per_silo"],
        "machine": machine(),
        "setting": (
            f"{size.images} images of 14 x 14 pixels, {size.silos} silos with two shards of one digit each, 32 hidden "
            f"units, mean-field q, prior N(0, I), {size.rounds} rounds of {size.local_steps} local steps on a quarter "
            "of a silo's images, plain sums; 10,000 test images"
        ),
        "rows": rows,
    }
    return content, plot(rows)


def images(folder: Path | None, count: int, seed: int) -> Data:
    """`count` training images drawn by the seed, and all test images."""
    test = load(folder, "test", pool=2).records
    return Data(load(folder, count=count, seed=seed, pool=2), test["x"].float(), test["y"])


def shards(train: Dataset, silos: int, seed: int) -> list[dict[str, Tensor]]:
    """Two shards of images sorted by digit to each silo, as McMahan et al. (2017) dealt them."""
    return take(train, label_shards(train.records["y"], silos, 2, seed))[0]


def alike(train: Dataset, silos: int, seed: int) -> list[dict[str, Tensor]]:
    """Random parts of equal size."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    return take(train, list(order[: len(train) // silos * silos].split(len(train) // silos)))[0]


def pvi(size: Size, damping: float | Literal["auto"], sampling_rate: float = 0.25) -> PVI:
    """The lines of the plot."""
    rounds = size.rounds if damping == "auto" else size.control_rounds
    return PVI(rounds=rounds, damping=damping, local_steps=size.local_steps, sampling_rate=sampling_rate, **_LOCAL)


def pooled(size: Size) -> PVI:
    """Global VI: one silo with all images, whose site is the whole likelihood."""
    return PVI(rounds=5, damping=1.0, local_steps=1000, sampling_rate=500 / size.images, **_LOCAL)


def run(split: str, silos: Sequence[dict[str, Tensor]], algorithm: PVI, data: Data, seed: int) -> Row:
    """One fit, looked at after every round. All of the row follows from broadcasts and totals, and test images.

    `improper`: whether the full step of the damping asked for would have left q improper, which ends a run without the
    safeguard; what is reported goes on with the part that the server took.
    """
    going = sf.run(PROGRAM.model, silos, algorithm, Plain(), seed=seed, dtype=torch.float32, compile=True, threads=1)
    server, engine, rounds = going.server, going.engine, list[Row]()
    before: PVIState = server.state.algorithm
    for progress in going:
        after = server.state.algorithm
        with threads(1):
            draws = draw_global(server.problem, server.program.posterior(after), _DRAWS, seed)
            found = score(class_log_probs(draws, data.x), data.y)
        rounds.append(_looked_at(algorithm, before, after, progress.learning_rate, found))
        before = after
    return {
        "split": split,
        "silos": len(silos),
        "asked_damping": algorithm.damping,
        "seed": seed,
        **{key: [r[key] for r in rounds] for key in rounds[0]},
        "bytes_up_per_silo": max(engine.bytes_up.values()),
        "bytes_down_per_silo": max(engine.bytes_down.values()),
        "seconds": round(going.seconds, 1),
    }


def _looked_at(algorithm: PVI, before: PVIState, after: PVIState, damping: float, found: Score) -> Row:
    asked = damping if algorithm.damping == "auto" else algorithm.damping
    moved = float(after.moved.max())
    return {
        "error": 1 - found.accuracy,
        "log_likelihood": found.log_likelihood,
        "damping": damping,
        "halvings": after.halvings - before.halvings,
        "skipped": after.skipped - before.skipped,
        "last_change_sd": moved if math.isfinite(moved) else None,
        "improper": not before.q.plus(after.residual, asked).proper,
        "finite": after.q.proper and math.isfinite(found.log_likelihood),
    }


def diverged(row: Row) -> bool:
    """Whether q was improper or not finite in any round, predicts worse at the end than equal chances for all digits,
    or errs more than twice as often at the end as it did on the way."""
    uniform = -math.log(10)
    worse = row["error"][-1] > 2 * min(row["error"]) or row["log_likelihood"][-1] < uniform
    return worse or any(row["improper"]) or not all(row["finite"])


# ---- The lines of pvi-mnist-shards for a terminal, and its plot ----

_COLOURS = ("#2563eb", "#059669", "#d97706", "#dc2626", "#7c3aed", "#6b7280")


def table(content: Row) -> str:
    """A line a run: where it ended, which damping it took, and what happened to q on the way."""
    lines = [
        f"{'split':<14}{'silos':>6}{'damping':>9}{'seed':>6}{'rounds':>8}{'error':>8}{'log lik':>9}"
        f"{'smallest to largest':>21}{'halved':>8}{'improper':>10}{'skipped':>9}"
    ]
    for row in content["rows"]:
        taken = f"{min(row['damping']):.3f} to {max(row['damping']):.3f}"
        lines.append(
            f"{row['split']:<14}{row['silos']:>6}{row['asked_damping']:>9}{row['seed']:>6}{len(row['error']):>8}"
            f"{row['error'][-1]:>8.3f}{row['log_likelihood'][-1]:>9.2f}{taken:>21}{sum(row['halvings']):>8}"
            f"{sum(row['improper']):>10}{sum(row['skipped']):>9}"
        )
    ours = content["ours"]
    lines.append(
        f"damping found during the run: test error {ours['mean']:.3f} (sd {ours['sd']:.3f} over {ours['seeds']} "
        f"seeds), {ours['diverged']} diverged"
    )
    lines.append("improper: rounds in which the whole step would have left q improper; skipped: silos with an improper")
    lines.append("cavity, over rounds")
    lines.append(content["setting"])
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> bytes:
    """Test error, log-likelihood and damping by round; a colour a damping, a line a seed, dashed for silos alike."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    kinds = list(dict.fromkeys(_kind(row) for row in rows if row["split"] != "pooled"))
    for axes, (key, label, scale) in zip(
        panels,
        (
            ("error", "test error", "log"),
            ("log_likelihood", "test log-likelihood, nats an image", "linear"),
            ("damping", "damping taken", "log"),
        ),
        strict=True,
    ):
        for kind, colour in zip(kinds, _COLOURS, strict=False):
            for row in (r for r in rows if _kind(r) == kind):
                style = "--" if row["split"] == "alike" else "-"
                axes.plot(range(1, len(row[key]) + 1), row[key], style, color=colour, lw=1.2, label=kind)
        for row in (r for r in rows if r["split"] == "pooled" and key != "damping"):
            axes.axhline(row[key][-1], color="#111827", lw=0.8, ls=":", label="global VI, pooled")
        axes.set(xlabel="round", ylabel=label, yscale=scale)
    panels[1].set_ylim(-4, 0)
    handles, labels = panels[0].get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    figure.legend(one_each.values(), one_each.keys(), frameon=False, loc="outside lower center", ncols=4, fontsize=8)
    return as_png(figure)


def _kind(row: Row) -> str:
    return f"{row['silos']} silos, {row['split']}, damping {row['asked_damping']}"
