"""Fits on MNIST that are looked at on the way and kept, so that an experiment that was stopped goes on: what
multinomial-mnist and hbnn-mnist share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from secure_fvi.algorithms.base import Algorithm, Posterior, Problem
from secure_fvi.compiled import threads
from secure_fvi.draws import LocalPosterior
from secure_fvi.federated_model import FederatedModel
from secure_fvi_lab.experiments import Request, Tell, as_png, spread
from secure_fvi_lab.experiments.watched import Watched

Row = dict[str, Any]


class Job(NamedTuple):
    """One fit."""

    what: Row  # which row of the experiment this is: method, silos, seed
    model: FederatedModel
    algorithm: Algorithm
    silos: Sequence[dict[str, Tensor]]
    seed: int
    compile: bool = False
    looks: int = 10  # so often predictions are looked at


class _Seeded(Protocol):
    @property
    def seeds(self) -> int: ...


#: A part of an experiment, which says over how many seeds it is fitted.
Sized = TypeVar("Sized", bound=_Seeded)
#: Scores of a posterior, from the problem, q(Z_G) and theta, and each silo's own latents.
Look = Callable[[Problem, Posterior, Mapping[str, LocalPosterior]], Row]


def run(job: Job, look: Look, request: Request) -> Row:
    """`job.what`, the scores at the end, and what the fit cost. Where the request keeps what has been done, a fit that
    was stopped goes on from its last checkpoint, and one that has ended is not made again."""
    options = (job.what, job.algorithm, len(job.silos))
    said = ", ".join(f"{key} {value}" for key, value in job.what.items())
    found: Row = request.once(said, options, partial(_fitted, job, look, request.folder(options), request.tell))
    return found


def _fitted(job: Job, look: Look, folder: Path | None, tell: Tell) -> Row:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    watched = Watched(
        job.model, job.silos, job.algorithm, job.seed, folder, dtype=torch.float32, compile=job.compile, threads=1
    )
    server, engine = watched.run.server, watched.run.engine

    def scores() -> Row:
        engine.silo_states(server.state.accepted)  # silos learn which of their states count
        posterior = server.program.posterior(server.state.algorithm)
        local = {n: LocalPosterior(silo, server.problem, posterior) for n, silo in engine.silos.items()}
        with torch.no_grad(), threads(1):
            return look(server.problem, posterior, local)

    watched.drain(scores, job.looks, tell)
    costs = watched.costs()
    ended = {"rounds": server.rounds, "exchanges": engine.exchanges, **costs, "curve": watched.curve}
    return {**job.what, **scores(), **ended}


def each_seed(sizes: Sequence[Sized]) -> Iterator[tuple[Sized, int]]:
    """Size and seed, all sizes of one seed before the next: a run that is stopped has whole tables."""
    for seed in range(max(size.seeds for size in sizes)):
        yield from ((size, seed) for size in sizes if seed < size.seeds)


def summary(rows: Sequence[Row], by: Sequence[str]) -> list[Row]:
    """A line for each setting and method, in the order in which they were run: means and sds over seeds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    return [
        {
            **dict(zip(by, key, strict=True)),
            "test": spread([row["test"] for row in group]),
            "train": spread([row["train"] for row in group]),
            "rounds": group[0]["rounds"],
            "bytes": group[0]["bytes_up"] + group[0]["bytes_down"],
            "seconds": round(sum(row["seconds"] for row in group), 1),
        }
        for key, group in groups.items()
    ]


# ----
# The lines of multinomial-mnist and hbnn-mnist for a terminal, and their plot: the paper's tables beside ours

_COLOURS = (
    "#2563eb", "#059669", "#d97706", "#dc2626", "#7c3aed", "#6b7280", "#0891b2", "#be185d", "#65a30d",
)  # fmt: skip


def table(content: Row) -> str:
    """A line a setting and method: test accuracy over seeds, the paper's beside it, rounds and bytes."""
    width = max(len(line["setting"]) for line in content["lines"]) + 2
    room = max(len(line["method"]) for line in content["lines"])
    lines = [
        f"{'setting':<{width}}{'method':<{room}}{'test, %':>15}{'paper':>8}{'train, %':>10}{'paper':>8}{'rounds':>8}"
        f"{'MB a silo':>11}{'seconds':>9}"
    ]
    for line in content["lines"]:
        test, train, paper = line["test"], line["train"], line["paper"]
        spread = f" ({100 * test['sd']:.1f})" if test["seeds"] > 1 else ""
        found = f"{100 * test['mean']:.1f}{spread}"
        theirs = [f"{paper[key]:.1f}" if key in paper else "" for key in ("test", "train")]
        lines.append(
            f"{line['setting']:<{width}}{line['method']:<{room}}{found:>15}{theirs[0]:>8}{100 * train['mean']:>10.1f}"
            f"{theirs[1]:>8}{line['rounds']:>8}{line['bytes'] / 1e6:>11.1f}{line['seconds']:>9.0f}"
        )
    seeds = sorted({line["test"]["seeds"] for line in content["lines"]})
    over = f"mean (sd) over {' or '.join(map(str, seeds))} fits" if seeds != [1] else "one fit each"
    lines.append(f"{over}; {content['seconds']} s on {content['machine']}")
    lines.append(content["setting"])
    return "\n".join(lines)


def plot(content: Row) -> bytes:
    """For each setting test accuracy by method, the paper's as a line across the bar; beside it accuracy by round."""
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(line["setting"] for line in content["lines"]))
    most = max(sum(line["setting"] == setting for line in content["lines"]) for setting in settings)
    figure = Figure(figsize=(max(10, 1.6 * most), 3.4 * len(settings)), layout="constrained")
    for (left, right), setting in zip(figure.subplots(len(settings), 2, squeeze=False), settings, strict=True):
        lines = [line for line in content["lines"] if line["setting"] == setting]
        colours = {line["method"]: _COLOURS[k % len(_COLOURS)] for k, line in enumerate(lines)}
        for k, line in enumerate(lines):
            test = line["test"]
            left.bar(k, 100 * test["mean"], yerr=100 * test["sd"], color=colours[line["method"]], width=0.7)
            if "test" in line["paper"]:
                left.hlines(line["paper"]["test"], k - 0.45, k + 0.45, color="#111827", lw=1.5)
        lows = [min(100 * line["test"]["mean"], line["paper"].get("test", 100.0)) for line in lines]
        left.set_xticks(range(len(lines)), [line["method"].replace(", ", "\n") for line in lines], fontsize=6.5)
        left.set(ylabel="test accuracy, %", ylim=(max(0.0, min(lows) - 4), 100), title=f"{setting}; black: the paper's")
        for row in content["rows"]:
            if row["setting"] == setting and len(row["curve"]) > 1 and "silo" not in row:
                at = [point["round"] for point in row["curve"]]
                right.plot(at, [100 * point["test"] for point in row["curve"]], color=colours[row["method"]], lw=1.2)
        right.set(xlabel="round", ylabel="test accuracy, %", xscale="log", title=setting)
    return as_png(figure)
