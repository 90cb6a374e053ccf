"""Experiments of the papers, and of the issues that asked for numbers; `secure-fvi reproduce`.

A module has `EXPERIMENTS`, by name: what makes the content of NAME.json and the plot, and what makes lines of it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from secure_fvi.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What `secure-fvi reproduce` knows, and the module of each.
REPRODUCTIONS = {
    "fedvi-tau": "fedvi",
    "fedvi-writers": "fedvi",
    "floors": "floors",
    "hbnn-mnist": "sfvi_mnist",
    "heart": "heart",
    "multinomial-mnist": "sfvi_mnist",
    "prodlda-20news": "prodlda_20news",
    "pvi-mnist": "pvi_mnist",
    "pvi-mnist-shards": "pvi_mnist",
    "pvi-six-cities": "six_cities",
    "pvi-uci": "pvi_uci",
    "sfvi-six-cities": "six_cities",
    "sfvi-warm-start": "six_cities",
    "vertical-adult": "vertical_adult",
    "vertical-logistic": "vertical_logistic",
    "vertical-poisson": "vertical_poisson",
}

Row = dict[str, Any]
Tell = Callable[[str], None]


class Request(NamedTuple):
    """What an experiment is run with."""

    quick: bool  # fewer repeats, less exact references
    data: Path | None  # folder of downloaded data sets, for experiments whose data are not shipped
    tell: Tell  # is told what comes next
    keep: Path | None = None  # folder for what an experiment resumes from when it was stopped; None: it begins again

    def once(self, what: str, options: object, make: Callable[[], Any]) -> Any:
        """`make()`, a value that JSON holds, or what a run that was stopped has kept of it. `what`, which the user is
        told, and `options`, by their repr, distinguish the value from all others of the experiment."""
        key = repr((self.quick, what, options))
        file = None if self.keep is None else self.keep / f"{_digest(key)}.json"
        if file is not None and file.is_file():
            return json.loads(file.read_text())["value"]
        self.tell(what)
        made = json.dumps({"key": key, "value": make()})
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, made.encode())
        return json.loads(made)["value"]  # of the same types, kept or not: JSON has no tuples

    def folder(self, options: object) -> Path | None:
        """Where checkpoints of fits with these options are kept, if anything is."""
        return None if self.keep is None else self.keep / _digest(repr(options))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """What an experiment says of a figure over its seeds: mean, sd (0 of a single value) and how many there are."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "sd": sd, "seeds": len(values)}


class Experiment(NamedTuple):
    """measure: all of NAME.json but what `made` adds, and the plot. table: lines of the content for a terminal."""

    measure: Callable[[Request], tuple[Row, Figure]]
    table: Callable[[Row], str]


def experiment(name: str) -> Experiment:
    """The one called `name`, of REPRODUCTIONS."""
    found: Experiment = importlib.import_module(f"{__name__}.{REPRODUCTIONS[name]}").EXPERIMENTS[name]
    return found


def made(name: str, request: Request) -> tuple[Row, Figure]:
    """The content of NAME.json, and the plot. Raises InputError where --data lacks what the experiment reads."""
    from secure_fvi_lab.machine import commit, machine

    began = time.monotonic()
    content, figure = experiment(name).measure(request)
    seconds = {"seconds_since_start": round(time.monotonic() - began, 1)}
    about = {"machine": machine(), "quick": request.quick, "commit": commit()}
    return {"name": name, "seconds": seconds["seconds_since_start"], **content, **seconds, **about}, figure


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """A figure of so many inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns)


def legend(target: Any, axes: Any, **options: Any) -> None:
    """A legend of what is drawn in `axes` in which every label stands once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    target.legend(once.values(), once.keys(), frameon=False, fontsize=8, **options)


def lines_of(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A table for a terminal: columns as wide as they must be, the first `left` to the left, numbers to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if k < left else ">" for k in range(len(widths))]
    return ["  ".join(f"{cell:{s}{w}}" for cell, s, w in zip(row, sides, widths, strict=True)) for row in cells]


def with_sd(found: Row, scale: float = 1.0, digits: int = 1) -> str:
    """Mean (sd) of a `spread`."""
    return f"{scale * found['mean']:.{digits}f} ({scale * found['sd']:.{digits}f})"
