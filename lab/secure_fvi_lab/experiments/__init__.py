"""Experiments of the papers, and of the issues that asked for numbers, one a module; `secure-fvi reproduce`.

A module has `reproduce(request)`, which returns the content of NAME.json and the plot as PNG, and `table(content)`, its
lines for a terminal.
"""

from __future__ import annotations

import hashlib
import io
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from secure_fvi.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What `secure-fvi reproduce` knows, and the module of each.
REPRODUCTIONS = {
    "fedvi-cifar100": "secure_fvi_lab.experiments.fedvi_cifar100",
    "fedvi-tau": "secure_fvi_lab.experiments.fedvi_tau",
    "fedvi-writers": "secure_fvi_lab.experiments.fedvi_writers",
    "floors": "secure_fvi_lab.experiments.floors",
    "hbnn-mnist": "secure_fvi_lab.experiments.hbnn_mnist",
    "heart": "secure_fvi_lab.experiments.heart",
    "multinomial-mnist": "secure_fvi_lab.experiments.multinomial_mnist",
    "prodlda-20news": "secure_fvi_lab.experiments.prodlda_20news",
    "pvi-mnist": "secure_fvi_lab.experiments.pvi_mnist",
    "pvi-mnist-shards": "secure_fvi_lab.experiments.pvi_mnist_shards",
    "pvi-six-cities": "secure_fvi_lab.experiments.pvi_six_cities",
    "pvi-uci": "secure_fvi_lab.experiments.pvi_uci",
    "sfvi-six-cities": "secure_fvi_lab.experiments.six_cities",
    "sfvi-warm-start": "secure_fvi_lab.experiments.sfvi_warm_start",
    "vertical-adult": "secure_fvi_lab.experiments.vertical_adult",
    "vertical-logistic": "secure_fvi_lab.experiments.vertical_logistic",
    "vertical-poisson": "secure_fvi_lab.experiments.vertical_poisson",
}


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


def as_png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()
