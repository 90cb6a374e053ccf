"""UCI Credit approval: is an application for a credit card granted? 690 applications, all names made meaningless.

Data: J. R. Quinlan, UCI Machine Learning Repository. Reads `crx.data` as published. Features are built from the file's
documentation and fixed units alone, never from its rows: a scale that was estimated from the records would be a release
of its own. One column for each documented category, one for a missing value.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.logistic import MODEL

_CATEGORIES = {
    "A1": "b a",
    "A4": "u y l t",
    "A5": "g p gg",
    "A6": "c d cc i j k m r q w x e aa ff",
    "A7": "v h bb j n z dd ff o",
    "A9": "t f",
    "A10": "t f",
    "A12": "t f",
    "A13": "g p s",
}
#: (centre, unit) of each number; the last four are taken as log(1 + x) first. A missing number is put at its centre.
_NUMBERS = {
    "A2": (30.0, 12.0),
    "A3": (5.0, 5.0),
    "A8": (1.0, 1.0),
    "A11": (1.0, 1.0),
    "A14": (5.0, 2.0),
    "A15": (3.0, 3.0),
}
_LOGARITHMS = ("A8", "A11", "A14", "A15")
COLUMNS = tuple(f"A{i}" for i in range(1, 16))
_MISSING = "?"
_FILE = "crx.data"


def _levels(column: str) -> list[str]:
    return [*_CATEGORIES[column].split(), _MISSING]


def feature_names() -> list[str]:
    """Names of the columns of `x`, the intercept first."""
    names = ["intercept"]
    for column in COLUMNS:
        if column in _NUMBERS:
            names += [column, f"{column}={_MISSING}"]
        else:
            names += [f"{column}={level}" for level in _levels(column)]
    return names


def load(data_dir: Path | None = None) -> Dataset:
    """`x` (690, 63) float64 and `y` (690,), 1 for "+"."""
    path = data_folder("uci_credit_approval", data_dir) / _FILE
    where = {name: i for i, name in enumerate(feature_names())}
    rows, labels = [], []
    for line, row in _rows(path):
        features = torch.zeros(len(where), dtype=torch.float64)
        features[where["intercept"]] = 1.0
        try:
            labels.append({"+": 1.0, "-": 0.0}[row[-1]])
            for column, text in zip(COLUMNS, row, strict=False):
                if column not in _NUMBERS or text == _MISSING:
                    features[where[f"{column}={text}"]] = 1.0
                else:
                    number = math.log1p(float(text)) if column in _LOGARITHMS else float(text)
                    centre, unit = _NUMBERS[column]
                    features[where[column]] = (number - centre) / unit
        except (KeyError, ValueError):
            raise InputError(f"{path}, line {line}: not a record of the documented form") from None
        rows.append(features)
    if not rows:
        raise InputError(f"'{path}' holds no records")
    return Dataset({"x": torch.stack(rows), "y": torch.tensor(labels, dtype=torch.float64)}, torch.arange(len(labels)))


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    if not path.is_file():
        raise InputError(f"no file '{path}'")
    with path.open(newline="", encoding="ascii") as file:
        for line, row in enumerate(csv.reader(file, skipinitialspace=True), 1):
            if row:
                if len(row) != len(COLUMNS) + 1:
                    raise InputError(f"{path}, line {line}: {len(row)} columns where {len(COLUMNS) + 1} are documented")
                yield line, row


PROGRAM = Program(
    name="credit",
    description="logistic regression of approval on 15 answers (UCI Credit approval, 690 applications)",
    model=MODEL,
    load=load,
)
