"""Records of documented columns as numbers: what the loaders of UCI's tables share.

Features are built from a file's documentation alone, never from its rows: fixed units for numbers, one column for each
documented category and one for a missing value. A scale that was estimated from the records would be a release of its
own.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyro
import torch
from pyro.distributions import Bernoulli, Normal
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.base import Dataset


@dataclass(frozen=True)
class Design:
    """The columns of a file, its label last, and what becomes of them.

    columns: names in the order of the file. categories: of a column, its levels, separated by spaces. numbers: (centre,
    unit) of a column. logarithms: numbers taken as sign(v) log(1 + |v|) first. missing: what a missing value is,
    by column, which has a feature of its own; a missing number is put at its centre besides. labels: the label's texts
    and their values.
    """

    columns: Sequence[str]
    categories: Mapping[str, str]
    numbers: Mapping[str, tuple[float, float]]
    labels: Mapping[str, float]
    logarithms: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def feature_names(self) -> list[str]:
        """Names of the columns of `x`, the intercept first."""
        names = ["intercept"]
        for column in self.columns:
            levels = [self.missing[column]] if column in self.missing else []
            if column in self.numbers:
                names.append(column)
            else:
                levels = [*self.categories[column].split(), *levels]
            names += [f"{column}={level}" for level in levels]
        return names

    def load(self, *paths: Path) -> Dataset:
        """`x` (N, features) float64 and `y` (N,) of the files' records in order. Raises InputError, naming the line."""
        where = {name: i for i, name in enumerate(self.feature_names)}
        positions, values, lengths, labels = [], [], [], []
        for path in paths:
            for line, row in self._rows(path):
                try:
                    features = [(where[name], value) for name, value in self._features(row)]
                    labels.append(self.labels[row[-1]])
                except (KeyError, ValueError):
                    raise InputError(f"{path}, line {line}: not a record of the documented form") from None
                lengths.append(len(features))
                positions += [at for at, _ in features]
                values += [value for _, value in features]
        if not labels:
            raise InputError(f"'{paths[-1]}' holds no records")
        x = torch.zeros(len(labels), len(where), dtype=torch.float64)
        records = torch.repeat_interleave(torch.arange(len(labels)), torch.tensor(lengths))
        x[records, torch.tensor(positions)] = torch.tensor(values, dtype=torch.float64)
        y = torch.tensor(labels, dtype=torch.float64)
        return Dataset({"x": x, "y": y}, torch.arange(len(labels)))

    def _features(self, row: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Names and values of what is not zero. Raises ValueError for a number that is none."""
        yield "intercept", 1.0
        for column, text in zip(self.columns, row, strict=False):
            if column not in self.numbers or text == self.missing.get(column):
                yield f"{column}={text}", 1.0
                continue
            number = float(text)
            if not math.isfinite(number):
                raise ValueError(text)
            if column in self.logarithms:
                number = math.copysign(math.log1p(abs(number)), number)
            centre, unit = self.numbers[column]
            yield column, (number - centre) / unit

    def _rows(self, path: Path) -> Iterator[tuple[int, list[str]]]:
        """Line numbers and fields; empty lines, and comments after "|", are passed over."""
        if not path.is_file():
            raise InputError(f"no file '{path}'")
        with path.open(newline="", encoding="ascii") as file:
            for line, row in enumerate(csv.reader(file, skipinitialspace=True), 1):
                if not row or row[0].startswith("|"):
                    continue
                if len(row) != len(self.columns) + 1:
                    raise InputError(
                        f"{path}, line {line}: {len(row)} columns where {len(self.columns) + 1} are documented"
                    )
                yield line, row


# ---- Bayesian logistic regression of a binary response on a table of features ----


def logistic_regression(x: Tensor, y: Tensor) -> None:
    """The model for N records: `x` (N, D), a column of ones included, `y` (N,) 0 or 1. Global site `weights` (D,)."""
    weights = pyro.sample("weights", Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("record", len(y)):
        pyro.sample("y", Bernoulli(logits=x @ weights), obs=y)


MODEL = FederatedModel(logistic_regression, record_plate="record")
